"""The GPU's kernels against plain torch, interpreted on the CPU, and compiled for an H200.

Triton decides at its import whether kernels are interpreted, so this file also runs as a program:
`python tests/ops/test_gpu.py interpret` prints every case's error, `compile` each kernel's size.
"""

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops.programs import run_program
from vigpipe.model.graph import knn_graph

pytestmark = [
    pytest.mark.triton,
    pytest.mark.heavy,
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton"),
]

# N, M (None: the nodes themselves), C, k, dilation, loop
GRAPHS = [
    (1, None, 3, 1, 1, True),
    (5, None, 3, 5, 1, True),
    (5, None, 3, 4, 1, False),
    (37, None, 20, 9, 2, True),
    (37, None, 20, 9, 3, False),
    (37, 49, 3, 9, 3, True),
    (50, 37, 20, 7, 5, False),
    (20, 70, 20, 9, 7, True),
    (9, 300, 3, 32, 8, True),
    (100, None, 192, 9, 1, True),
    (196, 49, 192, 9, 2, True),
]
ROUNDED = [(37, None), (50, 37), (100, None)]
MODES = ["max", "mean", "max_mean", "sum"]
KINDS = ["float32", "bfloat16", "float16"]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def random(*shape, kind="float32"):
    return torch.randn(shape, generator=seeded(sum(shape)), dtype=getattr(torch, kind))


def exact(num_images, num_nodes, num_channels, seed=0):
    """Vectors of length 0, 1, 2 or 4 in whole numbers: all arithmetic is exact, ties abound."""
    draw = seeded(num_nodes + seed)
    x = torch.zeros(num_images * num_nodes, num_channels)
    for row in x:
        sizes = [n for n in (0, 1, 4, 16) if n <= num_channels]
        size = sizes[int(torch.randint(len(sizes), (), generator=draw))]
        at = torch.randperm(num_channels, generator=draw)[:size]
        row[at] = torch.randint(0, 2, (size,), generator=draw) * 2.0 - 1
    return x.view(num_images, num_nodes, num_channels)


def nearness(x, y, bias):
    """In float64: -|x_i - y_j|^2 up to |x_i|^2."""
    x, y = (z.double() / z.double().norm(dim=-1, keepdim=True).clamp(min=1e-12) for z in (x, y))
    return 2 * x @ y.mT - y.square().sum(-1).unsqueeze(1) - (0 if bias is None else bias)


def knn_cases():
    """Names, arguments of knn, and whether the arithmetic is exact.

    The interpreter takes a second for most, and several for large ones: those have one image and no
    bias, the others a bias. What none, rounding and a bias for all images change is shown on some.
    """
    for n, m, c, *rest in GRAPHS:
        name = f"knn-{n}-{m}-{c}-" + "-".join(map(str, rest))
        images = 1 if n >= 100 else 2
        other = None if m is None else random(images, m, c)
        if (n, m) in ROUNDED:
            yield name, (random(images, n, c), other, None, *rest), False
        other = None if m is None else exact(images, m, c)
        is_large = n >= 100 or m == 300
        if (is_large or (n, m) in ROUNDED) and (n, m) != (100, None):
            yield name + "-exact", (exact(images, n, c, 1), other, None, *rest), True
        if is_large:
            continue
        for images in (1, 2) if (n, m) in ROUNDED else (2,):
            bias = torch.randint(-8, 8, (images, n, m or n), generator=seeded(n)) / 8
            yield f"{name}-bias{images}", (exact(2, n, c, 1), other, bias, *rest), True
    for kind in KINDS[1:]:
        yield f"knn-{kind}", (random(2, 37, 20, kind=kind), None, None, 9, 2, True), False
    bad = exact(2, 37, 20)
    bad[0, 3], bad[0, 5, 2], bad[1, 7, 4], bad[1, 30] = 0, torch.nan, torch.inf, 1e30
    for loop in (True, False):
        yield f"knn-bad-{loop}", (bad, None, None, 9, 3, loop), True
        yield f"knn-all-{loop}", (bad, None, None, 37 - (not loop), 1, loop), True
        yield f"knn-bad-candidates-{loop}", (exact(2, 20, 20), bad, None, 9, 4, loop), True
    yield "knn-same", (torch.ones(1, 70, 5), None, None, 9, 2, True), False
    yield "knn-zeros", (torch.zeros(1, 70, 5), None, None, 9, 2, True), True
    yield "knn-strided", (random(2, 20, 37).mT, random(2, 20, 49).mT, None, 9, 2, True), False
    yield "knn-empty", (torch.empty(0, 37, 20), None, None, 9, 2, True), True


