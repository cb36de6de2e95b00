"""The hidden layer that is never kept, against the one that is."""

import pytest
import torch
import torch.nn.functional as F

from tests.ops.threads import assert_threads_change_nothing
from vigpipe import ops

# Rows around the sizes of tiles and chunks, features of both kinds: rows, features, and the type in
# which they are fused. The plain version takes the other type.
F32, F64 = torch.float32, torch.float64
CASES = [
    *((1, 3, F32), (1, 7, F64), (31, 3, F64), (32, 7, F32), (33, 3, F32), (33, 7, F64)),
    *((2047, 3, F32), (2049, 3, F64), (2049, 7, F32), (5000, 7, F64)),
]


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


@pytest.mark.parametrize(("rows", "features", "dtype"), CASES)
def test_results_and_gradients(rows, features, dtype, fused):
    dtype = dtype if fused else {F32: F64, F64: F32}[dtype]
    tolerance = 2e-5 if dtype == F32 else 1e-12
    inputs, grad = case(rows, features, dtype)
    found, expected = ops.hidden(*inputs, fused=fused), kept(*inputs)
    for ours, theirs in zip(
        (found, *torch.autograd.grad(found, inputs, grad)),
        (expected, *torch.autograd.grad(expected, inputs, grad)),
        strict=True,
    ):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def gelu_of(z):
    """GELU and its derivative at every z, (R,): one channel of 16 is read."""
    x = F.pad(z.unsqueeze(1), (0, 2)).requires_grad_()
    first, second = torch.zeros(3, 16), torch.zeros(3, 16)
    first[0], second[0, 5] = 1.0, 1.0
    y = ops.hidden(x, first, torch.zeros(16), second)[:, 0]
    return y.detach(), torch.autograd.grad(y.sum(), x)[0][:, 0]


def test_gelu_keeps_its_relative_precision_in_both_tails():
    """Relative errors grow with z^2: exp takes z^2 / 2, rounded twice by 2^-24."""
    z = torch.linspace(-12.8, 12.8, 100_001)
    wide = z.double()
    density = torch.exp(-wide.square() / 2) / (2 * torch.pi) ** 0.5
    # Of the left tail; erfc of torch is exact to the last bits there, and 1 + erf would be 0.
    cumulative = torch.special.erfc(wide * -(0.5**0.5)) / 2
    value, slope = gelu_of(z)
    bound = 8e-7 + 6e-8 * wide.square().where(wide < 0, 0)
    assert ((value - wide * cumulative).abs() <= bound * (wide * cumulative).abs()).all()
    parts = cumulative + (wide * density).abs()  # the derivative's, which cancel near -0.75
    assert ((slope - (cumulative + wide * density)).abs() <= bound * parts).all()


def test_the_number_of_threads_changes_nothing():
    inputs, grad = case(5000, 7, torch.float32)

    def outcome():
        y = ops.hidden(*inputs)
        return y, *torch.autograd.grad(y, inputs, grad)

    assert_threads_change_nothing(outcome)


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
