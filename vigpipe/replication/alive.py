"""Notice that another replica is gone or hangs, while this one waits for it.

A replica may wait for another much longer than a step takes, and nothing passes between them
meanwhile. So each lets the others see a number in the store that grows every second.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

BEAT_SECONDS = 1.0


class Counters(Protocol):
    """Of torch's stores, what is needed here."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, which begins with 0, and return the sum."""
        ...


class Alive:
    """Shows the others that this replica is there, and watches them.

    Args:
        store: where the ranks have met.
        replica_index: this replica.
        num_replicas: D.
        timeout_seconds: for how long another may show nothing.
        has_ended: whether a process of another replica is known to have ended.
    """

    def __init__(
        self,
        store: Counters,
        replica_index: int,
        num_replicas: int,
        timeout_seconds: float,
        has_ended: Callable[[int], bool] = lambda replica: False,
    ) -> None:
        self._store, self._timeout, self._has_ended = store, timeout_seconds, has_ended
        self._others = [r for r in range(num_replicas) if r != replica_index]
        self._seen: dict[int, tuple[int, float]] = {}
        self._looked = -float("inf")
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        if self._others:
            self._thread = threading.Thread(target=self._beat, args=(replica_index,), daemon=True)
            self._thread.start()

    def look(self) -> dict[int, str]:
        """Look at the others, once a second at most; call this while waiting for one of them.

        Returns:
            Those that have ended or have shown nothing for too long, and which of the two.
        """
        now = time.monotonic()
        if now - self._looked < BEAT_SECONDS:
            return {}
        if now - self._looked > 3 * BEAT_SECONDS:  # this replica has not looked: it was at work
            self._seen.clear()
        self._looked = now
        lost: dict[int, str] = {}
        for replica in self._others:
            beats = self._store.add(_key(replica), 0)
            before, since = self._seen.setdefault(replica, (beats, now))
            if self._has_ended(replica):
                lost[replica] = f"a process of replica {replica} has ended"
            elif beats != before:
                self._seen[replica] = beats, now
            elif now - since > self._timeout:
                lost[replica] = (
                    f"Timed out waiting {1000 * (now - since):.0f}ms for replica {replica}, which "
                    "shows no sign of life"
                )
        return lost

    def close(self) -> None:
        """Stop showing that this replica is there."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _beat(self, replica_index: int) -> None:
        while not self._ends.wait(BEAT_SECONDS):
            try:
                self._store.add(_key(replica_index), 1)
            except RuntimeError:  # the store is gone, which the rank itself notices
                return


def _key(replica_index: int) -> str:
    return f"alive/{replica_index}"
