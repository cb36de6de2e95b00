"""The command `vigpipe explain`: tell which nodes and edges a prediction rests on."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tabulate import tabulate

from vigpipe.commands.graph import parse_blocks
from vigpipe.config.verbs import ExplainConfig
from vigpipe.errors import InputError
from vigpipe.graphs.graph import Graph
from vigpipe.inference.arrays import write_arrays
from vigpipe.inference.explain.explanation import strongest
from vigpipe.inference.explain.image import explain_image
from vigpipe.inference.explain.node import Surroundings, explain_node
from vigpipe.inference.explain.views import ImageView, NodeView, View, name_of
from vigpipe.inference.load import load
from vigpipe.inference.load_graph_model import load_graph_model
from vigpipe.messages import one_line
from vigpipe.model.gnn.model import GraphModel
from vigpipe.model.position import pooled_grid
from vigpipe.model.vig import VisionGnn

_SHOWN = 5  # nodes in the table


class _Explained(NamedTuple):
    what: str
    model: str  # its name
    class_names: Sequence[str]
    several: bool  # whether it may have several classes
    view: View
    blocks: Sequence[int]  # to be drawn


def explain(config: ExplainConfig) -> None:
    """Print what a prediction rests on, draw it, and write the numbers."""
    try:
        explained = _explain_node(config) if config.image is None else _explain_image(config)
    except FloatingPointError as error:
        raise InputError(f"{config.image or config.data}: {error}") from error
    what, model, class_names, several, view, blocks = explained
    found = view.explanation
    logits = found.logits.double()
    probability = (logits.sigmoid() if several else logits.softmax(0))[found.target]
    name = class_names[found.target]
    print(one_line(f"{what}: {name} {float(probability):.2%}, logit {found.logit:.4g}"))
    print(f"\n{_table_of_nodes(view)}\n\n{_table_of_blocks(view)}\n")
    heading = (f"{what}: {name}", f"{model}, {config.weights.name}")
    view.draw(blocks, heading, config.out)
    drawn = f", and edges of {view.kind}s {', '.join(map(str, blocks))}" if blocks else ""
    print(one_line(f"{config.out}: nodes{drawn}"))
    if config.arrays is not None:
        arrays = {
            "logits": found.logits.numpy(),
            "target": found.target,
            "nodes_gradient": found.gradient,
            "nodes_drops": found.drops,
            **{f"{view.kind}{edges.block}_all_out": edges.all_out for edges in found.edges},
            **view.arrays(),
        }
        write_arrays(config.arrays, "--arrays ", arrays, class_names)


def _explain_image(config: ExplainConfig) -> _Explained:
    assert config.image is not None
    model, transform, class_names = load(
        config.weights, model=config.model, image_size=config.image_size
    )
    description, grids = transform.description, {}
    target, blocks = _parse_target(config.target, class_names), []
    if isinstance(model, VisionGnn):
        blocks = parse_blocks(config.block, [spec.rule is not None for spec in model.specs])
        grids = {
            block: (spec.grid, pooled_grid(spec.grid, spec.rule.reduction))
            for block, spec in enumerate(model.specs)
            if spec.rule is not None
        }
    elif config.block is not None:
        raise InputError(
            f"--block {config.block}: the edges of a {description.model} are the same in every "
            "block, and are not explained; leave it out"
        )
    image = description.read_file(config.image)
    found = explain_image(model, image, target, config.most)
    view = ImageView(found, description.pixels(image)[0], grids)
    return _Explained(config.image.name, description.model, class_names, False, view, blocks)


def _explain_node(config: ExplainConfig) -> _Explained:
    assert config.data is not None
    model, transform, class_names = load_graph_model(config.weights)
    assert isinstance(model, GraphModel)
    description, target = transform.description, _parse_target(config.target, class_names)
    blocks = parse_blocks(config.block, [True] * model.num_layers)
    graph = transform.open(config.data, config.data_dir, config.seed)
    node = _parse_node(config.node or "", graph, config.data)
    around = Surroundings.of(graph, node, model.num_layers, torch.float32)
    view = NodeView(explain_node(model, around, target, config.most), graph, around)
    what, several = f"{name_of(graph, node)} of {config.data}", graph.is_multi_label
    return _Explained(what, description.model, class_names, several, view, blocks)


def _parse_target(text: str | None, class_names: Sequence[str]) -> int | None:
    """Read the name of a class, or its label; names come first."""
    if text is None:
        return None
    if text in class_names:
        return class_names.index(text)
    if text.isdecimal() and int(text) < len(class_names):
        return int(text)
    raise InputError(
        f"--target {text}: no such class; give one of the {len(class_names)} of the model, such as "
        f"{class_names[0]} or {class_names[-1]}, or a label from 0 to {len(class_names) - 1}"
    )


def _parse_node(text: str, graph: Graph, data: str) -> int:
    """Read the name of a node, or its number; names come first."""
    if graph.node_names is not None and text in graph.node_names:
        return graph.node_names.index(text)
    if text.isdecimal() and int(text) < graph.num_nodes:
        return int(text)
    names = "" if graph.node_names is None else ", or a name"
    raise InputError(
        f"--node {text}: {data} has no such node; give a number from 0 to "
        f"{graph.num_nodes - 1}{names}"
    )


def _table_of_nodes(view: View) -> str:
    """Return the nodes without which the logit changes most."""
    drops = view.explanation.drops
    rows = [
        (name, f"{drops.flat[i]:.4f}", f"{gradient:.4f}")
        for i in strongest(drops, _SHOWN)
        for name, gradient in [view.part(int(i))]
    ]
    head = (f"{view.occluded}, and the logit falls by", "", "gradient × input")
    return tabulate(rows, head, disable_numparse=True, colalign=("left", "right", "right"))


def _table_of_blocks(view: View) -> str:
    """Return what each block's edges are worth, all of them and the strongest one."""
    rows: list[tuple[str, ...]] = []
    for edges in view.explanation.edges:
        measured, one = edges.measured, ("", "")
        if len(measured):
            one = f"{edges.drops[measured[0]]:.4f}", view.edge(edges, int(measured[0]))
        rows.append((str(edges.block), f"{edges.all_out:.4f}", *one))
    if not rows:
        return "the edges are the same in every block, and are not explained"
    head = (f"{view.kind}", "all edges left out", "one edge", "which, the strongest of those tried")
    return tabulate(rows, head, disable_numparse=True, colalign=("right", "right", "right", "left"))
