"""Slow, obvious versions of the models without kNN, with the names of the published files.

Nothing here imports vigpipe. Images are (B, C, H, W); the graph convolutions loop over the nodes.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ---- links, one node at a time ---------------------------------------------------------------


def node_before(x: Tensor, row: int, column: int, down: int, right: int) -> Tensor:
    """The node so many rows and columns before another, around the edge; past the grid, itself."""
    height, width = x.shape[2:]
    down, right = (0 if abs(n) >= side else n for n, side in ((down, height), (right, width)))
    return x[:, :, (row - down) % height, (column - right) % width]


def over_nodes(x: Tensor, relative: Callable[[int, int], list[Tensor]]) -> Tensor:
    """For every node the maximum, from 0, of some relative features, taken in order."""
    rows: list[Tensor] = []
    for row in range(x.shape[2]):
        columns: list[Tensor] = []
        for column in range(x.shape[3]):
            largest = torch.zeros_like(x[:, :, 0, 0])
            for feature in relative(row, column):
                largest = torch.max(largest, feature)
            columns.append(largest)
        rows.append(torch.stack(columns, -1))
    return torch.stack(rows, -2)


def every(x: Tensor, k: int) -> Tensor:
    """MobileViG: x less the nodes K, 2K, ... before it in its column and in its row."""

    def relative(row: int, column: int) -> list[Tensor]:
        node = x[:, :, row, column]
        up = [node - node_before(x, row, column, i, 0) for i in range(k, x.shape[2], k)]
        return up + [node - node_before(x, row, column, 0, i) for i in range(k, x.shape[3], k)]

    return over_nodes(x, relative)


def four(x: Tensor, k: int) -> Tensor:
    """MobileViGv2: four nodes at distance K, less x."""

    def relative(row: int, column: int) -> list[Tensor]:
        steps = ((k, 0), (-k, 0), (0, k), (0, -k))
        node = x[:, :, row, column]
        return [node_before(x, row, column, *step) - node for step in steps]

    return over_nodes(x, relative)


def near(x: Tensor, k: int, gaps: list[float]) -> Tensor:
    """GreedyViG: nodes whose L1 distance is below mean - deviation of those to half a grid away.

    By how much each distance misses that limit is added to the gaps, relative to the limit.
    """
    height, width = x.shape[2:]
    half = [-(-side // 2) for side in (height, width)]
    far = [
        (x[:, :, r, c] - x[:, :, (r - half[0]) % height, (c - half[1]) % width]).abs().sum(1)
        for r in range(height)
        for c in range(width)
    ]
    distances = torch.stack(far, 1)  # (B, N)
    limit = distances.mean(1) - distances.std(1) if len(far) > 1 else torch.zeros(len(x))

    def masked(node: Tensor, other: Tensor) -> Tensor:
        distance = (node - other).abs().sum(1)
        is_near = distance < limit
        if len(far) > 1:
            gaps.append(float(((distance - limit) / limit).detach().abs().min()))
        return (other - node) * is_near[:, None].to(x.dtype)

    def relative(row: int, column: int) -> list[Tensor]:
        node = x[:, :, row, column]
        up = [masked(node, node_before(x, row, column, i, 0)) for i in range(0, height, k)]
        return up + [masked(node, node_before(x, row, column, 0, i)) for i in range(0, width, k)]

    return over_nodes(x, relative)


def soft(x: Tensor, k: int, temperature: Tensor) -> Tensor:
    """AdaptViG: two nodes at distance K, and those at 2, 4, 8, ... by an exponential gate."""

    def gated(node: Tensor, other: Tensor) -> Tensor:
        distance = (node - other).abs().sum(1, keepdim=True)
        return (other - node) * torch.exp(-distance / (temperature.abs() + 1e-6))

    def powers(side: int) -> list[int]:
        return [2**i for i in range(1, side.bit_length())]

    def relative(row: int, column: int) -> list[Tensor]:
        node = x[:, :, row, column]
        plain = [node_before(x, row, column, *step) - node for step in ((k, 0), (0, k))]
        steps = [(i, 0) for i in powers(x.shape[2])] + [(0, i) for i in powers(x.shape[3])]
        return plain + [gated(node, node_before(x, row, column, *step)) for step in steps]

    return over_nodes(x, relative)


def powers(x: Tensor, k: int) -> Tensor:
    """LogViG: x less the nodes K - 1, K^2 - 1, ... before it and behind it."""

    def shifts(side: int) -> list[int]:
        found = [k**i - 1 for i in range(1, side.bit_length())]
        return [*found, *(-n for n in found)]

    def relative(row: int, column: int) -> list[Tensor]:
        node = x[:, :, row, column]
        steps = [(i, 0) for i in shifts(x.shape[2])] + [(0, i) for i in shifts(x.shape[3])]
        return [node - node_before(x, row, column, *step) for step in steps]

    return over_nodes(x, relative)


# ---- modules with the published names --------------------------------------------------------


def conv_norm(in_channels: int, out_channels: int, *rest: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1), nn.BatchNorm2d(out_channels), *rest
    )


class Stem(nn.Module):
    def __init__(self, in_channels: int, channels: int, strides: Sequence[int]) -> None:
        super().__init__()
        half = channels // 2
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, half, 3, strides[0], 1), nn.BatchNorm2d(half), nn.GELU(),
            nn.Conv2d(half, channels, 3, strides[1], 1), nn.BatchNorm2d(channels), nn.GELU(),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.stem(images)


class Mlp(nn.Module):
    """The local block's branch in MobileViG."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = 4 * channels
        self.fc1, self.norm1 = nn.Conv2d(channels, hidden, 1), nn.BatchNorm2d(hidden)
        self.mid = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.mid_norm = nn.BatchNorm2d(hidden)
        self.fc2, self.norm2 = nn.Conv2d(hidden, channels, 1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm1(self.fc1(x)))
        x = F.gelu(self.mid_norm(self.mid(x)))
        return self.norm2(self.fc2(x))


