"""What an explanation says: how much the logit of a class owes to each node and each edge."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_AT_ONCE = 32  # nodes, or edges, each of which is left out in another copy


@dataclass(frozen=True)
class EdgeShares:
    """What the logit owes to the edges of one block.

    Attributes:
        block: the block's index in the model.
        sources: the node, or the candidate, that each edge comes from, (e,) int64.
        targets: the node that each edge ends in, (e,) int64.
        gradient: gradient × input of each edge, (e,): the gradient of the logit with respect to
            what a node has received, times what it owes to the edge.
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


@dataclass(frozen=True)
class Question:
    """Which logit is explained, and by how much leaving out.

    Attributes:
        target: label of the class; None for the likeliest.
        most: how many edges of each block, and nodes of a graph, are left out one at a time.
        advance: is told how many things have been left out since the last call.
    """

    target: int | None = None
    most: int = 32
    advance: Callable[[int], object] = lambda _: None

    def begun(self, logits: Tensor) -> "Measure":
        """Begin to measure from the logits with everything, (C,).

        FloatingPointError if one is not finite.
        """
        if not logits.isfinite().all():
            raise FloatingPointError("logits are NaN or infinite")
        target = int(logits.argmax()) if self.target is None else self.target
        return Measure(target, float(logits[target]), self)


@dataclass(frozen=True)
class Measure:
    """Measures by how much a logit falls."""

    target: int
    logit: float
    question: Question

    def drops(self, logits: Tensor) -> np.ndarray:
        """Return by how much the logit falls where the logits are these, (b, C): (b,)."""
        self.question.advance(len(logits))
        return self.logit - logits[:, self.target].double().cpu().numpy()

    def drops_of_strongest(
        self, gradient: np.ndarray, logits_without: Callable[[np.ndarray], Tensor]
    ) -> np.ndarray:
        """Return the drops without each of what has the largest gradient × input; NaN elsewhere.

        `logits_without` returns the logits, (b, C), without each of some of these, (b,) int64.
        """
        drops = np.full(gradient.shape, np.nan)
        for some in in_parts(strongest(gradient, self.question.most)):
            drops.flat[some] = self.drops(logits_without(some))
        return drops

    def gradients(self, logits: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the logit's gradients, zeros where it does not depend on an input.

        FloatingPointError if one is not finite.
        """
        inputs, logit = list(inputs), logits[self.target]
        found: Any = torch.autograd.grad(logit, inputs, materialize_grads=True)
        if not all(gradient.isfinite().all() for gradient in found):
            raise FloatingPointError("gradients are NaN or infinite")
        return list(found)


def strongest(values: np.ndarray, most: int | None = None) -> np.ndarray:
    """Return the positions of the numbers that are largest, whatever their sign; no NaN.

    At most `most`; ties by position.
    """
    flat = np.abs(values.ravel())
    order = np.argsort(-flat, kind="stable")  # NaN come last
    return order[~np.isnan(flat[order])][:most]


def in_parts(numbers: np.ndarray) -> Iterator[np.ndarray]:
    """Divide what is to be left out into parts."""
    for first in range(0, len(numbers), _AT_ONCE):
        yield numbers[first : first + _AT_ONCE]
