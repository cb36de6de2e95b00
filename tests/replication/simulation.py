"""Run the protocol of a strategy without ranks: its own code, in virtual time, one event at a time.

A replica is the generator that its first rank would follow. It takes a random time for an item, and
looks again a little later while it waits. The store now and then lets somebody else be first, so
that changes of the table have to be tried again.
"""

import contextlib
import heapq
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vigpipe.replication.course import Course
from vigpipe.replication.decide import decide
from vigpipe.replication.decisions import ALL, Action, Decision
from vigpipe.replication.member import Member
from vigpipe.replication.store import StoreLostError
from vigpipe.replication.table import SharedTable, Table, new_table, read_table, resumed_table


class Deadlock(AssertionError):
    """Nobody can go on."""


class BusyStore:
    """A store in which others change the table between a look and a change."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.values = rng, {}

    def get(self, key: str, /) -> bytes:
        return self.values[key].encode()

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        now = self.values.get(key, "")
        if now and self.rng.random() < 0.2:
            table = json.loads(now)
            now = self.values[key] = json.dumps({**table, "version": table["version"] + 1})
        if now == expected:
            self.values[key] = desired
        return self.values[key].encode()


class StoreToBeLost:
    """A store that one replica can use for some calls; the last one may have come through."""

    def __init__(self, store: BusyStore, num_calls: float) -> None:
        self.store, self.num_left = store, num_calls

    def get(self, key: str, /) -> bytes:
        self._count()
        return self.store.get(key)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        if self.num_left == 1 and self.store.rng.random() < 0.5:
            self.store.compare_set(key, expected, desired)
        self._count()
        return self.store.compare_set(key, expected, desired)

    def _count(self) -> None:
        self.num_left -= 1
        if self.num_left <= 0:
            raise StoreLostError


@dataclass
class Log:
    """What has happened in a simulation."""

    items: dict[int, list[int]]  # each replica's items with which it took steps
    given_back: Counter[int] = field(default_factory=Counter)  # items of steps that were not taken
    averages: Counter[int] = field(default_factory=Counter)  # replicas at each average, by number
    pairs: list[tuple[int, int]] = field(default_factory=list)  # averages of two, in order
    dead: list[int] = field(default_factory=list)  # replicas in the order of their deaths
    # What each replica knows that has lost the store, from `Table.seen`.
    left: dict[int, dict[str, Any]] = field(default_factory=dict)
    # Steps after which a replica has given its weights for an average, and has applied it.
    given: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    applied: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    evaluated: dict[int, list[int]] = field(default_factory=dict)  # epochs, by replica
    rests: list[int] = field(default_factory=list)  # steps at which all rested
    seconds: float = 0.0  # when the last replica ended
    busy: list[float] = field(default_factory=list)  # seconds of work of each replica
    table: Table = field(init=False)  # at the end
    events: list[dict[str, int]] = field(default_factory=list)  # what all replicas have recorded


def simulate(
    make_member: Callable[[SharedTable, int], Member],  # given its view of the table and its index
    course: Course,
    *,
    seed: int = 0,  # draws all delays
    cost: Callable[[int, random.Random], float] = lambda replica, rng: rng.expovariate(1.0),
    exchange: float = 0.01,  # most seconds of an average
    look: tuple[float, float] = (0.1, 0.6),  # seconds between two looks of one that waits
    close: float = 0.0,  # probability that a replica wants a checkpoint after an item
    overlap: bool = False,  # whether replicas go on while an average is under way
    kill_at: int | None = None,  # number of rests after which the run ends
    die: float = 0.0,  # probability that a replica dies, at each of its events; one stays alive
    lose_store_after: int | None = None,  # calls of each replica, or some more
    progress: dict[str, Any] | None = None,  # an earlier run left it
    watch: Callable[[Table], None] = lambda table: None,  # called after every event
) -> Log:
    """Simulate the replicas of a run; raise Deadlock if nobody can go on."""
    rng, size = random.Random(seed), course.num_replicas
    store = BusyStore(rng)
    first = resumed_table(progress, size) if progress else new_table(size)

    def store_of() -> BusyStore | StoreToBeLost:
        if lose_store_after is None:
            return store
        return StoreToBeLost(store, lose_store_after + rng.randint(0, 20))

    members = [make_member(SharedTable(store_of(), first, r), r) for r in range(size)]
    replicas = [decide(member) for member in members]
    log = Log({r: [] for r in range(size)}, busy=[0.0] * size)
    log.evaluated = {r: [] for r in range(size)}
    events = [(rng.random(), r, r) for r in range(size)]
    heapq.heapify(events)
    number, idle_looks = size, 0
    open_item: dict[int, int] = {}
    meeting: dict[Any, list[int]] = {}  # replicas in an exchange
    came: Counter[Any] = Counter()
    ended = 0
    to_notice: list[tuple[float, int]] = []  # when it is noticed that a replica has died

    def at(time: float, replica: int) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (time, number, replica))

    def meet(what: Any, num_others: int, time: float, replica: int) -> None:
        came[what, replica] += 1
        there = meeting.setdefault((what, came[what, replica]), [])
        there.append(replica)
        if len(there) > num_others:
            if isinstance(what, tuple):
                log.pairs.append(what)
            for other in there:
                at(time + exchange * rng.random(), other)

    def leave(replica: int, time: float) -> None:
        """Let whoever waits for what a replica sends go on without it."""
        for (what, _), there in meeting.items():
            if isinstance(what, tuple) and replica in what and len(there) == 1:
                (other,) = there
                if other != replica:
                    there.append(replica)
                    with contextlib.suppress(StoreLostError):
                        members[other].part(replica)
                    at(time, other)

    while events:
        time, _, r = heapq.heappop(events)
        while to_notice and to_notice[0][0] <= time and r not in log.dead:
            members[r].lose(heapq.heappop(to_notice)[1])
        if r in log.dead:
            continue
        if rng.random() < die and len(log.dead) < size - 1:
            log.dead.append(r)
            open_item.pop(r, None)
            heapq.heappush(to_notice, (time + rng.expovariate(0.3), r))
            leave(r, time)
            continue
        try:
            decision = next(replicas[r], Decision(Action.END))
            watch(members[r].see())
        except StoreLostError:
            known = members[r].known()
            log.left[r] = known.seen()
            if r in open_item and known.leases[r] != open_item[r]:  # it has come to its step
                log.items[r].append(open_item.pop(r))
            ended += 1
            leave(r, time)
            continue
        if decision is None:
            idle_looks += 1
            if idle_looks > 300 * size:
                raise Deadlock(f"seed {seed}: all wait for ever, {members[0].see()}")
            at(time + rng.uniform(*look), r)
            continue
        idle_looks = 0
        action = decision.action
        if r in open_item and action is not Action.NO_STEP:
            item = open_item.pop(r)
            log.items[r].append(item)
            if rng.random() < close:
                members[r].close()
        if action is Action.TAKE:
            open_item[r] = decision.number
            seconds = cost(r, rng)
            log.busy[r] += seconds
            at(time + seconds, r)
        elif action is Action.GIVE:
            log.given[r].append(len(log.items[r]))
            at(time, r)
        elif action is Action.AVERAGE and overlap:
            log.applied[r].append(len(log.items[r]))
            log.averages[len(log.applied[r])] += 1
            at(time, r)
        elif action is Action.AVERAGE and decision.number == ALL:
            log.averages[came["average", r] + 1] += 1
            meet("average", size - 1, time, r)
        elif action is Action.AVERAGE and decision.number in (*log.dead, *log.left):
            with contextlib.suppress(StoreLostError):
                members[r].part(decision.number)
            at(time + exchange, r)
        elif action is Action.AVERAGE:
            pair = (min(r, decision.number), max(r, decision.number))
            meet(pair, 1, time, r)
        elif action in (Action.REST, Action.STOP):
            log.rests += [decision.number] if r == 0 else []
            came["rest", r] += 1
            if came["rest", r] == kill_at:
                ended += 1
            else:
                at(time, r)
        elif action is Action.NO_STEP:
            log.given_back[open_item.pop(r)] += 1
            at(time, r)
        elif action in (Action.END, Action.LEAVE):
            ended += 1
            log.seconds = max(log.seconds, time)
        else:
            if action is Action.EVALUATE:
                log.evaluated[r].append(decision.number)
            at(time, r)
    if ended < size - len(log.dead):
        raise Deadlock(f"seed {seed}: {size - ended} of {size} wait for others")
    log.table = read_table(store)
    log.events = [event for member in members for event in member.events]
    log.events += [{"replica": r, "step": len(log.items[r]), "lost": 1} for r in log.dead]
    return log
