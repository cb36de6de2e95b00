"""What ranks store of a wide model, and the slices that travel: by brute force, whole."""

import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.full_disk import files_of_at_most
from tests.model.test_slicing import pyramid, study
from tests.replication.subnetworks.threads import Threads, run_threads
from vigpipe.errors import InputError
from vigpipe.model.gnn.create import create_graph_model
from vigpipe.model.slicing import Slicing, block
from vigpipe.model.staged import StagedModel
from vigpipe.replication.subnetworks import rows
from vigpipe.replication.subnetworks.draws import Channels, draw_channels
from vigpipe.replication.subnetworks.moments import Moments, is_moment, moment_name
from vigpipe.replication.subnetworks.rows import Index, Wide, WideRows, put_part

WIDTH = 16
MODELS: dict[str, dict[str, Any]] = {
    "gcn": {},
    "sage": {"norm": "layer"},
    "sage-pool": {"aggregator": "pool"},
    "gat": {"heads": 2},
    "gat-v2": {"aggregator": "v2", "heads": 2},
    "gin": {"norm": "batch"},
    "gcn2": {"norm": "batch"},
    # Of these the model's input is divided too.
    "gcn/input": {},
    "sage/input": {"norm": "batch"},
    "gat-v2/input": {"aggregator": "v2", "heads": 2},
    "gcn2/input": {},
}
IMAGES = {
    "vig-inner": partial(pyramid, "knn"),
    "vig-tied": partial(pyramid, "knn", divided="tied"),
    "study": study,
}
WORLDS = [(model, 4) for model in MODELS]
WORLDS += [("gcn", 1), ("gcn", 2), ("sage-pool", 2), ("gat", 2), ("gcn2/input", 2)]
WORLDS += [(model, 2) for model in IMAGES]


def make(model: str, num_parts: int = 1) -> StagedModel:
    if model in IMAGES:
        return IMAGES[model](narrow=num_parts).double()
    name: Any = re.split("[-/]", model)[0]
    return create_graph_model(
        name,
        in_channels=8 // (num_parts if divides_input(model) else 1),
        num_classes=3,
        num_layers=3,
        width=WIDTH // num_parts,
        **MODELS[model],
    ).double()


def divides_input(model: str) -> bool:
    return model.endswith("/input")


def table_of(model: str) -> Slicing:
    wide: Any = make(model)
    return (
        wide.slicing(divided="tied") if model == "vig-tied" else wide.slicing(divides_input(model))
    )


@cache
def wide_model(model: str) -> Mapping[str, Tensor]:
    """A wide model, whose numbers are all different."""
    state = make(model).state_dict()
    for i, tensor in enumerate(state.values()):
        if tensor.is_floating_point():
            tensor.copy_(1000 * i + torch.arange(tensor.numel()).view(tensor.shape))
    return state


def rows_of(model: str, ranks: Threads, *, carries: bool = False) -> WideRows:
    """What a rank stores, and its sub-model; its moments too, if they travel."""
    whole = wide_model(model)
    narrow = make(model, ranks.size)
    optimizer = torch.optim.SGD(narrow.parameters(), momentum=0.9)
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}

    def fill(target: Tensor, name: str, index: Index) -> None:
        put_part(target, whole[name], index)

    slicing, parameters = table_of(model), dict(narrow.named_parameters())
    moments = Moments(optimizer, parameters, ["momentum_buffer"] if carries else [])
    if carries:
        for parameter in parameters.values():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        of = {moment_name("momentum_buffer", name): name for name in parameters}
        shapes |= {moment: shapes[name] for moment, name in of.items()}
        sides = {moment: slicing.sides[name] for moment, name in of.items()}
        slicing = replace(slicing, sides={**slicing.sides, **sides})
    return WideRows(Wide(slicing, shapes, narrow.state_dict(), fill, optimizer, moments), ranks)


def whole_from(all_rows: list[WideRows]) -> dict[str, Tensor]:
    """Put together what all ranks store."""
    first = all_rows[0]
    state = {name: torch.empty(shape) for name, shape in first.wide.shapes.items()}
    for name in first.stored:
        dim, side, size = first.wide.slicing.owned_side(name)
        state[name] = torch.full(first.wide.shapes[name], torch.nan, dtype=torch.float64)
        for rank, of_rank in enumerate(all_rows):
            entries = side.entries(torch.tensor(block(size, len(all_rows), rank)), size)
            state[name].index_copy_(dim, entries, of_rank.stored[name])
    return {**state, **first.whole}


def of_sub_model(rows: WideRows, name: str) -> Tensor:
    """A tensor of a sub-model, or of its optimizer."""
    return {**rows.wide.narrow, **rows.wide.moments}[name]


def sliced(name: str, tensor: Tensor, rows: WideRows, channels: Channels) -> tuple[Tensor, Tensor]:
    """The slice of a tensor by its definition, and which of its numbers it has."""
    has = torch.ones_like(tensor, dtype=torch.bool)
    for dim, side in enumerate(rows.wide.slicing.sides[name]):
        if side is not None:
            size = rows.wide.slicing.sizes[side.group]
            of_dim = torch.zeros(tensor.shape[dim], dtype=torch.bool)
            wanted = set(channels[side.group].tolist())
            for entry in range(tensor.shape[dim]):
                of_dim[entry] = entry // side.run % size in wanted
            has &= of_dim.view([-1 if d == dim else 1 for d in range(tensor.dim())])
    shape = of_sub_model(rows, name).shape
    return tensor[has].view(shape), has


