"""Triton kernels for kNN graph and aggregation, each in one pass over memory.

The graph is made without a (B, N, M) tensor of distances, the aggregate without a (B, N, K, C)
tensor of neighbours. B is the number of images, N of nodes, M of candidates, K of neighbours and C
of channels. Kernels take flat contiguous tensors and use 64-bit row indices, because B * N * M can
exceed 2^31.

A kernel cannot raise without making the host wait for it. So an index that no candidate has, or a
winner that no neighbour has, is never used for an access. It stands for NaN instead, in the forward
and in the node's own gradient, and the step's check of its numbers ends the run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vigpipe.ops.native import empty_aggregate
from vigpipe.ops.plain import candidates_of


@triton.jit
def _offsets(row: tl.tensor, is_row: tl.tensor, channel: tl.tensor, num_channels: int) -> tuple:
    """Return the offsets of a tile in a table of num_channels columns, and which are inside it."""
    at = row[:, None] * num_channels + channel[None, :]
    return at, is_row[:, None] & (channel < num_channels)[None, :]  # pyrefly: ignore[bad-index]


@triton.jit
def _neighbour(graph: tl.tensor, at: tl.tensor, mask: tl.tensor, num_candidates: int) -> tuple:
    """Load indices of neighbours; return them, and which of those in the mask a candidate has."""
    index = tl.load(graph + at, mask=mask, other=-1)
    return index, (index >= 0) & (index < num_candidates)


@triton.jit
def _lengths_kernel(
    x: tl.tensor, scales: tl.tensor, squares: tl.tensor, num_rows: int, num_channels: int,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    """Find what scales rows to unit length, and their squared lengths then.

    A row whose length is not finite has the scale 0 and the square inf.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at, mask = _offsets(row, row < num_rows, tl.arange(0, BLOCK_C), num_channels)
    value = tl.load(x + at, mask=mask, other=0).to(tl.float32)
    norm = tl.sqrt_rn(tl.sum(value * value, 1))
    is_finite = norm < float("inf")  # false for NaN too
    norm = tl.where(norm < 1e-12, 1e-12, norm)
    value = tl.where(is_finite[:, None], tl.div_rn(value, norm[:, None]), 0.0)
    tl.store(scales + row, tl.where(is_finite, 1.0 / norm, 0.0), mask=row < num_rows)
    square = tl.where(is_finite, tl.sum(value * value, 1), float("inf"))
    tl.store(squares + row, square, mask=row < num_rows)


