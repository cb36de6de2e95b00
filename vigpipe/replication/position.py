"""The position of a rank among the ranks of a run, as a strategy sees it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from vigpipe.parallel.agreement import Peers
from vigpipe.parallel.counterparts import Counterparts


@dataclass(frozen=True)
class Position:
    """A rank's position.

    Attributes:
        team: index of its team: the replicas that take every step together. Where replicas take
            steps of their own, each is a team, unless all replicas of a host are one.
        replica_in_team: index of its replica in the team.
        team_size: number of replicas of a team.
        is_server: whether it belongs to the server's pipeline, which is one more team.
        leads_team: whether it is the first rank of its team, which decides for all of them.
        rank: its position in the world.
        peers: the ranks of its team.
        num_ranks: number of ranks of all teams, a server included.
        num_teams: number of teams, a server included.
        across_teams: of each team, the rank with the same stages and the same index in its team.
        links: process groups of this rank and one other of `across_teams`, by the other's index.
        has_ended: whether a process of another team is known to have ended.
        give_up: called when another team is given up, which may still have processes.
        open_store: returns a section of the store where all ranks have met, the same one on all of
            them; they call it together.
        timeout_seconds: how long it waits for a silent peer.
        num_stats: length of what its team's BatchNorms report of a step, see `model.norm`.
    """

    team: int
    replica_in_team: int
    team_size: int
    is_server: bool
    leads_team: bool
    rank: int
    peers: Peers
    num_ranks: int
    num_teams: int
    across_teams: Counterparts
    open_store: Callable[[], Any]
    timeout_seconds: float
    num_stats: int
    links: Mapping[int, dist.ProcessGroup] = field(default_factory=dict)
    has_ended: Callable[[int], bool] = lambda team: False
    give_up: Callable[[int], None] = lambda team: None
