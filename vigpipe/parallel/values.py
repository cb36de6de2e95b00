"""Exchange small values between ranks as JSON, and named tensors as their bytes.

torch's own `all_gather_object` unpickles, and so runs whatever code a stranger in the place of a
rank sends it. Nothing is unpickled here.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def broadcast_value(value: Any, world_size: int) -> Any:
    """Return rank 0's value on every rank; every rank calls this."""
    if world_size == 1:
        return value
    own = _encoded(value)
    size = torch.tensor(len(own))
    dist.broadcast(size, src=0)
    text = own if dist.get_rank() == 0 else own.new_empty(int(size))
    dist.broadcast(text, src=0)
    return _decoded(text)


def all_gather_values(
    value: Any,
    world_size: int,
    group: dist.ProcessGroup | None = None,  # None for all ranks of the run
) -> list[Any]:
    """Return the values of all ranks of a group, in rank order; each of them calls this.

    A value consists of texts, numbers, bools and None, in lists and dictionaries with texts as
    keys: others raise TypeError rather than come back as something else.
    """
    if world_size == 1:
        return [value]
    own = _encoded(value)
    sizes, padded = _alike(own, world_size, group)
    texts = padded.new_empty(world_size * len(padded))
    dist.all_gather_into_tensor(texts, padded, group=group)
    rows = texts.view(world_size, -1)
    return [_decoded(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def gather_values(
    value: Any, world_size: int, to: int, group: dist.ProcessGroup | None = None
) -> list[Any] | None:
    """Do what `all_gather_values` does for the rank `to` of the group; the others get None."""
    if world_size == 1:
        return [value]
    sizes, padded = _alike(_encoded(value), world_size, group)
    receives = dist.get_rank(group) == to
    texts = [torch.empty_like(padded) for _ in range(world_size)] if receives else None
    dist.gather(padded, texts, group=group, group_dst=to)
    if texts is None:
        return None
    return [_decoded(text[:size]) for text, size in zip(texts, sizes, strict=True)]


def gather_tensors(
    own: Mapping[str, Tensor], world_size: int, to: int, group: dist.ProcessGroup | None = None
) -> list[dict[str, Tensor]] | None:
    """Return CPU copies of the named tensors of all ranks of a group, on its rank `to` only."""
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in own.items()}
    if world_size == 1:
        return [copies]
    shapes = {name: [dtype_name(t.dtype), list(t.shape)] for name, t in copies.items()}
    by_rank = gather_values(shapes, world_size, to, group)
    if by_rank is None:
        for tensor in copies.values():
            if tensor.numel():
                dist.send(_bytes_of(tensor.contiguous()), group=group, group_dst=to)
        return None
    gathered = []
    for rank, of_rank in enumerate(by_rank):
        if rank == to:
            gathered.append(copies)
            continue
        tensors = {n: torch.empty(shape, dtype=dtype_of(t)) for n, (t, shape) in of_rank.items()}
        for tensor in tensors.values():
            if tensor.numel():
                dist.recv(_bytes_of(tensor), group=group, group_src=rank)
        gathered.append(tensors)
    return gathered


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in torch, such as float32, for `dtype_of`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that `dtype_name` has named."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's own bytes, as gloo takes them whatever the dtype."""
    return tensor.view(-1).view(torch.uint8)


def _alike(
    own: Tensor, world_size: int, group: dist.ProcessGroup | None
) -> tuple[list[int], Tensor]:
    """Return the sizes of all ranks' texts, and this one's filled up to the largest."""
    sizes = torch.empty(world_size, dtype=torch.int64)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(own)]), group=group)
    padded = own.new_zeros(int(sizes.max()))
    padded[: len(own)] = own
    return sizes.tolist(), padded


def _encoded(value: Any) -> Tensor:
    _check_plain(value)
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decoded(text: Tensor) -> Any:
    return json.loads(text.numpy().tobytes())


def _check_plain(value: Any) -> None:
    """Raise TypeError for what JSON would bring back as something else."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"a value for other ranks has the key {key!r}, which is no text")
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            _check_plain(part)
    elif not (value is None or isinstance(value, str | int | float)):
        raise TypeError(f"a value for other ranks has a {type(value).__name__}, which JSON has not")
