"""The tensors of a rank's state: what is left out of compressed sums, of other replicas before."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vigpipe.checkpoint.state import _old_residuals, _restore_compressor, residuals
from vigpipe.errors import InputError
from vigpipe.parallel.layout import Layout
from vigpipe.parallel.shards import Shards


class Compressor:
    """What a compressor keeps of one parameter."""

    def __init__(self) -> None:
        self.residual, self.q = torch.zeros(2), torch.ones(3)

    def residuals(self):
        return {"residual/a": self.residual}

    def memory(self):
        return {"powersgd_q/a": self.q}


def rank_state(replica_index: int, num_replicas: int) -> Any:
    return SimpleNamespace(
        mesh=SimpleNamespace(replica_index=replica_index, shards=Shards()),
        reducer=SimpleNamespace(compressor=Compressor() if num_replicas > 1 else None),
        run=SimpleNamespace(layout=Layout(num_replicas=num_replicas)),
    )


def saved_by(num_replicas: int) -> dict[str, torch.Tensor]:
    """A checkpoint in which replica r has left out r + 1 and -r."""
    saved = {"powersgd_q/a": torch.full((3,), 7.0), "model/a": torch.zeros(2)}
    for replica in range(num_replicas):
        for name in residuals(rank_state(replica, num_replicas)):
            saved[name] = torch.tensor([replica + 1.0, -replica])
    return saved


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (3, 3, [[1.0, 0.0], [2.0, -1.0], [3.0, -2.0]]),
        (3, 2, [[4.0, -2.0], [2.0, -1.0]]),
        (2, 4, [[1.0, 0.0], [2.0, -1.0], [0.0, 0.0], [0.0, 0.0]]),
        (11, 2, [[36.0, -30.0], [30.0, -25.0]]),
    ],
)
def test_other_replicas_take_over_what_was_left_out_and_its_sum_stays(before, now, expected):
    saved = saved_by(before)
    for replica in range(now):
        state = rank_state(replica, now)
        _restore_compressor(state, saved, "here")
        assert state.reducer.compressor.residual.tolist() == expected[replica]
        assert state.reducer.compressor.q.tolist() == [7.0] * 3
    assert _old_residuals(saved, rank_state(0, 1)) == {}


def test_what_was_left_out_of_another_model_is_refused():
    saved = {"replica1/residual/a": torch.zeros(5)}
    with pytest.raises(InputError, match=r"here: residual/a is \(5,\) torch.float32, expected"):
        _restore_compressor(rank_state(1, 2), saved, "here")
