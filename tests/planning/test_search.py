"""The cut, M and schedule found, against all there are."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.planning.profiles import make_piece, make_profile
from vigpipe.errors import InputError
from vigpipe.planning import search as module
from vigpipe.planning.search import search
from vigpipe.planning.step import Request, predict
from vigpipe.schedules import is_legal

REQUEST = Request(2, 1, 8, (4,), (("gpipe", 1),))


def all_cuts(num_blocks, num_stages):
    for inner in combinations(range(1, num_blocks), num_stages - 1):
        yield tuple(tuple(range(*edge)) for edge in pairwise((0, *inner, num_blocks)))


def every_proposal(profile, request):
    for schedule, virtual_stages in request.schedules:
        for num_microbatches in request.microbatches:
            degrees = schedule, request.num_ranks, virtual_stages, num_microbatches
            if num_microbatches * request.num_replicas > request.batch_size:
                continue
            if is_legal(*degrees):
                num_stages = request.num_ranks * virtual_stages
                for stages in all_cuts(len(profile.blocks), num_stages):
                    yield predict(
                        profile, request, stages, schedule, virtual_stages, num_microbatches
                    )


def brute_force(profile, request):
    """The shortest step of all that fit."""
    limit = request.memory_limit_bytes
    feasible = [
        proposal
        for proposal in every_proposal(profile, request)
        if limit is None or max(proposal.memory_bytes) <= limit
    ]
    return min((proposal.step_seconds for proposal in feasible), default=None)


@st.composite
def profiles(draw, most_blocks=8):
    share = st.floats(0.01, 1)
    pieces = [
        make_piece(
            f"block {i}",
            draw(share),
            draw(st.integers(0, 1000)),
            draw(st.integers(0, 1000)),
            draw(st.integers(1, 1000)),
            draw(share),
        )
        for i in range(draw(st.integers(2, most_blocks)))
    ]
    # Not always twice the forward: the dearest forward and the dearest backward may differ.
    pieces = [
        replace(piece, backward=tuple(value * factor for value in piece.forward))
        for piece in pieces
        for factor in [draw(st.floats(0.5, 4))]
    ]
    return make_profile(
        pieces,
        make_piece("stem", draw(share)),
        make_piece("readout", draw(share)),
        dispatch_seconds=draw(st.floats(0, 0.1)),
        latency_seconds=draw(st.floats(0, 0.1)),
        bandwidth=draw(st.floats(1e4, 1e6)),
    )


@settings(deadline=None, max_examples=30)
@given(profiles(), st.integers(1, 4), st.integers(1, 6))
def test_gpipe_alone_on_its_processors_is_cut_exactly(profile, num_ranks, num_microbatches):
    assume(num_ranks <= len(profile.blocks))
    request = replace(
        REQUEST,
        num_ranks=num_ranks,
        batch_size=4 * num_microbatches,
        microbatches=(num_microbatches,),
    )
    with pytest.MonkeyPatch.context() as patch:
        # The dynamic programming alone, without the climb that follows.
        patch.setattr(module._Evaluated, "climb", lambda *_: None)
        found = search(profile, request)[0]
    best = brute_force(profile, request)
    assert found.step_seconds == pytest.approx(best, rel=1e-9)


# The climb may end on a lower hill: of 1,200 random cases three were over 2 %, the worst 4.5 %.
@settings(deadline=None, max_examples=15, derandomize=True)
@given(
    profiles(6),
    st.integers(2, 3),
    st.integers(1, 2),
    st.sampled_from([None, 1, 2]),
    st.lists(st.floats(1, 2), max_size=2),
    st.sampled_from(["double", "ddp"]),
)
def test_no_layout_is_much_better_than_the_one_found(
    profile, num_ranks, num_replicas, ranks_per_host, slowdown, sync
):
    assume(num_ranks <= len(profile.blocks))
    profile = replace(
        profile, slowdown=(1.0, *sorted(slowdown)), update_seconds=0.5, fixed_seconds=0.1
    )
    request = Request(
        num_ranks,
        num_replicas,
        24,
        (2, 4),
        (("gpipe", 1), ("1f1b", 1), ("interleaved1f1b", 2)),
        ranks_per_host=ranks_per_host,
        sync=sync,
    )
    best = brute_force(profile, request)
    assert best is not None
    assert search(profile, request)[0].step_seconds <= 1.02 * best


@settings(deadline=None, max_examples=25)
@given(profiles(6), st.integers(2, 3), st.floats(0.3, 1.2), st.sampled_from(["gpipe", "1f1b"]))
def test_the_memory_limit_is_kept_and_the_smallest_that_fits_is_named(
    profile, num_ranks, share, schedule
):
    assume(num_ranks <= len(profile.blocks))
    request = replace(REQUEST, num_ranks=num_ranks, microbatches=(4,), schedules=((schedule, 1),))
    needs = [max(p.memory_bytes) for p in every_proposal(profile, request)]
    limit = int(share * max(needs))
    request = replace(request, memory_limit_bytes=limit)
    best = brute_force(profile, request)
    if best is not None:
        found = search(profile, request)
        assert all(max(proposal.memory_bytes) <= limit for proposal in found)
        rel = 1e-9 if schedule == "gpipe" else 0.02
        assert found[0].step_seconds == pytest.approx(best, rel=rel)
        return
    with pytest.raises(InputError, match=f"limit that would is {min(needs):,} bytes"):
        search(profile, request)
    fits = search(profile, replace(request, memory_limit_bytes=min(needs)))
    assert max(fits[0].memory_bytes) == min(needs)


@pytest.mark.parametrize("schedule", ["interleaved1f1b", "loopedbfs"])
def test_with_several_stages_a_rank_the_limit_named_fits(schedule):
    blocks = [make_piece(f"block {i}", 1.0, 100 * i, 50) for i in range(8)]
    profile = make_profile(blocks, base_bytes=1000)
    request = replace(REQUEST, schedules=((schedule, 2),), memory_limit_bytes=2000)
    with pytest.raises(InputError, match=r"which stage 1 .* and 3 .* needs") as refused:
        search(profile, request)
    named = int(str(refused.value).split("that would is ")[1].split(" bytes")[0].replace(",", ""))
    found = search(profile, replace(request, memory_limit_bytes=named))
    assert max(found[0].memory_bytes) == named


def test_equally_fast_layouts_are_ranked_by_memory():
    blocks = [make_piece(f"block {i}", 1.0, activation=100) for i in range(4)]
    request = replace(REQUEST, schedules=(("gpipe", 1), ("1f1b", 1)))
    first, second = search(make_profile(blocks), request)[:2]
    assert (first.schedule, second.schedule) == ("1f1b", "gpipe")
    assert first.step_seconds == pytest.approx(second.step_seconds)
    assert max(first.memory_bytes) < max(second.memory_bytes)


def test_few_steps_are_simulated_for_many_blocks(monkeypatch):
    # 40 layouts of 64 blocks on 16 ranks: what is counted here is what takes the time.
    actions = []
    simulated = module.simulate_step
    monkeypatch.setattr(module, "MAX_ACTIONS", module.MAX_ACTIONS // 5)
    monkeypatch.setattr(
        module,
        "simulate_step",
        lambda *args, **options: (
            actions.append(sum(map(len, args[2]))),
            simulated(*args, **options),
        )[1],
    )
    profile = make_profile([1 + (7 * i % 5) / 10 for i in range(64)], dispatch_seconds=0.01)
    request = Request(
        16,
        1,
        256,
        (1, 2, 4, 8, 16, 32, 64),
        (("gpipe", 1), ("1f1b", 1), ("interleaved1f1b", 2), ("loopedbfs", 2)),
    )
    found = search(profile, request)
    assert sum(actions) <= module.MAX_ACTIONS + max(actions)
    assert len(found) == module.NUM_PROPOSALS
    least = 256 * sum(1 + (7 * i % 5) / 10 for i in range(64)) * 3 / 16
    assert least < found[0].step_seconds < 1.4 * least


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(InputError, match="--stages 3: 3 stages for the 2 blocks of made"):
        search(make_profile([1.0, 1.0]), replace(REQUEST, num_ranks=3))
    request = replace(REQUEST, schedules=(("interleaved1f1b", 2),))
    with pytest.raises(InputError, match="--stages 2: 4 stages for the 3 blocks"):
        search(make_profile([1.0] * 3), request)


def test_a_schedule_with_too_many_stages_leaves_the_others():
    request = replace(REQUEST, schedules=(("interleaved1f1b", 2), ("gpipe", 1)))
    assert {p.schedule for p in search(make_profile([1.0] * 3), request)} == {"gpipe"}


@pytest.mark.parametrize(
    "change",
    [
        {"microbatches": (9, 16)},  # more than there are samples
        {"num_replicas": 4, "microbatches": (4,)},
        {"schedules": (("1f1b", 1),), "microbatches": (1,)},
    ],
    ids=str,
)
def test_no_legal_number_of_micro_batches_is_refused(change):
    with pytest.raises(InputError, match=r"--microbatches .*: none goes with --stages 2"):
        search(make_profile([1.0, 1.0]), replace(REQUEST, **change))
