"""The rows that the parts of a self-test make, and how much of the time they may take."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from vigpipe.messages import one_line
from vigpipe.selftest.worker import OutOfTime

if TYPE_CHECKING:
    from vigpipe.selftest.machine import Machine

# passed and failed are answers to a question, measured is a number without a right answer, and
# skipped means that this machine or the budget has no room for it.
Outcome = Literal["passed", "failed", "measured", "skipped"]


@dataclass(frozen=True)
class Row:
    """One line of a part: what was tried, and how it ended."""

    what: str
    outcome: Outcome
    values: Mapping[str, Any] = field(default_factory=dict)  # times in seconds, sizes in bytes
    note: str = ""  # why it failed or was skipped, in one sentence


class Budget:
    """An amount of time that is being used up; `clock` tells the time in seconds."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._end - self._clock())

    def part(self, fraction: float) -> "Budget":
        return Budget(fraction * self.left, self._clock)


@dataclass(frozen=True)
class Part:
    """A part of the self-test."""

    name: str  # its word in --parts and in the JSON
    title: str
    weight: float  # by these the time that is left is divided among this part and the later ones
    measure: Callable[["Machine", Budget], Iterator[Row]]
    section: Callable[[Sequence[Row]], Iterator[str]]  # makes the HTML below the title


def attempt(
    what: str, budget: Budget, about: float, most: float, work: Callable[[float], Sequence[Row]]
) -> Sequence[Row]:
    """Return the rows of work that is given some seconds, or one that says why there are none.

    With less than `about` seconds it is not begun; after `most` it counts as hanging. If the
    budget runs out, that row is skipped; after any other error, failed.
    """
    left = budget.left
    if left < about:
        note = f"not begun: of its share of the budget {left:.0f} s were left, and it may take "
        return [Row(what, "skipped", note=f"{note}{about:.0f} s")]
    try:
        return work(min(left, most))
    except OutOfTime:
        if left > most:
            return [Row(what, "failed", note=f"did not end within {most:.0f} s")]
        return [Row(what, "skipped", note=f"cut off after {left:.0f} s: its budget was used up")]
    except Exception as error:
        return [failed(what, error)]


def failed(what: str, error: Exception) -> Row:
    """Make the row of what an unexpected error has ended."""
    return Row(what, "failed", note=one_line(f"{type(error).__name__}: {error}"))
