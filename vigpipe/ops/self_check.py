"""Compare the Triton operators with plain torch, once on every kind of GPU, before they serve.

A kernel that was never run on a GPU like this one may be compiled wrongly, or not at all. The
comparison takes small inputs: sizes that fill no tile, many ties, all dtypes. Graphs must be equal,
because the features have lengths that make all arithmetic exact; numbers must be within rounding.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from vigpipe.messages import one_line, tell
from vigpipe.ops import plain
from vigpipe.ops.adjacency import Adjacency, Ends, Factors
from vigpipe.ops.csr import plain as plain_csr

# Allowed differences of numbers near 1.
_ROUNDING = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
_problems: dict[tuple[str, str], str] = {}  # results of `problem` by operator and kind of device


def kind_of(device: torch.device) -> str:
    """Name the kind of a device, which decides what Triton compiles for it."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}"


def problem(name: str, device: torch.device) -> str:
    """Run an operator of `ON_GPU` on a device, unless one of its kind ran it before, and compare.

    It runs in a thread of its own, which no mode of the caller's reaches: autocast, inference, or
    a compiler that traces. The expected results are computed on the CPU. What is wrong is told on
    stderr and returned, in a sentence; it is empty if all is equal.
    """
    key = name, kind_of(device)
    if key not in _problems:
        check = {"knn": _check_knn, "aggregate": _check_aggregate, "csr": _check_csr}[name]
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(_found, check, device).result()
        if found:
            found = one_line(f"the Triton operator {name} {found} on {device} ({key[1]})")
            tell(f"{found}; the plain operators serve, which are slower")
        _problems[key] = found
    return _problems[key]


def _found(check: Callable[[torch.device], str], device: torch.device) -> str:
    try:
        wrong = check(device)
    except Exception as error:  # any compiler, assembler or driver may raise its own
        return f"fails with {type(error).__name__}: {error}"
    return f"differs from plain torch ({wrong})" if wrong else ""


def _check_knn(device: torch.device) -> str:
    from vigpipe.ops import gpu

    draw = torch.Generator().manual_seed(0)
    x, y = _exact(draw, 2, 37, 20), _exact(draw, 2, 49, 20)
    bias = torch.randint(-8, 8, (1, 37, 49), generator=draw, device="cpu").float() / 8
    cases: dict[str, tuple[Any, ...]] = {
        "float32": (x, None, None, 9, 2, True),
        "float32 with a bias": (x, y, bias, 9, 3, True),
        "float16": (x.half(), y.half(), None, 9, 1, True),
        "bfloat16": (x.bfloat16(), None, None, 7, 5, False),
    }
    for name, arguments in cases.items():
        got = gpu.knn(*_on(device, arguments))
        if not torch.equal(got.cpu(), plain.knn(*arguments)):
            return name
    return ""


def _check_aggregate(device: torch.device) -> str:
    from vigpipe.ops import gpu

    for mode, interleave, x, y, graph, weights in _aggregate_cases():
        dtype = x.dtype
        wide = [None if t is None else t.detach().float().requires_grad_() for t in (x, y, weights)]
        want = plain.aggregate(wide[0], wide[1], graph, wide[2], mode, interleave)
        # Whole numbers, whose sums are exact in any order.
        grad = (torch.arange(want.numel(), device="cpu") % 5 - 2).view(want.shape).float()
        want.backward(grad)
        here = _on(device, (x, y, graph, weights, mode, interleave))
        out, winners = gpu.aggregate(*here, has_backward=True)
        here.insert(3, winners)
        got = gpu.aggregate_backward(grad.to(device, dtype), *here)
        expected = [want.detach(), *(None if t is None else t.grad for t in wide)]
        names = ("the outputs", "the nodes' gradient", "the candidates'", "the weights'")
        for name, actual, value in zip(names, (out, *got), expected, strict=True):
            if value is not None and not _is_close(actual, value, _ROUNDING[dtype]):
                return f"{name} of {mode} in {str(dtype).removeprefix('torch.')}"
    return ""


