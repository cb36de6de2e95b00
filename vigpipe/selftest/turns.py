"""Let ways to run a model take turns, each in its own process, and compare them turn by turn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from vigpipe.messages import one_line
from vigpipe.selftest.way import Mode, Prepared, Way
from vigpipe.selftest.worker import OutOfTime, Worker, WorkerError

MOST_TURN_SECONDS = 60.0
GivenUp = Literal["failed", "skipped"]


@dataclass
class Entry:
    """One way to run a model, in the course of the measurement."""

    way: Way
    mode: Mode
    worker: Worker | None = None  # its process, once it is started
    prepared: Prepared | None = None  # what is known after its first steps
    seconds: list[float] = field(default_factory=list)  # a step's, in every turn
    outcome: Literal["measured"] | GivenUp = "measured"
    note: str = ""  # why it has been given up

    def give_up(self, outcome: GivenUp, why: str) -> None:
        self.outcome, self.note = outcome, one_line(why)
        self.end()

    def end(self) -> None:
        if self.worker is not None:
            self.worker.end()


def take_turns(
    entries: Sequence[Entry], most: int, has_time: Callable[[], bool] = lambda: True
) -> None:
    """Let the prepared ways take turns in `most` rounds at most; one that fails is given up."""
    for _ in range(most):
        for entry in [e for e in entries if e.outcome == "measured"]:
            assert entry.worker is not None
            try:
                entry.seconds.append(entry.worker.ask("turn", seconds=MOST_TURN_SECONDS))
            except (OutOfTime, WorkerError) as error:
                entry.give_up("failed", str(error))
        if not has_time():
            break


def best_reference(seconds: Mapping[Way, Sequence[float]]) -> Way | None:
    """Return the way of the reference with the fastest turns; None if there is none."""
    references = [way for way in seconds if way.formulation == "reference"]
    return min(references, key=lambda way: median(seconds[way]), default=None)


def ratios(seconds: Mapping[Way, Sequence[float]], reference: Way, way: Way) -> list[float]:
    """Tell how many times faster a way is than another one, in every turn that both took."""
    both = zip(seconds[reference], seconds[way], strict=False)
    return [of_reference / own for of_reference, own in both]
