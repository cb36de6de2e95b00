"""The kernels in Triton.

A program has one row, or one head of a row, and goes through its edges in order, so the bits do not
change from run to run. What an edge adds to its source is found from the transposed graph, without
atomic additions. Nothing has edges x channels.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from vigpipe.ops import gpu
from vigpipe.ops.adjacency import Adjacency, Ends, Factors

launch = partial(gpu.launch, strided=True)


@triton.jit
def _sum_kernel(
    indptr: tl.tensor, indices: tl.tensor, of_edges: tl.tensor, of_sources: tl.tensor,
    of_targets: tl.tensor, x: tl.tensor, added: tl.tensor, out: tl.tensor,
    num_channels: int, from_x: int, from_added: int, from_out: int,
    HEADS: tl.constexpr, PER_HEAD: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    """Sum BLOCK_C channels of a row, AT_ONCE edges at a time."""
    NUMBER: tl.constexpr = x.dtype.element_ty  # pyrefly: ignore[missing-attribute]
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channel < num_channels
    first, last = tl.load(indptr + row), tl.load(indptr + row + 1)
    total = tl.zeros([BLOCK_C], NUMBER)
    for start in range(first, last, AT_ONCE):
        edge = start + tl.arange(0, AT_ONCE).to(tl.int64)
        is_edge = edge < last
        source = edge
        if indices is not None:
            source = tl.load(indices + edge, mask=is_edge, other=0)
        mask = is_edge[:, None] & is_channel[None, :]
        value = tl.load(x + source[:, None] * from_x + channel[None, :], mask=mask, other=0)
        if of_edges is not None:
            at = edge[:, None] * HEADS + (channel // PER_HEAD)[None, :]
            value *= tl.load(of_edges + at, mask=mask, other=0)
        if of_sources is not None:
            value *= tl.load(of_sources + source, mask=is_edge, other=0)[:, None]
        total += tl.sum(value, 0)
    if of_targets is not None:
        total *= tl.load(of_targets + row)
    if added is not None:
        total += tl.load(added + row * from_added + channel, mask=is_channel, other=0)
    tl.store(out + row * from_out + channel, total, mask=is_channel)


@triton.jit
def _max_kernel(
    indptr: tl.tensor, indices: tl.tensor, x: tl.tensor, out: tl.tensor, winners: tl.tensor,
    num_channels: int, BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    """Take the maximum of BLOCK_C channels of a row; the first NaN wins."""
    NUMBER: tl.constexpr = x.dtype.element_ty  # pyrefly: ignore[missing-attribute]
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channel < num_channels
    first, last = tl.load(indptr + row), tl.load(indptr + row + 1)
    best = tl.zeros([BLOCK_C], NUMBER)
    winner = tl.full([BLOCK_C], -1, tl.int32)
    for edge in range(first, last):
        source = tl.load(indices + edge)
        value = tl.load(x + source * num_channels + channel, mask=mask, other=0)
        is_better = (value > best) | ((value != value) & (best == best)) | (winner == -1)
        best = tl.where(is_better, value, best)
        winner = tl.where(is_better, source.to(tl.int32), winner)
    at = row * num_channels + channel
    tl.store(out + at, best, mask=mask)
    if winners is not None:
        tl.store(winners + at, winner, mask=mask)


@triton.jit
def _max_backward_kernel(
    indptr: tl.tensor, indices: tl.tensor, grad: tl.tensor, winners: tl.tensor, d_x: tl.tensor,
    num_channels: int, AT_ONCE: tl.constexpr, BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    """Sum the gradients of the targets that took their maximum from a source; rows are sources."""
    NUMBER: tl.constexpr = grad.dtype.element_ty  # pyrefly: ignore[missing-attribute]
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channel < num_channels
    first, last = tl.load(indptr + row), tl.load(indptr + row + 1)
    total = tl.zeros([BLOCK_C], NUMBER)
    for start in range(first, last, AT_ONCE):
        edge = start + tl.arange(0, AT_ONCE).to(tl.int64)
        target = tl.load(indices + edge, mask=edge < last, other=0)
        # An edge that is there more than once counts once.
        earlier = tl.load(indices + edge - 1, mask=(edge > first) & (edge < last), other=-1)
        is_edge = (edge < last) & (target != earlier)
        mask = is_edge[:, None] & is_channel[None, :]
        at = target[:, None] * num_channels + channel[None, :]
        is_own = tl.load(winners + at, mask=mask, other=-1) == row
        total += tl.sum(tl.load(grad + at, mask=mask & is_own, other=0), 0)
    tl.store(d_x + row * num_channels + channel, total, mask=is_channel)


@triton.jit
def _scores(
    scores: tl.tensor, indices: tl.tensor, of_sources: tl.tensor, of_target: tl.tensor,
    edge: tl.tensor, is_edge: tl.tensor, head: tl.tensor, SLOPE: tl.constexpr, HEADS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load or compute the scores of some edges for some heads; -inf where there are none."""
    mask = is_edge[:, None] & (head < HEADS)[None, :]  # pyrefly: ignore[bad-index]
    if of_sources is None:
        score = tl.load(scores + edge[:, None] * HEADS + head[None, :], mask=mask, other=0)
    else:
        source = tl.load(indices + edge, mask=is_edge, other=0)
        at = source[:, None] * HEADS + head[None, :]
        score = tl.load(of_sources + at, mask=mask, other=0) + of_target[None, :]
        score = tl.where(score > 0, score, score * SLOPE)
    return tl.where(mask, score, float("-inf"))


