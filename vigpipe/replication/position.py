"""The position of a rank among the ranks of a run, as a strategy sees it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from vigpipe.parallel.agreement import Peers
from vigpipe.parallel.counterparts import Counterparts


@dataclass(frozen=True)
class Position:
    """A rank's position; for teams see `parallel.layout`. A server's pipeline is one more team."""

    team: int
    replica_in_team: int
    team_size: int  # number of replicas of a team
    is_server: bool
    leads_team: bool  # whether it is the first rank of its team, which decides for all of them
    rank: int  # in the world
    peers: Peers  # the ranks of its team
    num_ranks: int
    num_teams: int
    across_teams: Counterparts  # of each team, the rank with its stages and its place in the team
    # Returns a section of the store where all ranks have met, the same one on all of them; they
    # call it together.
    open_store: Callable[[], Any]
    timeout_seconds: float  # for which it waits for a silent peer
    num_stats: int  # length of what its team's BatchNorms report of a step, see `model.norm`
    # Process groups of this rank and one other of `across_teams`, by the other's index.
    links: Mapping[int, dist.ProcessGroup] = field(default_factory=dict)
    # Whether a process of another team is known to have ended.
    has_ended: Callable[[int], bool] = lambda team: False
    # Called when another team is given up, which may still have processes.
    give_up: Callable[[int], None] = lambda team: None
