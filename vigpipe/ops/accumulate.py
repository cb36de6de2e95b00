"""Sum float32 tensors in float64."""

import torch
from torch import Tensor

from vigpipe.ops.call import call, can_call, num_threads, sizes

_MANY = 1 << 14  # numbers, of which a pass takes longer than the call of a C++ function


def accumulate(total: Tensor, term: Tensor, *, is_first: bool) -> None:
    """Add a tensor to a sum of a wider type, in one pass where there is a C++ version.

    The bits are the same in any case.

    Args:
        total: the sum, contiguous; it is changed.
        term: what is added, of the same shape.
        is_first: the sum is 0 so far, and its memory holds anything.
    """
    num = term.numel()
    is_widened = term.dtype == torch.float32 and total.dtype == torch.float64
    if num >= _MANY and is_widened and term.is_contiguous() and can_call(term):
        call("accumulate", term, total, *sizes(num), int(is_first), num_threads(num))
    elif is_first:
        torch.add(term, 0.0, out=total)  # a copy, except that -0 becomes 0 as in a sum
    else:
        total += term
