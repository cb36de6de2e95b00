"""Measure and locate the largest differences between two trainings, kind by kind."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor

Kinds = Mapping[str, Mapping[str, Tensor]]  # tensors of each kind, such as weights, by name
FLOAT64_ABSOLUTE, FLOAT32_RELATIVE = 1e-10, 1e-5  # the contract's bounds


@dataclass(frozen=True)
class Difference:
    """The largest difference over all tensors of one kind."""

    kind: str
    absolute: float
    relative: float  # divided by the largest number of its tensor, or what `_scale` takes instead
    where: str  # the tensor with the largest relative one
    identical: bool  # whether all tensors are equal bit for bit

    def within(self, dtype: torch.dtype) -> bool:
        """Return whether the difference is within the contract's bound for this dtype."""
        if dtype == torch.float64:
            return self.absolute <= FLOAT64_ABSOLUTE
        return self.relative <= FLOAT32_RELATIVE


class Compared(NamedTuple):
    """Differences, what they are against, in words, and whether all must be equal bit by bit."""

    rows: list[Difference]
    against: str
    exact: bool


def differences(actual: Kinds, reference: Kinds) -> list[Difference]:
    """Compare tensors kind by kind; both must have the same names."""
    return [_difference(kind, actual[kind], tensors) for kind, tensors in reference.items()]


def _difference(
    kind: str, actual: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> Difference:
    if actual.keys() != reference.keys():
        odd = sorted(actual.keys() ^ reference.keys())
        raise AssertionError(f"{kind}: only one of the two has {', '.join(odd)}")
    largest = max((float(t.abs().max()) for t in reference.values()), default=0.0)
    absolute, relative, where = 0.0, 0.0, ""
    for name, expected in reference.items():
        difference = float((actual[name].double() - expected.double()).abs().max())
        if math.isnan(difference):
            difference = math.inf
        ratio = difference / _scale(expected, largest)
        absolute = max(absolute, difference)
        if ratio > relative:
            relative, where = ratio, name
    identical = all(torch.equal(actual[name], expected) for name, expected in reference.items())
    return Difference(kind, absolute, relative, where, identical)


def _scale(tensor: Tensor, largest_of_kind: float) -> float:
    # The gradient of a bias before a BatchNorm is zero except for rounding. So a tensor that is
    # more than a thousand times smaller than the largest of its kind is compared with a thousandth
    # of that.
    return max(float(tensor.abs().max()), 1e-3 * largest_of_kind, torch.finfo(torch.float64).tiny)


def table_of(rows: Sequence[Difference]) -> str:
    """Write differences as a table, one row each."""
    lines = [
        (r.kind, f"{r.absolute:.3g}", f"{r.relative:.3g}", "yes" if r.identical else "no", r.where)
        for r in rows
    ]
    headers = ["", "largest difference", "relative", "bit for bit", "where"]
    return tabulate(lines, headers, disable_numparse=True)
