"""A slow rank is named soon, and a noisy machine raises no alarm."""

import random

import pytest

from vigpipe.parallel.layout import Layout
from vigpipe.run.stragglers import Stragglers

FOUR = Layout(pipeline_size=2, num_replicas=2, num_microbatches=2)
PIPELINE = Layout(pipeline_size=4, num_microbatches=4)


def noisy(random, layout, usual=0.05):
    """A step on a machine that others use too: up to a tenth slower, one step in 20 four times."""
    shared = random.uniform(1, 1.3)  # what slows everybody down
    return [
        usual
        * (1 + layout.pipeline_rank(rank))
        * shared
        * random.uniform(1, 1.1)
        * (4 if random.random() < 0.05 else 1)
        for rank in range(layout.world_size)
    ]


@pytest.mark.parametrize("layout", [FOUR, PIPELINE], ids=str)
def test_no_false_alarm_in_a_thousand_steps(layout):
    generator = random.Random(0)
    watch = Stragglers(layout)
    assert [found for _ in range(1000) for found in watch.add(noisy(generator, layout))] == []


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("layout", [FOUR, PIPELINE], ids=str)
def test_a_slow_rank_is_named_within_twenty_steps(layout, rank):
    generator = random.Random(rank)
    watch = Stragglers(layout)
    for _ in range(100):
        assert watch.add(noisy(generator, layout)) == []
    found = []
    for step in range(1, 21):
        busy = noisy(generator, layout)
        busy[rank] *= 2
        found += [(step, straggler) for straggler in watch.add(busy)]
    ((step, straggler),) = found
    assert step <= 12
    assert (straggler.rank, straggler.pipeline_rank) == (rank, layout.pipeline_rank(rank))
    assert straggler.seconds / straggler.expected_seconds == pytest.approx(2, rel=0.3)
    assert str(straggler).startswith(
        f"rank {rank} (stage {layout.pipeline_rank(rank)}) is a straggler: its work takes "
    )


def test_a_replica_that_is_slow_from_the_start_is_named_too():
    watch = Stragglers(FOUR)
    found = [s for _ in range(20) for s in watch.add([0.1, 0.2, 0.1, 0.5])]
    assert [(s.rank, s.pipeline_rank) for s in found] == [(3, 1)]


def test_it_is_told_again_only_after_it_has_recovered():
    watch = Stragglers(FOUR)
    slow, fine = [0.1, 0.1, 0.1, 0.3], [0.1] * 4
    counts = [sum(len(watch.add(busy)) for _ in range(40)) for busy in (fine, slow, fine, slow)]
    assert counts == [0, 1, 0, 1]


def test_a_machine_on_which_everything_slows_down_is_no_straggler():
    watch = Stragglers(PIPELINE)
    usual = [0.1, 0.2, 0.3, 0.4]
    for factor in (1, 3, 1, 0.5, 1):
        for _ in range(40):
            assert watch.add([factor * seconds for seconds in usual]) == []