def _check_csr(device: torch.device) -> str:
    from vigpipe.ops.csr import gpu

    for name, arguments in csr_cases():
        want = getattr(plain_csr, name)(*arguments)
        got = getattr(gpu, name)(*_on(device, arguments))
        pairs = zip(*((t if isinstance(t, tuple) else (t,)) for t in (got, want)), strict=True)
        for actual, expected in pairs:
            if expected is not None and not _is_close(actual, expected.float(), 1e-5):
                return name
    return ""


def csr_cases(channels: int = 20, heads: int = 2) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Names and arguments of the kernels, on a graph with empty rows and a row of many edges."""
    draw = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, generator=draw, device="cpu").float() / 4

    targets, per_head = 37, channels // heads
    lengths = [0, 45, *(i % 7 for i in range(targets - 3)), 0]
    rows = [sorted(set(torch.randint(49, (n,), generator=draw).tolist())) for n in lengths]
    indptr = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    graph = Adjacency(indptr, torch.tensor([j for row in rows for j in row]), 49)
    x, d_y, edges = numbers(49, channels), numbers(targets, channels), graph.num_edges
    weights, shares = numbers(edges), numbers(edges, heads)
    ends = Ends(numbers(49, heads), numbers(targets, heads), 0.2)
    of_heads = numbers(heads, per_head)
    yield "row_sums", (graph, x, Factors())
    yield "row_sums", (graph, x, Factors(weights, numbers(49), numbers(targets)), numbers(channels))
    yield "row_sums", (graph, x, Factors(shares), d_y)
    yield "maxima", (graph, x, True)
    yield "maxima_backward", (graph, d_y, plain_csr.maxima(graph, x, True)[1])
    yield "edge_softmax", (graph, shares)
    yield "edge_softmax", (graph, ends)
    yield "edge_softmax_backward", (graph, numbers(edges, heads), shares, None)
    yield "edge_softmax_backward", (graph, numbers(edges, heads), shares, ends)
    yield "attention_backward", (graph, shares, d_y, x)
    yield "pair_scores", (graph, x, d_y, of_heads, 0.2)
    yield "pair_scores_backward", (graph, shares, x, d_y, of_heads, 0.2)


def _aggregate_cases() -> Iterator[tuple[str, bool, Tensor, Tensor | None, Tensor, Tensor | None]]:
    """Small whole numbers, in which ties abound: mode, interleave, x, y, graph and weights."""
    draw = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, generator=draw, device="cpu").float()

    for mode, interleave, dtype, num_candidates in (
        ("max", True, torch.float32, None),
        ("max", True, torch.bfloat16, 49),
        ("max", False, torch.float16, 49),
        ("max_mean", True, torch.float32, 49),
        ("mean", False, torch.bfloat16, None),
        ("sum", False, torch.float32, 49),
    ):
        x = numbers(2, 37, 20).to(dtype)
        y = None if num_candidates is None else numbers(2, num_candidates, 20).to(dtype)
        graph = torch.randint(num_candidates or 37, (2, 37, 9), generator=draw, device="cpu")
        yield mode, interleave, x, y, graph, numbers(2, 37, 9) if mode == "sum" else None


def _exact(draw: torch.Generator, *shape: int) -> Tensor:
    """Draw vectors of ones and minus ones, of length 0, 1, 2 or 4: (B, N, C)."""
    sizes = torch.tensor([0, 1, 4, 16], device="cpu")
    size = sizes[torch.randint(4, shape[:2], generator=draw, device="cpu")]
    order = torch.rand(shape, generator=draw, device="cpu").argsort(-1)
    sign = torch.randint(2, shape, generator=draw, device="cpu") * 2.0 - 1
    return (sign * (order < size.unsqueeze(-1))).float()


def _on(device: torch.device, arguments: tuple[Any, ...]) -> list[Any]:
    def sent(a: Any) -> Any:
        if isinstance(a, (Factors, Ends)):
            return type(a)(*_on(device, a))
        return a.to(device) if isinstance(a, (Tensor, Adjacency)) else a

    return [sent(a) for a in arguments]


def _is_close(actual: Tensor | None, expected: Tensor, rounding: float) -> bool:
    return actual is not None and torch.allclose(
        actual.cpu().float(), expected, rtol=rounding, atol=rounding
    )
