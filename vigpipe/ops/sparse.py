"""Reduce the features of every node's neighbours on a sparse graph, with gradients.

No version but the plain one of `maximum` and `pair_scores` makes a tensor of edges x channels. One
thread sums a row, in the order of its edges, so on a CPU the bits do not depend on the number of
threads. A node without edges gets 0. Half precision is widened to float32, and the result is
narrowed.

An adjacency has n sources, m targets and e edges. Features have C channels, or H heads of c
channels. Each function takes `fused`: use the fused kernels (`ops.csr`) where there are any.
"""

# pyrefly: ignore-errors[bad-override]

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from vigpipe.ops import is_fused
from vigpipe.ops.adjacency import Adjacency, Ends, Factors, Weighting
from vigpipe.ops.call import is_traced
from vigpipe.ops.csr import native, plain

_MOST_SOURCES = (1 << 31) - 1  # sources whose numbers fit int32


def constant_sum(
    adjacency: Adjacency,
    x: Tensor,
    weighting: Weighting,
    added: Tensor | None = None,
    *,
    fused: bool = True,
) -> Tensor:
    """Sum the features that edges bring, with weights that follow from the graph.

    Args:
        adjacency: the graph, n sources and m targets.
        x: features, (n, C).
        weighting: which weights; see `Adjacency.weights`.
        added: (m, C), or (C,) for all targets, that is added to the sums; None for nothing.
        fused: use the fused kernels where there are any.

    Returns:
        (m, C), with x's dtype.
    """
    num_channels = x.shape[-1]
    check_shape("x", x, adjacency.num_sources, num_channels)
    if added is not None:
        check_shape("added", added, *(adjacency.num_targets, num_channels)[-added.dim() :])
    return _ConstantSum.apply(x, added, weighting, adjacency, fused)


def write_sums(
    adjacency: Adjacency,
    x: Tensor,
    weighting: Weighting,
    rows: slice,
    out: Tensor,
    added: Tensor | None = None,
    *,
    transposed: bool = False,
    fused: bool = True,
) -> None:
    """Write some rows of a `constant_sum` to where they are wanted, without a gradient.

    The features x are (n, C). If transposed, they are (m, C), and the sums are over the edges that
    leave a node, as in the backward. `out` is (number of rows, C), of x's type, and its rows may be
    apart; `added` is of that shape, or (C,) for all rows.
    """
    graph = adjacency.transposed if transposed else adjacency
    wide = widened(x)
    of_edges, of_sources, of_targets = adjacency.factors(weighting, wide.dtype, transposed)
    first, last = (int(graph.indptr[row]) for row in (rows.start, rows.stop))
    indptr = graph.indptr[rows.start : rows.stop + 1] - first
    part = Adjacency.unchecked(indptr, graph.indices[first:last], graph.num_sources)
    factors = Factors(
        None if of_edges is None else of_edges[first:last],
        of_sources,
        None if of_targets is None else of_targets[rows],
    )
    added = None if added is None else added.to(wide.dtype).contiguous()
    kernels = kernels_for(x, fused)
    if wide.dtype == out.dtype:
        kernels.row_sums(part, wide, factors, added, out)
    else:
        out.copy_(kernels.row_sums(part, wide, factors, added))


