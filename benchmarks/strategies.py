"""How much time does each way to agree cost, and who waits? Replicas that sleep, real traffic.

A replica sleeps as long as an item would take it, which needs no core, so that 2 cores carry 4 to
8 replicas, and a server. Everything else is that of a training run: the strategies (`replication`),
the table in the store, and averages of real tensors over gloo.

Every way to agree does the same number of items, on three kinds of machines:

    equal      an item takes every replica the same time
    one slow   it takes the last replica 4 times as long
    spells     every replica is 4 times slower at times: for 10 items, begun after one in 40
"""

import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.options import FILES, StrategiesBench
from benchmarks.ranks import run_bench_ranks, start_bench_ranks
from benchmarks.sleeping import sleep_until
from benchmarks.strategies_page import PICTURE, Case, CaseRun, write_page
from vigpipe.config.compress import parse_compress
from vigpipe.config.options import TrainConfig
from vigpipe.config.replication import with_replication_defaults
from vigpipe.errors import DONE, InputError
from vigpipe.launch.environment import Launch
from vigpipe.launch.rendezvous import init_process_group
from vigpipe.parallel.agreement import Agreement, Peers, Status
from vigpipe.parallel.counterparts import Counterparts
from vigpipe.parallel.layout import Layout, make_groups
from vigpipe.parallel.values import all_gather_values, broadcast_value
from vigpipe.replication.choose import make_strategy
from vigpipe.replication.compression import bytes_of_sum
from vigpipe.replication.course import Course
from vigpipe.replication.decisions import ALL
from vigpipe.replication.feedback import make_method
from vigpipe.replication.own_steps import OwnSteps, Weights
from vigpipe.replication.position import Position
from vigpipe.replication.strategy import Computed, Loop, Pushed, Strategy
from vigpipe.run.folder import make_output_folder

MACHINES = ("equal", "one slow", "spells")
SLOWER = 4  # times that a slow replica takes
SPELL, SPELL_EVERY = 10, 40  # items that a spell lasts, and that begin one on average
SILENCE_SECONDS = 300.0  # until a silent peer counts as lost
OVERLAPPED = "all, pool, overlap"  # an average is applied after a quarter of TAU
WAYS: dict[str, dict[str, Any]] = {
    "all, fixed": {"strategy": "periodic", "items": "fixed"},
    "all, fixed, bfloat16": {"strategy": "periodic", "items": "fixed", "compress": "bfloat16"},
    "all, fixed, top-k:0.01": {"strategy": "periodic", "items": "fixed", "compress": "top-k:0.01"},
    "all, pool": {"strategy": "periodic", "items": "pool"},
    OVERLAPPED: {"strategy": "periodic", "items": "pool"},
    "pair, fixed": {"strategy": "gossip", "items": "fixed"},
    "pair, pool": {"strategy": "gossip", "items": "pool"},
    "pair, pool, interval": {"strategy": "gossip", "items": "pool", "answer": "interval"},
}

# These average nothing.
SERVED: dict[str, dict[str, Any]] = {
    "server, fixed": {"strategy": "server", "items": "fixed"},
    "server, pool": {"strategy": "server", "items": "pool"},
    "server, pool, staleness 4": {"strategy": "server", "items": "pool", "staleness": 4},
}
FACTS_BYTES = 24  # that go with each gradient to a server


def run_strategies(options: StrategiesBench, arguments: Sequence[str]) -> int:
    """Run the command `python -m benchmarks strategies`; its ranks are started as for training.

    Args:
        options: options of the benchmark.
        arguments: the command line, for the ranks that are started here.

    Returns:
        The exit code.
    """

    def start(launch: Launch) -> int:
        return _start(options, arguments, launch)

    return run_bench_ranks("benchmarks.strategies", options.out, start)


