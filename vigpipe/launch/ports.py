"""Keep the ports on which gloo and NCCL listen within --ports, for firewalls between the hosts.

Both bind to port 0, which lets the system choose, and have no setting for it. So the entry for
`bind` in their libraries' tables of imported functions is replaced by a function that chooses the
port. It is looked up with dl_iterate_phdr(3), in the dynamic section that elf(5) describes.
"""

import ctypes
import errno
import os
import random
import re
import socket
import sys
from collections.abc import Iterator
from typing import Any

from vigpipe.errors import InputError
from vigpipe.launch.environment import Launch

LEAST, MOST = 1024, 65535  # below only root may listen
_LIBRARIES = re.compile(r"/lib(torch_cpu|nccl)\.so")
# Of elf(5): the kind of a segment, and tags of what the dynamic section says.
_PT_DYNAMIC, _PLTRELSZ, _STRTAB, _SYMTAB, _RELA, _RELASZ, _JMPREL = 2, 2, 5, 6, 7, 8, 23
_SYMBOL_BYTES = 24
_READ_AND_WRITE = 1 | 2  # PROT_READ | PROT_WRITE

_range: range | None = None  # what --ports allows
_has_failed = False  # to find a free one of them
_kept: list[Any] = []  # what the libraries call must not be freed


class _Segment(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("offset", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("physical", ctypes.c_uint64),
        ("file_size", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("align", ctypes.c_uint64),
    )


class _Library(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("segments", ctypes.POINTER(_Segment)),
        ("num_segments", ctypes.c_uint16),
    )


_Bind = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True
)
_Visit = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Library), ctypes.c_size_t, ctypes.c_void_p)


def parse_ports(text: str) -> range:
    """Return the ports that --ports A-B allows, both ends included, or raise InputError."""
    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
    first, last = map(int, match.groups()) if match else (1, 0)
    if not LEAST <= first <= last <= MOST:
        raise InputError(
            f"--ports {text}: expected the first and the last port, such as 29600-29699, from "
            f"{LEAST} to {MOST}"
        )
    return range(first, last + 1)


def use_ports(text: str | None, launch: Launch) -> None:
    """Let gloo and NCCL listen at ports of --ports only, between hosts; call it before they do.

    Ranks of one host listen on loopback, where no firewall is.

    Raises:
        InputError: --ports is wrong, or not possible with this system or torch.
    """
    global _range
    if text is None or launch.is_local:
        return
    _range = parse_ports(text)
    if _kept:
        return
    bind = _bind_within(_range)
    slots = list(_slots("bind")) if sys.platform == "linux" else []
    if not slots:
        raise InputError(
            f"--ports {text}: this torch does not import bind as a library of Linux does, so that "
            "its ports cannot be chosen; leave it out, and let all ports through"
        )
    _kept.append(bind)
    address = ctypes.cast(bind, ctypes.c_void_p).value
    for slot in slots:
        _make_writable(slot)
        ctypes.c_uint64.from_address(slot).value = address or 0


def listen_within(host: str, family: int) -> socket.socket:
    """Listen at a port of --ports, or at any without the option."""
    if _range is None:
        return socket.create_server((host, 0), family=family)
    for port in _shuffled(_range):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((host, port))
            listener.listen()
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return listener
    raise _none_is_free(_range)


def why_not_bound() -> InputError | None:
    """Return why gloo or NCCL could not listen, if that was because --ports has too few ports."""
    return _none_is_free(_range) if _range is not None and _has_failed else None


def check_ports(store_port: int) -> None:
    """Raise RuntimeError if this process listens at a port that --ports does not name.

    Allowed are also where the ranks meet, and loopback.
    """
    if _range is None:
        return
    import psutil

    for connection in psutil.Process().net_connections("tcp"):
        address, port = connection.laddr or ("", 0)
        is_open = connection.status == psutil.CONN_LISTEN and not is_loopback(str(address))
        if is_open and port != store_port and port not in _range:
            raise RuntimeError(
                f"this rank listens at port {port}, which is not one of --ports "
                f"{_range[0]}-{_range[-1]}; leave the option out, and let all ports through"
            )


