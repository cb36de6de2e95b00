"""Slow, obvious versions of the models and their operators, written from the formulas.

Nothing here imports vigpipe. `DenseVig` is the formulation everyone uses today: images as
(B, C, N, 1), 1x1 convolutions, gathered neighbours; `PygStudy` runs torch-geometric's GraphConv on
an explicit list of edges. Both have vigpipe's parameter names and shapes, so that
`load_state_dict` carries the weights over.
"""

import warnings
from collections.abc import Callable, Sequence

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


# ---- ViG with dense convolutions ------------------------------------------------------------


def conv(in_channels: int, out_channels: int, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 1, groups=groups)


class DenseMaxRelative(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.nn = nn.Sequential(conv(wide, wide, groups=4), nn.BatchNorm2d(wide), nn.GELU())

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        batch, channels, nodes, _ = x.shape
        index = graph.flatten(1)[:, None].expand(-1, channels, -1)  # (B, C, N * K)
        neighbours = x[..., 0].gather(2, index).view(batch, channels, nodes, -1)  # (B, C, N, K)
        relative = (neighbours - x).max(dim=-1, keepdim=True).values  # (B, C, N, 1)
        both = torch.stack((x, relative), dim=2).flatten(1, 2)  # channels [x0, m0, x1, m1, ...]
        return self.nn(both)


class DenseGraphConv(nn.Module):
    def __init__(self, channels: int, k: int, dilation: int) -> None:
        super().__init__()
        self.k, self.dilation = k, dilation
        self.gconv = DenseMaxRelative(channels)
        self.smallest_gap = float("inf")

    def forward(self, x: Tensor) -> Tensor:
        return self.gconv(x, self.graph(x))

    @torch.no_grad()
    def graph(self, x: Tensor) -> Tensor:
        y = F.normalize(x, p=2.0, dim=1)[..., 0].transpose(1, 2)  # (B, N, C)
        inner = -2 * y @ y.transpose(1, 2)
        square = (y * y).sum(-1, keepdim=True)
        table = square + inner + square.transpose(1, 2)
        self.smallest_gap = smallest_gap(table, self.k, self.dilation)
        return table.topk(self.k * self.dilation, largest=False).indices[..., :: self.dilation]


class DenseGrapher(nn.Module):
    def __init__(self, channels: int, k: int, dilation: int) -> None:
        super().__init__()
        self.fc1 = nn.Sequential(conv(channels, channels), nn.BatchNorm2d(channels))
        self.graph_conv = DenseGraphConv(channels, k, dilation)
        self.fc2 = nn.Sequential(conv(2 * channels, channels), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.graph_conv(self.fc1(x))) + x


class DenseFFN(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = 4 * channels
        self.fc1 = nn.Sequential(conv(channels, hidden), nn.BatchNorm2d(hidden))
        self.fc2 = nn.Sequential(conv(hidden, channels), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x))) + x


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


class DenseVig(nn.Module):
    """The isotropic ViG, arXiv:2206.00272, with BatchNorm and without drop-path or dropout.

    Args:
        channels: C.
        neighbours: (k, dilation) of every block.
        grid: height and width in nodes.
        stem: (width, stride) of each 3x3 convolution.
        in_channels: channels of the images.
        num_classes: width of the logits.
    """

    def __init__(
        self,
        channels: int,
        neighbours: Sequence[tuple[int, int]],
        grid: tuple[int, int],
        stem: Sequence[tuple[int, int]],
        in_channels: int,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.stem = DenseStem(stem_convs(in_channels, stem))
        self.pos_embed = nn.Parameter(torch.zeros(1, channels, *grid))
        self.backbone = nn.Sequential(
            *(
                nn.Sequential(DenseGrapher(channels, k, dilation), DenseFFN(channels))
                for k, dilation in neighbours
            )
        )
        self.prediction = nn.Sequential(
            conv(channels, 1024), nn.BatchNorm2d(1024), nn.GELU(), nn.Dropout(0.0),
            conv(1024, num_classes),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images) + self.pos_embed
        x = self.backbone(x.flatten(2).unsqueeze(-1))  # (B, C, N, 1)
        return self.prediction(F.adaptive_avg_pool2d(x, 1)).flatten(1)

    def smallest_gap(self) -> float:
        """See the function; over all blocks of the last forward."""
        return min(m.smallest_gap for m in self.modules() if isinstance(m, DenseGraphConv))


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


def outcome(model: nn.Module, images: Tensor) -> dict[str, dict[str, Tensor]]:
    """Logits, gradients of a random function of them (the images' too), and buffers, in float64."""
    images = images.clone().requires_grad_()
    logits = model(images)
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
    ours: nn.Module, theirs: nn.Module, images: Tensor, dtype: torch.dtype, train: bool
) -> None:
    """Compare with random weights: logits, every gradient, and the buffers after the forward.

    `theirs` is of this file and tells its smallest gap: without near-ties there is one right
    choice of neighbours, and the comparison is one of arithmetic.
    """
    randomize(theirs)
    settle(theirs.double(), images.flip(0, 2).double())
    ours.double().load_state_dict(theirs.state_dict())
    models = [model.to(dtype).train(train) for model in (ours, theirs)]
    results, expected = (outcome(model, images.to(dtype)) for model in models)
    assert theirs.smallest_gap() > 1e-5, "a near-tie in a kNN graph: take another seed"  # pyright: ignore[reportCallIssue]
    for kind in expected:
        assert results[kind].keys() == expected[kind].keys()
        scale = max(float(value.abs().max()) for value in expected[kind].values())
        for name, value in expected[kind].items():
            difference = float((results[kind][name] - value).abs().max()) / scale
            assert difference < TOLERANCE[dtype], f"{kind} of {name} differ by {difference:.1e}"
