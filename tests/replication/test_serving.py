"""What a server and its workers decide: their own code in virtual time, with random delays."""

import heapq
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.replication.simulation import BusyStore, Deadlock
from vigpipe.errors import InputError
from vigpipe.replication.course import Course
from vigpipe.replication.decisions import Action, Decision
from vigpipe.replication.member import Rules
from vigpipe.replication.promises import check_promises
from vigpipe.replication.record import Recorded, collect
from vigpipe.replication.serving import (
    NOT_FINITE,
    ServerMember,
    WorkerMember,
    ask,
    damping,
    serve,
)
from vigpipe.replication.table import SharedTable, Table, new_table, resumed_table

SIZES = (1, 2, 3, 5)
FEW, MANY = range(16), range(16, 48)  # seeds of delays
seeds = pytest.mark.parametrize(
    "seeds",
    [pytest.param(FEW, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.heavy)],
)


@dataclass
class Log:
    """What has happened in a simulation."""

    items: list[int] = field(default_factory=list)  # the server took their gradients in this order
    events: list[dict[str, Any]] = field(default_factory=list)  # the record
    evaluated: list[int] = field(default_factory=list)  # items that the server had taken then
    num_rests: int = 0
    seconds: float = 0.0  # when the last one ended
    most_ahead: int = 0  # compared with the slowest that had items left
    progress: dict[str, Any] = field(default_factory=dict)  # what the last rest has kept
    untold: int = 0  # gradients before a rest that its checkpoint does not know of
    dead: list[int] = field(default_factory=list)  # workers, in order
    table: Table = field(init=False)  # at the end


