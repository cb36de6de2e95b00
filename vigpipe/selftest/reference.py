"""What ours is compared with: a ViG as it is usually written.

It has channels first, and every layer of a block is a 1x1 convolution. Its graph is made as in the
published code (huawei-noah/Efficient-AI-Backbones, vig_pytorch): the whole (B, N, N) distance
matrix, topk over it, two gathers of (B, C, N, K) numbers, their difference, and its maximum. The
parameters have the names of those in `vigpipe.model`, so weights load from one into the other.
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vigpipe.model.blocks import BlockSpec
from vigpipe.model.vig import VisionGnn


def neighbours(
    x: Tensor, y: Tensor, bias: Tensor | None, k: int, dilation: int
) -> tuple[Tensor, Tensor]:
    """Make the kNN graph and the max-relative aggregate (Han et al. 2022, arXiv:2206.00272).

    From nodes (B, C, N, 1), candidates for neighbours (B, C, M, 1), and relative positions, which
    are added to the distances and broadcast to (B, N, M), these are the indices of the neighbours,
    (B, N, K) int64, and the aggregate, (B, C, N, 1).
    """
    with torch.no_grad():
        nodes = F.normalize(x, dim=1).squeeze(-1).transpose(1, 2)  # (B, N, C)
        others = F.normalize(y, dim=1).squeeze(-1).transpose(1, 2)
        inner = -2 * nodes @ others.transpose(1, 2)  # (B, N, M)
        distance = (nodes * nodes).sum(-1, keepdim=True) + inner
        distance = distance + (others * others).sum(-1).unsqueeze(1)
        if bias is not None:
            distance = distance + bias
        graph = torch.topk(-distance, k * dilation).indices[..., ::dilation]
        center = torch.arange(x.shape[2], device=x.device).view(1, -1, 1).expand_as(graph)
    return graph, (_gather(y, graph) - _gather(x, center)).max(-1, keepdim=True).values


def _gather(x: Tensor, graph: Tensor) -> Tensor:
    """Gather the features of all neighbours: (B, C, M, 1), (B, N, K) -> (B, C, N, K)."""
    num_images, num_channels, num_nodes, _ = x.shape
    offsets = torch.arange(num_images, device=x.device).view(-1, 1, 1) * num_nodes
    table = x.transpose(1, 2).reshape(-1, num_channels)
    return table[(graph + offsets).flatten()].view(*graph.shape, num_channels).permute(0, 3, 1, 2)


def _layer(in_channels: int, out_channels: int, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, groups=groups), nn.BatchNorm2d(out_channels)
    )


def _named(name: str, *layers: nn.Module) -> nn.Sequential:
    """Run layers one after another; their parameters are named as in a module that has this one."""
    return nn.Sequential(OrderedDict[str, nn.Module]({name: nn.Sequential(*layers)}))


class _GraphConv(nn.Module):
    def __init__(self, channels: int, k: int, dilation: int, reduction: int) -> None:
        super().__init__()
        self.gconv = _named("nn", *_layer(2 * channels, 2 * channels, groups=4), nn.GELU())
        self.k, self.dilation, self.reduction = k, dilation, reduction

    def forward(self, images: Tensor, bias: Tensor | None) -> Tensor:
        num_images, num_channels, height, width = images.shape
        pooled = F.avg_pool2d(images, self.reduction) if self.reduction > 1 else images
        x, y = (t.reshape(num_images, num_channels, -1, 1) for t in (images, pooled))
        _, largest = neighbours(x, y, bias, self.k, self.dilation)
        both = torch.stack((x, largest), dim=2).view(num_images, 2 * num_channels, -1, 1)
        return self.gconv(both).view(num_images, -1, height, width)


class _Grapher(nn.Module):
    relative_pos: Tensor | None

    def __init__(self, spec: BlockSpec, table: Tensor | None) -> None:
        super().__init__()
        rule, channels = spec.rule, spec.channels
        assert rule is not None
        self.fc1 = _layer(channels, channels)
        self.graph_conv = _GraphConv(channels, rule.k, rule.dilation, rule.reduction)
        self.fc2 = _layer(2 * channels, channels)
        self.register_buffer("relative_pos", table)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.graph_conv(self.fc1(x), self.relative_pos)) + x


class _FFN(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1, self.act = _layer(channels, 4 * channels), nn.GELU()
        self.fc2 = _layer(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x))) + x


def _conv(in_channels: int, out_channels: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1)
    return [conv, nn.BatchNorm2d(out_channels)]


def _stem(convs: nn.Module) -> nn.Sequential:
    layers: list[nn.Module] = []
    for layer in convs.children():
        if isinstance(layer, nn.Conv2d):
            layers += _conv(layer.in_channels, layer.out_channels, layer.stride[0])
            layers.append(nn.GELU())
    return _named("convs", *layers[:-1])


class ReferenceVig(nn.Module):
    """A kNN, max-relative, BatchNorm ViG with the shape and a copy of the weights of `model`."""

    def __init__(self, model: VisionGnn) -> None:
        super().__init__()
        state = model.state_dict()
        self.stem = _stem(model.stem.convs)
        self.pos_embed = nn.Parameter(torch.zeros_like(model.pos_embed))
        self.backbone = nn.ModuleList()
        for i, spec in enumerate(model.specs):
            if spec.rule is None:
                self.backbone.append(_named("conv", *_conv(spec.before[1], spec.channels, 2)))
                continue
            table = state.get(f"backbone.{i}.0.relative_pos")
            self.backbone.append(nn.Sequential(_Grapher(spec, table), _FFN(spec.channels)))
        channels, width = model.specs[-1].channels, model.head_hidden_size
        self.prediction = nn.Sequential(
            *_layer(channels, width),
            nn.GELU(),
            nn.Identity(),
            nn.Conv2d(width, model.num_classes, 1),
        )
        self.load_state_dict(state)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits: (B, C_in, H, W) -> (B, classes)."""
        x = self.stem(images) + self.pos_embed
        for block in self.backbone:
            x = block(x)
        return self.prediction(F.adaptive_avg_pool2d(x, 1)).flatten(1)
