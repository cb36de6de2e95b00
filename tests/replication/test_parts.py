"""The parts of strategies on their own: the table, averages, the outer optimizer, balance."""

import re

import pytest
import torch
import torch.distributed as dist

from tests.replication.refused import assert_refused
from tests.world import GUARD, run_ranks
from vigpipe.parallel.counterparts import Counterparts
from vigpipe.parallel.layout import Layout, make_groups
from vigpipe.replication import diary
from vigpipe.replication.alive import Alive
from vigpipe.replication.exchange import Exchange
from vigpipe.replication.metrics import (
    balance,
    partial_items,
    summarize_replicas,
)
from vigpipe.replication.outer import Outer
from vigpipe.replication.table import (
    DONE,
    FAILED,
    PENDING,
    SharedTable,
    new_table,
    resumed_table,
)
from vigpipe.replication.travel import Travel

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def three():
    """What three ranks have averaged."""
    return run_ranks(average_in_all_ways, 3)


def average_in_all_ways(rank, world_size):
    return average(rank), average_in_a_pair(rank), go_on_meanwhile(rank)


# ---- the table ------------------------------------------------------------------------------


def test_a_progress_that_does_not_fit_is_refused():
    progress = new_table(2).progress()
    assert resumed_table(progress, 2) == new_table(2)
    table = [
        ({"taken": [1]}, "taken is not a number for each of 2"),
        ({"leases": [1, "x"]}, "leases is not a number"),
        ({"drawn": -5}, "drawn is not a number"),
        ({"drawn": True}, "drawn is not a number"),
        ({"more": 1}, "has the entries"),
    ]
    assert_refused(lambda change: resumed_table({**progress, **change}, 2), table)


def test_a_meeting_is_one_of_all_that_are_left_and_counts_if_all_have_done_their_part():
    table = new_table(3, has_server=True)
    for member in (0, 3, 1):
        table.come(member)
    assert table.meetings == 0
    table.lose(2)  # which makes it complete
    assert (table.meetings, table.circle) == (1, [0, 1, 3])
    for member in (0, 1):
        table.report(member, is_done=True)
    assert table.verdict == PENDING
    table.lose(1)  # it had done its part before
    assert table.verdict == PENDING
    table.report(3, is_done=True)
    assert table.verdict == DONE

    for member in (0, 3):
        table.come(member)
    assert (table.meetings, table.circle, table.verdict) == (2, [0, 3], PENDING)
    table.lose(0)
    assert table.verdict == FAILED
    table.come(3)
    assert (table.meetings, table.circle) == (3, [3])


# ---- averages -------------------------------------------------------------------------------


def values_of(rank: int, num: int = 1000) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(rank))


def average(rank):
    """The mean of 1,000 numbers at once, in two tensors, in two exchanges; and what was sent."""
    weight = torch.tensor([3.0, 0.0, 5.0][rank], dtype=torch.float64)
    x = values_of(rank)
    exchange = Exchange(Counterparts(dist.group.WORLD))
    (whole,), total = exchange.mean([x], weight)
    sent = exchange.bytes_sent
    parts, _ = exchange.mean([x[:7].view(7, 1), x[7:]], weight)
    halves = [exchange.mean([half], weight)[0][0] for half in (x[:511], x[511:])]
    (alike,), nothing = exchange.mean([x], torch.zeros_like(weight))
    gathered = exchange.gather(torch.tensor([rank, rank + 0.5]))
    assert parts[0].shape == (7, 1)
    means = [whole, torch.cat([parts[0][:, 0], parts[1]]), torch.cat(halves)]
    return means, alike, sent, [total.item(), nothing.item(), gathered.tolist()]


def test_a_mean_is_the_same_everywhere_however_the_numbers_are_cut(three):
    x = [values_of(r).double() for r in range(3)]
    expected = ((3 * x[0] + 0 * x[1] + 5 * x[2]) / 8).float()
    plain = ((x[0] + x[1] + x[2]) / 3).float()
    for (means, alike, sent, numbers), *_ in three:
        assert all(torch.equal(mean, expected) for mean in means)
        assert torch.equal(alike, plain)
        # 2 (D - 1) / D * P numbers, P rounded up to a multiple of D.
        assert sent == 2 * 2 * 334 * 4
        assert numbers == [8.0, 0.0, [[0.0, 0.5], [1.0, 1.5], [2.0, 2.5]]]


