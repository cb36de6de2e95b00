"""Notice that another replica is gone or hangs, while this one waits for it.

A replica may wait for another much longer than a step takes, and they exchange nothing meanwhile.
So each replica has a number in the store that it increases every second (a heartbeat).
"""

import threading
import time
from collections.abc import Callable

from vigpipe.replication.store import Store

BEAT_SECONDS = 1.0


class Alive:
    """Sends heartbeats of this replica in a thread, and watches those of the others."""

    def __init__(
        self,
        store: Store,
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
        self._thread = threading.Thread(target=self._beat, args=(replica_index,), daemon=True)
        if self._others:
            self._thread.start()

    def look(self) -> dict[int, str]:
        """Return the others that are lost, and why; looks once a second, while waiting for one."""
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
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join()

    def _beat(self, replica_index: int) -> None:
        while not self._ends.wait(BEAT_SECONDS):
            try:
                self._store.add(_key(replica_index), 1)
            except RuntimeError:  # the store is gone, which the rank itself notices
                return


def _key(replica_index: int) -> str:
    return f"alive/{replica_index}"
