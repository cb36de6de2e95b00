"""Initial weights of a wide model: drawn as its constructor does, the same whoever draws them."""

from typing import Any

import pytest
import torch
from torch import nn

from vigpipe.model.gnn.create import create_graph_model
from vigpipe.model.initial import TILE, Draw, drawn
from vigpipe.model.slicing import Side
from vigpipe.model.variants import create_model

UNIFORM, NORMAL = Draw("uniform", (-0.25, 0.75)), Draw("normal", (1.0, 2.0))


GRAPH_MODELS = [  # each norm takes its turn
    ("gcn", None, "batch"),
    ("sage", "mean", "layer"),
    ("sage", "max", "none"),
    ("sage", "pool", "batch"),
    ("gat", "v1", "batch"),
    ("gat", "v2", "layer"),
    ("gin", None, "layer"),
    ("gcn2", None, "batch"),
]


def check_like_a_real_one(make):
    """Numbers of a real model are where the draws say, at most six standard errors from it."""
    torch.manual_seed(1)
    model, draws = make(), drawn(make)
    state = model.state_dict()
    assert draws.keys() == state.keys()
    for name, tensor in state.items():
        draw = draws[name]
        if draw is None:
            assert name.endswith(("num_batches_tracked", "relative_pos")), name
        elif draw.rule == "constant":
            assert tensor.eq(draw.values[0]).all(), name
        else:
            like = torch.empty(tensor.shape)
            draw.fill(like, name, 0, tensor.shape)
            for numbers in (tensor, like):
                if draw.rule == "uniform":
                    lower, upper = draw.values
                    assert numbers.min() >= lower, name
                    assert numbers.max() <= upper, name
                    mean, std = (lower + upper) / 2, (upper - lower) / 12**0.5
                else:
                    mean, std = draw.values
                error = 6 * std / numbers.numel() ** 0.5
                assert abs(numbers.mean() - mean) < error, name
                if numbers.numel() > 100:
                    assert abs(numbers.std() - std) < error, name
    return {draw.rule for draw in draws.values() if draw is not None}


@pytest.mark.parametrize(("name", "aggregator", "norm"), GRAPH_MODELS)
def test_every_parameter_of_a_graph_model_is_drawn_as_in_a_real_one(name, aggregator, norm):
    sizes: Any = {"in_channels": 13, "num_classes": 3, "num_layers": 3, "width": 24}
    options: Any = {"heads": 2 if name == "gat" else 1, "aggregator": aggregator, "norm": norm}
    rules = check_like_a_real_one(lambda: create_graph_model(name, **sizes, **options))
    assert "uniform" in rules


@pytest.mark.filterwarnings("ignore::vigpipe.model.blocks.FewNodesWarning")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vig_digits", {"norm": "layer"}),
        ("pvig_cifar_ti", {}),
    ],
)
def test_every_parameter_of_vig_is_drawn_as_in_a_real_one(name, options):
    rules = check_like_a_real_one(lambda: create_model(name, num_classes=7, **options))
    assert rules == {"constant", "normal"}


class Odd(nn.Module):
    """Does all that can be done to a weight; the last thing counts."""

    def __init__(self):
        super().__init__()
        self.zeroed = nn.Parameter(torch.rand(3, 4))
        self.full = nn.Parameter(torch.full((3,), 0.5))
        self.filled = nn.Parameter(torch.empty(3))
        self.reshaped = nn.Parameter(torch.empty(3, 4).view(4, 3))
        self.part = nn.Parameter(torch.zeros(3, 4))
        self.scaled = nn.Parameter(torch.empty(3, 4).normal_())
        self.truncated = nn.Parameter(torch.empty(3, 4))
        self.unknown = nn.Parameter(torch.empty(3))
        self.redrawn = nn.Parameter(torch.zeros(3))
        with torch.no_grad():
            self.zeroed.zero_()
            self.filled.uniform_().fill_(2)
            nn.init.normal_(self.reshaped.view(2, 6), std=3.0)
            self.part[:2].fill_(1)
            self.scaled.mul_(2)
            nn.init.trunc_normal_(self.truncated)
            self.redrawn.add_(1).uniform_(to=2)
        self.register_buffer("computed", torch.arange(3.0) * 2)
        self.register_buffer("not_saved", torch.zeros(3), persistent=False)


