"""The operators that take most of a ViG's time, each in one pass over memory.

Besides those below there are `axial`, maxima over the nodes in a row and a column (`ops.axial`);
`csr`, sums, maxima and attention over the edges of a large graph (`ops.sparse`); and `masked`,
dropout and ReLU whose backward needs few bits (`ops.masked`).

Every operator has a version in plain torch (`plain`), which runs everywhere, and one in C++ for the
CPU (`native`), which is compiled at first use. Those of `ON_GPU` also have one in Triton for GPUs
(`gpu`), which is compared with plain torch at first use (`self_check`). All versions give the same
numbers up to rounding. Those below are custom operators of torch (`torch.ops.vigpipe`), so
compilers, exporters and FLOP counters see them.
"""

from importlib.util import find_spec

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from vigpipe.ops import plain
from vigpipe.ops.self_check import kind_of, problem

ON_GPU = ("knn", "aggregate", "csr")  # operators that have a version in Triton
_MOST_ON_GPU = 256  # neighbours whose keys fit registers, and whose rank fits a byte, in Triton
_versions: dict[tuple[str, int | None, str], str] = {}  # by device type, device index and operator
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

    Features are scaled to unit length first. Equally near candidates are ordered by index. A
    candidate whose length is not finite is farther than all others.

    Args:
        x: nodes, (B, N, C); gradients do not flow through the choice.
        y: candidates, (B, M, C); None for the nodes themselves.
        bias: added to squared distances, (1, N, M) or (B, N, M).
        k: neighbours per node.
        dilation: keep every dilation-th of the k * dilation nearest; there must be that many
            candidates.
        loop: a node may be its own neighbour.
        fused: use the fused operator where there is one.

    Returns:
        (B, N, k) int64.

    Raises:
        ValueError: there are fewer candidates than k * dilation.
    """
    num_candidates = (x if y is None else y).shape[1] - (not loop)
    if k * dilation > num_candidates:
        raise ValueError(f"the {k * dilation} nearest of {num_candidates} candidates")
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
    """Reduce the features of every node's neighbours: `max`, `mean`, `max_mean` (both) or `sum`.

    The graph, (B, N, K) int64, has the indices of each node's neighbours among the candidates y,
    (B, M, C), or among the nodes themselves. The nodes x, (B, N, C), are subtracted from maximum
    and mean: max-relative aggregation, Li et al. 2019 (arXiv:1904.03751), equation 5. With None
    nothing is subtracted. Edges may have weights in a sum, (B, N, K). To interleave puts x itself
    before the outputs, as one more. The result is (B, N, C * outputs), and the outputs of a channel
    are adjacent, [x0, m0, x1, m1, ...]. The gradient of a maximum goes to the first neighbour that
    attains it.

    Where the graph has an index that no candidate has, C++ raises IndexError. Triton makes the
    node's outputs and its own gradient NaN instead, and the gradient of the edge's weight; nobody
    else gets anything from such an index. The plain version only refuses indices that leave the
    whole batch (RuntimeError); others read another image.
    """
    if fused and is_fused(plain.candidates_of(x, y), "aggregate", graph.shape[2]):
        has_backward = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (x, y, weights)
        )
        arguments = (x, y, graph, weights, mode, interleave, has_backward)
        return torch.ops.vigpipe.aggregate(*arguments)[0]
    return plain.aggregate(x, y, graph, weights, mode, interleave)


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None = None,
    sample_scale: Tensor | None = None,
    eps: float = 1e-5,
    gelu: bool = False,
    before: Tensor | None = None,
    *,
    fused: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply BatchNorm (arXiv:1502.03167) with x's own statistics, then GELU and a residual.

    Features x are (B, ..., C), weight and bias of the norm (C,). The samples are multiplied by
    `sample_scale`, (B,), which gets no gradient, before the residual, of x's shape, is added.
    `before`, (C,), is a bias that x lacks. It would not change the result, and its gradient is 0,
    because the norm subtracts it again; so it is added to the mean only.

    The result has x's shape; the others are the mean of x + before and its biased variance for
    every channel, each (C,) float64.
    """
    version = plain.norm
    if fused and x.numel() and is_fused(x, "norm"):
        from vigpipe.ops import registered

        version = registered.norm
    y, mean, variance = version(x, weight, bias, residual, sample_scale, eps, gelu, before)
    return y, mean if before is None else mean + before.detach(), variance


