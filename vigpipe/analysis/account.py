"""Account for the time of a step: where it goes on every rank."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vigpipe.parallel.layout import Layout
from vigpipe.spans import COMPUTE, KINDS, WAITING
from vigpipe.timing.partial import full_batches
from vigpipe.timing.recorder import Row

# What the time of a step is divided into. Forwards and backwards together are "compute"; what no
# span covers is "unaccounted".
PARTS = ("compute", *(kind for kind in KINDS if kind not in COMPUTE), "unaccounted")


@dataclass(frozen=True)
class Account:
    """Means over one rank's timed steps: those with full batches, or all of them without any."""

    rank: int
    replica: int
    stages: tuple[int, ...]
    step_seconds: float  # measured apart from its spans; the sum of `seconds`
    seconds: Mapping[str, float]  # by PARTS

    @property
    def waiting(self) -> float:
        """Seconds of waiting for input, for gradients and for sent tensors to leave."""
        return sum(self.seconds[part] for part in (*WAITING, "send"))

    def as_table(self) -> dict[str, object]:
        """Return the account as an entry of summary.json."""
        return {
            "rank": self.rank,
            "replica": self.replica,
            "stages": list(self.stages),
            "step_seconds": self.step_seconds,
            **self.seconds,
        }


def make_accounts(rows: Sequence[Row], layout: Layout) -> list[Account]:
    """Make every rank's account of the training steps from the rows of timing.csv."""
    totals: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    steps: dict[int, set[int]] = defaultdict(set)
    for row in full_batches(rows):
        if row.phase == "train" and (row.name == "step" or row.name in KINDS):
            totals[row.rank][row.name] += row.seconds
            steps[row.rank].add(row.step)
    accounts: list[Account] = []
    for rank, rank_totals in sorted(totals.items()):
        step_seconds = rank_totals["step"] / len(steps[rank])
        kinds = {kind: rank_totals[kind] / len(steps[rank]) for kind in KINDS}
        seconds: dict[str, float] = {
            "compute": sum(kinds[kind] for kind in COMPUTE),
            **{kind: kinds[kind] for kind in KINDS if kind not in COMPUTE},
            "unaccounted": step_seconds - sum(kinds.values()),
        }
        replica, stages = layout.replica_index(rank), layout.stages_of(rank)
        accounts.append(Account(rank, replica, stages, step_seconds, seconds))
    return accounts
