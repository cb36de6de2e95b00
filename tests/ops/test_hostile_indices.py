"""Indices that no candidate has, in Triton's kernels, interpreted on the CPU.

Every tensor that a kernel gets lies between two guards: nothing may be written there, and nothing
that is read from there may be in a result. `python tests/ops/test_hostile_indices.py run` prints
what is wrong with each case.
"""

import importlib.util
import json
from typing import Any

import pytest
import torch

from tests.ops.programs import run_program
from vigpipe.ops import plain

pytestmark = [
    pytest.mark.triton,
    pytest.mark.heavy,
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton"),
]

IMAGES, NODES, CANDIDATES, CHANNELS, K = 2, 21, 13, 5, 3
GUARD = 4096  # elements on each side, more than a neighbouring index is away
SENTINEL = 77  # also a number of uint8


def hostile(num_candidates):
    """Indices around the valid ones, of the next image, and whose multiples overflow 64 bits."""
    near = [-1, -num_candidates, num_candidates, 2 * num_candidates - 1]
    return [*near, 2**31, -(2**31), 2**62, 2**63 // CHANNELS, 2**63 - 1, -(2**63)]


def seeded(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def hostile_graph(num_candidates):
    """A graph, and which of its indices are hostile: at most one for each of some nodes."""
    generator = torch.Generator().manual_seed(0)
    graph = torch.randint(num_candidates, (IMAGES, NODES, K), generator=generator)
    for i, index in enumerate(hostile(num_candidates)):
        graph[i % IMAGES, 2 * i, i % K] = index
    return graph, (graph < 0) | (graph >= num_candidates)


def with_guards(launch):
    """A launch of copies that lie between guards, which it checks."""

    def guarded(kernel, grid, tensors, *rest, **options):
        buffers, copies = {}, []
        for tensor in tensors:
            if tensor is not None and id(tensor) not in buffers:
                buffer = torch.full((tensor.numel() + 2 * GUARD,), SENTINEL, dtype=tensor.dtype)
                buffers[id(tensor)] = buffer, buffer[GUARD:-GUARD].view(tensor.shape)
                buffers[id(tensor)][1].copy_(tensor)
            copies.append(None if tensor is None else buffers[id(tensor)][1])
        launch(kernel, grid, copies, *rest, **options)
        for tensor, copy in zip(tensors, copies, strict=True):
            if tensor is not None:
                tensor.copy_(copy)
        for buffer, _ in buffers.values():
            assert (buffer[:GUARD] == SENTINEL).all(), "written before a tensor"
            assert (buffer[-GUARD:] == SENTINEL).all(), "written after a tensor"

    return guarded


def aggregate_cases():
    """Of each mode both kinds of candidates, both orders of outputs, and one half precision."""
    halves = (torch.bfloat16, torch.float16)
    for i, mode in enumerate(("max", "mean", "max_mean", "sum")):
        for is_shared in (True, False):
            interleave = is_shared == (i % 2 == 0)
            yield f"{mode}-{is_shared}-{interleave}", (mode, is_shared, interleave)
        yield f"{mode}-{halves[i % 2]}", (mode, True, True, halves[i % 2])
    yield "sum-weights-shared", ("sum", True, False, torch.float32, True)
    yield "sum-weights", ("sum", False, True, torch.float32, True)


def check_aggregate(gpu, mode, is_shared, interleave, kind=torch.float32, is_weighted=False):
    """Valid neighbours count as ever; hostile ones are NaN forward, and in the own gradient."""
    num_candidates = NODES if is_shared else CANDIDATES
    x = seeded(IMAGES, NODES, CHANNELS).to(kind)
    y = None if is_shared else seeded(IMAGES, num_candidates, CHANNELS).to(kind)
    graph, is_hostile = hostile_graph(num_candidates)
    weights = seeded(IMAGES, NODES, K) if is_weighted else None
    out, winners = gpu.aggregate(x, y, graph, weights, mode, interleave, True)
    grad = seeded(*out.shape).to(kind)
    got = gpu.aggregate_backward(grad, x, y, graph, winners, weights, mode, interleave)

    # One candidate more, the largest, stands for the hostile ones; its gradient is dropped.
    wide = [None if t is None else t.detach().float().requires_grad_() for t in (x, y, weights)]
    others = wide[0] if is_shared else wide[1]
    assert others is not None
    others = torch.cat((others, torch.full((IMAGES, 1, CHANNELS), 1e30)), 1)
    safe = graph.masked_fill(is_hostile, num_candidates)
    want = plain.aggregate(wide[0], others, safe, wide[2], mode, interleave)
    is_bad = is_hostile.any(-1)
    want.backward(grad.float())
    want = want.detach().unflatten(-1, (CHANNELS, -1))
    want[..., int(interleave) :][is_bad] = torch.nan
    tolerance = 1e-5 if kind == torch.float32 else 2**-7
    close = {"equal_nan": True, "rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(out.float(), want.flatten(-2), **close)
    alone, no_winners = gpu.aggregate(x, y, graph, weights, mode, interleave, False)
    torch.testing.assert_close(alone, out, equal_nan=True, rtol=0, atol=0)
    assert no_winners.shape == (0,)  # as compiled graphs expect of a call without a backward
    for name, tensor, gradient in zip("xyw", wide, got, strict=True):
        assert (tensor is None) == (gradient is None)
        if tensor is None or gradient is None:
            continue
        expected = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        expected[{"x": is_bad, "y": [], "w": is_hostile}[name]] = torch.nan
        torch.testing.assert_close(gradient.float(), expected, **close)


def check_winners(gpu, mode):
    """A winner from K on is the gradient of no candidate, and NaN in the node's own."""
    x, y = seeded(IMAGES, NODES, CHANNELS), seeded(IMAGES, CANDIDATES, CHANNELS)
    graph = hostile_graph(CANDIDATES)[0].remainder(CANDIDATES)
    out, winners = gpu.aggregate(x, y, graph, None, mode, False, True)
    bad = torch.zeros_like(winners, dtype=torch.bool)
    bad.flatten()[::7] = True
    grad = seeded(*out.shape).unflatten(-1, (CHANNELS, -1))
    arguments = (x, y, graph), (None, mode, False)
    expected = gpu.aggregate_backward(
        torch.where(bad.unsqueeze(-1) & (torch.arange(grad.shape[-1]) == 0), 0, grad).flatten(-2),
        *arguments[0],
        winners,
        *arguments[1],
    )
    winners[bad] = torch.tensor([K, 255]).repeat(int(bad.sum()))[: int(bad.sum())].to(torch.uint8)
    got = gpu.aggregate_backward(grad.flatten(-2), *arguments[0], winners, *arguments[1])
    torch.testing.assert_close(got[0], expected[0].masked_fill(bad, torch.nan), equal_nan=True)
    torch.testing.assert_close(got[1], expected[1])


def knn_cases():
    """Features and biases that are no numbers, and fewer nodes than a tile has."""
    broken = seeded(2, 37, 20)
    broken[0, 3], broken[1, 5, 2], broken[1, 7] = torch.nan, torch.inf, 1e30
    bias = torch.zeros(2, 37, 37)
    bias[0, 3], bias[1, :, 4], bias[1, 7] = torch.nan, torch.inf, -torch.inf
    negative_nan = torch.full((1, 5, 5), -1, dtype=torch.int32).view(torch.float32)
    return {
        "features": (broken, None, None, 9, 2, True),
        "bias": (broken, None, bias, 9, 3, False),
        "negative NaN": (torch.ones(1, 5, 3), None, negative_nan, 5, 1, True),
        "one node": (torch.full((1, 1, 3), torch.nan), None, None, 1, 1, True),
        "few nodes": (broken[:, :2], broken[:, :5], None, 2, 2, True),
    }


def check_knn(gpu, x, y, bias, k, dilation, loop):
    graph = gpu.knn(x, y, bias, k, dilation, loop)
    assert graph.min() >= 0
    assert graph.max() < (x if y is None else y).shape[1]
    assert all(len(set(row)) == k for row in graph.flatten(0, 1).tolist())


def run():
    from tests.ops.test_gpu import mend_interpreter
    from vigpipe.ops import gpu

    mend_interpreter()
    gpu.launch = with_guards(gpu.launch)
    cases: dict[str, tuple[Any, Any]]
    cases = {name: (check_aggregate, arguments) for name, arguments in aggregate_cases()}
    cases |= {f"winners-{mode}": (check_winners, (mode,)) for mode in ("max", "max_mean")}
    cases |= {f"knn-{name}": (check_knn, arguments) for name, arguments in knn_cases().items()}
    results = {}
    for name, (check, arguments) in cases.items():
        try:
            check(gpu, *arguments)
            results[name] = ""
        except AssertionError as error:
            results[name] = str(error) or "an assertion failed"
    print(json.dumps(results))


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    return run_program(__file__, "run", tmp_path_factory.mktemp("triton"), TRITON_INTERPRET="1")


NAMES = [name for name, _ in aggregate_cases()] + ["winners-max", "winners-max_mean"]


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_index_is_nan_and_touches_nothing_else(problems, name):
    assert not problems[name]


@pytest.mark.parametrize("name", knn_cases())
def test_no_feature_or_bias_makes_a_hostile_index(problems, name):
    assert not problems[f"knn-{name}"]


if __name__ == "__main__":
    run()
