"""Positional tables: their formula node by node, and their resizing in both directions."""

import math

import pytest
import torch
import torch.nn.functional as F

from vigpipe.model.position import (
    pooled_grid,
    relative_distance,
    relative_distance_by_raster,
    resized_by_raster,
    resized_embedding,
)


def code(row, column, channels):
    """The sine-cosine code of one position: column first, sines first."""
    quarter = channels // 4
    omega = [10000 ** (-i / quarter) for i in range(quarter)]
    return [
        function(place * w) for place in (column, row) for function in (math.sin, math.cos)
        for w in omega
    ]  # fmt: skip


def by_formula(channels, grid, positions=None):
    positions = positions or [(r, c) for r in range(grid[0]) for c in range(grid[1])]
    codes = [code(r, c, channels) for r, c in positions]
    return [[-2 / channels * sum(a * b for a, b in zip(p, q, strict=True)) for q in codes]
            for p in codes]  # fmt: skip


def test_relative_distances_are_those_of_the_formula():
    table = relative_distance(8, (3, 4), 1)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table[0], torch.tensor(by_formula(8, (3, 4))), rtol=0, atol=1e-6)


def test_near_nodes_are_nearest():
    table = relative_distance(96, (14, 14), 1)[0]
    assert torch.equal(table.argmin(1), torch.arange(196))
    assert set(table[30].argsort()[:5].tolist()) == {30, 29, 31, 16, 44}


def test_a_pooled_candidate_is_where_its_nodes_are():
    whole, pooled = relative_distance(16, (4, 6), 1)[0], relative_distance(16, (4, 6), 2)[0]
    blocks = whole.view(24, 2, 2, 3, 2).mean((2, 4)).flatten(1)
    torch.testing.assert_close(pooled, blocks, rtol=0, atol=1e-6)


def test_another_size_keeps_its_meaning_relative_to_the_image():
    table = relative_distance(8, (6, 4), 1, base=(3, 2))
    places = [((r + 0.5) / 2 - 0.5, (c + 0.5) / 2 - 0.5) for r in range(6) for c in range(4)]
    expected = torch.tensor(by_formula(8, (6, 4), places))
    torch.testing.assert_close(table[0], expected, rtol=0, atol=1e-6)


def test_the_published_resizing_goes_along_the_raster():
    whole = relative_distance(8, (4, 4), 1)
    expected = F.interpolate(whole[None], size=(16, 4), mode="bicubic")[0]
    assert torch.equal(relative_distance_by_raster(8, (4, 4), 2), expected)
    in_two_dimensions = relative_distance(8, (4, 4), 2)
    assert (expected - in_two_dimensions).abs().max() > 0.1
    assert torch.equal(relative_distance_by_raster(8, (4, 4), 1), whole)
    assert torch.equal(resized_by_raster(whole, (4, 4), 1), whole)


def test_an_embedding_is_resized_in_both_directions():
    rows = torch.arange(4.0).view(1, 1, 4, 1).expand(1, 2, 4, 6)
    resized = resized_embedding(rows, (8, 3))
    assert resized.shape == (1, 2, 8, 3)
    assert (resized.diff(dim=2) > 0).all()  # still rises downwards
    assert (resized.diff(dim=3).abs() < 1e-6).all()  # and is flat sideways
    assert resized_embedding(rows, (4, 6)) is rows
    assert resized_embedding(rows.bfloat16(), (8, 3)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("grid", "pooled"), [((56, 56), (14, 14)), ((7, 6), (2, 2)), ((1, 9), (1, 3))]
)
def test_the_last_candidate_may_stand_for_fewer_nodes(grid, pooled):
    assert pooled_grid(grid, 4) == pooled
    assert relative_distance(8, grid, 4).shape == (1, grid[0] * grid[1], pooled[0] * pooled[1])
