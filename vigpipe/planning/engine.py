"""Simulate the events of a step: operations, messages, shared processors and all-reduces."""

from heapq import heappop, heappush
from typing import NamedTuple

from vigpipe.spans import Span, SpanKind


class Operation(NamedTuple):
    """One operation of a rank; its stage, micro-batch and messages are numbers, -1 for none."""

    kind: SpanKind
    stage: int
    microbatch: int
    seconds: float  # on a rank that computes alone
    needs: int = -1  # message that must have arrived before it starts
    transfer: float = 0.0  # seconds that this message takes
    gives: int = -1  # message that may leave when it has ended
    meeting: int = -1  # all-reduce, which all replicas begin together
    asks: int = -1  # another message that the rank asks for when it gets here


class _Host:
    """A host whose ranks share its processors."""

    __slots__ = ("done", "running", "time", "version")

    def __init__(self) -> None:
        # A clock of work: seconds of computing alone that each running rank has done by `time`.
        self.done, self.time, self.version = 0.0, 0.0, 0
        self.running: list[tuple[float, int]] = []  # heap of (work clock at the end, rank)


_RANK, _HOST = 0, 1


class Simulation:
    """The state of a simulation of the programs, the operations of every rank in their order.

    An operation takes stretch[n] times as long while n ranks of a host compute. Ranks ask for all
    messages long before they need them if `asks_early`.
    """

    def __init__(
        self,
        programs: list[list[Operation]],
        num_ranks: int,
        stretch: list[float],
        host_size: int,
        asks_early: bool,
    ) -> None:
        self.programs, self.num_ranks, self.stretch = programs, num_ranks, stretch
        self.asks_early = asks_early
        shares = any(factor != 1 for factor in stretch)
        num_hosts = -(-len(programs) // host_size)
        self.hosts = [_Host() for _ in range(num_hosts)] if shares else []
        self.host_size = host_size
        self.position = [0] * len(programs)
        self.since = [0.0] * len(programs)  # when the rank became free, or began to compute
        self.computing = [False] * len(programs)
        # By replica: when each message could leave, when it was asked for before it was needed, and
        # the rank that waits for a message.
        self.sent: list[dict[int, float]] = [{} for _ in range(len(programs) // num_ranks)]
        self.asked: list[dict[int, float]] = [{} for _ in self.sent]
        self.waiting: list[dict[int, int]] = [{} for _ in self.sent]
        self.meetings: dict[int, list[int]] = {}  # ranks that have arrived, by all-reduce
        # A heap of (time, _RANK or _HOST, index of the rank or host, version of the host).
        self.events: list[tuple[float, int, int, int]] = []
        self.result: list[Span] = []

    def spans(self) -> list[Span]:
        """Run to the end; raises ValueError if ranks wait for one another and never end."""
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
        return self.result

    def _at(self, time: float, what: int, index: int, version: int = 0) -> None:
        heappush(self.events, (time, what, index, version))

    def _next(self, rank: int, time: float) -> None:
        """Ask for the input of the next operation of a rank that has become free."""
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
            if operation.asks >= 0:
                self.asked[replica][operation.asks] = time
            sent = self.sent[replica].get(operation.needs)
            if sent is None:
                self.waiting[replica][operation.needs] = rank
                return
            asked = sent if self.asks_early else self.asked[replica].get(operation.needs, time)
            arrival = max(sent, asked) + operation.transfer
            if arrival > time:
                self._at(arrival, _RANK, rank)
            else:
                self._start(rank, time)

    def _meet(self, operation: Operation, rank: int, time: float) -> None:
        """Begin an all-reduce when its last replica has arrived."""
        # Events are handled in the order of time, so the last to be handled is the last to arrive.
        arrived = self.meetings.setdefault(operation.meeting, [])
        arrived.append(rank)
        if len(arrived) == len(self.sent):
            for other in arrived:
                self.computing[other] = True
                self._at(time + operation.seconds, _RANK, other)

    def _start(self, rank: int, time: float) -> None:
        """Start the operation of a rank whose input has arrived."""
        operation, since = self.programs[rank][self.position[rank]], self.since[rank]
        if time > since:
            kind = "wait input" if operation.kind == "forward" else "wait gradient"
            self.result.append(Span(rank, kind, since, time, operation.stage, operation.microbatch))
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
        self._schedule_next_end(host, index)

    def _schedule_next_end(self, host: _Host, index: int) -> None:
        """Add the event of the next rank of a host to end, unless something changes before."""
        host.version += 1
        if host.running:
            work = max(0.0, host.running[0][0] - host.done)
            end = host.time + work * self.stretch[len(host.running)]
            self._at(end, _HOST, index, host.version)

    def _leave(self, host: _Host, index: int, time: float) -> None:
        """End the operation of the rank of a host that is the first to be done."""
        # The clock is set and not advanced, so that ranks end together without rounding.
        host.done, rank = heappop(host.running)
        host.time, version = time, host.version
        self._ended(rank, time)
        if host.version == version:  # none of its ranks has started another operation
            self._schedule_next_end(host, index)

    def _ended(self, rank: int, time: float) -> None:
        """End an operation: the message it gives may leave, and the rank goes on."""
        operation = self.programs[rank][self.position[rank]]
        self.computing[rank] = False
        kind, stage, microbatch = operation.kind, operation.stage, operation.microbatch
        self.result.append(Span(rank, kind, self.since[rank], time, stage, microbatch))
        if operation.gives >= 0:
            replica = rank // self.num_ranks
            self.sent[replica][operation.gives] = time
            receiver = self.waiting[replica].pop(operation.gives, None)
            if receiver is not None:
                awaited = self.programs[receiver][self.position[receiver]]
                self._at(time + awaited.transfer, _RANK, receiver)
        self.position[rank] += 1
        self._next(rank, time)
