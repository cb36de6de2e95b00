"""The score of a model on the nodes of a graph."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vigpipe.graphs.graph import SPLITS, UNKNOWN, Graph
from vigpipe.job.score import Score
from vigpipe.parallel.batch import ReplicaBatch


@dataclass(frozen=True)
class NodeScore(Score):
    """The score of a model on the nodes of a split; every node counts exactly once.

    The loss is the mean cross-entropy. Where nodes may have several classes, it is that of training
    (`graphs.loss`) without weights of classes, and the accuracy is the fraction of all known pairs
    of a node and a class that are right. `micro_f1` is the F1 of all these pairs taken together;
    with one class a node it is the accuracy. `macro_f1` is the mean F1 of the classes. As in
    scikit-learn, a class that no node has, and that is predicted for none, does not count.
    """

    main_name: ClassVar[str] = "accuracy"
    unit: ClassVar[str] = "nodes"

    loss: float  # pyrefly: ignore[bad-override]
    accuracy: float
    micro_f1: float
    macro_f1: float
    num_samples: int  # pyrefly: ignore[bad-override]
    untold: tuple[str, ...] = ()  # pyrefly: ignore[bad-override]


class NodeTally:
    """Counts what the scores of some splits are made of, from the logits of a graph."""

    def __init__(self, graph: Graph, splits: Sequence[str], device: torch.device) -> None:
        self._graph, self._splits = graph, splits
        # A split has its loss, what is right, what is known, and the number of nodes; then for each
        # class the true positives, the nodes that have it, and those predicted to.
        size = 4 + 3 * graph.num_classes
        self.sums = torch.zeros(len(splits) * size, dtype=torch.float64, device=device)

    def add(self, batch: ReplicaBatch, logits: Tensor) -> None:
        if batch.labels is None:  # another pipeline counts
            return
        split_of = self._graph.split if batch.samples is None else self._graph.split[batch.samples]
        for split, sums in zip(self._splits, self.sums.chunk(len(self._splits)), strict=True):
            rows = torch.from_numpy(np.flatnonzero(split_of == SPLITS[split]))
            of_split = logits[rows.to(logits.device)].double()
            labels = batch.labels[rows].to(logits.device)
            count = _multi if self._graph.is_multi_label else _single
            loss, right, known, *by_class = count(of_split, labels)
            counts = (right.double(), known.double(), loss.new_tensor(len(labels)))
            totals = torch.stack((loss, *counts))
            sums += torch.cat((totals, *(of_classes.double() for of_classes in by_class)))

    def scores(self, sums: list[float]) -> Mapping[str, NodeScore]:
        rows = torch.tensor(sums, dtype=torch.float64).chunk(len(self._splits))
        return {split: self._score(row) for split, row in zip(self._splits, rows, strict=True)}

    def _score(self, sums: Tensor) -> NodeScore:
        loss, right, known, num_nodes = sums[:4].tolist()
        both, actual, predicted = sums[4:].chunk(3)
        occurs = actual + predicted > 0
        f1 = 2 * both / (actual + predicted).clamp(min=1)
        micro = 2 * both.sum() / (actual + predicted).sum().clamp(min=1)
        macro = f1[occurs].mean() if occurs.any() else torch.zeros(())
        accuracy, micro_f1 = right / known, micro.item()
        untold = () if self._graph.is_multi_label else ("micro_f1",)  # it is the accuracy
        return NodeScore(loss / num_nodes, accuracy, micro_f1, macro.item(), int(num_nodes), untold)


def _single(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Return the sums of nodes with one class each: logits (b, C), labels (b,) int64."""
    predicted, num_classes = logits.argmax(1), logits.shape[1]
    is_right = predicted == labels
    loss = F.cross_entropy(logits, labels, reduction="sum")
    counts = labels[is_right], labels, predicted
    by_class = (torch.bincount(classes, minlength=num_classes) for classes in counts)
    return loss, is_right.sum(), loss.new_tensor(len(labels)), *by_class


def _multi(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Return the sums of nodes with any number of classes: logits and labels, (b, C)."""
    actual, is_known = labels == 1, labels != UNKNOWN
    predicted = (logits > 0) & is_known
    weights = is_known.double()
    loss = F.binary_cross_entropy_with_logits(logits, actual.double(), weights, reduction="sum")
    is_right = (predicted == actual) & is_known
    by_class = (kind.sum(0) for kind in (predicted & actual, actual, predicted))
    return loss / logits.shape[1], is_right.sum(), is_known.sum(), *by_class
