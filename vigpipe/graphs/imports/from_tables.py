"""Make the arrays of a graph file of a table of nodes and a table of edges, some rows at a time.

Memory holds the edges, and the ids of the nodes; features are made while they are written.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vigpipe.errors import InputError
from vigpipe.files.names import are_numbers, escaped, first_few
from vigpipe.graphs.choices import Category, Choices, is_missing
from vigpipe.graphs.formats.checked import LEAST_WEIGHT, MOST_WEIGHT
from vigpipe.graphs.formats.graph_file import MASKS
from vigpipe.graphs.graph import NO_CLASS, NO_SPLIT, TEST, TRAIN, UNKNOWN, VALIDATION
from vigpipe.graphs.imports.columns import ColumnFit, Kind
from vigpipe.graphs.imports.tables import Table, check_columns
from vigpipe.messages import plural

_SPLITS = {
    **dict.fromkeys(("train", "training", "0"), TRAIN),
    **dict.fromkeys(("val", "valid", "validation", "dev", "1"), VALIDATION),
    **dict.fromkeys(("test", "testing", "2"), TEST),
    **dict.fromkeys(("", "-1"), NO_SPLIT),
}
_MOST_NAMED = 30  # columns that an import tells of
_HAS = {"1": 1, "true": 1, "0": 0, "false": 0, "": UNKNOWN, "-1": UNKNOWN}


@dataclass(frozen=True)
class Names:
    """What the columns are called."""

    id: str = "id"
    label: tuple[str, ...] = ("label",)  # several, of zeros and ones, if a node may have several
    split: str = "split"
    source: str = "source"
    target: str = "target"
    weight: str = "weight"
    numbers: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()


class Nodes:
    """A table of nodes, looked at once: ids, labels and splits, and how its columns are encoded."""

    def __init__(self, table: Table, names: Names, like: Choices | None) -> None:
        self._table, self._names, self.notes = table, names, list[str]()
        self.place_of: dict[str, int] = {}  # of each id
        self._labels: list[Any] = []  # of each node, a number of `_texts`, or what of each column
        self._texts: dict[str, int] = {}  # the classes as they come, from 0
        self._split: list[int] = []
        _check_names(table, names)
        # The columns of labels that are there, and not left out.
        self._label = [n for n in names.label if n in table.columns and n not in names.drop]
        fits = self._fits() if like is None else self._left_out(like)
        self._read(fits)
        if not self.place_of:
            raise InputError(f"{table.where}: has no rows, expected one for each node")
        self.choices = like or Choices(tuple(fit.finish() for fit in fits.values()))

    @property
    def _others(self) -> list[str]:
        """The columns that may become features."""
        names = self._names
        known = {names.id, *names.label, names.split, *names.drop}
        return [name for name in self._table.columns if name not in known]

    def _fits(self) -> dict[str, ColumnFit]:
        kinds: dict[str, Kind] = {name: "number" for name in self._names.numbers}
        kinds |= {name: "category" for name in self._names.categories}
        where = self._table.where
        return {name: ColumnFit(name, where, kinds.get(name)) for name in self._others}

    def _left_out(self, like: Choices) -> dict[str, ColumnFit]:
        check_columns(self._table, like.names, "the features of --like are made of it")
        left = [name for name in self._others if name not in like.names]
        if left:
            self.notes.append(f"columns that --like does not know: {first_few(left)}")
        return {}

    def _read(self, fits: Mapping[str, ColumnFit]) -> None:
        names, columns = self._names, self._table.columns
        wanted = dict.fromkeys((names.id, *self._label, names.split))
        has = [name for name in wanted if name in columns and name not in names.drop]
        for chunk in self._table.chunks([*has, *fits]):
            texts = dict(zip((*has, *fits), chunk, strict=True))
            first = len(self.place_of)
            self._add_ids(texts[names.id])
            self._add_labels([texts[name] for name in self._label], first)
            if names.split in texts:
                words = "train, validation, test or nothing"
                self._split += self._looked_up(texts[names.split], _SPLITS, "split", words, first)
            for name, fit in fits.items():
                fit.add(texts[name])

    def _add_labels(self, columns: Sequence[Sequence[str]], first: int) -> None:
        if len(columns) > 1:
            words = "1, 0 or nothing"
            has = (self._looked_up(texts, _HAS, "label", words, first) for texts in columns)
            self._labels += zip(*has, strict=True)
        for texts in columns if len(columns) == 1 else ():
            stripped = map(str.strip, texts)
            self._labels += [self._texts.setdefault(text, len(self._texts)) for text in stripped]

    def __len__(self) -> int:
        return len(self.place_of)

    def _add_ids(self, ids: Sequence[str]) -> None:
        for id_ in map(str.strip, ids):
            place = len(self.place_of)
            if not id_:
                raise InputError(f"{self._table.where}: row {place + 1} has no id; give it one")
            if self.place_of.setdefault(id_, place) != place:
                raise InputError(
                    f"{self._table.where}: two nodes have the id '{escaped(id_)}'; give each one "
                    "of its own"
                )

    def _looked_up(
        self, texts: Sequence[str], table: Mapping[str, int], what: str, expected: str, first: int
    ) -> list[int]:
        words = (text.strip().lower().removesuffix(".0") for text in texts)
        found = [table.get("" if is_missing(word) else word) for word in words]
        if None in found:
            row = found.index(None)
            raise InputError(
                f"{self._table.where}: the {what} of row {first + row + 1} is "
                f"'{escaped(texts[row], 40)}', expected {expected}; mend it"
            )
        return found  # pyrefly: ignore[bad-return]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return names, classes and split, as far as the table has them."""
        arrays: dict[str, np.ndarray] = {}
        ids = tuple(self.place_of)
        if not are_numbers(ids):
            arrays["names"] = np.array(ids)
        if self._split:
            arrays["split"] = np.array(self._split, np.int8)
        if self._labels and len(self._label) > 1:
            classes = np.array(self._label)
            arrays |= {"y": np.array(self._labels, np.int8), "classes": classes}
        elif self._labels:
            texts = [text for text in self._texts if not is_missing(text) and text != "-1"]
            sorted_texts = sorted(texts, key=int if all(map(_is_whole, texts)) else str)
            number = {name: label for label, name in enumerate(sorted_texts)}
            of_texts = np.array([number.get(text, NO_CLASS) for text in self._texts])
            arrays["y"] = of_texts[np.array(self._labels)]
            without = int((arrays["y"] == NO_CLASS).sum())
            if without:
                words = ", ".join(f"'{escaped(t, 20)}'" for t in self._texts if t not in number)
                self.notes.append(
                    f"{plural(without, 'node')} without a class: the label is {words}"
                )
            if not are_numbers(sorted_texts):
                arrays["classes"] = np.array(sorted_texts)
        return arrays

    def rows(self) -> Iterator[np.ndarray]:
        """Yield the features, some rows at a time, and then note how they were made."""
        empty, new, first = Counter[str](), Counter[str](), 1
        for chunk in self._table.chunks(self.choices.names):
            encoded = self.choices.encode(chunk, self._table.where, first)
            empty.update(encoded.empty)
            new.update(encoded.new)
            first += len(encoded.x)
            yield encoded.x
        made = tuple(
            f"{of.name} ({f'{of.width} values' if isinstance(of, Category) else 'number'})"
            for of in self.choices.columns
        )
        self.notes.append(f"features: {first_few(made, _MOST_NAMED)}")
        for counts, what in (
            (
                empty,
                "empty cells, taken as the mean of a column of numbers, or as no category",
            ),
            (new, "texts that --like does not know, taken as no category"),
        ):
            if counts:
                told = ", ".join(f"{number:,} in {name}" for name, number in counts.items())
                self.notes.append(f"{what}: {escaped(told)}")