@triton.jit
def _softmax_kernel(
    indptr: tl.tensor, indices: tl.tensor, scores: tl.tensor, of_sources: tl.tensor,
    of_targets: tl.tensor, shares: tl.tensor,
    SLOPE: tl.constexpr, HEADS: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_H: tl.constexpr,
) -> None:  # fmt: skip
    """Take the softmax over the edges of a row, for BLOCK_H heads."""
    NUMBER: tl.constexpr = shares.dtype.element_ty  # pyrefly: ignore[missing-attribute]
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    first, last = tl.load(indptr + row), tl.load(indptr + row + 1)
    of_target = tl.zeros([BLOCK_H], NUMBER)
    if of_targets is not None:
        of_target = tl.load(of_targets + row * HEADS + head, mask=head < HEADS, other=0)
    top = tl.full([BLOCK_H], float("-inf"), NUMBER)
    for start in range(first, last, AT_ONCE):
        edge = start + tl.arange(0, AT_ONCE).to(tl.int64)
        score = _scores(
            scores, indices, of_sources, of_target, edge, edge < last, head, SLOPE, HEADS
        )
        top = tl.maximum(top, tl.max(score, 0))
    total = tl.zeros([BLOCK_H], NUMBER)
    for start in range(first, last, AT_ONCE):
        edge = start + tl.arange(0, AT_ONCE).to(tl.int64)
        score = _scores(
            scores, indices, of_sources, of_target, edge, edge < last, head, SLOPE, HEADS
        )
        total += tl.sum(tl.exp(score - top[None, :]), 0)
    for start in range(first, last, AT_ONCE):
        edge = start + tl.arange(0, AT_ONCE).to(tl.int64)
        score = _scores(
            scores, indices, of_sources, of_target, edge, edge < last, head, SLOPE, HEADS
        )
        mask = (edge < last)[:, None] & (head < HEADS)[None, :]
        share = tl.exp(score - top[None, :]) / total[None, :]
        tl.store(shares + edge[:, None] * HEADS + head[None, :], share, mask=mask)


