"""The sentence, where what limits and what would help is known."""

from dataclasses import replace

import pytest

from tests.planning.profiles import make_piece, make_profile
from vigpipe.planning.explain import explain
from vigpipe.planning.step import Request, predict
from vigpipe.schedules import Schedule

REQUEST = Request(2, 1, 16, (8,), (("gpipe", 1),))
EVEN = ((0, 1), (2, 3))


def sentence(profile, request=REQUEST, stages=EVEN, schedule: Schedule = "gpipe", virtual_stages=1):
    count = request.microbatches[0]
    proposal = predict(profile, request, stages, schedule, virtual_stages, count)
    return explain(profile, request, proposal)


def test_the_stage_that_computes_longest_limits():
    text = sentence(make_profile([1.0, 1.0, 1.0, 5.0]))
    assert text.startswith("Stage 1 (blocks 2 to 3) limits: computing takes 288 s of every 300 s")
    # No cut makes these equal: one that could would save most.
    assert "most would help stages of equal cost: 300 s -> 216 s." in text


def test_a_single_block_and_several_stages_of_a_rank_are_named():
    assert sentence(make_profile([9.0, 1.0]), stages=((0,), (1,))).startswith("Stage 0 (block 0) ")
    text = sentence(
        make_profile([1.0, 1.0, 2.0, 1.0]),
        stages=((0,), (1,), (2,), (3,)),
        schedule="loopedbfs",
        virtual_stages=2,
    )
    assert text.startswith("Stages 0 (block 0) and 2 (block 2) limit: ")


def test_a_slow_network():
    text = sentence(make_profile([1.0] * 4, latency_seconds=20.0))
    assert "most would help transfers that take no time" in text


def test_a_slow_all_reduce():
    blocks = [make_piece(f"block {i}", 1.0, weights=10**5) for i in range(4)]
    profile = make_profile(blocks, bandwidth=1000.0)
    request = replace(REQUEST, num_replicas=2)
    assert "most would help an all-reduce that takes no time" in sentence(profile, request)
    assert "all-reduce" not in sentence(profile, REQUEST)


def test_few_micro_batches():
    request = replace(REQUEST, microbatches=(2,), num_ranks=4, batch_size=64)
    text = sentence(make_profile([1.0] * 4), request, ((0,), (1,), (2,), (3,)))
    assert "most would help twice the micro-batches (4): " in text


def test_many_micro_batches_that_cost_more_than_they_bring():
    text = sentence(make_profile([0.001] * 4, dispatch_seconds=10.0))
    assert "most would help half the micro-batches (4): " in text


def test_another_schedule():
    # The batch has no more micro-batches, and of four blocks one of three stages has two again.
    schedules = ("gpipe", 1), ("1f1b", 1), ("interleaved1f1b", 2)
    request = replace(REQUEST, batch_size=8, schedules=schedules)
    text = sentence(make_profile([1.0] * 4), request)
    assert "most would help the schedule interleaved1f1b with 2 stages a rank: 54 s -> 51" in text


def test_one_stage_more():
    text = sentence(make_profile([1.0] * 6), REQUEST, ((0, 1, 2), (3, 4, 5)))
    assert "most would help one stage more (3): 162 s -> 120 s." in text


def test_one_stage_fewer():
    # On one processor a second rank brings nothing but its own dispatch and transfers.
    profile = make_profile([1.0, 1.0], slowdown=(1.0,), dispatch_seconds=1.0, latency_seconds=9.0)
    text = sentence(profile, REQUEST, ((0,), (1,)))
    assert "most would help one stage fewer (1): " in text
    assert text.endswith("-> 112 s.")


def test_nothing_helps_one_rank():
    profile = make_profile([1.0])
    request = replace(REQUEST, num_ranks=1)
    text = sentence(profile, request, ((0,),))
    assert text.endswith("nothing that was tried would make it 1 % shorter.")


@pytest.mark.parametrize("limit", [1, 10**9])
def test_what_would_not_fit_the_memory_is_not_advised(limit):
    blocks = [make_piece(f"block {i}", 1.0, activation=10**6) for i in range(4)]
    request = replace(REQUEST, num_ranks=4, microbatches=(2,), memory_limit_bytes=limit)
    text = sentence(make_profile(blocks), request, ((0,), (1,), (2,), (3,)))
    assert ("twice the micro-batches" in text) == (limit > 1)
