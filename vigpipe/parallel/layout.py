"""Map every rank to its stages and its replica.

Two replicas of three stages; one pipeline sits on neighbouring ranks:

                 stage 0   stage 1   stage 2
    replica 0    rank 0    rank 1    rank 2
    replica 1    rank 3    rank 4    rank 5

A team is the replicas that take every step together. By default all of them are one team. Where
replicas take steps of their own, each is a team, or those of a host are.

With a server (--strategy server), its pipeline comes last, as if it were one more replica: it holds
the same stages, but takes no items. The replicas are then called its workers.

A replica of one stage may be shared by several neighbouring ranks (--shards). Each has all weights,
and some of the rows of the replica's batch:

                 shard 0   shard 1
    replica 0    rank 0    rank 1
    replica 1    rank 2    rank 3
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from vigpipe.errors import InputError
from vigpipe.messages import plural
from vigpipe.proof import prove_group
from vigpipe.schedules import Schedule, check_degrees

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Layout:
    """The degrees of parallelism of a run; InputError if they do not go together."""

    pipeline_size: int = 1  # S, ranks of one pipeline
    num_microbatches: int = 1  # M, micro-batches a replica cuts its share of a batch into
    num_replicas: int = 1  # D, copies of the whole model
    schedule: Schedule = "gpipe"
    virtual_stages: int = 1  # V, stages of a rank; more than 1 only if the schedule is in VIRTUAL
    num_teams: int = 1  # each of as many neighbouring replicas
    has_server: bool = False  # whether a server's pipeline follows those of the replicas
    num_shards: int = 1  # m, ranks that share a replica's batch; more than 1 only with one stage

    def __post_init__(self) -> None:
        assert self.num_replicas % self.num_teams == 0
        for flag, degree in (
            ("--stages", self.pipeline_size),
            ("--microbatches", self.num_microbatches),
            ("--dp", self.num_replicas),
            ("--virtual-stages", self.virtual_stages),
            ("--shards", self.num_shards),
        ):
            if degree < 1:
                raise InputError(f"{flag} {degree}: must be at least 1")
        why_not = check_degrees(
            self.schedule, self.pipeline_size, self.virtual_stages, self.num_microbatches
        )
        if why_not is not None:
            raise InputError(why_not)
        if self.num_shards > 1 and self.num_stages > 1:
            raise InputError(
                f"--shards {self.num_shards} with {self.num_stages} stages: the ranks of a replica "
                "share either its batch or its layers; leave --shards out, or take --stages 1"
            )

    @property
    def num_stages(self) -> int:
        """S * V, stages of one pipeline, virtual ones counted."""
        return self.pipeline_size * self.virtual_stages

    @property
    def replica_size(self) -> int:
        """Number of ranks of a replica: S, or m if they share its batch."""
        return self.pipeline_size * self.num_shards

    @property
    def world_size(self) -> int:
        """Number of ranks: those of D replicas, or of D + 1 with a server."""
        return self.replica_size * (self.num_replicas + self.has_server)

    @property
    def writer(self) -> int:
        """The replica whose last rank writes the run's files: the server if there is one."""
        return self.num_replicas if self.has_server else 0

    @property
    def team_size(self) -> int:
        return self.num_replicas // self.num_teams

    @property
    def one_team(self) -> "Layout":
        """The layout of a single team of this kind."""
        return replace(self, num_replicas=self.team_size, num_teams=1, has_server=False)

    def replica_index(self, rank: int) -> int:
        return rank // self.replica_size

    def shard_of(self, rank: int) -> int:
        """Return which share of its replica's batch a rank has."""
        return rank // self.pipeline_size % self.num_shards

    def team_of(self, replica_index: int) -> tuple[int, int]:
        """Return the team that a replica belongs to, and its place among the team's replicas."""
        return divmod(replica_index, self.team_size)

    def state_of(self, replica_index: int) -> int:
        """Return which state in a checkpoint a replica begins with: its team's, or the server's."""
        return 0 if self.has_server else self.team_of(replica_index)[0]

    def pipeline_rank(self, rank: int) -> int:
        return rank % self.pipeline_size

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the indices of the stages that a rank holds: every S-th, in order."""
        first = self.pipeline_rank(rank)
        return tuple(range(first, self.num_stages, self.pipeline_size))

    def ranks_of_team(self, team: int) -> range:
        """Return the ranks of a team, or of the server, which comes after the teams."""
        size = self.team_size * self.replica_size
        return range(team * size, (team + 1) * size)

    def check_world(self, world_size: int) -> None:
        """Raise InputError unless the number of ranks is that of the layout."""
        if world_size != self.world_size:
            replicas = f"--dp {self.num_replicas}"
            if self.has_server:
                replicas = f"({replicas} + 1 for --strategy server)"
            of_replica = f"--stages {self.pipeline_size}"
            if self.num_shards > 1:
                of_replica = f"--shards {self.num_shards}"
            raise InputError(
                f"{world_size} ranks were started, but {of_replica} x {replicas} needs "
                f"{self.world_size}; start {self.world_size} ranks or change the two options"
            )

    def in_short(self) -> str:
        """Describe what is cut or copied; an empty text where one rank takes whole batches."""
        replicas, of_replica = self._ranks()
        ranks, parts = list[str](), list[str]()
        if self.num_replicas > 1 or self.has_server:
            ranks.append(replicas)
        if max(self.pipeline_size, self.virtual_stages, self.num_shards) > 1:
            ranks.append(of_replica)
        if ranks:
            parts.append(" × ".join(ranks))
        if self.num_microbatches > 1:
            parts.append(plural(self.num_microbatches, "micro-batch"))
        if self.pipeline_size > 1:
            parts.append(self.schedule)
        return ", ".join(parts)

    def __str__(self) -> str:
        ranks = " × ".join(self._ranks())
        return f"{ranks}, {plural(self.num_microbatches, 'micro-batch')}, {self.schedule}"

    def _ranks(self) -> tuple[str, str]:
        """Return what there is of replicas, and in each of them, in words."""
        replicas = plural(self.num_replicas, "worker" if self.has_server else "replica")
        if self.has_server:
            replicas = f"({replicas} + a server)"
        virtual = f" ({self.virtual_stages} each)" if self.virtual_stages > 1 else ""
        of_replica = f"{plural(self.pipeline_size, 'stage')}{virtual}"
        return replicas, plural(self.num_shards, "shard") if self.num_shards > 1 else of_replica


class Groups(NamedTuple):
    """The process groups of a rank; None where it is alone."""

    pipeline: "ProcessGroup | None" = None
    shards: "ProcessGroup | None" = None  # the ranks that share its replica's batch
    # The ranks that hold the same stages and the same share, of all replicas and the server; of
    # these, the ones in its team, and the ones with its place in each team.
    replicas: "ProcessGroup | None" = None
    teammates: "ProcessGroup | None" = None
    across_teams: "ProcessGroup | None" = None
    # The ranks in its team that hold the same stages, which add their gradients up.
    summed: "ProcessGroup | None" = None
    team: "ProcessGroup | None" = None  # also None if these are all ranks of the run
    # This rank and one of `across_teams`, by the place of that one there; only on request.
    links: "Mapping[int, ProcessGroup]" = MappingProxyType({})


def make_groups(layout: Layout, timeout_seconds: float, *, linked: bool = False) -> Groups:
    """Make the process groups of this rank; all ranks call this together.

    The groups of torch's `init_device_mesh` would wait half an hour for a silent peer. In these a
    collective or a message gives up after `timeout_seconds`.

    With `linked`, there is also a group of every two replicas, or of the server and each worker. In
    these a message gives up after half the time, and those of a server after a quarter of it.
    """
    import numpy as np
    import torch.distributed as dist

    num_teams = layout.num_teams + layout.has_server
    shape = num_teams, layout.team_size, layout.num_shards, layout.pipeline_size
    grid = np.arange(layout.world_size).reshape(shape)
    timeout = timedelta(seconds=timeout_seconds)
    made: dict[str, Any] = {}  # every grouping of the ranks is made once

    def rows_along(*axes: int) -> list[list[int]]:
        """List the ranks that differ in nothing but their place along some axes of the grid."""
        size = math.prod(shape[axis] for axis in axes)
        return np.moveaxis(grid, axes, range(-len(axes), 0)).reshape(-1, size).tolist()

    def new(rows: list[list[int]], timeout: timedelta) -> Any:
        """Make a group of each row, and let the ranks of this one's prove who they are."""
        group: Any = dist.new_subgroups_by_enumeration(rows, timeout=timeout)[0]
        if group is not None:  # this rank is in one of them
            prove_group(group)
        return group

    def make(*axes: int) -> Any:
        rows = rows_along(*axes)
        if len(rows[0]) == 1:
            return None
        if str(rows) not in made:
            made[str(rows)] = new(rows, timeout)
        return made[str(rows)]

    pipeline, replicas, across_teams = make(3), make(0, 1), make(0)
    teammates, summed = make(1), make(1, 2)
    team = make(1, 2, 3) if shape[0] > 1 else None
    shards: Any = None
    if layout.num_shards > 1:
        # A group of its own: while a thread exchanges rows, another may tell peers that it works.
        shards = new(rows_along(2), timeout)
    links: dict[int, Any] = {}
    here = int(np.argwhere(grid == dist.get_rank())[0][0])
    firsts = [*range(shape[0])] if linked else []
    # The peers of a rank that waits for another replica wait for it, with more patience. Workers
    # wait for a server that waits for one of them.
    impatience = 2
    if layout.has_server:
        impatience = 4 if here == layout.num_teams else 1
    for one, other in itertools.combinations(firsts, 2):
        if not layout.has_server or other == layout.num_teams:
            rows = np.stack([grid[one], grid[other]], axis=-1).reshape(-1, 2).tolist()
            link = new(rows, timeout / impatience)
            if here in (one, other):
                links[other if here == one else one] = link
    return Groups(pipeline, shards, replicas, teammates, across_teams, summed, team, links)
