"""The command `vigpipe graph`: draw which patches of an image a node is connected to."""

from dataclasses import replace

import torch

from vigpipe.commands.blocks import parse_blocks
from vigpipe.config.verbs import GraphConfig
from vigpipe.errors import InputError
from vigpipe.inference.description import read_description
from vigpipe.inference.drawing import Panel, draw
from vigpipe.model.blocks import BlockSpec
from vigpipe.model.fit import load_weights
from vigpipe.model.graph import reduce_k
from vigpipe.model.grapher import BlockGraph
from vigpipe.model.shapes import VIG_SHAPES
from vigpipe.model.vig import VisionGnn


def draw_graph(config: GraphConfig) -> None:
    """Draw one node's neighbours in some blocks of a model, and print what was drawn."""
    description = read_description(config.weights, config.model, config.image_size)
    if config.graph is not None:
        description = replace(description, options={**description.options, "graph": config.graph})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = description.build()
    if not isinstance(model, VisionGnn):
        raise InputError(
            f"--model {description.model}: its nodes do not choose their neighbours, so there is "
            f"no graph to draw; choose one of {', '.join(VIG_SHAPES)}"
        )
    if config.weights is not None:
        load_weights(model, config.weights)
    pixel = parse_node(config.node, description.image_size)
    blocks = parse_blocks(config.block, [spec.rule is not None for spec in model.specs])
    images = description.read_file(config.image)
    with torch.no_grad():
        _, graphs = model.eval()(images, return_graph=True)
    panels = [panel(i, graphs[i], model.specs[i], pixel, description.image_size) for i in blocks]
    where = f"node at pixel {pixel[0]},{pixel[1]}"
    heading = (
        f"{config.image.name}, {where}",
        f"{description.model}, {config.weights.name if config.weights else 'random weights'}",
    )
    draw(description.pixels(images)[0], panels, heading, config.out)
    blocks_drawn = f"block{'s' * (len(blocks) > 1)} {', '.join(map(str, blocks))}"
    print(f"{config.out}: {blocks_drawn} of {description.model}, {where}")
    if config.weights is None:
        print(
            "The weights are random: so is what the graph means. Give --weights for a trained one."
        )


def parse_node(text: str | None, size: tuple[int, int]) -> tuple[int, int]:
    """Read a pixel's column and row, `X,Y`; by default the centre of an image of this (H, W)."""
    height, width = size
    if text is None:
        return width // 2, height // 2
    try:
        x, y = (int(word) for word in text.split(","))
    except ValueError as error:
        raise InputError(
            f"--node {text}: must be a pixel's column and row, two whole numbers such as "
            f"--node {width // 2},{height // 2}"
        ) from error
    if not (0 <= x < width and 0 <= y < height):
        raise InputError(
            f"--node {text}: lies outside the image, which the model sees at {width}×{height} "
            f"pixels; choose 0,0 to {width - 1},{height - 1}"
        )
    return x, y


def panel(
    block: int, graph: BlockGraph, spec: BlockSpec, pixel: tuple[int, int], size: tuple[int, int]
) -> Panel:
    """Show the neighbours of the patch at a pixel, (column, row), of a first image of (H, W)."""
    assert spec.rule is not None
    row, column = (
        position * nodes // pixels
        for position, nodes, pixels in zip(pixel[::-1], graph.grid, size, strict=True)
    )
    indices = graph.neighbours[0, row * graph.grid[1] + column].tolist()
    return Panel(
        block,
        (row, column),
        graph.grid,
        tuple(divmod(i, graph.candidates[1]) for i in indices),
        graph.candidates,
        spec.rule.reduction,
        _note(spec, len(indices)),
    )


def _note(spec: BlockSpec, num_neighbours: int) -> str:
    rule = spec.rule
    assert rule is not None
    name = {
        "knn": "kNN",
        "grid": "grid",
        "window": "kNN in windows",
        "pattern": "fixed pattern",
        "reuse": "graph of an earlier block",
        "lookahead": "graph of the block before",
    }[rule.policy]
    dilation = 1
    if rule.policy == "knn":
        _, dilation = reduce_k(rule.k, rule.dilation, spec.num_candidates)
    return f"{name}, k = {num_neighbours}" + (f", dilation {dilation}" if dilation > 1 else "")
