"""The protocol in simulation: every item once, every average whole, and no deadlock."""

import contextlib
import random
from collections import Counter
from functools import partial

import pytest

from tests.replication.simulation import Deadlock, Log, simulate
from vigpipe.replication import periodic
from vigpipe.replication.course import Course
from vigpipe.replication.member import Member
from vigpipe.replication.record import collect

KINDS = {
    "own": periodic.OWN_GRADIENTS,
    "average": periodic.AVERAGE,
    "no_step": periodic.NO_STEP,
    "take": periodic.TAKE,
    "evaluate": periodic.EVALUATE,
    "rest": periodic.REST,
    "end": periodic.END,
}
SEEDS = 200
STEPS = 7


def course_of(num_replicas: int, num_steps: int = STEPS) -> Course:
    return Course(num_steps, steps_per_epoch=4, evaluate_every=1, num_replicas=num_replicas)


def simulated(num_replicas: int, average_every: int, gradients: bool = False, **options) -> Log:
    course = options.pop("course", course_of(num_replicas))

    def decide(member: Member, index: int):
        return periodic.decide(member, course, gradients=gradients, evaluates=index == 0)

    return simulate(decide, KINDS, course, average_every=average_every, **options)


def every_item(log: Log) -> Counter[int]:
    return Counter(item for items in log.items.values() for item in items)


@pytest.mark.parametrize("average_every", [1, 3, 7])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5, 8])
def test_every_run_ends_with_every_item_done_once(num_replicas, average_every):
    for seed in range(SEEDS):
        from_pool, gradients = bool(seed & 1), bool(seed & 2)
        close = 0.1 if seed & 4 else 0.0
        log = simulated(
            num_replicas, average_every, gradients, from_pool=from_pool, seed=seed, close=close
        )
        assert every_item(log) == dict.fromkeys(range(STEPS * num_replicas), 1), seed
        # Every average is one of all replicas, and there are as many as are due.
        assert log.averages == dict.fromkeys(range(1, STEPS // average_every + 1), num_replicas)
        assert log.table is not None
        assert set(log.table.joined) == {STEPS // average_every}
        assert log.table.leases == [-1] * num_replicas
        if not from_pool:
            for r, items in log.items.items():
                assert items == list(range(r, STEPS * num_replicas, num_replicas))
        if not close:
            assert not log.given_back
            assert not log.rests


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("from_pool", [False, True])
def test_a_run_goes_on_where_all_have_rested(from_pool, gradients):
    again = partial(simulated, 4, 3, gradients, from_pool=from_pool, close=0.2)
    for seed in range(60):
        first = again(seed=seed, kill_at=1)
        if not first.rests:
            continue  # nobody wanted to
        assert first.table is not None
        second = again(seed=seed + 1000, progress=first.table.progress())
        done = every_item(first) + every_item(second)
        assert done == dict.fromkeys(range(4 * STEPS), 1), seed
        assert second.table is not None
        assert second.table.joined == [STEPS // 3] * 4


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("from_pool", [False, True])
def test_a_record_is_done_again_whatever_the_timing(from_pool, gradients):
    for seed in range(60):
        num_replicas, average_every = 1 + seed % 5, 1 + seed % 3
        run = partial(simulated, num_replicas, average_every, gradients, from_pool=from_pool)
        first = run(seed=seed, close=0.1)
        recorded = collect(first.events, num_replicas)
        assert {r: of.items for r, of in enumerate(recorded)} == first.items
        again = run(seed=seed + 1000, close=0.1, recorded=recorded)
        assert again.items == first.items
        assert again.events == first.events


@pytest.mark.parametrize(
    "rows",
    [
        [{"replica": 0, "step": 2, "item": 0}],
        [{"replica": 2, "step": 1, "item": 0}],
        [{"replica": 0, "step": 1, "item": -1}],
        [{"replica": 0, "step": 1, "item": 0}, {"replica": 0, "step": 1, "average": 2}],
        [{"replica": 0, "step": 5, "average": 1}],
        [{"replica": 0, "step": 1}],
        [{"replica": 0, "step": 1, "item": 0, "average": 1}],
        [{"replica": True, "step": 1, "item": 0}],
        [{}],
    ],
)
def test_a_record_that_no_run_can_have_left_is_refused(rows):
    with pytest.raises(ValueError, match=r"is no event of one of 2|is not the next event"):
        collect(rows, 2)


def test_who_stays_in_an_average_although_the_pool_is_closed_hangs(monkeypatch):
    """The same harness must tell a protocol that can lock up, or it proves nothing."""

    def stay(self: Member, num_open: int = 0):
        def come(table):
            table.joined[self._index] += 1
            return table.joined[self._index]

        number = self._table.change(come)
        while min(self._table.read().joined) < number:
            yield
        return True

    monkeypatch.setattr(Member, "join", stay)
    hung = 0
    for seed in range(20):
        with contextlib.suppress(Deadlock):
            simulated(3, 3, from_pool=False, seed=seed, close=0.1)
            continue
        hung += 1
    assert hung > 3


def test_with_a_pool_a_slow_replica_takes_fewer_items():
    """SYSTEMS: costs 20, 20, 20, 80 ms, 160 items: 0.985 s of a pool against 3.2 s."""

    def cost(replica: int, rng: random.Random) -> float:
        return 80.0 if replica == 3 else 20.0

    course = course_of(4, 40)
    fixed, pool = (
        simulated(4, 1000, course=course, from_pool=from_pool, cost=cost)
        for from_pool in (False, True)
    )
    assert fixed.seconds >= 3200
    assert pool.seconds <= 160 / (3 / 20 + 1 / 80) + 80 + 1
    assert fixed.seconds > 2.5 * pool.seconds
    assert [len(items) for items in fixed.items.values()] == [40] * 4
    assert len(pool.items[3]) < 15


def test_replica_0_evaluates_after_every_epoch_but_the_last():
    evaluated = []
    course = course_of(2, 9)  # two epochs of four steps, and a step

    def decide(member: Member, index: int):
        for decision in periodic.decide(member, course, gradients=False, evaluates=index == 0):
            if decision is not None and decision.kind == periodic.EVALUATE:
                evaluated.append((index, decision.number))
            yield decision

    simulate(decide, KINDS, course, average_every=3, from_pool=False, close=0.3, seed=1)
    # The end of the run scores what is kept of all replicas.
    assert evaluated == [(0, 1), (0, 2)]
