"""The events of a simulation: ranks take operations, wait for messages, share processors, meet."""

from heapq import heappop, heappush
from typing import NamedTuple

from vigpipe.spans import Kind, Span


class Operation(NamedTuple):
    """What a rank does next: an action, or its part in an all-reduce or the update."""

    kind: Kind
    stage: int
    microbatch: int
    seconds: float
    needs: int = -1  # number of a message, or none
    transfer: float = 0.0  # of that message
    gives: int = -1  # number of the message that may leave afterwards
    meeting: int = -1  # number of an all-reduce, or none: then it is computing


class _Host:
    """Ranks that share processors, on a clock of work: what each of them has done by now."""

    __slots__ = ("done", "running", "time", "version")

    def __init__(self) -> None:
        self.done, self.time, self.version = 0.0, 0.0, 0
        self.running: list[tuple[float, int]] = []  # heap of (work clock at the end, rank)


_RANK, _HOST = 0, 1


class Simulation:
    """The state of a simulation; events are (time, whether rank or host, which, version).

    Args:
        programs: of every rank.
        num_ranks: S.
        stretch: times as long while n ranks of a host compute, by n.
        host_size: ranks of a host.
        ask_ahead: whether receives are posted early.
    """

    def __init__(
        self,
        programs: list[list[Operation]],
        num_ranks: int,
        stretch: list[float],
        host_size: int,
        ask_ahead: bool,
    ) -> None:
        self.programs, self.num_ranks, self.stretch = programs, num_ranks, stretch
        self.ask_ahead = ask_ahead
        shares = any(factor != 1 for factor in stretch)
        num_hosts = -(-len(programs) // host_size)
        self.hosts = [_Host() for _ in range(num_hosts)] if shares else []
        self.host_size = host_size
        self.position = [0] * len(programs)
        self.since = [0.0] * len(programs)  # when the rank came free, or began to compute
        self.computing = [False] * len(programs)
        self.left: list[dict[int, float]] = [{} for _ in range(len(programs) // num_ranks)]
        self.asked: list[dict[int, int]] = [{} for _ in self.left]
        self.meetings: dict[int, list[int]] = {}
        self.events: list[tuple[float, int, int, int]] = []
        self.found: list[Span] = []

    def spans(self) -> list[Span]:
        """Run to the end."""
        for rank in range(len(self.programs)):
            self._next(rank, 0.0)
        while self.events:
            time, what, index, version = heappop(self.events)
            if what == _RANK:
                if self.computing[index]:
                    self._ended(index, time)
                else:
                    self._start(index, time)
            elif version == self.hosts[index].version:
                self._leave(self.hosts[index], index, time)
        stuck = [r for r, done in enumerate(self.position) if done < len(self.programs[r])]
        if stuck:
            raise ValueError(f"the orders wait for one another: ranks {stuck} never end")
        return self.found

    def _at(self, time: float, what: int, index: int, version: int = 0) -> None:
        heappush(self.events, (time, what, index, version))

    def _next(self, rank: int, time: float) -> None:
        """The rank is free: ask for the input of its next operation."""
        program, self.since[rank] = self.programs[rank], time
        if self.position[rank] == len(program):
            return
        operation = program[self.position[rank]]
        if operation.meeting >= 0:
            self._meet(operation, rank, time)
        elif operation.needs < 0:
            self._start(rank, time)
        else:
            replica = rank // self.num_ranks
            left = self.left[replica].get(operation.needs)
            if left is None:
                self.asked[replica][operation.needs] = rank
                return
            arrival = (left if self.ask_ahead else max(left, time)) + operation.transfer
            if arrival > time:
                self._at(arrival, _RANK, rank)
            else:
                self._start(rank, time)

    def _meet(self, operation: Operation, rank: int, time: float) -> None:
        """An all-reduce begins when the last replica has come."""
        # Events come in the order of time, so that is the one that comes now.
        here = self.meetings.setdefault(operation.meeting, [])
        here.append(rank)
        if len(here) == len(self.left):
            for each in here:
                self.computing[each] = True
                self._at(time + operation.seconds, _RANK, each)

    def _start(self, rank: int, time: float) -> None:
        """The input is there: compute."""
        operation, since = self.programs[rank][self.position[rank]], self.since[rank]
        if time > since:
            kind = "wait input" if operation.kind == "forward" else "wait gradient"
            self.found.append(Span(rank, kind, since, time, operation.stage, operation.microbatch))
        self.since[rank], self.computing[rank] = time, True
        if not self.hosts:
            self._at(time + operation.seconds, _RANK, rank)
            return
        index = rank // self.host_size
        host = self.hosts[index]
        if host.running:
            host.done += (time - host.time) / self.stretch[len(host.running)]
        host.time = time
        heappush(host.running, (host.done + operation.seconds, rank))
        self._reckon(host, index)

    def _reckon(self, host: _Host, index: int) -> None:
        """When the next rank of a host will end, if nothing changes before."""
        host.version += 1
        if host.running:
            work = max(0.0, host.running[0][0] - host.done)
            end = host.time + work * self.stretch[len(host.running)]
            self._at(end, _HOST, index, host.version)

    def _leave(self, host: _Host, index: int, time: float) -> None:
        # The clock is set, not advanced: ranks that end together then do so without rounding.
        host.done, rank = heappop(host.running)
        host.time, version = time, host.version
        self._ended(rank, time)
        if host.version == version:  # no rank of it has gone on
            self._reckon(host, index)

    def _ended(self, rank: int, time: float) -> None:
        """An operation is done: what it gives may leave, and the rank goes on."""
        operation = self.programs[rank][self.position[rank]]
        self.computing[rank] = False
        self.found.append(
            Span(
                rank,
                operation.kind,
                self.since[rank],
                time,
                operation.stage,
                operation.microbatch,
            )
        )
        if operation.gives >= 0:
            replica = rank // self.num_ranks
            self.left[replica][operation.gives] = time
            receiver = self.asked[replica].pop(operation.gives, None)
            if receiver is not None:
                awaited = self.programs[receiver][self.position[receiver]]
                self._at(time + awaited.transfer, _RANK, receiver)
        self.position[rank] += 1
        self._next(rank, time)
