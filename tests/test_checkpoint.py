"""Weights come together under the unsplit model's names, and come back from the file."""

import pytest
import torch
from safetensors.torch import load_file

from tests.world import run_ranks
from vigpipe.checkpoint import gather_named, save_weights


def gathered(rank, world_size, to_stage):
    mine = {f"blocks.{rank}.weight": torch.full((2, 2), float(rank))}
    return gather_named(mine, torch.distributed.group.WORLD, to_stage)


@pytest.mark.multiprocess
def test_one_rank_receives_the_parts_of_all():
    got = run_ranks(gathered, 3, 1)
    assert got[0] is got[2] is None
    assert {name: float(t.sum()) for name, t in got[1].items()} == {
        "blocks.0.weight": 0.0,
        "blocks.1.weight": 4.0,
        "blocks.2.weight": 8.0,
    }


def test_what_was_gathered_no_longer_changes_with_training():
    weight = torch.nn.Parameter(torch.ones(3))
    copy = gather_named({"w": weight}, None, 0)
    with torch.no_grad():
        weight.zero_()
    assert copy is not None
    assert copy["w"].tolist() == [1, 1, 1]
    assert not copy["w"].requires_grad


def test_saved_weights_come_back_in_every_dtype_and_stride(tmp_path):
    path = tmp_path / "model.safetensors"
    state = {
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "double": torch.tensor([1 / 3], dtype=torch.float64),
        "counter": torch.tensor(7),
    }
    save_weights(path, state)
    loaded = load_file(path)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert all(loaded[name].dtype == tensor.dtype for name, tensor in state.items())
