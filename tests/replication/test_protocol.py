"""The protocol in simulation: every item once, every average whole, and no deadlock."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import pytest

from tests.replication.refused import assert_refused
from tests.replication.simulation import Log, simulate
from vigpipe.replication.course import Course
from vigpipe.replication.gossip import NOBODY, GossipMember
from vigpipe.replication.member import Rules
from vigpipe.replication.periodic import PeriodicMember
from vigpipe.replication.promises import check_promises
from vigpipe.replication.record import Pair, Push, Recorded, collect
from vigpipe.replication.table import SharedTable, Table, progress_of_those_left

STEPS = 7
SIZES = (1, 2, 3, 4, 6)
# Each seed has other delays, and options by its remainders: 80 in a row have all pairs of values.
FEW, MANY = range(56), range(56, 156)
seeds = pytest.mark.parametrize(
    "seeds",
    [pytest.param(FEW, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.heavy)],
)


def course_of(num_replicas: int, num_steps: int = STEPS) -> Course:
    return Course(num_steps, steps_per_epoch=4, evaluate_every=1, num_replicas=num_replicas)


def simulated(
    num_replicas: int,
    average_every: int,
    gradients: bool = False,
    *,
    from_pool: bool,
    recorded: list[Recorded] | None = None,
    gossip: dict[str, bool] | None = None,
    overlap: int = 0,
    looks_ahead: bool = False,
    **options,
) -> Log:
    """Simulate periodic averaging, or gossip if there are options of it."""
    course = options.pop("course", course_of(num_replicas))
    rules = Rules(
        course,
        average_every,
        gradients,
        from_pool,
        looks_ahead=looks_ahead and recorded is None,
        overlap=overlap,
        seed=options.get("seed", 0),
        **(gossip or {}),
    )

    def make_member(table: SharedTable, index: int):
        own = None if recorded is None else recorded[index]
        member_type = PeriodicMember if gossip is None else GossipMember
        return member_type(table, index, rules, own)

    log = simulate(make_member, course, overlap=overlap > 0, **options)
    is_whole, others = not options.get("kill_at"), {"progress", "lose_store_after"}
    if recorded is None and not options.keys() & others and (is_whole or not overlap):
        strategy = "periodic" if gossip is None else "gossip"
        check_promises(collect(log.events, num_replicas), rules, strategy, is_whole=is_whole)
    return log


def every_item(log: Log) -> Counter[int]:
    return Counter(item for items in log.items.values() for item in items)


def ways(seed: int) -> dict[str, Any]:
    """Where items come from and when all rest, by seed."""
    from_pool = bool(seed & 1)
    return {
        "seed": seed,
        "gradients": bool(seed & 2),
        "close": 0.1 if seed & 4 else 0.0,
        "from_pool": from_pool,
        "looks_ahead": from_pool and bool(seed & 8),
    }


@seeds
def test_every_run_does_every_item_once_and_is_done_again_whatever_the_timing(seeds):
    for seed in seeds:
        num_replicas, average_every = SIZES[seed % 5], (1, 3, 7)[seed % 3]
        options = ways(seed)
        log = simulated(num_replicas, average_every, **options)
        assert every_item(log) == dict.fromkeys(range(STEPS * num_replicas), 1), seed
        # Every average is one of all replicas, and there are as many as are due.
        assert log.averages == dict.fromkeys(range(1, STEPS // average_every + 1), num_replicas)
        assert set(log.table.joined) == {STEPS // average_every}
        assert log.table.leases == log.table.ahead == [-1] * num_replicas
        if not options["from_pool"]:
            for r, items in log.items.items():
                assert items == list(range(r, STEPS * num_replicas, num_replicas))
        if not options["close"]:
            assert not log.given_back
            assert not log.rests
        recorded = collect(log.events, num_replicas)
        assert {r: of.items for r, of in enumerate(recorded)} == log.items
        options |= {"seed": seed + 1000, "close": 0.1}
        again = simulated(num_replicas, average_every, recorded=recorded, **options)
        assert again.items == log.items
        assert again.events == log.events


@seeds
def test_an_average_is_applied_exactly_so_many_steps_after_it_was_given_for(seeds):
    for seed in seeds[::2]:
        num_replicas = SIZES[1 + seed // 2 % 4]
        average_every, overlap = ((2, 1), (3, 2), (7, 3))[seed % 3]
        from_pool, close = bool(seed & 8), 0.1 if seed & 16 else 0.0
        run = partial(simulated, num_replicas, average_every, from_pool=from_pool, overlap=overlap)
        log = run(seed=seed, close=close)
        assert every_item(log) == dict.fromkeys(range(STEPS * num_replicas), 1), seed
        assert log.averages == dict.fromkeys(range(1, STEPS // average_every + 1), num_replicas)
        assert log.table.given == [-1] * num_replicas
        for r, items in log.items.items():
            ends = [*log.given[r][1:], len(items)]  # the next one, and the end, come first
            due = [min(g + overlap, end) for g, end in zip(log.given[r], ends, strict=True)]
            assert log.applied[r] == due, seed
        again = run(seed=seed + 1000, recorded=collect(log.events, num_replicas))
        assert (again.items, again.applied) == (log.items, log.applied)


@seeds
def test_an_average_that_is_under_way_outlives_a_rest(seeds):
    """Each replica that has given its weights applies the average in the run that goes on."""
    num_under_way = 0
    for seed in seeds[::2]:
        again = partial(simulated, 3, 3, from_pool=bool(seed & 2), overlap=2, close=0.2)
        first = again(seed=seed, kill_at=1)
        if not first.rests:
            continue
        num_under_way += max(first.table.given) >= 0
        second = again(seed=seed + 1000, progress=first.table.progress())
        for r in range(3):
            given = first.given[r] + [len(first.items[r]) + g for g in second.given[r]]
            applied = first.applied[r] + [len(first.items[r]) + a for a in second.applied[r]]
            ends = [*given[1:], len(first.items[r]) + len(second.items[r])]
            assert applied == [min(g + 2, end) for g, end in zip(given, ends, strict=True)], seed
    assert num_under_way > 10


def test_a_record_that_no_run_can_have_left_is_refused():
    none, not_next = "is no event of one of 2", "is not the next event"
    table = [
        ([{"replica": 0, "step": 2, "item": 0}], not_next),
        ([{"replica": 2, "step": 1, "item": 0}], none),
        ([{"replica": 0, "step": 1, "item": -1}], none),
        ([{"replica": 0, "step": 1, "item": 10**18 + 1}], none),
        ([{"replica": 0, "step": 1, "item": 0}, {"replica": 0, "step": 1, "average": 2}], not_next),
        ([{"replica": 0, "step": 5, "average": 1}], not_next),
        ([{"replica": 0, "step": 1}], none),
        ([{"replica": 0, "step": 1, "item": 0, "average": 1}], none),
        ([{"replica": True, "step": 1, "item": 0}], none),
        ([{"replica": 0, "step": 1, "partner": 0}], not_next),
        ([{"replica": 0, "step": 1, "partner": 2}], not_next),
        ([{"replica": 0, "step": 2, "partner": 1}], not_next),
        ([{"replica": 0, "step": 1, "partner": 1}], "for ever"),
        ([{}], none),
    ]
    assert_refused(lambda rows: collect(rows, 2), table)


A, B = [0, 2, 4, 6], [1, 3, 5, 7]  # items of two replicas in four steps
FIXED = Rules(course_of(2, 4), 2, gradients=False, from_pool=False)
POOL = replace(FIXED, from_pool=True)
PUSHES = [[Push(2 * k, n, n) for k, n in enumerate(range(w + 1, 9, 2))] for w in range(2)]


def test_a_record_that_breaks_what_its_strategy_promises_is_refused():
    def attempt(row):
        first, second, rules, strategy = row
        check_promises([Recorded(*first), Recorded(*second)], rules, strategy, is_whole=True)

    twice, met = [2, 4], [Pair(2, 1)]
    table = [
        (([0] * 4, twice), (B, twice), POOL, "periodic", "item 0 was taken twice, by .* 0 and 0"),
        (([0, 1, 2, 3], twice), ([3, 4, 5, 6], twice), POOL, "periodic", "3 was taken .* 0 and 1"),
        (([0, 2, 4, 10**17], twice), (B, twice), POOL, "periodic", "0 … 7"),
        (([0, 4, 2, 6], twice), (B, twice), FIXED, "periodic", "item 4, expected 2"),
        ((B, twice), (A, twice), FIXED, "periodic", "item 1, expected 0"),
        ((A, twice), (B, [2]), FIXED, "periodic", "1 has come to 1 averages, and replica 0 to 2"),
        ((A, [2]), (B, twice), POOL, "periodic", "replica 1 to 2, which would wait"),
        ((A, [2]), (B, [2]), FIXED, "periodic", "to 1 averages, expected 2, one every 2 steps"),
        ((A, [1, 4]), (B, twice), FIXED, "periodic", "average 1 at step 1, expected 2"),
        ((A, twice), (B, twice), FIXED, "subnetworks", "to 2 averages, expected 1"),
        ((A, twice), (B[:3], twice), FIXED, "periodic", "1 of the run's 8 items are not there"),
        ((A, twice, [], [], True), (B, twice), FIXED, "periodic", "its loss, which ends such"),
        ((A, twice), (B, twice), FIXED, "gossip", "an average of all, and --strategy is gossip"),
        ((A, twice, met), (B, twice), FIXED, "periodic", "an average of two, and"),
        ((A, [], [Pair(5, 1)]), (B,), FIXED, "gossip", "in step 5, for which there is no item"),
        ((A, [], [Pair(1, 0)]), (B,), replace(FIXED, in_sets=True), "gossip", "never drawn as"),
        ((A, [], [], [], True), (B, [], [], [], True), POOL, "gossip", "all replicas were lost"),
        ((A,), (B,), FIXED, "server", "an item without its gradient, and --strategy is server"),
    ]  # fmt: skip
    assert_refused(attempt, [(row, words) for *row, words in table])
    attempt(((A, twice), (B, twice), FIXED, "periodic"))
    attempt(((A, [2]), (B, [2]), FIXED, "subnetworks"))
    stopped = [Recorded(A[:2]), Recorded(B[:1])]  # nobody has come to the average that is due
    check_promises(stopped, FIXED, "periodic", is_whole=False)


def test_gradients_that_a_server_cannot_take_between_two_evaluations_are_refused():
    """All rest for an evaluation, so no item of the next steps is under way then."""
    rules = replace(POOL, course=Course(4, 1, 2, 2))  # an evaluation after every second step

    def attempt(items):
        by_worker = zip(items, PUSHES, strict=True)
        recorded = [Recorded(of_one, pushes=pushes) for of_one, pushes in by_worker]
        check_promises(recorded, rules, "server", is_whole=True)

    attempt((A, B))
    words = "item 4 was begun before the evaluation after 2 steps; give the same --evaluate-every"
    assert_refused(attempt, [(([0, 4, 2, 6], B), words)])


def with_a_slow_one(replica: int, rng: random.Random) -> float:
    """Milliseconds of an item: replica 3 takes four times as long as the others."""
    return 80.0 if replica == 3 else 20.0


def test_with_a_pool_a_slow_replica_takes_fewer_items():
    pool = simulated(4, 1000, course=course_of(4, 40), from_pool=True, cost=with_a_slow_one)
    assert pool.seconds <= 160 / (3 / 20 + 1 / 80) + 80 + 1
    assert len(pool.items[3]) < 15


def test_replica_0_evaluates_after_every_epoch_but_the_last():
    course = course_of(2, 9)  # two epochs of four steps, and a step
    log = simulated(2, 3, from_pool=False, course=course, close=0.3, seed=1)
    # The end of the run scores what is kept of all replicas.
    assert log.evaluated == {0: [1, 2], 1: []}


# ---- gossip -----------------------------------------------------------------------------------

WAYS = {
    "any, item": {"in_sets": False, "answers_after_item": True},
    "any, interval": {"in_sets": False, "answers_after_item": False},
    "sets": {"in_sets": True, "answers_after_item": True},
}


def check_table(table: Table) -> None:
    """Partners are disjoint pairs, and nobody who has finished is in one."""
    for replica, partner in enumerate(table.partners):
        if partner != NOBODY:
            assert table.partners[partner] == replica
            assert partner != replica
            assert not table.finished[replica]
        if table.waiting[replica] != NOBODY:
            assert table.waiting[replica] == partner
            assert table.waiting[partner] == NOBODY


@seeds
def test_gossip_does_every_item_once_and_is_done_again_whatever_the_timing(seeds):
    num_pairs = 0
    for seed in seeds:
        num_replicas, average_every = SIZES[seed % 5], (1, 3, 7)[seed // 3 % 3]
        name, options = list(WAYS)[seed % 3], ways(seed)
        log = simulated(
            num_replicas, average_every, gossip=WAYS[name], watch=check_table, **options
        )
        assert every_item(log) == dict.fromkeys(range(STEPS * num_replicas), 1), seed
        assert not log.given_back
        assert log.table.partners == log.table.waiting == [NOBODY] * num_replicas
        # Both members of a pair have noted it, and each draws at most once in an interval.
        noted = Counter(
            tuple(sorted((event["replica"], event["partner"])))
            for event in log.events
            if "partner" in event
        )
        assert noted == {pair: 2 * n for pair, n in Counter(log.pairs).items()}
        assert len(log.pairs) <= sum(len(items) // average_every for items in log.items.values())
        if name == "sets":
            assert all(first % 2 != second % 2 for first, second in log.pairs)
        num_pairs += len(log.pairs)
        options |= {"seed": seed + 1000, "close": 0.1, "gossip": WAYS[name]}
        recorded = collect(log.events, num_replicas)
        again = simulated(num_replicas, average_every, recorded=recorded, **options)
        assert again.items == log.items
        assert again.events == log.events
    assert num_pairs > len(seeds)


@seeds
@pytest.mark.parametrize("gossips", [False, True])
def test_a_run_goes_on_where_all_have_rested(seeds, gossips):
    num_rested = 0
    for seed in seeds[::2]:
        options: dict[str, Any] = {**ways(seed // 2), "close": 0.2}
        if gossips:
            options |= {"from_pool": True, "gossip": list(WAYS.values())[seed % 3]}
        first = simulated(4, 3, kill_at=1, **options)
        if not first.rests:
            continue  # nobody wanted to
        num_rested += 1
        options["seed"] += 1000
        second = simulated(4, 3, progress=first.table.progress(), **options)
        done = every_item(first) + every_item(second)
        assert done == dict.fromkeys(range(4 * STEPS), 1), seed
        if gossips:
            assert first.table.partners == first.table.waiting == [NOBODY] * 4
        else:
            assert second.table.joined == [STEPS // 3] * 4
        # The record of both parts is one that can be done again.
        recorded = collect(first.events + second.events, 4)
        whole = simulated(4, 3, recorded=recorded, **options | {"seed": 0, "close": 0.0})
        assert collect(whole.events, 4) == recorded
    assert num_rested > 20


@pytest.mark.parametrize(
    ("name", "average_every", "seconds", "most_idle"),
    [("any, interval", 5, 1387, 0.29), ("any, item", 20, 1052, 0.08)],
)
def test_a_slow_replica_holds_up_nobody_for_long(name, average_every, seconds, most_idle):
    """All-reduce takes 3,200 ms."""
    run = partial(
        simulated,
        4,
        average_every,
        gradients=True,
        from_pool=True,
        gossip=WAYS[name],
        course=course_of(4, 40),
        cost=with_a_slow_one,
        exchange=1.0,
        look=(0.0, 1.0),
    )
    logs = [run(seed=seed) for seed in range(4)]
    assert fmean(log.seconds for log in logs) == pytest.approx(seconds, rel=0.08)
    assert fmean(1 - sum(log.busy) / 4 / log.seconds for log in logs) < most_idle


def test_gossip_draws_every_partner_equally_often():
    pairs = Counter[tuple[int, int]]()
    for seed in range(40):
        log = simulated(4, 1, from_pool=True, gossip=WAYS["any, item"], seed=seed)
        pairs.update(log.pairs)
    assert len(pairs) == 6
    assert max(pairs.values()) < 2 * min(pairs.values())


# ---- deaths -----------------------------------------------------------------------------------


@seeds
def test_replicas_that_die_cost_no_item_and_leave_nobody_waiting(seeds):
    num_dead = num_apart = 0
    for seed in seeds:
        num_replicas, options = SIZES[1 + seed % 3], ways(seed)
        gossip = {"in_sets": bool(seed & 16), "answers_after_item": bool(seed & 32)}
        log = simulated(num_replicas, 2, gossip=gossip, die=0.01, **options)
        items = Counter(event["item"] for event in log.events if "item" in event)
        assert items.keys() == set(range(STEPS * num_replicas)), seed
        # Gradients that were given to a partner are lost with a step that was not taken.
        assert options["gradients"] or set(items.values()) == {1}
        # One that dies when all is done is missed by nobody.
        assert {r for r in range(num_replicas) if log.table.lost[r]} <= set(log.dead)
        assert not log.table.returned
        assert log.table.leases == log.table.ahead == [-1] * num_replicas
        num_dead += len(log.dead)
        num_apart += sum("apart" in event for event in log.events)
        # Whoever does the record again ends as those that were left.
        recorded = collect(log.events, num_replicas)
        options |= {"seed": seed + 1000, "close": 0.0}
        again = simulated(num_replicas, 2, gossip=gossip, recorded=recorded, **options)
        of_replayed = collect(again.events, num_replicas)
        for r in set(range(num_replicas)) - set(log.dead):
            assert again.items[r] == log.items[r], seed
        assert [(of.items, of.pairs) for of in of_replayed] == [
            (of.items, of.pairs) for of in recorded
        ]
    assert num_dead > len(seeds) // 4
    assert num_apart > 0


def test_what_a_lost_replica_did_after_its_last_meeting_is_not_done_again():
    rows = [
        {"replica": 0, "step": 1, "item": 0},
        {"replica": 1, "step": 1, "item": 1},
        {"replica": 0, "step": 1, "partner": 1},
        {"replica": 1, "step": 1, "partner": 0},
        {"replica": 1, "step": 2, "item": 2},
        {"replica": 1, "step": 2, "partner": 0},  # before anything was sent
        {"replica": 0, "step": 2, "item": 3},
        {"replica": 0, "step": 2, "partner": 1},
        {"replica": 0, "step": 2, "apart": 1},
        {"replica": 1, "step": 2, "lost": 1},
    ]
    left, lost = collect(rows, 2)
    assert (left.items, left.pairs, left.is_lost) == ([0, 3], [(1, 1)], False)
    assert (lost.items, lost.pairs, lost.is_lost) == ([1], [(1, 0)], True)
    with pytest.raises(ValueError, match="would wait for 0 for ever"):
        collect(rows[:-1], 2)
    with pytest.raises(ValueError, match="replica 1 has come back, as a copy of replica 0"):
        collect([*rows, {"replica": 1, "step": 2, "again": 0}], 2)
    with pytest.raises(ValueError, match="is not the next event"):
        collect([*rows, rows[-2]], 2)


@seeds
def test_those_that_lose_the_store_know_enough_to_go_on(seeds):
    """Replica 0 is lost with it; what it had done counts as far as the others had heard of it."""
    num_open = num_twice = 0
    for seed in seeds:
        num_replicas = SIZES[1 + seed % 3]
        options: dict[str, Any] = {**ways(seed), "close": 0.0}
        gossip = {"in_sets": bool(seed & 4), "answers_after_item": bool(seed & 16)}
        run = partial(simulated, num_replicas, 2, gossip=gossip)
        first = run(lose_store_after=5 + 3 * (seed % 72), **options)
        left = {r: seen for r, seen in first.left.items() if r > 0}
        if len(left) < num_replicas - 1:
            continue  # all was done before
        progress = progress_of_those_left(left, num_replicas)
        num_open += sum(item >= 0 for item in progress["leases"]) + len(progress["returned"])
        second = run(progress=progress, **options | {"seed": seed + 1000})
        first.items[0] = first.items[0][: progress["taken"][0]]
        done = every_item(first) + every_item(second)
        assert done.keys() == set(range(STEPS * num_replicas)), seed
        num_twice += done.total() - len(done)  # if one had given up another that was not dead
        for r in left:
            assert progress["taken"][r] == len(first.items[r])
    assert num_open > len(seeds) / 6
    assert num_twice < num_open / 20
