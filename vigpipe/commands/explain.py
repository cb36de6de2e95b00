"""The command `vigpipe explain`: tell which nodes and edges a prediction rests on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from rich.progress import SpinnerColumn
from tabulate import tabulate

from vigpipe.commands.bar import bar
from vigpipe.commands.blocks import parse_blocks
from vigpipe.config.verbs import ExplainConfig
from vigpipe.errors import InputError
from vigpipe.inference.arrays import write_arrays
from vigpipe.inference.explain.explanation import Question, strongest
from vigpipe.inference.explain.image import explain_image
from vigpipe.inference.explain.node import NodeInputs, explain_node
from vigpipe.inference.explain.views import ImageView, NodeView, View
from vigpipe.inference.graph_description import read_graph_description
from vigpipe.inference.load import build_from, load
from vigpipe.inference.load_graph_model import GraphTransform
from vigpipe.inference.nodes import find_nodes
from vigpipe.messages import one_line
from vigpipe.model.gnn.model import GraphModel
from vigpipe.model.position import pooled_grid
from vigpipe.model.vig import VisionGnn

_SHOWN = 5  # nodes in the table


class _Explained(NamedTuple):
    what: str  # whose prediction it is
    model: str  # its name
    class_names: Sequence[str]
    several: bool  # whether it may have several classes
    view: View
    blocks: Sequence[int]  # to be drawn


def explain(config: ExplainConfig) -> None:
    """Print what a prediction rests on, draw it, and write the numbers."""
    with _shown() as advance:
        try:
            explained = _explain(config, advance)
        except FloatingPointError as error:
            raise InputError(
                f"--weights {config.weights}: for {config.image or config.data}, {error}; check "
                "the weights"
            ) from error
    view, found = explained.view, explained.view.explanation
    name = explained.class_names[found.target]
    if config.arrays is not None:
        arrays = {
            "logits": found.logits.numpy(),
            "target": found.target,
            "nodes_gradient": found.gradient,
            "nodes_drops": found.drops,
            **{f"{view.kind}{edges.block}_all_out": edges.all_out for edges in found.edges},
            **view.arrays(),
        }
        write_arrays(config.arrays, "--arrays ", arrays, explained.class_names)
    heading = (f"{explained.what}: {name}", f"{explained.model}, {config.weights.name}")
    view.draw(explained.blocks, heading, config.out)

    logits = found.logits.double()
    probability = (logits.sigmoid() if explained.several else logits.softmax(0))[found.target]
    print(one_line(f"{explained.what}: {name} {float(probability):.2%}, logit {found.logit:.4g}"))
    print(f"\n{_table_of_nodes(view)}\n\n{_table_of_blocks(view)}\n")
    numbers = ", ".join(map(str, explained.blocks))
    drawn = f", and edges of {view.kind}{'s' * (len(explained.blocks) > 1)} {numbers}"
    print(one_line(f"{config.out}: nodes{drawn if numbers else ''}"))


@contextmanager
def _shown() -> Iterator[Callable[[int], object]]:
    """Show on a terminal how many nodes and edges have been left out."""
    with bar(SpinnerColumn(), "leaving out nodes and edges:", "{task.completed}") as progress:
        task = progress.add_task("", total=None)
        yield lambda number: progress.advance(task, number)


def _explain(config: ExplainConfig, advance: Callable[[int], object]) -> _Explained:
    if config.image is None:
        return _explain_node(config, advance)
    model, transform, class_names = load(
        config.weights, model=config.model, image_size=config.image_size
    )
    description, grids, blocks = transform.description, {}, []
    question = Question(_parse_target(config.target, class_names), config.most, advance)
    if isinstance(model, VisionGnn):
        blocks = parse_blocks(config.block, [spec.rule is not None for spec in model.specs])
        grids = {
            block: (spec.grid, pooled_grid(spec.grid, spec.rule.reduction))
            for block, spec in enumerate(model.specs)
            if spec.rule is not None
        }
    elif config.block is not None:
        raise InputError(
            f"--block {config.block}: only the edges of a ViG are explained, and this is a "
            f"{description.model}; leave it out"
        )
    image = description.read_file(config.image)
    found = explain_image(model, image, question)
    view = ImageView(found, description.pixels(image)[0], grids)
    return _Explained(config.image.name, description.model, class_names, False, view, blocks)


def _explain_node(config: ExplainConfig, advance: Callable[[int], object]) -> _Explained:
    assert config.data is not None
    description = read_graph_description(config.weights, config.data)
    class_names, transform = description.names(), GraphTransform(description, torch.device("cpu"))
    question = Question(_parse_target(config.target, class_names), config.most, advance)
    num_layers = description.options["layers"]
    blocks = parse_blocks(config.block, [True] * num_layers, "layer")
    graph = transform.open(config.data, config.data_dir, config.seed, download=config.download)
    node = int(find_nodes([config.node or ""], graph, "--node", config.data)[0])
    around = NodeInputs.of(graph, node, num_layers, torch.float32)
    model = build_from(config.weights, description.build).eval()
    assert isinstance(model, GraphModel)
    view = NodeView(explain_node(model, around, question), graph, around)
    of = f" of {config.data}" if graph.node_names is None else f" (node {node})"
    what = view.name(0) + of
    return _Explained(what, description.model, class_names, graph.is_multi_label, view, blocks)


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


def _table_of_nodes(view: View) -> str:
    """Return the nodes without which the logit changes most."""
    drops = view.explanation.drops
    rows = [
        (name, f"{drops.flat[i]:.4g}", f"{gradient:.4g}")
        for i in strongest(drops, _SHOWN)
        for name, gradient in [view.part(int(i))]
    ]
    head = (f"{view.occluded}, and the logit falls by", "", "gradient × input")
    return tabulate(rows, head, disable_numparse=True, colalign=("left", "right", "right"))


def _table_of_blocks(view: View) -> str:
    """Return what each block's edges are worth, all of them and the strongest one."""
    rows: list[tuple[str, ...]] = []
    for edges in view.explanation.edges:
        measured, one = edges.measured, ("", "no edges")
        if len(measured):
            one = f"{edges.drops[measured[0]]:.4g}", view.edge(edges, int(measured[0]))
        rows.append((str(edges.block), f"{edges.all_out:.4g}", *one))
    if not rows:
        return "only the edges of a ViG are explained"
    head = (f"{view.kind}", "all edges left out", "one edge", "which, the strongest of those tried")
    return tabulate(rows, head, disable_numparse=True, colalign=("right", "right", "right", "left"))
