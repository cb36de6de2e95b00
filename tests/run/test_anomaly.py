"""What a step that is not finite is put down to."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vigpipe.ops.adjacency import Adjacency
from vigpipe.ops.sparse_rows import SparseRows
from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.run.anomaly import advise, find_largest

NODES = torch.tensor([[1.0, -7e30, 0.0], [2.0, 3.0, 4.0], [9e30, 0.0, 0.0]])  # and padding
IMAGES = torch.zeros(2, 1, 2, 2)
IMAGES[1, 0, 1, 0] = torch.nan
# Row 0 has nothing; row 1 has 5 in column 3 and -6 in column 0.
SPARSE = SparseRows(
    Adjacency(torch.tensor([0, 0, 2]), torch.tensor([3, 0]), 4), torch.tensor([5.0, -6.0])
)


@pytest.mark.parametrize(
    ("inputs", "structure", "largest"),
    [
        (NODES, (), "whose largest number is 7e+30 (feature 1 of node 0 of the batch)"),
        (IMAGES, (), "whose largest number is inf (a pixel of image 1 of the batch)"),
        (NODES[:, :0], (SPARSE,), "whose largest number is 6 (feature 0 of node 1 of the batch)"),
        (NODES[:, :0], (), "which is all 0"),
    ],
)
def test_the_largest_number_of_the_input_is_found(inputs, structure, largest, monkeypatch):
    monkeypatch.setattr("vigpipe.run.anomaly._NUMBERS_AT_ONCE", 2)
    batch = ReplicaBatch(0, 2, (2,), torch.zeros(3), inputs, None, (structure,))
    rank_state: Any = SimpleNamespace(strategy=SimpleNamespace(peers=(1, None)))
    assert find_largest(rank_state, batch) == largest


def test_the_rate_is_to_blame_only_once_weights_have_moved():
    run: Any = SimpleNamespace(config=SimpleNamespace(weights=None))
    assert advise(run, have_moved=True) == "lower --lr, or bound the gradient with --clip 1"
    assert "cause in the input, and mend" in advise(run, have_moved=False)
    run.config.weights = "w.safetensors"
    assert "cause in the input, X, or in --weights, and mend" in advise(run, "X", have_moved=False)
