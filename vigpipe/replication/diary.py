"""Note when a rank worked, waited for other replicas, averaged, evaluated and saved.

A strategy makes the notes. They give the seconds of summary.json, and rows of events.jsonl that the
report draws, with times in seconds since 1970:

    {"replica": 1, "did": "worked", "from": 1795590001.25, "to": 1795590001.5}
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

# A rank works on an item from reading it to the update of the weights, waits for others to be
# averaged with them or to rest, and saves a checkpoint while all rest.
Deed = Literal["worked", "waited", "averaged", "evaluated", "saved"]
DEEDS: tuple[Deed, ...] = get_args(Deed)
BRIEF_SECONDS = 1e-3  # a shorter wait is counted, but has no row
NO_SECONDS = 5e-5  # what is shorter has no row either: it would begin and end at once


class Diary:
    """What one rank does, one thing at a time; what is nested interrupts what is around it."""

    def __init__(self) -> None:
        self.seconds: dict[Deed, float] = dict.fromkeys(DEEDS, 0.0)  # in all
        self._zero = time.time() - time.perf_counter()
        self._deed: Deed | None = None
        self._since = 0.0
        # Each deed with its begin and end, in seconds of the performance counter.
        self._entries: list[tuple[Deed, float, float]] = []

    @contextmanager
    def doing(self, deed: Deed) -> Iterator[None]:
        before = self._turn_to(deed)
        try:
            yield
        finally:
            self._turn_to(before)

    def take_rows(self, replica: int) -> list[dict[str, Any]]:
        """Return the rows of a replica since the last call."""
        entries, self._entries = self._entries, []
        return [
            {
                "replica": replica,
                "did": deed,
                "from": round(self._zero + start, 4),
                "to": round(self._zero + end, 4),
            }
            for deed, start, end in entries
        ]

    def _turn_to(self, deed: Deed | None) -> Deed | None:
        now, before = time.perf_counter(), self._deed
        if before is not None:
            self.seconds[before] += now - self._since
            self._add(before, self._since, now)
        self._deed, self._since = deed, now
        return before

    def _add(self, deed: Deed, start: float, end: float) -> None:
        if end - start < (BRIEF_SECONDS if deed == "waited" else NO_SECONDS):
            return
        if self._entries:
            last_deed, last_start, last_end = self._entries[-1]
            if last_deed == deed and start - last_end < BRIEF_SECONDS:
                start = last_start
                self._entries.pop()
        self._entries.append((deed, start, end))
