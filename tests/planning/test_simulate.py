"""The simulator against closed forms, a longest path and small cases worked out by hand."""

from itertools import pairwise
from math import inf
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vigpipe.planning import simulate as module
from vigpipe.planning.simulate import StageCosts, bubble, simulate
from vigpipe.schedules import Schedule, is_legal, messages_ahead, orders
from vigpipe.spans import COMPUTE, by_rank, step_seconds

SCHEDULES = get_args(Schedule)
SECONDS = st.floats(0.01, 10)
some = settings(deadline=None, max_examples=40)


def equal(num_stages, num_microbatches, f, b, **others):
    zeros = [0.0] * num_stages
    costs: dict[str, Any] = {
        "forward": [[f] * num_microbatches] * num_stages,
        "backward": [[b] * num_microbatches] * num_stages,
        "features": zeros[1:],
        "gradients": zeros[1:],
        "dispatch": 0.0,
        "reduce": zeros,
        "update": zeros,
    }
    return StageCosts(**(costs | others))


@st.composite
def layouts(draw, most_ranks=4, most_microbatches=6):
    """(schedule, num_ranks, virtual_stages, num_microbatches) and their costs."""
    degrees = draw(
        st.tuples(
            st.sampled_from(SCHEDULES),
            st.integers(1, most_ranks),
            st.integers(1, 3),
            st.integers(1, most_microbatches),
        ).filter(lambda degrees: is_legal(*degrees))
    )
    _, num_ranks, virtual_stages, num_microbatches = degrees
    num_stages = num_ranks * virtual_stages

    def some(count, least=0.0):
        return draw(st.lists(st.floats(least, 10), min_size=count, max_size=count))

    costs = StageCosts(
        forward=[some(num_microbatches, 0.01) for _ in range(num_stages)],
        backward=[some(num_microbatches, 0.01) for _ in range(num_stages)],
        features=some(num_stages - 1),
        gradients=some(num_stages - 1),
        dispatch=draw(st.floats(0, 1)),
        reduce=some(num_stages),
        update=some(num_ranks),
    )
    return degrees, costs


def longest_path(order, costs, replicas, ddp, ahead):
    """The step without contention, by relaxing every dependency until nothing changes."""
    num_ranks, num_stages = len(order), len(costs.forward)
    ends, asked, done, changed = {}, {}, 0.0, True
    while changed:
        changed = False
        for own in order:
            time, left = 0.0, [len(costs.forward[0])] * num_stages
            for action in own:
                kind, i, m = action
                if kind == "forward":
                    source, transfer = (kind, i - 1, m), ([0.0, *costs.features])[i]
                    work = costs.forward[i][m]
                else:
                    source, transfer = (kind, i + 1, m), ([*costs.gradients, 0.0])[i]
                    work = costs.backward[i][m]
                    left[i] -= 1
                if num_ranks > 1 and 0 <= source[1] < num_stages:
                    sent = ends.get(source, 0.0)
                    asks = {0: time, 1: asked.get((kind, i, m - 1), time), inf: 0.0}[ahead]
                    changed |= asked.get(action) != time
                    asked[action] = time
                    arrival = max(asks, sent) + transfer
                    time = max(time, arrival)
                time += work + costs.dispatch
                if replicas > 1 and ddp and left[i] == 0 and kind == "backward":
                    time += costs.reduce[i]
                changed |= ends.get(action) != time
                ends[action] = time
    for rank, own in enumerate(order):
        time = ends[own[-1]] + costs.update[rank]
        if replicas > 1 and not ddp:
            time += sum(costs.reduce[rank::num_ranks])
        done = max(done, time)
    return done


@some
@given(st.integers(1, 5), st.integers(1, 8), SECONDS, SECONDS)
def test_equal_stages_take_the_known_time(num_ranks, num_microbatches, f, b):
    for schedule in SCHEDULES[:2]:  # GPipe, 1F1B
        if is_legal(schedule, num_ranks, 1, num_microbatches):
            order = orders(schedule, num_ranks, 1, num_microbatches)
            spans = simulate(order, equal(num_ranks, num_microbatches, f, b))
            slots = num_microbatches + num_ranks - 1
            assert step_seconds(spans) == pytest.approx(slots * (f + b))
            assert bubble(spans) == pytest.approx((num_ranks - 1) / slots)


