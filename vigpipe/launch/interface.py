"""Choose the network interface over which gloo connects the ranks.

By itself gloo offers the address that the host's own name has there. On every Debian that is
127.0.1.1, where no other host can reach it.
"""

import contextlib
import os
import socket
from typing import Any

from vigpipe.errors import InputError
from vigpipe.launch.environment import Launch

VARIABLE = "GLOO_SOCKET_IFNAME"
_FAMILIES = socket.AF_INET, socket.AF_INET6


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
    is_meeting = is_loopback(own)
    store.set(f"meets-at/{launch.rank}", "" if is_meeting else theirs)
    addresses = [own]
    if is_meeting:
        keys = [f"meets-at/{rank}" for rank in range(launch.world_size)]
        addresses = [address for key in keys if (address := store.get(key).decode())]
    chosen = next((name for name, has in _interfaces().items() if has & set(addresses)), None)
    if chosen is not None:
        os.environ.setdefault(VARIABLE, chosen)


def own_address() -> tuple[str, str, socket.AddressFamily]:
    """Return the interface that gloo takes, its first address and the family of that.

    Without an interface gloo takes the address that this host's own name has.
    """
    import psutil

    name = os.environ.get(VARIABLE, "").partition(",")[0]
    found = [one for one in psutil.net_if_addrs().get(name, ()) if one.family in _FAMILIES]
    if found:
        return name, found[0].address.partition("%")[0], socket.AddressFamily(found[0].family)
    host = socket.gethostname()
    with contextlib.suppress(OSError):
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return f"the address of its own name, {host}", str(address[0]), family
    return "lo", "127.0.0.1", socket.AF_INET


def is_loopback(address: str) -> bool:
    """Whether an address leads to the host itself."""
    return address == "::1" or address.startswith("127.")


def _route(host: str) -> tuple[str, str]:
    """Return the addresses of both ends of a connection to a host; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as connection:
        connection.connect(address)
        return connection.getsockname()[0], connection.getpeername()[0]


def _interfaces() -> dict[str, set[str]]:
    """Return the addresses of each interface of this host."""
    import psutil  # which the commands that start no ranks do without

    return {
        name: {address.address.partition("%")[0] for address in addresses}
        for name, addresses in psutil.net_if_addrs().items()
    }
