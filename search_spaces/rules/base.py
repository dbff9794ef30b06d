"""What a rule is, what it returns, and the helpers for its message."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from search_spaces.columns import Columns
from search_spaces.whole import divisors


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule or limit.

    Attributes:
        name: The rule's name, stable over versions; also the name of the Optuna constraint.
        amount: How far over the rule: <= 0 is slack, > 0 infeasible.
        message: One sentence with the values and what would be legal.
    """

    name: str
    amount: float
    message: str


class Finding(NamedTuple):
    """What a rule says of every configuration of a table.

    Attributes:
        amount: Per row how far over the rule, > 0 where it is broken.
        text: Message for one row, a format string over `values`.
        values: What the message names: arrays (the row's item is shown), plain values, or functions called only for a message.
    """

    amount: npt.NDArray[Any]
    text: str
    values: dict[str, Any]

    @property
    def broken(self) -> npt.NDArray[np.bool_]:
        """Where the rule is broken."""
        return np.asarray(self.amount > 0)

    def violation(self, name: str) -> Violation | None:
        """The violation of the only row of a table of one row."""
        amount = float(self.amount.reshape(-1)[0])
        if amount <= 0:
            return None
        shown = {key: _shown(value) for key, value in self.values.items()}
        return Violation(name, amount, self.text.format(**shown))


Rule = Callable[[Columns], Finding]


def finding(amount: Any, text: str, **values: Any) -> Finding:
    """A rule's answer. `amount` is a mask or whole numbers, > 0 where the rule is broken."""
    return Finding(np.atleast_1d(np.asarray(amount)), text, values)


def always(condition: bool, text: str, **values: Any) -> Finding:
    """The answer of a rule on the model or workload alone, the same for every configuration."""
    return finding(np.array([condition]), text, **values)


def near_divisors(total: Any, value: Any) -> Callable[[], str]:
    """The divisors of `total` nearest to `value` on either side, for a message."""

    def text() -> str:
        whole, wanted = int(_shown(total)), int(_shown(value))
        return near(wanted, divisors(abs(whole)))

    return text


def near_multiples(value: Any, unit: Any) -> Callable[[], str]:
    """The multiples of `unit` next to `value`, for a message."""

    def text() -> str:
        number, step = int(_shown(value)), int(_shown(unit))
        return near(number, (number // step * step or step, (number // step + 1) * step))

    return text


def near_multiples_or_divisors(total: int, value: Any) -> Callable[[], str]:
    """The numbers next to `value` that divide `total` or are multiples of it, for a message."""

    def text() -> str:
        wanted = int(_shown(value))
        below = wanted // total * total
        return near(wanted, (*divisors(total), *(n for n in (below - total, below, below + total) if n > 0)))

    return text


def near(value: int, legal: Iterable[int]) -> str:
    """The legal numbers next to `value`, below and above."""
    numbers = sorted(set(legal))
    below = [n for n in numbers if n < value][-1:]
    above = [n for n in numbers if n > value][:1]
    return " or ".join(str(n) for n in below + above) or "none"


def _shown(value: Any) -> Any:
    """A value of a message as plain text or number."""
    if callable(value):
        return value()
    if isinstance(value, np.ndarray):
        return value.reshape(-1)[0].item()
    return value
