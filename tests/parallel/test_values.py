"""Values and tensors reach other ranks as they are, and nothing of ours unpickles."""

import ast
import math

import pytest
import torch

from tests.world import ROOT, run_ranks
from vigpipe.parallel.values import (
    all_gather_values,
    broadcast_value,
    gather_tensors,
    gather_values,
)

VALUES = [None, [], {"": [1, -0.1, 2**70, True, "ä\x00", {}]}, "long" * 50_000]
TENSORS = {
    "scalar": torch.tensor(-0.0),
    "transposed": torch.arange(6.0).view(2, 3).T,
    "empty": torch.empty(0, 3),
    "half": torch.tensor([1.5, torch.inf], dtype=torch.bfloat16),
    "flags": torch.tensor([True, False]),
    "numbers": torch.tensor([[2**62]]),
}


def exchange(rank, world_size):
    mine = {name: tensor for i, (name, tensor) in enumerate(TENSORS.items()) if i % 2 == rank % 2}
    return (
        broadcast_value(VALUES[2] if rank == 0 else None, world_size),
        all_gather_values(VALUES[rank], world_size),
        gather_values([rank, -math.inf], world_size, 1),
        gather_tensors(mine, world_size, 2),
    )


@pytest.mark.multiprocess
def test_values_and_tensors_come_back_as_they_were():
    found = run_ranks(exchange, 4)
    for rank, (first, everybody, some, tensors) in enumerate(found):
        assert first == VALUES[2]
        assert everybody == VALUES
        assert some == ([[i, -math.inf] for i in range(4)] if rank == 1 else None)
        assert (tensors is None) == (rank != 2)
    for rank, tensors in enumerate(found[2][3]):
        assert list(tensors) == [*TENSORS][rank % 2 :: 2]
        for name, tensor in tensors.items():
            assert tensor.dtype == TENSORS[name].dtype
            assert tensor.shape == TENSORS[name].shape
            assert torch.equal(_bytes(tensor), _bytes(TENSORS[name]))


def _bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_one_rank_has_them_at_once():
    (tensors,) = gather_tensors(TENSORS, 1, 0) or []
    assert tensors.keys() == TENSORS.keys()
    assert (broadcast_value("x", 1), all_gather_values("x", 1)) == ("x", ["x"])
    assert gather_values("x", 1, 0) == ["x"]


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, [{"a": {"b": torch.ones(1)}}], [b"x"], {1, 2}])
def test_what_json_would_change_is_refused(value):
    with pytest.raises(TypeError, match="a value for other ranks has"):
        all_gather_values(value, 2)


# The classes that read what a file may hold, and call nothing that it names.
READERS = {"vigpipe/graphs/formats/old_pickle.py": {"Unpickler"}}
OF_PICKLE = {"load", "loads", "dump", "dumps", "Unpickler", "Pickler"}


def test_no_rank_of_ours_pickles_or_unpickles():
    for path in sorted((ROOT / "vigpipe").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                assert not node.attr.endswith(("_object", "_object_list")), f"{name}: {node.attr}"
                if owner in ("pickle", "cPickle", "dill", "cloudpickle", "joblib"):
                    allowed = READERS.get(name, set()) | {"UnpicklingError"}
                    assert node.attr not in OF_PICKLE - allowed, f"{name}: {owner}.{node.attr}"
            if isinstance(node, ast.ImportFrom) and node.module == "pickle":
                assert not {a.name for a in node.names} & OF_PICKLE, name
