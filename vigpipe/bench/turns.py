"""Let ways to run a model take turns, each in its own process, and compare them turn by turn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Literal

from vigpipe.bench.side_by_side import Timings
from vigpipe.bench.way import Mode, Prepared, Way
from vigpipe.bench.worker import OutOfTime, Worker, WorkerError
from vigpipe.messages import one_line

MOST_TURN_SECONDS = 60.0
GivenUp = Literal["failed", "skipped"]
WIDEST = 0.2  # middle half of the turns' ratios, as a share of their median, that is a measurement


@dataclass
class Entry:
    """A way of a model in the course of the measurement.

    Attributes:
        way: the way.
        mode: what it does.
        worker: its process; None before it is started.
        prepared: what is known after its first steps; None before.
        seconds: of a step in every turn.
        outcome: failed or skipped if it has been given up.
        note: why.
    """

    way: Way
    mode: Mode
    worker: Worker | None = None
    prepared: Prepared | None = None
    seconds: list[float] = field(default_factory=list)
    outcome: Literal["measured"] | GivenUp = "measured"
    note: str = ""

    def give_up(self, outcome: GivenUp, why: str) -> None:
        """End its process, and keep why."""
        self.outcome, self.note = outcome, one_line(why)
        self.end()

    def end(self) -> None:
        """End its process."""
        if self.worker is not None:
            self.worker.end()


def take_turns(
    entries: Sequence[Entry], most: int, has_time: Callable[[], bool] = lambda: True
) -> None:
    """Let the prepared ways run in turn, then end their processes.

    Args:
        entries: the ways; one that fails is given up, and the others go on.
        most: number of rounds.
        has_time: whether there is time for another round; asked after each.
    """
    for _ in range(most):
        for entry in [entry for entry in entries if entry.outcome == "measured"]:
            assert entry.worker is not None
            try:
                entry.seconds.append(entry.worker.ask("turn", seconds=MOST_TURN_SECONDS))
            except (OutOfTime, WorkerError) as error:
                entry.give_up("failed", str(error))
        if not has_time():
            break
    for entry in entries:
        entry.end()


def best_reference(seconds: Mapping[Way, Sequence[float]]) -> Way | None:
    """Return the fastest way without vigpipe's formulation, by its median; None without any."""
    references = [way for way in seconds if way.formulation == "reference"]
    return min(references, key=lambda way: median(seconds[way]), default=None)


@dataclass(frozen=True)
class Ratio:
    """How many times faster a way is than another one.

    Attributes:
        median: of all turns.
        least: of all turns.
        most: of all turns.
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
    """Compare a way with another one, turn by turn."""
    by_name = {str(name): values for name, values in seconds.items()}
    ratios = Timings(by_name, str(reference)).ratios(str(way))
    first, middle, third = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Ratio(median(ratios), min(ratios), max(ratios), third - first <= WIDEST * middle)
