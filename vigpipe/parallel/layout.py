"""Map every rank to its stages and its replica.

Two replicas of three stages; one pipeline sits on neighbouring ranks:

                 stage 0   stage 1   stage 2
    replica 0    rank 0    rank 1    rank 2
    replica 1    rank 3    rank 4    rank 5

A team is the replicas that take every step together. By default all of them are one team. Where
replicas take steps of their own, each is a team, or those of a host are.
"""

import math
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from vigpipe.errors import InputError
from vigpipe.schedules import Schedule, check_degrees

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Layout:
    """The degrees of parallelism of a run, checked together.

    Attributes:
        pipeline_size: S, ranks of one pipeline.
        num_microbatches: M, micro-batches a replica cuts its share of a batch into.
        num_replicas: D, copies of the whole model.
        schedule: order in which a rank takes its forwards and backwards.
        virtual_stages: V, stages each rank holds; more than 1 only with a schedule in
            `vigpipe.schedules.VIRTUAL`.
        num_teams: number of teams, each of as many neighbouring replicas.

    Raises:
        InputError: a degree is below 1, or the schedule cannot run with these degrees.
    """

    pipeline_size: int = 1
    num_microbatches: int = 1
    num_replicas: int = 1
    schedule: Schedule = "gpipe"
    virtual_stages: int = 1
    num_teams: int = 1

    def __post_init__(self) -> None:
        assert self.num_replicas % self.num_teams == 0
        for flag, degree in (
            ("--stages", self.pipeline_size),
            ("--microbatches", self.num_microbatches),
            ("--dp", self.num_replicas),
            ("--virtual-stages", self.virtual_stages),
        ):
            if degree < 1:
                raise InputError(f"{flag} {degree}: must be at least 1")
        why_not = check_degrees(
            self.schedule, self.pipeline_size, self.virtual_stages, self.num_microbatches
        )
        if why_not is not None:
            raise InputError(why_not)

    @property
    def num_stages(self) -> int:
        """Number of stages of one pipeline, virtual ones counted: S * V."""
        return self.pipeline_size * self.virtual_stages

    @property
    def world_size(self) -> int:
        """Number of ranks: S * D."""
        return self.pipeline_size * self.num_replicas

    @property
    def team_size(self) -> int:
        """Number of replicas of a team."""
        return self.num_replicas // self.num_teams

    @property
    def one_team(self) -> "Layout":
        """The layout of a single team of this kind."""
        return replace(self, num_replicas=self.team_size, num_teams=1)

    def replica_index(self, rank: int) -> int:
        """Return the index of the replica that a rank belongs to."""
        return rank // self.pipeline_size

    def team_of(self, replica_index: int) -> tuple[int, int]:
        """Return the team that a replica belongs to, and its place among the team's replicas."""
        return divmod(replica_index, self.team_size)

    def pipeline_rank(self, rank: int) -> int:
        """Return the position of a rank in its pipeline."""
        return rank % self.pipeline_size

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the indices of the stages that a rank holds: every S-th, in order."""
        first = self.pipeline_rank(rank)
        return tuple(range(first, self.num_stages, self.pipeline_size))

    def check_world(self, world_size: int) -> None:
        """Raise InputError unless the number of ranks is S * D."""
        if world_size != self.world_size:
            raise InputError(
                f"{world_size} ranks were started, but --stages {self.pipeline_size} x "
                f"--dp {self.num_replicas} needs {self.world_size}; start {self.world_size} "
                "ranks or change the two options"
            )

    def __str__(self) -> str:
        virtual = f" ({self.virtual_stages} each)" if self.virtual_stages > 1 else ""
        return (
            f"{_counted(self.num_replicas, 'replica')} × {_counted(self.pipeline_size, 'stage')}"
            f"{virtual}, {_counted(self.num_microbatches, 'micro-batch')}, {self.schedule}"
        )


def _counted(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"


class Groups(NamedTuple):
    """The process groups of a rank; None where it is alone.

    Attributes:
        pipeline: the ranks of its pipeline.
        replicas: the ranks that hold the same stages, of all replicas.
        summed: of these, the ones in its team, which add their gradients up.
        between: of these, the ones with its place in each team.
        team: all ranks of its team; also None if they are all of the run.
    """

    pipeline: "ProcessGroup | None" = None
    replicas: "ProcessGroup | None" = None
    summed: "ProcessGroup | None" = None
    between: "ProcessGroup | None" = None
    team: "ProcessGroup | None" = None


def make_groups(layout: Layout, timeout_seconds: float) -> Groups:
    """Make the process groups of this rank; all ranks call this together.

    The groups of torch's `init_device_mesh` would wait half an hour for a silent peer.

    Args:
        layout: the degrees.
        timeout_seconds: time after which a collective or a message in these groups gives up.
    """
    import numpy as np
    import torch.distributed as dist

    shape = layout.num_teams, layout.team_size, layout.pipeline_size
    grid = np.arange(layout.world_size).reshape(shape)
    timeout = timedelta(seconds=timeout_seconds)
    made: dict[str, Any] = {}  # every grouping of the ranks is made once

    def make(*axes: int) -> Any:  # noqa: ANN401 - of a type of torch's
        """Group the ranks that differ in nothing but their place along some axes of the grid."""
        size = math.prod(shape[axis] for axis in axes)
        if size == 1:
            return None
        rows = np.moveaxis(grid, axes, range(-len(axes), 0)).reshape(-1, size).tolist()
        if str(rows) not in made:
            made[str(rows)] = dist.new_subgroups_by_enumeration(rows, timeout=timeout)[0]
        return made[str(rows)]

    pipeline, replicas, summed, between = make(2), make(0, 1), make(1), make(0)
    team = make(1, 2) if layout.num_teams > 1 else None
    return Groups(pipeline, replicas, summed, between, team)
