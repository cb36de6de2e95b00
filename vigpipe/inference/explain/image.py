"""Which nodes and edges the logit of an image rests on.

A node's features are what the first block takes. Everything is measured on the model as it is:
without a node or an edge, the graphs of the blocks that follow are built anew.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

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
from vigpipe.model.staged import StagedModel
from vigpipe.model.study import VigStudy
from vigpipe.model.vig import Block, VisionGnn

MOST_SQUARES = 256  # of nodes that are occluded together


_Inputs = tuple[Tensor, Tensor, Tensor | None]  # nodes, graph and candidates of a convolution
_Change = Callable[[nn.Module, _Inputs, Tensor], Tensor]  # what a convolution is to give instead
_Calls = dict[nn.Module, tuple[Any, Any]]  # inputs and result of blocks, and of their convolutions


def explain_image(model: StagedModel, image: Tensor, question: Question) -> Explanation:
    """Explain a logit of an image, (1, C, H, W); the model is in evaluation mode."""
    with torch.no_grad():
        embedded = model.embed(image)
    nodes = embedded[0] if isinstance(embedded, tuple) else embedded
    nodes.requires_grad_()
    named = model.numbered_blocks.items()
    blocks = {int(name): block for name, block in named if isinstance(block, Block)}
    logits, calls = _run(model, nodes, blocks.values())
    measure = question.begun(logits.detach())
    results = [calls[_conv_of(block)][1] for block in blocks.values()]
    of_nodes, *of_results = measure.gradients(logits, [nodes, *results])
    height, width = model.img_size if isinstance(model, VigStudy) else nodes.shape[1:3]
    with torch.no_grad():
        gradient = (of_nodes * nodes).sum(-1).double().view(height, width).cpu().numpy()
        drops, side = _occluded(model, nodes, gradient.shape, measure)
        edges: list[EdgeShares] = []
        for number, of_result in zip(blocks, of_results, strict=True):
            assert isinstance(model, VisionGnn)
            edges.append(_edges(model, number, calls, of_result, measure))
    return Explanation(measure.target, logits.detach(), gradient, drops, tuple(edges), side)


def _run(model: StagedModel, nodes: Tensor, blocks: Iterable[Block]) -> tuple[Tensor, _Calls]:
    """Return the logits, (C,), and what happened in some blocks."""
    calls: _Calls = {}

    def keep(module: nn.Module, inputs: Any, result: Any) -> None:
        calls[module] = inputs, result

    with ExitStack() as hooks:
        for block in blocks:
            for module in (block, _conv_of(block)):
                hooks.enter_context(module.register_forward_hook(keep))
        return model.read_out(model.run_blocks(model.branched(nodes), None), None)[0], calls


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
        left = model.branched(nodes.masked_fill(is_out.unsqueeze(-1), 0))
        x = model.run_blocks(left, None)
        drops.flat[some] = measure.drops(model.read_out(x, None))
    return drops, side


def _edges(
    model: VisionGnn, block: int, calls: _Calls, gradient: Tensor, measure: Measure
) -> EdgeShares:
    """Measure what the logit owes to the edges of a block, whose convolution has this gradient."""
    module = model.backbone[str(block)]
    conv = _conv_of(module)
    (first, _, first_given), (_, graph, _) = calls[module]
    products = _products(conv, *calls[conv], gradient).double().cpu().numpy()  # (N, K)

    def logits_with(change: _Change, num_copies: int) -> Tensor:
        """Run the model from this block on with another result of its convolution: (b, C)."""
        x = first.expand(num_copies, -1, -1, -1)
        given = None if first_given is None else first_given.expand(num_copies, -1, -1)
        with conv.register_forward_hook(change):
            for name, following in model.backbone.items():
                if int(name) >= block:
                    x, _, given = model.run_module(name, following, x, None, given)
        return model.read_out(x, None)

    def logits_without(some: np.ndarray) -> Tensor:
        nodes, places = np.unravel_index(some, products.shape)
        ends = [torch.from_numpy(numbers).to(first.device) for numbers in (nodes, places)]
        return logits_with(partial(_without_edge, (ends[0], ends[1])), len(some))

    drops = measure.drops_of_strongest(products, logits_without)
    return EdgeShares(
        block,
        graph.neighbours[0].flatten().cpu().numpy(),
        np.repeat(np.arange(len(products)), products.shape[1]),
        products.ravel(),
        drops.ravel(),
        float(measure.drops(logits_with(_without_edges, 1))[0]),
    )


def _products(conv: nn.Module, inputs: _Inputs, result: Tensor, gradient: Tensor) -> Tensor:
    """Multiply the gradient of a result by what the result owes to each edge: (N, K)."""
    x, graph, y = inputs
    products: list[Tensor] = []
    for place in range(graph.shape[2]):
        rest = torch.cat((graph[..., :place], graph[..., place + 1 :]), dim=2)
        products.append((gradient * (result - _convolved(conv, x, rest, y))).sum(2)[0])
    return torch.stack(products, dim=1)


def _without_edge(
    edges: tuple[Tensor, Tensor], conv: nn.Module, inputs: _Inputs, result: Tensor
) -> Tensor:
    """Leave one edge out in each copy of an image, given by their nodes and places, (b,) each.

    A node keeps its others.
    """
    (nodes, places), (x, graph, y) = edges, inputs
    copies, degree = torch.arange(len(nodes), device=x.device), graph.shape[2]
    stays = torch.arange(degree, device=x.device) != places.unsqueeze(1)
    rest = graph[copies, nodes][stays].view(len(copies), 1, degree - 1)
    own = x[copies, nodes].unsqueeze(1)  # (b, 1, C)
    result = result.clone()
    result[copies, nodes] = _convolved(conv, own, rest, x if y is None else y)[:, 0]
    return result


def _without_edges(conv: nn.Module, inputs: _Inputs, result: Tensor) -> Tensor:
    x, graph, y = inputs
    return _convolved(conv, x, graph[..., :0], y)


def _convolved(conv: nn.Module, x: Tensor, graph: Tensor, y: Tensor | None) -> Tensor:
    """Convolve over a graph, (B, N, K), without hooks; a node without edges has itself alone."""
    if graph.shape[2]:
        return conv.forward(x, graph, y)
    itself = torch.arange(x.shape[1], device=x.device).view(1, -1, 1)
    return conv.forward(x, itself.expand(len(x), -1, -1), None)


def _conv_of(block: nn.Module) -> nn.Module:
    return block.get_submodule("0.graph_conv.gconv")