@some
@given(
    layouts(),
    st.integers(1, 3),
    st.booleans(),
    st.lists(st.floats(1, 3), max_size=3),
    st.sampled_from(["cpu", "cuda"]),
)
def test_a_step_is_the_longest_path_and_longer_where_processors_are_shared(
    layout, replicas, ddp, slowdown, device
):
    degrees, costs = layout
    order, ahead = orders(*degrees), messages_ahead(degrees[0], device)
    options = {"reduce_before_send": ddp, "ahead": ahead}
    step = step_seconds(simulate(order, costs, replicas, **options))
    assert step == pytest.approx(longest_path(order, costs, replicas, ddp, ahead))
    alone = step_seconds(simulate(order, costs, replicas, [1.0], 1, **options))
    assert alone == pytest.approx(step)
    for ranks_per_host in (None, 2, 3):
        shared = simulate(order, costs, replicas, [1.0, *slowdown], ranks_per_host, **options)
        assert step_seconds(shared) >= step * (1 - 1e-9)


@some
@given(
    layouts(most_microbatches=4),
    st.integers(1, 3),
    st.sampled_from([None, 1, 2, 3, 4]),
    st.booleans(),
)
def test_spans_cover_every_rank_without_overlap(layout, replicas, ranks_per_host, ddp):
    degrees, costs = layout
    order = orders(*degrees)
    spans = simulate(order, costs, replicas, [1.0, 1.2], ranks_per_host, reduce_before_send=ddp)
    ranks = by_rank(spans)
    assert sorted(ranks) == list(range(len(order) * replicas))
    for rank, own in ranks.items():
        assert own[0].start == 0
        for before, after in pairwise(own):
            assert before.end == after.start
        done = [(s.kind, s.stage, s.microbatch) for s in own if s.kind in COMPUTE]
        assert tuple(done) == order[rank % len(order)]
        reduces = [span for span in own if span.kind == "all-reduce"]
        assert len(reduces) == (replicas > 1) * (degrees[2] if ddp else 1)


@some
@given(layouts(3, 4), st.integers(2, 3), st.sampled_from([None, 1, 2, 3, 6]), st.booleans())
def test_one_replica_stands_for_those_that_do_the_same(layout, replicas, ranks_per_host, ddp):
    degrees, costs = layout
    arguments = orders(*degrees), costs, replicas, [1.0, 1.3, 1.5], ranks_per_host
    short = by_rank(simulate(*arguments, reduce_before_send=ddp))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "num_simulated", lambda *_: replicas)
        whole = by_rank(simulate(*arguments, reduce_before_send=ddp))
    assert short.keys() == whole.keys()
    for rank, own in short.items():
        assert [s._replace(start=0, end=0) for s in own if s.seconds > 1e-6] == [
            s._replace(start=0, end=0) for s in whole[rank] if s.seconds > 1e-6
        ]
        assert own[-1].end == pytest.approx(whole[rank][-1].end)


def forwards_of(orders):
    return tuple(tuple(a for a in own if a.kind == "forward") for own in orders)


def test_speeds_change_when_a_rank_ends():
    # Stage 1 takes 3: beside F1 of stage 0 for 2 seconds it does 1, the other 2 alone.
    costs = equal(2, 2, 0.0, 0.0, forward=[[1.0, 1.0], [3.0, 3.0]])
    spans = simulate(forwards_of(orders("gpipe", 2, 1, 2)), costs, 1, [1.0, 2.0])
    assert [(s.start, s.end) for s in by_rank(spans)[0]] == [(0, 1), (1, 3)]
    assert [(s.start, s.end) for s in by_rank(spans)[1]] == [(0, 1), (1, 5), (5, 8)]


def test_more_ranks_than_were_measured_take_turns():
    costs = equal(1, 1, 2.0, 1.0)
    arguments = orders("gpipe", 1, 1, 1), costs, 4, [1.0, 1.5]
    assert step_seconds(simulate(*arguments)) == 3 * 1.5 * 2
    assert step_seconds(simulate(*arguments, ranks_per_host=2)) == 3 * 1.5


def test_only_the_next_transfer_is_asked_for_ahead():
    # rank 0  [F0][F1][F2]
    # rank 1  asks  [   ~   ][  F0  ][  F1  ] .[  F2  ]    F1's comes meanwhile, F2's from F1 on
    costs = equal(2, 3, 0.0, 0.0, forward=[[1.0] * 3, [3.0] * 3], features=[4.0])
    order = forwards_of(orders("gpipe", 2, 1, 3))
    ends = [step_seconds(simulate(order, costs, ahead=ahead)) for ahead in (0, 1, inf)]
    assert ends == [1 + 3 * (4 + 3), 1 + 4 + 3 + 4 + 3, 1 + 4 + 3 * 3]


def test_orders_that_wait_for_one_another_are_refused():
    first, second = orders("gpipe", 2, 1, 1)
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] never end"):
        simulate((first[::-1], second), equal(2, 1, 1.0, 1.0))
