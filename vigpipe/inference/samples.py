"""The images, or the nodes of a graph, that a model of a weights file is used on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from vigpipe.config.verbs import EvaluateConfig, InferenceConfig, PredictConfig, Split
from vigpipe.data.left_out import unreadable
from vigpipe.data.stored import Look, StoredImages
from vigpipe.errors import InputError
from vigpipe.graphs.graph import SPLITS, TEST, Graph, are_labelled
from vigpipe.graphs.job import GraphJob
from vigpipe.graphs.samplers.surroundings import CutGraph
from vigpipe.inference.arrays import texts
from vigpipe.inference.description import ModelDescription, read_description
from vigpipe.inference.graph_description import read_graph_description
from vigpipe.inference.labelled import labelled_images
from vigpipe.inference.outputs import (
    Output,
    check_has_features,
    output_of_nodes,
    outputs_of_images,
    prepare_graph,
    prepare_images,
)
from vigpipe.inference.predict import Prediction, make_prediction, most_likely
from vigpipe.inference.predict_nodes import NodePrediction, make_node_prediction
from vigpipe.messages import plural
from vigpipe.run.facts import Run
from vigpipe.run.rank import RankState

_AT_ONCE = 1 << 16  # nodes whose probabilities are computed together


@dataclass(frozen=True, eq=False)
class ImageSamples:
    """Images, numbered from 0 in the order in which they are told."""

    unit: ClassVar[str] = "images"
    columns: ClassVar[tuple[str, ...]] = ("image",)  # of CSV, which say what a row is of

    config: InferenceConfig
    description: ModelDescription
    data: str
    images: StoredImages
    look: Look
    has_labels: bool
    candidates: StoredImages  # those that were chosen from, unreadable ones too
    class_names: tuple[str, ...]  # of the model, by label
    own_notes: tuple[str, ...] = ()

    @classmethod
    def of_files(cls, config: PredictConfig, paths: Sequence[Path]) -> Self:
        """Take image files, whose folders may be named after their classes."""
        description = read_description(config.weights, config.model, config.image_size)
        images = description.files(paths)
        label_of = {name: label for label, name in enumerate(description.class_names)}
        labels = [label_of.get(path.absolute().parent.name, -1) for path in paths]
        is_known = len(labels) > 1 and min(labels) >= 0
        if is_known:
            images = replace(images, labels=np.array(labels))
        look = Look(description.in_chans)
        names = description.names()
        return cls(config, description, "the images", images, look, is_known, images, names)

    @classmethod
    def labelled(cls, config: EvaluateConfig, bad: Sequence[int] = ()) -> Self:
        """Take the labelled images of --data and --split; candidates that are bad are left out."""
        description = read_description(config.weights, config.model, config.image_size)
        found = labelled_images(config, description, bad)
        notes = tuple(f"note: {note}" for note in found.notes)
        return cls(
            *(config, description, found.name, found.images, found.look, True),
            *(found.candidates, found.class_names, notes),
        )

    @cached_property
    def run(self) -> Run:
        """A run whose test samples are these."""
        return prepare_images(self.config, self.description, self.images, self.look)

    @property
    def labels(self) -> np.ndarray:
        """The classes of all samples, as `Judged` has them, known or not."""
        return self.images.labels

    @property
    def is_known(self) -> np.ndarray:
        """Which samples have a known class, and say how good a prediction is, (n,) bool."""
        return np.full(len(self.images), self.has_labels)

    @property
    def known(self) -> str:
        """What those samples are, in a phrase."""
        return f"{plural(len(self.images), 'image')}, whose folders name their classes"

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.own_notes, *(f"note: {note}" for note in self.run.notes))

    def without(self, bad: Sequence[int]) -> Self:
        """Leave out some of the candidates, and say so; their numbers ascend."""
        if not bad:
            return self
        left_out = unreadable([self.candidates.load.name_of(index) for index in bad])
        if isinstance(self.config, EvaluateConfig):
            others = self.labelled(self.config, bad)
        else:
            kept = np.setdiff1d(np.arange(len(self.images)), bad)
            others = replace(self, images=self.images.take(kept))
        return replace(others, own_notes=(left_out, *others.own_notes))

    def name_of(self, index: int) -> str:
        return self.images.load.name_of(index)

    def outputs(self, rank_state: RankState, *, has_features: bool) -> Iterator[Output]:
        """Yield what the model makes of them, on ranks of the last stage; nothing on others.

        Every rank must exhaust the iterator.
        """
        return outputs_of_images(rank_state, has_features=has_features)

    def predictions(self, first: int, logits: Tensor) -> Iterator[Prediction]:
        """Make the predictions of samples, the first of which has this number."""
        probabilities, labels = (rows.tolist() for rows in most_likely(logits))
        for number, (i, p) in enumerate(zip(labels, probabilities, strict=True), first):
            yield make_prediction(Path(self.name_of(number)), self.class_names, i, p)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what says what the rows of an array are of, by name."""
        return {"images": texts([self.name_of(i) for i in range(len(self.images))])}


