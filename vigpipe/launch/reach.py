"""Find out which hosts cannot reach one another, before torch and gloo try it for minutes."""

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any, NamedTuple

from vigpipe.errors import InputError, UnreachableError
from vigpipe.files.names import escaped
from vigpipe.launch.environment import Launch
from vigpipe.launch.interface import VARIABLE, own_address
from vigpipe.launch.ports import is_loopback, listen_within
from vigpipe.messages import tell

_ALL_HERE = "all-here"  # of the store: empty, or which ranks are missing
_MORE_SECONDS = 30.0  # for rank 0 to say so, which may have begun to wait later
_NOTE_SECONDS = 15.0  # after which a host says what it waits for
_TRY_SECONDS, _PAUSE_SECONDS = 5.0, 0.2  # for an answer, and from one attempt to the next
_HOST_SECONDS = 10.0  # for the hosts to reach one another
_PROBE_SECONDS = 1.0  # for hosts to answer when a peer was lost
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)
_FIREWALL = "let the firewalls between the hosts pass TCP to that port"


_others: list["Door"] = []  # of the other hosts, where they listened at the start


class Door(NamedTuple):
    """Where one host listens for the others, for a moment."""

    host: str
    over: str  # interface
    address: str
    port: int


def await_meeting_place(launch: Launch, host: str, port: int, seconds: float) -> None:
    """Return once something listens where the ranks meet.

    Raises:
        UnreachableError: nothing has answered for so many seconds.
    """
    began, has_told = time.monotonic(), False
    while True:
        try:
            socket.create_connection((host, port), _TRY_SECONDS).close()
        except OSError as error:
            why = _reason(error)
        else:
            return
        waited = time.monotonic() - began
        place = f"rank 0 at {_told(host, port)}"
        if waited > seconds:
            raise UnreachableError(
                f"{socket.gethostname()} has found no {place} for {waited:.0f} s ({why}): start "
                f"it there, and {_FIREWALL}"
            )
        if waited > _NOTE_SECONDS and not has_told and launch.local_rank == 0:
            has_told = True
            tell(f"note: {socket.gethostname()} waits for {place} ({why})")
        time.sleep(_PAUSE_SECONDS)


def await_ranks(store: Any, launch: Launch, host: str, port: int, seconds: float) -> None:
    """Return once all ranks are here, which rank 0 finds out; every rank calls this.

    Raises:
        UnreachableError: some have not come for so many seconds.
    """
    store.set(f"here/{launch.rank}", "")
    if launch.rank > 0:
        store.wait([_ALL_HERE], timedelta(seconds=seconds + _MORE_SECONDS))
        if failure := store.get(_ALL_HERE).decode():
            raise UnreachableError(failure)
        return
    began, has_told, waited = time.monotonic(), False, 0.0
    missing = list(range(launch.world_size))

    def which() -> str:
        missing[:] = [rank for rank in missing if not store.check([f"here/{rank}"])]
        some = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        return f"{'rank' if len(missing) == 1 else 'ranks'} {some} of {launch.world_size}"

    while missing:
        if store.check([f"here/{missing[0]}"]):
            del missing[0]
            continue
        waited = time.monotonic() - began
        if waited > seconds:
            failure = (
                f"{which()} did not come to {_told(host, port)} within {waited:.0f} s: start all "
                f"ranks, and {_FIREWALL}"
            )
            store.set(_ALL_HERE, failure)
            raise UnreachableError(failure)
        if waited > _NOTE_SECONDS and not has_told:
            has_told = True
            tell(f"note: rank 0 waits at {_told(host, port)} for {which()}")
        time.sleep(min(_PAUSE_SECONDS, 0.01 + waited / 20))
    store.set(_ALL_HERE, "")


