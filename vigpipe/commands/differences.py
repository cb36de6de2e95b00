"""Measure and locate the largest differences between two trainings, kind by kind."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor

Kinds = Mapping[str, Mapping[str, Tensor]]  # tensors of each kind, such as weights, by name
FLOAT64_ABSOLUTE, FLOAT32_RELATIVE = 1e-10, 1e-5  # the contract's bounds


@dataclass
class Trace:
    """The results of some training steps, by parameter names of the unsplit model.

    Losses and gradients are those of every step; weights and statistics (running means and
    variances) those after the last one.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[str, Tensor] = field(default_factory=dict)

    def by_kind(self) -> "Kinds":
        """Return everything by kind and name."""
        gradients = {
            f"{name} (step {i + 1})": gradient
            for i, step in enumerate(self.gradients)
            for name, gradient in step.items()
        }
        return {
            "loss": {"loss": torch.tensor(self.losses, dtype=torch.float64)},
            "gradients": gradients,
            "weights": self.weights,
            "running statistics": self.statistics,
        }


@dataclass(frozen=True)
class Difference:
    """The largest difference over all tensors of one kind.

    Attributes:
        kind: loss, gradients, weights or running statistics.
        absolute: largest difference of two numbers.
        relative: largest difference of two numbers, divided by the largest number of their tensor;
            tensors of mere rounding noise are compared with the largest number of their kind
            instead (`_scale`).
        where: name of the tensor with the largest relative difference.
        identical: whether all tensors are equal bit for bit.
    """

    kind: str
    absolute: float
    relative: float
    where: str
    identical: bool

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


def differences(actual: Trace, reference: Trace) -> list[Difference]:
    """Compare two traces, kind by kind."""
    return compare(actual.by_kind(), reference.by_kind())


def compare(actual: Kinds, reference: Kinds) -> list[Difference]:
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
    headers = ["", "largest difference", "relative", "bit for bit", "in"]
    return tabulate(lines, headers, disable_numparse=True)
