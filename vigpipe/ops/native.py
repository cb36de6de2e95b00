"""The C++ operators as functions of CPU tensors, without autograd.

The C++ code computes in float32 and float64. It also reads and writes bfloat16; float16 is widened
before the call, and the result is narrowed afterwards.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vigpipe.ops.call import call, dtype_name, num_threads, sizes
from vigpipe.ops.plain import candidates_of

_MODE_BITS = {"max": 1, "mean": 2, "max_mean": 3, "sum": 4}
_WITH_SELF = 8
_AXIAL_BAND = 64  # channels whose gradients the C++ code computes together
_MOST_IN_BYTE = 256  # most neighbours whose rank fits a byte


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _as(x: Tensor | None, dtype: torch.dtype) -> Any:
    """Return a tensor of a type and without gaps, or None for None."""
    return None if x is None else x.to(dtype).contiguous()


def _wide(x: Tensor | None, like: Tensor) -> Any:
    """Return a tensor of the type that numbers like these are computed in, or None for None."""
    return _as(x, _computed_in(like.dtype))


def _kept(inner: torch.dtype, outer: torch.dtype) -> tuple[str, torch.dtype, torch.dtype]:
    """Return a C++ function's suffix, and the types that it takes in place of `inner` and `outer`.

    It reads features of the one and writes features of the other.
    """
    if inner == torch.bfloat16 and outer in (torch.bfloat16, torch.float32):
        name = "bfloat16" if outer == torch.bfloat16 else "bfloat16_float32"
        return name, inner, outer
    wide = _computed_in(inner)
    return str(wide).removeprefix("torch."), wide, wide


def knn(
    x: Tensor, y: Tensor | None, bias: Tensor | None, k: int, dilation: int, loop: bool
) -> Tensor:
    """Index the k nearest neighbours of every node, nearest first; see `vigpipe.ops.knn`."""
    num_images, num_nodes, num_channels = x.shape
    num_candidates = num_nodes if y is None else y.shape[1]
    graph = torch.empty(num_images, num_nodes, k, dtype=torch.int64)
    if graph.numel() == 0:
        return graph
    name, kept, _ = _kept(x.dtype, x.dtype)
    x, y, bias = _as(x, kept), _as(y, kept), _wide(bias, x)
    bias_stride = 0 if bias is None or bias.shape[0] == 1 else num_nodes * num_candidates
    shape = sizes(num_images, num_nodes, num_candidates, num_channels, bias_stride, k, dilation)
    threads = num_threads(num_images * num_nodes * num_candidates)
    call(f"knn_{name}", x, y, bias, graph, *shape, int(loop), threads)
    return graph


def empty_aggregate(
    candidates: Tensor, graph: Tensor, mode: str, interleave: bool, has_backward: bool
) -> tuple[Tensor, Tensor]:
    """Allocate what `aggregate` returns, with the dtype and on the device of the candidates."""
    num_images, num_nodes, k = graph.shape
    num_channels = candidates.shape[2]
    num_outputs = (2 if mode == "max_mean" else 1) + interleave
    has_winners = has_backward and mode in ("max", "max_mean")
    return (
        candidates.new_empty((num_images, num_nodes, num_channels * num_outputs)),
        candidates.new_empty(
            (num_images, num_nodes, num_channels) if has_winners else (0,),
            dtype=torch.uint8 if k <= _MOST_IN_BYTE else torch.int32,
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
    """Reduce the features of every node's neighbours; see `vigpipe.ops.aggregate`.

    The second result is the rank of the neighbour that attains the maximum, (B, N, C) uint8 or
    int32; (0,) if there is no maximum or no backward.
    """
    candidates = candidates_of(x, y)
    name, kept, _ = _kept(candidates.dtype, candidates.dtype)
    others = _as(candidates, kept)
    out, winners = empty_aggregate(others, graph, mode, interleave, has_backward)
    if out.numel():
        num_candidates = candidates.shape[1]
        least, most = graph.aminmax()
        if least < 0 or most >= num_candidates:
            raise IndexError(
                f"graph: neighbours from {int(least)} to {int(most)}, but there are "
                f"{num_candidates} candidates, 0 to {num_candidates - 1}"
            )
        shape_and_mode = _shape_and_mode(x, candidates, graph, mode, interleave)
        inputs = (_as(x, kept), others, graph.contiguous(), _wide(weights, candidates))
        chosen = winners if winners.numel() else None
        call(f"aggregate_{name}_{_rank_type(graph)}", *inputs, out, chosen, *shape_and_mode)
    return out.to(candidates.dtype), winners


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
    """Compute the gradients of `aggregate` for x, y and weights; its second result is `winners`.

    Without y, the gradient of x includes that of the candidates.
    """
    candidates = candidates_of(x, y)
    name, kept, _ = _kept(candidates.dtype, candidates.dtype)
    others = _as(candidates, kept)
    make = torch.empty if grad.numel() else torch.zeros
    d_x = None if x is None or y is None else make(x.shape, dtype=kept)
    d_y, wide = make(others.shape, dtype=kept), _wide(weights, candidates)
    d_weights = None if wide is None else torch.zeros_like(wide)
    if grad.numel():
        chosen = winners if winners.numel() else None
        inputs = (_as(grad, kept), others, graph.contiguous(), chosen, wide)
        shape_and_mode = _shape_and_mode(x, candidates, graph, mode, interleave)
        function = f"aggregate_backward_{name}_{_rank_type(graph)}"
        call(function, *inputs, d_x, d_y, d_weights, *shape_and_mode)
    d_y_narrow = d_y.to(candidates.dtype)
    narrow = None if d_weights is None or weights is None else d_weights.to(weights.dtype)
    if y is None:
        return d_y_narrow, None, narrow
    return None if d_x is None or x is None else d_x.to(x.dtype), d_y_narrow, narrow


def _rank_type(graph: Tensor) -> str:
    return "uint8" if graph.shape[2] <= _MOST_IN_BYTE else "int32"


def _shape_and_mode(
    x: Tensor | None, candidates: Tensor, graph: Tensor, mode: str, interleave: bool
) -> tuple[Any, ...]:
    """Return the last arguments of the C++ functions: sizes, outputs and number of threads."""
    (num_images, num_candidates, num_channels), (num_nodes, k) = candidates.shape, graph.shape[1:]
    return (
        *sizes(num_images, num_nodes, num_candidates, num_channels, k),
        _MODE_BITS[mode] + _WITH_SELF * interleave,
        int(x is not None and mode != "sum"),  # whether x is subtracted
        num_threads(graph.numel() * num_channels // 4),
    )


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    sample_scale: Tensor | None,
    eps: float,
    gelu: bool,
    before: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply BatchNorm, then GELU and a residual; see `vigpipe.ops.norm`."""
    rows, num_channels = x.numel() // x.shape[-1], x.shape[-1]
    num_images = 1 if sample_scale is None else len(x)
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    name, inner, outer = _kept(x.dtype, dtype)
    y = torch.empty(x.shape, dtype=outer)
    mean = torch.empty(num_channels, dtype=torch.float64)
    variance = torch.empty_like(mean)
    layer = _as(x, inner), _wide(weight, x), _wide(bias, x), eps
    added = _as(residual, outer), _wide(sample_scale, x)
    shape, threads = sizes(rows, num_channels, num_images), num_threads(x.numel())
    call(f"norm_{name}", *layer, *added, y, mean, variance, *shape, int(gelu), threads)
    return y.to(dtype), mean, variance


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
    """Compute the gradients of `norm` for x, weight and bias; the residual's is `grad` itself."""
    rows, num_channels = x.numel() // x.shape[-1], x.shape[-1]
    num_images = 1 if sample_scale is None else len(x)
    name, inner, outer = _kept(x.dtype, grad.dtype)
    d_x = torch.empty(x.shape, dtype=inner)
    d_weight, d_bias = torch.empty(2, num_channels, dtype=_computed_in(inner)).unbind()
    inputs = _as(grad, outer), _as(x, inner), mean, variance
    layer = _wide(weight, x), _wide(bias, x), eps, _wide(sample_scale, x)
    results = d_x, d_weight, d_bias
    shape, threads = sizes(rows, num_channels, num_images), num_threads(x.numel())
    call(f"norm_backward_{name}", *inputs, *layer, *results, *shape, int(gelu), threads)
    return d_x.to(x.dtype), d_weight.to(weight.dtype), d_bias.to(bias.dtype)


