"""Put what all ranks have told into the files of a run whose replicas take steps of their own."""

import contextlib
from typing import Any

from vigpipe.parallel.agreement import all_gather_values
from vigpipe.replication.parcels import Inbox
from vigpipe.replication.store import StoreLostError
from vigpipe.replication.strategy import Strategy
from vigpipe.run.events import EventsFile
from vigpipe.run.record import RunRecord


def all_events(strategy: Strategy, world_size: int) -> list[dict[str, Any]]:
    """Return what all ranks have told of what they did, in a run without files; all call this.

    Args:
        strategy: of this rank, after its last turn.
        world_size: number of ranks.
    """
    all_gather_values(None, world_size)  # the last one has told by now
    inbox = strategy.inbox()
    parcels = inbox.take() if inbox is not None else ()
    return [event for parcel in parcels for event in parcel["events"]]


class Others:
    """Writes the rows of all replicas, on the rank that writes the run's files.

    Args:
        strategy: of this rank.
        inbox: what the ranks have told.
        record: of the run.
        events: its events.jsonl.
    """

    def __init__(
        self, strategy: Strategy, inbox: Inbox, record: RunRecord, events: EventsFile
    ) -> None:
        self._strategy, self._inbox = strategy, inbox
        self._record, self._events = record, events
        self._told_lost: set[int] = set()  # to the user
        self._noted_lost: list[int] = inbox.noted.get("lost", [])  # in events.jsonl
        self._inbox.note(events_bytes=events.add(()), lost=self._noted_lost)

    def write(self) -> int:
        """Write what has come since; returns the size of events.jsonl."""
        lost = self._strategy.lost()
        events, metrics = [], []
        with contextlib.suppress(StoreLostError):  # which the next decision says to all
            for parcel in self._inbox.take():
                events += parcel["events"]
                metrics += parcel["metrics"]
        new = [replica for replica in lost if replica not in self._noted_lost]
        events += [{"replica": r, "step": lost[r], "lost": 1} for r in new]
        self._record.add_of_others(metrics)
        num_bytes = self._events.add(events)
        self._noted_lost = [*self._noted_lost, *new]
        with contextlib.suppress(StoreLostError):
            self._inbox.note(events_bytes=num_bytes, lost=self._noted_lost)
        return num_bytes

    def newly_lost(self) -> list[int]:
        """Return the replicas that were lost since this was asked last."""
        new = [replica for replica in self._strategy.lost() if replica not in self._told_lost]
        self._told_lost.update(new)
        return new

    def finish(self) -> None:
        """Write what is left, and close events.jsonl."""
        self.write()
        self._events.finish()
