"""Find out which hosts cannot reach one another, before torch and gloo try it for minutes."""

import contextlib
import errno
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from vigpipe.errors import InputError, UnreachableError
from vigpipe.files.names import escaped
from vigpipe.launch.environment import Launch
from vigpipe.launch.interface import VARIABLE, is_loopback, own_address
from vigpipe.launch.ports import listen_within
from vigpipe.messages import tell

_NOTE_SECONDS = 15.0  # after which a host says what it waits for
_MORE_SECONDS = 30.0  # for rank 0 to say who is missing: it may have begun to wait later
_READ_SECONDS = 1.0  # for the others to read that, before the store ends with rank 0
_TRY_SECONDS, _PAUSE_SECONDS = 5.0, 0.2  # for an answer, and from one attempt to the next
_HOST_SECONDS = 10.0  # for the hosts to reach one another
_PROBE_SECONDS = 1.0  # for hosts to answer when a peer was lost
_AT_ONCE = 128  # connections that a host tries: a process may not have many files open
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)


class Door(NamedTuple):
    """Where one host listens for the others, for a moment."""

    host: str
    over: str  # interface
    address: str
    port: int


_others: list[Door] = []  # of the other hosts, as they were at the start


def await_meeting_place(launch: Launch, host: str, port: int, seconds: float) -> None:
    """Return once something listens where the ranks meet.

    Raises:
        InputError: nothing does, and that place is this host by its name.
        UnreachableError: nothing has answered for so many seconds.
    """
    began, has_told = time.monotonic(), False
    here, place = socket.gethostname(), f"rank 0 at {_told(host, port)}"
    while True:
        try:
            socket.create_connection((host, port), min(_TRY_SECONDS, seconds)).close()
        except OSError as error:
            why = _reason(error)
        else:
            return
        waited = time.monotonic() - began
        if waited > min(_NOTE_SECONDS, seconds) and launch.rank > launch.local_rank == 0:
            _check_is_elsewhere(launch, host, port)
        if waited > seconds:
            raise UnreachableError(
                f"{here} has found no {place} for {seconds:g} s ({why}): start it there"
                f"{_firewalls(launch)}"
            )
        if waited > _NOTE_SECONDS and not has_told and launch.local_rank == 0:
            has_told = True
            tell(f"note: {here} waits for {place} ({why})")
        time.sleep(_PAUSE_SECONDS)


def meet_all(store: Any, launch: Launch, host: str, port: int, seconds: float) -> str:
    """Return the name of this meeting once all ranks are here; every rank calls this.

    A store may outlive its ranks, as torchrun's does. So each rank shows a number that it has just
    drawn, rank 0 answers it with the name that it has drawn, and the rank confirms that; what is
    left there of ranks that have ended is not taken for them.

    Raises:
        UnreachableError: some have not come for so many seconds.
    """
    if launch.rank > 0:
        number = secrets.token_hex(8)
        store.set(f"here/{launch.rank}", number)

        def heard(key: str) -> str:
            store.wait([key], timedelta(seconds=seconds + _MORE_SECONDS))
            return store.get(key).decode("utf-8", "replace")

        name = heard(f"answer/{number}")
        store.set(f"confirmed/{name}/{number}", "")
        if failure := heard(f"all/{name}"):
            raise UnreachableError(failure)
        return name
    name, began, has_told = secrets.token_hex(8), time.monotonic(), False
    answered: dict[int, str] = {}  # the number of each rank
    missing = list(range(1, launch.world_size))

    def has_come(rank: int) -> bool:
        if not store.check([f"here/{rank}"]):
            return False
        number = store.get(f"here/{rank}").decode("utf-8", "replace")
        if answered.get(rank) != number:
            store.set(f"answer/{number}", name)
            answered[rank] = number
        return store.check([f"confirmed/{name}/{number}"])

    while missing := [rank for rank in missing if not has_come(rank)]:
        waited = time.monotonic() - began
        some = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        which = f"{'rank' if len(missing) == 1 else 'ranks'} {some} of {launch.world_size}"
        if waited > seconds:
            failure = (
                f"{which} did not come to {_told(host, port)} within {seconds:g} s: start all "
                f"ranks{_firewalls(launch)}"
            )
            store.set(f"all/{name}", failure)
            time.sleep(_READ_SECONDS)
            raise UnreachableError(failure)
        if waited > _NOTE_SECONDS and not has_told:
            has_told = True
            tell(f"note: rank 0 waits at {_told(host, port)} for {which}")
        time.sleep(min(_PAUSE_SECONDS, 0.01 + waited / 20))
    store.set(f"all/{name}", "")
    return name


