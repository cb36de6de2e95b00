"""A stranger who connects to a rank before its peer does, and sends back whatever it gets."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterable, Iterator

GREETING_BYTES = 8  # gloo's: the number of a pair


def _sockets() -> Iterator[list[str]]:
    """The fields of each line of /proc/net/tcp and tcp6: proc(5)."""
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as lines:
            yield from (line.split() for line in lines.readlines()[1:])


def open_descriptors() -> set[str]:
    """What this process has open."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own, or closed by another thread
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return found


def listening(owner: int | None = None) -> dict[int, str]:
    """The ports on which processes of a user, or this one itself, listen, with the addresses.

    Addresses are as in /proc/net/tcp, hexadecimal.
    """
    mine, found = open_descriptors(), {}
    for fields in _sockets():
        is_own = f"socket:[{fields[9]}]" in mine
        if fields[3] == "0A" and (is_own if owner is None else int(fields[7]) == owner):
            address, port = fields[1].split(":")
            found[int(port, 16)] = address
    return found


class Parrot:
    """Holds connections, each of which takes the place of a pair, until the end of its context."""

    def __init__(self) -> None:
        self._connections: list[socket.socket] = []

    def take(self, address: str, port: int, pairs: Iterable[int]) -> None:
        """Connect to a rank's port for the first time, as the peers of these pairs."""
        for pair in pairs:
            with contextlib.suppress(OSError):
                connection = socket.create_connection((address, port), 1)
                connection.settimeout(None)
                connection.sendall(pair.to_bytes(GREETING_BYTES, "little"))
                self._connections.append(connection)
                threading.Thread(target=self._repeat, args=(connection,), daemon=True).start()

    def is_heard(self) -> bool:
        """Whether the ranks have read all greetings."""
        mine = {f"{connection.getsockname()[1]:04X}" for connection in self._connections}
        theirs = [f for f in _sockets() if f[2].partition(":")[2] in mine and f[3] == "01"]
        return all(int(f[4].partition(":")[2], 16) == 0 and f[9] != "0" for f in theirs)

    def _repeat(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := connection.recv(1 << 16):
                connection.sendall(content)
