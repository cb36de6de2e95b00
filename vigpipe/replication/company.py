"""The replicas that are left of those that take steps of their own, as one rank sees them.

What they do together are an evaluation, a last average, a last save. Some may have been lost
before, and one may be lost in the midst of it. So all that are left come to a meeting first, in the
table. Each does its part, and reports; what was done counts if all of the circle say that it was.
Otherwise they meet anew, without the lost one, and do it once more.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from vigpipe.launch.failures import is_lost_peer
from vigpipe.parallel.agreement import Status, agree
from vigpipe.parallel.counterparts import Counterparts
from vigpipe.replication.alive import Alive
from vigpipe.replication.circle import Circle
from vigpipe.replication.decisions import Decision, Decisions, Kind
from vigpipe.replication.parcels import Inbox
from vigpipe.replication.place import Place
from vigpipe.replication.store import StoreLostError, WatchedStore
from vigpipe.replication.table import DONE, PENDING, SharedTable, Table, new_table, read_table

T = TypeVar("T")
_LOOK_SECONDS = 2e-3  # between two looks at the store


class Company:
    """The replicas that are left; all ranks make one together.

    Args:
        place: this rank among the others.
        num_replicas: number of replicas; a server is one team more.
        outlives: whether the run goes on without a replica that is lost.

    Attributes:
        outlives: the same.
        store: where the ranks have met.
        decisions: what the first rank of this replica decides for all of them.
        first: the table that all begin with.
        has_left: whether this replica has left the others, which do without it from now on.
    """

    def __init__(self, place: Place, num_replicas: int, *, outlives: bool) -> None:
        self.outlives = outlives
        # The peers of the first rank wait for it, with more patience.
        self.store = WatchedStore(place.open_store(), place.timeout_seconds / 2)
        self.decisions = Decisions(place.peers)
        self.first = new_table(num_replicas, has_server=place.num_teams > num_replicas)
        self.has_left = False
        self._place, self._num_replicas = place, num_replicas
        self._lost: dict[int, int] = {}  # replicas, and the steps that each of them had taken
        # On the first rank of the replica, once it has begun.
        self._table: SharedTable | None = None
        self._alive: Alive | None = None
        self._lose: Callable[[int], None] = lambda replica: None
        # Of those that have met.
        self._ranks: list[int] = []
        self._members: list[int] = []
        self._prefix = ""
        self._num_shared = 0
        self._circle: Counterparts = Counterparts(None)

    def open(self) -> SharedTable:
        """Open the table of all replicas, on the first rank of this one."""
        self._table = SharedTable(self.store, self.first, self._place.team)
        return self._table

    def begin(self, decide: Iterator[Decision | None], lose: Callable[[int], None]) -> None:
        """Begin to decide, and to watch the others, on the first rank of this replica.

        Args:
            decide: makes the decisions, see `Decisions.begin`.
            lose: called with a replica that is gone, before all go on without it.
        """
        place = self._place
        timeout, has_ended = place.timeout_seconds, place.has_ended
        self._alive = Alive(self.store, place.team, place.num_teams, timeout, has_ended)
        self._lose = lose
        self.decisions.begin(decide, self._look_for_lost)

    def _look_for_lost(self) -> None:
        """Give up replicas that are gone; called on the first rank while it waits.

        Raises:
            RuntimeError: one is gone that the run cannot do without.
        """
        lost = {} if self._alive is None else self._alive.look()
        for replica, why in lost.items():
            if not self.outlives or replica == self._num_replicas:
                raise RuntimeError(why)
            self._lose(replica)
            self._place.give_up(replica)

    def lost(self) -> dict[int, int]:
        """Return the replicas that were lost since the start, and after how many steps each."""
        if self.outlives:
            with contextlib.suppress(StoreLostError):  # which the next decision says to all
                table = read_table(self.store)
                lost = enumerate(table.lost)
                self._lost = {replica: table.taken[replica] for replica, is_lost in lost if is_lost}
        return self._lost

    def fail(self, *, is_own: bool) -> None:
        """Let the others know that this rank fails, and so its replica does.

        Args:
            is_own: whether the reason lies in the run itself, so that the others would fail too.
        """

        def change(table: Table) -> None:
            table.is_over |= is_own or self._place.is_server or not self.outlives
            if not table.is_over:
                table.lose(self._place.team)

        with contextlib.suppress(RuntimeError):  # they know, or the store is gone
            SharedTable(self.store, self.first, self._place.team).change(change)

    def inbox(self) -> Inbox:
        """Return what all ranks have told the one that writes the run's files."""
        return Inbox(self.store, range(self._place.num_ranks))

    def together(self, work: Callable[[Counterparts], T]) -> T:
        """Do work together with all that are left, again if one is lost meanwhile.

        Args:
            work: this rank's part; it is given the ranks with the same stages. It may be called
                several times, and must then begin anew.

        Returns:
            What the last call has returned.
        """
        place, table = self._place, self._table
        while True:
            number = self.decisions.next(table and _come(table, place.team)).number
            size = place.num_ranks // place.num_teams
            self._prefix, self._num_shared = f"circle/{number}/", 0
            section = f"{self._prefix}{place.rank % (size // place.team_size)}"
            connections = self.store.section(section)
            circle, result, is_done = None, None, True
            try:
                members = self._members = read_table(self.store).circle
                self._ranks = [m * size + r for m in members for r in range(size)]
                index = members.index(place.team) * place.team_size + place.of_team
                num_ranks = len(members) * place.team_size
                circle = Circle(connections, index, num_ranks, place.timeout_seconds, place.peers)
                self._circle = circle
                result = work(circle)
            except RuntimeError as error:
                if not self.outlives or not is_lost_peer(error):
                    raise
                is_done = False
                if circle is not None:
                    circle.give_up()
            is_done = agree(Status(finite=is_done), place.peers).finite
            if self.decisions.next(table and _report(table, place.team, is_done)).number == DONE:
                return result  # pyright: ignore[reportReturnType]

    def heads(self) -> bool:
        """Whether this replica writes the run's files, in work that is done together.

        It is the server, or the first replica that is left.
        """
        head = self._members[-1 if self._place.num_teams > self._num_replicas else 0]
        return head == self._place.team and not self._place.of_team

    def share(self, value: Any) -> dict[int, Any]:  # noqa: ANN401
        """Return the values of all ranks by rank, in work that is done together; each calls this.

        Args:
            value: this rank's, of the types of JSON.

        Raises:
            RuntimeError: a replica was lost.
        """
        prefix = f"{self._prefix}{self._num_shared}/shared/"
        self._num_shared += 1
        keys = [f"{prefix}{rank}" for rank in self._ranks]
        with self._circle.at_once():
            self.store.set(f"{prefix}{self._place.rank}", json.dumps(value))
            while not self.store.check(keys):
                self._look_for_lost()
                table = read_table(self.store)
                lost = [member for member in self._members if table.has_lost(member)]
                if lost:
                    raise RuntimeError(f"replica {lost[0]} was lost")
                time.sleep(_LOOK_SECONDS)
            return {rank: json.loads(self.store.get(f"{prefix}{rank}")) for rank in self._ranks}

    def close(self) -> None:
        """Leave after the last of what is done together, and decide and watch no more."""
        self.decisions.end()
        if self._alive is not None:
            self._alive.close()
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._leave()
        self.store.close()

    def _leave(self) -> None:
        """Wait for those who still look at the store, which may be in the process of rank 0."""
        self.store.set(f"left/{self._place.rank}", "")
        deadline = time.monotonic() + self._place.timeout_seconds
        keys = [f"left/{rank}" for rank in self._ranks]
        while self._place.rank == 0 and keys and not self.store.check(keys):
            if time.monotonic() > deadline:
                return
            time.sleep(_LOOK_SECONDS)


def _come(shared: SharedTable, member: int) -> Iterator[Decision | None]:
    """Come to a meeting of all that are left, and wait for it."""

    def come(table: Table) -> int:
        number = table.meetings
        table.come(member)
        return number

    before = shared.change(come)
    while (number := shared.read().meetings) == before:
        yield None
    yield Decision(Kind.MEET, number)


def _report(shared: SharedTable, member: int, is_done: bool) -> Iterator[Decision | None]:
    """Report of what was done together, and wait for what all are to think of it."""
    shared.change(lambda table: table.report(member, is_done))
    while (verdict := shared.read().verdict) == PENDING:
        yield None
    yield Decision(Kind.MEET, verdict)
