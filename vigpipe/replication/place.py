"""Where a rank is among the ranks of a run, as a strategy sees it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from vigpipe.parallel.agreement import Peers


@dataclass(frozen=True)
class Place:
    """A rank's place.

    Attributes:
        replica_index: the replica that it belongs to.
        is_first: whether it is the first rank of its pipeline, which decides for all of them.
        peers: the ranks of its pipeline.
        num_ranks: number of ranks of all pipelines.
        replica_group: the ranks with the same stages; None if there is one replica.
        open_store: returns a section of the store where all ranks have met, the same one on all of
            them; they call it together.
        timeout_seconds: how long it waits for a silent peer.
        num_moments: length of what its BatchNorms report of a step, see `model.norm`.
    """

    replica_index: int
    is_first: bool
    peers: Peers
    num_ranks: int
    replica_group: dist.ProcessGroup | None
    open_store: Callable[[], Any]
    timeout_seconds: float
    num_moments: int
