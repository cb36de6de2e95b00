"""The Grapher half of a ViG block: build a graph and exchange features along its edges."""

from dataclasses import replace
from functools import partial
from math import prod
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vigpipe.config.choices import Norm
from vigpipe.model import position
from vigpipe.model.aggregate import Candidates
from vigpipe.model.aggregator import AGGREGATORS
from vigpipe.model.blocks import BlockSpec, GraphRule
from vigpipe.model.graph import check_finite, knn_graph, reduce_k
from vigpipe.model.keyed_dropout import Draws, DropPath, uniform
from vigpipe.model.layer import Layer
from vigpipe.model.patterns import grid_graph, pattern_graph, window_graph, window_nodes
from vigpipe.model.position import Grid
from vigpipe.model.recompute import build_or_replay
from vigpipe.model.regions import region
from vigpipe.model.slicing import Roles, Side, Sides, bound, within
from vigpipe.model.tokens import Tokens


class BlockGraph(NamedTuple):
    """The graph that a block used.

    Attributes:
        neighbours: indices of each node's neighbours among the candidates, (B, N, K) int64; nearest
            first if it is a kNN graph.
        grid: height and width of the grid of nodes, which are numbered in raster order.
        candidates: height and width of the grid of candidates, also in raster order; smaller than
            the grid of nodes where neighbours are pooled.
    """

    neighbours: Tensor
    grid: Grid
    candidates: Grid


