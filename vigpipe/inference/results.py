"""The result of an evaluation as text, JSON and CSV."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tabulate import tabulate

from vigpipe.data.score import tells_top5
from vigpipe.inference.judged import Judged
from vigpipe.inference.predict import as_csv
from vigpipe.job.score import as_text, name_of
from vigpipe.messages import one_line, plural

MOST_IN_TABLE = 20  # classes of a table of confusions; of more, the most frequent ones are listed
MOST_MISTAKES = 20
_WIDEST = 10  # characters of the head of a column


@dataclass(frozen=True, eq=False)
class Results:
    """What an evaluation says of a model on a split of the data."""

    data: str
    split: str
    weights: str
    model: str
    unit: str  # images or nodes
    class_names: tuple[str, ...]  # by label
    judged: Judged

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of all samples together, by the names of metrics.jsonl."""
        judged, averages = self.judged, self.judged.by_class.averages
        share = judged.accuracy
        loss = {"loss": float(judged.losses.mean())}
        if self.unit == "images":
            near = {"top5": float(judged.is_near.mean())}
            return {**loss, "top1": share, **(near if tells_top5(len(self.class_names)) else {})}
        macro = averages["macro"]
        numbers = {**loss, "accuracy": share, "macro_f1": macro["f1"]}
        if judged.has_several:
            numbers |= {"micro_f1": averages["micro"]["f1"], "roc_auc": macro["roc_auc"]}
        return numbers

    @property
    def title(self) -> str:
        """What was evaluated, in a phrase."""
        num = len(self.judged.labels)
        which = "" if self.split == "all" else f"{self.split} "
        what = plural(num, f"{which}{self.unit.removesuffix('s')}")
        return f"{self.data}: {what}, by {self.model} of {self.weights}"

    @property
    def summary(self) -> str:
        """The numbers of all samples together, in a phrase."""
        return ", ".join(as_text(name, value) for name, value in self.numbers.items())

    def names(self, labels: Sequence[int] | np.ndarray) -> list[str]:
        return [self.class_names[label] for label in labels]

    def class_table(self) -> tuple[list[str], list[list[str]]]:
        """Return the head and the rows of the table by class, averages last."""
        of = self.judged.by_class
        rows = [
            [name, *(_percent(column[i]) for column in of.numbers.values()), f"{of.support[i]:,}"]
            for i, name in enumerate(self.names(of.classes))
        ]
        for kind, means in of.averages.items():
            cells = [_percent(means.get(name, math.nan)) for name in of.numbers]
            rows.append([f"{kind} average", *cells, f"{of.support.sum():,}"])
        return ["class", *map(name_of, of.numbers), self.unit], rows

    def mistakes(self) -> list[tuple[str, str, int]]:
        """Return the class, what was predicted instead and how often; most frequent first."""
        wrong = ~self.judged.is_right
        pairs = np.stack((self.judged.labels[wrong], self.judged.predicted[wrong]), 1)
        found, counts = np.unique(pairs, axis=0, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        names = self.class_names
        return [(names[found[i, 0]], names[found[i, 1]], int(counts[i])) for i in order]

    def as_text(self) -> str:
        """Format as tables."""
        head, rows = self.class_table()
        rows = [[one_line(row[0]), *row[1:]] for row in rows]
        align = ["left", *["right"] * (len(head) - 1)]
        classes = tabulate(rows, ["", *head[1:]], disable_numparse=True, colalign=align)
        return "\n".join([one_line(self.title), self.summary, "", classes, *self._confusions()])

    def _confusions(self) -> list[str]:
        if self.judged.has_several:
            return []
        classes = self.judged.by_class.classes
        if len(classes) > MOST_IN_TABLE:
            rows = [(one_line(a), one_line(b), n) for a, b, n in self.mistakes()[:MOST_MISTAKES]]
            table = tabulate(rows, ["class", "predicted", self.unit], disable_numparse=True)
            return ["", "The most frequent mistakes:", "", table] if rows else []
        names = [one_line(name) for name in self.names(classes)]
        heads = [n if len(n) <= _WIDEST else f"{n[: _WIDEST - 1]}…" for n in names]
        cells = [
            [name, *(f"{number:,}" if number else "." for number in row)]
            for name, row in zip(names, self.judged.confusion(classes), strict=True)
        ]
        align = ["left", *["right"] * len(heads)]
        table = tabulate(cells, ["", *heads], disable_numparse=True, colalign=align)
        return ["", f"{self.unit.capitalize()} of each class, by what was predicted:", "", table]

    def as_json(self) -> str:
        """Format as one line of JSON."""
        of, judged = self.judged.by_class, self.judged
        classes = [
            {
                "class": self.class_names[label],
                "label": label,
                **{name: _plain(column[i]) for name, column in of.numbers.items()},
                self.unit: int(of.support[i]),
            }
            for i, label in enumerate(of.classes.tolist())
        ]
        table: dict[str, Any] = {
            "data": self.data,
            "split": self.split,
            "weights": self.weights,
            "model": self.model,
            self.unit: len(judged.labels),
            **{name: _plain(value) for name, value in self.numbers.items()},
            **{k: {n: _plain(x) for n, x in means.items()} for k, means in of.averages.items()},
            "classes": classes,
        }
        if not judged.has_several:
            confusion = judged.confusion(of.classes).tolist()
            table["confusion"] = {"classes": self.names(of.classes), "rows": confusion}
        return json.dumps(table)

    def as_csv(self) -> str:
        """Format as CSV: a row for each class, then the averages."""
        of = self.judged.by_class
        lines = [as_csv(["class", *of.numbers, self.unit])]
        for i, name in enumerate(self.names(of.classes)):
            numbers = (_plain(column[i]) for column in of.numbers.values())
            lines.append(as_csv([name, *numbers, of.support[i]]))
        for kind, means in of.averages.items():
            numbers = (_plain(means.get(name, math.nan)) for name in of.numbers)
            lines.append(as_csv([f"{kind} average", *numbers, of.support.sum()]))
        return "\n".join(lines)


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2%}"