def simulate(
    course: Course,
    *,
    seed: int = 0,  # draws all delays
    staleness: int | None = None,  # the bound; None for none
    from_pool: bool = True,
    slow: float = 1.0,  # how many times longer the last worker takes
    close: float = 0.0,  # probability that somebody wants a checkpoint after an item
    only_workers_ask: bool = False,  # whether the server never wants a checkpoint
    bad: float = 0.0,  # probability that a gradient is not finite
    die: float = 0.0,  # probability that a worker dies, at each of its events; one stays alive
    steady: bool = False,  # whether all items of a worker take equally long
    look: float = 0.1,  # most seconds between two looks of one that waits
    ends_at_rest: bool = False,  # whether the run ends at the first rest
    recorded: list[Recorded] | None = None,  # what is done again
    progress: dict[str, Any] | None = None,  # an earlier run left it
) -> Log:
    """Simulate a server and its workers."""
    rng, size = random.Random(seed), course.num_replicas
    store = BusyStore(rng)
    first = resumed_table(progress, size) if progress else new_table(size)
    rules = Rules(course, 0, gradients=False, from_pool=from_pool, staleness=staleness)
    workers = [
        WorkerMember(
            SharedTable(store, first, w), w, rules, None if recorded is None else recorded[w]
        )
        for w in range(size)
    ]
    server = ServerMember(SharedTable(store, first, size), rules, recorded)
    deciding: list[Iterator[Decision | None]] = [*map(ask, workers), serve(server)]
    log = Log()
    events = [(rng.random(), place, place) for place in range(size + 1)]
    heapq.heapify(events)
    number, idle, ended = size + 1, 0, 0
    meeting: dict[Any, list[int]] = {}
    is_bad = {item: random.Random(item).random() < bad for item in range(course.num_items)}
    item_of = [0] * size
    told = 0
    to_notice: list[tuple[float, int]] = []  # when it is noticed that a worker has died

    def at(time: float, place: int) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (time, number, place))

    def meet(what: Any, num: int, time: float, place: int) -> bool:
        there = meeting.setdefault(what, [])
        there.append(place)
        if len(there) < num:
            return False
        for other in meeting.pop(what):
            at(time + 0.1 * look * rng.random(), other)
        return True

    while events:
        time, _, place = heapq.heappop(events)
        if place in log.dead:
            continue
        while to_notice and to_notice[0][0] <= time:
            server.lose(heapq.heappop(to_notice)[1])
        if place < size and rng.random() < die and len(log.dead) < size - 1:
            log.dead.append(place)
            heapq.heappush(to_notice, (time + rng.expovariate(0.3), place))
            for what in [w for w in meeting if w[1] == place]:  # the server waits for it
                meeting.pop(what)
                server.lose(place)
                at(time, size)
            continue
        decision = next(deciding[place])
        table = server.see()
        log.most_ahead = max(log.most_ahead, _ahead(table))
        if decision is None:
            idle += 1
            if idle > 500 * (size + 1):
                raise Deadlock(f"seed {seed}: all wait for ever, {table}")
            at(time + rng.uniform(0.2, 1.0) * look, place)
            continue
        idle, action, is_server = 0, decision.action, place == size
        worker = decision.number if is_server else place
        if is_server and worker in log.dead and action in (Action.PULL, Action.PUSH):
            server.lose(worker)
            at(time, place)
            continue
        if is_server and action in (Action.PUSH, Action.PASS, Action.SKIP):
            server.accept(worker)
        if action is Action.TAKE:
            item_of[worker] = decision.number
            workers[worker].num_given = NOT_FINITE if is_bad[decision.number] else 1
            seconds = 1.0 if steady else rng.expovariate(1.0)
            seconds *= slow if worker == size - 1 else 1.0
            at(time + seconds, place)
        elif action is Action.PULL or (action is Action.PUSH and not is_bad[item_of[worker]]):
            if action is Action.PUSH and is_server:
                log.items.append(item_of[worker])
            meet((action, worker), 2, time, place)
        elif action is Action.REST:
            if is_server:
                log.num_rests, log.progress = log.num_rests + 1, server.rested.progress()
                log.untold += len(server.events) - told
            if ends_at_rest:
                ended += 1
            else:
                at(time, place)
        elif action is Action.END:
            ended += 1
            log.seconds = max(log.seconds, time)
        else:
            if action is Action.TELL and is_server:
                told = len(server.events)
            if action is Action.EVALUATE and is_server:
                log.evaluated.append(sum(table.taken))
            if action is Action.SKIP:
                log.items.append(item_of[worker])
            at(time, place)
        if action is Action.TAKE and rng.random() < close:
            (workers[worker] if only_workers_ask or rng.random() < 0.5 else server).close()
    if ended < size + 1 - len(log.dead):
        raise Deadlock(f"seed {seed}: {size + 1 - ended} of {size + 1} wait for others")
    log.events, log.table = server.events, server.see()
    return log


def _ahead(table: Table) -> int:
    left = [n for n, ends in zip(table.taken, table.finished, strict=True) if not ends]
    return max(left, default=0) - min(left, default=0)


def course_of(size: int, num_steps: int = 12, steps_per_epoch: int = 5) -> Course:
    return Course(num_steps, steps_per_epoch, evaluate_every=1, num_replicas=size)


def collected(events: list[dict[str, Any]], course: Course, from_pool: bool = True):
    """The record of a whole run, which any can be done again from."""
    recorded = collect(events, course.num_replicas)  # which checks the versions
    rules = Rules(course, 0, gradients=False, from_pool=from_pool)
    check_promises(recorded, rules, "server", is_whole=True)
    return recorded