def test_the_last_of_several_fillings_counts_and_what_is_computed_is_not_known():
    assert drawn(Odd) == {
        "zeroed": Draw("constant", (0.0,)),
        "full": Draw("constant", (0.5,)),
        "filled": Draw("constant", (2.0,)),
        "reshaped": Draw("normal", (0.0, 3.0)),
        "part": None,
        "scaled": None,
        "truncated": None,
        "unknown": None,
        "redrawn": Draw("uniform", (0.0, 2.0)),
        "computed": None,
    }


def filled(draw, whole, seed=3, name="w", dtype=torch.float32):
    target = torch.full(whole, torch.nan, dtype=dtype)
    draw.fill(target, name, seed, whole)
    assert not target.isnan().any()
    return target


@pytest.mark.parametrize(
    ("draw", "whole", "dim", "side"),
    [
        (NORMAL, (1200, 7), 0, Side("a")),
        (UNIFORM, (2400, 600), 0, Side("a", repeats=2)),
        (NORMAL, (7, 2400), 1, Side("a", repeats=2)),
        (UNIFORM, (3, 2400), 1, Side("a", run=2)),
        (NORMAL, (1200, 40, 3, 3), 0, Side("a")),
        (NORMAL, (2, 3, 1200, 2), 2, Side("a")),
    ],
)
def test_blocks_of_all_owners_make_the_same_tensor(draw, whole, dim, side):
    expected = filled(draw, whole)
    n = whole[dim] // side.length(1)
    for num in (1, 2, 4):
        for k in range(num):
            entries = side.entries(torch.arange(k * n // num, (k + 1) * n // num), n)
            shape = (*whole[:dim], len(entries), *whole[dim + 1 :])
            owned = torch.full(shape, torch.nan)
            draw.fill(owned, "w", 3, whole, dim, entries)
            assert torch.equal(owned, expected.index_select(dim, entries))


def test_any_entries_can_be_drawn_and_other_dtypes_have_the_same_numbers():
    whole = (TILE + 9, 2 * TILE + 5)
    expected = filled(NORMAL, whole)
    entries = torch.randperm(whole[1])[:77].sort().values
    part = torch.empty(whole[0], 77)
    NORMAL.fill(part, "w", 3, whole, 1, entries)
    assert torch.equal(part, expected[:, entries])
    NORMAL.fill(torch.empty(whole[0], 0), "w", 3, whole, 1, entries[:0])
    NORMAL.fill(torch.empty(0, whole[1]), "w", 3, whole, 0, entries[:0])
    for dtype in (torch.float64, torch.bfloat16):
        assert torch.equal(filled(NORMAL, whole, dtype=dtype), expected.to(dtype))


def test_numbers_depend_on_seed_and_name_and_no_two_tiles_are_equal():
    whole = (2 * TILE, 2 * TILE)
    first = filled(UNIFORM, whole)
    others = [filled(UNIFORM, whole, seed=4), filled(UNIFORM, whole, name="v")]
    both = (slice(TILE), slice(TILE, None))
    tiles = [t[i, j] for t in (first, *others) for i in both for j in both]
    assert all((a != b).float().mean() > 0.99 for i, a in enumerate(tiles) for b in tiles[i + 1 :])
    assert torch.equal(first, filled(UNIFORM, whole))


def test_a_scalar_and_a_constant_are_filled():
    assert filled(Draw("constant", (7.0,)), ()) == 7
    assert filled(Draw("uniform", (2.0, 3.0)), ()) > 2
    counts = torch.zeros(3, 2, dtype=torch.int64)
    Draw("constant", (1.0,)).fill(counts, "n", 0, (6, 2), 0, torch.arange(3))
    assert counts.eq(1).all()