@triton.jit
def _knn_kernel(
    x: tl.tensor, y: tl.tensor, scales: tl.tensor, other_scales: tl.tensor, squares: tl.tensor,
    bias: tl.tensor, graph: tl.tensor,
    num_nodes: int, num_candidates: int, num_channels: int, num_biases: int, k: int, dilation: int,
    LOOP: tl.constexpr, TOP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Go through one image's candidates in tiles, keeping the TOP nearest of ROWS of its nodes.

    A key is the bits of a float32 nearness, as an integer of the same order, above the negated
    index: of equally near candidates the one with the lowest index has the largest key.
    """
    num_tiles = (num_nodes + ROWS - 1) // ROWS
    image = (tl.program_id(0) // num_tiles).to(tl.int64)
    row = (tl.program_id(0) % num_tiles) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_nodes
    node = image * num_nodes + row
    scale = tl.load(scales + node, mask=is_row, other=0)[:, None]
    best = tl.full([ROWS, TOP], -(2**63), tl.int64)  # the nearest comes last
    for start in range(0, num_candidates, BLOCK_M):
        column = start + tl.arange(0, BLOCK_M)
        is_column = column < num_candidates
        other = image * num_candidates + column
        dots = tl.zeros([ROWS, BLOCK_M], tl.float32)
        for first in range(0, num_channels, BLOCK_C):
            channel = first + tl.arange(0, BLOCK_C)
            at, mask = _offsets(node, is_row, channel, num_channels)
            nodes = tl.load(x + at, mask=mask, other=0)
            at, mask = _offsets(other, is_column, channel, num_channels)
            others = tl.load(y + at, mask=mask, other=0)
            dots = tl.dot(nodes, tl.trans(others), dots, input_precision=PRECISION)
        other_scale = tl.load(other_scales + other, mask=is_column, other=0)[None, :]
        # Lengths that are not finite have the scale 0, and products with them are NaN.
        dots = tl.where((scale > 0) & (other_scale > 0), dots * scale * other_scale, 0.0)
        nearness = 2.0 * dots - tl.load(squares + other, mask=is_column, other=0)[None, :]
        if bias is not None:
            at = (image % num_biases * num_nodes + row)[:, None] * num_candidates + column[None, :]
            nearness -= tl.load(bias + at, mask=is_row[:, None] & is_column[None, :], other=0)
        if not LOOP:
            nearness = tl.where(row[:, None] == column[None, :], float("-inf"), nearness)
        nearness = tl.where(nearness == 0, 0.0, nearness)  # turns -0 into 0
        bits = nearness.to(tl.int32, bitcast=True)
        order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32
        keys = order | (num_candidates - 1 - column).to(tl.int64)[None, :]
        keys = tl.where(is_column[None, :], keys, -(2**63))
        # The pairwise maxima of an ascending and a descending row are the largest numbers of both,
        # and form a bitonic row.
        best = tl.bitonic_merge(tl.maximum(best, tl.topk(keys, TOP)))
    rank = TOP - 1 - tl.arange(0, TOP)
    is_kept = (rank % dilation == 0) & (rank < k * dilation)
    at = node[:, None] * k + (rank // dilation)[None, :]
    index = num_candidates - 1 - (best & 0xFFFFFFFF)
    tl.store(graph + at, index, mask=is_row[:, None] & is_kept[None, :])


@triton.jit
def _aggregate_kernel(
    y: tl.tensor, x: tl.tensor, graph: tl.tensor, weights: tl.tensor,
    out: tl.tensor, winners: tl.tensor,
    num_rows: int, num_nodes: int, num_candidates: int, num_channels: int,
    K: tl.constexpr, MODE: tl.constexpr, WITH_SELF: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    """Reduce the neighbours of ROWS nodes over BLOCK_C channels.

    WITH_SELF makes the node itself the first output.
    """
    dtype: tl.constexpr = y.dtype.element_ty  # pyrefly: ignore[missing-attribute]
    NUMBER: tl.constexpr = tl.constexpr(tl.float64 if dtype == tl.float64 else tl.float32)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_row = row < num_rows
    at, mask = _offsets(row, is_row, channel, num_channels)
    base = row // num_nodes * num_candidates
    best = tl.full([ROWS, BLOCK_C], float("-inf"), NUMBER)
    winner = tl.zeros([ROWS, BLOCK_C], tl.int32)
    total = tl.zeros([ROWS, BLOCK_C], NUMBER)
    for j in range(K):
        index, is_index = _neighbour(graph, row * K + j, is_row, num_candidates)
        other_at, inside = _offsets(base + index, is_index, channel, num_channels)
        value = tl.load(y + other_at, mask=inside, other=float("nan")).to(NUMBER)
        if MODE == "max" or MODE == "max_mean":
            is_better = (value > best) | ((value != value) & (best == best))  # NaN wins
            best = tl.where(is_better, value, best)
            winner = tl.where(is_better, j, winner)
        if weights is not None:
            value *= tl.load(weights + row * K + j, mask=is_row, other=0).to(NUMBER)[:, None]
        total += value
    own = tl.zeros([ROWS, BLOCK_C], NUMBER)
    if x is not None:
        own = tl.load(x + at, mask=mask, other=0).to(NUMBER)
    if winners is not None:
        tl.store(winners + at, winner.to(tl.uint8), mask=mask)
    output = best - own if MODE == "max" else total if MODE == "sum" else total / K - own
    if MODE == "max_mean" and WITH_SELF:
        tl.store(out + at * 3, own, mask=mask)
        tl.store(out + at * 3 + 1, best - own, mask=mask)
        tl.store(out + at * 3 + 2, output, mask=mask)
    elif MODE == "max_mean" or WITH_SELF:
        pair = tl.join(own if WITH_SELF else best - own, output)  # so a store has no gaps
        pair_at = at[:, :, None] * 2 + tl.arange(0, 2)[None, None, :]
        tl.store(out + pair_at, pair, mask=mask[:, :, None])
    else:
        tl.store(out + at, output, mask=mask)


@triton.jit
def _own_gradient(
    grad: tl.tensor, graph: tl.tensor, winners: tl.tensor, row: tl.tensor, channel: tl.tensor,
    num_rows: int, num_candidates: int, num_channels: int,
    K: tl.constexpr, MODE: tl.constexpr, WITH_SELF: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return what x_i in a tile of outputs adds to the gradients of nodes, NaN for a bad index."""
    dtype: tl.constexpr = grad.dtype.element_ty  # pyrefly: ignore[missing-attribute]
    NUMBER: tl.constexpr = tl.constexpr(tl.float64 if dtype == tl.float64 else tl.float32)
    OUTPUTS: tl.constexpr = WITH_SELF + (2 if MODE == "max_mean" else 1)
    is_row = row < num_rows
    at, mask = _offsets(row, is_row, channel, num_channels)  # pyrefly: ignore[bad-argument-type]
    own = tl.zeros(at.shape, NUMBER)
    if MODE != "sum":
        own -= tl.load(grad + at * OUTPUTS + WITH_SELF, mask=mask, other=0).to(NUMBER)
    if MODE == "max_mean":
        own -= tl.load(grad + at * OUTPUTS + WITH_SELF + 1, mask=mask, other=0).to(NUMBER)
    if MODE == "max" or MODE == "max_mean":
        winner = tl.load(winners + at, mask=mask, other=0).to(tl.int64)
        winner_at = row[:, None] * K + winner
        _chosen, is_chosen = _neighbour(graph, winner_at, mask & (winner < K), num_candidates)
        own = tl.where(is_chosen, own, float("nan"))
    if MODE != "max":
        for j in range(K):
            _index, is_index = _neighbour(graph, row * K + j, is_row, num_candidates)  # pyrefly: ignore[bad-argument-type]
            own = tl.where(is_index[:, None], own, float("nan"))
    if WITH_SELF:
        own += tl.load(grad + at * OUTPUTS, mask=mask, other=0).to(NUMBER)
    return own


@triton.jit
def _nodes_kernel(
    grad: tl.tensor, graph: tl.tensor, winners: tl.tensor, grad_x: tl.tensor,
    num_rows: int, num_candidates: int, num_channels: int,
    K: tl.constexpr, MODE: tl.constexpr, WITH_SELF: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradients of nodes that are no candidates."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    own = _own_gradient(
        grad, graph, winners, row, channel, num_rows, num_candidates, num_channels,
        K, MODE, WITH_SELF,
    )  # fmt: skip
    at, mask = _offsets(row, row < num_rows, channel, num_channels)
    tl.store(grad_x + at, own, mask=mask)


@triton.jit
def _candidates_kernel(
    grad: tl.tensor, graph: tl.tensor, weights: tl.tensor, winners: tl.tensor,
    edges: tl.tensor, starts: tl.tensor, grad_y: tl.tensor,
    num_rows: int, num_nodes: int, num_candidates: int, num_channels: int,
    K: tl.constexpr, MODE: tl.constexpr, WITH_SELF: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, EDGES: tl.constexpr, BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    """Sum, for ROWS candidates, what the edges from each bring, EDGES at a time, in their order.

    If SHARED, the candidates are the nodes, and their gradients as nodes are added.
    """
    dtype: tl.constexpr = grad.dtype.element_ty  # pyrefly: ignore[missing-attribute]
    NUMBER: tl.constexpr = tl.constexpr(tl.float64 if dtype == tl.float64 else tl.float32)
    OUTPUTS: tl.constexpr = WITH_SELF + (2 if MODE == "max_mean" else 1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_row = row < num_rows
    image = row // num_candidates
    first = tl.load(starts + row + image, mask=is_row, other=0)
    last = tl.load(starts + row + image + 1, mask=is_row, other=0)
    total = tl.zeros([ROWS, BLOCK_C], NUMBER)
    most = tl.max(last - first, 0)
    for step in range(0, most, EDGES):  # pyrefly: ignore[bad-argument-type]
        position = (first + step)[:, None] + tl.arange(0, EDGES)[None, :]
        is_edge = position < last[:, None]
        edge = tl.load(edges + (image * num_nodes * K)[:, None] + position, mask=is_edge, other=0)
        node = (image * num_nodes)[:, None] + edge // K
        at = node[:, :, None] * num_channels + channel[None, None, :]
        mask = is_edge[:, :, None] & (channel < num_channels)[None, None, :]
        value = tl.zeros([ROWS, EDGES, BLOCK_C], NUMBER)
        if MODE == "max" or MODE == "max_mean":
            is_winner = tl.load(winners + at, mask=mask, other=K) == (edge % K)[:, :, None]
            value += tl.load(grad + at * OUTPUTS + WITH_SELF, mask=mask & is_winner, other=0)
        if MODE != "max":
            share = tl.load(grad + at * OUTPUTS + OUTPUTS - 1, mask=mask, other=0).to(NUMBER)
            if MODE != "sum":
                share /= K
            if weights is not None:
                weight = tl.load(weights + node * K + edge % K, mask=is_edge, other=0).to(NUMBER)
                share *= weight[:, :, None]
            value += share
        total += tl.sum(value, 1)
    if SHARED:
        total += _own_gradient(
            grad, graph, winners, row, channel, num_rows, num_candidates, num_channels,
            K, MODE, WITH_SELF,
        )  # fmt: skip
    at, inside = _offsets(row, is_row, channel, num_channels)
    tl.store(grad_y + at, total, mask=inside)


@triton.jit
def _weights_kernel(
    y: tl.tensor, grad: tl.tensor, graph: tl.tensor, grad_weights: tl.tensor,
    num_rows: int, num_nodes: int, num_candidates: int, num_channels: int,
    K: tl.constexpr, WITH_SELF: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradients of a sum's weights: products of its gradient with the neighbours."""
    dtype: tl.constexpr = grad.dtype.element_ty  # pyrefly: ignore[missing-attribute]
    NUMBER: tl.constexpr = tl.constexpr(tl.float64 if dtype == tl.float64 else tl.float32)
    OUTPUTS: tl.constexpr = WITH_SELF + 1
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    for j in range(K):
        index, is_index = _neighbour(graph, row * K + j, is_row, num_candidates)
        other = row // num_nodes * num_candidates + index
        dot = tl.zeros([ROWS], NUMBER)
        for start in range(0, num_channels, BLOCK_C):
            channel = start + tl.arange(0, BLOCK_C)
            at, mask = _offsets(row, is_row, channel, num_channels)
            output = tl.load(grad + at * OUTPUTS + WITH_SELF, mask=mask, other=0).to(NUMBER)
            other_at, inside = _offsets(other, is_index, channel, num_channels)
            dot += tl.sum(output * tl.load(y + other_at, mask=inside, other=0).to(NUMBER), 1)
        tl.store(grad_weights + row * K + j, tl.where(is_index, dot, float("nan")), mask=is_row)


def knn(
    x: Tensor, y: Tensor | None, bias: Tensor | None, k: int, dilation: int, loop: bool
) -> Tensor:
    """Index the k nearest neighbours of every node, nearest first; see `vigpipe.ops.knn`."""
    if torch.float64 in (x.dtype, x.dtype if y is None else y.dtype):
        raise NotImplementedError("kNN graph: the kernel takes distances in float32, not float64")
    num_images, num_nodes, num_channels = x.shape
    scales, squares = _lengths(x)
    other_scales, squares = (scales, squares) if y is None else _lengths(y)
    dtype = x.dtype if y is None else torch.promote_types(x.dtype, y.dtype)
    nodes = x.to(dtype)
    others = nodes if y is None else y.to(dtype)
    graph = torch.empty(num_images, num_nodes, k, dtype=torch.int64, device=x.device)
    top = max(16, triton.next_power_of_2((k - 1) * dilation + 1))
    rows, columns, channels, precision, warps = _searching(dtype, top, multiplies_tf32(x.device))
    launch(
        _knn_kernel,
        (num_images * triton.cdiv(num_nodes, rows),),
        (nodes, others, scales, other_scales, squares, bias, graph),
        (num_nodes, others.shape[1], num_channels, 1 if bias is None else len(bias), k, dilation),
        (loop, top, rows, columns, channels, precision),
        num_warps=warps,
    )
    return graph


def multiplies_tf32(device: torch.device) -> bool:
    """Tell whether a device multiplies TF32 and bfloat16, as GPUs do since the A100."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def _searching(dtype: torch.dtype, top: int, has_tf32: bool) -> tuple[int, int, int, str, int]:
    """Choose how the nearest are found: a tile's rows, columns, channels; precision; warps.

    Products of float32 are three of TF32 each, which together round as float32 does.
    """
    precision = "tf32x3" if dtype == torch.float32 and has_tf32 else "ieee"
    if top <= 64 and has_tf32:  # each warp has 16 rows of its own, and shares no keys
        return 64, 64, 32 if dtype == torch.float32 else 64, precision, 4
    rows = 32 if top <= 32 else 16  # so that the keys of a tile stay in registers
    return rows, max(64, top), 32, precision, 8 if top > 128 else 4


def aggregate(
    x: Tensor | None, y: Tensor | None, graph: Tensor, weights: Tensor | None,
    mode: str, interleave: bool, has_backward: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Reduce the features of every node's neighbours; see `native.aggregate`."""
    others = candidates_of(x, y)
    out, winners = empty_aggregate(others, graph, mode, interleave, has_backward)
    grid, sizes, tile = _tiling(graph, others)
    tensors = (others, x, graph, weights, out, winners if winners.numel() else None)
    launch(_aggregate_kernel, grid, tensors, sizes, (graph.shape[2], mode, interleave, *tile))
    return out, winners


def aggregate_backward(
    grad: Tensor, x: Tensor | None, y: Tensor | None, graph: Tensor, winners: Tensor,
    weights: Tensor | None, mode: str, interleave: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Compute the gradients of `aggregate`; see `native.aggregate_backward`.

    They are summed in float32 (float64 if y is), in an order that depends on the graph alone. So
    the bits are the same in every run. Values of x and y are read only for the gradient of the
    weights.
    """
    others = candidates_of(x, y)
    constants = (graph.shape[2], mode, interleave)
    grid, sizes, tile = _tiling(graph, others)
    grad_x = grad_weights = None
    if x is not None and y is not None:
        grad_x = x.new_empty(x.shape)
        outer = sizes[0], *sizes[2:]
        launch(_nodes_kernel, grid, (grad, graph, winners, grad_x), outer, (*constants, *tile))
    if weights is not None:
        grad_weights = weights.new_empty(weights.shape)
        launch(
            _weights_kernel, grid[:1], (others, grad, graph, grad_weights),
            sizes, (graph.shape[2], interleave, *tile),
        )  # fmt: skip
    grad_y = others.new_empty(others.shape)
    edges, starts = _edges_by_candidate(graph, others.shape[1])
    rows, at_once, block, warps = _gathering(graph, others)
    num_rows = len(others) * others.shape[1]
    launch(
        _candidates_kernel,
        (triton.cdiv(num_rows, rows), triton.cdiv(others.shape[2], block)),
        (grad, graph, weights, winners, edges, starts, grad_y),
        (num_rows, *sizes[1:]),
        (*constants, y is None, rows, at_once, block),
        num_warps=warps,
    )
    return (grad_y, None, grad_weights) if y is None else (grad_x, grad_y, grad_weights)


def _edges_by_candidate(graph: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    """Sort each image's edges by the candidate that they come from, and keep their order otherwise.

    The sorted edges, (B, N * K) int64, have the numbers n * K + k; those of each candidate begin
    and end at (B, M + 1) int64.
    """
    candidates, edges = graph.flatten(1).clamp(-1, num_candidates).to(torch.int32).sort(stable=True)
    numbers = torch.arange(num_candidates + 1, dtype=torch.int32, device=graph.device)
    return edges, torch.searchsorted(candidates, numbers.repeat(len(graph), 1))


def _gathering(graph: Tensor, others: Tensor) -> tuple[int, int, int, int]:
    """Choose how gradients are gathered: rows, edges and channels at a time, and warps."""
    block = min(128, max(16, triton.next_power_of_2(others.shape[2])))
    if graph.shape[1] <= others.shape[1]:  # few edges come from each candidate
        return 512 // block, 1, block, 1
    return 1, 1024 // block, block, 4


def _lengths(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what scales nodes (B, N, C) to unit length, and their squares then: (B, N) float32."""
    scales = x.new_empty(x.shape[:2], dtype=torch.float32)
    squares = torch.empty_like(scales)
    block = triton.next_power_of_2(x.shape[2])
    rows = max(1, 1024 // block)
    sizes = (squares.numel(), x.shape[2])
    launch(
        _lengths_kernel, (triton.cdiv(sizes[0], rows),), (x, scales, squares), sizes, (rows, block)
    )
    return scales, squares


def _tiling(graph: Tensor, others: Tensor) -> tuple[tuple[int, ...], ...]:
    """Choose the launch grid, the sizes and the tile for aggregates of (B, N, K) over (B, M, C)."""
    (num_images, num_nodes, _), (_, num_candidates, num_channels) = graph.shape, others.shape
    num_rows = num_images * num_nodes
    block = min(128, max(16, triton.next_power_of_2(num_channels)))
    rows = 1024 // block  # 8 numbers per thread of 4 warps
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_channels, block))
    return grid, (num_rows, num_nodes, num_candidates, num_channels), (rows, block)


def launch(
    kernel: triton.JITFunction, grid: tuple[int, ...], tensors: tuple[Tensor | None, ...],
    sizes: tuple[int, ...], constants: tuple[int | float | str, ...], num_warps: int = 4,
    *, strided: bool = False,
) -> None:  # fmt: skip
    """Run a kernel on the device of its tensors, unless the grid is empty.

    Tensors are made contiguous first, except for a kernel that takes them as they are (`strided`).
    """
    if min(grid) > 0:
        flat = [t if t is None or strided else t.contiguous() for t in tensors]
        with torch.cuda.device_of(flat[0]):
            # Triton 3.9 warns unless told whether to fuse multiplications and additions.
            kernel[grid](*flat, *sizes, *constants, num_warps=num_warps, enable_fp_fusion=True)