def own_and_mean(adjacency: Adjacency, both: Tensor, *, fused: bool = True) -> Tensor:
    """Add what a node has for itself to the mean of what its edges bring: (n, 2 C) -> (m, C).

    The first C columns of `both` are what each node sends, the others what it has for itself.
    """
    check_shape("both", both, adjacency.num_sources, both.shape[-1] // 2 * 2)
    return _OwnAndMean.apply(both, adjacency, fused)


def maximum(adjacency: Adjacency, x: Tensor, *, fused: bool = True) -> Tensor:
    """Take the maximum of the features that edges bring, for every channel: (n, C) -> (m, C).

    The gradient goes to the first source that attains the maximum.

    Raises:
        ValueError: there are 2^31 sources or more, whose numbers would not fit int32.
    """
    check_shape("x", x, adjacency.num_sources, x.shape[-1])
    if adjacency.num_sources > _MOST_SOURCES:
        raise ValueError(f"a maximum is taken over at most {_MOST_SOURCES:,} nodes")
    return _Maximum.apply(x, adjacency, fused)


def edge_softmax(adjacency: Adjacency, scores: Tensor, *, fused: bool = True) -> Tensor:
    """Take the softmax over the edges that end in the same node: (e, H) -> (e, H).

    Edges with weights get their logarithms added, so that their shares are in proportion to the
    weights where scores are equal.
    """
    check_shape("scores", scores, adjacency.num_edges, scores.shape[-1])
    return _Softmax.apply(scores, None, 0.0, adjacency, fused)


def pair_softmax(
    adjacency: Adjacency,
    of_sources: Tensor,
    of_targets: Tensor,
    slope: float,
    *,
    fused: bool = True,
) -> Tensor:
    """Take the softmax of leaky_relu(of_sources[j] + of_targets[i]) over the edges that end in i.

    (n, H) of the sources and (m, H) of the targets give (e, H). The slope of the leaky ReLU is that
    below 0. Weights of edges count as in `edge_softmax`.
    """
    num_heads = of_sources.shape[-1]
    check_shape("of_sources", of_sources, adjacency.num_sources, num_heads)
    check_shape("of_targets", of_targets, adjacency.num_targets, num_heads)
    shares = _Softmax.apply(of_sources, of_targets, slope, adjacency, fused)
    return shares


def pair_scores(
    adjacency: Adjacency,
    left: Tensor,
    right: Tensor,
    weights: Tensor,
    slope: float,
    *,
    fused: bool = True,
) -> Tensor:
    """Score an edge from j to i by the product of weights and leaky_relu(left[j] + right[i]).

    The slope of the leaky ReLU is that below 0. With left (n, H * c), right (m, H * c) and weights
    (H, c), those of each head, scores are (e, H).
    """
    num_channels = weights.numel()
    check_shape("left", left, adjacency.num_sources, num_channels)
    check_shape("right", right, adjacency.num_targets, num_channels)
    check_shape("weights", weights, len(weights), weights.shape[-1])
    scores = _PairScores.apply(left, right, weights, slope, adjacency, fused)
    return scores


def attention_sum(
    adjacency: Adjacency, weights: Tensor, x: Tensor, *, fused: bool = True
) -> Tensor:
    """Sum the features that edges bring, with weights for every head; both get gradients.

    Args:
        adjacency: the graph, n sources and m targets.
        weights: (e, H).
        x: features, (n, H, c).
        fused: use the fused kernels where there are any.

    Returns:
        (m, H, c), with x's dtype.
    """
    check_shape("weights", weights, adjacency.num_edges, x.shape[1])
    check_shape("x", x, adjacency.num_sources, *x.shape[1:3])
    y: Any = _AttentionSum.apply(x.flatten(1), weights, adjacency, fused)
    return y.view(adjacency.num_targets, *x.shape[1:])


class _ConstantSum(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        weighting: Weighting,
        adjacency: Adjacency,
        fused: bool,
    ) -> Tensor:
        ctx.weighting, ctx.adjacency, ctx.fused = weighting, adjacency, fused
        ctx.added = None if added is None else (added.dim(), added.dtype)
        wide = widened(x)
        factors = adjacency.factors(weighting, wide.dtype)
        wide_added = None if added is None else added.to(wide.dtype).contiguous()
        return kernels_for(x, fused).row_sums(adjacency, wide, factors, wide_added).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        adjacency, d_x, d_added = ctx.adjacency, None, None
        if ctx.needs_input_grad[0]:
            wide = widened(grad)
            factors = adjacency.factors(ctx.weighting, wide.dtype, transposed=True)
            turned = adjacency.transposed
            d_x = kernels_for(grad, ctx.fused).row_sums(turned, wide, factors).to(grad.dtype)
        if ctx.needs_input_grad[1]:
            dim, dtype = ctx.added
            d_added = (grad.sum(0) if dim == 1 else grad).to(dtype)
        return d_x, d_added, None, None, None


class _OwnAndMean(Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, adjacency: Adjacency, fused: bool) -> Tensor:
        ctx.adjacency, ctx.fused = adjacency, fused
        sent, kept = widened(both).chunk(2, dim=1)
        factors = adjacency.factors("mean", sent.dtype)
        kernels = kernels_for(both, fused)
        return kernels.row_sums(adjacency, sent, factors, adjacency.own(kept)).to(both.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        adjacency, wide = ctx.adjacency, widened(grad)
        d_both = wide.new_empty(adjacency.num_sources, 2 * wide.shape[1])
        d_sent, d_kept = d_both.chunk(2, dim=1)
        factors = adjacency.factors("mean", wide.dtype, transposed=True)
        turned = adjacency.transposed
        kernels_for(grad, ctx.fused).row_sums(turned, wide, factors, out=d_sent)
        if adjacency.num_targets < adjacency.num_sources:
            d_kept.zero_()
        adjacency.own(d_kept).copy_(wide)
        return d_both.to(grad.dtype), None, None


class _AttentionSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, adjacency: Adjacency, fused: bool) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.adjacency, ctx.fused = adjacency, fused
        wide = widened(x)
        factors = Factors(of_edges=weights.to(wide.dtype))
        return kernels_for(x, fused).row_sums(adjacency, wide, factors).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights = ctx.saved_tensors
        wide = widened(x)
        shares = weights.to(wide.dtype).contiguous()
        kernels = kernels_for(x, ctx.fused)
        wide_grad = grad.to(wide.dtype).contiguous()
        d_shares, d_x = kernels.attention_backward(ctx.adjacency, shares, wide_grad, wide)
        return d_x.to(x.dtype), d_shares.to(weights.dtype), None, None


class _Maximum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, adjacency: Adjacency, fused: bool) -> Tensor:
        y, winners = kernels_for(x, fused).maxima(adjacency, widened(x), ctx.needs_input_grad[0])
        ctx.save_for_backward(winners)
        ctx.adjacency, ctx.fused = adjacency, fused
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (winners,) = ctx.saved_tensors
        kernels = kernels_for(grad, ctx.fused)
        d_x = kernels.maxima_backward(ctx.adjacency, widened(grad), winners)
        return d_x.to(grad.dtype), None, None


