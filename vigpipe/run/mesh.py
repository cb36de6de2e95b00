"""Where one rank is among all ranks of a run, and the groups of ranks that it is in."""

import os
import secrets
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vigpipe.config.replication import OUTLIVING
from vigpipe.launch.environment import FOLDER_VARIABLE, LONG_WAIT_SECONDS
from vigpipe.launch.failures import declare_lost
from vigpipe.launch.signed_store import SignedStore
from vigpipe.launch.watchdog import ended
from vigpipe.model.norm import PooledStatistics
from vigpipe.parallel.agreement import Peers
from vigpipe.parallel.counterparts import Counterparts
from vigpipe.parallel.layout import Groups, Layout, make_groups
from vigpipe.parallel.shards import Shards
from vigpipe.parallel.values import broadcast_value
from vigpipe.replication.position import Position
from vigpipe.run.facts import Run


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run, as one of them sees them."""

    rank: int
    replica_index: int
    pipeline_rank: int
    groups: Groups
    counterparts: Counterparts  # the ranks that hold the same stages, of all replicas
    teammates: Counterparts  # of these, the ones that take every step together with it
    shards: Shards  # the ranks that share the batches of its replica


def make_mesh(run: Run, rank: int, *, alone: bool = False, shards: Shards | None = None) -> Mesh:
    """Make a rank's groups, all ranks together; one that is `alone` has no peers but `shards`."""
    layout, config = run.layout, run.config
    groups = Groups()
    if layout.world_size > 1 and not alone:
        linked = config.strategy in OUTLIVING
        groups = make_groups(layout, config.timeout or LONG_WAIT_SECONDS, linked=linked)
    return Mesh(
        rank,
        layout.replica_index(rank),
        layout.pipeline_rank(rank),
        groups,
        Counterparts(groups.replicas),
        Counterparts(groups.teammates),
        shards or Shards(groups.shards),
    )


def position_in(run: Run, mesh: Mesh, statistics: PooledStatistics) -> Position:
    """Return what a strategy knows of a rank's position."""
    layout, timeout = run.layout, run.config.timeout or LONG_WAIT_SECONDS
    team, of_team = layout.team_of(mesh.replica_index)
    return Position(
        team=team,
        replica_in_team=of_team,
        team_size=layout.team_size,
        is_server=mesh.replica_index == layout.num_replicas,
        leads_team=mesh.rank % (layout.team_size * layout.replica_size) == 0,
        rank=mesh.rank,
        peers=Peers(layout.team_size * layout.replica_size, mesh.groups.team),
        num_ranks=layout.world_size,
        num_teams=layout.num_teams + layout.has_server,
        across_teams=Counterparts(mesh.groups.across_teams),
        links=mesh.groups.links,
        has_ended=partial(_has_ended, layout=layout),
        give_up=_give_up,
        open_store=partial(_open_store, layout.world_size),
        timeout_seconds=timeout,
        num_stats=3 * layout.team_size * layout.num_microbatches * statistics.num_channels,
    )


def _open_store(world_size: int) -> Any:
    """Return a new section of the store where the ranks have met; all ranks call this together."""
    if world_size == 1:
        return dist.HashStore()
    token = broadcast_value(secrets.token_hex(4), world_size)  # torchrun may start ranks again
    return SignedStore(dist.PrefixStore(token, dist.distributed_c10d._get_default_store()))


def _has_ended(team: int, layout: Layout) -> bool:
    """Whether a process of a team is known to have ended: one that start_local has started."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return folder is not None and ended(Path(folder), layout.ranks_of_team(team))


def _give_up(team: int) -> None:
    """Let start_local, if it has started the ranks, end what is left of a team."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is not None:
        declare_lost(Path(folder), team)