@triton.jit
def _softmax_backward_kernel(
    indptr: tl.tensor, indices: tl.tensor, grad: tl.tensor, shares: tl.tensor,
    of_sources: tl.tensor, of_targets: tl.tensor, d_scores: tl.tensor, d_targets: tl.tensor,
    SLOPE: tl.constexpr, HEADS: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_H: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the gradients of the scores of a row, for BLOCK_H heads."""
    NUMBER: tl.constexpr = shares.dtype.element_ty  # pyrefly: ignore[missing-attribute]
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < HEADS
    first, last = tl.load(indptr + row), tl.load(indptr + row + 1)
    of_target = tl.zeros([BLOCK_H], NUMBER)
    if of_targets is not None:
        of_target = tl.load(of_targets + row * HEADS + head, mask=is_head, other=0)
    mean, total = tl.zeros([BLOCK_H], NUMBER), tl.zeros([BLOCK_H], NUMBER)
    for start in range(first, last, AT_ONCE):
        edge = start + tl.arange(0, AT_ONCE).to(tl.int64)
        mask = (edge < last)[:, None] & is_head[None, :]
        at = edge[:, None] * HEADS + head[None, :]
        share = tl.load(shares + at, mask=mask, other=0)
        mean += tl.sum(share * tl.load(grad + at, mask=mask, other=0), 0)
    for start in range(first, last, AT_ONCE):
        edge = start + tl.arange(0, AT_ONCE).to(tl.int64)
        mask = (edge < last)[:, None] & is_head[None, :]
        at = edge[:, None] * HEADS + head[None, :]
        share = tl.load(shares + at, mask=mask, other=0)
        d_score = share * (tl.load(grad + at, mask=mask, other=0) - mean[None, :])
        if of_sources is not None:
            source = tl.load(indices + edge, mask=edge < last, other=0)
            of_source = source[:, None] * HEADS + head[None, :]
            z = tl.load(of_sources + of_source, mask=mask, other=0) + of_target[None, :]
            d_score = tl.where(z > 0, d_score, d_score * SLOPE)
        total += tl.sum(tl.where(mask, d_score, 0.0), 0)
        tl.store(d_scores + at, d_score, mask=mask)
    if d_targets is not None:
        tl.store(d_targets + row * HEADS + head, total, mask=is_head)


@triton.jit
def _attention_backward_kernel(
    indptr: tl.tensor, indices: tl.tensor, edges: tl.tensor, shares: tl.tensor, grad: tl.tensor,
    x: tl.tensor, d_shares: tl.tensor, d_x: tl.tensor,
    HEADS: tl.constexpr, PER_HEAD: tl.constexpr, BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the gradients of a source's features, and of the shares of its edges, for a head."""
    NUMBER: tl.constexpr = x.dtype.element_ty  # pyrefly: ignore[missing-attribute]
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, BLOCK_C)
    mask = channel < PER_HEAD
    at = head * PER_HEAD + channel
    own = tl.load(x + row * HEADS * PER_HEAD + at, mask=mask, other=0)
    total = tl.zeros([BLOCK_C], NUMBER)
    for k in range(tl.load(indptr + row), tl.load(indptr + row + 1)):
        target, edge = tl.load(indices + k), tl.load(edges + k)
        d_y = tl.load(grad + target * HEADS * PER_HEAD + at, mask=mask, other=0)
        total += tl.load(shares + edge * HEADS + head) * d_y
        tl.store(d_shares + edge * HEADS + head, tl.sum(d_y * own, 0))
    tl.store(d_x + row * HEADS * PER_HEAD + at, total, mask=mask)


