"""What replicas with steps of their own do together: an evaluation, a last average, a last save.

Some may have been lost before, and one may be lost in the midst of it. So all that are left come to
a meeting first, in the table. Each does its part, and reports; what was done counts if all of the
circle say that it was. Otherwise they meet anew, without the lost one, and do it once more.
"""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from vigpipe.launch.failures import is_lost_peer
from vigpipe.parallel.agreement import Status, agree
from vigpipe.parallel.counterparts import Counterparts
from vigpipe.replication.circle import Circle
from vigpipe.replication.decisions import Decision, Decisions, Kind
from vigpipe.replication.place import Place
from vigpipe.replication.store import WatchedStore
from vigpipe.replication.table import DONE, PENDING, SharedTable, Table, read_table

T = TypeVar("T")
_LOOK_SECONDS = 2e-3  # between two looks at the store


class Company:
    """The replicas that are left, as one rank sees them.

    Args:
        place: this rank among the others.
        store: where the ranks have met.
        num_replicas: number of replicas; a server is one team more.
        outlives: whether a lost replica does not end the run.
    """

    def __init__(
        self,
        place: Place,
        store: WatchedStore,
        num_replicas: int,
        *,
        outlives: bool,
    ) -> None:
        self._place, self._store, self._outlives = place, store, outlives
        self._num_replicas = num_replicas
        self._ranks: list[int] = []  # of those that have met
        self._members: list[int] = []
        self._prefix = ""
        self._num_shared = 0
        self._circle: Counterparts = Counterparts(None)
        self._check: Callable[[], None] = lambda: None

    def together(
        self,
        work: Callable[[Counterparts], T],
        decisions: Decisions,
        table: SharedTable | None,
        check: Callable[[], None],
    ) -> T:
        """Do work together with all that are left, again if one is lost meanwhile.

        Args:
            work: this rank's part; it is given the ranks with the same stages. It may be called
                several times, and must then begin anew.
            decisions: of the replica.
            table: that of its first rank; None on others.
            check: looks whether a replica is lost; called while this rank waits.

        Returns:
            What the last call has returned.
        """
        place = self._place
        while True:
            number = decisions.next(table and _come(table, place.team)).number
            size = place.num_ranks // place.num_teams
            self._prefix, self._num_shared = f"circle/{number}/", 0
            section = f"{self._prefix}{place.rank % (size // place.team_size)}"
            connections = self._store.section(section)
            circle, result, is_done = None, None, True
            try:
                members = self._members = read_table(self._store).circle
                self._ranks = [m * size + r for m in members for r in range(size)]
                index = members.index(place.team) * place.team_size + place.of_team
                num_ranks = len(members) * place.team_size
                circle = Circle(connections, index, num_ranks, place.timeout_seconds, place.peers)
                self._circle, self._check = circle, check
                result = work(circle)
            except RuntimeError as error:
                if not self._outlives or not is_lost_peer(error):
                    raise
                is_done = False
                if circle is not None:
                    circle.give_up()
            finally:
                self._check = lambda: None
            is_done = agree(Status(finite=is_done), place.peers).finite
            if decisions.next(table and _report(table, place.team, is_done)).number == DONE:
                return result  # pyright: ignore[reportReturnType]

    @property
    def head(self) -> int:
        """Who writes the run's files: the server, or the first replica that is left."""
        return self._members[-1 if self._place.num_teams > self._num_replicas else 0]

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
            self._store.set(f"{prefix}{self._place.rank}", json.dumps(value))
            while not self._store.check(keys):
                self._check()
                table = read_table(self._store)
                lost = [member for member in self._members if table.has_lost(member)]
                if lost:
                    raise RuntimeError(f"replica {lost[0]} was lost")
                time.sleep(_LOOK_SECONDS)
            return {rank: json.loads(self._store.get(f"{prefix}{rank}")) for rank in self._ranks}

    def leave(self) -> None:
        """Leave after the last of what is done together.

        The store may be in rank 0's process, so that rank waits for those who still look at it.
        """
        self._store.set(f"left/{self._place.rank}", "")
        deadline = time.monotonic() + self._place.timeout_seconds
        keys = [f"left/{rank}" for rank in self._ranks]
        while self._place.rank == 0 and keys and not self._store.check(keys):
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