class Dws(nn.Module):
    """The local block's branch in the others."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = 4 * channels
        self.pw1, self.norm1 = nn.Conv2d(channels, hidden, 1), nn.BatchNorm2d(hidden)
        self.dw = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.norm2 = nn.BatchNorm2d(hidden)
        self.pw2, self.norm3 = nn.Conv2d(hidden, channels, 1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm1(self.pw1(x)))
        x = F.gelu(self.norm2(self.dw(x)))
        return self.norm3(self.pw2(x))


class Local(nn.Module):
    """An inverted residual with layer scale."""

    def __init__(self, family: str, channels: int) -> None:
        super().__init__()
        branch = Mlp if family == "mobilevig" else Dws
        self.branch = "mlp" if family == "mobilevig" else "dws"
        self.scale = "layer_scale_1" if family == "mobilevigv2" else "layer_scale_2"
        self.add_module(self.branch, branch(channels))
        shape = (channels, 1, 1) if family in ("mobilevig", "mobilevigv2") else (channels,)
        self.register_parameter(self.scale, nn.Parameter(torch.full(shape, 1e-5)))

    def forward(self, x: Tensor) -> Tensor:
        branch, scale = getattr(self, self.branch), getattr(self, self.scale)
        return x + scale.view(-1, 1, 1) * branch(x)


class GraphConv(nn.Module):
    """A graph convolution on links along the axes."""

    def __init__(self, family: str, channels: int, width: int, k: int) -> None:
        super().__init__()
        self.family, self.k, self.gaps = family, k, [float("inf")]
        self.nn = conv_norm(2 * channels, width, nn.GELU())
        if family == "adaptvig":
            self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.family == "adaptvig":
            largest = soft(x, self.k, self.temperature)
        elif self.family == "greedyvig":
            self.gaps = [float("inf")]
            largest = near(x, self.k, self.gaps)
        else:
            kinds = {"mobilevig": every, "mobilevigv2": four, "logvig": powers}
            largest = kinds[self.family](x, self.k)
        return self.nn(torch.cat([x, largest], 1))


class Attention(nn.Module):
    """AdaptViG's graph convolution at the last resolution, one node at a time."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        narrow = channels // 4
        self.q_conv = nn.Conv2d(channels, narrow, 1, bias=False)
        self.k_conv = nn.Conv2d(channels, narrow, 1, bias=False)
        self.v_conv = nn.Conv2d(channels, channels, 1, bias=False)
        self.q_norm, self.k_norm = nn.LayerNorm(narrow), nn.LayerNorm(narrow)
        self.nn = conv_norm(2 * channels, width, nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            conv(x).flatten(2).transpose(1, 2) for conv in (self.q_conv, self.k_conv, self.v_conv)
        )  # (B, N, C)
        query, key = self.q_norm(query), self.k_norm(key)
        attended: list[Tensor] = []
        for node in range(query.shape[1]):
            likeness = (query[:, node, None] * key).sum(-1) / query.shape[-1] ** 0.5  # (B, N)
            attended.append((likeness.softmax(-1)[..., None] * value).sum(1))
        images = torch.stack(attended, -1).view_as(x)
        largest = torch.max(torch.zeros_like(x), images - x)
        return self.nn(torch.cat([x, largest], 1))