def knn_error(gpu, arguments, is_exact):
    x, y, bias, k, dilation, loop = arguments
    got = gpu.knn(*arguments)
    want = knn_graph(x, k, dilation, loop, candidates=y, bias=bias, fused=False)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if is_exact:
        return float((got != want).sum())
    assert all(len(set(row)) == k for row in got.flatten(0, 1).tolist())
    near = nearness(x, x if y is None else y, bias)
    assert loop or not (got == torch.arange(x.shape[1]).view(-1, 1)).any()
    return float((near.gather(2, got) - near.gather(2, want)).abs().max())


def aggregate_cases():
    """Names, arguments of aggregate.

    Every mode, size and kind of weights meets both orders of the output's channels.
    """
    sizes = [(1, None, 3, 1), (37, None, 20, 9), (20, 37, 140, 5)]
    count = itertools.count()
    for mode in MODES:
        for kind in KINDS:
            for n, m, c, k in sizes if kind == "float32" else [(20, 37, 20, 5)]:
                x = random(2, n, c, kind=kind)
                y = None if m is None else random(2, m, c, kind=kind)
                graph = torch.randint(0, m or n, (2, n, k), generator=seeded(n))
                weights = [None]
                if mode == "sum":
                    weights += [random(2, n, k), random(2, n, k, kind=kind)]
                for i, weight in enumerate(weights):
                    interleave = next(count) % 2 == 0
                    name = f"{mode}-{kind}-{interleave}-{n}-{m}-{i}"
                    yield name, (x, y, graph, weight, mode, interleave)
        graph = torch.randint(0, 37, (2, 50, 5), generator=seeded(0))
        weight = random(2, 50, 5, kind="float64") if mode == "sum" else None
        yield f"{mode}-no-x", (None, random(2, 37, 20), graph, None, mode, False)
        wide = random(2, 50, 20, kind="float64"), random(2, 37, 20, kind="float64")
        yield f"{mode}-float64", (*wide, graph, weight, mode, True)
        ties = torch.randint(-2, 2, (2, 50, 20), generator=seeded(0)).float()
        yield f"{mode}-ties", (ties, ties[:, :37], graph, None, mode, True)
        empty = torch.empty(0, 5, 20), torch.empty(0, 7, 20), torch.empty(0, 5, 3).long()
        yield f"{mode}-empty", (*empty, None, mode, True)
        strided = random(2, 20, 50).mT, random(2, 20, 37).mT, graph.mT.contiguous().mT
        weight = random(2, 5, 50).mT if mode == "sum" else None
        yield f"{mode}-strided", (*strided, weight, mode, True)
        broken = random(2, 50, 20)
        broken[:, 3], broken[:, 7, 2] = torch.nan, -torch.inf
        yield f"{mode}-nan", (broken, None, graph, None, mode, False)


def reference(x, y, graph, weights, mode, interleave):
    """Of aggregate, through (B, N, K, C)."""
    y = x if y is None else y
    images = torch.arange(len(graph)).view(-1, 1, 1)
    near = y[images, graph]
    largest, winners = near.max(2) if near.numel() else (near.sum(2), near.sum(2).long())
    first = (near == largest.unsqueeze(2)) | near.isnan()
    winners = first.to(torch.uint8).argmax(2) if near.numel() else winners
    largest = near.gather(2, winners.unsqueeze(2)).squeeze(2)
    own = 0 if x is None else x
    pieces = {"max": [largest - own], "mean": [near.mean(2) - own]}
    pieces["max_mean"] = pieces["max"] + pieces["mean"]
    pieces["sum"] = [(near if weights is None else near * weights.unsqueeze(3)).sum(2)]
    chosen = [x] * interleave + pieces[mode]
    return torch.stack(chosen, 3).flatten(2), winners


def error(got, want):
    """The largest difference, relative above 1."""
    assert got.shape == want.shape
    if not got.numel():
        return 0.0
    assert torch.equal(got.isfinite(), want.isfinite())
    assert torch.equal(got.isnan(), want.isnan())
    difference = (got.double() - want).abs() / want.abs().clamp(min=1)
    return float(difference.nan_to_num(0).max())