def grouped(x: Tensor, weight: Tensor, groups: int, *, fused: bool = True) -> Tensor:
    """Multiply each group of channels by its own matrix: a grouped 1x1 convolution.

    Features x, (R, C_in), and weight, (C_out, C_in / groups), whose first C_out / groups rows are
    those of the first group, give (R, C_out). The fused version copies no features.
    """
    if not fused or x.device.type != "cpu" or not is_fused(x, "grouped"):
        return plain.grouped(x, weight, groups)
    from vigpipe.ops import registered

    if torch.is_autocast_enabled("cpu"):
        narrow = torch.get_autocast_dtype("cpu")
        x, weight = x.to(narrow), weight.to(narrow)
    return registered.grouped(x, weight, groups)


def hidden(x: Tensor, first: Tensor, bias: Tensor, second: Tensor, *, fused: bool = True) -> Tensor:
    """Compute gelu(x first + bias) second^T without storing the hidden layer for the backward.

    Rows of features, x (R, F), with first (F, H), bias (H,) and second (O, H) give (R, O).
    """
    fits = x.shape[1] in (3, 7) and second.shape[0] == 3 and first.shape[1] % 16 == 0
    if fused and fits and x.dtype == first.dtype and is_fused(x, "hidden"):
        from vigpipe.ops import registered

        return registered.hidden(x, first, bias, second)
    return plain.hidden(x, first, bias, second)


def is_fused(x: Tensor, name: str, num_neighbours: int = 0) -> bool:
    """Tell whether there is a fused operator for its input x; when exporting to ONNX there is none.

    It may depend on the number of neighbours of a node that the operator ranks or reduces.
    """
    if torch.onnx.is_in_onnx_export() or x.is_meta or x.dtype not in _FLOATS:
        return False
    if x.is_cuda and (num_neighbours > _MOST_ON_GPU or (name, x.dtype) == ("knn", torch.float64)):
        return False
    return bool(_version(x.device.type, x.device.index, name, isinstance(x, FakeTensor)))


def versions(device: str) -> dict[str, str]:
    """Describe which version of every operator is used on a device (`cpu`, `cuda:0`), and why."""
    where = torch.device(device)
    names = ("knn", "aggregate", "axial", "norm", "hidden", "csr", "masked")
    kinds = {name: _version(where.type, where.index, name, is_fake=False) for name in names}
    return {
        name: f"{kind or 'plain torch'} ({_reason(where, name)})" for name, kind in kinds.items()
    }


def _version(device_type: str, index: int | None, name: str, is_fake: bool) -> str:
    """Load the fused version of an operator for a device; return its kind, empty if none."""
    key = device_type, index, name
    if key not in _versions:
        found = _find_version(device_type, name)
        if found == "Triton":
            if is_fake or not _can_compute():
                return found  # a later call compares
            found = "" if problem(name, torch.device(device_type, index or 0)) else found
        _versions[key] = found
    return _versions[key]


# As torch.compiler.assume_constant_result does; calling it would import dynamo, which takes 2 s.
# So a traced call also compares, outside of the trace, and the graph has what was found.
_version._dynamo_marked_constant = True  # pyrefly: ignore[missing-attribute]


def _find_version(device_type: str, name: str) -> str:
    if device_type == "cpu":
        from vigpipe.ops import registered
        from vigpipe.ops.compiler import library

        return "C++" if library().functions is not None else ""
    if device_type == "cuda" and name in ON_GPU and find_spec("triton"):
        from vigpipe.ops import registered  # noqa: F401

        return "Triton"
    return ""


def _can_compute() -> bool:
    """Tell whether a kernel would run on the GPU now, and its result could be read."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return False  # torch.export traces with tensors that hide fake ones
    return torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing()


def _reason(device: torch.device, name: str) -> str:
    if device.type == "cpu":
        from vigpipe.ops.call import call
        from vigpipe.ops.compiler import library

        has_tiles = name == "knn" and library().functions is not None and call("knn_in_tiles")
        return library().reason + ("; bfloat16 in AMX tiles" if has_tiles else "")
    if device.type != "cuda":
        return f"nothing is fused on {device.type}"
    if name not in ON_GPU:
        return "torch's own kernels, or torch.compile's"
    if not find_spec("triton"):
        return "no Triton is installed"
    return problem(name, device) or f"equal to plain torch on {kind_of(device)}"
