"""Replicas compute gradients, and a parameter server applies them as they come.

Before each item, a worker pulls the weights, and after it pushes its gradient. The server has the
optimizer of the run. The staleness s of a gradient is the number of others that were applied since
its weights were pulled. The server takes a step with the learning rate times 1 / (1 + 0.1 s):

    damping    1     0.91   0.83   0.5
    s          0     1      2      10

A worker waits for nobody but the server, unless --staleness bounds how far it may be ahead. The
learning rate follows the number of gradients taken: D of them count as a step. But the optimizer
takes a step for each, so D times as many as in a synchronous run.

For a model of several stages the server has as many ranks as a worker, each with the same stages as
the worker's. The first one decides the order of all pulls and pushes, the others follow
(`replication.serving`), so the numbers do not depend on the stages. The server has BatchNorm's
running statistics and the moving average.

For P numbers in float32, a worker sends 4 P bytes for an item, and the server as many: D workers
make 4 P D bytes each way through one rank, where a ring moves less than 8 P through each.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from vigpipe.parallel.agreement import Status, agree, holds_everywhere
from vigpipe.parallel.counterparts import Counterparts
from vigpipe.replication.decisions import Action, Decision
from vigpipe.replication.own_steps import OwnSteps
from vigpipe.replication.serving import NOT_FINITE, ServerMember, WorkerMember, ask, damping, serve
from vigpipe.replication.store import StoreLostError
from vigpipe.replication.strategy import Computed, Item, Loop, Outcome, Pushed
from vigpipe.replication.table import SharedTable

_NUM_FACTS = 3  # item, samples and loss are sent before the statistics


class _WithServer(OwnSteps):
    """What a worker and the server have in common."""

    @property
    def _parameters(self) -> list[Tensor]:
        return list(self._weights.parameters.values())

    @property
    def _server(self) -> int:
        """Index of the server among the ranks with the same stages: it is the last."""
        return self._course.num_replicas

    def average_at_the_end(self, left: Counterparts) -> None:
        """Do nothing: there is one set of weights."""


class Worker(_WithServer):
    """The strategy of a rank that computes gradients."""

    def _decide(self, table: SharedTable) -> Iterator[Decision | None]:
        self._member = WorkerMember(table, self._position.team, self._rules, self._own_record)
        return ask(self._member)

    def _do(self, decision: Decision, loop: Loop) -> Iterator[Item]:
        if decision.action is Action.PULL:
            with torch.no_grad(), self._diary.doing("averaged"):
                weights = self._exchange.receive(self._parameters, self._server)
                for parameter, new in zip(self._parameters, weights, strict=True):
                    parameter.copy_(new)
            return
        self._item = decision.number  # if it is to TAKE one
        yield from super()._do(decision, loop)

    def _evaluate(self, epoch: int, loop: Loop) -> None:
        with self._diary.doing("evaluated"):
            loop.evaluate(epoch)  # the server asks all to save, before it lets them go on

    def combine_gradients(self, own: Computed) -> Outcome:
        """Give the gradients to the server, unless some are not finite or the item is empty."""
        is_good = bool(holds_everywhere(own.is_finite, self.peers))
        self._last_samples = num_given = own.num_samples if is_good and own.is_trained else 0
        if isinstance(self._member, WorkerMember):
            self._member.num_given = num_given if is_good else NOT_FINITE
        self._next_decision()  # PUSH
        if num_given:
            with self._averaging():
                facts = own.stats.new_tensor([self._item, num_given, math.nan])
                if own.loss is not None:
                    facts[-1] = own.loss
                facts = torch.cat((facts, own.stats.flatten()))
                self._exchange.send([facts], self._server)
                self._exchange.send(own.gradients, self._server)
        return Outcome(own.stats, torch.zeros_like(own.is_finite), is_own=False)


class Server(_WithServer):
    """The strategy of a rank that applies the gradients of all workers."""

    def _prepare(self) -> None:
        self._pulled_at: dict[int, tuple[int, float]] = {}  # each worker's version and time
        self._staleness: Counter[int] = Counter()
        self._num_updates = self._num_served = 0

    def restore(self, progress: Mapping[str, Any], kept: Sequence[int]) -> None:
        super().restore(progress, kept)
        first = self.membership.first
        self._num_updates, self._num_served = first.updates, sum(first.taken)

    def _decide(self, table: SharedTable) -> Iterator[Decision | None]:
        self._member = ServerMember(table, self._rules, self._recorded)
        return serve(self._member)

    def _do(self, decision: Decision, loop: Loop) -> Iterator[Item]:
        action, worker, _ = decision
        if action is Action.PULL:
            self._pulled_at[worker] = self._num_updates, perf_counter()
            with self._diary.doing("averaged"):
                self._unless_lost(lambda: self._exchange.send(self._parameters, worker), worker)
            return
        if action not in (Action.PUSH, Action.PASS, Action.SKIP):
            yield from super()._do(decision, loop)
            return
        step = self._num_served // self._course.num_replicas
        pushed = None
        if action is Action.PUSH:
            with self._averaging():
                pushed = self._unless_lost(lambda: self._receive(worker, step), worker)
            if pushed is None:
                return
        is_accepted = True
        if isinstance(self._member, ServerMember):  # only the first rank has one
            try:
                is_accepted = self._member.accept(worker)
            except StoreLostError:  # the next decision tells all ranks
                is_accepted = False
        if not agree(Status(finite=is_accepted), self.peers).finite:
            return
        if pushed is not None:
            self._num_updates += 1
            self._staleness[pushed.staleness] += 1
            with self._diary.doing("worked"):
                loop.apply(pushed)
        elif action is Action.SKIP:
            loop.skip(worker, step)
        self._num_served += 1

    @torch.no_grad()
    def _receive(self, worker: int, step: int) -> Pushed:
        num_facts = _NUM_FACTS + self._position.num_stats
        like = self._parameters[0].new_empty(num_facts, dtype=torch.float64)
        (facts,) = self._exchange.receive([like], worker)
        gradients = self._exchange.receive(self._parameters, worker)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        item, num_samples, loss = facts[:_NUM_FACTS].tolist()
        version, since = self._pulled_at[worker]
        staleness = self._num_updates - version
        return Pushed(
            replica=worker,
            item=int(item),
            step=step,
            num_samples=int(num_samples),
            loss=loss,
            stats=facts[_NUM_FACTS:],
            seconds=perf_counter() - since,
            staleness=staleness,
            damping=damping(staleness),
        )

    def account(self) -> Mapping[str, Any]:
        """Return also the updates of the whole run, and how many came how late in this start."""
        by_staleness = {str(s): n for s, n in sorted(self._staleness.items())}
        return {**super().account(), "updates": self._num_updates, "staleness": by_staleness}