def aggregate_error(gpu, arguments):
    x, y, graph, weights, mode, interleave = arguments
    wide = [None if t is None else t.double().requires_grad_() for t in (x, y, weights)]
    want, want_winners = reference(wide[0], wide[1], graph, wide[2], mode, interleave)
    out, winners = gpu.aggregate(*arguments, True)
    assert out.dtype == (x if y is None else y).dtype
    has_winners = "max" in mode
    assert winners.dtype == torch.uint8
    assert torch.equal(winners, want_winners.to(torch.uint8) if has_winners else winners[:0])
    errors = {"out": error(out, want.detach())}
    grad = random(*out.shape).to(out.dtype)
    grads = gpu.aggregate_backward(grad, x, y, graph, winners, weights, mode, interleave)
    want.backward(grad.double())
    for name, before, got, tensor in zip("xyw", (x, y, weights), grads, wide, strict=True):
        assert (before is None) == (got is None)
        if tensor is not None and before is not None:
            assert got.dtype == before.dtype
            expected = tensor.grad
            errors[name] = error(got, torch.zeros_like(tensor) if expected is None else expected)
    return errors


def interpret_topk():
    """Make the interpreter take xor, of which tl.topk consists, for whole arrays."""
    from triton.runtime.interpreter import ReduceOps

    slow = ReduceOps.generic_reduce

    def reduce(self, input):
        if self.combine_fn.fn.__name__ != "_xor_combine":
            return slow(self, input)
        (x,), axis = self.unravel(input, self.axis)
        data = np.bitwise_xor.reduce(x.handle.data, axis=axis, keepdims=self.keep_dims)
        return [self.to_tensor(data, x.dtype)]

    ReduceOps.generic_reduce = reduce


