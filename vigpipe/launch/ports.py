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
from collections.abc import Callable, Iterator
from typing import Any

from vigpipe.errors import InputError
from vigpipe.launch.environment import Launch
from vigpipe.launch.interface import is_loopback

LEAST, MOST = 1024, 65535  # below only root may listen
_LIBRARIES = re.compile(r"/lib(torch_cpu|nccl)\.so")
# Of elf(5): the kind of a segment, and tags of what the dynamic section says.
_PT_DYNAMIC, _PLTRELSZ, _STRTAB, _SYMTAB, _RELA, _RELASZ, _JMPREL = 2, 2, 5, 6, 7, 8, 23
_SYMBOL_BYTES = 24
_READ_AND_WRITE = 1 | 2  # PROT_READ | PROT_WRITE

_ports: range | None = None  # those of --ports that this rank may take
_option = ""  # as it was given
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
    global _ports, _option
    if text is None:
        return
    ports = parse_ports(text)
    if launch.is_local:
        return
    # Between bind and listen two ranks of a host could have the same.
    _ports, _option = ports[launch.local_rank :: launch.local_world_size], f"--ports {text}"
    if _kept:
        return
    bind = _Bind(_bind_within)
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
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def listen_at(port: int) -> int:
        try:
            listener.bind((host, port))
            listener.listen(1024)
        except OSError as error:
            return error.errno or errno.EINVAL
        return 0

    code = listen_at(0) if _ports is None else _first_free(listen_at)
    if code:
        listener.close()
        raise why_not_bound() or OSError(code, os.strerror(code))
    return listener


def why_not_bound() -> InputError | None:
    """Return why gloo or NCCL could not listen, if that was because --ports has too few ports."""
    if not _has_failed:
        return None
    return InputError(
        f"{_option}: none of the {len(_ports or ())} of a rank on {socket.gethostname()} is free; "
        "a rank takes one for each group of ranks that it is in: give more"
    )


def check_ports(store_port: int) -> None:
    """Raise InputError if this process listens at a port that --ports does not name.

    Allowed are also where the ranks meet, and loopback.
    """
    if _ports is None:
        return
    import psutil

    for connection in psutil.Process().net_connections("tcp"):
        address, port = connection.laddr or ("", 0)
        is_open = connection.status == psutil.CONN_LISTEN and not is_loopback(str(address))
        if is_open and port != store_port and port not in _ports:
            raise InputError(
                f"{_option}: a rank on {socket.gethostname()} listens at port {port} all the same; "
                "leave the option out, and let all ports through"
            )


def _first_free(attempt: Callable[[int], int]) -> int:
    """Try ports of --ports until one is free; return the error of the last attempt, 0 for none."""
    global _has_failed
    assert _ports is not None
    code = errno.EADDRINUSE
    for port in random.Random(os.getpid()).sample(_ports, len(_ports)):
        code = attempt(port)
        if code != errno.EADDRINUSE:
            break
    _has_failed = code == errno.EADDRINUSE
    return code


def _bind_within(descriptor: int, address: int, size: int) -> int:
    """Do what bind does, but instead of port 0 choose one of --ports; C calls this."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    libc.bind.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32)
    try:
        copy = ctypes.create_string_buffer(ctypes.string_at(address, size), size)
        family = ctypes.c_uint16.from_buffer(copy).value
        port = ctypes.c_uint16.from_buffer(copy, 2)  # also of IPv6
        if family not in (socket.AF_INET, socket.AF_INET6) or port.value:
            return libc.bind(descriptor, copy, size)

        def bind_to(chosen: int) -> int:
            port.value = socket.htons(chosen)
            return libc.bind(descriptor, copy, size) and ctypes.get_errno()

        code = _first_free(bind_to)
    except BaseException:  # which C would not see
        return -1
    ctypes.set_errno(code)
    return -1 if code else 0


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
