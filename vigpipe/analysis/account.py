"""Where the time of a step goes on every rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vigpipe.parallel.layout import Layout
from vigpipe.spans import COMPUTE, KINDS, WAITING, Kind
from vigpipe.timing.recorder import Row


@dataclass(frozen=True)
class Account:
    """Where one rank's time goes: means over the timed training steps, in seconds.

    Attributes:
        rank: position in the world.
        replica: its replica.
        stages: of the plan, that it holds.
        step_seconds: from the step's first line to its last, by a clock of its own.
        kinds: seconds of every kind of span; forward and backward together are computing.
    """

    rank: int
    replica: int
    stages: tuple[int, ...]
    step_seconds: float
    kinds: Mapping[Kind, float]

    @property
    def compute(self) -> float:
        """Forwards, backwards and the loss."""
        return sum(self.kinds[kind] for kind in COMPUTE)

    @property
    def waiting(self) -> float:
        """For input, for gradients, and for what is sent to leave."""
        return sum(self.kinds[kind] for kind in (*WAITING, "send"))

    @property
    def unaccounted(self) -> float:
        """What the spans miss of the step."""
        return self.step_seconds - sum(self.kinds.values())

    def as_table(self) -> dict[str, object]:
        """For summary.json."""
        named = {kind: self.kinds[kind] for kind in KINDS if kind not in COMPUTE}
        return {
            "rank": self.rank,
            "replica": self.replica,
            "stages": list(self.stages),
            "step_seconds": self.step_seconds,
            "compute": self.compute,
            **named,
            "unaccounted": self.unaccounted,
        }


def account(rows: Sequence[Row], layout: Layout) -> list[Account]:
    """Every rank's account, from the rows of timing.csv."""
    totals: dict[int, dict[str, float]] = {}
    steps: dict[int, set[int]] = {}
    for row in rows:
        if row.phase == "train" and (row.name == "step" or row.name in KINDS):
            own = totals.setdefault(row.rank, {})
            own[row.name] = own.get(row.name, 0.0) + row.seconds
            steps.setdefault(row.rank, set()).add(row.step)
    return [
        Account(
            rank,
            layout.replica_index(rank),
            layout.stages_of(rank),
            own["step"] / len(steps[rank]),
            {kind: own.get(kind, 0.0) / len(steps[rank]) for kind in KINDS},
        )
        for rank, own in sorted(totals.items())
    ]
