"""Named tensors that are parts of a file: safetensors files, mapped into memory.

Writing to such a tensor writes the file; only the operating system's page cache holds it in memory.
The format is the length of a JSON header in 8 bytes, the header, which may end in spaces, and the
data.
"""

import contextlib
import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vigpipe.errors import InputError

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

_BLOCK_BYTES = 4 << 20
_NUMBERS_AT_ONCE = 1 << 20  # how many numbers `put_entries` writes at a time
_ALIGNMENT_BYTES = 64
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def header(tensors: Shapes, metadata: Mapping[str, str] | None = None) -> tuple[bytes, list[str]]:
    """Return a file's header, which depends on its arguments only, and the order of its data."""
    # The widest dtypes come first, to be aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
    table: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    start = 0
    for name in order:
        dtype, shape = tensors[name]
        end = start + dtype.itemsize * math.prod(shape)
        table[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
        start = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    length = -(-(8 + len(text)) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES - 8
    return length.to_bytes(8, "little") + text.ljust(length), order


def create(
    path: Path, tensors: Shapes, metadata: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    """Write a file of zeros, and map its tensors for reading and writing.

    Its space on the disk is reserved now, so that no later write can find the disk full; after an
    OSError nothing is left of the file. One that is there already is replaced, and stays as it is
    for those who have it mapped.
    """
    start, _ = header(tensors, metadata)
    data_bytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in tensors.values())
    path.unlink(missing_ok=True)
    try:
        with path.open("xb") as file:
            file.write(start)
            file.flush()
            os.posix_fallocate(file.fileno(), 0, len(start) + data_bytes)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return open(path)


def open(path: Path, *, writes_file: bool = True) -> dict[str, Tensor]:
    """Map a file's tensors by name; without `writes_file`, writes to them stay in this process."""
    access = mmap.ACCESS_WRITE if writes_file else mmap.ACCESS_COPY
    try:
        with safe_open(path, framework="pt"):
            pass  # opening it has checked the header
        with path.open("r+b" if writes_file else "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            table = json.loads(file.read(length))
            memory = mmap.mmap(file.fileno(), 0, access=access)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except SafetensorError as error:
        raise InputError(f"{path}: is not a safetensors file ({error}); give another") from error
    table.pop("__metadata__", None)
    return {name: _mapped(memory, 8 + length, entry, path) for name, entry in table.items()}


def _mapped(memory: mmap.mmap, start: int, entry: Mapping[str, Any], path: Path) -> Tensor:
    name, shape, (first, _) = (entry[key] for key in ("dtype", "shape", "data_offsets"))
    if name not in _DTYPES:
        raise InputError(f"{path}: has numbers of type {name}, which no model has; give another")
    dtype, count = _DTYPES[name], math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start + first).view(shape)


def copy_blocks(target: Tensor, source: Tensor) -> None:
    """Copy a contiguous tensor to another one of equally many numbers block by block."""
    if target.numel() != source.numel():
        raise ValueError(f"{source.numel()} numbers do not fit {target.numel()}")
    for to, what in zip(blocks(target), blocks(source, like=target), strict=True):
        to.copy_(what)


def blocks(tensor: Tensor, like: Tensor | None = None) -> Iterator[Tensor]:
    """Yield flat views of a contiguous tensor, with as many numbers as a few MiB of `like` have."""
    count = _BLOCK_BYTES // (tensor if like is None else like).itemsize
    flat = tensor.detach().view(-1)
    for first in range(0, len(flat), count):
        yield flat[first : first + count]


def put_entries(target: Tensor, part: Tensor, entries: Sequence[Tensor | None]) -> None:
    """Write a part by rows, at `entries` by dimension: None is all of it, and some are not None."""
    lists = [torch.arange(n) if e is None else e for n, e in zip(part.shape, entries, strict=True)]
    last = max(i for i, e in enumerate(entries) if e is not None)
    at_once = max(1, _NUMBERS_AT_ONCE // max(1, math.prod(part.shape[1:])))
    for first in range(0, len(part), at_once):
        block = part[first : first + at_once]
        index = [lists[0][first : first + at_once], *lists[1 : last + 1]]
        mesh = tuple(e.view(-1, *[1] * (last - i)) for i, e in enumerate(index))
        target[mesh] = block.to(target.dtype)


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    """Return dtype and shape of some tensors, by name, as `create` takes them."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
