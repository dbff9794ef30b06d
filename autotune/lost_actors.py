"""What it says of a trial that Ray has lost one of the actors that ran it."""

from __future__ import annotations

from collections.abc import Sequence

from ray.exceptions import OutOfMemoryError, RayError

from launchers.outcome import Outcome, Verdict


def verdict_of_loss(error: RayError, what: str) -> Verdict:
    """OOM where Ray's memory monitor ended the actor, else LOST.

    The monitor ends actors when a node's memory is nearly full; it does not know that ranks hold it, which are no workers of Ray's.

    Args:
        error: Why the actor does not answer.
        what: What that means, in a few words.
    """
    if isinstance(error, OutOfMemoryError):
        return Verdict(Outcome.OOM, f"the host ran out of memory (not the GPU), and Ray ended {what}: {first_line(error)}")
    return Verdict(Outcome.LOST, f"{what} died or did not answer: {first_line(error)}")


def names_a_node(error: RayError, node_ids: Sequence[str]) -> bool:
    """Whether memory ran out on one of these nodes."""
    return isinstance(error, OutOfMemoryError) and any(node_id in str(error) for node_id in node_ids)


def first_line(error: Exception) -> str:
    """The first line of a message, or what kind of error it is."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
