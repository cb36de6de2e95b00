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
    gradients_of,
    in_parts,
    likeliest,
    measure_drops,
)
from vigpipe.model.aggregate import Candidates, neighbours
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


class _Factors(nn.Module):
    """A graph convolution, with a factor of 1 on what each edge brings more than the node has.

    A neighbour's features y_j become y_j + (w_ij - 1) (y_j - x_i), which with w_ij = 1 are the
    same numbers.
    """

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv
        self.of_edges = torch.empty(0)  # (B, N, K)

    def forward(self, x: Tensor, graph: Tensor, y: Candidates) -> Tensor:
        others = neighbours(x, graph, y)  # (B, N, K, C)
        self.of_edges = torch.ones(graph.shape, dtype=x.dtype, device=x.device).requires_grad_()
        others = others + (self.of_edges - 1).unsqueeze(3) * (others - x.unsqueeze(2))
        own_copies = torch.arange(graph[0].numel(), device=x.device).view(graph.shape[1:])
        return self.conv(x, own_copies.expand_as(graph), others.flatten(1, 2))


class _WithoutEdges(nn.Module):
    """A graph convolution in copies of one image, each of which lacks an edge; or all edges.

    Edge `columns[b]` of node `rows[b]` is left out in copy b, and the others of that node stay. A
    node without edges has itself as its only neighbour.
    """

    def __init__(self, conv: nn.Module, edges: tuple[Tensor, Tensor] | None) -> None:
        super().__init__()
        self.conv, self.edges = conv, edges

    def forward(self, x: Tensor, graph: Tensor, y: Candidates) -> Tensor:
        num_nodes, degree = graph.shape[1:]
        if self.edges is None:
            itself = torch.arange(num_nodes, device=x.device).view(1, -1, 1)
            return self.conv(x, itself.expand(len(x), -1, -1), None)
        rows, columns = self.edges
        copies = torch.arange(len(rows), device=x.device)
        own = x[copies, rows].unsqueeze(1)  # (b, 1, C)
        if degree == 1:
            rest, y_of_rows = graph.new_zeros(len(rows), 1, 1), own
        else:
            stays = torch.arange(degree, device=x.device) != columns.unsqueeze(1)
            rest = graph[copies, rows][stays].view(len(rows), 1, degree - 1)
            y_of_rows = x if y is None else y
        result = self.conv(x, graph, y).clone()
        result[copies, rows] = self.conv(own, rest, y_of_rows)[:, 0]
        return result


def explain_image(model: StagedModel, image: Tensor, target: int | None, most: int) -> Explanation:
    """Explain the logit of a class of an image, by default the likeliest, (1, C, H, W).

    Of each block, so many edges are left out alone, those with the largest gradient.
    """
    with torch.no_grad():
        logits = model(image)[0]
        nodes = model.embed(image)
    likely = likeliest(logits)
    target = likely if target is None else target
    logit = float(logits[target])
    gradient, of_edges, taken = _gradients(model, nodes, target)
    edges: list[EdgeShares] = []
    with torch.no_grad():
        drops, side = _occluded(model, nodes, gradient.shape, target, logit)
        for block, of_block in of_edges.items():
            assert isinstance(model, VisionGnn)
            edges.append(_edges(model, block, taken[block], of_block, target, logit, most))
    return Explanation(target, logits, gradient, drops, tuple(edges), side)


def _gradients(
    model: StagedModel, nodes: Tensor, target: int
) -> tuple[np.ndarray, dict[int, np.ndarray], dict[int, _Taken]]:
    """Return gradient × input of nodes, (H, W), and edges, (N, K), and what each block takes."""
    nodes = nodes.detach().requires_grad_()
    taken: dict[int, _Taken] = {}
    factors: dict[int, _Factors] = {}
    if isinstance(model, VisionGnn):
        x, given = nodes, None
        for name, block in model.backbone.items():
            before = x.detach(), given
            if not isinstance(block, Block):
                x, _, given = model.run_module(name, block, x, None, given)
                continue
            conv = _Factors(_conv_of(block))
            with _replaced(block, conv):
                x, graph, given = model.run_module(name, block, x, None, given)
            assert graph is not None
            factors[int(name)], taken[int(name)] = conv, _Taken(*before, graph)
        height, width = nodes.shape[1:3]
    else:
        x = model.run_blocks(nodes, None)
        assert isinstance(model, VigStudy)
        height, width = model.img_size
    logit = model.read_out(x, None)[0, target]
    inputs = {block: conv.of_edges for block, conv in factors.items()}
    of_nodes, *of_edges = gradients_of(logit, [nodes, *inputs.values()])
    products = (of_nodes * nodes.detach()).sum(-1).double().view(height, width).cpu().numpy()
    rows = [gradient[0].double().cpu().numpy() for gradient in of_edges]
    return products, dict(zip(inputs, rows, strict=True)), taken


def _occluded(
    model: StagedModel, nodes: Tensor, grid: tuple[int, ...], target: int, logit: float
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
        drops.flat[some] = logit - model.read_out(x, None)[:, target].double().cpu().numpy()
    return drops, side


def _edges(
    model: VisionGnn,
    block: int,
    taken: _Taken,
    gradient: np.ndarray,
    target: int,
    logit: float,
    most: int,
) -> EdgeShares:
    """Measure what the logit owes to the edges of a block; their gradients are (N, K)."""

    def logits(edges: tuple[Tensor, Tensor] | None, num: int) -> Tensor:
        module = model.backbone[str(block)]
        assert isinstance(module, Block)
        x = taken.x.expand(num, -1, -1, -1)
        given = None if taken.given is None else taken.given.expand(num, -1, -1)
        with _replaced(module, _WithoutEdges(_conv_of(module), edges)):
            x, _, given = model.run_module(str(block), module, x, None, given)
        for name, following in model.backbone.items():
            if int(name) > block:
                x, _, given = model.run_module(name, following, x, None, given)
        return model.read_out(x, None)[:, target]

    def logits_without(some: np.ndarray) -> Tensor:
        ends = [torch.from_numpy(a).to(taken.x.device) for a in np.unravel_index(some, shape)]
        return logits((ends[0], ends[1]), len(some))

    shape = gradient.shape
    drops = measure_drops(logit, gradient, most, logits_without)
    return EdgeShares(
        block,
        taken.graph.neighbours[0].flatten().cpu().numpy(),
        np.repeat(np.arange(shape[0]), shape[1]),
        gradient.ravel(),
        drops.ravel(),
        logit - float(logits(None, 1)),
    )


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
