"""The operators that a ViG spends its time in, each in one pass over memory.

    knn        nearest neighbours in feature space: features -> indices
    aggregate  maximum, mean or sum over a node's neighbours
    norm       BatchNorm, then GELU or not, then a residual or not
    hidden     a wide layer with GELU between few channels

There are three versions of each, for the same numbers up to rounding: `plain` torch, which serves
everywhere; `native`, C++ for the CPU, compiled at first use; and, of the first two, Triton's for
GPUs in `gpu`. The fused ones are custom operators of torch (`torch.ops.vigpipe`), so compilers,
exporters and FLOP counters see them.
"""

import torch
from torch import Tensor

from vigpipe.ops import plain

_MOST_ON_GPU = 256  # neighbours that Triton's kernels hold in registers, or in a byte
_versions: dict[tuple[str, str], str] = {}  # found so far
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def knn(
    x: Tensor,
    y: Tensor | None,
    bias: Tensor | None,
    k: int,
    dilation: int = 1,
    loop: bool = True,
    *,
    fused: bool = True,
) -> Tensor:
    """Index the k nearest neighbours of every node, nearest first.

    Features are scaled to unit length first; equally near candidates come by index; one without a
    finite length is farther than all others.

    Args:
        x: nodes (B, N, C); gradients do not flow through the choice.
        y: candidates (B, M, C); None: the nodes themselves.
        bias: (1 or B, N, M), added to squared distances.
        k: neighbours per node.
        dilation: keep every dilation-th of the k * dilation nearest, which must exist.
        loop: a node may be its own neighbour.
        fused: take the fused operator where there is one.

    Returns:
        (B, N, k) int64.
    """
    if fused and is_fused(x, "knn", (k - 1) * dilation + 1):
        x, y = x.detach(), None if y is None else y.detach()
        return torch.ops.vigpipe.knn(x, y, bias, k, dilation, loop)
    return plain.knn(x, y, bias, k, dilation, loop)


def aggregate(
    x: Tensor | None,
    y: Tensor | None,
    graph: Tensor,
    weights: Tensor | None = None,
    mode: str = "max",
    interleave: bool = False,
    *,
    fused: bool = True,
) -> Tensor:
    """Reduce the features of every node's neighbours.

    Args:
        x: nodes (B, N, C), taken off maximum and mean: max-relative aggregation, Li et al. 2019
            (arXiv:1904.03751), equation 5. None: nothing is taken off.
        y: what the graph's indices mean (B, M, C); None: the nodes themselves.
        graph: (B, N, K) int64.
        weights: of the edges (B, N, K), for sums.
        mode: `max`, `mean`, `max_mean` (both, two pieces) or `sum`.
        interleave: put x itself before the pieces.
        fused: take the fused operator where there is one.

    Returns:
        (B, N, C * pieces); pieces of a channel stand beside each other, [x0, m0, x1, m1, ...]. The
        gradient of a maximum goes to the first neighbour that attains it.

    Raises:
        IndexError: an index of the graph is not that of a candidate.
    """
    given = x if y is None else y
    assert given is not None
    if fused and is_fused(given, "aggregate", graph.shape[2]):
        has_backward = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (x, y, weights)
        )
        arguments = (x, y, graph, weights, mode, interleave, has_backward)
        return torch.ops.vigpipe.aggregate(*arguments)[0]
    return plain.aggregate(x, y, graph, weights, mode, interleave)


def neighbours(
    x: Tensor,
    y: Tensor | None,
    bias: Tensor | None,
    k: int,
    dilation: int = 1,
    mode: str = "max",
    *,
    fused: bool = True,
) -> tuple[Tensor, Tensor]:
    """Graph and aggregation together: (B, N, C) -> (B, N, k), (B, N, C); see knn and aggregate."""
    graph = knn(x, y, bias, k, dilation, fused=fused)
    return graph, aggregate(x, y, graph, mode=mode, fused=fused)


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None = None,
    sample_scale: Tensor | None = None,
    eps: float = 1e-5,
    gelu: bool = False,
    *,
    fused: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """BatchNorm with the statistics of these rows, arXiv:1502.03167, and what follows it.

    Args:
        x: (B, ..., C).
        weight: (C,).
        bias: (C,).
        residual: like x; is added last.
        sample_scale: (B,), what a sample is multiplied by before the residual is added; it has no
            gradient.
        eps: is added to the variance.
        gelu: apply GELU after the norm.
        fused: take the fused operator where there is one.

    Returns:
        The result, like x; mean and (biased) variance of every channel, (C,) float64.
    """
    if fused and x.numel() and is_fused(x, "norm"):
        return torch.ops.vigpipe.norm(x, weight, bias, residual, sample_scale, eps, gelu)
    return plain.norm(x, weight, bias, residual, sample_scale, eps, gelu)


def hidden(x: Tensor, first: Tensor, bias: Tensor, second: Tensor, *, fused: bool = True) -> Tensor:
    """gelu(x first + bias) second^T, of which nothing H wide is kept: not even for the backward.

    Args:
        x: (R, F).
        first: (F, H).
        bias: (H,).
        second: (O, H).
        fused: take the fused operator where there is one.

    Returns:
        (R, O).
    """
    fits = x.shape[1] in (3, 7) and second.shape[0] == 3 and first.shape[1] % 16 == 0
    if fused and fits and x.dtype == first.dtype and is_fused(x, "hidden"):
        return torch.ops.vigpipe.hidden(x, first, bias, second)
    return plain.hidden(x, first, bias, second)


def is_fused(x: Tensor, name: str, num_neighbours: int = 0) -> bool:
    """Whether there is a fused operator for this tensor; ONNX knows none of ours.

    Args:
        x: floating point.
        name: of the operator.
        num_neighbours: that it has to rank, or to reduce.
    """
    if torch.onnx.is_in_onnx_export() or x.is_meta or x.dtype not in _FLOATS:
        return False
    if x.is_cuda and (num_neighbours > _MOST_ON_GPU or (name, x.dtype) == ("knn", torch.float64)):
        return False
    return bool(_version(x.device.type, name))


def versions(device_type: str) -> dict[str, str]:
    """For every operator what serves on a device, and why, in words."""
    served: dict[str, str] = {}
    for name in ("knn", "aggregate", "norm", "hidden"):
        kind = _version(device_type, name)
        served[name] = f"{kind or 'plain torch'} ({_reason(device_type, name)})"
    return served


def _version(device_type: str, name: str) -> str:
    """The fused version of an operator on a device, loaded; empty if there is none."""
    key = device_type, name
    if key not in _versions:
        _versions[key] = _find_version(device_type, name)
    return _versions[key]


# What torch.compiler.assume_constant_result sets; to call it takes 2 s, as it imports dynamo.
_version._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _find_version(device_type: str, name: str) -> str:
    if device_type == "cpu":
        from vigpipe.ops import registered
        from vigpipe.ops.compiler import library

        return "C++" if library().functions is not None else ""
    if device_type == "cuda" and name in ("knn", "aggregate") and _has_triton():
        from vigpipe.ops import registered  # noqa: F401

        return "Triton"
    return ""


def _reason(device_type: str, name: str) -> str:
    if device_type == "cpu":
        from vigpipe.ops.compiler import library

        return library().reason
    if device_type != "cuda":
        return f"nothing is fused on {device_type}"
    if name not in ("knn", "aggregate"):
        return "torch's own kernels, or torch.compile's"
    return "compiled at first use" if _has_triton() else "no Triton is installed"


def _has_triton() -> bool:
    from importlib.util import find_spec

    return find_spec("triton") is not None
