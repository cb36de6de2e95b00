"""Axial aggregation against loops over the nodes, its gates' gradients, and its rule of ties."""

from functools import partial

import pytest
import torch

from tests import mobile_reference
from tests.ops.threads import assert_threads_change_nothing
from vigpipe.model.axial import AxialConv, make_links
from vigpipe.ops.axial import Link, axial, axial_limit

# A side smaller than every shift, odd sides, a single row, a single node.
GRIDS = [(6, 5), (1, 4), (3, 2), (1, 1)]
SIGNS = {"every": -1, "four": 1, "near": 1, "soft": 1, "powers": -1}  # as AxialConv has them


versions = pytest.mark.parametrize("fused", [True, False], ids=["C++", "plain"])


def nodes(grid, num_channels=4, dtype=torch.float64, num_images=2):
    generator = torch.Generator().manual_seed(3)
    shape = num_images, *grid, num_channels
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def of_kind(kind, x, k, temperature, fused=True):
    links = make_links(kind, x.shape[1:3], k)
    limit = axial_limit(x, fused=fused) if kind == "near" else None
    return axial(x, links, SIGNS[kind], limit, temperature, fused=fused)


def by_loops(kind, x, k, temperature):
    images = x.movedim(-1, 1)
    if kind == "soft":
        return mobile_reference.soft(images, k, temperature).movedim(1, -1)
    if kind == "near":
        return mobile_reference.near(images, k, []).movedim(1, -1)
    return getattr(mobile_reference, kind)(images, k).movedim(1, -1)


def with_gradients(make, kind, x, k, weights):
    """The result, and the gradients of x and of a temperature of -0.7; 0 where there is none."""
    temperature = torch.tensor(-0.7 * x.shape[-1], dtype=x.dtype, requires_grad=True)
    y = make(kind, x, k, temperature if kind == "soft" else None)
    loss = (y * weights + 0 * x).sum() + 0 * temperature
    return y, *torch.autograd.grad(loss, (x, temperature))


@versions
@pytest.mark.parametrize("kind", SIGNS)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("is_flat", [False, True])
def test_it_equals_loops_over_the_nodes_with_all_gradients(fused, kind, grid, is_flat):
    """On flat images every link ties, and gradients depend on the order of links."""
    for k in (1, 2, 4):
        x = nodes(grid)
        if is_flat:
            x = torch.ones_like(x).requires_grad_()
        weights = torch.randn_like(x)
        ours = with_gradients(partial(of_kind, fused=fused), kind, x, k, weights)
        for one, other in zip(ours, with_gradients(by_loops, kind, x, k, weights), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", SIGNS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_fused_version_equals_the_plain_one_on_many_channels(kind, dtype):
    """Several bands of channels, the last of them not full; a third of each image is flat."""
    x = nodes((9, 8), 150, dtype, num_images=3).detach()
    x[:, :3] = 0.5
    x.requires_grad_()
    weights = torch.randn_like(x)
    ours, theirs = (
        with_gradients(partial(of_kind, fused=fused), kind, x, 2, weights)
        for fused in (True, False)
    )
    near = 1e-12 if dtype == torch.float64 else 1e-4
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=near, atol=near)


@pytest.mark.parametrize("kind", SIGNS)
def test_bfloat16_is_float32_rounded_once(kind):
    """The plain version rounds what every link gives, and so has ties that there are not."""
    x = nodes((9, 8), 150, torch.bfloat16)
    weights = torch.randn_like(x)
    y, d_x, _ = with_gradients(of_kind, kind, x, 2, weights)
    wide = x.detach().float().requires_grad_()
    expected = with_gradients(of_kind, kind, wide, 2, weights.float())
    # The temperature is one of x's type.
    near = 0.05 if kind == "soft" else 0.0
    torch.testing.assert_close(y, expected[0].bfloat16(), rtol=near, atol=near)
    torch.testing.assert_close(d_x, expected[1].bfloat16(), rtol=near, atol=near)


def test_the_number_of_threads_changes_nothing():
    x = nodes((16, 16), 96, torch.float32)
    weights = torch.randn_like(x)
    for kind in SIGNS:
        assert_threads_change_nothing(partial(with_gradients, of_kind, kind, x, 2, weights))


@versions
@pytest.mark.parametrize("kind", ["every", "near", "soft"])
def test_what_is_not_finite_comes_through(fused, kind):
    """Also where a gate is closed to it, as 0 times it is not a number."""
    for value in (torch.nan, torch.inf):
        x = nodes((4, 4)).detach()
        x[0, 1, 2, 3] = value
        y = of_kind(kind, x, 1, torch.tensor(1.0, dtype=torch.float64), fused)
        assert not y[0, 1, 2, 3].isfinite()
        assert y[1].isfinite().all()


@versions
def test_of_equal_numbers_the_later_link_gets_half_of_the_gradient(fused):
    """Three links that tie at the 0 it starts from get 1/8, 1/4 and 1/2; the 0 keeps 1/8."""
    x = torch.zeros(1, 1, 4, 1, dtype=torch.float64, requires_grad=True)
    links = [Link(1, 1), Link(1, 2), Link(1, 3)]
    (gradient,) = torch.autograd.grad(axial(x, links, fused=fused)[0, 0, 0, 0], x)
    # Node 0 is linked to nodes 3, 2 and 1.
    assert gradient.flatten().tolist() == [-7 / 8, 1 / 2, 1 / 4, 1 / 8]


@versions
def test_a_gate_has_the_gradients_of_finite_differences(fused):
    x = nodes((4, 3))
    temperature = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    links = make_links("soft", (4, 3), 2)

    def run(x, t):
        return axial(x, links, 1, None, t, fused=fused)

    assert torch.autograd.gradcheck(run, (x, temperature))


def test_a_temperature_without_a_link_has_a_gradient_for_ddp():
    conv = AxialConv(4, 4, "soft", 2, "batch")
    assert not any(link.gated for link in make_links("soft", (1, 1), 2))
    conv(torch.rand(2, 1, 1, 4)).sum().backward()
    assert conv.temperature is not None
    assert conv.temperature.grad == 0
