"""The parts of strategies on their own: the table, averages, the outer optimizer, balance."""

import re
import threading
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from tests.replication.refused import assert_refused
from tests.world import GUARD, run_ranks
from vigpipe.parallel.agreement import Peers
from vigpipe.parallel.counterparts import Counterparts
from vigpipe.parallel.layout import Layout, make_groups
from vigpipe.replication import diary
from vigpipe.replication.alive import Alive
from vigpipe.replication.decisions import Decision, Decisions, Kind
from vigpipe.replication.exchange import Exchange
from vigpipe.replication.metrics import (
    balance,
    partial_items,
    rows_of_each,
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
    """What three ranks have followed and averaged."""
    return run_ranks(follow_and_average, 3)


def follow_and_average(rank, world_size):
    averages = {d: average(rank, world_size, d) for d in (torch.float32, torch.float64)}
    return follow(rank, world_size), averages, average_in_pairs(rank), go_on_meanwhile(rank)


# ---- the table ------------------------------------------------------------------------------


def test_changes_of_several_replicas_are_made_one_after_the_other():
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    drawn: Counter[int] = Counter()

    def draw(replica: int) -> None:
        table = SharedTable(store, new_table(4), replica)

        def change(table):
            table.drawn += 1
            return table.drawn

        for _ in range(100):
            drawn[table.change(change)] += 1

    threads = [threading.Thread(target=draw, args=(r,)) for r in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert drawn == dict.fromkeys(range(1, 401), 1)


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


# ---- decisions of the first rank --------------------------------------------------------------


def follow(rank, world_size):
    """Three decisions, the second after a while."""
    decisions = Decisions(Peers(world_size))
    if rank == 0:
        slow = [None] * 60
        decide = [
            Decision(Kind.AVERAGE, 7),
            *slow,
            Decision(Kind.END),
            Decision(Kind.TAKE, 10**15, 3),
        ]
        decisions.begin(iter(decide), lambda: None)
    return [decisions.next() for _ in range(3)]


def test_all_ranks_of_a_pipeline_follow_the_first(three):
    expected = [(Kind.AVERAGE, 7, -1), (Kind.END, 0, -1), (Kind.TAKE, 10**15, 3)]
    assert [followed for followed, *_ in three] == [expected] * 3


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


@pytest.mark.parametrize("from_pool", [True, False])
def test_a_lost_replica_s_items_go_to_whoever_is_next(from_pool):
    table = new_table(3)
    for replica in (0, 1, 2, 1):  # 0 and 2 have one each, 1 has one and the next one
        item = table.next_item(replica, from_pool=from_pool)
        table.draw(replica, item)
        if table.leases[replica] < 0:
            table.leases[replica] = item
        else:
            table.ahead[replica] = item
    assert (table.leases, table.ahead[1]) == ([0, 1, 2], 3 if from_pool else 4)
    table.finished[0] = True  # too early, as it turns out
    table.lose(1)
    assert table.finished == [False, True, False]
    left = [1, 3, 4, 5, 6, 7] if from_pool else [1, 3, 4, 6, 7, 9]
    for expected in left:
        item = table.next_item(0, from_pool=from_pool)
        assert item == expected
        table.draw(0, item)
    assert not table.returned


# ---- averages -------------------------------------------------------------------------------


def values_of(rank: int, num: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(num, dtype=dtype, generator=generator)


def average(rank, world_size, dtype):
    """The mean of 1,000 numbers at once, in two tensors, in two exchanges; and what was sent."""
    weight = torch.tensor([3.0, 0.0, 5.0][rank], dtype=torch.float64)
    x = values_of(rank, 1000, dtype)
    exchange = Exchange(Counterparts(dist.group.WORLD))
    (whole,), total = exchange.mean([x], weight)
    sent = exchange.bytes_sent
    parts, _ = exchange.mean([x[:7].view(7, 1), x[7:]], weight)
    halves = [exchange.mean([half], weight)[0][0] for half in (x[:511], x[511:])]
    (alike,), nothing = exchange.mean([x], torch.zeros_like(weight))
    gathered = exchange.gather(torch.tensor([rank, rank + 0.5]))
    assert parts[0].shape == (7, 1)
    return (
        whole,
        torch.cat([parts[0][:, 0], parts[1]]),
        torch.cat(halves),
        alike,
        sent,
        [
            total.item(),
            nothing.item(),
            gathered.tolist(),
        ],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mean_is_the_same_everywhere_however_the_numbers_are_cut(dtype, three):
    x = [values_of(r, 1000, dtype).double() for r in range(3)]
    expected = ((3 * x[0] + 0 * x[1] + 5 * x[2]) / 8).to(dtype)
    plain = ((x[0] + x[1] + x[2]) / 3).to(dtype)
    for _, averages, *_ in three:
        whole, parts, halves, alike, sent, numbers = averages[dtype]
        assert torch.equal(whole, expected)
        assert torch.equal(parts, expected)
        assert torch.equal(halves, expected)
        assert torch.equal(alike, plain)
        # 2 (D - 1) / D * P numbers, P rounded up to a multiple of D.
        assert sent == 2 * 2 * 334 * dtype.itemsize
        assert numbers == [8.0, 0.0, [[0.0, 0.5], [1.0, 1.5], [2.0, 2.5]]]


def average_in_pairs(rank):
    """Replica 0 is averaged with 1 and then with 2, who meet before; and what 0 and 2 have sent."""
    layout = Layout(num_replicas=3, num_teams=3)
    links = make_groups(layout, GUARD, linked=True).links
    exchange = Exchange(Counterparts(dist.group.WORLD), links)
    one = torch.ones((), dtype=torch.float64)
    x = values_of(rank, 1000, torch.float32)
    for pair in ((1, 2), (0, 1), (0, 2)):
        if rank in pair:
            (x,), _ = exchange.mean([x], one, partner=sum(pair) - rank)
    weight = torch.tensor([3.0, 0.0, 1.0][rank], dtype=torch.float64)
    weighted, total = x, None
    if rank != 1:
        (weighted,), total = exchange.mean([values_of(rank, 9, torch.float32)], weight, 2 - rank)
    return x, weighted, total, exchange.bytes_sent


def test_a_pair_takes_one_mean_and_the_third_is_left_alone(three):
    x = [values_of(r, 1000, torch.float32) for r in range(3)]

    def mean(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((a.double() + b.double()) / 2).float()

    x[1] = x[2] = mean(x[1], x[2])
    x[0] = x[1] = mean(x[0], x[1])
    x[0] = x[2] = mean(x[0], x[2])
    found = [pairs for _, _, pairs, _ in three]
    for r in range(3):
        assert torch.equal(found[r][0], x[r])
    # Neither half of a pair is lost: the sum of all replicas stays.
    before = sum(values_of(r, 1000, torch.float32).double() for r in range(3))
    torch.testing.assert_close(sum(f[0].double() for f in found), before, rtol=0, atol=1e-6)
    first, last = (values_of(r, 9, torch.float32).double() for r in (0, 2))
    for r in (0, 2):
        assert torch.equal(found[r][1], ((3 * first + last) / 4).float())
        assert found[r][2] == 4.0
    # 4 P bytes each way in each pair.
    assert [f[3] for f in found] == [4 * 2009, 4 * 2000, 4 * 2009]


def go_on_meanwhile(rank):
    """Give numbers for an average, and take the mean two runs later; replica 2 is late."""
    store = dist.PrefixStore("travel", dist.distributed_c10d._get_default_store())  # pyright: ignore
    table, group = SharedTable(store, new_table(3), rank), dist.new_group()
    exchange = Exchange(Counterparts(group))  # pyright: ignore[reportArgumentType] - all are in it
    num_samples = [3, 0, 5][rank]

    def join(table):
        table.joined[rank] += 1

    def run_that_goes_on(before: Travel, has_come: bool) -> Travel:
        travel = Travel({"x": torch.zeros(1000)}, exchange, store)
        for name, tensor in travel.tensors().items():
            tensor.copy_(before.tensors()[name])
        travel.go_on(1, num_samples, has_come=has_come)
        return travel

    x = values_of(rank, 1000, torch.float32)
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
    x = [values_of(r, 1000, torch.float32) for r in range(3)]
    expected = ((3 * x[0].double() + 5 * x[2].double()) / 8).float()
    for r, (*_, (given, mean, is_under_way)) in enumerate(three):
        assert torch.equal(given, x[r])
        assert torch.equal(mean, expected)
        assert not is_under_way


def test_a_replica_alone_is_its_own_mean():
    x = torch.randn(5)
    (mean,), total = Exchange(Counterparts(None)).mean([x], torch.tensor(0.3, dtype=torch.float64))
    assert mean is x
    assert total == 0.3


# ---- the outer optimizer ----------------------------------------------------------------------


def test_rate_1_without_momentum_gives_the_mean_bit_for_bit():
    weights = {"w": torch.randn(1000), "b": torch.randn(10)}
    outer = Outer(weights, 1.0, 0.0)
    for seed in range(3):
        means = [values_of(seed, 1000, torch.float32), values_of(seed, 10, torch.float32)]
        for new, mean in zip(outer.step(means), means, strict=True):
            assert torch.equal(new, mean)


def test_it_is_torchs_sgd_with_nesterov_momentum_on_the_differences():
    start = torch.randn(100, dtype=torch.float64)
    outer = Outer({"w": start}, 0.7, 0.9)
    parameter = torch.nn.Parameter(start.clone())
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for seed in range(4):
        mean = values_of(seed, 100, torch.float64)
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

    def passes(seconds: float) -> None:
        clock[0] += seconds

    with of.doing("worked"):
        passes(1.0)
        with of.doing("waited"):
            passes(0.25)
        with of.doing("averaged"):
            passes(0.5)
        passes(1.0)
        with of.doing("waited"):
            passes(0.0005)  # so brief that it is no row
        passes(2.0)
    passes(5.0)  # at nothing that is told
    with of.doing("saved"):
        passes(1.0)
        rows = of.take_rows(3)  # what goes on is not told yet
    spans = [(row["did"], row["from"] - 1100, round(row["to"] - 1100, 4)) for row in rows]
    assert spans == [
        ("worked", 0.0, 1.0),
        ("waited", 1.0, 1.25),
        ("averaged", 1.25, 1.75),
        ("worked", 1.75, 4.7505),
    ]
    assert {row["replica"] for row in rows} == {3}
    assert [row["did"] for row in of.take_rows(3)] == ["saved"]
    assert of.seconds == pytest.approx(
        {"worked": 4.0, "waited": 0.2505, "averaged": 0.5, "evaluated": 0.0, "saved": 1.0}
    )


# ---- metrics --------------------------------------------------------------------------------


def test_balance_of_equal_and_of_unequal_loads():
    assert balance([2, 2, 2]) == {"cv": 0.0, "imbalance": 1.0, "efficiency": 1.0}
    assert balance([0, 0]) == {"cv": 0.0, "imbalance": 1.0, "efficiency": 1.0}
    uneven = balance([1, 1, 1, 4])
    assert uneven == pytest.approx({"cv": 0.742, "imbalance": 2.286, "efficiency": 0.4375}, 1e-3)
    assert balance([10, 10, 10, 40]) == pytest.approx(uneven)


def test_the_bytes_of_a_replica_are_those_of_all_its_ranks():
    first = {"items": 3, "busy_seconds": 2.0, "bytes_sent": 10, "peak_bytes": 7}
    second = {**first, "items": 0, "bytes_sent": 5, "peak_bytes": 9}
    table = summarize_replicas([[first, second], [{**first, "busy_seconds": 6.0}, second]])
    assert table["each"] == [
        {"replica": 0} | first | {"bytes_sent": 15, "peak_bytes": 9},
        {"replica": 1} | first | {"busy_seconds": 6.0, "bytes_sent": 15, "peak_bytes": 9},
    ]
    assert table["busy"]["imbalance"] == 1.5


def test_items_of_partial_batches_do_not_count_as_items_of_full_ones():
    whole = {
        **dict.fromkeys(("samples", "averages", "bytes_sent", "peak_bytes"), 10),
        **{"items": 10, "busy_seconds": 10.0, "waiting_seconds": 0.0, "averaging_seconds": 0.0},
    }
    some, none, only = (
        {"replica": i, **whole, "partial_items": n, "partial_busy_seconds": seconds}
        for i, (n, seconds) in enumerate(((2, 0.4), (0, 0.0), (10, 10.0)))
    )
    old = {"replica": 3, **whole}
    cells = [row[2] for row in rows_of_each([some, none, only, old])]
    assert cells == ["1,200.0", "1,000.0", "1,000.0", "1,000.0"]
    assert partial_items([some, none, only, old]) == (
        "Items of partial batches are told apart: 2 of replica 0 (200.0 ms each); 10 of replica 2, "
        "its only ones (1,000.0 ms each)."
    )
    assert partial_items([none, old]) == ""


# ---- signs of life ----------------------------------------------------------------------------


def test_a_replica_that_shows_no_sign_of_life_is_named(monkeypatch):
    monkeypatch.setattr("vigpipe.replication.alive.BEAT_SECONDS", 0.01)
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
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
