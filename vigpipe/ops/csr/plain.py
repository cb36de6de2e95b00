"""The kernels in plain torch.

Sums are products with a sparse matrix in compressed rows. One thread sums a row, in the order of
its edges, so on a CPU the bits do not depend on the number of threads.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from vigpipe.ops.adjacency import Adjacency, Ends, Factors

_AT_ONCE = 1 << 16  # edges whose features are copied for products


def row_sums(
    adjacency: Adjacency,
    x: Tensor,
    factors: Factors,
    added: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Sum what edges bring; see `native.row_sums`."""
    values = x.new_ones(adjacency.num_edges) if factors.of_edges is None else factors.of_edges
    if factors.of_sources is not None:
        of_sources = factors.of_sources[adjacency.indices]
        values = values * (of_sources if values.dim() == 1 else of_sources[:, None])
    heads = values if values.dim() == 2 else values[:, None]
    parts = x.unflatten(1, (heads.shape[1], x.shape[1] // heads.shape[1])).unbind(1)
    sums = [_product(adjacency, v, part) for v, part in zip(heads.unbind(1), parts, strict=True)]
    y = torch.cat(sums, dim=1)
    if factors.of_targets is not None:
        y = y * factors.of_targets[:, None]
    y = y if added is None else y + added
    return y if out is None else out.copy_(y)


def maxima(adjacency: Adjacency, x: Tensor, has_backward: bool) -> tuple[Tensor, Tensor]:
    """Take the maxima of what edges bring; see `native.maxima`."""
    y = x.new_zeros(adjacency.num_targets, x.shape[1])
    winners = torch.full(y.shape, -1, dtype=torch.int32, device=x.device)
    if not adjacency.num_edges or not x.shape[1]:
        return y, winners
    brought = x.index_select(0, adjacency.indices)
    top = torch.segment_reduce(brought, "max", offsets=adjacency.indptr, axis=0)
    has_edges = (adjacency.in_degrees > 0)[:, None]
    top = torch.where(has_edges, top, y)
    if not has_backward:
        return top, winners[:0]
    # The first edge of a row that attains the maximum, or that is NaN.
    attains = (brought == top.index_select(0, adjacency.targets)) | brought.isnan()
    numbers = torch.arange(adjacency.num_edges, device=x.device)[:, None]
    candidates = numbers.masked_fill(~attains, adjacency.num_edges)
    first = candidates.new_full(y.shape, adjacency.num_edges)
    first.scatter_reduce_(0, adjacency.targets[:, None].expand_as(brought), candidates, "amin")
    sources = adjacency.indices[first.clamp_(max=adjacency.num_edges - 1)].int()
    return top, torch.where(has_edges, sources, winners)


def maxima_backward(adjacency: Adjacency, grad: Tensor, winners: Tensor) -> Tensor:
    """Compute the gradient of `maxima`; see `native.maxima_backward`."""
    num_sources = adjacency.num_sources
    d_x = grad.new_zeros(num_sources + 1, grad.shape[1])
    d_x.scatter_add_(0, winners.long() % (num_sources + 1), grad)  # -1 is the row after the last
    return d_x[:num_sources]


def edge_softmax(adjacency: Adjacency, scores: Tensor | Ends) -> Tensor:
    """Take the softmax of scores; see `native.edge_softmax`."""
    scores = scores_of(adjacency, scores)
    if not adjacency.num_edges or not scores.shape[1]:
        return torch.zeros_like(scores)
    top = torch.segment_reduce(scores, "max", offsets=adjacency.indptr, axis=0)
    shares = (scores - top.index_select(0, adjacency.targets)).exp_()
    return shares.div_(_of_rows(adjacency, shares).index_select(0, adjacency.targets))


def scores_of(adjacency: Adjacency, scores: Tensor | Ends) -> Tensor:
    """Return the scores of edges, (e, H), which may be given by their ends."""
    if not isinstance(scores, Ends):
        return scores
    of_sources, of_targets, slope = scores
    return F.leaky_relu(_at_edges(adjacency, of_sources, of_targets), slope)


def edge_softmax_backward(
    adjacency: Adjacency, grad: Tensor, shares: Tensor, ends: Ends | None
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of `edge_softmax`; see `native.edge_softmax_backward`."""
    mean = _of_rows(adjacency, shares * grad)
    d_scores = shares * (grad - mean.index_select(0, adjacency.targets))
    if ends is None:
        return d_scores, None
    is_positive = _at_edges(adjacency, ends.of_sources, ends.of_targets) > 0
    d_scores = torch.where(is_positive, d_scores, d_scores * ends.slope)
    return d_scores, _of_rows(adjacency, d_scores)


def attention_backward(
    adjacency: Adjacency, shares: Tensor, grad: Tensor, x: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of an attention sum; see `native.attention_backward`."""
    turned, edges = adjacency.transposed, adjacency.turned_edges
    d_x = row_sums(turned, grad, Factors(of_edges=shares[edges]))
    by_heads = (shares.shape[1], x.shape[1] // shares.shape[1])
    pairs = zip(*(t.unflatten(1, by_heads).unbind(1) for t in (grad, x)), strict=True)
    d_shares = [_dot_products(adjacency, of_target, of_source) for of_target, of_source in pairs]
    return torch.stack(d_shares, dim=1), d_x


def pair_scores(
    adjacency: Adjacency, left: Tensor, right: Tensor, weights: Tensor, slope: float
) -> Tensor:
    """Score edges; see `native.pair_scores`."""
    z = _at_edges(adjacency, left, right).view(adjacency.num_edges, *weights.shape)
    return (F.leaky_relu(z, slope) * weights).sum(-1)


def pair_scores_backward(
    adjacency: Adjacency, grad: Tensor, left: Tensor, right: Tensor, weights: Tensor, slope: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of `pair_scores`; see `native.pair_scores_backward`."""
    z = _at_edges(adjacency, left, right).view(adjacency.num_edges, *weights.shape)
    d_weights = (F.leaky_relu(z, slope) * grad[:, :, None]).sum(0)
    slopes = torch.where(z > 0, torch.ones_like(z), torch.full_like(z, slope))
    d = slopes * weights * grad[:, :, None]
    turned, edges = adjacency.transposed, adjacency.turned_edges
    return _of_rows(turned, d.flatten(1)[edges]), _of_rows(adjacency, d.flatten(1)), d_weights


def _at_edges(adjacency: Adjacency, of_sources: Tensor, of_targets: Tensor) -> Tensor:
    """Add what both ends of the edges have: (n, ...) and (m, ...) -> (e, ...)."""
    brought = of_sources.index_select(0, adjacency.indices)
    return brought + of_targets.index_select(0, adjacency.targets)


def _of_rows(adjacency: Adjacency, values: Tensor) -> Tensor:
    """Sum what edges have over those that end in the same node: (e, C) -> (m, C)."""
    if not adjacency.num_edges or not values.shape[1]:
        return values.new_zeros(adjacency.num_targets, values.shape[1])
    return torch.segment_reduce(values.contiguous(), "sum", offsets=adjacency.indptr, axis=0)


def sparse_matrix(adjacency: Adjacency, values: Tensor) -> Tensor:
    """Make the sparse matrix, (m, n), that has these values, (e,), at the edges."""
    shape, edges = (adjacency.num_targets, adjacency.num_sources), adjacency.indices
    with warnings.catch_warnings():
        # The second is torch 2.11's, which also says so where checks are turned off by name.
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
        warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
        return torch.sparse_csr_tensor(
            adjacency.indptr, edges, values, shape, check_invariants=False
        )


def _product(adjacency: Adjacency, values: Tensor, x: Tensor) -> Tensor:
    """Multiply the sparse matrix of these values, (e,), by x: (n, C) -> (m, C)."""
    if not adjacency.num_edges or not x.shape[1]:
        return x.new_zeros(adjacency.num_targets, x.shape[1])
    matrix, x = sparse_matrix(adjacency, values.contiguous()), x.contiguous()
    if x.device.type == "cpu":  # 2.5 times as fast as MKL's product, `matrix @ x`
        return torch.sparse.mm(matrix, x, "sum")
    return matrix @ x


def _dot_products(adjacency: Adjacency, left: Tensor, right: Tensor) -> Tensor:
    """Multiply rows of two matrices, (m, C) and (n, C), where there are edges: (e,)."""
    ends = zip(adjacency.targets.split(_AT_ONCE), adjacency.indices.split(_AT_ONCE), strict=True)
    return torch.cat([(left[targets] * right[sources]).sum(-1) for targets, sources in ends])
