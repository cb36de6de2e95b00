"""What a given layout is predicted to cost, worked out by hand."""

from dataclasses import replace

import pytest

from tests.planning.profiles import make_piece, make_profile
from vigpipe.data.batches import Share
from vigpipe.planning.step import Request, microbatch_sizes, predict, stage_costs

REQUEST = Request(2, 2, 16, (4,), (("gpipe", 1),))
BLOCKS = [
    make_piece(f"block {i}", 1.0, weights=100 * (i + 1), boundary=10 * (i + 1)) for i in range(4)
]
PROFILE = make_profile(
    BLOCKS,
    make_piece("stem", 0.5, weights=10),
    make_piece("readout", 0.25, weights=20),
    dispatch_seconds=0.125,
    latency_seconds=0.01,
    bandwidth=1000.0,
    update_seconds=1.0,
    fixed_seconds=0.2,
    base_bytes=7,
)
STAGES = ((0,), (1, 2, 3))


def test_costs_of_stages():
    costs = stage_costs(PROFILE, REQUEST, STAGES, 4)  # two samples a micro-batch
    assert costs.forward == [[2 * (1 + 0.5)] * 4, [2 * (3 + 0.25)] * 4]
    assert costs.backward == [[4 * (1 + 0.5)] * 4, [4 * (3 + 0.25)] * 4]
    assert costs.features == costs.gradients == [pytest.approx(0.01 + 20 / 1000)]
    assert costs.dispatch == 0.125
    # Two replicas: two latencies, and each byte once; float64 sums have twice the bytes.
    assert costs.reduce == pytest.approx([0.02 + 2 * 110 / 1000, 0.02 + 2 * 920 / 1000])
    assert costs.update == pytest.approx([0.2 + 0.8 * 110 / 1030, 0.2 + 0.8 * 920 / 1030])


def test_a_rank_adds_up_all_its_stages_at_once_and_ddp_each_on_its_own():
    stages = ((0,), (1,), (2,), (3,))
    for sync, latencies in (("drain", 1), ("ddp", 2)):
        costs = stage_costs(PROFILE, replace(REQUEST, sync=sync), stages, 4)
        first = costs.reduce[0] + costs.reduce[2]
        assert first == pytest.approx(latencies * 0.02 + (110 + 300) / 1000)
    assert len(costs.update) == 2


@pytest.mark.parametrize(("batch_size", "num_microbatches"), [(17, 4), (6, 3)])
def test_micro_batches_are_those_of_the_data(batch_size, num_microbatches):
    request = replace(REQUEST, batch_size=batch_size)
    share = Share(batch_size, num_microbatches, 2, 0)
    positions = share.positions(batch_size).view(num_microbatches, -1)
    found = microbatch_sizes(request, num_microbatches)
    assert list(found) == (positions >= 0).sum(1).tolist()
    assert max(found) == share.microbatch_size


def test_uneven_micro_batches_cost_their_rows_and_move_the_largest():
    costs = stage_costs(PROFILE, replace(REQUEST, batch_size=10), STAGES, 4)  # 2, 2, 1, 1 samples
    assert costs.forward[0] == [3.0, 3.0, 1.5, 1.5]
    assert costs.features == [pytest.approx(0.01 + 20 / 1000)]


def test_a_predicted_step_adds_up():
    proposal = predict(PROFILE, REQUEST, STAGES, "gpipe", 1, 4)
    f = [3.0 + 0.125, 6.5 + 0.125]
    b = [6.0 + 0.125, 13.0 + 0.125]
    # Of each kind all messages but the first arrive while their receiver computes.
    schedule = 3 * (max(f) + max(b)) + sum(f) + sum(b) + 2 * 0.03
    # Stage 1 has the longer all-reduce and update, but the last backward of stage 0 comes later.
    costs = proposal.costs
    assert proposal.step_seconds == pytest.approx(schedule + costs.reduce[0] + costs.update[0])
    assert {span.rank for span in proposal.spans} == {0, 1, 2, 3}
    assert proposal.memory_bytes == (7 + 4 * 110 + 20, 7 + 4 * 920 + 80)
    assert 0 < proposal.bubble < 1
