"""The hidden layer that is never kept, against the one that is."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from tests.ops.called import Called
from vigpipe import ops
from vigpipe.ops import plain

# Rows around the sizes of tiles and chunks, features of both kinds.
ROWS, FEATURES = [1, 31, 32, 33, 2047, 2049, 5000], [3, 7]


@pytest.fixture(params=["fused", "plain"])
def fused(request):
    assert ops.versions("cpu")["hidden"].startswith("C++")
    return request.param == "fused"


def case(rows, features, dtype, width=32, outputs=3):
    generator = torch.Generator().manual_seed(rows)
    shapes = (rows, features), (features, width), (width,), (outputs, width), (rows, outputs)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    return [t.requires_grad_() for t in tensors[:4]], tensors[4]


def kept(x, first, bias, second):
    return F.gelu(x @ first + bias) @ second.T


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_results_and_gradients(rows, features, dtype, tolerance, fused):
    inputs, grad = case(rows, features, dtype)
    found, expected = ops.hidden(*inputs, fused=fused), kept(*inputs)
    for ours, theirs in zip(
        (found, *torch.autograd.grad(found, inputs, grad)),
        (expected, *torch.autograd.grad(expected, inputs, grad)),
        strict=True,
    ):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize(("features", "width", "outputs"), [(5, 32, 3), (3, 20, 3), (3, 32, 4)])
def test_sizes_that_are_not_compiled_are_plain(features, width, outputs, fused):
    inputs, _ = case(40, features, torch.float64, width, outputs)
    torch.testing.assert_close(ops.hidden(*inputs, fused=fused), kept(*inputs))


def test_gradcheck(fused):
    inputs, _ = case(5, 3, torch.float64, 16)
    assert torch.autograd.gradcheck(lambda *t: ops.hidden(*t, fused=fused), inputs)


def test_the_number_of_threads_changes_nothing():
    inputs, grad = case(5000, 7, torch.float32)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        y = ops.hidden(*inputs)
        results.append([y, *torch.autograd.grad(y, inputs, grad)])
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_nothing_wide_is_kept():
    inputs, _ = case(5000, 3, torch.float32, 512)
    kept_bytes = 0

    def count(tensor):
        nonlocal kept_bytes
        kept_bytes += tensor.numel() * 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        ops.hidden(*inputs)
    assert kept_bytes < 5000 * 512 * 4 / 50


@pytest.mark.parametrize(("device", "num_chunks"), [("cpu", 98), ("cuda", 4)])
def test_chunks_fit_the_cache_of_a_processor_and_the_memory_of_a_gpu(device, num_chunks):
    sizes = (200_000, 3), (3, 512), (512,), (3, 512)
    with FakeTensorMode(), Called() as called:
        plain.hidden(*(torch.empty(size, device=device) for size in sizes))
    assert called.names.count("aten::addmm") == num_chunks
