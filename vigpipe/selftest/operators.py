"""Which operators serve on this device, and do they equal plain torch on the CPU?

Plain torch on the device is compared as well: it is what serves where no fused operator does.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from vigpipe import ops
from vigpipe.config.choices import Device
from vigpipe.launch.join import device_alone
from vigpipe.report.markup import paragraph
from vigpipe.selftest.compared import relative_difference
from vigpipe.selftest.machine import Machine
from vigpipe.selftest.rows import Budget, Row, attempt
from vigpipe.selftest.tables import Column, rows_table
from vigpipe.selftest.worker import call

ABOUT_SECONDS, MOST_SECONDS = 8.0, 120.0
# Largest allowed difference, divided by the largest number; the result of an operator is rounded
# to its dtype, and sums have another order.
BOUNDS = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """A call of an operator."""

    sizes: str  # those of the inputs, in words
    tensors: tuple[Tensor | None, ...]  # the inputs on the CPU; some require a gradient
    run: Callable[..., Tensor]  # calls the operator on them, plain or fused
    is_exact: bool = False  # arithmetic is in small whole numbers: results must be equal, ties too


@dataclass(frozen=True)
class Compared:
    """The largest differences of a call from plain torch on the CPU, as `section` defines them."""

    case: str  # the sizes of the inputs, in words
    version: str  # the version of the operator that served, as `ops.versions` names it
    forward: float
    backward: float | None  # None if there is no gradient
    bound: float  # the largest that is allowed


def _random(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


def _with_ties(*shape: int, seed: int = 0) -> Tensor:
    """Vectors of 0 or 4 ones and minus ones: a length of 0 or 2, and many equal distances."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1
    is_chosen = torch.rand(shape, generator=generator).argsort(-1) < 4
    is_zero = torch.rand(*shape[:-1], 1, generator=generator) < 0.1
    return (signs * is_chosen).masked_fill(is_zero, 0)


def _knn() -> Iterator[Case]:
    # images, nodes, candidates (0: the nodes), channels, k, dilation, loop, biased
    sizes = [
        (4, 196, 0, 192, 9, 1, True, False),
        (4, 196, 0, 320, 9, 3, True, False),
        (2, 784, 196, 80, 9, 1, True, True),
        (2, 37, 0, 20, 9, 3, False, False),
        (1, 1, 0, 3, 1, 1, True, False),
        (3, 50, 37, 7, 7, 5, True, True),
        (1, 9, 300, 5, 32, 8, True, False),
    ]
    for images, nodes, candidates, channels, k, dilation, loop, biased in sizes:
        words = f"{images} × {nodes} nodes"
        words += f", {candidates} candidates" if candidates else ""
        words += f", {channels} channels, k = {k}"
        words += f", dilation {dilation}" if dilation > 1 else ""
        words += ("" if loop else ", no loops") + (", biased" if biased else "")
        run = partial(ops.knn, k=k, dilation=dilation, loop=loop)
        shape, other = (images, nodes, channels), (images, candidates, channels)
        bias = _random(1, nodes, candidates or nodes) if biased else None
        y = _random(*other) if candidates else None
        yield Case(words, (_random(*shape), y, bias), run)
        if channels >= 5:
            ties = bias if bias is None else (8 * bias).round() / 8
            y = _with_ties(*other, seed=1) if candidates else None
            yield Case(f"ties, {words}", (_with_ties(*shape), y, ties), run, is_exact=True)
        if nodes == 37:
            yield Case(f"bfloat16, {words}", (_random(*shape, dtype=torch.bfloat16), y, bias), run)


def _aggregate() -> Iterator[Case]:
    for mode in ("max", "mean", "max_mean", "sum"):
        for images, nodes, candidates, channels, k in ((4, 196, 0, 192, 9), (2, 37, 20, 7, 5)):
            count = candidates or nodes
            generator = torch.Generator().manual_seed(nodes)
            graph = torch.randint(0, count, (images, nodes, k), generator=generator)
            words = f"{mode}, {images} × {nodes} nodes, {channels} channels, k = {k}"
            run = partial(ops.aggregate, mode=mode, interleave=True)
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                x = _random(images, nodes, channels, dtype=dtype, grad=True)
                y = None
                if candidates:
                    y = _random(images, candidates, channels, dtype=dtype, grad=True)
                prefix = "" if dtype == torch.float32 else f"{str(dtype)[6:]}, "
                yield Case(prefix + words, (x, y, graph), run)
            if mode == "max":  # the gradient of equal numbers goes to the first of them
                x = _with_ties(images, nodes, channels).requires_grad_()
                y = _with_ties(images, count, channels, seed=1).requires_grad_()
                yield Case(f"ties, {words}", (x, y, graph), run, is_exact=True)


def _norm() -> Iterator[Case]:
    for images, nodes, channels in ((8, 196, 192), (3, 37, 7)):
        weight, bias = _random(channels, grad=True), _random(channels, grad=True)
        x, residual = (_random(images, nodes + i, channels)[:, :nodes] for i in range(2))
        tensors = (x.requires_grad_(), weight, bias, residual.requires_grad_())
        yield Case(f"{images} × {nodes} nodes, {channels} channels", tensors, _normed)


def _normed(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, *, fused: bool) -> Tensor:
    return ops.norm(x, weight, bias, residual, gelu=True, fused=fused)[0]