def grouped(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Multiply each group of channels by its own matrix; see `vigpipe.ops.grouped`."""
    y = x.new_empty(len(x), len(weight))
    by_group = zip(x.chunk(groups, 1), weight.chunk(groups), y.chunk(groups, 1), strict=True)
    for x_group, matrix, y_group in by_group:
        torch.mm(x_group, matrix.T, out=y_group)
    return y


def grouped_backward(grad: Tensor, x: Tensor, weight: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `grouped` for x and weight."""
    d_x, d_weight = torch.empty(x.shape, dtype=x.dtype), torch.empty_like(weight)
    features = (t.chunk(groups, 1) for t in (grad, x, d_x))
    weights = (t.chunk(groups) for t in (weight, d_weight))
    for dy, x_group, dx, matrix, d_matrix in zip(*features, *weights, strict=True):
        torch.mm(dy, matrix, out=dx)
        torch.mm(dy.T, x_group, out=d_matrix)
    return d_x, d_weight


def hidden(x: Tensor, first: Tensor, bias: Tensor, second: Tensor) -> Tensor:
    """Compute gelu(x first + bias) second^T; see `vigpipe.ops.hidden`."""
    rows, width = x.shape[0], first.shape[1]
    y = x.new_empty(rows, second.shape[0])
    name = f"hidden_{x.shape[1]}_{dtype_name(x)}"
    inputs = (t.contiguous() for t in (x, first, bias, second))
    call(name, *inputs, y, *sizes(rows, width), num_threads(rows * width))
    return y


def hidden_backward(
    grad: Tensor, x: Tensor, first: Tensor, bias: Tensor, second: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of `hidden` for x, first, bias and second."""
    inputs = [t.contiguous() for t in (grad, x, first, bias, second)]
    grads = [torch.empty_like(t) for t in inputs[1:]]
    shape = sizes(x.shape[0], first.shape[1])
    name = f"hidden_backward_{x.shape[1]}_{dtype_name(x)}"
    call(name, *inputs, *grads, *shape, num_threads(x.shape[0] * first.shape[1]))
    return grads[0], grads[1], grads[2], grads[3]


def folded(
    x: Tensor,
    total: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    rel: Tensor | None,
    conv_bias: Tensor | None,
    root: Tensor | None,
    second: Tensor,
    height: int,
    width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute what `vigpipe.ops.folded.trained` does, for 3 channels of x and of the result.

    Without a convolution, what belongs to it is None, and height and width of the grid are 0. For
    the backward it also returns mean and covariance of x, (4, 3) float64, and weights, (F, H), and
    bias, (H,), of the hidden layer.
    """
    rows, num_hidden = x.numel() // x.shape[2], len(weight)
    first = x.new_empty(3 if rel is None else 7, num_hidden)
    first_bias = torch.empty_like(first[0])
    counted = torch.empty(3, num_hidden, dtype=torch.float64)
    moments = torch.empty(4, 3, dtype=torch.float64)
    x = x.contiguous()
    layer = (t.contiguous() for t in (weight, bias, scale, shift))
    conv = (None if t is None else t.contiguous() for t in (rel, conv_bias, root))
    results = (first, first_bias, counted, moments)
    shape, threads = sizes(rows, num_hidden), num_threads(x.numel())
    call(f"fold_{dtype_name(x)}", x, *layer, eps, *conv, *results, *shape, threads)
    y = hidden(_features(x, total, height, width), first, first_bias, second)
    return y.view(x.shape), counted, moments, first, first_bias


def _features(x: Tensor, total: Tensor | None, height: int, width: int) -> Tensor:
    """Make rows of [sum of the neighbours, x, number of neighbours], or of x: (R, F)."""
    if total is None:
        return x.view(-1, 3)
    features = x.new_empty(x.numel() // 3, 7)
    shape, threads = sizes(len(x), height, width), num_threads(features.numel())
    call(f"features_{dtype_name(x)}", total.contiguous(), x, features, *shape, threads)
    return features


def folded_backward(
    grad: Tensor,
    x: Tensor,
    total: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    rel: Tensor | None,
    root: Tensor | None,
    second: Tensor,
    height: int,
    width: int,
    moments: Tensor,
    first: Tensor,
    first_bias: Tensor,
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of `folded`; moments and what follows are results of it.

    They are in the order of its tensors. That of the bias is 0: the norm subtracts the mean.
    """
    x = x.contiguous()
    features = _features(x, total, height, width)
    rows = grad.reshape(-1, 3)
    d_features, d_first, d_bias, d_second = hidden_backward(
        rows, features, first, first_bias, second
    )
    layer = tuple(t.contiguous() for t in (weight, scale, shift))
    conv = tuple(None if t is None else t.contiguous() for t in (rel, root))
    d_x, d_weight, d_scale, d_shift = (torch.empty_like(t) for t in (x, *layer))
    d_total = None if total is None else torch.empty_like(x)
    d_rel, d_root = (None if t is None else torch.empty_like(t) for t in conv)
    given = (d_first, d_bias, d_features, x, *layer, eps, *conv, moments)
    results = (d_x, d_total, d_weight, d_scale, d_shift, d_rel, d_root, None)
    shape, threads = sizes(len(features), len(weight)), num_threads(x.numel())
    call(f"fold_backward_{dtype_name(x)}", *given, *results, *shape, threads)
    d_conv_bias = None if rel is None else d_bias
    of_layer = (d_weight, torch.zeros_like(d_scale), d_scale, d_shift)
    return d_x, d_total, *of_layer, d_rel, d_conv_bias, d_root, d_second


def axial(
    x: Tensor, links: list[int], sign: int, limit: Tensor | None, temperature: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Take the largest relative feature of the nodes linked to; see `vigpipe.ops.axial`.

    The links are three numbers each. The second result, for the backward, is the distances of
    nodes over the gated ones, (B, G, N) in the type that numbers like x are computed in.
    """
    name, kept, _ = _kept(x.dtype, x.dtype)
    nodes, gate = _as(x, kept), (_wide(limit, x), _wide(temperature, x))
    out = torch.empty_like(nodes)
    distances = empty_distances(x, links)
    call(
        f"axial_{name}",
        nodes,
        _link_table(tuple(links)),
        *gate,
        out,
        distances,
        *_axial_sizes(x, links, sign),
    )
    return out.to(x.dtype), distances


def empty_distances(x: Tensor, links: list[int]) -> Tensor:
    """Allocate the second result of `axial`."""
    num_images, height, width, _ = x.shape
    shape = num_images, sum(links[2::3]), height * width
    return x.new_empty(shape, dtype=_computed_in(x.dtype))


def axial_backward(
    grad: Tensor,
    x: Tensor,
    links: list[int],
    sign: int,
    limit: Tensor | None,
    temperature: Tensor | None,
    distances: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of `axial` for x and the temperature, from its second result."""
    name, kept, _ = _kept(x.dtype, x.dtype)
    nodes, gate = _as(x, kept), (_wide(limit, x), _wide(temperature, x))
    d_x = torch.empty_like(nodes, dtype=_computed_in(x.dtype))
    slopes = None
    if temperature is not None:
        num_bands = -(-x.shape[-1] // _AXIAL_BAND)
        num_images, *rest = distances.shape
        slopes = distances.new_empty((num_images, num_bands, *rest))
    d_scale = torch.zeros((), dtype=torch.float64)
    inputs = _as(grad, kept), nodes, _link_table(tuple(links)), *gate, distances
    call(f"axial_backward_{name}", *inputs, d_x, slopes, d_scale, *_axial_sizes(x, links, sign))
    d_temperature = None if temperature is None else (d_scale * temperature.sign()).to(temperature)
    return d_x.to(x.dtype), d_temperature


def axial_far(x: Tensor) -> Tensor:
    """Measure the L1 distance of each node to the one half a grid away: (B, H, W, C) -> (B, N)."""
    name, kept, _ = _kept(x.dtype, x.dtype)
    distances = torch.empty(len(x), x.shape[1] * x.shape[2], dtype=_computed_in(x.dtype))
    call(f"axial_far_{name}", _as(x, kept), distances, *sizes(*x.shape), num_threads(x.numel()))
    return distances


@lru_cache(64)
def _link_table(links: tuple[int, ...]) -> Tensor:
    """Return axis, shift and number among the gated ones, from 1, or 0: (L, 3) int64."""
    table = torch.tensor(links, dtype=torch.int64).view(-1, 3)
    table[:, 2] *= table[:, 2].cumsum(0)
    return table


def _axial_sizes(x: Tensor, links: list[int], sign: int) -> tuple[Any, ...]:
    num_links = len(links) // 3
    threads = num_threads(x.numel() * num_links)
    return *sizes(*x.shape, num_links, sum(links[2::3])), sign, threads