@triton.jit
def _pair_kernel(
    indptr: tl.tensor, indices: tl.tensor, left: tl.tensor, right: tl.tensor, weights: tl.tensor,
    scores: tl.tensor,
    SLOPE: tl.constexpr, HEADS: tl.constexpr, PER_HEAD: tl.constexpr, BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    """Score the edges of a row, for a head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, BLOCK_C)
    mask = channel < PER_HEAD
    at = head * PER_HEAD + channel
    own = tl.load(right + row * HEADS * PER_HEAD + at, mask=mask, other=0)
    weight = tl.load(weights + at, mask=mask, other=0)
    for edge in range(tl.load(indptr + row), tl.load(indptr + row + 1)):
        source = tl.load(indices + edge)
        z = own + tl.load(left + source * HEADS * PER_HEAD + at, mask=mask, other=0)
        score = tl.sum(weight * tl.where(z > 0, z, z * SLOPE), 0)
        tl.store(scores + edge * HEADS + head, score)


@triton.jit
def _pair_backward_kernel(
    indptr: tl.tensor, indices: tl.tensor, edges: tl.tensor, grad: tl.tensor, own: tl.tensor,
    others: tl.tensor, weights: tl.tensor, d_own: tl.tensor, d_weights: tl.tensor,
    SLOPE: tl.constexpr, HEADS: tl.constexpr, PER_HEAD: tl.constexpr, BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the gradients of a row's own features and of its part of the weights, for a head."""
    NUMBER: tl.constexpr = own.dtype.element_ty  # pyrefly: ignore[missing-attribute]
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, BLOCK_C)
    mask = channel < PER_HEAD
    at = head * PER_HEAD + channel
    mine = tl.load(own + row * HEADS * PER_HEAD + at, mask=mask, other=0)
    weight = tl.load(weights + at, mask=mask, other=0)
    total, of_weights = tl.zeros([BLOCK_C], NUMBER), tl.zeros([BLOCK_C], NUMBER)
    for k in range(tl.load(indptr + row), tl.load(indptr + row + 1)):
        edge = k
        if edges is not None:
            edge = tl.load(edges + k)
        other = tl.load(indices + k) * HEADS * PER_HEAD + at
        z = mine + tl.load(others + other, mask=mask, other=0)
        d_score = tl.load(grad + edge * HEADS + head)
        d_z = tl.where(z > 0, d_score, d_score * SLOPE)
        total += d_z * weight
        of_weights += d_z * z
    tl.store(d_own + row * HEADS * PER_HEAD + at, total, mask=mask)
    if d_weights is not None:
        tl.store(d_weights + row * HEADS * PER_HEAD + at, of_weights, mask=mask)


