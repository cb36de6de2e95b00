"""Predict the most likely classes of the nodes of a graph, as evaluation computes them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from vigpipe.config.options import TrainConfig
from vigpipe.config.verbs import PredictConfig, Split
from vigpipe.errors import InputError
from vigpipe.graphs.graph import SPLITS
from vigpipe.graphs.job import GraphJob
from vigpipe.inference.graph_description import GraphDescription, read_graph_description
from vigpipe.inference.predict import as_lines, check_finite, most_likely, options_of_ranks, top
from vigpipe.launch.device import weight_dtype
from vigpipe.run.facts import Run, prepare
from vigpipe.run.initial_weights import names_of_classes
from vigpipe.run.rank import RankState

_AT_ONCE = 1 << 16  # nodes whose probabilities are computed together


@dataclass(frozen=True)
class NodePrediction:
    """The most likely classes of one node, at most NUM_SHOWN, most likely first."""

    node: int
    name: str | None  # None if the graph has no names
    labels: tuple[int, ...]
    names: tuple[str, ...]
    probabilities: tuple[float, ...]  # they add up to 1 unless a node may have several classes

    def as_text(self) -> str:
        """Format as text: one line for the node, one for every class, and an empty one."""
        title = f"node {self.node}" if self.name is None else self.name
        return as_lines(title, self.names, self.probabilities)

    def as_json(self) -> str:
        """Format as one line of JSON."""
        named = {} if self.name is None else {"name": self.name}
        likely = top(self.names, self.labels, self.probabilities)
        return json.dumps({"node": self.node, **named, "top": likely})


def prepare_node_prediction(config: PredictConfig) -> tuple[Run, GraphDescription]:
    """Prepare a run on the graph of --data, and return it with what the weights file says."""
    assert config.data is not None
    description = read_graph_description(config.weights, config.data)
    options = TrainConfig(
        weights=config.weights,  # which say what the model is
        data=config.data,
        data_dir=config.data_dir,
        download=config.download,
        sampler="full",
        seed=config.seed,
        multi_label=description.multi_label,
        **options_of_ranks(config),
    )
    run = prepare(options, weight_dtype(config.dtype))
    graph = _job(run).graph
    if config.split != "all" and not len(graph.nodes_of(SPLITS[config.split])):
        raise InputError(
            f"--split {config.split}: {config.data} has no such nodes; choose another split, or all"
        )
    return run, description


def predict_nodes(
    rank_state: RankState, description: GraphDescription, split: Split
) -> Iterator[NodePrediction]:
    """Predict the nodes of a split, ascending in the user's order, on ranks of the last stage.

    Every rank must exhaust the iterator. Logits that are not finite are a FloatingPointError.
    """
    graph = _job(rank_state.run).graph
    scorers = rank_state.scorers
    (batch,) = rank_state.feed.test_batches(("test",), scorers.size, scorers.rank)
    logits = rank_state.pipeline.logits(batch)
    if logits is None:
        return
    class_names = names_of_classes(rank_state.run.config, graph.class_names)
    nodes = np.arange(graph.num_nodes) if split == "all" else graph.nodes_of(SPLITS[split])
    nodes = nodes[np.argsort(graph.numbers_of(nodes))]
    for some in torch.from_numpy(nodes).split(_AT_ONCE):
        of_some = logits[some.to(logits.device)]
        probabilities, labels = most_likely(of_some, several=description.multi_label)
        numbers = graph.numbers_of(some.numpy()).tolist()
        rows = zip(some.tolist(), numbers, labels.tolist(), probabilities.tolist(), strict=True)
        for node, number, i, p in rows:
            check_finite(f"node {number}", p)
            name = None if graph.node_names is None else graph.node_names[node]
            names = tuple(class_names[label] for label in i)
            yield NodePrediction(number, name, tuple(i), names, tuple(p))


def _job(run: Run) -> GraphJob:
    assert isinstance(run.job, GraphJob)
    return run.job
