"""The model of the study: J. Raffi, "Distributed Graph Neural Network" (Pisa, 2024).

Every pixel is a node with three channels, and the graph is fixed: every pixel is connected to its 8
neighbours on the grid. Widths, order of layers, parameter names and the missing non-linearity
before the graph convolution are as in the study.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vigpipe.config.choices import Divided, Graph, Norm
from vigpipe.config.typed import typed
from vigpipe.errors import InputError
from vigpipe.model.aggregate import neighbour_sum
from vigpipe.model.blocks import check_sizes
from vigpipe.model.graph import check_finite, check_neighbours, knn_graph
from vigpipe.model.keyed_dropout import Draws, DropPath, KeyedDropout
from vigpipe.model.norm import NORM_ROLES, BatchNorm, apply_norm, make_norm
from vigpipe.model.position import Grid
from vigpipe.model.recompute import build_or_replay
from vigpipe.model.regions import region
from vigpipe.model.slicing import (
    LINEAR_ROLES,
    Roles,
    Side,
    Sides,
    Slicing,
    bound,
    divided_width,
    within,
)
from vigpipe.model.staged import StagedModel
from vigpipe.ops import folded, half_block
from vigpipe.ops.folded import Convolution
from vigpipe.ops.grid import grid_neighbour_sum

NUM_NEIGHBOURS = 8
NUM_BLOCKS = 8
GRAPHER_WIDTH, FFN_WIDTH = 256, 512

_LINEAR_AND_NORM: Roles = {**within("0.", LINEAR_ROLES), **within("1.", NORM_ROLES)}


class GraphConv(nn.Module):
    """Compute W_rel * (sum of the neighbours) + b + W_root * x, as PyG's GraphConv does.

    Morris et al. 2019 (arXiv:1810.02244). The graph `grid` connects a node to its 8 neighbours on
    the grid of pixels, `knn` to the 8 nearest other nodes in feature space.
    """

    def __init__(self, channels: int, graph: Graph, grid: Grid) -> None:
        super().__init__()
        self.graph, self.grid = graph, grid
        self.detect_anomaly = ""  # name of the block for the error; empty switches the check off
        self.lin_rel = nn.Linear(channels, channels)
        self.lin_root = nn.Linear(channels, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.graph == "grid":
            total = region("aggregation", grid_neighbour_sum, x, *self.grid)
        else:
            if self.detect_anomaly:
                check_finite(x, self.detect_anomaly)
            graph = build_or_replay(
                lambda: region("knn", knn_graph, x.detach(), NUM_NEIGHBOURS, 1, False)
            )
            total = neighbour_sum(x, graph)
        return self.lin_rel(total) + self.lin_root(x)

    @property
    def parameters_of_sum_and_node(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.lin_rel.weight, self.lin_rel.bias, self.lin_root.weight


class StudyHalf(nn.Module):
    """Half of a block: widen, convolve over the graph or not, GELU, narrow, residual: (B, N, C).

    `rescale` multiplies the last product before its bias is added. The fused version never holds
    the whole hidden layer in memory. A GraphConv follows Linear and BatchNorm without a
    non-linearity, so together they are an affine map of 7 features of a node: the sum of its
    neighbours, the node itself, and its number of neighbours,

        GraphConv(BN(W x + b)) = [sum x_j, x_i, degree] M + m.

    So the fused version sums the neighbours before widening.
    """

    fused = True
    roles: ClassVar[Roles] = {
        **within("fc1.", _LINEAR_AND_NORM, {"in": "trunk", "out": "x"}),
        "graph_conv.lin_rel.weight": ("out", "x"),
        "graph_conv.lin_rel.bias": ("out",),
        "graph_conv.lin_root.weight": ("out", "x"),
        **within("fc2.", _LINEAR_AND_NORM, {"in": "out", "out": "trunk"}),
    }

    def __init__(
        self,
        channels: int,
        hidden: int,
        norm: Norm,
        drop_path: float,
        stream: int,
        rescale: float = 1.0,
        graph: tuple[Graph, Grid] | None = None,  # of the graph convolution, if there is one
    ) -> None:
        super().__init__()
        self.fc1 = nn.Sequential(nn.Linear(channels, hidden), make_norm(norm, hidden))
        self.graph_conv = None if graph is None else GraphConv(hidden, *graph)
        self.fc2 = nn.Sequential(nn.Linear(hidden, channels), make_norm(norm, channels))
        self.drop_path, self.rescale = DropPath(drop_path, stream), rescale

    def forward(self, x: Tensor, draws: Draws | None) -> Tensor:
        sample_scale, conv = self.drop_path(x, draws), self.graph_conv
        has_batch_norm = isinstance(self.fc1[1], BatchNorm)
        if self.fused and has_batch_norm and (conv is None or conv.graph == "grid"):
            return self._run_fused(x, sample_scale)
        y = self.fc1(x)
        y = F.gelu(y if conv is None else conv(y))
        return self._added(F.linear(y, self._narrow_weight), x, sample_scale)

    def _run_fused(self, x: Tensor, sample_scale: Tensor | None) -> Tensor:
        (first, norm), (last, last_norm), conv = self.fc1, self.fc2, self.graph_conv
        assert isinstance(first, nn.Linear)
        assert isinstance(norm, BatchNorm)
        assert isinstance(last, nn.Linear)
        second = self._narrow_weight.to(x)
        if norm.training and isinstance(last_norm, BatchNorm):
            parameters = (
                *(first.weight, first.bias, norm.weight, norm.bias),
                *((None,) * 3 if conv is None else conv.parameters_of_sum_and_node),
                *(second, last.bias, last_norm.weight, last_norm.bias),
            )
            if half_block.can_run(x, parameters):
                stats = norm.next_stats(), last_norm.next_stats()
                grid = (x.shape[1], 1) if conv is None else conv.grid
                settings = half_block.Settings(grid, (norm.eps, last_norm.eps), stats)
                y = half_block.half_block(x, sample_scale, parameters, settings)
                norm.recorded(stats[0][0])
                last_norm.recorded(stats[1][0])
                return y
        neighbours = None
        if conv is not None:
            total = region("aggregation", grid_neighbour_sum, x, *conv.grid)
            neighbours = Convolution(*conv.parameters_of_sum_and_node, total, conv.grid)
        layer = folded.Norm(first.weight, first.bias, norm.weight, norm.bias, norm.eps)
        if norm.training:
            y, stats = folded.trained(x, layer, neighbours, second)
            norm.record(stats)
        else:
            y = folded.evaluated(x, layer, neighbours, second, norm.running_mean, norm.running_var)
        return self._added(y, x, sample_scale)

    @property
    def _narrow_weight(self) -> Tensor:
        linear = self.fc2[0]
        assert isinstance(linear, nn.Linear)
        return linear.weight if self.rescale == 1.0 else linear.weight * self.rescale

    def _added(self, product: Tensor, x: Tensor, sample_scale: Tensor | None) -> Tensor:
        """Finish the narrowing layer after its product: bias, norm, and the residual x."""
        linear, norm = self.fc2
        assert isinstance(linear, nn.Linear)
        if isinstance(norm, BatchNorm) and norm.training:  # subtracting the mean cancels the bias
            return norm(product, x, sample_scale, False, linear.bias)
        return apply_norm(norm, product + linear.bias, x, sample_scale)


class StudyBlock(nn.Module):
    """A Grapher, then an FFN: 138,258 parameters at the study's widths."""

    def __init__(self, grapher: StudyHalf, ffn: StudyHalf) -> None:
        super().__init__()
        self.grapher, self.ffn = grapher, ffn

    def forward(self, x: Tensor, draws: Draws | None) -> Tensor:
        return region("ffn", self.ffn, region("grapher", self.grapher, x, draws), draws)