def interpret_bfloat16_dots():
    """Make the interpreter multiply bfloat16 numbers; it takes their bits for whole numbers."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    builder: Any = InterpreterBuilder
    dot = builder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return dot(self, widened(a), widened(b), *rest)

    builder.create_dot = create_dot


def mend_interpreter():
    interpret_topk()
    interpret_bfloat16_dots()


# channels, heads and numbers of graphs of edges
EDGES = [(20, 2, "float64"), (141, 3, "float32")]


def csr_errors(channels, heads, dtype):
    """The largest difference of every kernel over the edges of a graph, by its number and name."""
    from vigpipe.ops.adjacency import Ends, Factors
    from vigpipe.ops.csr import gpu, plain
    from vigpipe.ops.self_check import csr_cases

    def typed(a) -> Any:
        if isinstance(a, (Factors, Ends)):
            return type(a)(*map(typed, a))
        return a.to(dtype) if torch.is_tensor(a) and a.is_floating_point() else a

    for i, (name, arguments) in enumerate(csr_cases(channels, heads)):
        made = [getattr(kernels, name)(*map(typed, arguments)) for kernels in (gpu, plain)]
        got, want = (t if isinstance(t, tuple) else (t,) for t in made)
        pairs = [(g, w) for g, w in zip(got, want, strict=True) if w is not None]
        assert all(g.dtype == w.dtype for g, w in pairs)
        yield f"{i}-{name}", max(error(g, w.double()) for g, w in pairs)


def strided_error():
    """Of sums of every other half row into every other half row, onto what is there."""
    from vigpipe.ops.csr import gpu, plain
    from vigpipe.ops.self_check import csr_cases

    _, (graph, x, factors) = next(csr_cases(40))
    out = random(graph.num_targets, 40)
    want = plain.row_sums(graph, x[:, 20:], factors, out[:, :20])
    gpu.row_sums(graph, x[:, 20:], factors, out[:, :20], out[:, :20])
    return error(out[:, :20], want.double())


def interpret():
    from vigpipe.ops import gpu

    mend_interpreter()
    gathering = gpu._gathering

    def in_larger_tiles(graph, others):  # because the interpreter takes a while for each
        rows, *rest = gathering(graph, others)
        return 16 * rows, *rest

    gpu._gathering = in_larger_tiles  # pyrefly: ignore[bad-assignment]
    results: dict[str, object] = {}
    for name, arguments, is_exact in knn_cases():
        results[name] = knn_error(gpu, arguments, is_exact)
    for name, arguments in aggregate_cases():
        results[name] = aggregate_error(gpu, arguments)
    for channels, heads, kind in EDGES:
        errors = csr_errors(channels, heads, getattr(torch, kind))
        results[f"csr-{channels}-{heads}-{kind}"] = dict(errors)
    results["csr-strided"] = strided_error()
    try:
        gpu.knn(random(1, 5, 3, kind="float64"), None, None, 2, 1, True)
    except NotImplementedError as problem:
        results["knn-float64"] = str(problem)
    print(json.dumps(results))


def compile_all():
    """Compile what each launch would, with the types, sizes and constants it has.

    Forward over images, test_compiled_kernels.py does so for the models' own launches.
    """
    import triton
    from triton._utils import canonicalize_dtype
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vigpipe.ops import gpu
    from vigpipe.ops.csr import gpu as csr
    from vigpipe.ops.self_check import csr_cases

    results = {}

    def launch(kernel, grid, tensors, sizes, constants, num_warps=4):
        signature, constexprs, attributes = {}, {}, {}
        values = (*tensors, *sizes, *constants)
        for i, (name, value) in enumerate(zip(kernel.arg_names, values, strict=True)):
            if torch.is_tensor(value):
                signature[name] = "*" + canonicalize_dtype(value.dtype)
            elif value is None or value == 1 or i >= len(tensors) + len(sizes):
                signature[name], constexprs[(i,)] = "constexpr", value
                continue
            else:
                signature[name] = "i32"
            if torch.is_tensor(value) or value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, signature, constexprs, attributes)
        options = {"num_warps": num_warps, "enable_fp_fusion": True}
        done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        name = f"{kernel.__name__}-{len(results)}"
        results[name] = {"cubin": len(done.asm["cubin"]), "shared": done.metadata.shared}

    gpu.launch = csr.launch = launch  # pyrefly: ignore[bad-assignment]
    x, y, grad = random(2, 50, 20), random(2, 37, 20), random(2, 50, 20)
    graph, weights = torch.zeros(2, 50, 9, dtype=torch.int64), torch.zeros(2, 50, 9)
    gpu.aggregate_backward(grad, x, y, graph, graph[:0].to(torch.uint8), weights, "sum", False)
    for name, arguments in csr_cases(128, 8):
        getattr(csr, name)(*arguments)
    print(json.dumps(results))


KNN = {name: is_exact for name, _, is_exact in knn_cases()}
AGGREGATE = [name for name, _ in aggregate_cases()]
# Numbers are near 1. Half precision is one rounding of a float32 sum; the interpreter rounds to
# bfloat16 towards zero, at 8 bits.
TOLERANCE = {"bfloat16": 2**-7, "float16": 2**-10, "float64": 1e-12}


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    return run_program(
        __file__, "interpret", tmp_path_factory.mktemp("triton"), TRITON_INTERPRET="1"
    )


@pytest.mark.parametrize("name", KNN)
def test_the_neighbours_are_those_of_plain_torch(interpreted, name):
    # An exact case counts wrong neighbours; elsewhere rounding may swap two, and distances count.
    assert interpreted[name] <= (0 if KNN[name] else 1e-6)


def test_neighbours_in_float64_are_refused(interpreted):
    assert "float64" in interpreted["knn-float64"]


@pytest.mark.parametrize("name", AGGREGATE)
def test_aggregates_and_their_gradients_are_those_of_plain_torch(interpreted, name):
    tolerance = next((TOLERANCE[kind] for kind in TOLERANCE if kind in name), 1e-5)
    assert max(interpreted[name].values()) <= tolerance


@pytest.mark.parametrize(("channels", "heads", "kind"), EDGES)
def test_sums_and_attention_over_edges_are_those_of_plain_torch(interpreted, channels, heads, kind):
    errors = interpreted[f"csr-{channels}-{heads}-{kind}"]
    assert len(errors) == 12
    assert max(errors.values()) <= TOLERANCE.get(kind, 1e-5), errors


def test_rows_that_are_apart_are_summed(interpreted):
    assert interpreted["csr-strided"] <= 1e-5


def test_every_kernel_compiles_for_an_h200(tmp_path):
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    if not (tools / "ptxas").exists():
        pytest.skip(f"no ptxas in {tools}")
    compiled = run_program(__file__, "compile", tmp_path)
    kernels = {name.split("-")[0] for name in compiled}
    of_images = {"nodes", "candidates", "weights"}
    of_edges = {"sum", "max", "max_backward", "softmax", "softmax_backward"}
    of_edges |= {"attention_backward", "pair", "pair_backward"}
    assert kernels == {f"_{name}_kernel" for name in of_images | of_edges}
    assert all(kernel["shared"] <= 227 * 1024 for kernel in compiled.values())


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_all}[sys.argv[1]]()