class Position(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pe = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.pe(x) + x


class Mixer(nn.Module):
    def __init__(self, family: str, channels: int, k: int, attends: bool) -> None:
        super().__init__()
        self.family = family
        width = 2 * channels if family in ("mobilevig", "logvig") else channels
        if family != "mobilevig":
            self.cpe = Position(channels)
        self.fc1 = conv_norm(channels, channels)
        self.graph_conv: nn.Module = (
            Attention(channels, width) if attends else GraphConv(family, channels, width, k)
        )
        self.fc2 = conv_norm(width, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1(x if self.family == "mobilevig" else self.cpe(x))
        y = self.fc2(self.graph_conv(y))
        return x + y if self.family == "mobilevig" else y


class Ffn(nn.Module):
    """The FFN in MobileViG, whose layers have names."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1 = conv_norm(channels, 4 * channels)
        self.fc2 = conv_norm(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(x)))


class Graph(nn.Module):
    """A graph block with layer scale: all families but MobileViG."""

    def __init__(self, family: str, channels: int, k: int, attends: bool) -> None:
        super().__init__()
        self.mixer = Mixer(family, channels, k, attends)
        self.ffn = nn.Sequential(
            *conv_norm(channels, 4 * channels, nn.GELU()), *conv_norm(4 * channels, channels)
        )
        shape = (channels, 1, 1) if family == "mobilevigv2" else (channels,)
        self.layer_scale_1 = nn.Parameter(torch.full(shape, 1e-5))
        self.layer_scale_2 = nn.Parameter(torch.full(shape, 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layer_scale_1.view(-1, 1, 1) * self.mixer(x)
        return x + self.layer_scale_2.view(-1, 1, 1) * self.ffn(x)


class Down(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, 2, 1), nn.BatchNorm2d(out_channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Branch(nn.Module):
    """LogViG's branch of high resolution."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.conv = nn.Sequential(
            nn.Conv2d(in_channels, half, 3, 2, 1), nn.BatchNorm2d(half), nn.GELU(),
            nn.Conv2d(half, channels, 3, 1, 1), nn.BatchNorm2d(channels), nn.GELU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Merge(nn.Module):
    """LogViG's merging of both branches; `adjust`, which no published file has, is given."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = conv_norm(channels, channels, nn.GELU())
        self.adjust: tuple[Tensor, Tensor] | None = None  # (C, C', 1, 1) and (C,)

    def forward(self, low: Tensor, high: Tensor) -> Tensor:
        assert self.adjust is not None
        low = F.interpolate(low, size=high.shape[2:], mode="bilinear", align_corners=False)
        weight, bias = self.adjust
        return self.conv(low + F.conv2d(high, weight.to(high), bias.to(high)))


class PublishedModel(nn.Module):
    """A model of any of the families, with BatchNorm and without drop-path.

    Args:
        family: mobilevig, mobilevigv2, greedyvig, adaptvig or logvig.
        blocks: local blocks and graph blocks of each resolution.
        channels: C of each resolution.
        hidden: channels of the readout's hidden layer.
        k: K of each resolution.
        strides: of the stem's two convolutions.
        in_channels: channels of the images.
        num_classes: width of the logits.
    """

    def __init__(
        self,
        family: str,
        blocks: Sequence[tuple[int, int]],
        channels: Sequence[int],
        hidden: int,
        k: Sequence[int],
        strides: Sequence[int] = (2, 2),
        in_channels: int = 3,
        num_classes: int = 1000,
    ) -> None:
        super().__init__()
        self.stem = Stem(in_channels, channels[0], strides)
        if family == "logvig":
            self.high_res_branch = Branch(channels[0], channels[1])
            self.merge = Merge(channels[-1])
        resolutions: list[list[nn.Module]] = []
        last = len(channels) - 1
        for i, (num_local, num_graph) in enumerate(blocks):
            modules: list[nn.Module] = [Down(channels[i - 1], channels[i])] if i else []
            modules += [Local(family, channels[i]) for _ in range(num_local)]
            for _ in range(num_graph):
                if family == "mobilevig":
                    mixer = Mixer(family, channels[i], k[i], attends=False)
                    modules.append(nn.Sequential(mixer, Ffn(channels[i])))
                else:
                    attends = family == "adaptvig" and i == last
                    modules.append(Graph(family, channels[i], k[i], attends))
            resolutions.append(modules)
        if family == "mobilevig":
            down, *graphs = resolutions[-1]
            self.local_backbone = nn.ModuleList(
                [*(module for modules in resolutions[:-1] for module in modules), down]
            )
            self.backbone = nn.ModuleList(graphs)
        else:
            self.backbone = nn.ModuleList(nn.Sequential(*modules) for modules in resolutions)
        self.prediction = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), *conv_norm(channels[-1], hidden, nn.GELU()), nn.Dropout(0.0)
        )
        self.head = nn.Conv2d(hidden, num_classes, 1)
        self.dist_head = nn.Conv2d(hidden, num_classes, 1)

    def features(self, images: Tensor) -> Tensor:
        x = nodes = self.stem(images)
        for block in (*getattr(self, "local_backbone", ()), *self.backbone):
            x = block(x)
        return self.merge(x, self.high_res_branch(nodes)) if hasattr(self, "merge") else x

    def forward(self, images: Tensor) -> Tensor:
        """(B, num_classes, 2) in training, (B, num_classes) in evaluation."""
        x = self.prediction(self.features(images))
        both = torch.cat([self.head(x), self.dist_head(x)], -1)[:, :, 0]
        return both if self.training else both.mean(-1)

    def smallest_gap(self) -> float:
        """By how much a node at least missed being near or far in the last forward."""
        convs = [module for module in self.modules() if isinstance(module, GraphConv)]
        return min(gap for conv in convs for gap in conv.gaps)
