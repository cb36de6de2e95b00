"""The other replicas of a run: who of them is left, and what they tell the rank that writes."""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from vigpipe.parallel.counterparts import Counterparts
from vigpipe.parallel.values import all_gather_values
from vigpipe.replication.membership import Membership
from vigpipe.replication.parcels import Inbox
from vigpipe.replication.store import StoreLostError
from vigpipe.run.events import EventsFile
from vigpipe.run.rank import RankState
from vigpipe.run.record import RunRecord

T = TypeVar("T")


def all_events(membership: Membership, world_size: int) -> list[dict[str, Any]]:
    """Return the events of all ranks, in a run without files; each calls this at its end."""
    all_gather_values(None, world_size)  # the last one has told by now
    return [event for parcel in membership.inbox().take() for event in parcel["events"]]


class Others:
    """The other replicas, as the training loop sees them."""

    def __init__(self, rank_state: RankState) -> None:
        own_steps = rank_state.own_steps
        # If all take every step together, nobody can be lost without ending the run, the rank that
        # writes knows every row, and the peers are all ranks.
        self._membership = None if own_steps is None else own_steps.membership
        self._peers, self._counterparts = rank_state.strategy.peers, rank_state.mesh.counterparts
        self._inbox: Inbox | None = None
        self._told_lost: set[int] = set()  # The user has been told of them.

    def begin(self, record: RunRecord, open_events: Callable[[Inbox], EventsFile]) -> None:
        """Write the rows of all replicas from now on, on the rank that writes the run's files."""
        if self._membership is None:
            return
        self._record, self._inbox = record, self._membership.inbox()
        self._events = open_events(self._inbox)
        self._recorded_lost: list[int] = self._inbox.noted.get("lost", [])
        self._inbox.note(events_bytes=self._events.add(()), lost=self._recorded_lost)

    def write(self) -> int:
        """Write the rows of other replicas that have arrived; return the size of events.jsonl."""
        if self._membership is None or self._inbox is None:
            return 0
        lost = self._membership.lost()
        events, metrics = [], []
        with contextlib.suppress(StoreLostError):  # The next decision tells all of it.
            for parcel in self._inbox.take():
                events += parcel["events"]
                metrics += parcel["metrics"]
        new = [replica for replica in lost if replica not in self._recorded_lost]
        events += [{"replica": r, "step": lost[r], "lost": 1} for r in new]
        self._record.write(metrics)
        num_bytes = self._events.add(events)
        self._recorded_lost = [*self._recorded_lost, *new]
        with contextlib.suppress(StoreLostError):
            self._inbox.note(events_bytes=num_bytes, lost=self._recorded_lost)
        return num_bytes

    def newly_lost(self) -> list[int]:
        """Return who was lost since this was asked last, on the rank that writes."""
        if self._membership is None or self._inbox is None:
            return []
        new = [replica for replica in self._membership.lost() if replica not in self._told_lost]
        self._told_lost.update(new)
        return new

    def num_lost(self) -> int:
        return 0 if self._membership is None else len(self._membership.lost())

    def together(self, work: Callable[[Counterparts], T]) -> T:
        if self._membership is None:
            return work(self._counterparts)
        return self._membership.together(work)

    def all_gather(self, value: Any) -> list[Any]:
        if self._membership is None:
            return all_gather_values(value, *self._peers)
        return list(self._membership.all_gather(value).values())

    def is_to_write(self) -> bool:
        """Whether this replica writes the run's files, as far as all who work together know."""
        return self._membership is not None and self._membership.is_to_write()

    def fail(self, *, is_own: bool) -> None:
        if self._membership is not None:
            self._membership.fail(is_own=is_own)

    def finish(self) -> None:
        if self._inbox is not None:
            self.write()
            self._events.finish()

    def close(self) -> None:
        """Tell the others that this rank leaves, when nothing more is done together."""
        if self._membership is not None:
            self._membership.close()
