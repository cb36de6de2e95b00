"""Keep track of which replicas are left, and let them do work together, such as an evaluation.

The replicas take steps of their own; at times all that are left evaluate, average or save together.
One may be lost meanwhile. So all come to a meeting in the table first. Each does its part, and
reports. The work counts if all members of the meeting report that it is done. Otherwise they meet
again, without the lost one, and do it once more.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from vigpipe.errors import PeerLostError
from vigpipe.launch.failures import is_lost_peer
from vigpipe.parallel.agreement import Status, agree
from vigpipe.parallel.counterparts import Counterparts
from vigpipe.replication.alive import Alive
from vigpipe.replication.decisions import Action, Decision, Decisions
from vigpipe.replication.parcels import Inbox
from vigpipe.replication.position import Position
from vigpipe.replication.store import StoreLostError, WatchedStore
from vigpipe.replication.survivors import Survivors
from vigpipe.replication.table import DONE, PENDING, SharedTable, Table, new_table, read_table

T = TypeVar("T")
_LOOK_SECONDS = 2e-3  # a rank that waits looks at the store this often


class Membership:
    """The replicas that are left, as one rank sees them; all ranks make one together."""

    def __init__(self, position: Position, num_replicas: int, *, outlives: bool) -> None:
        self.outlives = outlives  # whether the run goes on without a replica that is lost
        # The first rank gives up before its peers, which wait for it twice as long.
        self.store = WatchedStore(position.open_store(), position.timeout_seconds / 2)
        self.decisions = Decisions(position.peers)
        # The table with which all begin.
        self.first = new_table(num_replicas, has_server=position.num_teams > num_replicas)
        self.has_left = False  # whether this replica has left the others, which go on without it
        self._position, self._num_replicas = position, num_replicas
        self._steps_of_lost: dict[int, int] = {}  # the steps that each lost replica had taken
        # The first rank of the replica has these once it has begun.
        self._table: SharedTable | None = None
        self._alive: Alive | None = None
        self._lose: Callable[[int], None] = lambda replica: None
        # These are about the last meeting.
        self._ranks: list[int] = []
        self._members: list[int] = []
        self._prefix = ""
        self._num_shared = 0
        self._survivors: Counterparts = Counterparts(None)

    def open(self) -> SharedTable:
        """Open the table of all replicas, on the first rank of this one."""
        self._table = SharedTable(self.store, self.first, self._position.team)
        return self._table

    def begin(self, decide: Iterator[Decision | None], lose: Callable[[int], None]) -> None:
        """Begin, on the first rank, to decide and to watch the others; `lose` hears who is gone."""
        position = self._position
        timeout, has_ended = position.timeout_seconds, position.has_ended
        self._alive = Alive(self.store, position.team, position.num_teams, timeout, has_ended)
        self._lose = lose
        self.decisions.begin(decide, self._look_for_lost)

    def _look_for_lost(self) -> None:
        """Give up replicas that are gone; PeerLostError if the run cannot do without one."""
        lost = {} if self._alive is None else self._alive.look()
        for replica, why in lost.items():
            if not self.outlives or replica == self._num_replicas:
                raise PeerLostError(why)
            self._lose(replica)
            self._position.give_up(replica)

    def lost(self) -> dict[int, int]:
        """Return the replicas that were lost since the start, and after how many steps each."""
        if self.outlives:
            with contextlib.suppress(StoreLostError):  # the next decision tells all ranks
                table = read_table(self.store)
                lost = enumerate(table.lost)
                self._steps_of_lost = {r: table.taken[r] for r, is_lost in lost if is_lost}
        return self._steps_of_lost

    def fail(self, *, is_own: bool) -> None:
        """Let the others know that this replica fails, and if `is_own`, that they would as well."""

        def change(table: Table) -> None:
            table.is_over |= is_own or self._position.is_server or not self.outlives
            if not table.is_over:
                table.lose(self._position.team)

        with contextlib.suppress(RuntimeError):  # the others know already, or the store is gone
            SharedTable(self.store, self.first, self._position.team).change(change)

    def inbox(self) -> Inbox:
        """Return the rows that all ranks have sent to the one that writes the run's files."""
        return Inbox(self.store, range(self._position.num_ranks))

    def together(self, work: Callable[[Counterparts], T]) -> T:
        """Do work together with all that are left, again if one is lost meanwhile.

        The work is this rank's part, given the ranks with the same stages. It may be called several
        times, and must then begin anew. The last result is returned.
        """
        position, table = self._position, self._table
        while True:
            number = self.decisions.next(_come(table, position.team) if table else None).number
            size = position.num_ranks // position.num_teams
            self._prefix, self._num_shared = f"circle/{number}/", 0
            section = f"{self._prefix}{position.rank % (size // position.team_size)}"
            connections = self.store.section(section)
            survivors, result, is_done = None, None, True
            try:
                members = self._members = read_table(self.store).circle
                self._ranks = [m * size + r for m in members for r in range(size)]
                index = members.index(position.team) * position.team_size + position.replica_in_team
                num_ranks = len(members) * position.team_size
                survivors = Survivors(
                    connections, index, num_ranks, position.timeout_seconds, position.peers
                )
                self._survivors = survivors
                result = work(survivors)
            except RuntimeError as error:
                if not self.outlives or not is_lost_peer(error):
                    raise
                is_done = False
                if survivors is not None:
                    survivors.give_up()
            is_done = agree(Status(finite=is_done), position.peers).finite
            report = _report(table, position.team, is_done) if table else None
            if self.decisions.next(report).number == DONE:
                return result  # pyrefly: ignore[bad-return]

    def is_to_write(self) -> bool:
        """Whether this replica writes the run's files: it is the server, or the first one left."""
        writer = self._members[-1 if self._position.num_teams > self._num_replicas else 0]
        return writer == self._position.team and not self._position.replica_in_team

    def all_gather(self, value: Any) -> dict[int, Any]:
        """Return the values of all ranks by rank, in work that is done together; each calls this.

        Values have the types of JSON. Raise PeerLostError if a replica was lost.
        """
        prefix = f"{self._prefix}{self._num_shared}/shared/"
        self._num_shared += 1
        keys = [f"{prefix}{rank}" for rank in self._ranks]
        with self._survivors.at_once():
            self.store.set(f"{prefix}{self._position.rank}", json.dumps(value))
            while not self.store.check(keys):
                self._look_for_lost()
                table = read_table(self.store)
                lost = [member for member in self._members if table.has_lost(member)]
                if lost:
                    raise PeerLostError(f"replica {lost[0]} was lost")
                time.sleep(_LOOK_SECONDS)
            return {rank: json.loads(self.store.get(f"{prefix}{rank}")) for rank in self._ranks}

    def close(self) -> None:
        """Stop deciding and watching, after the last work that is done together."""
        self.decisions.end()
        if self._alive is not None:
            self._alive.close()
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._leave()
        self.store.close()

    def _leave(self) -> None:
        """Let rank 0, whose process may hold the store, wait until nobody needs it any more."""
        self.store.set(f"left/{self._position.rank}", "")
        deadline = time.monotonic() + self._position.timeout_seconds
        keys = [f"left/{rank}" for rank in self._ranks]
        while self._position.rank == 0 and keys and not self.store.check(keys):
            if time.monotonic() > deadline:
                return
            time.sleep(_LOOK_SECONDS)


def _come(shared: SharedTable, member: int) -> Iterator[Decision | None]:
    """Come to a meeting of all that are left, and wait until it begins."""
    before = shared.change(lambda table: table.come(member))
    while (number := shared.read().meetings) == before:
        yield None
    yield Decision(Action.MEET, number)


def _report(shared: SharedTable, member: int, is_done: bool) -> Iterator[Decision | None]:
    """Report whether this replica has done its part, and wait for the verdict."""
    shared.change(lambda table: table.report(member, is_done))
    while (verdict := shared.read().verdict) == PENDING:
        yield None
    yield Decision(Action.MEET, verdict)
