"""When a rank worked, waited for other replicas, averaged, evaluated and saved.

A strategy writes it as it goes. From it come the seconds of summary.json, and rows of events.jsonl
that the report draws, times in seconds since 1970:

    {"replica": 1, "did": "worked", "from": 1795590001.25, "to": 1795590001.5}
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

Deed = Literal[
    "worked",  # on items, from reading them to the update of the weights
    "waited",  # for others, to be averaged with them or to rest
    "averaged",
    "evaluated",
    "saved",  # a checkpoint, while all rest
]
DEEDS: tuple[Deed, ...] = get_args(Deed)
BRIEF_SECONDS = 1e-3  # a wait that is shorter is counted, but has no row
NO_SECONDS = 5e-5  # nor has what would begin and end at once in a row


class Entry(NamedTuple):
    """A span of time.

    Attributes:
        deed: what the rank did.
        start: when it began, in seconds.
        end: when it ended.
    """

    deed: Deed
    start: float
    end: float


class Diary:
    """What one rank does, one after the other; what is within something else interrupts it.

    Attributes:
        seconds: how long each thing took in all.
    """

    def __init__(self) -> None:
        self.seconds: dict[Deed, float] = dict.fromkeys(DEEDS, 0.0)
        self._zero = time.time() - time.perf_counter()
        self._deed: Deed | None = None
        self._since = 0.0
        self._entries: list[Entry] = []

    @contextmanager
    def doing(self, deed: Deed) -> Iterator[None]:
        """Note that the rank does this in this context."""
        before = self._turn_to(deed)
        try:
            yield
        finally:
            self._turn_to(before)

    def take_rows(self, replica: int) -> list[dict[str, Any]]:
        """Return rows of what was done since they were last taken, for a replica."""
        entries, self._entries = self._entries, []
        return [
            {
                "replica": replica,
                "did": entry.deed,
                "from": round(self._zero + entry.start, 4),
                "to": round(self._zero + entry.end, 4),
            }
            for entry in entries
        ]

    def _turn_to(self, deed: Deed | None) -> Deed | None:
        now, before = time.perf_counter(), self._deed
        if before is not None:
            self.seconds[before] += now - self._since
            self._add(Entry(before, self._since, now))
        self._deed, self._since = deed, now
        return before

    def _add(self, entry: Entry) -> None:
        last = self._entries[-1] if self._entries else None
        least = BRIEF_SECONDS if entry.deed == "waited" else NO_SECONDS
        if entry.end - entry.start < least:
            return
        if last and last.deed == entry.deed and entry.start - last.end < BRIEF_SECONDS:
            self._entries[-1] = last._replace(end=entry.end)
        else:
            self._entries.append(entry)
