"""Graph convolutions on fixed links along rows and columns, and on all nodes by attention."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vigpipe.config.choices import Norm
from vigpipe.model.layer import Layer
from vigpipe.model.position import Grid
from vigpipe.model.regions import region
from vigpipe.ops.axial import Link, axial, axial_limit

# Which nodes a node is linked to, along its column and its row, on a grid whose sides are n:
# every     K, 2K, ... < n before it (SVGA; MobileViG, arXiv:2307.00395)
# four      K before and K behind it (MobileViGv2, arXiv:2406.05695)
# near      0, K, 2K, ... < n before it, where it is near (DAGC; GreedyViG, arXiv:2405.06849)
# soft      K before it, and 2, 4, 8, ... <= n before it, with a gate that falls with the distance
#           between their features (AdaptViG)
# powers    K - 1, K^2 - 1, ... before and behind it, as many as n has binary digits, less one
#           (LogViG, arXiv:2510.13740)
LinkKind = Literal["every", "four", "near", "soft", "powers"]


def make_links(kind: LinkKind, grid: Grid, k: int) -> tuple[Link, ...]:
    """List the links of a kind in the order of the published code.

    A shift past the grid links a node to itself, as the published slices do.
    """
    links: list[Link] = []
    if kind == "soft":
        links += [Link(axis, k) for axis in (0, 1)]
    for axis, side in enumerate(grid):
        if kind == "every":
            links += [Link(axis, shift) for shift in range(k, side, k)]
        elif kind == "four":
            links += [Link(axis, shift) for shift in (k, -k)]
        elif kind == "near":
            links += [Link(axis, shift, True) for shift in range(0, side, k)]
        elif kind == "powers":
            shifts = [k**i - 1 for i in range(1, side.bit_length())]
            links += [Link(axis, sign * shift) for sign in (1, -1) for shift in shifts]
        else:
            links += [Link(axis, 2**i, True) for i in range(1, side.bit_length())]
    return tuple(
        link if abs(link.shift) < grid[link.axis] else link._replace(shift=0) for link in links
    )


class AxialConv(nn.Module):
    """nn([x, the largest relative feature of the linked nodes]), from C channels to `width`.

    The published code subtracts linked nodes from nodes where `kind` is `every` or `powers`, and
    nodes from linked ones otherwise. `k` is K.
    """

    fused = True

    def __init__(self, channels: int, width: int, kind: LinkKind, k: int, norm: Norm) -> None:
        super().__init__()
        self.kind: LinkKind = kind
        self.k = k
        self.nn = Layer(2 * channels, width, norm, gelu=True)
        self.temperature = nn.Parameter(torch.ones(())) if kind == "soft" else None

    def forward(self, x: Tensor) -> Tensor:
        """Convolve: (B, H, W, C) -> (B, H, W, width)."""
        links = make_links(self.kind, (x.shape[1], x.shape[2]), self.k)
        largest = region("aggregation", self._relative, x, links)
        if self.temperature is not None and not any(link.gated for link in links):
            largest = largest + 0 * self.temperature  # DDP waits for a gradient of all parameters
        return self.nn(torch.cat((x, largest), -1))

    def _relative(self, x: Tensor, links: Sequence[Link]) -> Tensor:
        limit = axial_limit(x, fused=self.fused) if self.kind == "near" else None
        sign = -1 if self.kind in ("every", "powers") else 1
        return axial(x, links, sign, limit, self.temperature, fused=self.fused)

    def extra_repr(self) -> str:
        return f"{self.kind}, k={self.k}"


class AttentionConv(nn.Module):
    """nn([x, max(0, attention over all nodes - x)]), from C channels to `width` (AdaptViG).

    Queries and keys have C / 4 channels, and a LayerNorm each.
    """

    def __init__(self, channels: int, width: int, norm: Norm) -> None:
        super().__init__()
        narrow = channels // 4
        self.q_conv = nn.Linear(channels, narrow, bias=False)
        self.k_conv = nn.Linear(channels, narrow, bias=False)
        self.v_conv = nn.Linear(channels, channels, bias=False)
        for linear in (self.q_conv, self.k_conv, self.v_conv):
            nn.init.kaiming_normal_(linear.weight)
        self.q_norm, self.k_norm = nn.LayerNorm(narrow), nn.LayerNorm(narrow)
        self.nn = Layer(2 * channels, width, norm, gelu=True)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve: (B, H, W, C) -> (B, H, W, width)."""
        largest = region("aggregation", self._relative, x)
        return self.nn(torch.cat((x, largest), -1))

    def _relative(self, x: Tensor) -> Tensor:
        nodes = x.flatten(1, 2)
        value = self.v_conv(nodes)
        query, key = self.q_norm(self.q_conv(nodes)), self.k_norm(self.k_conv(nodes))
        # A dimension for a single head, without which ONNX knows no attention.
        query, key, value = (t.to(value).unsqueeze(1) for t in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value)
        relative = attended.view(*x.shape[:-1], -1) - x
        return torch.maximum(torch.zeros_like(relative), relative)