@seeds
def test_all_runs_end_with_every_item_once_and_an_evaluation_after_every_epoch(seeds):
    for seed in seeds:
        size, from_pool, staleness = SIZES[seed % 4], seed % 3 > 0, (None, 0, 1, 3)[seed // 4 % 4]
        course = course_of(size)
        log = simulate(
            course, seed=seed, staleness=staleness, from_pool=from_pool, close=0.1, bad=0.1, slow=3
        )
        assert Counter(log.items) == Counter(range(course.num_items))
        assert log.evaluated == [5 * size, 10 * size]
        of_epochs = [sorted(log.items[i : i + 5 * size]) for i in (0, 5 * size)]
        assert of_epochs == [list(range(5 * size)), list(range(5 * size, 10 * size))]
        recorded = collected(log.events, course, from_pool)
        assert sum(len(of.pushes) for of in recorded) == course.num_items
        assert log.untold == 0
        # A record is done again in its order, whatever takes how long.
        again = simulate(course, seed=seed + 1, close=0.1, bad=0.1, recorded=recorded)
        assert again.events == log.events
        assert again.evaluated == log.evaluated


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_a_bound_keeps_workers_within_so_many_items(staleness):
    ahead = {
        simulate(course_of(3), seed=s, staleness=staleness, slow=4, close=0.05).most_ahead
        for s in range(12)
    }
    # The one that may be ahead by S items begins one more, and is S + 1 ahead when it ends.
    assert max(ahead) <= staleness + 1
    assert max(ahead) > staleness or staleness == 4


@seeds
def test_workers_that_die_cost_no_item_and_leave_nobody_waiting(seeds):
    num_dead = 0
    for seed in seeds:
        size = SIZES[1 + seed % 3]
        course, staleness = course_of(size), (None, 0, 2)[seed // 3 % 3]
        options = {"staleness": staleness, "from_pool": seed % 2 == 0, "bad": 0.1}
        log = simulate(course, seed=seed, close=0.1, die=0.02, **options)
        assert Counter(log.items) == Counter(range(course.num_items)), seed
        assert log.evaluated == [5 * size, 10 * size]
        # One that dies when all is done is missed by nobody.
        assert {w for w in range(size) if log.table.lost[w]} <= set(log.dead)
        num_dead += len(log.dead)
        lost = [{"replica": w, "step": 0, "lost": 1} for w in log.dead]
        recorded = collected([*log.events, *lost], course, options["from_pool"])
        again = simulate(course, seed=seed + 1, recorded=recorded, **options)
        assert again.events == log.events
    assert num_dead > len(seeds) / 2


def test_a_run_goes_on_after_a_rest_and_both_parts_are_one_record():
    course = course_of(3)
    rested = 0
    for seed in range(12):
        first = simulate(course, seed=seed, close=0.05, ends_at_rest=True)
        if not first.num_rests:
            continue
        rested += 1
        second = simulate(course, seed=seed, progress=first.progress)
        assert Counter(first.items + second.items) == Counter(range(course.num_items))
        recorded = collected([*first.events, *second.events], course)
        again = simulate(course, seed=seed + 1, recorded=recorded)
        assert again.events == [*first.events, *second.events]
    assert rested > 6


def test_a_worker_that_wants_a_checkpoint_makes_all_rest():
    for seed in range(6):
        log = simulate(course_of(3), seed=seed, close=0.5, only_workers_ask=True)
        assert log.num_rests > 0, f"seed {seed}"


def test_a_replay_that_comes_apart_says_so():
    log = simulate(course_of(2), bad=0.5)
    with pytest.raises(InputError, match="the record says"):
        simulate(course_of(2), recorded=collected(log.events, course_of(2)))


@pytest.mark.parametrize(("staleness", "factor"), [(0, 1), (1, 0.909), (2, 0.833), (10, 0.5)])
def test_a_late_gradient_is_damped(staleness, factor):
    assert damping(staleness) == pytest.approx(factor, abs=5e-4)


def test_any_bound_ties_all_workers_to_the_slowest_in_the_long_run():
    course = course_of(4, num_steps=60, steps_per_epoch=60)
    synchronous = 60 * 4.0  # the slowest worker's share of all items
    free, bounded = (
        simulate(course, staleness=s, slow=4, steady=True, look=0.02).seconds for s in (None, 2)
    )
    assert synchronous / free > 3  # 3.25 is ideal
    assert synchronous / bounded < 1.2
