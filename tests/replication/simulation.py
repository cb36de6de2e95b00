"""Run the protocol of a strategy without ranks: its own code, in virtual time, one event at a time.

A replica is the generator that its first rank would follow. It takes a random time for an item, and
looks again a little later while it waits. The store now and then lets somebody else be first, so
that changes of the table have to be tried again.
"""

import heapq
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vigpipe.replication.course import Course
from vigpipe.replication.decisions import Decision
from vigpipe.replication.member import FreeMember, Member
from vigpipe.replication.record import Recorded, RecordedMember
from vigpipe.replication.table import SharedTable, Table, new_table, resumed_table


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


@dataclass
class Log:
    """What has happened in a simulation.

    Attributes:
        items: that steps were taken with, by replica.
        given_back: items of steps that were not taken.
        averages: replicas that came to each average, by its number.
        rests: steps at which all rested.
        seconds: when the last replica ended.
        busy: seconds of work of each replica.
        table: at the end.
        events: of all replicas.
    """

    items: dict[int, list[int]]
    given_back: Counter[int] = field(default_factory=Counter)
    averages: Counter[int] = field(default_factory=Counter)
    rests: list[int] = field(default_factory=list)
    seconds: float = 0.0
    busy: list[float] = field(default_factory=list)
    table: Table | None = None
    events: list[dict[str, int]] = field(default_factory=list)


def simulate(
    decide: Callable[[Member, int], Iterator[Decision | None]],
    kinds: dict[str, int],
    course: Course,
    *,
    average_every: int,
    from_pool: bool,
    seed: int = 0,
    cost: Callable[[int, random.Random], float] = lambda replica, rng: rng.expovariate(1.0),
    close: float = 0.0,
    kill_at: int | None = None,
    progress: dict[str, Any] | None = None,
    recorded: list[Recorded] | None = None,
) -> Log:
    """Simulate the replicas of a run.

    Args:
        decide: makes the decisions of a replica, given its member and its index.
        kinds: meaning of the decisions: own, average, no_step, take, evaluate, rest, end.
        course: the steps of the run.
        average_every: TAU.
        from_pool: whether items come from the pool.
        seed: of all delays.
        cost: seconds of an item of a replica.
        close: probability that a replica wants a checkpoint after an item.
        kill_at: number of rests after which the run ends.
        progress: of an earlier run, which this one goes on with.
        recorded: what the replicas are to do again.

    Raises:
        Deadlock: nobody can go on.
    """
    rng, size = random.Random(seed), course.num_replicas
    store = BusyStore(rng)
    first = resumed_table(progress, size) if progress else new_table(size)
    tables = [SharedTable(store, first, r) for r in range(size)]
    members: list[Member] = [
        FreeMember(table, r, course, average_every, from_pool=from_pool)
        if recorded is None
        else RecordedMember(table, r, recorded[r])
        for r, table in enumerate(tables)
    ]
    replicas = [decide(member, r) for r, member in enumerate(members)]
    log = Log({r: [] for r in range(size)}, busy=[0.0] * size)
    events = [(rng.random(), r, r) for r in range(size)]
    heapq.heapify(events)
    number, idle_looks = size, 0
    open_item: dict[int, int] = {}
    meeting: dict[tuple[str, int], list[int]] = {}  # replicas in a collective
    came: Counter[tuple[str, int]] = Counter()
    ended = 0

    def at(time: float, replica: int) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (time, number, replica))

    def meet(what: str, time: float, replica: int) -> None:
        came[what, replica] += 1
        there = meeting.setdefault((what, came[what, replica]), [])
        there.append(replica)
        if what == "average":
            log.averages[came[what, replica]] += 1
        if len(there) == size:
            for other in there:
                at(time + 0.01 * rng.random(), other)

    while events:
        time, _, r = heapq.heappop(events)
        decision = next(replicas[r], Decision(kinds["end"]))
        if decision is None:
            idle_looks += 1
            if idle_looks > 3000 * size:
                raise Deadlock(f"seed {seed}: all wait for ever, {members[0].see()}")
            at(time + rng.uniform(0.1, 0.6), r)
            continue
        idle_looks = 0
        if r in open_item and decision.kind != kinds["no_step"]:
            item = open_item.pop(r)
            log.items[r].append(item)
            if rng.random() < close:
                members[r].close()
        if decision.kind == kinds["take"]:
            open_item[r] = decision.number
            seconds = cost(r, rng)
            log.busy[r] += seconds
            at(time + seconds, r)
        elif decision.kind == kinds["average"]:
            meet("average", time, r)
        elif decision.kind == kinds["rest"]:
            log.rests += [decision.number] if r == 0 else []
            if came["rest", r] + 1 == kill_at:
                ended += 1
            else:
                meet("rest", time, r)
        elif decision.kind == kinds["no_step"]:
            log.given_back[open_item.pop(r)] += 1
            at(time, r)
        elif decision.kind == kinds["end"]:
            ended += 1
            log.seconds = max(log.seconds, time)
        else:
            at(time, r)
    if ended < size:
        raise Deadlock(f"seed {seed}: {size - ended} of {size} wait for others")
    log.table = members[0].see()
    log.events = [event for member in members for event in member.events]
    return log
