"""The profile of a model: every piece has its costs, and the sizes that are profiled."""

import pytest

from tests.profiling.quick import make_run, quick_profile
from vigpipe.profiling.measure import microbatch_sizes_to_profile


@pytest.fixture(scope="module")
def profile():
    found = quick_profile(make_run(), 0, [2, 4])
    assert found is not None
    return found


def test_every_piece_takes_time_forward_and_backward(profile):
    assert [block.name for block in profile.blocks] == [f"block {i}" for i in range(4)]
    for piece in (*profile.blocks, profile.readout):
        assert min(*piece.forward, *piece.backward) > 0, piece
    assert min(profile.stem.forward) > 0
    assert profile.update_seconds >= profile.fixed_seconds > 0


def test_weights_are_counted_once(profile):
    model = make_run().build()
    assert profile.parameter_bytes == 4 * sum(p.numel() for p in model.parameters())


def test_boundaries_are_those_of_the_model(profile):
    height, width, channels = make_run().build().boundary_shape(1)
    assert profile.blocks[0].boundary_bytes == tuple(
        4.0 * size * height * width * channels for size in (2, 4)
    )


def test_activations_grow_with_the_microbatch_size(profile):
    for piece in (profile.stem, *profile.blocks, profile.readout):
        small, large = piece.activation_bytes
        assert 0 < small < large < 4 * small, piece


def test_recomputation_keeps_the_inputs_of_the_blocks(profile):
    found = quick_profile(make_run(recompute="always"), 0, [4])
    assert found is not None
    for before, block in zip((profile.stem, *profile.blocks), found.blocks, strict=False):
        assert block.activation_bytes[0] == before.boundary_bytes[1]


def test_few_sizes_span_all_of_them():
    assert microbatch_sizes_to_profile(20, 1, (1, 2, 4, 5), most=4) == [4, 5, 10, 20]
    chosen = microbatch_sizes_to_profile(96, 1, (1, 2, 3, 4, 6, 8, 12, 16, 24, 48), most=4)
    assert len(chosen) == 4
    assert (chosen[0], chosen[-1]) == (2, 96)
