"""Let ways to run a model take turns, each in its own process, and compare them turn by turn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Literal

from vigpipe.messages import one_line
from vigpipe.selftest.way import Mode, Prepared, Way
from vigpipe.selftest.worker import OutOfTime, Worker, WorkerError

MOST_TURN_SECONDS = 60.0
FINALISTS = 2
GivenUp = Literal["failed", "skipped"]
# Turns whose ratios spread more are no measurement: the span of their middle half, by their median.
WIDEST = 0.2


@dataclass
class Entry:
    """One way to run a model, in the course of the measurement.

    Attributes:
        way: the way.
        mode: what it does.
        worker: its process; None before it is started.
        prepared: what is known after its first steps; None before.
        seconds: a step's, in every turn.
        outcome: failed or skipped if it has been given up.
        note: why it was given up.
        has_left: whether it takes no more turns, since other ways of the reference are faster.
    """

    way: Way
    mode: Mode
    worker: Worker | None = None
    prepared: Prepared | None = None
    seconds: list[float] = field(default_factory=list)
    outcome: Literal["measured"] | GivenUp = "measured"
    note: str = ""
    has_left: bool = False

    def give_up(self, outcome: GivenUp, why: str) -> None:
        """End its process, and keep why."""
        self.outcome, self.note = outcome, one_line(why)
        self.end()

    def end(self) -> None:
        """End its process."""
        if self.worker is not None:
            self.worker.end()


def take_turns(
    entries: Sequence[Entry],
    most: int,
    has_time: Callable[[], bool] = lambda: True,
    qualifying: int | None = None,
) -> None:
    """Let the prepared ways run in turn, then end their processes.

    Args:
        entries: the ways; one that fails is given up, and the others go on.
        most: number of rounds.
        has_time: whether there is time for another round; asked after each.
        qualifying: rounds after which only the FINALISTS fastest of the reference's ways go on, so
            that less time passes between those that are compared; None if all of them do.
    """
    for number in range(most):
        if number == qualifying:
            _leave_finalists(entries)
        going_on = [e for e in entries if e.outcome == "measured" and not e.has_left]
        for entry in going_on:
            assert entry.worker is not None
            try:
                entry.seconds.append(entry.worker.ask("turn", seconds=MOST_TURN_SECONDS))
            except (OutOfTime, WorkerError) as error:
                entry.give_up("failed", str(error))
        if not has_time():
            break
    for entry in entries:
        entry.end()


def _leave_finalists(entries: Sequence[Entry]) -> None:
    measured = [e for e in entries if e.outcome == "measured" and e.way.formulation == "reference"]
    for entry in sorted(measured, key=lambda e: median(e.seconds))[FINALISTS:]:
        entry.has_left = True
        entry.end()


def best_reference(seconds: Mapping[Way, Sequence[float]]) -> Way | None:
    """Return the fastest of the reference's ways that took all turns; None if there is none.

    `seconds` has those of every turn of every way.
    """
    references = {way: turns for way, turns in seconds.items() if way.formulation == "reference"}
    most = max(map(len, references.values()), default=0)
    finalists = {way: turns for way, turns in references.items() if len(turns) == most}
    return min(finalists, key=lambda way: median(finalists[way]), default=None)


@dataclass(frozen=True)
class Ratio:
    """How many times faster one way is than another one, turn by turn.

    Attributes:
        median: over all turns.
        least: the smallest of them.
        most: the largest of them.
        is_measurable: whether the turns agree: their middle half spans at most WIDEST.
    """

    median: float
    least: float
    most: float
    is_measurable: bool

    def __str__(self) -> str:
        spread = f"{self.least:.2f} – {self.most:.2f}"
        if not self.is_measurable:
            return f"not measurable here ({spread})"
        return f"{self.median:.2f}× ({spread})"


def ratio(seconds: Mapping[Way, list[float]], reference: Way, way: Way) -> Ratio:
    """Compare a way with another one, turn by turn, in those that both took."""
    num_turns = min(len(seconds[reference]), len(seconds[way]))
    both = zip(seconds[reference][:num_turns], seconds[way][:num_turns], strict=True)
    ratios = [of_reference / own for of_reference, own in both]
    first, middle, third = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Ratio(median(ratios), min(ratios), max(ratios), third - first <= WIDEST * middle)
