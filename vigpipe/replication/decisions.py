"""Let the first rank of a pipeline decide what all its ranks do next.

Only the first rank of a replica looks at the table. The others follow: they are told each decision
in a small broadcast on the host, and a word every 20 ms while there is none yet, so that nobody
takes a long wait for a lost peer.
"""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from vigpipe.parallel.agreement import EXCHANGE_SECONDS, Peers

_SLEEP_SECONDS = 1e-3  # between two looks at the table


class Decision(NamedTuple):
    """What a replica does next.

    Attributes:
        kind: meant by the strategy; not negative.
        number: of an item, an epoch or a step.
    """

    kind: int
    number: int = 0


class Decisions:
    """The decisions of one replica; all ranks of its pipeline ask for each together.

    Args:
        peers: the ranks of the pipeline.

    Attributes:
        waiting_seconds: for how long this rank has waited for decisions.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._decide: Iterator[Decision | None] | None = None
        self._check: Callable[[], None] = lambda: None
        self.waiting_seconds = 0.0

    def begin(self, decide: Iterator[Decision | None], check: Callable[[], None]) -> None:
        """Begin to decide, on the first rank of the pipeline.

        Args:
            decide: makes the decisions one after the other; it yields None while it waits for
                another replica.
            check: called while it waits, and raises if a replica is lost.
        """
        self._decide, self._check = decide, check

    def next(self) -> Decision:
        """Return what comes next.

        Raises:
            RuntimeError: a peer or another replica was lost.
        """
        began = time.perf_counter()
        while True:
            decision = None if self._decide is None else self._look(self._decide)
            if self._peers.size > 1:
                decision = self._told(decision)
            if decision is not None:
                self.waiting_seconds += time.perf_counter() - began
                return decision

    def _look(self, decide: Iterator[Decision | None]) -> Decision | None:
        """Look for a decision, for a moment if there are peers to be kept informed."""
        began = time.perf_counter()
        while (decision := next(decide)) is None:
            self._check()
            time.sleep(_SLEEP_SECONDS)
            if self._peers.size > 1 and time.perf_counter() - began > EXCHANGE_SECONDS:
                break
        return decision

    def _told(self, decision: Decision | None) -> Decision | None:
        message = torch.tensor(decision or (-1, 0))
        dist.broadcast(message, group=self._peers.group, group_src=0)
        kind, number = message.tolist()
        return None if kind < 0 else Decision(kind, number)
