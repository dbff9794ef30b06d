"""GPU power limits as a trial's knob: set before it, and whatever happens put back to what was requested before.

Before a limit is changed its restore record is on disk. The agent puts limits back after a trial; where it cannot, the supervisor's
exit command does (`power_restore`), and where that died too, the next agent or `autotune doctor` on this node.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from autotune.telemetry import Gpu, PowerLimitError
from launchers.process_tree import boot_id, is_alive, read_process

log = logging.getLogger(__name__)
RESTORE_VARIABLE = "AUTOTUNE_RESTORE"
RESTORE_S = 10.0
_COMMAND_S = 10.0
_SAME_W = 1.0


@dataclass(frozen=True, slots=True)
class RestoreRecord:
    """What must be put back on one GPU, in a file of its own that is named by the GPU.

    Attributes:
        uuid: The GPU.
        vendor: "nvidia" or "amd".
        watts: The limit that was requested before; what was enforced may have been lower.
        command: The site's own command; empty = the vendor's library.
        boot: Boot of the machine: limits do not outlive it.
        owner: Number and start time of the agent that changed it.
    """

    uuid: str
    vendor: str
    watts: float
    command: str
    boot: str
    owner: tuple[int, int]


def restore_folder() -> Path:
    """Where this node keeps its restore records; they outlive a restart, as temporary files need not."""
    if given := os.environ.get(RESTORE_VARIABLE):
        return Path(given)
    root = Path("/var/tmp")
    return (root if os.access(root, os.W_OK) else Path(tempfile.gettempdir())) / f"autotune-{os.getuid()}" / "power-limits"


def read_records(folder: Path) -> list[RestoreRecord]:
    """The records of this boot; those of an earlier one are removed, and what cannot be read is named in the log."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            record = RestoreRecord(**{**data, "owner": tuple(data["owner"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("the restore record %s cannot be read: %s", path, error)
            continue
        if record.boot == boot_id():
            found.append(record)
        else:
            path.unlink(missing_ok=True)
    return found


class PowerLimits:
    """The power limits of a trial's GPUs; one call per package, whose dies share their watts."""

    def __init__(self, gpus: Sequence[Gpu], command: str = "", folder: Path | None = None) -> None:
        """Change nothing yet.

        Args:
            gpus: The trial's GPUs.
            command: The site's own command with `{gpu}` (index), `{uuid}` and `{watts}`; empty = the vendor's library.
            folder: Folder of the restore records; none = this node's.
        """
        self._gpus = tuple({gpu.info.package: gpu for gpu in reversed(gpus)}.values())[::-1]
        self._command = command
        self._folder = folder or restore_folder()

    def set(self, watts: float) -> None:
        """Request a limit on every GPU, each behind its restore record.

        Raises:
            PowerLimitError: where one of them does not take it; those before have it.
        """
        for gpu in self._gpus:
            self._write_record(gpu)
            request_limit(gpu, watts, self._command)

    def restore(self) -> list[str]:
        """Put back what the records say of these GPUs; what could not be put back, one phrase each."""
        uuids = {gpu.info.uuid for gpu in self._gpus}
        return restore_records([r for r in read_records(self._folder) if r.uuid in uuids], self._gpus, self._folder)

    def facts(self) -> dict[str, str]:
        """Requested and enforced limit of every GPU: the lowest of all that apply is enforced."""
        found = {}
        for gpu in self._gpus:
            for name, ask in (("requested", gpu.requested_power_limit_w), ("enforced", gpu.enforced_power_limit_w)):
                found[f"gpu{gpu.info.index}.power_limit_{name}_w"] = _watts_or_reason(ask)
        return found

    def exit_command(self) -> list[str]:
        """The command that puts the limits back in a process of its own."""
        root = str(Path(__file__).resolve().parents[1])
        program = "import sys; sys.path.insert(0, sys.argv.pop(1)); from autotune.power_restore import main; main()"
        return [sys.executable, "-c", program, root, str(self._folder), *(gpu.info.uuid for gpu in self._gpus)]

    def _write_record(self, gpu: Gpu) -> None:
        """The watts of an older record stay: what a trial requested is not what must come back."""
        uuid = gpu.info.uuid
        older = next((record for record in read_records(self._folder) if record.uuid == uuid), None)
        watts = older.watts if older else gpu.requested_power_limit_w()
        me = read_process(os.getpid())
        record = RestoreRecord(uuid, gpu.info.vendor, watts, self._command, boot_id(), me.key if me else (0, 0))
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{uuid}.json"
        partial = path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            json.dump(asdict(record), file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


def request_limit(gpu: Gpu, watts: float, command: str = "") -> None:
    """Request one GPU's limit, through the vendor's library or the site's command.

    Raises:
        PowerLimitError: where it is not taken.
    """
    if not command:
        gpu.set_power_limit_w(watts)
        return
    argv = shlex.split(command.format(gpu=gpu.info.index, uuid=gpu.info.uuid, watts=round(watts)))
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PowerLimitError(f"power_limit_command: {error}") from error
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise PowerLimitError(f"power_limit_command ended with {done.returncode}" + (f": {words[0]}" if words else ""))
    if abs((now_w := gpu.requested_power_limit_w()) - watts) > _SAME_W:
        raise PowerLimitError(
            f"power_limit_command ended well, but the limit of GPU {gpu.info.index} is {now_w:g} W, not {watts:g}"
        )


def restore_records(records: Sequence[RestoreRecord], gpus: Sequence[Gpu], folder: Path) -> list[str]:
    """Put limits back and remove the records of those that took it; what could not be put back, one phrase each."""
    by_uuid = {gpu.info.uuid: gpu for gpu in gpus}
    problems = []
    for record in records:
        gpu = by_uuid.get(record.uuid)
        try:
            if gpu is None:
                raise PowerLimitError("this node does not show it now")
            if abs(gpu.requested_power_limit_w() - record.watts) > _SAME_W:
                request_limit(gpu, record.watts, record.command)
        except PowerLimitError as error:
            problems.append(f"GPU {record.uuid} should get {record.watts:g} W back: {error}")
        else:
            (folder / f"{record.uuid}.json").unlink(missing_ok=True)
    return problems


def left_behind(folder: Path) -> list[RestoreRecord]:
    """Records whose agent has ended without putting the limits back."""
    return [record for record in read_records(folder) if not is_alive(record.owner)]


def _watts_or_reason(ask: Callable[[], float]) -> str:
    try:
        return f"{ask():g}"
    except PowerLimitError as error:
        return str(error)
