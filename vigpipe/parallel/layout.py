"""Map every rank to its stages and its replica.

Two replicas of three stages; one pipeline sits on neighbouring ranks:

                 stage 0   stage 1   stage 2
    replica 0    rank 0    rank 1    rank 2
    replica 1    rank 3    rank 4    rank 5
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

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

    Raises:
        InputError: a degree is below 1, or the schedule cannot run with these degrees.
    """

    pipeline_size: int = 1
    num_microbatches: int = 1
    num_replicas: int = 1
    schedule: Schedule = "gpipe"
    virtual_stages: int = 1

    def __post_init__(self) -> None:
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
    def one_replica(self) -> "Layout":
        """The layout of a single pipeline of this kind."""
        return replace(self, num_replicas=1)

    def replica_index(self, rank: int) -> int:
        """Return the index of the replica that a rank belongs to."""
        return rank // self.pipeline_size

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


def make_groups(layout: Layout, timeout_seconds: float) -> "tuple[ProcessGroup, ProcessGroup]":
    """Make the process groups of this rank; all ranks call this together.

    The groups of torch's `init_device_mesh` would wait half an hour for a silent peer.

    Args:
        layout: the degrees.
        timeout_seconds: time after which a collective or a message in these groups gives up.

    Returns:
        The ranks of this rank's pipeline, and the ranks that hold the same stages as this one.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_seconds)
    ranks = range(layout.world_size)
    pipelines = [[*range(r, r + layout.pipeline_size)] for r in ranks[:: layout.pipeline_size]]
    replicas = [[*ranks[stage :: layout.pipeline_size]] for stage in range(layout.pipeline_size)]
    pipeline_group: Any = dist.new_subgroups_by_enumeration(pipelines, timeout=timeout)[0]
    replica_group: Any = dist.new_subgroups_by_enumeration(replicas, timeout=timeout)[0]
    return pipeline_group, replica_group