def average_in_a_pair(rank):
    """What replicas 0 and 2 take from one another, and the bytes that each has sent."""
    links = make_groups(Layout(num_replicas=3, num_teams=3), GUARD, linked=True).links
    exchange = Exchange(Counterparts(dist.group.WORLD), links)
    x, weight = values_of(rank), torch.tensor(3.0 if rank == 0 else 1.0, dtype=torch.float64)
    if rank != 1:
        (x,), _ = exchange.mean([x], weight, partner=2 - rank)
    return x, exchange.bytes_sent


def test_a_pair_takes_one_mean_and_the_third_is_left_alone(three):
    first, alone, last = (values_of(r) for r in range(3))
    mean = ((3 * first.double() + last.double()) / 4).float()
    found = [(x, sent) for _, (x, sent), _ in three]
    assert [sent for _, sent in found] == [4 * 1000, 0, 4 * 1000]
    for (x, _), expected in zip(found, (mean, alone, mean), strict=True):
        assert torch.equal(x, expected)


def go_on_meanwhile(rank):
    """Give numbers for an average, and take the mean two runs later; replica 2 is late."""
    store = dist.PrefixStore("travel", dist.distributed_c10d._get_default_store())
    table, group = SharedTable(store, new_table(3), rank), dist.new_group()
    exchange = Exchange(Counterparts(group))  # pyrefly: ignore[bad-argument-type]  # all are in it
    num_samples = [3, 0, 5][rank]

    def join(table):
        table.joined[rank] += 1

    def run_that_goes_on(before: Travel, has_come: bool) -> Travel:
        travel = Travel({"x": torch.zeros(1000)}, exchange, store)
        for name, tensor in travel.tensors().items():
            tensor.copy_(before.tensors()[name])
        travel.go_on(1, num_samples, has_come=has_come)
        return travel

    x = values_of(rank)
    travel = Travel({"x": x}, exchange, store)
    if rank < 2:
        table.change(join)
        travel.begin(1, num_samples)
        x.zero_()  # what it does from here on does not matter
        travel.pause(stop=False)
        assert travel.is_under_way
        travel.pause(stop=True)
        travel = run_that_goes_on(travel, has_come=False)
    else:
        travel.pause(stop=False)  # nothing is under way here
    dist.barrier()
    if rank == 2:
        table.change(join)
        travel.begin(1, num_samples)
    dist.barrier()
    travel.pause(stop=True)  # all have given: the mean is there from now on
    travel = run_that_goes_on(travel, has_come=True)
    (given,), (mean,) = travel.end()
    return given, mean, travel.is_under_way


def test_a_mean_that_is_under_way_is_that_of_what_was_given_whoever_rests(three):
    x = [values_of(r) for r in range(3)]
    expected = ((3 * x[0].double() + 5 * x[2].double()) / 8).float()
    for r, (*_, (given, mean, is_under_way)) in enumerate(three):
        assert torch.equal(given, x[r])
        assert torch.equal(mean, expected)
        assert not is_under_way


# ---- the outer optimizer ----------------------------------------------------------------------


def test_rate_1_without_momentum_gives_the_mean_bit_for_bit():
    outer = Outer({"w": torch.randn(1000), "b": torch.randn(10)}, 1.0, 0.0)
    for seed in range(3):
        means = [values_of(seed), values_of(seed, 10)]
        for new, mean in zip(outer.step(means), means, strict=True):
            assert torch.equal(new, mean)