class _Softmax(Function):
    """The softmax of scores, or with targets that of what both ends of the edges give."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        of_targets: Tensor | None,
        slope: float,
        adjacency: Adjacency,
        fused: bool,
    ) -> Tensor:
        wide = widened(scores)
        ends = None if of_targets is None else Ends(wide, widened(of_targets), slope)
        given = wide if ends is None else ends
        logs = adjacency.log_weights(wide.dtype)
        if logs is not None:  # gradients follow from the shares, as those without weights
            given = plain.scores_of(adjacency, given) + logs[:, None]
        shares = kernels_for(scores, fused).edge_softmax(adjacency, given)
        ctx.save_for_backward(shares, *(() if ends is None else ends[:2]))
        ctx.adjacency, ctx.slope, ctx.fused = adjacency, slope, fused
        return shares.to(scores.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shares, *saved = ctx.saved_tensors
        adjacency, kernels = ctx.adjacency, kernels_for(grad, ctx.fused)
        ends = Ends(saved[0], saved[1], ctx.slope) if saved else None
        d_scores, d_targets = kernels.edge_softmax_backward(adjacency, widened(grad), shares, ends)
        if ends is None:
            return d_scores.to(grad.dtype), None, None, None, None
        starts, edges = adjacency.transposed.indptr, adjacency.turned_edges
        of_edges = Adjacency.unchecked(starts, edges, adjacency.num_edges)
        d_sources = kernels.row_sums(of_edges, d_scores, Factors())
        return d_sources.to(grad.dtype), d_targets.to(grad.dtype), None, None, None


class _PairScores(Function):
    @staticmethod
    def forward(
        ctx: Any,
        left: Tensor,
        right: Tensor,
        weights: Tensor,
        slope: float,
        adjacency: Adjacency,
        fused: bool,
    ) -> Tensor:
        ctx.save_for_backward(left, right, weights)
        ctx.adjacency, ctx.slope, ctx.fused = adjacency, slope, fused
        wide_left = widened(left)
        wide = wide_left, widened(right), weights.to(wide_left.dtype).contiguous()
        return kernels_for(left, fused).pair_scores(adjacency, *wide, slope).to(left.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        wide = [t.to(widened(inputs[0]).dtype).contiguous() for t in (grad, *inputs)]
        kernels = kernels_for(grad, ctx.fused)
        grads = kernels.pair_scores_backward(ctx.adjacency, *wide, ctx.slope)
        narrow = [d.to(t.dtype) for d, t in zip(grads, inputs, strict=True)]
        return *narrow, None, None, None


def check_shape(name: str, tensor: Tensor, *shape: int) -> None:
    """Raise ValueError where a tensor does not have the shape that is expected of it."""
    if tensor.shape != shape:
        raise ValueError(f"{name}: the shape is {tuple(tensor.shape)} instead of {shape}")


def kernels_for(x: Tensor, fused: bool) -> ModuleType:
    """Return the module of `ops.csr` whose kernels take x, a module of fused kernels if allowed."""
    if not fused or is_traced(x) or not is_fused(x, "csr"):
        return plain
    if x.is_cuda:
        from vigpipe.ops.csr import gpu  # imports Triton, which takes half a second

        return gpu
    return native


def widened(x: Tensor) -> Tensor:
    """Return x in the precision that kernels sum in: float32, unless it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
