"""Choose the network interface over which gloo connects the ranks.

By itself gloo offers the address that the host's own name has there. On every Debian that is
127.0.1.1, where no other host can reach it.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil

from vigpipe.errors import PEER_LOST, InputError, StrangerError
from vigpipe.launch.environment import Launch
from vigpipe.launch.failures import CAUSE_SECONDS, sentence_of
from vigpipe.messages import tell

VARIABLE = "GLOO_SOCKET_IFNAME"
_LOOK_SECONDS = 0.2  # how often a rank looks whether another could not be connected


def use_loopback() -> None:
    """Keep the sockets of gloo and NCCL off the network, unless the user chose an interface."""
    loopback = next((name for name in ("lo", "lo0") if name in _interfaces()), None)
    if loopback:  # NCCL by itself takes any other interface for its ranks to meet
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={loopback}")
        os.environ.setdefault(VARIABLE, loopback)


def check_chosen() -> None:
    """Raise InputError if the user has chosen an interface that this host has not."""
    chosen, interfaces = os.environ.get(VARIABLE), _interfaces()
    missing = [name for name in chosen.split(",") if name not in interfaces] if chosen else []
    if missing:
        raise InputError(
            f"{VARIABLE}={chosen}: no interface {missing[0]!r} on {socket.gethostname()}, which "
            f"has {', '.join(interfaces)}"
        )


def use_route(store: Any, launch: Launch, host: str) -> None:
    """Let gloo use the interface that leads to `host`, where the ranks meet; every rank calls this.

    Ranks on that host itself may know it by a loopback address: theirs is the interface with the
    address by which others know it. What the user has chosen stays.
    """
    try:
        own, theirs = _route(host)
    except OSError:  # there is no way to it
        own = theirs = ""
    is_meeting = own.startswith("127.") or own == "::1"
    store.set(f"meets-at/{launch.rank}", "" if is_meeting else theirs)
    addresses = [own]
    if is_meeting:
        keys = [f"meets-at/{rank}" for rank in range(launch.world_size)]
        addresses = [address for key in keys if (address := store.get(key).decode())]
    chosen = next((name for name, has in _interfaces().items() if has & set(addresses)), None)
    if chosen is not None:
        os.environ.setdefault(VARIABLE, chosen)


@contextlib.contextmanager
def told_on_every_host(launch: Launch, host: str, port: int) -> Iterator[None]:
    """Name the interface, and what to do, on every host if gloo cannot connect the ranks there.

    The ranks meet at that host and port. While gloo waits for a connection nothing can be said, so
    a thread looks whether another rank has failed, and ends this one.
    """
    import torch.distributed as dist

    key, is_over = f"vigpipe/{launch.run_id}/not-connected", threading.Event()
    store: Any = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
    name = os.environ.get(VARIABLE)
    over = f"interface {name}" if name else "the address that its own name has there"
    cure = (
        f"{socket.gethostname()} has offered {over}: set {VARIABLE} on every host to the interface "
        "between the hosts"
    )

    def watch() -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, and whoever had it tells why
            while not is_over.wait(_LOOK_SECONDS):
                if store.check([key]):
                    if launch.local_rank == 0:
                        tell(f"gloo cannot connect the ranks; {cure}")
                    time.sleep(CAUSE_SECONDS)  # launchers end all ranks once one has ended
                    os._exit(PEER_LOST)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    except StrangerError:
        raise
    except RuntimeError as error:
        is_over.set()
        thread.join()
        with contextlib.suppress(RuntimeError):
            store.set(key, "")
        why = sentence_of(str(error))
        raise RuntimeError(f"gloo cannot connect the ranks ({why}); {cure}") from error
    finally:
        is_over.set()


def _route(host: str) -> tuple[str, str]:
    """Return the addresses of both ends of a connection to a host; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as connection:
        connection.connect(address)
        return connection.getsockname()[0], connection.getpeername()[0]


def _interfaces() -> dict[str, set[str]]:
    """Return the addresses of each interface of this host."""
    return {
        name: {address.address.partition("%")[0] for address in addresses}
        for name, addresses in psutil.net_if_addrs().items()
    }
