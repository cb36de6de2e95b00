"""Axial max-relative aggregation: over nodes at given distances in a node's row and column."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_LEAST_TEMPERATURE = 1e-6  # added to the temperature of a gate, as the published code does


class Link(NamedTuple):
    """The link from every node to the one `shift` before it, around the edge of the grid."""

    axis: int  # 0 counts rows, along the column; 1 counts columns, along the row
    shift: int  # 0 links every node to itself
    gated: bool = False


def axial(
    x: Tensor,
    links: Sequence[Link],
    sign: int = 1,
    limit: Tensor | None = None,
    temperature: Tensor | None = None,
) -> Tensor:
    """Take the maximum, from 0, of the relative features of the nodes that a node is linked to.

    The relative feature is that of the linked node less that of the node; with sign -1 it is the
    other way round. A gated link multiplies it by 1 where the nodes' L1 distance is below the limit
    and by 0 elsewhere, or by exp(-distance / (|temperature| + 1e-6)).

    Of equal numbers, the maximum passes half of the gradient to the later link and half to what
    came before; so on a flat region the 0 that it starts from keeps some, as in the published code.

    Args:
        x: nodes, (B, H, W, C).
        links: they are taken in this order; a shift may be negative, and is less than the side.
        sign: 1 or -1.
        limit: for a hard gate, broadcast to (B, H, W, 1); it gets no gradient.
        temperature: for a soft gate, a scalar.

    Returns:
        (B, H, W, C).
    """
    largest = torch.zeros_like(x)
    for axis, shift, gated in links:
        relative = x.roll(shift, 1 + axis) - x if sign > 0 else x - x.roll(shift, 1 + axis)
        if gated:
            distance = _length(relative)
            if temperature is not None:
                gate = torch.exp(-distance / (temperature.abs() + _LEAST_TEMPERATURE))
            else:
                assert limit is not None
                gate = distance < limit
            relative = relative * gate.to(x.dtype)
        largest = torch.maximum(largest, relative)
    return largest


@torch.no_grad()
def axial_limit(x: Tensor) -> Tensor:
    """Return below which distance nodes are near: (B, H, W, C) -> (B, 1, 1, 1).

    That is the mean less the deviation of the L1 distances from every node to the one half a grid
    away in both directions (GreedyViG, arXiv:2405.06849, section 3.2). A single node has no
    deviation, and none is near.
    """
    _, height, width, _ = x.shape
    if height * width == 1:
        return x.new_zeros(len(x), 1, 1, 1)
    far = x.roll(((height + 1) // 2, (width + 1) // 2), (1, 2))
    distances = _length(x - far).flatten(1)
    return (distances.mean(1) - distances.std(1)).view(-1, 1, 1, 1)


def _length(relative: Tensor) -> Tensor:
    """Return L1 lengths, (..., 1), of (..., C); those of half precision are float32."""
    wide = torch.promote_types(relative.dtype, torch.float32)
    return relative.abs().sum(-1, keepdim=True, dtype=wide)
