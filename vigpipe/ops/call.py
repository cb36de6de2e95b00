"""Call functions of the C++ library with tensors."""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from vigpipe.ops.compiler import library

_GRAIN = 1 << 15  # numbers that a thread should have at least, as in torch


def is_traced(x: Tensor) -> bool:
    """Tell whether only operators of torch can be called: a compiler traces, or x has no data."""
    return isinstance(x, FakeTensor) or torch.compiler.is_compiling()


def can_call(x: Tensor) -> bool:
    """Tell whether the library's functions can be called with a tensor."""
    return x.device.type == "cpu" and not is_traced(x) and library().functions is not None


def call(name: str, *arguments: Any) -> int:
    """Call the C++ function `vigpipe_{name}`, and return its result, which mostly has no meaning.

    A contiguous tensor is passed as its address, None as a null pointer, a float as double, an int
    as int, and what `sizes` returns as int64_t.
    """
    functions = library().functions
    assert functions is not None
    return getattr(functions, f"vigpipe_{name}")(*map(_passed, arguments))


def _passed(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_double(argument) if isinstance(argument, float) else argument


def sizes(*numbers: int) -> tuple[ctypes.c_int64, ...]:
    """Convert numbers to int64_t, for `call`."""
    return tuple(map(ctypes.c_int64, numbers))


def dtype_name(x: Tensor) -> str:
    """Name the version of a function that takes numbers of x's type."""
    return "float64" if x.dtype == torch.float64 else "float32"


def num_threads(work: int) -> int:
    """Choose the number of threads for some work; for few numbers, waking threads does not pay.

    Results do not depend on the number of threads.
    """
    return max(1, min(torch.get_num_threads(), work // _GRAIN))
