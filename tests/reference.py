"""Slow, obvious versions of the models and their operators, written from the formulas.

Nothing here imports vigpipe. `DenseVig` and `DensePyramidVig` are the formulation everyone uses
today: images as (B, C, N, 1), 1x1 convolutions, gathered neighbours; `PygStudy` runs
torch-geometric's GraphConv on an explicit list of edges. All have vigpipe's parameter names and
shapes, so that `load_state_dict` carries the weights over.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ---- graphs and aggregation, one node at a time ---------------------------------------------


def distances(x: Tensor) -> Tensor:
    """Squared distances of the nodes after scaling to unit length: (B, N, C) -> (B, N, N)."""
    x = x / x.norm(dim=-1, keepdim=True)
    return (x[:, :, None] - x[:, None, :]).square().sum(-1)


def knn_by_loops(x: Tensor, k: int, dilation: int = 1, loop: bool = True) -> Tensor:
    """Sort all candidates of every node by distance and keep every dilation-th of the nearest."""
    table = distances(x)
    graph = torch.empty(*x.shape[:2], k, dtype=torch.long)
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            order = [j for j in table[b, i].argsort().tolist() if loop or j != i]
            graph[b, i] = torch.tensor(order[: k * dilation : dilation])
    return graph


def smallest_gap(table: Tensor, k: int, dilation: int = 1) -> float:
    """Over all nodes: by how much the next candidate was farther than the last one chosen.

    Formulations that round differently choose the same neighbours only where this is well above
    their rounding errors. With dilation 1 a swap among the chosen ones changes nothing; with more
    every rank counts.
    """
    gaps = table.sort(dim=-1).values.diff(dim=-1)[..., : k * dilation]
    gaps = gaps if dilation > 1 else gaps[..., k - 1 :]
    return float(gaps.min()) if gaps.numel() else float("inf")


def gathered(x: Tensor, graph: Tensor) -> Tensor:
    """Every node's neighbours: (B, N, C), (B, N, K) -> (B, N, K, C)."""
    return torch.stack([nodes[indices] for nodes, indices in zip(x, graph, strict=True)])


def max_relative_by_gather(x: Tensor, graph: Tensor) -> Tensor:
    return (gathered(x, graph) - x[:, :, None]).max(dim=2).values


def grid_edges(height: int, width: int) -> Tensor:
    """Directed edges (2, E), source and target, between each pixel and its up to 8 neighbours."""
    edges = [
        (row * width + column, (row + down) * width + column + right)
        for row in range(height)
        for column in range(width)
        for down in (-1, 0, 1)
        for right in (-1, 0, 1)
        if (down, right) != (0, 0) and 0 <= row + down < height and 0 <= column + right < width
    ]
    return torch.tensor(edges, dtype=torch.long).view(-1, 2).T


def sum_over_edges(x: Tensor, edges: Tensor) -> Tensor:
    """Add every edge's source to its target: (B, N, C), (2, E) -> (B, N, C)."""
    total = torch.zeros_like(x)
    for source, target in edges.T.tolist():
        total[:, target] += x[:, source]
    return total


# ---- graphs from positions, one node at a time ----------------------------------------------


def grid_by_loops(height: int, width: int) -> Tensor:
    """The 3x3 window around every node, moved into the image at its border: (N, K)."""
    graph: list[list[int]] = []
    for row in range(height):
        for column in range(width):
            top = min(max(row - 1, 0), max(height - 3, 0))
            left = min(max(column - 1, 0), max(width - 3, 0))
            graph.append(
                [
                    r * width + c
                    for r in range(top, min(top + 3, height))
                    for c in range(left, min(left + 3, width))
                ]
            )
    return torch.tensor(graph)


