"""Choose how the columns of a table of nodes become features, in one pass over its rows."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from vigpipe.errors import InputError
from vigpipe.files.names import escaped
from vigpipe.graphs.choices import (
    MOST_VALUES,
    Category,
    Number,
    as_numbers,
    checked_numbers,
    is_missing,
)

Kind = Literal["number", "category"]
_LEAST_DEVIATION = 1e-9  # times the mean: what is less is rounding
_MANY_VALUES = 20  # of a category in a small table


class ColumnFit:
    """What is known of a column after some of its rows; `kind` is None if the cells decide."""

    def __init__(self, name: str, where: str, kind: Kind | None) -> None:
        self._name, self._kind, self._rows = name, kind, 0
        self._where = f"{where}: column '{escaped(name)}'"
        self._could_be_numbers = kind != "category"
        self._values: set[str] | None = None if kind == "number" else set()  # None if too many
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    def add(self, texts: Sequence[str]) -> None:
        """Take the texts of the next rows."""
        if self._kind == "number":
            self._add_numbers(checked_numbers(texts, self._where, 1 + self._rows))
        elif self._could_be_numbers:
            try:
                self._add_numbers(as_numbers(texts, self._where, 1 + self._rows))
            except InputError:
                raise
            except ValueError:
                self._could_be_numbers = False
        if self._values is not None:
            self._values.update(map(str.strip, texts))
            if len(self._values) > MOST_VALUES + 1:
                self._values = None
        self._rows += len(texts)

    def _add_numbers(self, numbers: np.ndarray) -> None:
        """Update mean and sum of squares (Chan, Golub, LeVeque 1979)."""
        numbers = numbers[~np.isnan(numbers)]
        if not len(numbers):
            return
        total, mean = self._count + len(numbers), float(numbers.mean())
        apart = mean - self._mean
        self._squares += float(((numbers - mean) ** 2).sum())
        self._squares += apart**2 * self._count * len(numbers) / total
        self._mean += apart * len(numbers) / total
        self._count = total

    def finish(self) -> Number | Category:
        """Return the choice, once all rows were taken; InputError if there is none to make."""
        if self._could_be_numbers and (self._count or self._kind == "number"):
            deviation = (self._squares / max(1, self._count)) ** 0.5
            is_constant = deviation <= _LEAST_DEVIATION * abs(self._mean)
            return Number(self._name, self._mean, 1.0 if is_constant else deviation)
        advice = f"leave it out, --drop {escaped(self._name)}"
        if self._values is None:
            raise InputError(
                f"{self._where}: has more than {MOST_VALUES:,} different texts, each of which "
                f"would be a feature; {advice}"
            )
        values = sorted(value for value in self._values if not is_missing(value))
        if self._kind is None:
            self._check_unforced(values, f"{advice}, or name it in --categories")
        return Category(self._name, tuple(values))

    def _check_unforced(self, values: Sequence[str], advice: str) -> None:
        """Refuse texts that are hardly meant as categories."""
        odd = [value for value in values if not _is_number(value)]
        if len(values) > 2 * len(odd):
            raise InputError(
                f"{self._where}: has numbers, but also '{escaped(odd[0], 40)}'; mend it, {advice}"
            )
        if len(values) > max(_MANY_VALUES, self._rows / 2):
            raise InputError(
                f"{self._where}: has {len(values)} different texts in {self._rows} rows, each of "
                f"which would be a feature; {advice}"
            )


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text))) and "_" not in text
    except ValueError:
        return False
