"""What the replicas of a run know of one another: a small table in the store where they have met.

A change of the table is a critical section, without a lock that a dead replica could keep: a
replica reads the table, changes its copy, and puts it back only if nobody else has changed the
table meanwhile (compare and set); otherwise it starts again. Only numbers are kept here. Tensors
travel from rank to rank (`replication.exchange`).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from vigpipe.errors import PeerLostError

T = TypeVar("T")
KEY = "replicas"  # the store keeps the table under this key
PENDING, DONE, FAILED = range(3)  # outcomes of what the replicas do together


class TableStore(Protocol):
    """The methods of torch's stores that the table needs."""

    def get(self, key: str, /) -> bytes: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a value if it is the expected one; return the value that is there afterwards."""
        ...


@dataclass(kw_only=True)
class Table:
    """The state of all replicas.

    Lists without a default have an entry for each of them; -1 stands for none.
    """

    drawn: int = 0  # items that the replicas have drawn; of a pool, all items before this one
    begun: list[int]  # how many of the replica's fixed items somebody has drawn
    returned: list[int] = field(default_factory=list)  # items of lost replicas; taken first
    lost: list[bool]  # whether it has died, or was given up; it comes back with another start
    taken: list[int]  # number of items with which the replica has taken a step
    leases: list[int]  # item that the replica has drawn but taken no step with
    ahead: list[int]  # item that it has drawn to come after the leased one
    last: list[int]  # the last item with which it has taken a step
    # Samples that stand behind the replica's weights: those that it has trained on since all were
    # averaged, or its share of those that a pair has trained on.
    samples: list[int]
    joined: list[int]  # averages that it has come to, of all or in pairs
    # Steps that it had taken when it gave its weights for an average that it has not applied yet
    # (`replication.travel`), and the samples that stood behind these weights.
    given: list[int]
    given_samples: list[int]
    # The last item of replica 0 when it evaluated its weights last. With a server, the last of all
    # items when its weights were evaluated.
    evaluated: int = -1
    updates: int = 0  # gradients that the server has applied
    pulled: list[int]  # `updates` at the pull, until the server takes the gradient
    tickets: list[int]  # position in the queue for the server, for a pull or a push
    wanted: bool = False  # whether somebody wants all to rest as soon as they can
    closings: int = 0  # how often the pool was closed, so that all could rest
    # The last closing at which the leader has said whether all save, and stop, the number of items
    # that were drawn then, and what it has said.
    answered: int = 0
    rested: int = 0
    saves: bool = False
    stops: bool = False
    save_wanted: bool = False  # whether somebody wants all to save when they rest next
    stop_wanted: bool = False  # whether somebody wants all to stop then
    rests: list[int]  # how many closings the replica has followed
    finished: list[bool]  # whether it has nothing left to do
    meetings: int = 0  # how often all that are left have met, to do something together
    # Whether a replica, or the server, has come to the next meeting; the members of the last one;
    # the outcome that each reports of what they did together; and that on which all of them go on.
    present: list[bool]
    circle: list[int] = field(default_factory=list)
    reports: list[int]
    verdict: int = PENDING
    is_over: bool = False  # whether one has failed in a way that ends the run
    partners: list[int]  # the replica with which it is going to be averaged
    waiting: list[int]  # the replica for which it waits, to be averaged with it
    version: int = 0  # number of changes, so that no two texts are equal
    by: int = -1  # the replica that made the last change

    @property
    def num_begun(self) -> int:
        """Number of items that were drawn, without those that were drawn ahead."""
        return self.drawn - sum(item >= 0 for item in self.ahead)

    @property
    def left(self) -> list[int]:
        return [replica for replica, is_lost in enumerate(self.lost) if not is_lost]

    def all_rest(self, number: int) -> bool:
        return all(self.rests[replica] >= number for replica in self.left)

    def has_lost(self, member: int) -> bool:
        """Whether a replica is lost; a server, which comes after the replicas, never is."""
        return member < len(self.lost) and self.lost[member]

    def next_item(self, replica: int, *, from_pool: bool) -> int:
        """Return the item that a replica takes next, which may be beyond the last one of the run.

        It is the first of those that lost replicas have left, its own, and, where items are fixed,
        the next one of each lost replica. Its own is the one that it has drawn ahead, if it has;
        otherwise the next one of the pool, or its next fixed one.
        """
        num_replicas = len(self.taken)
        if self.ahead[replica] >= 0:
            own = [self.ahead[replica]]
        elif from_pool:
            own = [self.drawn]
        else:
            whose = [replica, *(r for r, is_lost in enumerate(self.lost) if is_lost)]
            own = [r + num_replicas * self.begun[r] for r in whose]
        return min([*own, *self.returned])

    def draw(self, replica: int, item: int) -> None:
        """Note that a replica draws an item that `next_item` has returned."""
        if item in self.returned:
            self.returned.remove(item)
        elif item == self.ahead[replica]:
            self.ahead[replica] = -1
        else:
            self.drawn += 1
            self.begun[item % len(self.taken)] += 1

    def lose(self, replica: int) -> None:
        """Go on without a replica: its items go back, and whoever waits for it is free."""
        if self.lost[replica]:
            return
        if not self.finished[replica]:  # its items are work for those that have finished
            self.finished = [False] * len(self.finished)
        self.lost[replica] = True
        self.finished = [f or is_lost for f, is_lost in zip(self.finished, self.lost, strict=True)]
        self.returned += [i for i in (self.leases[replica], self.ahead[replica]) if i >= 0]
        self.leases[replica] = self.ahead[replica] = -1
        self.tickets[replica] = self.pulled[replica] = -1
        partner = self.partners[replica]
        for one in {replica, partner} - {-1}:
            self.partners[one] = self.waiting[one] = -1
        if self.verdict == PENDING and replica in self.circle and not self.reports[replica]:
            self.verdict = FAILED
        self._may_begin_meeting()

    def answer(self) -> None:
        self.saves, self.stops = self.save_wanted or self.stop_wanted, self.stop_wanted
        self.answered, self.rested = self.closings, self.drawn
        self.save_wanted = self.stop_wanted = self.wanted = False

    def come(self, replica: int) -> int:
        """Come to the next meeting, which begins once all are here; return how many were before."""
        before = self.meetings
        self.present[replica] = True
        self._may_begin_meeting()
        return before

    def report(self, replica: int, is_done: bool) -> None:
        """Report whether the replica has done its part of what all do together."""
        self.reports[replica] = DONE if is_done else FAILED
        reports = [self.reports[r] for r in self.circle]
        if FAILED in reports:
            self.verdict = FAILED
        elif PENDING not in reports and self.verdict == PENDING:
            self.verdict = DONE

    def _may_begin_meeting(self) -> None:
        servers = range(len(self.taken), len(self.present))
        everybody = [*self.left, *servers]
        if all(self.present[r] for r in everybody):
            self.meetings += 1
            self.circle, self.verdict = everybody, PENDING
            self.present = [False] * len(self.present)
            self.reports = [PENDING] * len(self.present)

    def as_text(self) -> str:
        return json.dumps(vars(self), separators=(",", ":"))

    def progress(self) -> dict[str, Any]:
        """Return the entries that a checkpoint keeps: a later run goes on with them."""
        kept = (
            *("drawn", "begun", "returned", "lost", "taken", "leases", "ahead", "last", "samples"),
            *("joined", "given", "given_samples", "evaluated", "updates"),
        )
        return {name: getattr(self, name) for name in kept}

    def seen(self) -> dict[str, Any]:
        """Return the table as this replica knows it, for `progress_of_those_left`."""
        return {**self.progress(), "version": self.version}


def new_table(num_replicas: int, *, has_server: bool = False) -> Table:
    """Return the table of a run that begins."""
    zeros = ("begun", "taken", "samples", "joined", "given_samples", "rests")
    none = ("leases", "ahead", "last", "given", "pulled", "tickets", "partners", "waiting")
    each: dict[str, Any] = {name: [0] * num_replicas for name in zeros}
    each |= {name: [-1] * num_replicas for name in none}
    num_pipelines = num_replicas + has_server
    return Table(
        **each,
        lost=[False] * num_replicas,
        finished=[False] * num_replicas,
        present=[False] * num_pipelines,
        reports=[PENDING] * num_pipelines,
    )


def resumed_table(
    progress: Mapping[str, Any], num_replicas: int, *, has_server: bool = False
) -> Table:
    """Return the table of a run that goes on with what `Table.progress` returned.

    Replicas that were lost take part again. Raise ValueError if the progress is malformed, or of
    another number of replicas.
    """
    table = new_table(num_replicas, has_server=has_server)
    own = table.progress()
    if progress.keys() != own.keys():
        raise ValueError(f"has the entries {', '.join(sorted(progress))}")
    for name, value in progress.items():
        values = value if isinstance(own[name], list) else [value]
        length = num_replicas if isinstance(own[name], list) else 1
        is_valid = isinstance(values, list) and (len(values) == length or name == "returned")
        expected = bool if name == "lost" else int
        if not is_valid or not all(type(v) is expected and -1 <= v <= 10**18 for v in values):
            raise ValueError(f"{name} is not a number for each of {num_replicas} replicas")
        setattr(table, name, value)
    table.lost = [False] * num_replicas
    return table


def progress_of_those_left(
    seen: Mapping[int, Mapping[str, Any]], num_replicas: int
) -> dict[str, Any]:
    """Put the progress of a run together that has lost its table, and perhaps replicas.

    `seen` has what `Table.seen` returned on each replica that is left, or on a server alone. The
    newest one tells who had drawn which items; what a replica has done since, it tells itself. The
    items of all others go back. Raise ValueError if what was seen is malformed.
    """
    has_server = num_replicas in seen
    tables = {
        member: resumed_table(
            {name: value for name, value in facts.items() if name != "version"}, num_replicas
        )
        for member, facts in seen.items()
    }
    table = tables[max(seen, key=lambda member: seen[member]["version"])]
    for replica in range(0 if has_server else num_replicas):
        if replica not in tables:
            table.lose(replica)
            continue
        own = tables[replica]
        if table.leases[replica] == own.last[replica]:
            table.leases[replica] = -1
        if own.last[replica] in table.returned:  # another one had given it up, too early
            table.returned.remove(own.last[replica])
        for name in ("taken", "last", "samples", "joined"):
            getattr(table, name)[replica] = getattr(own, name)[replica]
    return table.progress()


class SharedTable:
    """The table of a run, as one of its replicas sees and changes it.

    Every replica gives the same `first` table, with which the run begins. Every method raises
    PeerLostError once the others have given this replica up, or one has failed in a way that ends
    the run.
    """

    def __init__(self, store: TableStore, first: Table, replica_index: int) -> None:
        self._store, self._replica_index = store, replica_index
        self._text = store.compare_set(KEY, "", first.as_text()).decode()
        self.last_seen = _parse(self._text)  # as this replica read or changed it last

    def read(self) -> Table:
        """Return the table as it is now; it must not be changed."""
        text = self._store.get(KEY).decode()
        if text != self._text:
            self._text, self.last_seen = text, _parse(text)
            self._check(self.last_seen)
        return self.last_seen

    def change(self, change: Callable[[Table], T]) -> T:
        """Change the table atomically, and return what `change` returns.

        It may be called several times, each time with a newer table; only the last call counts.
        """
        while True:
            table = _parse(self._text)
            self._check(table)
            result = change(table)
            table.version, table.by = table.version + 1, self._replica_index
            desired = table.as_text()
            self._text = self._store.compare_set(KEY, self._text, desired).decode()
            if self._text == desired:
                self.last_seen = table
                return result

    def lose(self, replica: int) -> None:
        if not self.read().lost[replica]:
            self.change(lambda table: table.lose(replica))

    def _check(self, table: Table) -> None:
        if table.is_over:
            raise PeerLostError("another replica has failed, which ends the run")
        if table.has_lost(self._replica_index):
            raise PeerLostError(
                f"replica {self._replica_index} was given up by the others, to which it has shown "
                "no sign of life for too long, or could not send"
            )


def read_table(store: TableStore) -> Table:
    """Return the table as it is now; wait until there is one."""
    return _parse(store.get(KEY).decode())


def _parse(text: str) -> Table:
    return Table(**json.loads(text))
