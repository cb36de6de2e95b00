"""What the pieces of a model cost, measured in one process and beside others."""

import pytest
import torch

from tests.world import run_ranks
from vigpipe.config.options import TrainConfig
from vigpipe.profiling import measure as profiling
from vigpipe.profiling.measure import measure, sizes
from vigpipe.run.facts import prepare
from vigpipe.run.rank import make_rank_state

CPU = torch.device("cpu")


def run(**options):
    return prepare(TrainConfig(**options), torch.float32)


def quick(run, rank, rows):
    """`measure` with as few steps as it can do with."""
    few = {"_SECONDS": 0.0, "_LEAST_STEPS": 1, "_NUM_ROUNDS": 1, "_LARGE": 1 << 16}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in few.items():
            patch.setattr(profiling, name, value)
        return measure(run, rank, CPU, rows)


@pytest.fixture(scope="module")
def profile():
    found = quick(run(), 0, [2, 4])
    assert found is not None
    return found


def test_every_piece_takes_time_forward_and_backward(profile):
    assert [block.name for block in profile.blocks] == [f"block {i}" for i in range(4)]
    for piece in (*profile.blocks, profile.readout):
        assert min(*piece.forward, *piece.backward) > 0, piece
    assert min(profile.stem.forward) > 0
    assert profile.update_seconds >= profile.fixed_seconds > 0


def test_weights_are_counted_once(profile):
    model = run().build()
    assert profile.parameter_bytes == 4 * sum(p.numel() for p in model.parameters())


def test_boundaries_are_those_of_the_model(profile):
    height, width, channels = run().build().boundary_shape(1)
    assert profile.blocks[0].boundary_bytes == tuple(
        4.0 * rows * height * width * channels for rows in (2, 4)
    )


def test_activations_grow_with_the_rows(profile):
    for piece in (profile.stem, *profile.blocks, profile.readout):
        small, large = piece.activation_bytes
        assert 0 < small < large < 4 * small, piece


def test_activations_are_what_autograd_saves():
    # Against one torch-wide hook over the whole model, in place of one a piece.
    one = run()
    rank_state, batch = profiling._trial(one, 4, CPU)
    kept = sum(profiling._activation_bytes(rank_state, batch).values())
    weights = {p.untyped_storage().data_ptr() for p in rank_state.parameters().values()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    images, labels, half = batch.images, batch.labels, len(batch.keys) // 2
    assert images is not None
    assert labels is not None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = rank_state.pipeline.stage_modules[0](images[:half], batch.keys[:half])
        rank_state.pipeline.loss(logits, labels[:half])
    assert kept == pytest.approx(sum(size for size, _ in saved.values()), rel=0.02)


def test_recomputation_keeps_the_inputs_of_the_blocks(profile):
    found = quick(run(recompute="always"), 0, [4])
    assert found is not None
    for before, block in zip((profile.stem, *profile.blocks), found.blocks, strict=False):
        assert block.activation_bytes[0] == before.boundary_bytes[1]


def test_optimizer_state_and_gradients_are_counted():
    # Adam keeps two numbers a weight; --sync double a float64 sum and the rounded gradient.
    rank_state, batch = profiling._trial(run(opt="adam", sync="double"), 4, CPU)
    profiling.train_step(rank_state, batch)
    assert profiling._optimizer_bytes(rank_state) == pytest.approx(2 + 2 + 1, rel=0.01)
    rank_state, batch = profiling._trial(run(opt="sgd", sync="drain"), 4, CPU)
    profiling.train_step(rank_state, batch)
    assert profiling._optimizer_bytes(rank_state) == pytest.approx(1 + 1, rel=0.01)  # momentum


def test_few_sizes_span_all_of_them():
    assert sizes(20, 1, (1, 2, 4, 5), most=4) == [4, 5, 10, 20]
    chosen = sizes(96, 1, (1, 2, 3, 4, 6, 8, 12, 16, 24, 48), most=4)
    assert len(chosen) == 4
    assert (chosen[0], chosen[-1]) == (2, 96)


def test_the_profiled_model_is_the_unsplit_one_whatever_the_layout():
    split = run(stages=2, microbatches=2, dp=1)
    rank_state = make_rank_state(split.unsplit(), 0, CPU)
    measured, _ = profiling._trial(split, 3, CPU)
    assert measured.parameters().keys() == rank_state.parameters().keys()


def _measure_beside(rank, world_size):
    torch.set_num_threads(1)
    return quick(run(stages=1, dp=world_size), rank, [2])


@pytest.mark.multiprocess
def test_ranks_side_by_side_show_slowdown_and_transfer():
    first, other = run_ranks(_measure_beside, 2)
    assert other is None
    assert len(first.slowdown) == 2
    assert first.slowdown[0] == 1
    assert first.slowdown[1] >= 1
    assert 0 < first.latency_seconds < 1
    assert 0 < first.bandwidth < 1e12