def check_hosts(launch: Launch, decide: Callable[[str, Any, Callable[..., Any]], Any]) -> None:
    """Raise, the same on all ranks, if two hosts cannot reach one another.

    The first rank of each host listens as gloo will, and tries to connect to all the others.
    `decide` is `decide_together` of this run; every rank calls this.

    Raises:
        InputError: --ports has none for a host.
        UnreachableError: the hosts cannot reach one another, and why.
    """
    with contextlib.ExitStack() as stack:
        own = _listen(stack) if launch.local_rank == 0 else None
        found = decide("doors", own, lambda told: [one for one in told if one])
        failure = next((one for one in found if isinstance(one, str)), "")
        if not failure:
            doors = [Door(*one) for one in found]
            _others[:] = [door for door in doors if door.host != socket.gethostname()]
            reasons = _knock(own, doors) if isinstance(own, Door) else []
            failure = decide("unreached", reasons, _summary)
    if failure:
        with contextlib.suppress(RuntimeError):  # time is up
            decide("heard", None, lambda _: None)  # before rank 0, which has the store, ends
        raise (InputError if failure.startswith("--ports") else UnreachableError)(failure)


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


def _summary(of_hosts: Sequence[Sequence[str]]) -> str:
    failures = [failure for of_host in of_hosts for failure in of_host]
    if not failures:
        return ""
    more = f"; and {len(failures) - 3} more" if len(failures) > 3 else ""
    return (
        f"{'; '.join(failures[:3])}{more}: set {VARIABLE} on every host to the interface between "
        "the hosts, or let their firewalls pass TCP to the ports of --ports"
    )


def _listen(stack: contextlib.ExitStack) -> Door | str | None:
    """Listen as gloo will, until the end of a context; return where, or why not.

    None: at an address that another host would need the name of an interface for.
    """
    name, address, family = own_address()
    if address.startswith("fe80:"):
        return None
    try:
        listener = stack.enter_context(listen_within(address, family))
    except InputError as error:
        return str(error)
    except OSError as error:
        return (
            f"{socket.gethostname()} cannot listen at {address}, {name} ({_reason(error)}): set "
            f"{VARIABLE} on every host to the interface between the hosts"
        )
    is_over = threading.Event()

    def open_and_close() -> None:  # else the system lets only so many come
        while not is_over.is_set():
            with contextlib.suppress(OSError):  # of a time without anyone
                listener.accept()[0].close()

    listener.settimeout(_PAUSE_SECONDS)
    thread = threading.Thread(target=open_and_close, daemon=True)
    thread.start()
    stack.callback(thread.join)
    stack.callback(is_over.set)
    return Door(socket.gethostname(), name, *listener.getsockname()[:2])


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
    """Try to connect to doors; return each one's error, 0 for none, None if it is silent.

    Those that there was no time for are left out.
    """
    codes: dict[Door, int | None] = {}
    deadline = time.monotonic() + seconds
    for start in range(0, len(doors), _AT_ONCE):
        if time.monotonic() > deadline:
            break
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as waiting:
            for door in doors[start : start + _AT_ONCE]:
                family = socket.AF_INET6 if ":" in door.address else socket.AF_INET
                connection = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                connection.setblocking(False)
                code = connection.connect_ex((door.address, door.port))
                codes[door] = None
                if code in (0, errno.EINPROGRESS):
                    waiting.register(connection, selectors.EVENT_WRITE, door)
                else:  # there is no route, for one
                    codes[door] = code
            while waiting.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in waiting.select(left):
                    connection: Any = key.fileobj
                    codes[key.data] = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    waiting.unregister(connection)
    return codes


def check_name(launch: Launch, host: str, port: int) -> None:
    """Raise InputError for a name that has no address here: torch tries it for minutes."""
    try:
        socket.getaddrinfo(host, port)
    except (OSError, UnicodeError):
        raise InputError(
            f"the name '{escaped(host)}' of rank 0's node does not resolve on "
            f"{socket.gethostname()}: {_cure(launch)}"
        ) from None


def check_own(host: str, port: int) -> None:
    """Raise InputError if rank 0, which listens, is not where the ranks are told to meet."""
    try:
        socket.create_connection((host, port), _TRY_SECONDS).close()
    except OSError as error:
        raise InputError(
            f"rank 0 listens on {socket.gethostname()}, but {_told(host, port)} does not lead "
            f"there ({_reason(error)}): set MASTER_ADDR to an address of rank 0's node"
        ) from None


def _check_is_elsewhere(launch: Launch, host: str, port: int) -> None:
    """Raise InputError if the name of rank 0's node leads to this host, where rank 0 is not."""
    found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port)}
    if all(map(is_loopback, found)):
        here = socket.gethostname()
        raise InputError(
            f"the name '{escaped(host)}' of rank 0's node means {min(found)} on {here}, which is "
            f"{here} itself, and nothing listens there: {_cure(launch)}"
        )


def _cure(launch: Launch) -> str:
    if launch.launcher == "torchrun" and "TORCHELASTIC_RUN_ID" in os.environ:
        return "give each torchrun --local-addr with an address of its node"
    return "set MASTER_ADDR to an address of that node which every node can reach"


def _firewalls(launch: Launch) -> str:
    if launch.is_local:
        return ""
    return ", and let the firewalls between the hosts pass TCP to that port"


def _told(host: str, port: int) -> str:
    return f"{escaped(host)} port {port}"


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "no answer"
    return error.strerror or str(error)