@dataclass(frozen=True, eq=False)
class NodeSamples:
    """Nodes of a graph, as `ImageSamples`: a split's, by their numbers, or those of --nodes."""

    unit: ClassVar[str] = "nodes"
    columns: ClassVar[tuple[str, ...]] = ("node", "name")

    run: Run
    data: str
    class_names: tuple[str, ...]
    nodes: np.ndarray  # (n,) int64, as the run numbers them
    split: Split

    @classmethod
    def of(
        cls, config: InferenceConfig, data: str, split: Split, *, with_classes: bool = False
    ) -> Self:
        """Take the nodes of a split; only those that have a class, if so asked."""
        description = read_graph_description(config.weights, data)
        if isinstance(config, PredictConfig) and config.embeddings is not None:
            check_has_features(config, description)
        chosen = config.nodes if isinstance(config, PredictConfig) else None
        run = prepare_graph(config, description, data, chosen)
        assert isinstance(run.job, GraphJob)
        graph = run.job.graph
        if isinstance(graph, CutGraph):
            return cls(run, data, graph.class_names, np.arange(graph.num_chosen), split)
        nodes = np.arange(graph.num_nodes) if split == "all" else graph.nodes_of(SPLITS[split])
        if with_classes:
            nodes = nodes[are_labelled(graph.labels[nodes])]
        if not len(nodes):
            if with_classes:
                raise InputError(
                    f"--split {split}: {data} has no such nodes with a class, by which to score; "
                    "choose another split, or predict them"
                )
            raise InputError(
                f"--split {split}: {data} has no such nodes; choose another split, or all"
            )
        nodes = nodes[np.argsort(graph.numbers_of(nodes))]
        return cls(run, data, graph.class_names, nodes, split)

    @property
    def graph(self) -> Graph:
        assert isinstance(self.run.job, GraphJob)
        return self.run.job.graph

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(f"note: {note}" for note in self.graph.notes)

    @property
    def labels(self) -> np.ndarray:
        return self.graph.labels[self.nodes]

    @property
    def is_known(self) -> np.ndarray:
        """Which have a class; of all nodes, only those of the test."""
        is_known = are_labelled(self.labels)
        if self.split == "all":
            is_known &= self.graph.split[self.nodes] == TEST
        return is_known

    @property
    def known(self) -> str:
        which = "test" if self.split == "all" else self.split
        return plural(int(self.is_known.sum()), f"{which} node")

    def name_of(self, index: int) -> str:
        return self.graph.name_of(self.nodes[index])

    def outputs(self, rank_state: RankState, *, has_features: bool) -> Iterator[Output]:
        output = output_of_nodes(rank_state, has_features=has_features)
        if output is None:
            return
        for some in torch.from_numpy(self.nodes).split(_AT_ONCE):
            features = None if output.features is None else output.features[some]
            yield Output(output.logits[some], features)

    def predictions(self, first: int, logits: Tensor) -> Iterator[NodePrediction]:
        several = self.graph.is_multi_label
        likely = (rows.tolist() for rows in most_likely(logits, several=several))
        nodes = self.nodes[first : first + len(logits)]
        numbers, node_names = self.graph.numbers_of(nodes).tolist(), self.graph.node_names
        for node, number, row, p, i in zip(nodes, numbers, logits, *likely, strict=True):
            name = None if node_names is None else node_names[node]
            predicted = (row > 0).nonzero()[:, 0].tolist() if several else None
            yield make_node_prediction(number, name, self.class_names, i, p, predicted)

    def arrays(self) -> dict[str, np.ndarray]:
        named = {}
        if (names := self.graph.node_names) is not None:
            named = {"names": texts([names[node] for node in self.nodes])}
        return {"nodes": self.graph.numbers_of(self.nodes), **named}


Samples = ImageSamples | NodeSamples
