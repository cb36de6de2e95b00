"""Sums of gradients in twice their precision.

Some operators add to the sums themselves, in their backward, instead of handing each parameter a
gradient that is then added: `sum_of` gives them the sum of a parameter. They may also give a
gradient as thin factors, left^T right. vig_study's convolutions have gradients of rank 4, and to
write and add 65,536 numbers for each micro-batch takes longer than the rest of its backward. All
products of a step are made in registers while they are added. None of this changes a bit.
"""

import torch
from torch import Tensor

from vigpipe.ops.call import call, can_call, num_threads, sizes

_MANY = 1 << 14  # numbers for which a pass takes longer than the call of a C++ function


class DoubleSum:
    """A sum of a parameter's gradients in float64, which is kept in `total`, a contiguous tensor.

    It holds the terms exactly unless one is about 2^25 times smaller than another. While
    `is_empty`, nothing has been added, and `total` holds anything.
    """

    def __init__(self, total: Tensor) -> None:
        self.total, self.is_empty = total, True
        self._factors: list[tuple[Tensor, Tensor]] = []

    def begin(self) -> None:
        self.is_empty = True
        self._factors.clear()

    def add(self, term: Tensor) -> None:
        """Add a gradient, in one pass where there is a C++ version."""
        num = term.numel()
        is_widened = term.dtype == torch.float32 and self.total.dtype == torch.float64
        if num >= _MANY and is_widened and term.is_contiguous() and can_call(term):
            shape = sizes(num)
            call("accumulate", term, self.total, *shape, int(self.is_empty), num_threads(num))
        elif self.is_empty:
            torch.add(term, 0.0, out=self.total)  # a copy, except that -0 becomes 0 as in a sum
        else:
            self.total += term
        self.is_empty = False

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add left^T right, rounded to float32, at the end.

        They are (4, rows) and (4, columns) float64; the number of columns is a multiple of 8.
        """
        self._factors.append((left, right))

    def end(self) -> None:
        """End the sum: from now on `total` holds it."""
        if self._factors:
            lefts, rights = map(torch.stack, zip(*self._factors, strict=True))
            shape = sizes(len(lefts), *self.total.shape)
            threads = num_threads(self.total.numel() * len(lefts))
            call("add_products", lefts, rights, self.total, *shape, int(self.is_empty), threads)
            self._factors.clear()
        elif self.is_empty:
            self.total.zero_()
        self.is_empty = False


class PairSum:
    """A sum of float64 gradients in pairs of float64, by Knuth's TwoSum.

    `low` keeps what `high` has no digits for. The Art of Computer Programming, volume 2, section
    4.2.2.
    """

    def __init__(self, high: Tensor, low: Tensor) -> None:
        self.high, self.low = high, low

    def begin(self) -> None:
        self.high.zero_()
        self.low.zero_()

    def add(self, term: Tensor) -> None:
        total = self.high + term
        shift = total - self.high
        self.low += (self.high - (total - shift)) + (term - shift)
        self.high.copy_(total)

    def end(self) -> None:
        """End the sum."""


def offer(parameter: Tensor, double_sum: DoubleSum) -> None:
    """Let backwards add to a parameter's sum, until `withdraw`."""
    parameter.double_sum = double_sum  # pyrefly: ignore[missing-attribute]


def withdraw(parameter: Tensor) -> None:
    """Let backwards give the parameter gradients again."""
    if sum_of(parameter) is not None:
        del parameter.double_sum  # pyrefly: ignore[missing-attribute]


def sum_of(parameter: Tensor) -> DoubleSum | None:
    """Return the sum that is offered for a parameter, None if there is none."""
    return getattr(parameter, "double_sum", None)