@pytest.mark.parametrize(("model", "m"), WORLDS)
def test_a_round_takes_slices_and_changes_these_and_nothing_else(model: str, m: int) -> None:
    chosen = draw_channels(table_of(model).sizes, m, seed=3, round_index=1)

    def work(ranks: Threads) -> tuple[WideRows, dict[str, Tensor]]:
        own = rows_of(model, ranks)
        own.take(chosen)
        taken = {name: tensor.clone() for name, tensor in own.wide.narrow.items()}
        for tensor in own.wide.narrow.values():
            tensor += ranks.rank + 1
        own.give(chosen)
        return own, taken

    found = run_threads(m, work)
    all_rows = [own for own, _ in found]
    after = whole_from(all_rows)
    for name, before in wide_model(model).items():
        change = torch.zeros_like(before)
        owned = all_rows[0].wide.slicing.owned(name)
        for rank, (channels, (own, taken)) in enumerate(zip(chosen, found, strict=True)):
            expected, has = sliced(name, before, own, channels)
            assert torch.equal(taken[name], expected), name
            change[has] += rank + 1
        if owned is None and before.is_floating_point():  # whole in all of them: the mean
            of_means = (m * m - 1) / 12 if name.endswith("running_var") else 0.0
            assert torch.allclose(after[name], before + (m + 1) / 2 + of_means)
            assert all(torch.equal(r.whole[name], after[name]) for r in all_rows)
        elif owned is not None:
            assert torch.equal(after[name], before + change), name
            num_sides = sum(side is not None for side in all_rows[0].wide.slicing.sides[name])
            assert int((change != 0).sum()) == before.numel() // m ** (num_sides - 1)


@pytest.mark.parametrize("model", ["gcn", "gcn/input"])
@pytest.mark.parametrize("carries", [False, True])
def test_bytes_of_a_round_are_those_of_the_slices_that_others_store(
    model: str, carries: bool
) -> None:
    m = 4
    chosen = draw_channels(table_of(model).sizes, m, seed=5, round_index=2)

    def work(ranks: Threads) -> tuple[int, int, WideRows]:
        own = rows_of(model, ranks, carries=carries)
        own.take(chosen)
        taken = own.bytes_sent
        own.give(chosen)
        return taken, own.bytes_sent - taken, own

    found = run_threads(m, work)
    taken, given = sum(t for t, _, _ in found), sum(g for _, g, _ in found)
    all_rows = [of_rank[2] for of_rank in found]
    # The bias of 3 logits, and its moments, padded to as many numbers for each rank.
    of_whole = 2 * (m - 1) * 8 * m * (1 + carries)
    elsewhere = 0
    slicing = all_rows[0].wide.slicing
    for name in all_rows[0].stored:
        _, side, size = slicing.owned_side(name)
        for rank, channels in enumerate(chosen):
            own_channels = sum(int(c) in block(size, m, rank) for c in channels[side.group])
            numel = of_sub_model(all_rows[rank], name).numel()
            elsewhere += 8 * numel * (size // m - own_channels) // (size // m)
    assert taken == elsewhere
    assert given == elsewhere + of_whole
    num_moments = sum(map(is_moment, all_rows[0].stored))
    assert num_moments == (len(all_rows[0].stored) // 2 if carries else 0)


@pytest.mark.parametrize(("m", "round_index"), [(1, 0), (2, 1), (8, 0)])
def test_channels_are_divided_anew_in_every_round(m: int, round_index: int) -> None:
    sizes = {"channels.1": 16, "channels.2": 16}
    chosen = draw_channels(sizes, m, seed=1, round_index=round_index)
    for name, size in sizes.items():
        together = torch.cat([channels[name] for channels in chosen])
        assert together.sort().values.tolist() == list(range(size))
        assert all(channels[name].diff().min() > 0 for channels in chosen)
    again, other = (draw_channels(sizes, m, seed=1, round_index=i) for i in (round_index, 7))
    assert all(torch.equal(a[n], b[n]) for a, b in zip(chosen, again, strict=True) for n in sizes)
    if m > 1:
        assert not torch.equal(chosen[0]["channels.1"], other[0]["channels.1"])
        assert not torch.equal(chosen[0]["channels.1"], chosen[0]["channels.2"])


def test_tensors_travel_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_NUMBERS_AT_ONCE", 100)
    test_a_round_takes_slices_and_changes_these_and_nothing_else("sage", 2)


# The weights are 464 numbers of 8 bytes, and so are their moments.
@pytest.mark.parametrize(("carries", "most"), [(False, 1_000), (True, 6_000)])
def test_a_full_disk_is_one_sentence(carries: bool, most: int) -> None:
    message = f"^{tempfile.gettempdir()}: cannot hold the 0.0 MB .*TMPDIR.*larger disk"
    message += ", or leave --carry-moments out$" if carries else "$"
    with files_of_at_most(most), pytest.raises(InputError, match=message):
        run_threads(1, lambda ranks: rows_of("gcn", ranks, carries=carries))


def test_variances_of_whole_channels_count_the_means_too() -> None:
    """Two sub-models with the channel's values 1, 3 and 5, 7: mean 4, variance 5."""

    def work(ranks: Threads) -> dict[str, Tensor]:
        numbers = {"n.running_mean": [2.0, 6.0], "n.running_var": [1.0, 1.0]}
        narrow = {n: torch.tensor([v[ranks.rank]]).double() for n, v in numbers.items()}
        slicing = table_of("gcn").__class__({}, dict.fromkeys(narrow, (None,)))
        optimizer = torch.optim.SGD([torch.zeros(1)])
        wide = Wide(slicing, dict.fromkeys(narrow, (1,)), narrow, lambda *_: None, optimizer)
        WideRows(wide, ranks).give([{}, {}])
        return narrow

    for narrow in run_threads(2, work):
        assert {n: t.item() for n, t in narrow.items()} == {
            "n.running_mean": 4.0,
            "n.running_var": 5.0,
        }
