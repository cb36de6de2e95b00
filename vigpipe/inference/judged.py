"""What a model makes of samples whose classes are known, one by one and class by class.

The numbers by class are scikit-learn's (`precision_recall_fscore_support` and `roc_auc_score`), of
the classes that some sample has, or is predicted to have.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from vigpipe.data.score import NUM_TOP
from vigpipe.graphs.graph import UNKNOWN
from vigpipe.inference.outputs import Output
from vigpipe.inference.predict import check_finite

NAMES = ("precision", "recall", "f1")


@dataclass(frozen=True, eq=False)
class Judged:
    """Samples whose classes are known, in order, and what a model makes of them."""

    labels: np.ndarray  # (n,) int64; (n, C) bool where a sample may have several classes
    predicted: np.ndarray  # of the same shape and type
    losses: np.ndarray  # (n,) float64, as in training without weights of classes
    is_near: np.ndarray  # (n,) bool: the class is among the NUM_TOP likeliest; empty for several
    # (n,) float64, of the class that is predicted, and of that which is right; (n, C) for several.
    probabilities: np.ndarray
    of_right: np.ndarray  # empty for several
    # (n, C) bool, for several: whether it is known that the sample has the class, or has not. What
    # is not known counts as neither in labels nor predicted. Empty otherwise.
    is_known: np.ndarray

    @property
    def has_several(self) -> bool:
        return self.labels.ndim == 2

    @property
    def is_right(self) -> np.ndarray:
        """Whether a sample has all of the classes that it is predicted to have, and no other."""
        same = self.predicted == self.labels
        return same.all(1) if self.has_several else same

    @property
    def accuracy(self) -> float:
        """The share of samples that are right; of several classes, of all known pairs with one."""
        same = self.predicted == self.labels
        return float(same[self.is_known].mean() if self.has_several else same.mean())

    @cached_property
    def by_class(self) -> "ByClass":
        return _by_class(self)

    def confusion(self, classes: np.ndarray) -> np.ndarray:
        """Count samples by the class that they have, in rows, and that they are predicted to."""
        counts = np.zeros((len(classes), len(classes)), dtype=np.int64)
        places = (np.searchsorted(classes, labels) for labels in (self.labels, self.predicted))
        np.add.at(counts, tuple(places), 1)
        return counts


class ByClass(NamedTuple):
    """Numbers by class, of the c classes that occur."""

    classes: np.ndarray  # (c,) int64, their labels, ascending
    # precision, recall, f1 and, where there are several classes, roc_auc: the area under the ROC
    # curve, NaN where all samples have the class, or none; (c,) each.
    numbers: dict[str, np.ndarray]
    support: np.ndarray  # (c,) samples that have the class
    averages: dict[str, dict[str, float]]  # of these numbers, by the kind of average


class Judge:
    """Compares outputs with the labels of their samples, in the same order.

    Only those samples are judged that `is_known`, (n,) bool, says.
    """

    def __init__(
        self, labels: np.ndarray, is_known: np.ndarray, name_of: Callable[[int], str]
    ) -> None:
        self._labels, self._is_known, self._name_of = labels, is_known, name_of
        self._parts: list[tuple[np.ndarray, ...]] = []
        self._done = 0

    def add(self, output: Output) -> None:
        """Compare the next output; FloatingPointError if logits are NaN or infinite."""
        logits, done = output.logits.double(), self._done
        for row in (~logits.isfinite().all(1)).nonzero().flatten().tolist():
            check_finite(self._name_of(done + row), logits[row].tolist())
        some = slice(done, done + len(logits))
        is_known = torch.from_numpy(self._is_known[some])
        right = torch.from_numpy(self._labels[some])[is_known]
        compare = _judge_several if right.dim() == 2 else _judge_single
        self._parts.append(tuple(part.numpy() for part in compare(logits[is_known], right)))
        self._done += len(logits)

    def judged(self) -> Judged:
        """Return all that was compared, once every sample was."""
        parts = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        labels = self._labels[self._is_known]
        return Judged(labels if labels.ndim == 1 else labels == 1, *parts)


def _judge_single(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    log = F.log_softmax(logits, 1)
    # A stable sort, as in `most_likely`: equal logits are in the order of their labels.
    likely = logits.sort(dim=1, descending=True, stable=True).indices[:, :NUM_TOP]
    losses = -log.gather(1, labels[:, None])[:, 0]
    predicted = likely[:, 0]
    is_near = (likely == labels[:, None]).any(1)
    probability = log.gather(1, predicted[:, None])[:, 0].exp()
    return predicted, losses, is_near, probability, (-losses).exp(), is_near[:0]


def _judge_several(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    is_known, has = labels != UNKNOWN, (labels == 1).double()
    losses = F.binary_cross_entropy_with_logits(logits, has, is_known.double(), reduction="none")
    losses, predicted = losses.mean(1), (logits > 0) & is_known
    nothing = losses[:0]
    return predicted, losses, nothing.bool(), logits.sigmoid(), nothing, is_known


def _by_class(judged: Judged) -> ByClass:
    from sklearn.metrics import precision_recall_fscore_support  # takes a second to import

    labels, predicted = judged.labels, judged.predicted
    if judged.has_several:
        classes = np.flatnonzero(labels.any(0) | predicted.any(0))
        # With one column alone, scikit-learn would score those who lack the class as well.
        labels, predicted = (np.pad(array, ((0, 0), (0, 1))) for array in (labels, predicted))
    else:
        classes = np.union1d(labels, predicted)

    def numbers(average: Any) -> dict[str, Any]:
        if not len(classes):
            return dict.fromkeys((*NAMES, "support"), np.zeros(0) if average is None else 0.0)
        *found, support = precision_recall_fscore_support(
            labels, predicted, labels=classes, average=average, zero_division=0
        )
        return dict(zip((*NAMES, "support"), (*found, support), strict=True))

    of_classes = numbers(None)
    support = of_classes.pop("support").astype(np.int64)
    kinds = ("micro", "macro", "weighted") if judged.has_several else ("macro", "weighted")
    averages = {kind: {n: float(numbers(kind)[n]) for n in NAMES} for kind in kinds}
    if judged.has_several:
        areas = of_classes["roc_auc"] = _roc_auc(judged, classes)
        known = areas[~np.isnan(areas)]
        averages["macro"]["roc_auc"] = float(known.mean()) if len(known) else math.nan
    return ByClass(classes, of_classes, support, averages)


def _roc_auc(judged: Judged, classes: np.ndarray) -> np.ndarray:
    from sklearn.metrics import roc_auc_score

    def of_class(label: int) -> float:
        is_known = judged.is_known[:, label]
        has = judged.labels[is_known, label]
        if has.all() or not has.any():
            return math.nan
        return float(roc_auc_score(has, judged.probabilities[is_known, label]))

    return np.array([of_class(label) for label in classes])
