"""Which nodes and edges the logit of an image rests on.

A node's features are what the first block takes. Everything is measured on the model as it is:
without a node or an edge, the graphs of the blocks that follow are built anew.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vigpipe.inference.explain.explanation import (
    EdgeShares,
    Explanation,
    Measure,
    Question,
    in_parts,
)
from vigpipe.model.grapher import BlockGraph
from vigpipe.model.staged import StagedModel
from vigpipe.model.study import VigStudy
from vigpipe.model.vig import Block, VisionGnn

MOST_SQUARES = 256  # of nodes that are occluded together


class _Taken(NamedTuple):
    """What a block takes of one image, and the graph that it uses."""

    x: Tensor  # (1, H, W, C)
    given: Tensor | None  # the graph that an earlier block passes on
    graph: BlockGraph


def explain_image(model: StagedModel, image: Tensor, question: Question) -> Explanation:
    """Explain a logit of an image, (1, C, H, W); the model is in evaluation mode."""
    with torch.no_grad():
        logits = model(image)[0]
        nodes = model.embed(image)
    measure = question.begun(logits)
    gradient, of_edges, taken = _gradients(model, nodes, measure)
    edges: list[EdgeShares] = []
    with torch.no_grad():
        drops, side = _occluded(model, nodes, gradient.shape, measure)
        for block, of_block in of_edges.items():
            assert isinstance(model, VisionGnn)
            edges.append(_edges(model, block, taken[block], of_block, measure))
    return Explanation(measure.target, logits, gradient, drops, tuple(edges), side)


def _gradients(
    model: StagedModel, nodes: Tensor, measure: Measure
) -> tuple[np.ndarray, dict[int, np.ndarray], dict[int, _Taken]]:
    """Return gradient × input of nodes, (H, W), and edges, (N, K), and what each block takes."""
    x = nodes = nodes.detach().requires_grad_()
    taken: dict[int, _Taken] = {}
    convs: dict[int, _Recorded] = {}
    if isinstance(model, VisionGnn):
        given = None
        for name, block in model.backbone.items():
            before = x.detach(), given
            if not isinstance(block, Block):
                x, _, given = model.run_module(name, block, x, None, given)
                continue
            conv = _Recorded(_conv_of(block))
            with _replaced(block, conv):
                x, graph, given = model.run_module(name, block, x, None, given)
            assert graph is not None
            convs[int(name)], taken[int(name)] = conv, _Taken(*before, graph)
        height, width = nodes.shape[1:3]
    else:
        assert isinstance(model, VigStudy)
        x = model.run_blocks(nodes, None)
        height, width = model.img_size
    inputs = [nodes, *(conv.result for conv in convs.values())]
    of_nodes, *of_results = measure.gradients(model.read_out(x, None)[0], inputs)
    with torch.no_grad():
        products = (of_nodes * nodes).sum(-1).double().view(height, width).cpu().numpy()
        of_edges = {
            block: conv.shares(gradient).double().cpu().numpy()
            for (block, conv), gradient in zip(convs.items(), of_results, strict=True)
        }
    return products, of_edges, taken


def _occluded(
    model: StagedModel, nodes: Tensor, grid: tuple[int, ...], measure: Measure
) -> tuple[np.ndarray, int]:
    """Return by how much the logit falls if squares of nodes are 0, (H', W'), and their sides."""
    height, width = grid
    side = 1
    while math.ceil(height / side) * math.ceil(width / side) > MOST_SQUARES:
        side *= 2
    shape = math.ceil(height / side), math.ceil(width / side)
    rows, columns = np.arange(height) // side, np.arange(width) // side
    squares = torch.from_numpy(rows[:, None] * shape[1] + columns).to(nodes.device)  # (H, W)
    squares = squares.view(nodes.shape[1:-1])
    drops = np.empty(shape)
    for some in in_parts(np.arange(drops.size)):
        numbers = torch.from_numpy(some).to(nodes.device)
        is_out = squares == numbers.view(-1, *[1] * squares.ndim)
        x = model.run_blocks(nodes.masked_fill(is_out.unsqueeze(-1), 0), None)
        drops.flat[some] = measure.drops(model.read_out(x, None))
    return drops, side


def _edges(
    model: VisionGnn, block: int, taken: _Taken, gradient: np.ndarray, measure: Measure
) -> EdgeShares:
    """Measure what the logit owes to the edges of a block, whose gradients are (N, K)."""
    module = model.backbone[str(block)]
    assert isinstance(module, Block)

    def logits_with(conv: nn.Module, num_copies: int) -> Tensor:
        """Run the block with another graph convolution, then the rest of the model: (b, C)."""
        x = taken.x.expand(num_copies, -1, -1, -1)
        given = None if taken.given is None else taken.given.expand(num_copies, -1, -1)
        with _replaced(module, conv):
            x, _, given = model.run_module(str(block), module, x, None, given)
        for name, following in model.backbone.items():
            if int(name) > block:
                x, _, given = model.run_module(name, following, x, None, given)
        return model.read_out(x, None)

    def logits_without(some: np.ndarray) -> Tensor:
        ends = [torch.from_numpy(a).to(taken.x.device) for a in np.unravel_index(some, shape)]
        return logits_with(_WithoutEdge(conv, *ends), len(some))

    shape, conv = gradient.shape, _conv_of(module)
    drops = measure.drops_of_strongest(gradient, logits_without)
    return EdgeShares(
        block,
        taken.graph.neighbours[0].flatten().cpu().numpy(),
        np.repeat(np.arange(shape[0]), shape[1]),
        gradient.ravel(),
        drops.ravel(),
        float(measure.drops(logits_with(_WithoutEdges(conv), 1))[0]),
    )


class _Recorded(nn.Module):
    """A graph convolution that keeps its result, and can tell what this owes to each edge."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv
        self.result = torch.empty(0)  # (1, N, 2C)

    def forward(self, x: Tensor, graph: Tensor, y: Tensor | None) -> Tensor:
        self.taken, self.result = (x, graph, y), self.conv(x, graph, y)
        return self.result

    def shares(self, gradient: Tensor) -> Tensor:
        """Multiply the gradient of the result by what the result owes to each edge: (N, K)."""
        x, graph, y = self.taken
        shares: list[Tensor] = []
        for place in range(graph.shape[2]):
            rest = torch.cat((graph[..., :place], graph[..., place + 1 :]), dim=2)
            owed = self.result - _convolved(self.conv, x, rest, y)
            shares.append((gradient * owed).sum(2)[0])
        return torch.stack(shares, dim=1)


