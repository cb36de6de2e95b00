"""The kernels in C++."""

import torch
from torch import Tensor

from vigpipe.ops.adjacency import Adjacency, Ends, Factors
from vigpipe.ops.call import call, dtype_name, num_threads, sizes

_PARTS = 64  # partial sums of a gradient over all edges; equals PARTS in attention.cpp
_NO_ENDS = (None, None, 0.0)


def row_sums(
    adjacency: Adjacency,
    x: Tensor,
    factors: Factors,
    added: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Sum what edges bring, times the factors of edges, sources and targets: (n, C) -> (m, C).

    If the factors of edges are (e, H), x has H heads with C / H channels each. `added`, (m, C) or
    (C,) for all targets, is added last. The result is written to `out`, which may be `added`, if
    there is one. Rows of x, `added` and `out` may be apart.
    """
    num_channels, of_edges = x.shape[1], factors.of_edges
    y = x.new_empty(adjacency.num_targets, num_channels) if out is None else out
    heads = 1 if of_edges is None or of_edges.dim() == 1 else of_edges.shape[1]
    of_added = 0 if added is None or added.dim() == 1 else added.stride(0)
    contiguous = (None if t is None else t.contiguous() for t in factors)
    shape = sizes(adjacency.num_targets, num_channels, heads, x.stride(0), of_added, y.stride(0))
    inputs, threads = (*_edges(adjacency), *contiguous, x, added), _threads(adjacency, num_channels)
    call(f"csr_sum_{dtype_name(x)}", *inputs, y, *shape, threads)
    return y


def maxima(adjacency: Adjacency, x: Tensor, has_backward: bool) -> tuple[Tensor, Tensor]:
    """Take the maximum of what edges bring, for every channel; a node without edges gets 0.

    The second result is the first sources that attain the maxima, (m, C) int32, -1 for none; (0,)
    if no backward needs them.
    """
    y = x.new_empty(adjacency.num_targets, x.shape[1])
    winners = torch.empty(y.shape if has_backward else (0,), dtype=torch.int32)
    results = y, winners if has_backward else None
    shape, threads = sizes(*y.shape), _threads(adjacency, x.shape[1])
    call(f"csr_max_{dtype_name(x)}", *_edges(adjacency), x, *results, *shape, threads)
    return y, winners


def maxima_backward(adjacency: Adjacency, grad: Tensor, winners: Tensor) -> Tensor:
    """Add the gradients of the maxima, (m, C), up where the maxima come from: (n, C)."""
    d_x = grad.new_zeros(adjacency.num_sources, grad.shape[1])
    shape, threads = sizes(*grad.shape), num_threads(grad.numel())
    call(f"csr_max_backward_{dtype_name(grad)}", grad, winners, d_x, *shape, threads)
    return d_x


def edge_softmax(adjacency: Adjacency, scores: Tensor | Ends) -> Tensor:
    """Take the softmax of scores, (e, H), over the edges that end in the same node: (e, H)."""
    if isinstance(scores, Ends):
        given, arguments = scores.of_sources, (None, *scores)
    else:
        given, arguments = scores, (scores, *_NO_ENDS)
    num_heads = given.shape[1]
    shares = given.new_empty(adjacency.num_edges, num_heads)
    shape, threads = sizes(adjacency.num_targets, num_heads), _threads(adjacency, 4 * num_heads)
    function = f"edge_softmax_{dtype_name(given)}"
    call(function, *_edges(adjacency), *arguments, shares, *shape, threads)
    return shares


def edge_softmax_backward(
    adjacency: Adjacency, grad: Tensor, shares: Tensor, ends: Ends | None
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of `edge_softmax`, whose result is `shares`.

    They are that of the scores, (e, H), and None; with ends that of the sums that the leaky ReLU is
    applied to, and that of their `of_targets`, (m, H).
    """
    d_scores = torch.empty_like(shares)
    d_targets = None if ends is None else torch.empty_like(ends.of_targets)
    num_heads = shares.shape[1]
    inputs = *_edges(adjacency), grad, shares, *(_NO_ENDS if ends is None else ends)
    shape, threads = sizes(adjacency.num_targets, num_heads), _threads(adjacency, 4 * num_heads)
    function = f"edge_softmax_backward_{dtype_name(grad)}"
    call(function, *inputs, d_scores, d_targets, *shape, threads)
    return d_scores, d_targets


def attention_backward(
    adjacency: Adjacency, shares: Tensor, grad: Tensor, x: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `row_sums` for factors of edges, the shares, (e, H), and for x."""
    turned, edges = adjacency.transposed, adjacency.turned_edges
    d_shares, d_x = torch.zeros_like(shares), torch.empty_like(x)
    num_heads = shares.shape[1]
    inputs = *_edges(turned), edges, shares, grad, x
    shape = sizes(adjacency.num_sources, num_heads, x.shape[1] // num_heads)
    threads = _threads(adjacency, 2 * x.shape[1])
    call(f"attention_backward_{dtype_name(x)}", *inputs, d_shares, d_x, *shape, threads)
    return d_shares, d_x


def pair_scores(
    adjacency: Adjacency, left: Tensor, right: Tensor, weights: Tensor, slope: float
) -> Tensor:
    """Score edges; see `sparse.pair_scores`."""
    scores = left.new_empty(adjacency.num_edges, len(weights))
    shape = sizes(adjacency.num_targets, *weights.shape)
    inputs, threads = (left, right, weights), _threads(adjacency, left.shape[1])
    name = f"pair_scores_{dtype_name(left)}"
    call(name, *_edges(adjacency), *inputs, slope, scores, *shape, threads)
    return scores


def pair_scores_backward(
    adjacency: Adjacency, grad: Tensor, left: Tensor, right: Tensor, weights: Tensor, slope: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of `pair_scores` for left, right and weights."""
    turned, edges = adjacency.transposed, adjacency.turned_edges
    d_left, d_right = torch.empty_like(left), torch.empty_like(right)
    d_weights = weights.new_zeros(_PARTS, *weights.shape)
    name, threads = f"pair_scores_backward_{dtype_name(left)}", _threads(adjacency, left.shape[1])
    for graph, order, inputs, outputs in (
        (turned, edges, (left, right), (d_left, None)),
        (adjacency, None, (right, left), (d_right, d_weights)),
    ):
        shape = sizes(graph.num_targets, *weights.shape)
        given = *_edges(graph), order, grad, *inputs, weights, slope
        call(name, *given, *outputs, *shape, threads)
    return d_left, d_right, d_weights.sum(0)


def _edges(adjacency: Adjacency) -> tuple[Tensor, Tensor]:
    return adjacency.indptr, adjacency.indices


def _threads(adjacency: Adjacency, num_channels: int) -> int:
    return num_threads((adjacency.num_edges + adjacency.num_targets) * num_channels)