def _start(options: StrategiesBench, arguments: Sequence[str], launch: Launch) -> int:
    cases = list_cases(options)
    num_ranks = options.dp + 1  # the last one is a server, or idle
    if launch.launcher == "alone":
        return start_bench_ranks(num_ranks, options.out, [*FILES, PICTURE], arguments)
    if launch.world_size != num_ranks:
        raise InputError(
            f"{launch.world_size} ranks were started, and --dp {options.dp} and a server need "
            f"{num_ranks}; start {num_ranks} ranks, or change the option"
        )
    folder = make_output_folder(options.out, [*FILES, PICTURE]) if launch.rank == 0 else Path()
    torch.set_num_threads(1)
    init_process_group(launch, "gloo", SILENCE_SECONDS)
    runs = run_cases(cases, options)
    if launch.rank == 0:
        write_page(folder, options, runs)
    return DONE


def list_cases(options: StrategiesBench) -> list[Case]:
    """Check the options, and list all combinations of machines, ways to agree, and intervals.

    Raises:
        InputError: a number is out of range.
    """
    bounds = {"dp": (2, 64), "repeats": (1, 1000), "numbers": (1, 10**9), "seconds": (1e-3, 60)}
    for name, (least, most) in bounds.items():
        if not least <= getattr(options, name) <= most:
            raise InputError(
                f"--{name} {getattr(options, name)}: must be from {least:g} to {most:g}"
            )
    if options.items < options.dp or options.items % options.dp:
        raise InputError(
            f"--items {options.items}: must be a multiple of --dp {options.dp}, such as "
            f"{max(1, round(options.items / options.dp)) * options.dp}"
        )
    words = options.average_every.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise InputError(
            f"--average-every {options.average_every}: must be whole numbers above 0, such as 1,20"
        )
    intervals = sorted({int(word) for word in words})
    not_averaged = {"weights": "top-k", "gradients": OVERLAPPED}[options.average]
    ways = [way for way in WAYS if not_averaged not in way]
    averaged = [Case(m, way, every) for m in MACHINES for every in intervals for way in ways]
    return averaged + [Case(machine, way, 0) for machine in MACHINES for way in SERVED]


def run_cases(cases: Sequence[Case], options: StrategiesBench) -> list[CaseRun]:
    """Run all cases once, then all of them again, and so on; every rank calls this."""
    runs = []
    replicas: Any = dist.new_group(list(range(options.dp)))  # of no meaning to the last rank
    in_pairs = Layout(num_replicas=options.dp + 1, num_teams=options.dp + 1)
    links = make_groups(in_pairs, SILENCE_SECONDS, linked=True).links
    for repeat in range(options.repeats):
        for case in cases:
            group = dist.group.WORLD if case.way in SERVED else replicas

            runs.append(run_case(case, options, repeat, group, links))
        if dist.get_rank() == 0:
            print(f"{repeat + 1} of {options.repeats} rounds of {len(cases)} cases are done")
            sys.stdout.flush()
    return runs


def run_case(
    case: Case,
    options: StrategiesBench,
    repeat: int,
    group: dist.ProcessGroup | None,
    links: Mapping[int, dist.ProcessGroup],
) -> CaseRun:
    """Run a case; every rank calls this, and is a replica, the server, or idle.

    Args:
        case: what to run.
        options: options of the benchmark.
        repeat: which time it is.
        group: the replicas, and the server if there is one; of no meaning to a rank that is idle.
        links: this rank and one other each.
    """
    rank, size = dist.get_rank(), options.dp
    num_ranks, num_members = dist.get_world_size(), size + (case.way in SERVED)
    token = broadcast_value(os.urandom(4).hex(), num_ranks)
    if rank >= num_members:
        dist.barrier()
        return _run_of(case, options, repeat, all_gather_values([0.0, {}], num_ranks)[:size])
    num_steps = options.items // size
    weights = Weights({"weights": torch.zeros(options.numbers)}, {})
    config = TrainConfig(
        average_every=case.average_every or None,
        average=options.average if case.average_every else None,
        overlap=case.average_every // 4 if case.way == OVERLAPPED else None,
        dp=size,
        seed=repeat,
        **(WAYS | SERVED)[case.way],
    )
    position = Position(
        team=rank,
        replica_in_team=0,
        team_size=1,
        is_server=rank == size,
        leads_team=True,
        rank=rank,
        peers=Peers(),
        num_ranks=num_members,
        num_teams=num_members,
        across_teams=Counterparts(group),
        open_store=lambda: dist.PrefixStore(token, dist.distributed_c10d._get_default_store()),
        timeout_seconds=SILENCE_SECONDS,
        num_stats=0,
        links=links,
    )
    course = Course(num_steps, steps_per_epoch=num_steps, evaluate_every=1, num_replicas=size)
    strategy = make_strategy(with_replication_defaults(config), course, position, weights)
    costs = item_seconds(case.machine, rank, size, options.seconds, repeat)
    dist.barrier()
    began = time.perf_counter()
    _work(strategy, weights, costs)
    seconds = time.perf_counter() - began
    assert isinstance(strategy, OwnSteps)
    strategy.membership.close()
    accounts = all_gather_values([seconds, dict(strategy.account())], num_ranks)
    return _run_of(case, options, repeat, accounts[:num_members])