class _WithoutEdge(nn.Module):
    """A graph convolution in copies of one image, in each of which one edge is left out.

    In copy b it is the edge in place `places[b]` of node `nodes[b]`, which keeps its others.
    """

    def __init__(self, conv: nn.Module, nodes: Tensor, places: Tensor) -> None:
        super().__init__()
        self.conv, self.nodes, self.places = conv, nodes, places

    def forward(self, x: Tensor, graph: Tensor, y: Tensor | None) -> Tensor:
        copies, degree = torch.arange(len(self.nodes), device=x.device), graph.shape[2]
        stays = torch.arange(degree, device=x.device) != self.places.unsqueeze(1)
        rest = graph[copies, self.nodes][stays].view(len(copies), 1, degree - 1)
        own = x[copies, self.nodes].unsqueeze(1)  # (b, 1, C)
        result = self.conv(x, graph, y).clone()
        changed = _convolved(self.conv, own, rest, x if y is None else y)
        result[copies, self.nodes] = changed[:, 0]
        return result


class _WithoutEdges(nn.Module):
    """A graph convolution without its edges."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, graph: Tensor, y: Tensor | None) -> Tensor:
        return _convolved(self.conv, x, graph[..., :0], y)


def _convolved(conv: nn.Module, x: Tensor, graph: Tensor, y: Tensor | None) -> Tensor:
    """Convolve over a graph, (B, N, K); without edges each node is its own only neighbour."""
    if graph.shape[2]:
        return conv(x, graph, y)
    itself = torch.arange(x.shape[1], device=x.device).view(1, -1, 1)
    return conv(x, itself.expand(len(x), -1, -1), None)


def _conv_of(block: Block) -> nn.Module:
    return block.get_submodule("0.graph_conv.gconv")


@contextmanager
def _replaced(block: Block, conv: nn.Module) -> Iterator[None]:
    """Use another graph convolution in a block while this context lasts."""
    own, graph_conv = _conv_of(block), block.get_submodule("0.graph_conv")
    graph_conv.gconv = conv
    try:
        yield
    finally:
        graph_conv.gconv = own
