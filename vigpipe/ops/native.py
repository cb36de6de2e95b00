"""The C++ operators as functions of CPU tensors: shapes and pointers, no autograd.

Everything is float32 or float64 here. Half precision is widened before and narrowed after: a
processor that can do without is one that torch's own kernels serve.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from vigpipe.ops.compiler import library

_PIECES = {"max": 1, "mean": 2, "max_mean": 3, "sum": 4}
_WITH_SELF = 8
_FEW = 256  # neighbours whose ranks fit a byte
_GRAIN = 1 << 15  # numbers that are worth a thread, as in torch


def _call(name: str, *arguments: Any) -> None:  # noqa: ANN401
    functions = library().functions
    assert functions is not None
    getattr(functions, f"vigpipe_{name}")(*map(_passed, arguments))


def _passed(argument: Any) -> Any:  # noqa: ANN401
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_double(argument) if isinstance(argument, float) else argument


def _sizes(*sizes: int) -> tuple[ctypes.c_int64, ...]:
    return tuple(map(ctypes.c_int64, sizes))


def _dtype(x: Tensor) -> str:
    return "float64" if x.dtype == torch.float64 else "float32"


def _threads(work: int) -> int:
    """Threads for so many numbers: waking one up for a few takes longer than doing them.

    Results do not depend on it.
    """
    return max(1, min(torch.get_num_threads(), work // _GRAIN))


def _wide(x: Tensor | None, like: Tensor | None = None) -> Any:  # noqa: ANN401
    """Contiguous, in float64 or float32."""
    if x is None:
        return None
    is_double = (x if like is None else like).dtype == torch.float64
    return x.to(torch.float64 if is_double else torch.float32).contiguous()


def knn(
    x: Tensor, y: Tensor | None, bias: Tensor | None, k: int, dilation: int, loop: bool
) -> Tensor:
    """See `vigpipe.ops.knn`."""
    num_images, num_nodes, num_channels = x.shape
    num_candidates = num_nodes if y is None else y.shape[1]
    graph = torch.empty(num_images, num_nodes, k, dtype=torch.int64)
    if graph.numel() == 0:
        return graph
    x, y, bias = _wide(x), _wide(y, x), _wide(bias, x)
    bias_stride = 0 if bias is None or bias.shape[0] == 1 else num_nodes * num_candidates
    sizes = _sizes(num_images, num_nodes, num_candidates, num_channels, bias_stride, k, dilation)
    _call(
        f"knn_{_dtype(x)}",
        x,
        y,
        bias,
        graph,
        *sizes,
        int(loop),
        _threads(num_images * num_nodes * num_candidates),
    )
    return graph


def empty_aggregate(
    given: Tensor, graph: Tensor, mode: str, interleave: bool, has_backward: bool
) -> tuple[Tensor, Tensor]:
    """Room for what `aggregate` returns, of the dtype and on the device of its candidates."""
    num_images, num_nodes, k = graph.shape
    num_channels = given.shape[2]
    num_pieces = (2 if mode == "max_mean" else 1) + interleave
    has_winners = has_backward and mode in ("max", "max_mean")
    return (
        given.new_empty((num_images, num_nodes, num_channels * num_pieces)),
        given.new_empty(
            (num_images, num_nodes, num_channels) if has_winners else (0,),
            dtype=torch.uint8 if k <= _FEW else torch.int32,
        ),
    )


def aggregate(
    x: Tensor | None,
    y: Tensor | None,
    graph: Tensor,
    weights: Tensor | None,
    mode: str,
    interleave: bool,
    has_backward: bool,
) -> tuple[Tensor, Tensor]:
    """See `vigpipe.ops.aggregate`; and, for a backward, which neighbours attain the maximum."""
    given = x if y is None else y
    assert given is not None
    (num_images, num_candidates, num_channels), (num_nodes, k) = given.shape, graph.shape[1:]
    own, others = _wide(x, given), _wide(given)
    out, winners = empty_aggregate(others, graph, mode, interleave, has_backward)
    if out.numel():
        _check(graph, num_candidates)
        name = f"aggregate_{_dtype(others)}_{'uint8' if k <= _FEW else 'int32'}"
        pieces = _PIECES[mode] + _WITH_SELF * interleave
        sizes = _sizes(num_images, num_nodes, num_candidates, num_channels, k)
        is_relative = x is not None and mode != "sum"
        chosen = winners if winners.numel() else None
        arguments = (own, others, graph.contiguous(), _wide(weights, given), out, chosen, *sizes)
        _call(
            name, *arguments, pieces, int(is_relative), _threads(graph.numel() * num_channels // 4)
        )
    return out.to(given.dtype), winners


def aggregate_backward(
    grad: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    graph: Tensor,
    winners: Tensor,
    weights: Tensor | None,
    mode: str,
    interleave: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, y and weights; None for what is None. Without y, x has both roles."""
    given = x if y is None else y
    assert given is not None
    (num_images, num_candidates, num_channels), (num_nodes, k) = given.shape, graph.shape[1:]
    others = _wide(given)
    d_x = None if x is None or y is None else torch.zeros_like(_wide(x, given))
    d_y, wide = torch.zeros_like(others), _wide(weights, given)
    d_weights = None if wide is None else torch.zeros_like(wide)
    if grad.numel():
        name = f"aggregate_backward_{_dtype(others)}_{'uint8' if k <= _FEW else 'int32'}"
        pieces = _PIECES[mode] + _WITH_SELF * interleave
        sizes = _sizes(num_images, num_nodes, num_candidates, num_channels, k)
        is_relative = x is not None and mode != "sum"
        chosen = winners if winners.numel() else None
        arguments = (_wide(grad, given), others, graph.contiguous(), chosen, wide, d_x, d_y)
        _call(
            name,
            *arguments,
            d_weights,
            *sizes,
            pieces,
            int(is_relative),
            _threads(graph.numel() * num_channels // 4),
        )
    d_given = d_y.to(given.dtype)
    narrow = None if d_weights is None or weights is None else d_weights.to(weights.dtype)
    if y is None:
        return d_given, None, narrow
    return None if d_x is None or x is None else d_x.to(x.dtype), d_given, narrow


def _check(graph: Tensor, num_candidates: int) -> None:
    least, most = graph.aminmax()
    if least < 0 or most >= num_candidates:
        raise IndexError(
            f"graph: neighbours from {int(least)} to {int(most)}, but there are {num_candidates} "
            f"candidates, 0 to {num_candidates - 1}"
        )


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    sample_scale: Tensor | None,
    eps: float,
    gelu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `vigpipe.ops.norm`."""
    rows, num_channels = x.numel() // x.shape[-1], x.shape[-1]
    wide = _wide(x)
    y = torch.empty_like(wide)
    mean = torch.empty(num_channels, dtype=torch.float64)
    variance = torch.empty_like(mean)
    _call(
        f"norm_{_dtype(wide)}",
        wide,
        _wide(weight, x),
        _wide(bias, x),
        eps,
        _wide(residual, x),
        _wide(sample_scale, x),
        y,
        mean,
        variance,
        *_sizes(rows, num_channels, 1 if sample_scale is None else len(x)),
        int(gelu),
        _threads(x.numel()),
    )
    kept = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    return y.to(kept), mean, variance


def norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    sample_scale: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    gelu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    rows, num_channels = x.numel() // x.shape[-1], x.shape[-1]
    wide = _wide(x)
    d_x = torch.empty_like(wide)
    d_weight, d_bias = wide.new_empty(num_channels), wide.new_empty(num_channels)
    _call(
        f"norm_backward_{_dtype(wide)}",
        _wide(grad, x),
        wide,
        mean,
        variance,
        _wide(weight, x),
        _wide(bias, x),
        eps,
        _wide(sample_scale, x),
        d_x,
        d_weight,
        d_bias,
        *_sizes(rows, num_channels, 1 if sample_scale is None else len(x)),
        int(gelu),
        _threads(x.numel()),
    )
    return d_x.to(x.dtype), d_weight.to(weight.dtype), d_bias.to(bias.dtype)


def hidden(x: Tensor, first: Tensor, bias: Tensor, second: Tensor) -> Tensor:
    """See `vigpipe.ops.hidden`."""
    rows, width = x.shape[0], first.shape[1]
    y = x.new_empty(rows, second.shape[0])
    name = f"hidden_{x.shape[1]}_{_dtype(x)}"
    parts = (t.contiguous() for t in (x, first, bias, second))
    _call(name, *parts, y, *_sizes(rows, width), _threads(rows * width))
    return y


def hidden_backward(
    grad: Tensor, x: Tensor, first: Tensor, bias: Tensor, second: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, first, bias and second."""
    parts = [t.contiguous() for t in (grad, x, first, bias, second)]
    grads = [torch.empty_like(t) for t in parts[1:]]
    sizes = _sizes(x.shape[0], first.shape[1])
    name = f"hidden_backward_{x.shape[1]}_{_dtype(x)}"
    _call(name, *parts, *grads, *sizes, _threads(x.shape[0] * first.shape[1]))
    return grads[0], grads[1], grads[2], grads[3]
