"""Decide, on their first ranks, what a parameter server and its workers do next.

A worker asks in the table for weights, and later to give its gradient; each time it draws a ticket.
The server takes the lowest ticket first, so the tickets are the order of all pulls and pushes.

Some items must wait. With --staleness S, a worker may have taken at most S items more than the
slowest that is not finished. And no item of the next epoch begins before all gradients of the last
one have come: then all rest, and share the evaluation.

To repeat a record, a worker pulls weights after as many updates as then, and the server takes the
gradients in the recorded order. It lets all rest when nobody has an open item.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from vigpipe.errors import InputError, PeerLostError
from vigpipe.replication.course import Course
from vigpipe.replication.decide import decision_of_rest
from vigpipe.replication.decisions import Action, Decision
from vigpipe.replication.member import Member, NoItem, Participant, Rules, Waiting
from vigpipe.replication.record import Push, Recorded
from vigpipe.replication.table import SharedTable, Table

NOT_FINITE = -1  # instead of the number of samples of a gradient
_DAMPING = 0.1


def damping(staleness: int) -> float:
    """Return the factor of the learning rate for a gradient, by how many others came in between."""
    return 1 / (1 + _DAMPING * staleness)


def ask(worker: "WorkerMember") -> Iterator[Decision | None]:
    """Yield the decisions of a worker, and None while it waits."""
    while True:
        item = worker.take()
        if item is NoItem.CLOSED:
            yield Decision(Action.TELL)
            yield from worker.rest_with_the_server()
        elif item is NoItem.NONE_LEFT:
            yield Decision(Action.TELL)
            if (yield from worker.finish()):
                yield Decision(Action.END)
                return
        elif item is NoItem.TOO_EARLY:
            yield from worker.wait_to_begin()
        else:
            yield Decision(Action.PULL)
            yield Decision(Action.TAKE, item, worker.ahead)
            worker.ask_to_push()
            yield Decision(Action.PUSH)
            yield from worker.wait_for_the_server()


def serve(server: "ServerMember") -> Iterator[Decision | None]:
    """Yield the decisions of the server, and None while it waits."""
    while True:
        decision = server.serve()
        if decision is not None:
            yield decision
        elif server.rests():
            yield from server.evaluation(server.see())
            server.answer()
            if server.rested.saves:  # the rows of all gradients belong to the checkpoint
                yield Decision(Action.TELL)
                yield decision_of_rest(server.rested, server.rules.course)
        elif server.ends():
            yield Decision(Action.TELL)
            yield Decision(Action.END)
            return
        else:
            yield None


def _evaluation_due(table: Table, course: Course) -> int:
    """Return after how many steps the next evaluation is due."""
    return course.next_evaluation((table.evaluated + 1) // course.num_replicas)


def _draw_ticket(table: Table, worker: int) -> None:
    table.tickets[worker] = max(table.tickets) + 1


class _ServingParticipant(Participant):
    """A worker, or the server."""

    def close(self, *, stop: bool = False) -> None:
        def change(table: Table) -> None:
            table.wanted = table.save_wanted = True
            table.stop_wanted = table.stop_wanted or stop

        seen = self._table.read()
        if not seen.wanted or not seen.save_wanted or (stop and not seen.stop_wanted):
            self._table.change(change)

    def evaluation(self, table: Table) -> Iterator[Decision]:
        """Evaluate with all others while they rest, if they rest for that."""
        if table.evaluated != self.evaluated:
            self.evaluated = table.evaluated
            course = self.rules.course
            yield Decision(Action.EVALUATE, course.epoch(table.evaluated // course.num_replicas))


class WorkerMember(_ServingParticipant, Member):
    """A replica that pulls weights from the server and pushes gradients to it."""

    num_given = 0  # samples of the gradient that it pushes next, 0 for none, or NOT_FINITE

    def _take(self, table: Table) -> int | NoItem:
        item = super()._take(table)
        if not isinstance(item, NoItem):
            _draw_ticket(table, self._index)  # to be given the weights to begin it with
        return item

    def ask_to_push(self) -> None:
        def change(table: Table) -> None:
            table.samples[self._index] = self.num_given
            _draw_ticket(table, self._index)

        self._table.change(change)

    def rest_with_the_server(self) -> Iterator[Decision | None]:
        """Rest because the pool is closed, and evaluate, save or stop if the server says so."""

        def change(table: Table) -> int:
            table.rests[self._index] = table.closings
            return table.closings

        closing = self._table.change(change)
        while not (table := self._table.read()).all_rest(closing):
            yield None
        if table.answered < closing:  # else nothing was to be evaluated, and others have gone on
            yield from self.evaluation(table)
        while (table := self._table.read()).answered < closing:
            yield None
        if table.saves:
            yield decision_of_rest(table, self.rules.course)

    @property
    def is_leader(self) -> bool:
        return False  # the server is

    def wait_for_the_server(self) -> Waiting[None]:
        """Wait until the server has taken the gradient, or has skipped it."""
        while self._table.read().tickets[self._index] >= 0:
            yield

    def wait_to_begin(self) -> Waiting[None]:
        """Wait until the next item may begin, or all must rest."""
        while not self._is_closed(table := self._table.read()):
            item = self._next_item(table)
            if item is None or self._may_begin(table, item):
                return
            yield

    def _may_begin(self, table: Table, item: int) -> bool:
        course, num_taken = self.rules.course, table.taken[self._index]
        if item // course.num_replicas >= _evaluation_due(table, course):
            return False
        if self._recorded is not None:
            return table.updates >= self._recorded.pushes[num_taken].pulled
        if self.rules.staleness is None:
            return True
        slowest = min(n for n, ends in zip(table.taken, table.finished, strict=True) if not ends)
        return num_taken - slowest <= self.rules.staleness

    def _may_leave(self, table: Table, *, for_good: bool) -> bool:
        return True


class ServerMember(_ServingParticipant):
    """The server. With `recorded`, all replicas do that again."""

    def __init__(
        self, table: SharedTable, rules: Rules, recorded: Sequence[Recorded] | None = None
    ) -> None:
        super().__init__(table, rules)
        self._recorded, self._num_rests = recorded, 0

    def serve(self) -> Decision | None:
        """Decide which worker may pull or push next; a pull counts at once, a push if accepted."""
        table = self._table.read()
        worker = self._next_worker(table)
        if worker is None:
            if table.wanted and self._may_close(table):
                self._table.change(self._close)
            return None
        if table.pulled[worker] >= 0:
            num_samples = table.samples[worker]
            action = Action.PUSH if num_samples > 0 else Action.PASS
            return Decision(Action.SKIP if num_samples == NOT_FINITE else action, worker)
        self._table.change(partial(self._let_pull, worker=worker))
        return Decision(Action.PULL, worker)

    def rests(self) -> bool:
        """Whether all workers follow a closing for which this was not true before."""
        table = self._table.last_seen
        if table.closings == self._num_rests or not table.all_rest(table.closings):
            return False
        self._num_rests = table.closings
        return True

    def ends(self) -> bool:
        table = self._table.read()
        if all(table.finished):
            self.rested = table
        return all(table.finished)

    def accept(self, worker: int) -> bool:
        """Count a worker's gradient, which all ranks of the server have received; or return False.

        It does not count if the worker was lost, and its item is another's by now. Raise InputError
        if the repetition of a record has led to other numbers.
        """
        event = self._table.change(lambda table: self._take_gradient(table, worker))
        if event is None:
            return False
        self.events.append(event)
        if self._recorded is not None:
            push = self._recorded[worker].pushes[event["step"] - 1]
            if event["version"] != push.version or event["pulled"] != push.pulled:
                raise InputError(
                    f"--replay: item {event['item']} has left {event['version']} updates, and the "
                    f"record says {push.version}; replay it on the machine that it was recorded "
                    "on, with the same software"
                )
        return True

    def lose(self, replica: int) -> None:
        super().lose(replica)
        if not self._table.last_seen.left:
            raise PeerLostError("all workers are lost")

    def _next_worker(self, table: Table) -> int | None:
        waiting = [w for w, ticket in enumerate(table.tickets) if ticket >= 0]
        if self._recorded is None:
            return min(waiting, key=lambda w: table.tickets[w], default=None)
        pulls = [w for w in waiting if table.pulled[w] < 0]
        if pulls:
            return pulls[0]
        next_served = sum(table.taken) + 1
        for worker in waiting:
            push = self._next_push(table, worker)
            if push is not None and push.served == next_served:
                others = (self._next_push(table, w) for w, p in enumerate(table.pulled) if p < 0)
                if all(other is None or other.pulled >= push.version for other in others):
                    return worker
        return None

    def _next_push(self, table: Table, worker: int) -> Push | None:
        assert self._recorded is not None
        pushes, num_taken = self._recorded[worker].pushes, table.taken[worker]
        return pushes[num_taken] if num_taken < len(pushes) else None

    def _let_pull(self, table: Table, worker: int) -> None:
        if not table.lost[worker]:
            table.tickets[worker], table.pulled[worker] = -1, table.updates
            self._close(table)

    def _close(self, table: Table) -> None:
        """Close the pool, so that all rest, if somebody wants that and it is possible now."""
        if table.wanted and self._may_close(table):
            table.wanted = False
            table.closings += not self._is_closed(table)

    def _take_gradient(self, table: Table, worker: int) -> dict[str, int] | None:
        if table.lost[worker]:
            return None
        item, pulled = table.leases[worker], table.pulled[worker]
        table.updates += table.samples[worker] > 0
        table.taken[worker] += 1
        table.tickets[worker] = -1
        table.last[worker], table.leases[worker], table.pulled[worker] = item, -1, -1
        served, course = sum(table.taken), self.rules.course
        due = _evaluation_due(table, course)
        if served == due * course.num_replicas and due < course.num_steps:
            table.evaluated = served - 1
            table.closings += not self._is_closed(table)
        self._close(table)
        event = {"replica": worker, "step": table.taken[worker], "item": item}
        return event | {"pulled": pulled, "served": served, "version": table.updates}

    def _may_close(self, table: Table) -> bool:
        return not all(table.finished) and (self._recorded is None or max(table.leases) < 0)

    def _is_closed(self, table: Table) -> bool:
        return table.closings > self._num_rests