def pattern_by_loops(height: int, width: int, every: int = 2) -> Tensor:
    """SVGA, arXiv:2305.08995: the node, then every second of its row, then of its column: (N, K).

    Counted from the node to the right and downwards, around the edges of the image.
    """
    graph: list[list[int]] = []
    for row in range(height):
        for column in range(width):
            along = [row * width + (column + t) % width for t in range(every, width, every)]
            down = [(row + t) % height * width + column for t in range(every, height, every)]
            graph.append([row * width + column, *along, *down])
    return torch.tensor(graph)


def window_by_loops(height: int, width: int, size: int = 7, shift: bool = False) -> Tensor:
    """The nodes of every node's window: (N, S), S = min(size, H) * min(size, W).

    Windows tile the image from its upper left corner; the last of a row or column is moved into the
    image. Shifted ones begin half a window further down and right, around the edges.
    """
    high, wide = min(size, height), min(size, width)
    down, right = (high // 2, wide // 2) if shift else (0, 0)

    def start(position: int, moved: int, length: int, side: int) -> int:
        tile = (position - moved) % length // side
        return min(tile * side, length - side)

    members: list[list[int]] = []
    for row in range(height):
        for column in range(width):
            top = start(row, down, height, high)
            left = start(column, right, width, wide)
            members.append(
                [
                    (top + r + down) % height * width + (left + c + right) % width
                    for r in range(high)
                    for c in range(wide)
                ]
            )
    return torch.tensor(members)


# ---- positions ------------------------------------------------------------------------------


def sine_cosine(channels: int, grid: tuple[int, int]) -> np.ndarray:
    """MAE's table, arXiv:2111.06377: (N, C) float64; column in the first half, row in the second.

    In a half, the sines of position * 10000^-(j / (C / 4)), then the cosines.
    """
    frequency = 10000.0 ** (-np.arange(channels // 4) / (channels / 4))
    table = np.empty((grid[0] * grid[1], channels))
    for node in range(len(table)):
        row, column = divmod(node, grid[1])
        angles = [position * frequency for position in (column, row)]
        table[node] = np.concatenate([f(a) for a in angles for f in (np.sin, np.cos)])
    return table


def relative_pos(channels: int, grid: tuple[int, int], r: int, by_raster: bool) -> Tensor:
    """The frozen table added to squared distances: (1, N, M) float32.

    By raster it is the published one: 2 P P^T / C, its columns interpolated along the flattened
    image to the number of candidates. Else 2 P Q^T / C, Q the mean of P over each candidate's
    nodes. Either way with the sign changed.
    """
    table = sine_cosine(channels, grid)
    cells = pooled(torch.from_numpy(table).T.reshape(1, channels, *grid), r)
    if not by_raster:
        others = cells[0].flatten(1).T.numpy()
        return -torch.from_numpy(np.float32(2 * table @ others.T / channels))[None]
    products = torch.from_numpy(np.float32(2 * table @ table.T / channels))
    size = (len(table), cells[0, 0].numel())
    return -F.interpolate(products[None, None], size=size, mode="bicubic", align_corners=False)[0]


def pooled(images: Tensor, r: int) -> Tensor:
    """Means of r x r pixels, of fewer at the right and lower edge: (B, C, H, W)."""
    height, width = images.shape[2:]
    rows = [
        torch.stack(
            [images[:, :, i : i + r, j : j + r].mean((2, 3)) for j in range(0, width, r)], dim=-1
        )
        for i in range(0, height, r)
    ]
    return torch.stack(rows, dim=-2)


# ---- ViG with dense convolutions ------------------------------------------------------------


def conv(in_channels: int, out_channels: int, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 1, groups=groups)


def grouped(in_channels: int, out_channels: int) -> nn.Sequential:
    """The layer of every aggregator: 1x1 convolution in four groups, BatchNorm, GELU."""
    return nn.Sequential(
        conv(in_channels, out_channels, groups=4), nn.BatchNorm2d(out_channels), nn.GELU()
    )


def dense_neighbours(y: Tensor, graph: Tensor) -> Tensor:
    """Every node's neighbours: (B, C, M, 1), (B, N, K) -> (B, C, N, K)."""
    batch, channels = y.shape[:2]
    index = graph.flatten(1)[:, None].expand(-1, channels, -1)  # (B, C, N * K)
    return y[..., 0].gather(2, index).view(batch, channels, *graph.shape[1:])


def interleaved(*features: Tensor) -> Tensor:
    """(B, C, N, 1) each, channels [a0, b0, ..., a1, b1, ...]."""
    return torch.stack(features, dim=2).flatten(1, 2)


class DenseMaxRelative(nn.Module):
    """max_j (y_j - x_i), beside x_i."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.nn = grouped(2 * channels, 2 * channels)

    def forward(self, x: Tensor, graph: Tensor, y: Tensor) -> Tensor:
        relative = (dense_neighbours(y, graph) - x).max(dim=-1, keepdim=True).values
        return self.nn(interleaved(x, relative))


class DenseMaxMean(nn.Module):
    """max_j (y_j - x_i) and mean_j (y_j - x_i), beside x_i."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.nn = grouped(3 * channels, 2 * channels)

    def forward(self, x: Tensor, graph: Tensor, y: Tensor) -> Tensor:
        relative = dense_neighbours(y, graph) - x
        largest = relative.max(dim=-1, keepdim=True).values
        return self.nn(interleaved(x, largest, relative.mean(dim=-1, keepdim=True)))


class DenseEdge(nn.Module):
    """EdgeConv, arXiv:1801.07829: max_j nn([x_i, y_j - x_i])."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.nn = grouped(2 * channels, 2 * channels)

    def forward(self, x: Tensor, graph: Tensor, y: Tensor) -> Tensor:
        others = dense_neighbours(y, graph)
        both = torch.cat((x.expand_as(others), others - x), dim=1)  # (B, 2C, N, K)
        return self.nn(both).max(dim=-1, keepdim=True).values


class DenseSage(nn.Module):
    """GraphSAGE, arXiv:1706.02216: nn2([x_i, max_j nn1(y_j)])."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.nn1 = grouped(channels, channels)
        self.nn2 = grouped(2 * channels, 2 * channels)

    def forward(self, x: Tensor, graph: Tensor, y: Tensor) -> Tensor:
        largest = self.nn1(dense_neighbours(y, graph)).max(dim=-1, keepdim=True).values
        return self.nn2(torch.cat((x, largest), dim=1))


class DenseGin(nn.Module):
    """GIN, arXiv:1810.00826: nn((1 + eps) x_i + sum_j y_j)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.nn = grouped(channels, 2 * channels)
        self.eps = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, graph: Tensor, y: Tensor) -> Tensor:
        total = dense_neighbours(y, graph).sum(dim=-1, keepdim=True)
        return self.nn((1 + self.eps) * x + total)


DENSE_AGGREGATORS: dict[str, Callable[[int], nn.Module]] = {
    "max": DenseMaxRelative,
    "maxmean": DenseMaxMean,
    "edge": DenseEdge,
    "sage": DenseSage,
    "gin": DenseGin,
}


class DenseGraphConv(nn.Module):
    """A graph and an aggregator.

    Args:
        channels: C.
        k: neighbours per node, of the kNN policies; fewer where there are fewer candidates.
        dilation: of the kNN policies; less where there are fewer candidates.
        r: neighbours are means of r x r nodes.
        policy: knn, grid, pattern, window, shifted window, reuse, lookahead, or lookahead's last:
            a block that takes the graph made before it and makes none.
        aggregator: a name in DENSE_AGGREGATORS.
    """

    def __init__(
        self, channels: int, k: int, dilation: int, r: int, policy: str, aggregator: str
    ) -> None:
        super().__init__()
        self.k, self.dilation, self.r, self.policy = k, dilation, r, policy
        self.gconv = DENSE_AGGREGATORS[aggregator](channels)
        self.smallest_gap = float("inf")
        self.follow: Tensor | None = None  # a graph to take instead, if it is as near

    def forward(
        self, images: Tensor, bias: Tensor | None, earlier: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(B, C, H, W) -> (B, 2C, H, W), and the graph for the next block."""
        grid = (images.shape[2], images.shape[3])
        x = images.flatten(2).unsqueeze(-1)  # (B, C, N, 1)
        y = (pooled(images, self.r) if self.r > 1 else images).flatten(2).unsqueeze(-1)
        self.smallest_gap = float("inf")
        if self.policy in ("reuse", "lookahead's last"):
            assert earlier is not None
            graph = following = earlier
        elif self.policy == "lookahead":
            assert earlier is not None
            graph, following = earlier, self.nearest(x, y, bias, None)
        elif self.policy in ("grid", "pattern"):
            table = grid_by_loops(*grid) if self.policy == "grid" else pattern_by_loops(*grid)
            graph = following = table.expand(len(x), -1, -1)
        else:
            members = None
            if self.policy in ("window", "shifted window"):
                members, bias = window_by_loops(*grid, shift=self.policy == "shifted window"), None
            graph = following = self.nearest(x, y, bias, members)
        return self.gconv(x, graph, y).unflatten(2, grid).squeeze(-1), following

    @torch.no_grad()
    def nearest(self, x: Tensor, y: Tensor, bias: Tensor | None, members: Tensor | None) -> Tensor:
        """The nearest of y, or of those that `members` (N, S) allows: (B, N, K)."""
        x, y = (F.normalize(z, p=2.0, dim=1)[..., 0].transpose(1, 2) for z in (x, y))  # (B, N, C)
        square = (x * x).sum(-1, keepdim=True), (y * y).sum(-1, keepdim=True)
        table = square[0] - 2 * x @ y.transpose(1, 2) + square[1].transpose(1, 2)
        if bias is not None:
            table = table + bias
        allowed = table if members is None else table.gather(2, members.expand(len(x), -1, -1))
        num_candidates = allowed.shape[-1]
        k = min(self.k, num_candidates)
        dilation = min(self.dilation, num_candidates // k)
        chosen = allowed.topk(k * dilation, largest=False).indices[..., ::dilation]
        if self.follow is not None:
            self.check_as_near(table, self.follow, allowed.gather(2, chosen))
            return self.follow
        self.smallest_gap = smallest_gap(allowed, k, dilation)
        return chosen if members is None else members.expand(len(x), -1, -1).gather(2, chosen)

    def check_as_near(self, table: Tensor, graph: Tensor, distances: Tensor) -> None:
        """Assert that a graph has the right distances, rank by rank, and no neighbour twice."""
        assert graph.shape == distances.shape
        assert (graph.sort(dim=-1).values.diff(dim=-1) > 0).all(), "a neighbour is there twice"
        difference = float((table.gather(2, graph) - distances).abs().max())
        assert difference < TOLERANCE[table.dtype], f"neighbours {difference:.1e} too far"


class DenseGrapher(nn.Module):
    """1x1 convolution, graph convolution, 1x1 convolution, residual."""

    relative_pos: Tensor

    def __init__(self, channels: int, graph_conv: DenseGraphConv, table: Tensor | None) -> None:
        super().__init__()
        self.fc1 = nn.Sequential(conv(channels, channels), nn.BatchNorm2d(channels))
        self.graph_conv = graph_conv
        self.fc2 = nn.Sequential(conv(2 * channels, channels), nn.BatchNorm2d(channels))
        self.register_buffer("relative_pos", table)

    def forward(self, x: Tensor, earlier: Tensor | None) -> tuple[Tensor, Tensor]:
        y, following = self.graph_conv(self.fc1(x), self.relative_pos, earlier)
        return self.fc2(y) + x, following


class DenseFFN(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = 4 * channels
        self.fc1 = nn.Sequential(conv(channels, hidden), nn.BatchNorm2d(hidden))
        self.fc2 = nn.Sequential(conv(hidden, channels), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x))) + x


class DenseBlock(nn.Sequential):
    """A Grapher and an FFN."""

    def forward(self, x: Tensor, earlier: Tensor | None) -> tuple[Tensor, Tensor]:  # pyrefly: ignore[bad-override]
        grapher, ffn = self
        x, following = grapher(x, earlier)
        return ffn(x), following


class DenseDownsample(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, 2, 1), nn.BatchNorm2d(out_channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


def stem_convs(in_channels: int, stem: Sequence[tuple[int, int]]) -> nn.Sequential:
    """3x3 convolutions of the given (width, stride), BatchNorm after each, GELU between them."""
    layers: list[nn.Module] = []
    for width, stride in stem:
        layers += [nn.Conv2d(in_channels, width, 3, stride, 1), nn.BatchNorm2d(width), nn.GELU()]
        in_channels = width
    return nn.Sequential(*layers[:-1])


class DenseStem(nn.Module):
    def __init__(self, convs: nn.Sequential) -> None:
        super().__init__()
        self.convs = convs

    def forward(self, images: Tensor) -> Tensor:
        return self.convs(images)


class DenseModel(nn.Module):
    """ViG with BatchNorm and without drop-path or dropout, given the entries of its backbone.

    Args:
        specs: blocks and downsamplings.
        channels: C before the first entry and after the last.
        grid: height and width in nodes, before the first.
        stem: (width, stride) of each 3x3 convolution.
        in_channels: channels of the images.
        num_classes: width of the logits.
    """

    def __init__(
        self,
        specs: Sequence[nn.Module],
        channels: tuple[int, int],
        grid: tuple[int, int],
        stem: Sequence[tuple[int, int]],
        in_channels: int,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.stem = DenseStem(stem_convs(in_channels, stem))
        self.pos_embed = nn.Parameter(torch.zeros(1, channels[0], *grid))
        self.backbone = nn.ModuleList(specs)
        self.prediction = nn.Sequential(
            conv(channels[1], 1024), nn.BatchNorm2d(1024), nn.GELU(), nn.Dropout(0.0),
            conv(1024, num_classes),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images) + self.pos_embed
        graph: Tensor | None = None
        for spec in self.backbone:
            if isinstance(spec, DenseBlock):
                x, graph = spec(x, graph)
            else:
                x, graph = spec(x), None
        return self.prediction(F.adaptive_avg_pool2d(x, 1)).flatten(1)

    def graph_convs(self) -> dict[int, DenseGraphConv]:
        """The graph convolutions by the number of their entry in the backbone."""
        return {
            i: module
            for i, spec in enumerate(self.backbone)
            for module in spec.modules()
            if isinstance(module, DenseGraphConv)
        }

    def follow(self, graphs: Mapping[int, Tensor]) -> None:
        """Take these graphs where they are right up to rounding, so that near-ties do not matter.

        Args:
            graphs: (B, N, K) by entry of the backbone, as each block used them.
        """
        for i, module in self.graph_convs().items():
            # A lookahead block chooses for the next one.
            module.follow = graphs.get(i + 1 if module.policy == "lookahead" else i)

    def smallest_gap(self) -> float:
        """See the function; over all blocks of the last forward."""
        return min(module.smallest_gap for module in self.graph_convs().values())


def stage_rules(policies: Sequence[str], first: int, count: int, r: int) -> list[tuple[str, int]]:
    """Policy and r of the blocks of a stage, as `DenseGraphConv` names them.

    Args:
        policies: repeated over all blocks of the model.
        first: number of the stage's first block in the model.
        count: blocks of the stage.
        r: where neighbours are pooled; graphs from positions never pool, and a block that takes the
            graph of another pools as that one does.
    """
    rules: list[tuple[str, int]] = []
    for i in range(count):
        policy = policies[(first + i) % len(policies)]
        following = policies[(first + i + 1) % len(policies)] if i + 1 < count else "knn"
        if policy in ("reuse", "lookahead") and not rules:
            policy = "knn"
        if policy == "window" and (first + i) % 2 == 1:
            policy = "shifted window"
        if policy == "lookahead" and following not in ("reuse", "lookahead"):
            policy = "lookahead's last"
        taken = policy in ("reuse", "lookahead", "lookahead's last")
        rules.append((policy, rules[-1][1] if taken else r if policy == "knn" else 1))
    return rules


class DenseVig(DenseModel):
    """The isotropic ViG, arXiv:2206.00272.

    Args:
        channels: C.
        neighbours: (k, dilation) of every block.
        grid: height and width in nodes.
        stem: (width, stride) of each 3x3 convolution.
        in_channels: channels of the images.
        num_classes: width of the logits.
        policies: of the blocks' graphs, repeated over them.
        aggregators: of the blocks, repeated over them.
    """

    def __init__(
        self,
        channels: int,
        neighbours: Sequence[tuple[int, int]],
        grid: tuple[int, int],
        stem: Sequence[tuple[int, int]],
        in_channels: int,
        num_classes: int,
        policies: Sequence[str] = ("knn",),
        aggregators: Sequence[str] = ("max",),
    ) -> None:
        rules = stage_rules(policies, 0, len(neighbours), r=1)
        blocks: list[nn.Module] = []
        for i, ((k, dilation), (policy, r)) in enumerate(zip(neighbours, rules, strict=True)):
            aggregator = aggregators[i % len(aggregators)]
            graph_conv = DenseGraphConv(channels, k, dilation, r, policy, aggregator)
            blocks.append(DenseBlock(DenseGrapher(channels, graph_conv, None), DenseFFN(channels)))
        super().__init__(blocks, (channels, channels), grid, stem, in_channels, num_classes)


class DensePyramidVig(DenseModel):
    """Pyramid ViG, arXiv:2206.00272: every stage has half the height and width of the one before.

    Args:
        channels: C of every stage.
        num_blocks: of every stage.
        grid: height and width in nodes of the first stage.
        stem: (width, stride) of each 3x3 convolution.
        in_channels: channels of the images.
        num_classes: width of the logits.
        reductions: r of every stage.
        by_raster: the published table of relative positions; see `relative_pos`.
        policies: of the blocks' graphs, repeated over them.
        aggregators: of the blocks, repeated over them.
    """

    def __init__(
        self,
        channels: Sequence[int],
        num_blocks: Sequence[int],
        grid: tuple[int, int],
        stem: Sequence[tuple[int, int]],
        in_channels: int,
        num_classes: int,
        reductions: Sequence[int] = (4, 2, 1, 1),
        by_raster: bool = True,
        policies: Sequence[str] = ("knn",),
        aggregators: Sequence[str] = ("max",),
    ) -> None:
        specs: list[nn.Module] = []
        first, number = grid, 0
        for stage, width in enumerate(channels):
            if stage > 0:
                specs.append(DenseDownsample(channels[stage - 1], width))
                grid = (-(-grid[0] // 2), -(-grid[1] // 2))
            for policy, r in stage_rules(policies, number, num_blocks[stage], reductions[stage]):
                aggregator = aggregators[number % len(aggregators)]
                dilation = min(number // 4 + 1, 49 // 9)
                graph_conv = DenseGraphConv(width, 9, dilation, r, policy, aggregator)
                table = None
                if policy in ("knn", "lookahead", "lookahead's last"):
                    table = relative_pos(width, grid, r, by_raster)
                specs.append(DenseBlock(DenseGrapher(width, graph_conv, table), DenseFFN(width)))
                number += 1
        super().__init__(specs, (channels[0], channels[-1]), first, stem, in_channels, num_classes)


# ---- the study's model through torch-geometric ----------------------------------------------


def pyg_graph_conv(channels: int) -> nn.Module:
    with warnings.catch_warnings():
        # What importing torch-geometric 2.7 and 2.8 sets off under torch 2.11 to 2.15.
        warnings.filterwarnings("ignore", ".torch.jit.")
        warnings.filterwarnings("ignore", ".torch_geometric.distributed. has been deprecated")
        from torch_geometric.nn import GraphConv

    return GraphConv(channels, channels)


def batched(edges: Tensor, num_nodes: int, num_images: int) -> Tensor:
    """The same edges for every image of a batch whose nodes are numbered through."""
    return torch.cat([edges + i * num_nodes for i in range(num_images)], dim=1)


def knn_edges(graph: Tensor) -> Tensor:
    """(B, N, K) neighbours as edges from neighbour to node, nodes numbered through the batch."""
    num_nodes = graph.shape[1]
    edges: list[tuple[int, int]] = []
    for b, image in enumerate(graph.tolist()):
        for target, sources in enumerate(image):
            edges += [(b * num_nodes + j, b * num_nodes + target) for j in sources]
    return torch.tensor(edges).T


class PygGrapher(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1 = nn.Sequential(nn.Linear(channels, 256), nn.BatchNorm1d(256))
        self.graph_conv = pyg_graph_conv(256)
        self.fc2 = nn.Sequential(nn.Linear(256, channels), nn.BatchNorm1d(channels))

    def forward(self, x: Tensor, edges: Callable[[Tensor], Tensor]) -> Tensor:
        y = self.fc1(x)
        return self.fc2(F.gelu(self.graph_conv(y, edges(y)))) + x


class PygFFN(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1 = nn.Sequential(nn.Linear(channels, 512), nn.BatchNorm1d(512))
        self.fc2 = nn.Sequential(nn.Linear(512, channels), nn.BatchNorm1d(channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x))) + x


class PygStudy(nn.Module):
    """J. Raffi, "Distributed Graph Neural Network" (Pisa, 2024): nodes of all images in one table.

    Args:
        grid: height and width of the images.
        knn: the 8 nearest other nodes instead of the 8 neighbours on the grid.
        in_channels: channels of the images.
        num_classes: width of the logits.
    """

    def __init__(
        self, grid: tuple[int, int], knn: bool = False, in_channels: int = 3, num_classes: int = 10
    ) -> None:
        super().__init__()
        self.grid, self.knn, self.gaps = grid, knn, [float("inf")]
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"grapher": PygGrapher(in_channels), "ffn": PygFFN(in_channels)})
            for _ in range(8)
        )
        self.fc1 = nn.Linear(in_channels, 1024)
        self.fc2 = nn.Linear(1024, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        num_images, channels, height, width = images.shape
        num_nodes = height * width
        fixed = batched(grid_edges(height, width), num_nodes, num_images)

        def nearest(rows: Tensor) -> Tensor:
            x = rows.detach().view(num_images, num_nodes, -1)
            # A node itself is nearest, so eight others are chosen of nine.
            self.gaps.append(smallest_gap(distances(x), 9))
            return knn_edges(knn_by_loops(x, 8, loop=False))

        self.gaps = [float("inf")]
        x = images.permute(0, 2, 3, 1).reshape(-1, channels)  # (B * N, C)
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            x = block["ffn"](block["grapher"](x, nearest if self.knn else lambda _: fixed))
        x = x.view(num_images, num_nodes, channels).sum(1)
        return self.fc2(F.gelu(self.fc1(x)))

    def smallest_gap(self) -> float:
        """See the function; over all blocks of the last forward."""
        return min(self.gaps)


# ---- random bits ----------------------------------------------------------------------------

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(z: int) -> int:
    """The output function of SplitMix64 (doi:10.1145/2660193.2660195) on Python's integers."""
    z &= MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


# ---- comparing ------------------------------------------------------------------------------

# Largest difference allowed, relative to the largest number compared. float64: rounding (1e-16)
# after a dozen layers came out below 1e-13, so 1e-10 leaves room for other machines and none for a
# formula that differs. float32: the same layers measured below 5e-5.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
# Gaps between distances that rounding cannot close.
NEAR_TIE = {torch.float64: 1e-9, torch.float32: 1e-5}


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Give every parameter a random value, so that none hides behind a 0 or a 1."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.dim() > 1:
            noise = noise * parameter[0].numel() ** -0.5
        elif torch.equal(parameter, torch.ones_like(parameter)):  # a norm's scale
            noise = 1 + 0.2 * noise
        else:
            noise = 0.2 * noise
        parameter.data.copy_(noise)


def settle(model: nn.Module, images: Tensor) -> None:
    """Set the running statistics of a model's BatchNorms to those of some images."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model.train()(images)
    for norm in norms:
        norm.momentum = 0.1


def outcome(
    model: nn.Module, images: Tensor, forward: Callable[[Tensor], Tensor] | None = None
) -> dict[str, dict[str, Tensor]]:
    """Logits, gradients of a random function of them (the images' too), and buffers, in float64."""
    images = images.clone().requires_grad_()
    logits = (forward or model)(images)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(logits.shape, generator=generator, dtype=torch.float64).to(logits)
    named = {**dict(model.named_parameters()), "images": images}
    gradients = torch.autograd.grad((logits * weights).sum(), list(named.values()))
    results = {
        "logits": {"logits": logits.detach()},
        "gradients": dict(zip(named, gradients, strict=True)),
        "buffers": dict(model.named_buffers()),
    }
    return {
        kind: {name: value.double() for name, value in values.items()}
        for kind, values in results.items()
    }


def assert_same_outcome(
    ours: nn.Module,
    theirs: nn.Module,
    images: Tensor,
    dtype: torch.dtype,
    train: bool,
    follow: bool = False,
    gradient_tolerance: float | None = None,
    rename: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict,
) -> None:
    """Compare with random weights: logits, every gradient, and the buffers after the forward.

    `theirs` is of this file and tells its smallest gap: without near-ties there is one right
    choice of neighbours, and the comparison is one of arithmetic. With thousands of nodes there are
    near-ties always: `follow` then makes it take our graphs, after a look at their distances. In
    the maximum over neighbours a near-tie leaves the value as it is but sends the gradient
    elsewhere; where there are many in float32, `gradient_tolerance` makes room for it. `rename`
    gives their tensors our names.
    """
    randomize(theirs)
    settle(theirs.double(), images.flip(0, 2).double())
    ours.double().load_state_dict(rename(theirs.state_dict()))
    ours, theirs = (model.to(dtype).train(train) for model in (ours, theirs))

    def followed(images: Tensor) -> Tensor:
        logits, graphs = ours(images, return_graph=True)
        assert isinstance(theirs, DenseModel)
        theirs.follow({int(i): graph.neighbours for i, graph in graphs.items()})
        return logits

    def stacked(images: Tensor) -> Tensor:
        logits = ours(images)
        return torch.stack(logits, -1) if isinstance(logits, tuple) else logits

    results = outcome(ours, images.to(dtype), followed if follow else stacked)
    expected = {kind: rename(v) for kind, v in outcome(theirs, images.to(dtype)).items()}
    if not follow:
        gap = theirs.smallest_gap()  # pyrefly: ignore[not-callable]
        assert gap > NEAR_TIE[dtype], "a near-tie in a graph: take another seed"
    for kind in expected:
        assert results[kind].keys() == expected[kind].keys()
        scale = max(float(value.abs().max()) for value in expected[kind].values())
        tolerance = TOLERANCE[dtype]
        if kind == "gradients" and gradient_tolerance is not None:
            tolerance = gradient_tolerance
        for name, value in expected[kind].items():
            difference = float((results[kind][name] - value).abs().max()) / scale
            assert difference < tolerance, f"{kind} of {name} differ by {difference:.1e}"
