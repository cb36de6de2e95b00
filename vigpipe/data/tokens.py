"""Several ranks share every image: by rows of nodes, or by channels where neighbours are reduced.

Each rank has some rows of the grid of nodes. A reduction over neighbours treats every channel on
its own, so for this a rank has some channels of all nodes; `vigpipe.parallel.switch` leads from one
to the other. For kNN, a rank computes the distances from its own nodes to all candidates: from
features that all ranks send to each other or, where candidates are no more than channels, from sums
over the channels of all ranks. Either way every rank gets the graph of all nodes.
"""

from math import ceil, prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vigpipe import ops
from vigpipe.job.shared_norm import shared_batch_norm, shared_group_norm
from vigpipe.model.norm import BatchNorm, GroupNorm
from vigpipe.model.position import Grid, pooled_grid
from vigpipe.ops.plain import nearest, rows_of, unit_length
from vigpipe.parallel.shards import Contribution, Shards, copies_of
from vigpipe.parallel.switch import all_rows, cut, to_columns, to_rows, total

KNN, INDICES, ROWS, MEANS = "knn", "indices", "rows", "means"  # what is sent
MOST_DISTANCES = 1 << 24  # A rank computes no more partial distances at a time.


class SplitTokens:
    """The rows that a rank has of every image; see `vigpipe.model.tokens.Tokens`."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def own(self, x: Tensor) -> Tensor:
        return x[:, self._shards.own(x.shape[1])].contiguous()

    def whole(self, x: Tensor, grid: Grid) -> Tensor:
        return _whole(x, self._shards, grid, ROWS)

    def mean(self, x: Tensor) -> Tensor:
        nodes = x.flatten(1, 2).to(torch.promote_types(x.dtype, torch.float32))
        count = torch.full_like(nodes[:1, 0, :1], nodes.shape[1])
        both = torch.cat((nodes.sum(1).flatten(), count.flatten()))
        sums = total(both, self._shards, MEANS)
        return (sums[:-1] / sums[-1].detach()).view(len(x), -1).to(x.dtype)

    def normalised(self, norm: nn.Module, x: Tensor) -> Tensor:
        if isinstance(norm, GroupNorm):
            return shared_group_norm(norm, x, self._shards)
        if isinstance(norm, BatchNorm) and norm.training:
            y = shared_batch_norm(norm, x.reshape(-1, x.shape[-1]), self._shards)
            return y.view(x.shape)
        return norm(x)

    def nodes(self, grid: Grid, reduction: int) -> "SplitNodes":
        return SplitNodes(self._shards, grid, reduction)


class SplitNodes:
    """The nodes of all ranks' grid; candidates are averages of r x r of them (`reduction`)."""

    def __init__(self, shards: Shards, grid: Grid, reduction: int) -> None:
        self._shards, self._grid, self._reduction = shards, grid, reduction
        width = grid[1]
        rows = shards.slices(grid[0])
        # The nodes of every rank, and those of this one.
        self._owned = [slice(owned.start * width, owned.stop * width) for owned in rows]
        self._own = self._owned[shards.rank]
        self._num_candidates = prod(pooled_grid(grid, reduction))

    def nearest(
        self,
        x: Tensor,
        k: int,
        dilation: int,
        bias: Tensor | None,
        ranks: Tensor | None,
        *,
        fused: bool,
    ) -> Tensor:
        own_bias = None if bias is None else bias[:, self._own]
        with torch.no_grad():
            if x.shape[2] < self._num_candidates:
                candidates = self._pooled(self._all(x, KNN))
                far, step = (k, dilation) if ranks is None else (k * dilation, 1)
                graph = ops.knn(x, candidates, own_bias, far, step, fused=fused)
            else:
                far = (k - 1) * dilation + 1 if ranks is None else k * dilation
                graph = self._nearest_by_channels(x, far, own_bias)
                graph = graph if ranks is not None else graph[..., ::dilation]
            if ranks is not None:
                graph = graph.gather(2, ranks.unsqueeze(1).expand(-1, graph.shape[1], -1))
            return self._all(graph.int(), INDICES).long()

    def reduced(self, x: Tensor, graph: Tensor, mode: str, *, fused: bool) -> Tensor:
        columns = self._pooled(self._to_columns(x))  # (B, M, C_k)
        y = ops.aggregate(None, columns, graph, None, mode, fused=fused)  # (B, N, C_k * outputs)
        num_images, num_channels, (height, width) = len(x), x.shape[2], self._grid
        y = y.view(num_images, height, width, columns.shape[2], -1).permute(1, 2, 0, 4, 3)
        outputs = y.shape[3]
        heads = width * num_images * outputs
        rows = to_rows(y.flatten(1), self._shards, heads * num_channels, heads)
        rows = rows.view(-1, width, num_images, outputs, num_channels).permute(2, 0, 1, 4, 3)
        return rows.reshape(num_images, x.shape[1], -1)

    def neighbours(self, x: Tensor, graph: Tensor) -> Tensor:
        table, places = rows_of(self._pooled(self._all(x, ROWS)), graph[:, self._own])
        return table[places].view(len(x), x.shape[1], graph.shape[2], -1)

    def _to_columns(self, x: Tensor) -> Tensor:
        """Switch from the rank's nodes to its channels of all: (B, n_k, C) -> (B, N, C_k)."""
        heads, width = len(x), self._grid[1]
        # Rows of the grid, of W nodes of B images with their channels side by side.
        rows = x.unflatten(1, (-1, width)).permute(1, 2, 0, 3).flatten(1)
        columns = to_columns(rows.contiguous(), self._shards, self._grid[0], width * heads)
        return columns.view(prod(self._grid), heads, -1).transpose(0, 1).contiguous()

    def _all(self, x: Tensor, what: str) -> Tensor:
        """Give every rank the nodes of all: (B, n_k, D) -> (B, N, D)."""
        rows = x.unflatten(1, (-1, self._grid[1]))
        return _whole(rows, self._shards, self._grid, what).flatten(1, 2)

    def _pooled(self, x: Tensor) -> Tensor:
        """Average r x r nodes into a candidate: (B, N, C) -> (B, M, C)."""
        r = self._reduction
        if r == 1:
            return x
        images = x.unflatten(1, self._grid).movedim(-1, 1)
        return F.avg_pool2d(images, r, r, ceil_mode=True).flatten(2).transpose(1, 2).contiguous()

    def _nearest_by_channels(self, x: Tensor, num: int, bias: Tensor | None) -> Tensor:
        """Index the candidates nearest to the rank's nodes: (B, n_k, C) -> (B, n_k, num) int64.

        Distances, to which the bias, (1, n_k, M), is added, are sums over all ranks' channels. At a
        time, those from some nodes of every rank go to that rank, so that nobody has N x M of them.
        """
        shards = self._shards
        columns = self._to_columns(x if x.dtype == torch.float64 else x.float())
        candidates = self._pooled(columns)
        lengths = [vectors.square().sum(2) for vectors in (columns, candidates)]  # (B, N), (B, M)
        lengths = shards.total(torch.cat(lengths, 1), KNN).sqrt().unsqueeze(2)
        sizes = [columns.shape[1], candidates.shape[1]]
        node_lengths, candidate_lengths = lengths.split(sizes, 1)
        nodes, _ = unit_length(columns, node_lengths)
        others, is_finite = unit_length(candidates, candidate_lengths)
        others = others.transpose(1, 2)
        # The squared length of a unit vector is 1, but for very short ones.
        squares, _ = unit_length(candidate_lengths, candidate_lengths)
        squares = squares.squeeze(2).square().masked_fill(~is_finite, torch.inf).unsqueeze(1)

        found: list[Tensor] = []
        first = self._own.start
        for pieces in self._pieces(len(x)):
            mine = pieces[shards.rank]
            shapes = [(shards.size, len(x), piece.stop - piece.start, sizes[1]) for piece in pieces]
            products = [(nodes[:, piece] @ others).unsqueeze(0) for piece in pieces]
            contribution = Contribution(copies_of(products.__getitem__), shapes, _place_of, nodes)
            nearness = 2 * shards.exchange(contribution, KNN).sum(0) - squares
            if bias is not None:
                nearness = nearness - bias[:, mine.start - first : mine.stop - first]
            found.append(nearest(nearness, num))
        return torch.cat(found, 1)

    def _pieces(self, num_images: int) -> list[list[slice]]:
        """Cut every rank's nodes into equally many pieces, some empty: a list for each exchange."""
        most = max(owned.stop - owned.start for owned in self._owned)
        num_distances = self._shards.size * num_images * most * self._num_candidates
        num_pieces = min(most, ceil(num_distances / MOST_DISTANCES))
        by_rank = [cut(owned, num_pieces) for owned in self._owned]
        return [list(pieces) for pieces in zip(*by_rank, strict=True)]


def _whole(x: Tensor, shards: Shards, grid: Grid, what: str) -> Tensor:
    """Give every rank the rows of all: (B, H_k, W, C) -> (B, H, W, C)."""
    rows = x.transpose(0, 1).flatten(1)  # (H_k, B W C)
    rows = all_rows(rows.contiguous(), shards, grid[0], what)
    return rows.view(grid[0], len(x), *x.shape[2:]).transpose(0, 1).contiguous()


def _place_of(of: int, to: int) -> tuple[slice, ...]:
    return (slice(of, of + 1),)
