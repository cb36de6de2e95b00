"""Axial max-relative aggregation: over nodes at given distances in a node's row and column."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from vigpipe.ops import is_fused, plain


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
    *,
    fused: bool = True,
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
        limit: of each image for a hard gate, (B,) float32, or float64 as x; it gets no gradient.
        temperature: for a soft gate, a scalar.
        fused: use the fused operator where there is one.

    Returns:
        (B, H, W, C).
    """
    if fused and links and x.numel() and is_fused(x, "axial"):
        from vigpipe.ops import registered

        return registered.axial(x, list(chain(*links)), sign, limit, temperature)[0]
    return plain.axial(x, links, sign, limit, temperature)


@torch.no_grad()
def axial_limit(x: Tensor, *, fused: bool = True) -> Tensor:
    """Return below which distance nodes are near: (B, H, W, C) -> (B,) float32, or float64 as x.

    That is the mean less the deviation of the L1 distances from every node to the one half a grid
    away in both directions (GreedyViG, arXiv:2405.06849, section 3.2). A single node has no
    deviation, and none is near.
    """
    if x.shape[1] * x.shape[2] == 1:
        return x.new_zeros(len(x), dtype=torch.promote_types(x.dtype, torch.float32))
    if fused and x.numel() and is_fused(x, "axial"):
        distances = torch.ops.vigpipe.axial_far(x.detach())
    else:
        distances = plain.axial_far(x)
    return distances.mean(1) - distances.std(1)
