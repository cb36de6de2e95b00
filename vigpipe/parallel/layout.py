"""Which rank is which stage of which replica.

Two replicas of three stages; one pipeline sits on neighbouring ranks:

                 stage 0   stage 1   stage 2
    replica 0    rank 0    rank 1    rank 2
    replica 1    rank 3    rank 4    rank 5
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from vigpipe.errors import InputError
from vigpipe.schedules import Schedule, check_degrees

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Layout:
    """Degrees of a run, checked together.

    Attributes:
        pipeline_size: S, ranks of one pipeline.
        num_microbatches: M, micro-batches a replica cuts its share of a batch into.
        num_replicas: D.
        schedule: order of forwards and backwards.
        virtual_stages: V, stages each rank holds; only for the interleaved and the looped schedule.

    Raises:
        InputError: the degrees do not go together.
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
        """Stages of one pipeline, virtual ones counted: S * V."""
        return self.pipeline_size * self.virtual_stages

    @property
    def world_size(self) -> int:
        """Ranks: S * D."""
        return self.pipeline_size * self.num_replicas

    def replica_index(self, rank: int) -> int:
        """Replica of a rank."""
        return rank // self.pipeline_size

    def pipeline_rank(self, rank: int) -> int:
        """Position of a rank in its pipeline."""
        return rank % self.pipeline_size

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages of the plan that a rank holds, in order: with V virtual stages, every S-th."""
        first = self.pipeline_rank(rank)
        return tuple(range(first, self.num_stages, self.pipeline_size))

    def check_world(self, world_size: int) -> None:
        """Raise InputError unless there are S * D ranks."""
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
    """This rank's pipeline, and the ranks that hold the same stages; all ranks call it together.

    torch's `init_device_mesh` would give groups that wait half an hour for a silent peer.

    Args:
        layout: the degrees.
        timeout_seconds: after which a collective or a message of theirs gives up.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_seconds)
    ranks = range(layout.world_size)
    pipelines = [[*range(r, r + layout.pipeline_size)] for r in ranks[:: layout.pipeline_size]]
    replicas = [[*ranks[stage :: layout.pipeline_size]] for stage in range(layout.pipeline_size)]
    stage_group: Any = dist.new_subgroups_by_enumeration(pipelines, timeout=timeout)[0]
    replica_group: Any = dist.new_subgroups_by_enumeration(replicas, timeout=timeout)[0]
    return stage_group, replica_group
