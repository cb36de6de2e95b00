"""The profile of a model: every piece has its costs, and the sizes that are profiled."""

import pytest

from tests.profiling.quick import make_run, quick_profile
from vigpipe.graphs.job import GraphJob
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
    assert profile.trained_bytes == 4 * sum(p.numel() for p in model.parameters())


def test_boundaries_are_those_of_the_model(profile):
    ((height, width, channels),) = make_run().build().boundary_shapes(1)
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


def test_a_graph_model_costs_by_nodes_and_edges():
    graph = {"model": "gcn2", "data": "sbm:400,4,12,6", "layers": 3, "width": 8}
    run = make_run(**graph, sampler="parts", partition="random", parts=10, norm="batch")
    found = quick_profile(run, 0, [])
    assert found is not None
    assert found.rows == ()
    assert [block.name for block in found.blocks] == ["block 0", "block 1", "block 2"]
    # A row of features, and for a layer of gcn2 those after the stem too.
    assert [p.boundary_bytes for p in found.blocks] == [
        (4.0 * channels, 0.0, 0.0) for channels in (16, 16, 16)
    ]
    assert found.amounts == ("nodes", "edges")
    typical = run.job.typical_microbatch
    assert typical is not None
    assert (typical.rows, typical.padded_rows) == (40, run.microbatch_size)
    assert isinstance(run.job, GraphJob)
    assert run.job.partition is not None
    assert typical.others == (run.job.partition.num_kept / 10,)
    kept = [found.at(block.activation_bytes, typical) for block in found.blocks]
    assert min(kept) > 4 * 8 * 40  # no less than what a layer hands on
    assert max(kept) < 3 * min(kept)


def test_few_sizes_span_all_of_them():
    assert microbatch_sizes_to_profile(20, 1, (1, 2, 4, 5), most=4) == [4, 5, 10, 20]
    chosen = microbatch_sizes_to_profile(96, 1, (1, 2, 3, 4, 6, 8, 12, 16, 24, 48), most=4)
    assert len(chosen) == 4
    assert (chosen[0], chosen[-1]) == (2, 96)
