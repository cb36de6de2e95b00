"""Bytes of activations and of the optimizer."""

import pytest
import torch

from tests.profiling.quick import CPU, make_run
from vigpipe.profiling.memory import activation_bytes, optimizer_bytes
from vigpipe.profiling.trial import make_trial
from vigpipe.run.step import train_step


def make_small_trial(**options):
    run = make_run(**options)
    return make_trial(run, run.job.trials([4], 2)[0], CPU)


def test_activations_are_what_autograd_saves():
    # Against one torch-wide hook over the whole model, in place of one a piece.
    trial = make_small_trial()
    kept = sum(activation_bytes(trial).values())
    rank_state, batch = trial
    weights = {p.untyped_storage().data_ptr() for p in rank_state.trained.parameters().values()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    images, labels, half = batch.inputs, batch.labels, len(batch.keys) // 2
    assert images is not None
    assert labels is not None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        (stage_module,) = rank_state.pipeline.stage_modules
        stage_module.begin(batch.sizes, stage_module.model.draw(batch.keys, torch.float32))
        logits = stage_module(images[:half])
        rank_state.pipeline.loss(logits, labels[:half])
    assert kept == pytest.approx(sum(size for size, _ in saved.values()), rel=0.02)


def test_optimizer_state_and_gradients_are_counted():
    # Adam keeps two numbers a weight; --sync double a float64 sum and the rounded gradient.
    rank_state, batch = make_small_trial(opt="adam", sync="double")
    train_step(rank_state, batch)
    assert optimizer_bytes(rank_state) == pytest.approx(2 + 2 + 1, rel=0.01)
    rank_state, batch = make_small_trial(opt="sgd", sync="drain")
    train_step(rank_state, batch)
    assert optimizer_bytes(rank_state) == pytest.approx(1 + 1, rel=0.01)  # momentum