def is_loopback(address: str) -> bool:
    """Whether an address leads to the host itself."""
    return address == "::1" or address.startswith("127.")


def _shuffled(ports: range) -> list[int]:
    """Return the ports in an order that other ranks of this host do not have."""
    return random.Random(os.getpid()).sample(ports, len(ports))


def _none_is_free(ports: range) -> InputError:
    return InputError(
        f"--ports {ports[0]}-{ports[-1]}: none is free on {socket.gethostname()}; a rank takes one "
        "for each group of ranks that it is in: give more"
    )


def _bind_within(ports: range) -> Any:
    """Return a function for C that does what bind does, but for port 0 chooses one of `ports`."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.bind.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32)

    def bind(descriptor: int, address: int, size: int) -> int:
        global _has_failed
        family = ctypes.c_uint16.from_address(address).value
        port = ctypes.c_uint16.from_address(address + 2)  # also of IPv6
        if family not in (socket.AF_INET, socket.AF_INET6) or port.value:
            return libc.bind(descriptor, address, size)
        # With SO_REUSEADDR, as gloo has it, two ranks could bind to one port, and only one listen.
        no = ctypes.c_int(0)
        libc.setsockopt(
            descriptor, socket.SOL_SOCKET, socket.SO_REUSEADDR, ctypes.byref(no), ctypes.sizeof(no)
        )
        for chosen in _shuffled(ports):
            port.value = socket.htons(chosen)
            if libc.bind(descriptor, address, size) == 0:
                return 0
            if ctypes.get_errno() != errno.EADDRINUSE:
                break
        else:
            _has_failed = True
        port.value = 0
        return -1

    return _Bind(bind)


def _slots(function: str) -> Iterator[int]:
    """Yield the addresses where the libraries keep that of a function they import."""
    libraries: list[tuple[int, int]] = []

    def visit(library: Any, size: int, data: Any) -> int:
        found = library.contents
        if _LIBRARIES.search((found.name or b"").decode(errors="replace")):
            for segment in found.segments[: found.num_segments]:
                if segment.kind == _PT_DYNAMIC:
                    libraries.append((found.address, found.address + segment.address))
        return 0

    ctypes.CDLL(None).dl_iterate_phdr(_Visit(visit), None)
    for base, dynamic in libraries:
        yield from _slots_of(function.encode() + b"\0", base, dynamic)


def _slots_of(name: bytes, base: int, dynamic: int) -> Iterator[int]:
    import numpy as np

    tags: dict[int, int] = {}
    pairs = (ctypes.c_uint64 * 2).from_address
    while (pair := pairs(dynamic))[0]:
        tags[pair[0]] = pair[1]
        dynamic += 16

    def at(tag: int) -> int:  # the loader makes addresses of them
        return tags[tag] if tags[tag] >= base else base + tags[tag]

    for table, size in ((_JMPREL, _PLTRELSZ), (_RELA, _RELASZ)):
        if table not in tags:
            continue
        rows: Any = (ctypes.c_uint64 * (tags[size] // 8)).from_address(at(table))
        offsets, infos, _ = np.frombuffer(rows, np.uint64).reshape(-1, 3).T
        for symbol in np.unique(infos >> np.uint64(32)).tolist():
            start = ctypes.c_uint32.from_address(at(_SYMTAB) + _SYMBOL_BYTES * symbol).value
            if symbol and ctypes.string_at(at(_STRTAB) + start, len(name)) == name:
                for offset in offsets[infos >> np.uint64(32) == symbol].tolist():
                    yield base + offset


def _make_writable(address: int) -> None:
    page = os.sysconf("SC_PAGESIZE")
    libc: Any = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if libc.mprotect(address // page * page, page, _READ_AND_WRITE):
        raise OSError(ctypes.get_errno(), "mprotect")
