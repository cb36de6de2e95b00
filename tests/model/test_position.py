"""Positional tables: their formula node by node, and their resizing in both directions."""

import math

import torch

from vigpipe.model.position import (
    relative_distance,
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


def test_another_size_keeps_its_meaning_relative_to_the_image():
    table = relative_distance(8, (6, 4), 1, base=(3, 2))
    places = [((r + 0.5) / 2 - 0.5, (c + 0.5) / 2 - 0.5) for r in range(6) for c in range(4)]
    codes = torch.tensor([code(row, column, 8) for row, column in places])
    torch.testing.assert_close(table[0], -2 / 8 * codes @ codes.T, rtol=0, atol=1e-6)
    assert table.dtype == torch.float32


def test_an_embedding_is_resized_in_both_directions():
    rows = torch.arange(4.0).view(1, 1, 4, 1).expand(1, 2, 4, 6)
    resized = resized_embedding(rows, (8, 3))
    assert resized.shape == (1, 2, 8, 3)
    assert (resized.diff(dim=2) > 0).all()  # still rises downwards
    assert (resized.diff(dim=3).abs() < 1e-6).all()  # and is flat sideways
    assert resized_embedding(rows, (4, 6)) is rows
    assert resized_embedding(rows.bfloat16(), (8, 3)).dtype == torch.bfloat16
