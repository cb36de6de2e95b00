"""How columns of a table of nodes become features: kept in graph files and with weights."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from vigpipe.errors import InputError
from vigpipe.files.names import escaped

COLUMNS = "columns"  # the name in graph files, and in the metadata of weights
MOST_VALUES = 1000  # that a category may have
MOST_TEXT = 8 << 20  # characters of choices; a file of weights has them in its header
_MISSING = frozenset(("", "na", "n/a", "#n/a", "<na>", "nan", "null", "none", "?"))  # in any case


@dataclass(frozen=True)
class Number:
    """A column of numbers: (x - mean) / deviation, or 0 where one is missing."""

    name: str
    mean: float
    deviation: float  # above 0

    width = 1


@dataclass(frozen=True)
class Category:
    """A column of texts: a feature for each of the values, 1 where it is that of the node."""

    name: str
    values: tuple[str, ...]

    @property
    def width(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Choices:
    """How each column is turned into features, in the order of the features."""

    columns: tuple[Number | Category, ...]

    @property
    def width(self) -> int:
        return sum(column.width for column in self.columns)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    def as_text(self) -> str:
        """Write them as JSON, in ASCII, which `parse` reads."""
        return json.dumps([asdict(column) for column in self.columns])

    @classmethod
    def parse(cls, text: str, where: str) -> "Choices":
        """Read what `as_text` has written; InputError, which begins with `where`, if it is not."""
        try:
            if len(text) > MOST_TEXT:
                raise ValueError(f"has {len(text)} characters")
            table = json.loads(text)
            if not isinstance(table, list) or not table:
                raise ValueError("it is no list of columns")
            return cls(tuple(map(_column, table)))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(
                f"{where}: its {COLUMNS} are not what an import writes "
                f"({escaped(repr(error), 80)}); import the graph again"
            ) from error

    def encode(self, texts: Sequence[Sequence[str]], where: str, first: int) -> "Encoded":
        """Turn rows of the columns, texts of each, into features: (rows, d) float32.

        The rows have the numbers `first`, `first` + 1, and so on, in the errors.
        """
        rows = len(texts[0]) if texts else 0
        x, empty, new = np.zeros((rows, self.width), np.float32), {}, {}
        ends = accumulate((column.width for column in self.columns), initial=0)
        for column, of_rows, place in zip(self.columns, texts, ends, strict=False):
            if isinstance(column, Number):
                numbers = checked_numbers(
                    of_rows, f"{where}: column '{escaped(column.name)}'", first
                )
                missing = np.isnan(numbers)
                x[:, place] = np.where(missing, 0, (numbers - column.mean) / column.deviation)
            else:
                place_of = {value: place + i for i, value in enumerate(column.values)}
                places = np.array([place_of.get(text.strip(), -1) for text in of_rows])
                missing = np.array([is_missing(text) for text in of_rows])
                is_new = (places < 0) & ~missing
                if is_new.any():
                    new[column.name] = int(is_new.sum())
                known = np.flatnonzero(places >= 0)
                x[known, places[known]] = 1
            if missing.any():
                empty[column.name] = int(missing.sum())
        return Encoded(x, empty, new)


@dataclass(frozen=True)
class Encoded:
    """Features of some nodes."""

    x: np.ndarray  # (rows, d) float32
    empty: dict[str, int]  # how many cells of a column are empty, which is 0 in all its features
    new: dict[str, int]  # how many have a text that is none of the column's values


def is_missing(text: str) -> bool:
    """Whether a cell is empty, or has one of the words for that."""
    return text.strip().lower() in _MISSING


def as_numbers(texts: Sequence[str], where: str, first: int) -> np.ndarray:
    """Read numbers, (rows,) float64, NaN for empty cells; ValueError if there is another text.

    InputError, which begins with `where`, if one is infinite; its row is counted from `first`.
    """
    if "_" in "".join(texts):  # 1_000 is a number for Python alone
        raise ValueError("a text has an underscore")
    try:
        numbers = np.fromiter(map(float, texts), np.float64, len(texts))
    except ValueError:
        filled = (math.nan if is_missing(text) else float(text) for text in texts)
        numbers = np.fromiter(filled, np.float64, len(texts))
    if np.isinf(numbers).any():
        row = first + int(np.isinf(numbers).argmax())
        raise InputError(f"{where}: is infinite in row {row}; expected a finite number")
    return numbers


def checked_numbers(texts: Sequence[str], where: str, first: int) -> np.ndarray:
    """Read numbers as `as_numbers` does, of a column that has to be one of numbers."""
    try:
        return as_numbers(texts, where, first)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(
            f"{where}: is not of numbers ({escaped(str(error), 80)}), as it is to be; mend it"
        ) from error


def differing(ours: Choices, theirs: Choices) -> Iterator[str]:
    """Yield the names of columns that two graphs do not turn into features in the same way."""
    of_theirs = {column.name: column for column in theirs.columns}
    for column in ours.columns:
        if of_theirs.pop(column.name, None) != column:
            yield column.name
    yield from of_theirs
    if ours.names != theirs.names:
        yield "their order"


def _column(table: dict[str, Any]) -> Number | Category:
    name = table["name"]
    if not isinstance(name, str):
        raise TypeError("a name is no text")
    if table.keys() == {"name", "values"}:
        values = tuple(table["values"])
        if not all(isinstance(value, str) for value in values) or len(set(values)) < len(values):
            raise ValueError("values are no texts, or twice the same")
        return Category(name, values)
    if table.keys() != {"name", "mean", "deviation"}:
        raise ValueError("a column has other facts")
    mean, deviation = float(table["mean"]), float(table["deviation"])
    if not math.isfinite(mean) or not 0 < deviation < math.inf:
        raise ValueError("a mean or a deviation is no finite number")
    return Number(name, mean, deviation)