def _check_names(table: Table, names: Names) -> None:
    """Raise InputError if a table of nodes lacks a column that an option names."""
    usual = Names()
    for option, columns, is_needed in (
        ("--id", (names.id,), True),
        ("--label", names.label, names.label != usual.label),
        ("--split", (names.split,), names.split != usual.split),
        ("--numbers", names.numbers, True),
        ("--categories", names.categories, True),
        ("--drop", names.drop, True),
    ):
        if is_needed:
            check_columns(table, columns, f"name the columns of {option} as they are there")
    if names.id in names.drop:
        raise InputError(f"--drop {names.id}: has the ids of the nodes, which are needed; keep it")
    masks = [name for name in MASKS if name in table.columns and name not in names.drop]
    if masks:
        raise InputError(
            f"{table.where}: has {', '.join(masks)}, which would be features; make one column "
            f"'split' of them, of train, validation and test, or --drop {','.join(masks)}"
        )
    for name in names.numbers:
        if name in names.categories:
            raise InputError(f"--numbers {name}: is in --categories, too; name it in one of them")


def read_edges(
    table: Table, names: Names, place_of: Mapping[str, int], of_nodes: str
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return edge_src, edge_dst and perhaps edge_weight, and notes."""
    check_columns(table, (names.source, names.target), "name others with --source and --target")
    has_weight = names.weight in table.columns
    if names.weight != Names.weight:
        check_columns(table, [names.weight], "name another with --weight")
    wanted = [names.source, names.target, *([names.weight] if has_weight else [])]
    ends: tuple[list[np.ndarray], list[np.ndarray]] = [], []
    weights: list[np.ndarray] = []
    done, number = 0, np.min_scalar_type(-max(1, len(place_of)))
    for chunk in table.chunks(wanted):
        for of_end, texts in zip(ends, chunk, strict=False):
            places = np.array([place_of.get(text.strip(), -1) for text in texts], number)
            if (places < 0).any():
                row = int((places < 0).argmax())
                raise InputError(
                    f"{table.where}: row {done + row + 1} names the node '{escaped(texts[row])}', "
                    f"which {of_nodes} does not have; add it there, or leave the edge out"
                )
            of_end.append(places)
        if has_weight:
            weights.append(_weights(chunk[2], table.where, done))
        done += len(chunk[0])
    arrays = {
        name: np.concatenate(parts) if parts else np.zeros(0, number)
        for name, parts in zip(("edge_src", "edge_dst"), ends, strict=True)
    }
    if has_weight:
        arrays["edge_weight"] = np.concatenate(weights) if weights else np.zeros(0, np.float32)
    left = [name for name in table.columns if name not in wanted]
    return arrays, [f"columns of edges that are left out: {first_few(left)}"] * bool(left)


def _weights(texts: Sequence[str], where: str, done: int) -> np.ndarray:
    try:
        numbers = np.fromiter(map(float, texts), np.float64, len(texts))
    except ValueError:
        numbers = np.full(1, np.nan)
    is_wrong = ~((numbers >= LEAST_WEIGHT) & (numbers <= MOST_WEIGHT))  # NaN is wrong too
    if is_wrong.any():
        in_range = map(_is_weight, texts)
        row = next(row for row, is_right in enumerate(in_range) if not is_right)
        raise InputError(
            f"{where}: the weight of row {done + row + 1} is '{escaped(texts[row], 40)}', expected "
            f"a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}; mend it, or leave the edge out"
        )
    return numbers.astype(np.float32)


def _is_weight(text: str) -> bool:
    try:
        return LEAST_WEIGHT <= float(text) <= MOST_WEIGHT
    except ValueError:
        return False


def _is_whole(text: str) -> bool:
    return text.isdecimal() and str(int(text)) == text