def _run_of(
    case: Case,
    options: StrategiesBench,
    repeat: int,
    accounts: Sequence[tuple[float, dict[str, Any]]],
) -> CaseRun:
    """Put together what the ranks have counted that took part in a case."""
    size = options.dp
    expected = options.items * (8 * options.numbers + FACTS_BYTES)  # of a server and its workers
    if case.way in WAYS:
        num_averages = sum(account["averages"] for _, account in accounts)
        expected = num_averages * _bytes_of_average(case.way, options.numbers, size)
    of = {name: [account[name] for _, account in accounts] for name in accounts[0][1]}
    return CaseRun(
        case,
        repeat,
        seconds=max(seconds for seconds, _ in accounts),
        busy=of["busy_seconds"][:size],
        waiting=of["waiting_seconds"][:size],
        averaging=of["averaging_seconds"][:size],
        items=of["items"][:size],
        num_bytes=sum(of["bytes_sent"]),
        expected_bytes=expected,
    )


def _work(strategy: Strategy, weights: Weights, costs: Iterator[float]) -> None:
    """Do what a training loop does, and sleep instead of computing."""
    gradients = [torch.zeros_like(tensor) for tensor in weights.averaged.values()]
    stats, is_finite = torch.zeros(1, 3, 0, dtype=torch.float64), torch.tensor(True)
    for _ in strategy.items(0, is_evaluated=True, loop=_Applies(strategy)):
        sleep_until(time.perf_counter() + next(costs))
        strategy.combine_gradients(Computed(gradients, stats, is_finite, 1, True, None))
        strategy.hear(Agreement([Status()]))


class _Applies(Loop):
    """A loop whose optimizer takes no time."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def apply(self, pushed: Pushed) -> None:
        """Count the gradients of another replica."""
        self._strategy.hear(Agreement([]))


def item_seconds(
    machine: str, replica: int, num_replicas: int, seconds: float, seed: int
) -> Iterator[float]:
    """Yield how long each item takes a replica.

    Args:
        machine: one of MACHINES.
        replica: which replica it is.
        num_replicas: D.
        seconds: of an item when the replica is not slow.
        seed: of the spells; they depend on the replica too, and on its number of items.
    """
    rng = random.Random(f"{seed} {replica}")
    left = 0  # items of a spell
    while True:
        if machine == "spells":
            begins = left == 0 and rng.random() < 1 / SPELL_EVERY
            left = SPELL if begins else max(left - 1, 0)
        is_slow = left > 0 or (machine == "one slow" and replica == num_replicas - 1)
        yield seconds * (SLOWER if is_slow else 1)


def _bytes_of_average(way: str, numbers: int, num_replicas: int) -> int:
    """Return the bytes that a replica should send in an average of float32 numbers."""
    compression = parse_compress(WAYS[way].get("compress", "none"))
    partner = 1 if WAYS[way]["strategy"] == "gossip" else ALL
    if compression.method == "none":
        return bytes_of_sum(numbers, 4, num_replicas, partner)
    return make_method(compression).bytes_sent({"weights": (numbers,)}, 4, num_replicas, partner)
