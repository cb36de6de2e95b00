"""Gradients of matrices that arrive as thin products, and are multiplied out once a step.

A micro-batch gives each matrix of a folded graph convolution a gradient of rank 4, left^T right. To
write 65,536 numbers for each micro-batch, and to read them again into a sum, takes longer than the
rest of its backward. Who adds gradients up (`vigpipe.parallel.gradients`) may ask for the factors
instead; all products are then made in registers while they are added. The bits are the same.
"""

import torch
from torch import Tensor

from vigpipe.ops.call import call, can_call, num_threads, sizes

Terms = list[tuple[Tensor, Tensor]]  # left (4, rows) and right (4, columns), float64


def ask(matrix: Tensor) -> None:
    """Ask the backwards of a step for the factors of a matrix's gradient, as far as they can.

    Args:
        matrix: a parameter; nothing happens unless it is a float32 matrix on the CPU.
    """
    if matrix.dim() == 2 and matrix.dtype == torch.float32 and can_call(matrix):
        matrix.factors = []  # pyright: ignore[reportAttributeAccessIssue]


def asked(matrix: Tensor) -> Terms | None:
    """Return the list that factors of a matrix's gradient belong in, None if nobody has asked."""
    return getattr(matrix, "factors", None)


def take(matrix: Tensor) -> Terms:
    """Return the factors that a step has given, in order, and ask for no more."""
    terms = asked(matrix)
    if terms is None:
        return []
    del matrix.factors  # pyright: ignore[reportAttributeAccessIssue]
    return terms


def add_products(total: Tensor, terms: Terms, *, is_first: bool) -> None:
    """Add left^T right of all terms, each rounded to float32, to a sum.

    Args:
        total: the sum, (rows, columns) float64, contiguous; it is changed. The number of columns is
            a multiple of 8.
        terms: the factors.
        is_first: the sum is 0 so far, and its memory holds anything.
    """
    lefts, rights = (torch.stack(factors) for factors in zip(*terms, strict=True))
    shape = sizes(len(terms), *total.shape)
    threads = num_threads(total.numel() * len(terms))
    call("add_products", lefts, rights, total, *shape, int(is_first), threads)