def test_it_is_torchs_sgd_with_nesterov_momentum_on_the_differences():
    start = torch.randn(100, dtype=torch.float64)
    outer = Outer({"w": start}, 0.7, 0.9)
    parameter = torch.nn.Parameter(start.clone())
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for seed in range(4):
        mean = values_of(seed, 100).double()
        parameter.grad = parameter.detach() - mean
        sgd.step()
        (new,) = outer.step([mean])
        assert torch.allclose(new, parameter.detach(), rtol=0, atol=1e-14)
    assert outer.tensors().keys() == {"outer_old/w", "outer_velocity/w"}


# ---- the diary ------------------------------------------------------------------------------


def test_what_is_within_something_else_interrupts_it(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(diary.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(diary.time, "time", lambda: clock[0] + 1000)
    of = diary.Diary()

    with of.doing("worked"):
        clock[0] += 1.0
        with of.doing("waited"):
            clock[0] += 0.25
        clock[0] += 1.0
        with of.doing("waited"):
            clock[0] += 0.0005  # so brief that it is no row
        clock[0] += 2.0
    clock[0] += 5.0  # at nothing that is told
    with of.doing("saved"):
        clock[0] += 1.0
        rows = of.take_rows(3)  # what goes on is not told yet
    spans = [(row["did"], row["from"] - 1100, round(row["to"] - 1100, 4)) for row in rows]
    assert spans == [("worked", 0.0, 1.0), ("waited", 1.0, 1.25), ("worked", 1.25, 4.2505)]
    assert {row["replica"] for row in rows} == {3}
    assert [row["did"] for row in of.take_rows(3)] == ["saved"]
    seconds = {"worked": 4.0, "waited": 0.2505, "averaged": 0.0, "evaluated": 0.0, "saved": 1.0}
    assert of.seconds == pytest.approx(seconds)


# ---- metrics --------------------------------------------------------------------------------


def test_balance_of_equal_and_of_unequal_loads():
    assert balance([2, 2, 2]) == {"cv": 0.0, "imbalance": 1.0, "efficiency": 1.0}
    assert balance([0, 0]) == {"cv": 0.0, "imbalance": 1.0, "efficiency": 1.0}
    expected = {"cv": 0.742, "imbalance": 2.286, "efficiency": 0.4375}
    assert balance([1, 1, 1, 4]) == pytest.approx(expected, 1e-3)


def test_a_replica_that_had_partial_batches_alone_says_so():
    of_replica = {"replica": 2, "items": 10, "partial_items": 10, "partial_busy_seconds": 10.0}
    assert partial_items([of_replica, {"replica": 3, "items": 10}]) == (
        "Items of partial batches are told apart: 10 of replica 2, its only ones (1,000.0 ms each)."
    )


def test_the_bytes_of_a_replica_are_those_of_all_its_ranks():
    first = {"items": 3, "busy_seconds": 2.0, "bytes_sent": 10, "peak_bytes": 7}
    second = {**first, "items": 0, "bytes_sent": 5, "peak_bytes": 9}
    table = summarize_replicas([[first, second], [{**first, "busy_seconds": 6.0}, second]])
    assert table["each"] == [
        {"replica": 0} | first | {"bytes_sent": 15, "peak_bytes": 9},
        {"replica": 1} | first | {"busy_seconds": 6.0, "bytes_sent": 15, "peak_bytes": 9},
    ]
    assert table["busy"]["imbalance"] == 1.5


# ---- signs of life ----------------------------------------------------------------------------


def test_a_replica_that_shows_no_sign_of_life_is_named(monkeypatch):
    monkeypatch.setattr("vigpipe.replication.alive.BEAT_SECONDS", 0.01)
    store = dist.HashStore()
    patient, other = Alive(store, 0, 2, GUARD), Alive(store, 1, 2, GUARD)
    while store.add("alive/1", 0) < 20:
        assert patient.look() == {}
    other.close()
    impatient = Alive(store, 0, 2, 0.1)

    while not (lost := impatient.look()):
        pass
    assert re.match(r"Timed out waiting [0-9]+ms for replica 1, which", lost.pop(1))
    has_ended = Alive(store, 0, 2, GUARD, lambda replica: replica == 1)
    assert has_ended.look() == {1: "a process of replica 1 has ended"}
    for alive in (patient, impatient, has_ended):
        alive.close()
