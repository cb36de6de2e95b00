"""Let the first rank of a pipeline decide what all its ranks do next.

Only the first rank of a replica looks at the table. It broadcasts each decision to the others on
the host. While there is none yet, it broadcasts that every 20 ms, so that no rank takes a long wait
for a lost peer.
"""

import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist

from vigpipe.parallel.agreement import EXCHANGE_SECONDS, Peers
from vigpipe.replication.store import StoreLostError

_SLEEP_SECONDS = 1e-3  # the first rank looks at the table this often


class Action(IntEnum):
    """What a replica does next, or whether it takes a step, and with which gradients."""

    OWN_GRADIENTS = 0
    AVERAGE = 1
    NO_STEP = 2
    TAKE = 3
    EVALUATE = 4
    REST = 5
    END = 6
    GIVE = 7
    PULL = 8
    PUSH = 9
    PASS = 10
    SKIP = 11
    TELL = 12
    STOP = 13
    LEAD = 14
    LEAVE = 15
    MEET = 16
    STORE_LOST = 17


ALL = -1  # instead of a partner: all replicas are averaged


class Decision(NamedTuple):
    """What a replica does next."""

    action: Action
    # The item to take, the epoch to evaluate, the number of steps at a rest, the number of the
    # average to give weights for, or the replica to be averaged with (or ALL).
    number: int = 0
    ahead: int = -1  # for TAKE, the item that comes after this one; -1 if that is not known


OWN_GRADIENTS, NO_STEP = Decision(Action.OWN_GRADIENTS), Decision(Action.NO_STEP)


class Decisions:
    """The decisions of one replica; all ranks of its pipeline, `peers`, ask for each together."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._decide: Iterator[Decision | None] | None = None
        self._check: Callable[[], None] = lambda: None

    def begin(self, decide: Iterator[Decision | None], check: Callable[[], None]) -> None:
        """Begin to decide, on the first rank; `check` is called while `decide` yields None."""
        self._decide, self._check = decide, check

    def end(self) -> None:
        self.begin(iter(()), lambda: None)

    def next(self, decide: Iterator[Decision | None] | None = None) -> Decision:
        """Return the next decision; the first rank may give another source of it than `begin`.

        Raise StoreLostError if the store that has the table is gone: all ranks of the pipeline hear
        of it here, and so at the same point of their work. Raise RuntimeError if a peer was lost,
        or PeerLostError if another replica without which this one cannot go on.
        """
        decide = decide or self._decide
        while True:
            decision = None if decide is None else self._look(decide)
            if self._peers.size > 1:
                decision = self._told(decision)
            if decision is not None:
                if decision.action is Action.STORE_LOST:
                    raise StoreLostError
                return decision

    def _look(self, decide: Iterator[Decision | None]) -> Decision | None:
        """Look for a decision, for a moment if there are peers to be kept informed."""
        began = time.perf_counter()
        try:
            while (decision := next(decide)) is None:
                self._check()
                time.sleep(_SLEEP_SECONDS)
                if self._peers.size > 1 and time.perf_counter() - began > EXCHANGE_SECONDS:
                    break
        except StoreLostError:
            return Decision(Action.STORE_LOST)
        return decision

    def _told(self, decision: Decision | None) -> Decision | None:
        message = torch.tensor(decision or (-1, 0, -1))
        dist.broadcast(message, group=self._peers.group, group_src=0)
        action, *numbers = message.tolist()
        return None if action < 0 else Decision(Action(action), *numbers)
