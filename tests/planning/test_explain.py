"""The sentence, where what limits and what would help is known."""

from dataclasses import replace
from typing import Any

import pytest

from tests.planning.profiles import make_piece, make_profile
from vigpipe.planning.explain import explain
from vigpipe.planning.step import Request, predict
from vigpipe.schedules import Schedule

REQUEST = Request(2, 1, 16, (8,), (("gpipe", 1),))
EVEN, FOUR = ((0, 1), (2, 3)), ((0,), (1,), (2,), (3,))


def sentence(profile, request=REQUEST, stages=EVEN, schedule: Schedule = "gpipe", virtual_stages=1):
    count = request.microbatches[0]
    proposal = predict(profile, request, stages, schedule, virtual_stages, count)
    return explain(profile, request, proposal)


def test_the_stage_that_computes_longest_limits():
    text = sentence(make_profile([1.0, 1.0, 1.0, 5.0]))
    assert text.startswith("Stage 1 (blocks 2 to 3) limits: computing takes 288 s of every 300 s")


def test_a_single_block_and_several_stages_of_a_rank_are_named():
    assert sentence(make_profile([9.0, 1.0]), stages=((0,), (1,))).startswith("Stage 0 (block 0) ")
    profile = make_profile([1.0, 1.0, 2.0, 1.0])
    text = sentence(profile, REQUEST, FOUR, "loopedbfs", 2)
    assert text.startswith("Stages 0 (block 0) and 2 (block 2) limit: ")


HEAVY = [make_piece(f"block {i}", 1.0, weights=10**5) for i in range(4)]
# On one processor a second rank brings nothing but its own dispatch and transfers.
SHARED = {"slowdown": (1.0,), "dispatch_seconds": 1.0, "latency_seconds": 9.0}
SCHEDULES = ("gpipe", 1), ("1f1b", 1), ("interleaved1f1b", 2)
WHAT_HELPS: dict[str, tuple[Any, ...]] = {
    # No cut makes these equal: one that could would save most.
    "stages of equal cost: 300 s -> 216 s.": (make_profile([1.0, 1.0, 1.0, 5.0]),),
    "transfers that take no time: ": (make_profile([1.0] * 4, latency_seconds=20.0),),
    "an all-reduce that takes no time: ": (
        make_profile(HEAVY, bandwidth=1000.0),
        replace(REQUEST, num_replicas=2),
    ),
    "twice the micro-batches (4): ": (
        make_profile([1.0] * 4),
        replace(REQUEST, microbatches=(2,), num_ranks=4, batch_size=64),
        FOUR,
    ),
    "half the micro-batches (4): ": (make_profile([0.001] * 4, dispatch_seconds=10.0),),
    # The batch has no more micro-batches, and of four blocks one of three stages has two again.
    "the schedule interleaved1f1b with 2 stages a rank: 54 s -> 51": (
        make_profile([1.0] * 4),
        replace(REQUEST, batch_size=8, schedules=SCHEDULES),
    ),
    "one stage more (3): 162 s -> 120 s.": (
        make_profile([1.0] * 6),
        REQUEST,
        ((0, 1, 2), (3, 4, 5)),
    ),
    "one stage fewer (1): 144 s -> 112 s.": (
        make_profile([1.0, 1.0], **SHARED),
        REQUEST,
        ((0,), (1,)),
    ),
}


@pytest.mark.parametrize("change", WHAT_HELPS)
def test_the_change_that_helps_most_is_named(change):
    assert f"; most would help {change}" in sentence(*WHAT_HELPS[change])


def test_nothing_helps_one_rank():
    text = sentence(make_profile([1.0]), replace(REQUEST, num_ranks=1), ((0,),))
    assert text.endswith("nothing that was tried would make it 1 % shorter.")
