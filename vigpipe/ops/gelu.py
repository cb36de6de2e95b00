"""GELU in inference, in place.

oneDNN can apply GELU to a product before its result leaves the cache, but in float32 takes longer
for it than a pass over memory: 3.8 ns a number, where this takes 1.3 and torch 1.9 (one core of an
AMD EPYC with AVX2).
"""

import torch.nn.functional as F
from torch import Tensor, float32

from vigpipe.ops.call import call, can_call, num_threads, sizes


def gelu_(x: Tensor) -> Tensor:
    """Apply GELU to x and return it; x is changed in place where there is a C++ version for it.

    Its numbers must have no gaps between them, but may be in any order.
    """
    if x.dtype != float32 or not can_call(x) or x.untyped_storage().nbytes() != 4 * x.numel():
        return F.gelu(x)
    call("gelu", x, *sizes(x.numel()), num_threads(x.numel()))
    return x
