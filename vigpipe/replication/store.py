"""The store through which the ranks have met; it is lost with the process that holds it.

torch's stores wait for an answer without a limit. So a thread watches the calls of a rank. If one
takes too long, because the store's process is frozen, the thread closes the connection, and the
call fails as it does when that process has ended.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from vigpipe.errors import PeerLostError
from vigpipe.launch.signed_store import SignedStore

P = ParamSpec("P")
T = TypeVar("T")
_LOOK_SECONDS = 0.5  # the thread looks at the calls this often


class StoreLostError(PeerLostError):
    """The store where the ranks have met is gone, or does not answer."""

    def __init__(self) -> None:
        super().__init__("the store where the ranks have met was lost with the rank that had it")


class WatchedStore:
    """A store that several ranks use, as one of them sees it.

    Every method raises StoreLostError once the store is gone, or does not answer in time.
    """

    def __init__(self, store: Any, timeout_seconds: float) -> None:
        self._store, self._timeout = store, timeout_seconds
        self._begun: dict[int, float] = {}  # when each thread's open call began
        self._ends = threading.Event()
        if (port := _port_of(store)) is not None:
            threading.Thread(target=self._watch, args=(port,), daemon=True).start()

    def get(self, key: str) -> bytes:
        return self._call(self._store.get, key)

    def set(self, key: str, value: str) -> None:
        self._call(self._store.set, key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which begins with 0, and return the sum."""
        return self._call(self._store.add, key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._call(self._store.check, keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._call(self._store.compare_set, key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._call(self._store.delete_key, key)

    def section(self, prefix: str) -> Any:
        """Return a section of the store itself, for a process group of torch."""
        return dist.PrefixStore(prefix, self._store)

    def close(self) -> None:
        self._ends.set()

    def _call(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        thread = threading.get_ident()
        self._begun[thread] = time.monotonic()
        try:
            return method(*args, **kwargs)
        except RuntimeError as error:
            raise StoreLostError from error
        finally:
            del self._begun[thread]

    def _watch(self, port: int) -> None:
        since = looked = time.monotonic()
        while not self._ends.wait(_LOOK_SECONDS):
            now = time.monotonic()
            if now - looked > 4 * _LOOK_SECONDS:  # this process itself was stopped meanwhile
                since = now
            looked = now
            oldest = min(self._begun.copy().values(), default=now)
            if now - max(oldest, since) > self._timeout:
                _close_connections(port)


# Heartbeats and parcels also work with a store of torch itself, as in tests.
Store = WatchedStore | dist.Store


def _port_of(store: Any) -> int | None:
    while not isinstance(store, dist.TCPStore):
        if isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        elif isinstance(store, SignedStore):
            store = store.unsigned
        else:
            return None
    return store.port


def _close_connections(port: int) -> None:
    """Close this process's connections to a port, so that no thread waits for an answer."""
    for descriptor in os.listdir("/dev/fd"):
        with (
            contextlib.suppress(OSError),
            socket.fromfd(int(descriptor), socket.AF_INET, socket.SOCK_STREAM) as connection,
        ):
            peer = connection.getpeername()
            if isinstance(peer, tuple) and peer[1] == port:
                connection.shutdown(socket.SHUT_RDWR)