def _hidden() -> Iterator[Case]:
    for rows, inputs in ((1000, 3), (1237, 7)):
        sizes = ((rows, inputs), (inputs, 64), (64,), (3, 64))
        tensors = tuple(_random(*size, grad=True) for size in sizes)
        yield Case(f"{rows} rows of {inputs}", tensors, ops.hidden)


# The cases of every operator: usual sizes, odd ones, ties, and lower precision.
CASES = {"knn": _knn, "aggregate": _aggregate, "norm": _norm, "hidden": _hidden}


def compare(name: str, device_name: Device) -> list[Compared]:
    """Run every case of an operator on a device, fused and plain."""
    device = device_alone(device_name)
    served = ops.versions(device.type)[name]
    versions = {"fused": served}
    if device != torch.device("cpu") and not served.startswith("plain"):
        versions["plain"] = "plain torch"
    return [
        _compare(name, case, version, kind == "fused", device)
        for case in CASES[name]()
        for kind, version in versions.items()
    ]


def _compare(name: str, case: Case, version: str, fused: bool, device: torch.device) -> Compared:
    expected, expected_grads = _run(case, torch.device("cpu"), fused=False)
    actual, grads = _run(case, device, fused=fused)
    dtype = next(t.dtype for t in case.tensors if t is not None)
    if name == "knn":
        if case.is_exact:
            return Compared(case.sizes, version, float((actual != expected).sum()), None, 0.0)
        off = _off_in_nearness(case, actual, expected)
        return Compared(case.sizes, version, off, None, BOUNDS[torch.float32])
    pairs = zip(grads, expected_grads, strict=True)
    backward = torch.tensor([relative_difference(*pair) for pair in pairs], dtype=torch.float64)
    bound = 0.0 if case.is_exact else BOUNDS[dtype]
    off = relative_difference(actual, expected)
    return Compared(case.sizes, version, off, float(backward.max()), bound)  # NaN stays NaN


def _run(case: Case, device: torch.device, *, fused: bool) -> tuple[Tensor, list[Tensor]]:
    """Return the result and the gradients of the inputs that need one, on the CPU."""
    tensors = [
        t if t is None else t.detach().to(device).requires_grad_(t.requires_grad)
        for t in case.tensors
    ]
    result = case.run(*tensors, fused=fused)
    inputs = [t for t in tensors if t is not None and t.requires_grad]
    if not inputs:
        return result.cpu(), []
    generator = torch.Generator().manual_seed(0)
    # Whole numbers, so that sums of them are exact where the inputs are.
    grad = torch.randint(-4, 5, result.shape, generator=generator).to(result)
    return result.detach().cpu(), [g.cpu() for g in torch.autograd.grad(result, inputs, grad)]


def _off_in_nearness(case: Case, actual: Tensor, expected: Tensor) -> float:
    """Compare how near chosen neighbours are, in float64; near-ties may be chosen either way."""
    x, y, bias = case.tensors
    assert x is not None
    x, y = (t.double() / t.double().norm(dim=-1, keepdim=True) for t in (x, x if y is None else y))
    nearness = 2 * x @ y.mT - (0 if bias is None else bias.double())
    ordered = actual.sort(-1).values
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        return float("inf")  # a node has a neighbour twice
    return float((nearness.gather(2, actual) - nearness.gather(2, expected)).abs().max())


def measure(machine: Machine, budget: Budget) -> Iterator[Row]:
    """Compare every operator with plain torch on the CPU, each in a process of its own."""
    for name in CASES:
        work = partial(_rows, name, machine.device)
        yield from attempt(name, budget, ABOUT_SECONDS, MOST_SECONDS, work)


def _rows(name: str, device_name: Device, seconds: float) -> list[Row]:
    results: list[Compared] = call(compare, name, device_name, seconds=seconds)
    return [row_of(name, result) for result in results]


def row_of(name: str, result: Compared) -> Row:
    """Make the row of a compared call of an operator."""
    wrong = [  # NaN is not below the bound
        f"{direction} differs by {off:.1e}, and {result.bound:.0e} is allowed"
        for direction, off in (("forward", result.forward), ("backward", result.backward))
        if off is not None and not off <= result.bound
    ]
    values = {"operator": name, **asdict(result)}
    what = f"{name}: {values.pop('case')} ({result.version.split(' (')[0]})"
    return Row(what, "failed" if wrong else "passed", values, "; ".join(wrong))


def section(rows: Sequence[Row]) -> Iterator[str]:
    """Tell what serves, and show the differences."""
    served = dict[str, str]()
    for row in rows:
        if "operator" in row.values:
            served.setdefault(row.values["operator"], row.values["version"])
    yield paragraph("; ".join(f"{name}: {version}" for name, version in served.items()))
    yield paragraph(
        "Against plain torch on the CPU: the largest difference, divided by the largest number. Of "
        "a kNN graph, which has no gradient: how much nearer a neighbour is than the expected one "
        "of its place; where ties are exact, how many indices differ.",
        "note",
    )
    columns = (
        Column("forward", "forward", "{:.1e}"),
        Column("backward", "backward", "{:.1e}"),
        Column("allowed", "bound", "{:.0e}"),
    )
    yield rows_table("operator", rows, columns)
