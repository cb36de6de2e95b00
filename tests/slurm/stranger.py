"""Another user of a host, who reads or writes the store of a run, and connects to its ranks first.

    python -m tests.slurm.stranger read|write ADDRESS PORT

It lists every key and value of the store to stdout, and holds connections to every port of the run.
As a writer it also writes each value anew, and takes the place of ranks (`tests.launch.parrot`). It
ends with the store.
"""

import contextlib
import os
import socket
import sys
import time
from typing import Any

import torch.distributed as dist

from tests.launch.parrot import Parrot, listening

NOBODY, NUM_PAIRS, NUM_HELD = 65534, 8, 30


def main(what: str, address: str, port: int) -> None:
    """Attack until the store is gone."""
    parrot, known, held = Parrot(), {port}, []
    address.encode("idna")  # imports what this user may not read
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    print("here", flush=True)
    while port not in listening(0):
        time.sleep(0.01)
    store: Any = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
    seen: dict[str, bytes] = {}
    with contextlib.suppress(RuntimeError, OSError):
        while True:
            for key in store.list_keys():
                value = store.get(key)
                if seen.setdefault(key, value) == value and what == "read":
                    continue
                if what == "write":
                    store.set(key, value[::-1])
            for new in listening(0).keys() - known:
                known.add(new)
                if what == "write":
                    parrot.take(address, new, range(NUM_PAIRS))
                held += [socket.create_connection((address, new), 1) for _ in range(NUM_HELD)]
    print(seen, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
