"""What an explanation says: how much the logit of a class owes to each node and each edge."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_AT_ONCE = 32  # copies of the nodes that run at once, each without something else


@dataclass(frozen=True)
class EdgeShares:
    """What the logit owes to the edges of one block.

    Attributes:
        block: the block's index in the model.
        sources: the node, or the candidate, that each edge comes from, (e,) int64.
        targets: the node that each edge ends in, (e,) int64.
        gradient: gradient × input of each edge, (e,): the gradient of the logit with respect to a
            factor of 1 on what the edge brings.
        drops: by how much the logit falls if that edge alone is left out, (e,); NaN where this was
            not measured.
        all_out: by how much the logit falls if all edges of the block are left out.
    """

    block: int
    sources: np.ndarray
    targets: np.ndarray
    gradient: np.ndarray
    drops: np.ndarray
    all_out: float

    @property
    def measured(self) -> np.ndarray:
        """The edges that were left out alone, those with the largest effect first, int64."""
        return strongest(self.drops)


@dataclass(frozen=True)
class Explanation:
    """What the logit of one class owes to each node and each edge.

    Attributes:
        target: label of the class.
        logits: of all classes, (C,).
        gradient: gradient × input of each node, summed over its features, (n,) or (H, W).
        drops: by how much the logit falls if the features of a node are set to 0, (n,), NaN where
            this was not measured; of squares of nodes in an image, (H', W').
        edges: of every block whose edges can be told, in their order.
        side: how many nodes the sides of these squares have.
    """

    target: int
    logits: Tensor
    gradient: np.ndarray
    drops: np.ndarray
    edges: tuple[EdgeShares, ...]
    side: int = 1

    @property
    def logit(self) -> float:
        return float(self.logits[self.target])


def likeliest(logits: Tensor) -> int:
    """Return the label of the likeliest class; FloatingPointError if the logits are no numbers."""
    if not logits.isfinite().all():
        raise FloatingPointError("the model's logits are NaN or infinite; check the weights")
    return int(logits.argmax())


def strongest(values: np.ndarray, most: int | None = None) -> np.ndarray:
    """Return the positions of the numbers that are largest, whatever their sign; no NaN.

    At most `most`; ties by position.
    """
    flat = np.abs(values.ravel())
    order = np.argsort(-flat, kind="stable")  # NaN come last
    return order[~np.isnan(flat[order])][:most]


def gradients_of(logit: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of a number; zeros for an input that it does not depend on."""
    found: Any = torch.autograd.grad(logit, list(inputs), materialize_grads=True)
    return list(found)


def measure_drops(
    logit: float, values: np.ndarray, most: int, logits_without: Callable[[np.ndarray], Tensor]
) -> np.ndarray:
    """Return by how much a logit falls without each of what has the `most` strongest values.

    `logits_without` returns the logit, (b,), without each of some of these, (b,) int64. The result
    has the shape of the values, and NaN elsewhere.
    """
    drops = np.full(values.shape, np.nan)
    for some in in_parts(strongest(values, most)):
        drops.flat[some] = logit - logits_without(some).double().cpu().numpy()
    return drops


def in_parts(numbers: np.ndarray) -> Iterator[np.ndarray]:
    """Divide what is to be left out into parts whose copies run at once."""
    for first in range(0, len(numbers), _AT_ONCE):
        yield numbers[first : first + _AT_ONCE]