class DynamicGraphConv(nn.Module):
    """Build a graph by a rule and convolve over it; `gconv` is the published name."""

    fused = True

    def __init__(self, channels: int, rule: GraphRule, aggregator: str, norm: Norm) -> None:
        super().__init__()
        self.rule = rule
        self.gconv = AGGREGATORS[aggregator](channels, norm)

    def forward(
        self,
        x: Tensor,
        draws: Draws | None,
        given: Tensor | None,
        bias: Tensor | None,
        tokens: Tokens | None,
        grid: Grid,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Convolve over the block's graph: (B, H, W, C) -> (B, H, W, 2C).

        The graphs, (B, N, K) int64, are `given`, passed on by the previous block if the rule reuses
        it, and in the result the one used and the one to pass on. The bias, (1, N, M), is added to
        squared distances. Where x has only this rank's rows, `tokens` gives access to the nodes of
        other ranks; the grid is that of the whole image.
        """
        nodes = x.flatten(1, 2)
        others: Candidates = None
        if tokens is not None:
            others = tokens.nodes(grid, self.rule.reduction)
        elif self.rule.reduction > 1:
            pooled = F.avg_pool2d(x.movedim(-1, 1), self.rule.reduction, ceil_mode=True)
            others = pooled.flatten(2).transpose(1, 2)

        def build() -> Tensor:
            return self._graph(x.detach(), others, tokens, grid, draws, bias)

        graph = given
        if self.rule.policy not in ("reuse", "lookahead"):
            graph = build_or_replay(build)
        assert graph is not None
        following = build_or_replay(build) if self.rule.makes_next else graph
        y = self.gconv(nodes, graph, others)
        return y.unflatten(1, x.shape[1:3]), graph, following

    def _graph(
        self,
        x: Tensor,
        others: Candidates,
        tokens: Tokens | None,
        grid: Grid,
        draws: Draws | None,
        bias: Tensor | None,
    ) -> Tensor:
        """Make the graph of this block's rule, (B, N, K) int64, for all nodes on every rank."""
        rule = self.rule
        if rule.policy in ("grid", "pattern"):
            make = grid_graph if rule.policy == "grid" else pattern_graph
            return make(*grid, x.device).expand(x.shape[0], -1, -1)
        if rule.policy == "window":
            nodes = (x if tokens is None else tokens.whole(x, grid)).flatten(1, 2)
            k, dilation = reduce_k(rule.k, rule.dilation, window_nodes(*grid))
            return region("knn", window_graph, nodes, grid, k, dilation, rule.shift, self.fused)
        nodes, num_candidates = x.flatten(1, 2), prod(position.pooled_grid(grid, rule.reduction))
        k, dilation, ranks = self._choice(num_candidates, draws, x.device)
        if others is None or isinstance(others, Tensor):
            pooled = None if others is None else others.detach()
            rest = pooled, bias, ranks, self.fused
            return region("knn", knn_graph, nodes, k, dilation, True, *rest)
        nearest = partial(others.nearest, fused=self.fused)
        return region("knn", nearest, nodes, k, dilation, bias, ranks)

    def _choice(
        self, num_candidates: int, draws: Draws | None, device: torch.device
    ) -> tuple[int, int, Tensor | None]:
        """Return k, dilation, and which of the nearest to keep instead of every dilation-th."""
        k, dilation = reduce_k(self.rule.k, self.rule.dilation, num_candidates)
        if not self.training or self.rule.stochastic == 0.0 or dilation == 1:
            return k, dilation, None
        if draws is None:
            raise ValueError("stochastic dilation needs the samples' keys: model(x, keys)")
        numbers = uniform(draws.keys.to(device), self.rule.stream, 1 + k * dilation)
        random_ranks = numbers[:, 1:].argsort(dim=-1, stable=True)[:, :k]
        regular_ranks = torch.arange(0, k * dilation, dilation, device=device)
        is_random = numbers[:, :1] < self.rule.stochastic
        ranks = torch.where(is_random, random_ranks, regular_ranks.expand_as(random_ranks))
        return k, dilation, ranks

    def extra_repr(self) -> str:
        return str(self.rule)


class Grapher(nn.Module):
    """Pointwise, graph convolution, pointwise, residual: arXiv:2206.00272, equation 4.

    The graph convolution takes `hidden` channels and doubles them; these are C except in a
    sub-network. `relative` are the channels of the positions whose distances in the image are added
    to the distances in feature space, None for no such table; `by_raster` resizes that table along
    the raster of the nodes, as the published code does. The last product is multiplied by `rescale`
    before its bias is added.
    """

    relative_pos: Tensor | None
    tokens: Tokens | None = None
    roles: ClassVar[Roles] = {
        **within("fc1.", Layer.roles, {"in": "trunk", "out": "x"}),
        **within("fc2.", Layer.roles, {"in": "out", "out": "trunk"}),
        "relative_pos": (None, None, None),
    }

    def __init__(
        self,
        spec: BlockSpec,
        hidden: int,
        norm: Norm,
        drop_path: float,
        relative: int | None,
        by_raster: bool,
        rescale: float,
    ) -> None:
        super().__init__()
        rule, grid = spec.rule, spec.grid
        assert rule is not None
        self.fc1 = Layer(spec.channels, hidden, norm)
        self.graph_conv = DynamicGraphConv(hidden, rule, spec.aggregator, norm)
        self.fc2 = Layer(2 * hidden, spec.channels, norm, factor=rescale)
        self.drop_path = DropPath(drop_path, stream=2 * spec.number)
        self.relative, self.grid, self.by_raster = relative, grid, by_raster
        self.detect_anomaly = ""  # name of the block for the error; empty switches the check off
        table = None
        if relative is not None:
            table = position.relative_distance(relative, grid, 1 if by_raster else rule.reduction)
            if by_raster:
                table = position.resized_by_raster(table, grid, rule.reduction)
        self.register_buffer("relative_pos", table)

    def sides(self, prefix: str, trunk: Side | None) -> dict[str, Sides]:
        """Return the sides of its tensors; `trunk` is that of its input and output."""
        conv = self.graph_conv.gconv
        channels = {
            role: replace(side, group=prefix + side.group) for role, side in conv.channels.items()
        }
        conv_sides = bound(conv, f"{prefix}graph_conv.gconv.", conv.roles, channels)
        return bound(self, prefix, self.roles, {"trunk": trunk, **channels}) | conv_sides

    def forward(
        self, x: Tensor, draws: Draws | None, given: Tensor | None
    ) -> tuple[Tensor, BlockGraph, Tensor]:
        """Run this half of the block; arguments and results are those of `vig.Block`."""
        # Where x has only this rank's rows, its shape does not tell the grid of the image.
        grid = (x.shape[1], x.shape[2]) if self.tokens is None else self.grid
        y = self.fc1(x)
        if self.detect_anomaly:
            check_finite(y.flatten(1, 2), self.detect_anomaly)
        bias = self._bias(grid)
        y, graph, following = self.graph_conv(y, draws, given, bias, self.tokens, grid)
        x = self.fc2(y, x, self.drop_path(x, draws))
        candidates = position.pooled_grid(grid, self.graph_conv.rule.reduction)
        return x, BlockGraph(graph, grid, candidates), following

    def set_grid(self, grid: Grid) -> None:
        """Replace the table of distances by the one for another grid of nodes."""
        if self.relative_pos is not None:
            self.relative_pos = self._bias(grid)
        self.grid = grid

    def table_from(self, table: Tensor | None, grid: Grid) -> Tensor:
        """Return the table, (1, N, M), that this block should have with weights for a grid.

        It equals the table that `set_grid` would make after loading the weights on their own grid.
        `table` is that of the weights. Where they have none, the published code has nothing to
        interpolate, so `by_raster` keeps the block's own.
        """
        own = self.relative_pos
        assert own is not None
        if own.is_meta:  # only shapes are wanted
            return own
        if table is None:
            keeps_own = grid == self.grid or self.by_raster
            return own if keeps_own else self._resized(own, grid, self.grid)
        if grid == self.grid and table.shape == own.shape:
            return table
        return self._resized(table.to(own), grid, self.grid)

    def _bias(self, grid: Grid) -> Tensor | None:
        if self.relative_pos is None or grid == self.grid:
            return self.relative_pos
        return self._resized(self.relative_pos, self.grid, grid)

    def _resized(self, table: Tensor, old_grid: Grid, new_grid: Grid) -> Tensor:
        reduction = self.graph_conv.rule.reduction
        if self.by_raster:
            return position.resized_by_raster(table, new_grid, reduction)
        assert self.relative is not None
        return position.relative_distance(self.relative, new_grid, reduction, old_grid).to(table)
