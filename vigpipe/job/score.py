"""What an evaluation says of a model."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from vigpipe.job.rows import Fill
from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.parallel.layout import Layout


class Score:
    """The score of a model on one split of the data; every sample counts exactly once.

    Each kind of job has a dataclass of its own, whose numbers are its fields.
    """

    main_name: ClassVar[str]  # the number that says best how good a model is; more is better
    unit: ClassVar[str]  # images or nodes; a score has their number under this name
    loss: float  # mean of the samples
    num_samples: int
    untold: tuple[str, ...] = ()  # numbers that tell a reader nothing that the others do not

    def numbers(self) -> dict[str, float]:
        """Return all numbers by name, without how many samples there were."""
        return {n: value for n, value in vars(self).items() if n not in ("num_samples", "untold")}

    @property
    def main(self) -> float:
        return self.numbers()[self.main_name]

    def as_table(self) -> dict[str, float]:
        """Return all numbers by name, the number of samples under what they are."""
        return {**self.numbers(), self.unit: self.num_samples}

    def in_words(self, *names: str) -> str:
        """Describe the score by some of its numbers."""
        numbers = self.numbers()
        texts = ", ".join(as_text(name, numbers[name]) for name in names)
        return f"{texts} of {self.num_samples:,} {self.unit}"

    def __str__(self) -> str:
        return self.in_words(*(name for name in self.numbers() if name not in self.untold))


class Tally(Protocol):
    """Adds up what the scores of some splits are made of, batch by batch."""

    sums: Tensor  # (n,) float64 on the device; of several replicas, they are added up

    def add(self, batch: ReplicaBatch, logits: Tensor) -> None:
        """Count a batch of `Feed.test_batches`, with the logits of its rows, padding included."""
        ...

    def scores(self, sums: list[float]) -> Mapping[str, Score]:
        """Return the score of each split from the sums of all replicas."""
        ...


class JobScores(Protocol):
    """How the samples of a job are counted and scored."""

    unit: ClassVar[str]  # what the samples are: images or nodes

    @property
    def passes(self) -> tuple[tuple[str, ...], ...]:
        """The splits that can be scored; those of one inner tuple are scored together."""
        ...

    def fill_of_test(self, layout: Layout, num_pipelines: int, num_samples: int) -> Fill:
        """Return how full a batch of an evaluation is, with so many samples on all pipelines."""
        ...

    def tally(self, splits: Sequence[str], device: torch.device) -> Tally:
        """Begin to add up the scores of some splits."""
        ...

    def num_rows(self, layout: Layout, item: int, num_samples: int) -> int:
        """Return how many images or nodes a step takes, whose loss is the mean of `num_samples`.

        The item is any of those that its team takes the step with.
        """
        ...

    def rates(
        self, layout: Layout, item: int, num_samples: int, seconds: float
    ) -> dict[str, float]:
        """Return what the row of a step says of its samples, and, if partial, of its batch."""
        ...


class Scores(NamedTuple):
    """Scores of the weights and their moving average, or None; all None off the last stage."""

    test: Score | None
    average: Score | None  # on the test samples
    validation: Score | None = None
    validation_average: Score | None = None

    def as_row(self) -> dict[str, Any]:
        """Return the numbers of a row of metrics.jsonl; only on ranks of the last stage."""
        summary = self.as_summary()
        return {**summary.pop("test"), **summary}

    def as_summary(self) -> dict[str, Any]:
        """Return the numbers for summary.json; only on ranks of the last stage."""
        assert self.test is not None
        summary: dict[str, Any] = {"test": self.test.as_table(), **_ema(self.average)}
        if self.validation is not None:
            validation = self.validation.as_table()
            summary["validation"] = {**validation, **_ema(self.validation_average)}
        return summary

    def __str__(self) -> str:
        assert self.test is not None
        parts: list[str] = []
        if self.validation is not None:
            best = self.validation.in_words("loss", self.validation.main_name)
            parts.append(f"validation {best}")
        parts.append(f"test {self.test}")
        for split, score in (("validation", self.validation_average), ("test", self.average)):
            if score is not None:
                words = score.in_words("loss", score.main_name)
                parts.append(f"{split} with averaged weights: {words}")
        return "; ".join(parts)


_NAMES = {
    "top1": "top-1",
    "top5": "top-5",
    "micro_f1": "micro-F1",
    "macro_f1": "macro-F1",
    "f1": "F1",
    "roc_auc": "ROC-AUC",
}
# The shares of a score by what it counts, the main one first, as metrics.jsonl names them.
SHARES = {"images": ("top1", "top5"), "nodes": ("accuracy", "micro_f1", "macro_f1")}


def name_of(name: str) -> str:
    """Return what a reader calls a number of a score: top-1 for top1."""
    return _NAMES.get(name, name)


def as_text(name: str, value: float) -> str:
    """Describe one number of a score."""
    if name == "loss":
        return f"loss {value:.4f}"
    return f"{name_of(name)} {'–' if math.isnan(value) else f'{value:.2%}'}"


def _ema(average: Score | None) -> dict[str, Any]:
    return {} if average is None else {"ema": average.numbers()}
