"""Replayed steps, without a GPU: a replay finds of its batch what a CUDA graph would find."""

from dataclasses import replace

import pytest
import torch

from tests.oracle import images_of, shortened, with_images
from tests.refusals import check_refusals
from tests.steps import state_after
from vigpipe.config.options import TrainConfig
from vigpipe.parallel.step_graph import NUM_WARMUP
from vigpipe.run.facts import prepare
from vigpipe.run.rank import make_rank_state
from vigpipe.run.recorded import is_recorded
from vigpipe.timing.clock import HostClock
from vigpipe.timing.recorder import Recorder

CPU = torch.device("cpu")
CONFIG = TrainConfig(
    data="fake",
    image_size=8,
    batch_size=8,  # an epoch of 20 images has two batches of this size, and a smaller one
    microbatches=2,
    epochs=3,
    drop_path=0.3,
    dropout=0.2,
    mixup=0.8,
    ema=0.9,
    opt="adamw",
    sync="drain",
    cuda_graph=True,
)


class Recorded:
    """Records functions for the CPU, and counts."""

    def __init__(self):
        self.num_recorded = self.num_replayed = 0

    def __call__(self, function):
        assert CONFIG.microbatches is not None
        self.num_recorded += 1
        losses = torch.empty(CONFIG.microbatches, dtype=torch.float64)

        def replay():
            self.num_replayed += 1
            losses.copy_(function())

        return replay, losses


@pytest.fixture
def recorded(monkeypatch):
    recorded = Recorded()
    monkeypatch.setattr("vigpipe.run.rank.runs_ahead", lambda device: True)
    monkeypatch.setattr("vigpipe.run.rank.record_graph", recorded)
    return recorded


def test_replayed_steps_are_those_that_were_not_recorded(recorded):
    """Losses, weights, moments, statistics and moving average, with a smaller batch between."""

    def trained(config):
        run = prepare(config, torch.float32)
        return state_after(with_images(run, shortened(images_of(run), 20, 4)), CPU)

    losses, state = trained(CONFIG)
    expected_losses, expected = trained(replace(CONFIG, cuda_graph=False))
    assert losses == expected_losses
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name
    assert (recorded.num_recorded, recorded.num_replayed) == (1, 3 * 2 - NUM_WARMUP)


def test_a_step_that_cannot_be_recorded_is_refused(monkeypatch):
    def make(changes, has_gpu=True, recorder=None):
        monkeypatch.setattr("vigpipe.run.rank.runs_ahead", lambda device: has_gpu)
        make_rank_state(prepare(replace(CONFIG, **changes), torch.float32), 0, CPU, recorder)

    rows = [
        ({"stages": 2}, "--stages is 2"),
        ({"sync": "double"}, "--sync double does more in a backward"),
        ({"batch_size": 301}, "301 samples make 2 of unequal size"),
        ({"detect_anomaly": True}, "--detect-anomaly"),
        ({}, False, "a graph runs on a GPU"),
        ({}, True, Recorder(HostClock(), 0, 0, 0, 1), "no parts that could be timed"),
    ]
    check_refusals(rows, make, "^--cuda-graph: .*")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"dtype": "bfloat16"}, True),
        ({"cuda_graph": False}, False),
        ({"dtype": "float16"}, False),
        ({"compile": True}, False),
        ({"detect_anomaly": True}, False),
        ({"dp": 2}, False),
    ],
)
def test_steps_are_recorded_by_default_where_that_has_been_tried(changes, expected):
    config = replace(replace(CONFIG, cuda_graph=None), **changes)
    run = prepare(config, torch.float32)
    assert is_recorded(run, "drain", on_gpu=True, is_timed=False) == expected
    if expected:
        assert not is_recorded(run, "drain", on_gpu=True, is_timed=True)
        assert not is_recorded(run, "drain", on_gpu=False, is_timed=False)
