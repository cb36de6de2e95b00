"""Axial aggregation against loops over the nodes, its gates' gradients, and its rule of ties."""

import pytest
import torch

from tests import mobile_reference
from vigpipe.model.axial import AxialConv, make_links
from vigpipe.ops.axial import Link, axial, axial_limit

# A side smaller than every shift, odd sides, a single row, a single node.
GRIDS = [(6, 5), (1, 4), (3, 2), (1, 1)]


def nodes(grid, num_channels=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, *grid, num_channels, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def of_kind(kind, x, k, temperature):
    links = make_links(kind, x.shape[1:3], k)
    limit = axial_limit(x) if kind == "near" else None
    return axial(x, links, -1 if kind in ("every", "powers") else 1, limit, temperature)


def by_loops(kind, x, k, temperature):
    images = x.movedim(-1, 1)
    if kind == "soft":
        return mobile_reference.soft(images, k, temperature).movedim(1, -1)
    if kind == "near":
        return mobile_reference.near(images, k, []).movedim(1, -1)
    return getattr(mobile_reference, kind)(images, k).movedim(1, -1)


@pytest.mark.parametrize("kind", ["every", "four", "near", "soft", "powers"])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("is_flat", [False, True])
def test_it_equals_loops_over_the_nodes_with_all_gradients(kind, grid, is_flat):
    """On flat images every link ties, and gradients depend on the order of links."""
    for k in (1, 2, 4):
        x = nodes(grid)
        if is_flat:
            x = torch.ones_like(x).requires_grad_()
        temperature = torch.tensor(-0.7, dtype=torch.float64, requires_grad=True)
        weights = torch.randn_like(x)
        inputs = x, temperature
        found = [
            (y, *torch.autograd.grad((y * weights + 0 * x).sum(), inputs, allow_unused=True))
            for y in (f(kind, x, k, temperature if kind == "soft" else None)
                      for f in (of_kind, by_loops))
        ]  # fmt: skip
        for ours, theirs in zip(*found, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_of_equal_numbers_the_later_link_gets_half_of_the_gradient():
    """Three links that tie at the 0 it starts from get 1/8, 1/4 and 1/2; the 0 keeps 1/8."""
    x = torch.zeros(1, 1, 4, 1, dtype=torch.float64, requires_grad=True)
    links = [Link(1, 1), Link(1, 2), Link(1, 3)]
    (gradient,) = torch.autograd.grad(axial(x, links)[0, 0, 0, 0], x)
    # Node 0 is linked to nodes 3, 2 and 1.
    assert gradient.flatten().tolist() == [-7 / 8, 1 / 2, 1 / 4, 1 / 8]


def test_a_gate_has_the_gradients_of_finite_differences():
    x = nodes((4, 3))
    temperature = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    links = make_links("soft", (4, 3), 2)
    assert torch.autograd.gradcheck(lambda x, t: axial(x, links, 1, None, t), (x, temperature))


def test_half_precision_measures_distances_in_float32():
    x = nodes((5, 4), 64, torch.bfloat16)
    links = make_links("near", (5, 4), 2)
    limit = axial_limit(x)
    assert limit.dtype == torch.float32
    y = axial(x, links, 1, limit)
    wide = axial(x.float(), links, 1, axial_limit(x.float()))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), wide, rtol=0.02, atol=0.02)


def test_a_temperature_without_a_link_has_a_gradient_for_ddp():
    conv = AxialConv(4, 4, "soft", 2, "batch")
    assert not any(link.gated for link in make_links("soft", (1, 1), 2))
    conv(torch.rand(2, 1, 1, 4)).sum().backward()
    assert conv.temperature is not None
    assert conv.temperature.grad == 0