class VigStudy(StagedModel):
    """Eight blocks whose nodes are the pixels, then a readout of the sum over the nodes.

    The arguments are those of `VisionGnn`. The study has the graph `grid`, no drop-path and no
    dropout. `narrow` divides the hidden widths of the blocks.
    """

    readout_names = ("fc1", "fc2", "dropout")
    pooled_into = "fc1"

    @typed
    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: int | Grid = (32, 32),
        norm: Norm = "batch",
        drop_path_rate: float = 0.0,
        drop_rate: float = 0.0,
        graph: Graph = "grid",
        narrow: int = 1,
        branch_rescale: bool = False,
    ) -> None:
        img_size = (img_size, img_size) if isinstance(img_size, int) else img_size
        rates = {"drop_path_rate": drop_path_rate, "drop_rate": drop_rate}
        check_sizes(num_classes, in_chans, img_size, **rates)
        super().__init__(NUM_BLOCKS, num_classes)
        self.in_chans, self.img_size = in_chans, img_size
        if graph == "knn":
            check_neighbours(NUM_NEIGHBOURS, 1, img_size[0] * img_size[1], loop=False)
        conv = divided_width(GRAPHER_WIDTH, narrow, "every Grapher")
        hidden = divided_width(FFN_WIDTH, narrow, "every FFN")
        rescale = float(narrow) if branch_rescale else 1.0
        self.blocks = nn.ModuleDict()
        for i in range(NUM_BLOCKS):
            rate = drop_path_rate * i / (NUM_BLOCKS - 1)
            self.blocks[str(i)] = StudyBlock(
                StudyHalf(in_chans, conv, norm, rate, 2 * i, rescale, (graph, img_size)),
                StudyHalf(in_chans, hidden, norm, rate, 2 * i + 1, rescale),
            )
        self.fc1 = nn.Linear(in_chans, 1024)
        self.fc2 = nn.Linear(1024, num_classes) if num_classes else nn.Identity()
        self.dropout = KeyedDropout(drop_rate, stream=2 * NUM_BLOCKS)

    def boundary_shapes(self, block: int) -> tuple[tuple[int, ...], ...]:
        return ((self.img_size[0] * self.img_size[1], self.in_chans),)

    def slicing(self, partition_input: bool = False, divided: Divided = "inner") -> Slicing:
        """Make the table: Graphers have groups `x` and `out`, FFNs `hidden`; the trunk is whole."""
        if partition_input or divided != "inner":
            raise ValueError("vig_study's trunk has the channels of the images; it stays whole")
        sides: dict[str, Sides] = {}
        for index, block in self.blocks.items():
            for half in ("grapher", "ffn"):
                module, prefix = block.get_submodule(half), f"blocks.{index}.{half}."
                assert isinstance(module, StudyHalf)
                names = ("x", "out") if half == "grapher" else ("hidden", "hidden")
                groups = {"x": Side(prefix + names[0]), "out": Side(prefix + names[1])}
                sides |= bound(module, prefix, module.roles, {"trunk": None, **groups})
        if self.has_readout:
            for name in ("fc1", "fc2"):
                sides |= {f"{name}.weight": (None, None), f"{name}.bias": (None,)}
        return Slicing.of(self.state_dict(), sides)

    def classifier(self) -> tuple[tuple[str, ...], dict[str, int]]:
        return ("fc2.",), {"fc2.weight": 0, "fc2.bias": 0}

    def set_detect_anomaly(self, enable: bool) -> None:
        for index, block in self.blocks.items():
            conv: Any = block.get_submodule("grapher.graph_conv")
            conv.detect_anomaly = f"block {index}" if enable else ""

    def embed(self, images: Tensor) -> Tensor:
        """Turn pixels into nodes: (B, C, H, W) -> (B, N, C)."""
        if not torch.compiler.is_compiling() and images.shape[2:] != self.img_size:
            raise InputError(
                f"vig_study: images of {images.shape[2]}x{images.shape[3]} pixels, expected "
                f"{self.img_size[0]}x{self.img_size[1]}; make the model with their img_size"
            )
        return images.flatten(2).transpose(1, 2).contiguous()

    def read_out(self, x: Tensor, draws: Draws | None) -> Tensor:
        """Classify the sum over the nodes: (B, N, C) -> (B, num_classes)."""
        return self.fc2(self.dropout(F.gelu(self.fc1(x.sum(1))), draws))