def row_sums(
    adjacency: Adjacency,
    x: Tensor,
    factors: Factors,
    added: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Sum what edges bring; see `native.row_sums`."""
    num_channels, of_edges = x.shape[1], factors.of_edges
    y = x.new_empty(adjacency.num_targets, num_channels) if out is None else out
    heads = 1 if of_edges is None or of_edges.dim() == 1 else of_edges.shape[1]
    of_added = 0 if added is None or added.dim() == 1 else added.stride(0)
    block, at_once = _tile(num_channels)
    launch(
        _sum_kernel,
        (adjacency.num_targets, triton.cdiv(num_channels, block)),
        (adjacency.indptr, adjacency.indices, *factors, x, added, y),
        (num_channels, x.stride(0), of_added, y.stride(0)),
        (heads, max(1, num_channels // heads), at_once, block),
    )
    return y


def maxima(adjacency: Adjacency, x: Tensor, has_backward: bool) -> tuple[Tensor, Tensor]:
    """Take the maxima of what edges bring; see `native.maxima`."""
    y = x.new_empty(adjacency.num_targets, x.shape[1])
    winners = torch.empty(y.shape if has_backward else (0,), dtype=torch.int32, device=x.device)
    block, _ = _tile(x.shape[1])
    launch(
        _max_kernel,
        (adjacency.num_targets, triton.cdiv(x.shape[1], block)),
        (adjacency.indptr, adjacency.indices, x, y, winners if has_backward else None),
        (x.shape[1],),
        (block,),
    )
    return y, winners


def maxima_backward(adjacency: Adjacency, grad: Tensor, winners: Tensor) -> Tensor:
    """Compute the gradient of `maxima`; see `native.maxima_backward`."""
    d_x, turned = grad.new_empty(adjacency.num_sources, grad.shape[1]), adjacency.transposed
    block, at_once = _tile(grad.shape[1])
    launch(
        _max_backward_kernel,
        (adjacency.num_sources, triton.cdiv(grad.shape[1], block)),
        (turned.indptr, turned.indices, grad, winners, d_x),
        (grad.shape[1],),
        (at_once, block),
    )
    return d_x


def edge_softmax(adjacency: Adjacency, scores: Tensor | Ends) -> Tensor:
    """Take the softmax of scores; see `native.edge_softmax`."""
    if isinstance(scores, Ends):
        given, tensors, slope = scores.of_sources, (None, *scores[:2]), scores.slope
    else:
        given, tensors, slope = scores, (scores, None, None), 0.0
    heads = given.shape[1]
    shares = given.new_empty(adjacency.num_edges, heads)
    block, at_once = _tile(heads, most=32)
    launch(
        _softmax_kernel,
        (adjacency.num_targets, triton.cdiv(heads, block)),
        (adjacency.indptr, adjacency.indices, *tensors, shares),
        (),
        (slope, heads, at_once, block),
    )
    return shares


def edge_softmax_backward(
    adjacency: Adjacency, grad: Tensor, shares: Tensor, ends: Ends | None
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of `edge_softmax`; see `native.edge_softmax_backward`."""
    d_scores, heads = torch.empty_like(shares), shares.shape[1]
    of_sources, of_targets, slope = (None, None, 0.0) if ends is None else ends
    d_targets = None if of_targets is None else torch.empty_like(of_targets)
    block, at_once = _tile(heads, most=32)
    edges = adjacency.indptr, adjacency.indices
    launch(
        _softmax_backward_kernel,
        (adjacency.num_targets, triton.cdiv(heads, block)),
        (*edges, grad, shares, of_sources, of_targets, d_scores, d_targets),
        (),
        (slope, heads, at_once, block),
    )
    return d_scores, d_targets


def attention_backward(
    adjacency: Adjacency, shares: Tensor, grad: Tensor, x: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of an attention sum; see `native.attention_backward`."""
    turned, edges = adjacency.transposed, adjacency.turned_edges
    d_shares, d_x, heads = torch.empty_like(shares), torch.empty_like(x), shares.shape[1]
    launch(
        _attention_backward_kernel,
        (adjacency.num_sources, heads),
        (turned.indptr, turned.indices, edges, shares, grad, x, d_shares, d_x),
        (),
        _per_head(heads, x.shape[1] // heads),
    )
    return d_shares, d_x


def pair_scores(
    adjacency: Adjacency, left: Tensor, right: Tensor, weights: Tensor, slope: float
) -> Tensor:
    """Score edges; see `native.pair_scores`."""
    scores = left.new_empty(adjacency.num_edges, len(weights))
    launch(
        _pair_kernel,
        (adjacency.num_targets, len(weights)),
        (adjacency.indptr, adjacency.indices, left, right, weights, scores),
        (),
        (slope, *_per_head(*weights.shape)),
    )
    return scores


def pair_scores_backward(
    adjacency: Adjacency, grad: Tensor, left: Tensor, right: Tensor, weights: Tensor, slope: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of `pair_scores`; see `native.pair_scores_backward`."""
    d_left, d_right, d_rows = (torch.empty_like(t) for t in (left, right, right))
    turned, edges = adjacency.transposed, adjacency.turned_edges
    for graph, order, inputs, outputs in (
        (turned, edges, (left, right), (d_left, None)),
        (adjacency, None, (right, left), (d_right, d_rows)),
    ):
        launch(
            _pair_backward_kernel,
            (graph.num_targets, len(weights)),
            (graph.indptr, graph.indices, order, grad, *inputs, weights, *outputs),
            (),
            (slope, *_per_head(*weights.shape)),
        )
    return d_left, d_right, d_rows.sum(0).view(weights.shape)


def _tile(num_columns: int, most: int = 128) -> tuple[int, int]:
    """Choose how many columns a program has, and how many edges it takes at a time."""
    block = min(most, max(1, triton.next_power_of_2(num_columns)))
    return block, max(1, min(16, 512 // block))


def _per_head(heads: int, per_head: int) -> tuple[int, int, int]:
    return heads, per_head, triton.next_power_of_2(max(1, per_head))