def check_hosts(launch: Launch, decide: Callable[[str, Any, Callable[..., Any]], Any]) -> None:
    """Raise UnreachableError, the same on all ranks, if two hosts cannot reach one another.

    The first rank of each host listens as gloo will, and tries to connect to all the others.
    `decide` is `decide_together` of this run; every rank calls this.
    """
    with contextlib.ExitStack() as stack:
        own = _listen(stack) if launch.local_rank == 0 else None
        found = decide("doors", own, lambda told: [one for one in told if one])
        failures = [one for one in found if isinstance(one, str)]
        if not failures:
            doors = [Door(*one) for one in found]
            _others[:] = [door for door in doors if door.host != socket.gethostname()]
            reasons = _knock(own, doors) if isinstance(own, Door) else []
            failures = decide("unreached", reasons, lambda lists: list(chain.from_iterable(lists)))
    if failures:
        more = f"; and {len(failures) - 3} more" if len(failures) > 3 else ""
        raise UnreachableError(
            f"{'; '.join(failures[:3])}{more}: set {VARIABLE} on every host to the interface "
            "between the hosts, or let their firewalls pass TCP to the ports of --ports"
        )


def _listen(stack: contextlib.ExitStack) -> Door | str:
    """Listen as gloo will, until the end of a context; return where, or why not."""
    name, address, family = own_address()
    try:
        listener = stack.enter_context(listen_within(address, family))
    except (OSError, InputError) as error:
        why = str(error) if isinstance(error, InputError) else _reason(error)
        return f"{socket.gethostname()} cannot listen at {address} ({name}): {why}"
    return Door(socket.gethostname(), name, *listener.getsockname()[:2])


def silent_hosts() -> str:
    """Say which hosts of the run do not answer now; empty if all do, or there is one.

    Where a host listened at the start it refuses connections now, unless it is cut off.
    """
    codes = _connect(_others, _PROBE_SECONDS)
    silent = [
        f"{door.host} ({door.address})" for door, code in codes.items() if code not in _ANSWERS
    ]
    if not silent:
        return ""
    do, are, they = ("does", "is", "it") if len(silent) == 1 else ("do", "are", "they")
    return f"{', '.join(silent)} {do} not answer: {are} {they} down, or cut off?"


def _knock(own: Door, doors: Sequence[Door]) -> list[str]:
    """Try to connect to all other hosts; say which of them this one cannot reach."""
    others = [door for door in doors if door != own]
    return [
        f"{own.host} cannot reach {door.host} at {door.address} port {door.port}, {door.over} "
        f"({'no answer' if code is None else os.strerror(code).lower()})"
        for door, code in _connect(others, _HOST_SECONDS).items()
        if code != 0
    ]


def _connect(doors: Sequence[Door], seconds: float) -> dict[Door, int | None]:
    """Try to connect to all doors at once; return each one's error, 0 for none, None if silent."""
    codes: dict[Door, int | None] = dict.fromkeys(doors)
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as waiting:
        for door in doors:
            family = socket.AF_INET6 if ":" in door.address else socket.AF_INET
            connection = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            connection.setblocking(False)
            code = connection.connect_ex((door.address, door.port))
            if code in (0, errno.EINPROGRESS):
                waiting.register(connection, selectors.EVENT_WRITE, door)
            else:  # there is no route, for one
                codes[door] = code
        deadline = time.monotonic() + seconds
        while waiting.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                connection: Any = key.fileobj
                codes[key.data] = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                waiting.unregister(connection)
    return codes


def check_name(launch: Launch, host: str, port: int) -> None:
    """Raise InputError for a name that cannot lead to rank 0: it has no address, or this host's."""
    here = socket.gethostname()
    cure = "set MASTER_ADDR to an address of that node which every node can reach"
    if launch.launcher == "torchrun" and "TORCHELASTIC_RUN_ID" in os.environ:
        cure = "give each torchrun --local-addr with an address of its node"
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, port)}
    except (OSError, UnicodeError):
        raise InputError(
            f"the name '{escaped(host)}' of rank 0's node does not resolve on {here}: {cure}"
        ) from None
    own = {str(address) for address in found if is_loopback(str(address))}
    # Ranks of rank 0's own host may know it by such an address.
    if own == found and launch.rank > launch.local_rank == 0:
        raise InputError(
            f"the name '{escaped(host)}' of rank 0's node means {min(own)} on {here}, which is "
            f"{here} itself: {cure}"
        )


def _told(host: str, port: int) -> str:
    return f"{escaped(host)} port {port}"


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "no answer"
    return error.strerror or str(error)
