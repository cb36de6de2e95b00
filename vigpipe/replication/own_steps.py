"""The base of all strategies whose replicas take steps of their own, and are averaged at times.

The first rank of a replica decides (`decide`), and looks at the table of all replicas for that; the
other ranks of its pipeline follow. With --gossip-between hosts, all replicas of a host take every
step together; here such a team counts as one replica.

Averages are weighted by samples: those of the item for gradients, and those that a replica was
trained on for weights. BatchNorm's running statistics are averaged with the weights; with
gradients, the replicas pool their BatchNorms' statistics. Each keeps its optimizer's state.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from vigpipe.config.options import TrainConfig
from vigpipe.config.replication import OUTLIVING
from vigpipe.launch.failures import is_lost_peer
from vigpipe.parallel.agreement import NOTHING_WANTED, Agreement, Status, agree, holds_everywhere
from vigpipe.parallel.counterparts import Counterparts
from vigpipe.parallel.values import all_gather_values
from vigpipe.replication.averages import Averages, RoundedWeights
from vigpipe.replication.course import Course
from vigpipe.replication.decide import decide
from vigpipe.replication.decisions import ALL, OWN_GRADIENTS, Action, Decision
from vigpipe.replication.diary import Diary
from vigpipe.replication.exchange import Exchange
from vigpipe.replication.feedback import make_compressor
from vigpipe.replication.member import Member, Participant, Rules
from vigpipe.replication.membership import Membership
from vigpipe.replication.parcels import Outbox
from vigpipe.replication.position import Position
from vigpipe.replication.record import Recorded
from vigpipe.replication.store import StoreLostError
from vigpipe.replication.strategy import Computed, Item, Loop, Outcome
from vigpipe.replication.table import SharedTable, resumed_table

T = TypeVar("T")


@dataclass(frozen=True)
class Weights:
    """The parameters of a rank's stages, and BatchNorm's running means and variances, by name."""

    parameters: Mapping[str, Tensor]
    statistics: Mapping[str, Tensor]

    @property
    def averaged(self) -> dict[str, Tensor]:
        """All of them, parameters first."""
        return {**self.parameters, **self.statistics}


class LeftOver(NamedTuple):
    """What a replica knows when the store is lost."""

    step: int  # number of steps of which items were drawn by then
    seen: Mapping[str, Any]  # the table, from `Table.seen`
    parcels: Sequence[Mapping[str, Any]]  # the rows of this rank since the last checkpoint


class OwnSteps:
    """A strategy of replicas that take steps of their own; with `recorded`, they do that again."""

    _member_type: type[Member]

    def __init__(
        self,
        options: TrainConfig,
        course: Course,
        position: Position,
        weights: Weights,
        recorded: Sequence[Recorded] | None = None,
    ) -> None:
        self.peers, self._whole_course, self._position = position.peers, course, position
        self._course = course = replace(
            course, num_replicas=course.num_replicas // position.team_size
        )
        self._rules = make_rules(options, course, is_free=recorded is None)
        self._options, self._weights, self._recorded = options, weights, recorded
        self._exchange = Exchange(position.across_teams, position.links)
        self._compressor = make_compressor(options, self._exchange, weights.parameters)
        self._averages: Averages = self._compressor or self._exchange
        is_rounded = options.average == "weights" and options.compress != "none"
        if is_rounded and position.across_teams.size > 1:
            self._averages = RoundedWeights(self._exchange, len(weights.parameters))
        outlives = options.strategy in OUTLIVING
        self.membership = Membership(position, course.num_replicas, outlives=outlives)
        self._has_server = position.num_teams > course.num_replicas
        self._outbox = Outbox(self.membership.store, position.rank)
        self._untold: list[dict[str, Any]] = []  # rows of metrics.jsonl that were not sent yet
        # The first rank of the pipeline has this once it runs.
        self._member: Participant | None = None
        self._partner = ALL  # the replica with which weights are averaged next
        self._came_back: dict[str, int] | None = None  # the row of a replica that was lost before
        self._samples = 0  # the replica was trained on these since it was averaged
        self._samples_at_end: int | None = None
        self._last_samples: int | None = None  # samples of the last item; None if it was given back
        self._is_full = True  # whether the last item had a full batch
        self._num_items = self._num_averages = self._num_samples = 0
        self._num_partial, self._partial_seconds = 0, 0.0  # items that had no full batch
        self._diary = Diary()
        if position.links:  # NCCL opens its connections in the first exchange: one of all ranks
            some = next(iter(weights.parameters.values()))
            self._exchange.gather(some.new_zeros(1))
        self._prepare()

    def _prepare(self) -> None:
        """Prepare what only this strategy needs; all ranks do so together."""

    def _apply(self, means: list[Tensor]) -> list[Tensor]:
        """Return the new weights, given their means; running statistics come last in both."""
        return means

    def _samples_after(self, total: Tensor) -> int:
        """Return how many samples stand behind a mean of weights with `total` behind them."""
        return 0

    def _give(self, number: int) -> None:
        """Give the weights for the average with this number, and go on without waiting for it."""
        raise NotImplementedError

    def _before_rest(self, stop: bool) -> None:
        """Leave nothing under way between the ranks, all of which rest or stop."""

    def restore(self, progress: Mapping[str, Any], kept: Sequence[int]) -> None:
        """Go on where an earlier run has rested; its tensors are in `tensors` already.

        It returned the `progress`, and `kept` the states of these replicas; the others begin with
        that of the first of them. Raise ValueError if the progress does not fit (`resumed_table`).
        """
        size = self._course.num_replicas
        first = self.membership.first = resumed_table(progress, size, has_server=self._has_server)
        for replica in range(0 if self._has_server else size):
            first.samples[replica] *= replica in kept
        team = self._position.team
        if not self._position.is_server:
            if not self._has_server and team not in kept:
                self._came_back = {"replica": team, "step": first.taken[team], "again": kept[0]}
            self._samples = first.samples[team]

    def items(self, first_step: int, is_evaluated: bool, loop: Loop) -> Iterator[Item]:
        first = self.membership.first
        if self._position.leads_team:
            decide = self._decide(self.membership.open())
            assert self._member is not None
            self.membership.begin(decide, self._member.lose)
        while (decision := self._next_decision()).action is not Action.END:
            yield from self._do(decision, loop)
            if decision.action in (Action.STOP, Action.LEAVE):
                return
        unfinished = max(*first.leases, *first.ahead) >= 0
        if first.drawn < self._course.num_items or unfinished:
            with self._diary.doing("saved"):
                loop.rest(self._course.num_steps, stop=False)

    def _do(self, decision: Decision, loop: Loop) -> Iterator[Item]:
        """Do what was decided; if it is to take an item, yield that."""
        action, number, ahead = decision
        if action is Action.TAKE:
            before = self._diary.seconds["worked"]
            with self._diary.doing("worked"):
                yield self._own_share(number, ahead)
            if self._last_samples is not None:
                self._num_items += 1
                if not self._is_full:
                    self._num_partial += 1
                    self._partial_seconds += self._diary.seconds["worked"] - before
        elif action is Action.EVALUATE:
            self._evaluate(number, loop)
        elif action is Action.AVERAGE and self._rules.gradients:  # this replica has none to give
            self._give_nothing(number)
        elif action is Action.AVERAGE:
            self._partner = number
            loop.complete()
            self.average_weights()
        elif action is Action.GIVE:
            self._give(number)
        elif action is Action.LEAD:
            loop.complete()
            loop.take_over()
        elif action is Action.LEAVE:
            loop.complete()
            self.membership.has_left = True
        elif action is Action.TELL:
            self._tell()
            with self._diary.doing("saved"):
                loop.complete()
                loop.flush()
            # Without this, a peer could still send rows after the rest.
            agree(NOTHING_WANTED, self.peers)
        else:
            assert action in (Action.REST, Action.STOP)
            with self._diary.doing("saved"):
                self._before_rest(action is Action.STOP)
                loop.rest(number, stop=action is Action.STOP)
            self._outbox.kept = []  # the rows are in the files that belong to the checkpoint

    def _evaluate(self, epoch: int, loop: Loop) -> None:
        with self._diary.doing("evaluated"):
            if loop.evaluate(epoch):
                self._ask_to_rest(stop=False)

    def _next_decision(self) -> Decision:
        with self._diary.doing("waited"):
            decision = self.membership.decisions.next()
        if self.membership.outlives:  # this rank may die before it can tell later
            self._tell()
        return decision

    def _tell(self) -> None:
        """Send what this rank has done to the one that writes the run's files."""
        # The rows are taken on all ranks, where they would pile up, but only the first one tells.
        told, events = self._diary.take_rows(self._position.team), []
        if self._member is not None:
            events, self._member.events = [*self._member.events, *told], []
        parcel = {"events": events, "metrics": self._untold}
        self._untold = []
        if any(parcel.values()):
            with contextlib.suppress(StoreLostError):  # the outbox keeps it
                self._outbox.send(parcel)

    def note(self, row: dict[str, Any]) -> None:
        """Keep a row of metrics.jsonl for the rank that writes it."""
        self._untold.append(row)

    @property
    def _own_record(self) -> Recorded | None:
        return None if self._recorded is None else self._recorded[self._position.team]

    def _decide(self, table: SharedTable) -> Iterator[Decision | None]:
        """Return what makes the decisions of this replica, on its first rank."""
        member = self._member_type(table, self._position.team, self._rules, self._own_record)
        self._member = member
        member.events += [] if self._came_back is None else [self._came_back]
        return decide(member)

    def _own_share(self, item: int, ahead: int) -> Item:
        """Return this rank's share of an item of its team, with the shares to read ahead."""
        own = self._own_items(item)
        if not self._rules.from_pool and self._recorded is None:
            return Item(own[0], ahead=own[1:])
        return Item(own[0], ahead=self._own_items(ahead)[:1] if ahead >= 0 else ())

    def _own_items(self, item: int) -> range:
        """Return this rank's share of an item, and of the fixed items until the evaluation."""
        step, team = divmod(item, self._course.num_replicas)
        share = team * self._position.team_size + self._position.replica_in_team
        return self._whole_course.items(step, self._course.next_evaluation(step), share)

    def combine_gradients(self, own: Computed) -> Outcome:
        """Average gradients if that is due, each weighted with the samples of its item.

        A gradient that is not finite is not sent: its item counts as one without samples. A step
        with nothing to train on is not taken, unless other replicas have something.
        """
        self._last_samples = own.num_samples if own.is_trained else 0
        action, partner, _ = self._next_decision() if self._rules.gradients else OWN_GRADIENTS
        if action is Action.AVERAGE:
            return self._average_gradients(own, partner)
        if action is Action.NO_STEP:
            self._last_samples = None
            return Outcome(own.stats, torch.zeros_like(own.is_finite))
        return Outcome(own.stats)

    def _average_gradients(self, own: Computed, partner: int) -> Outcome:
        is_good = holds_everywhere(own.is_finite, self.peers)

        def exchange() -> tuple[list[Tensor], Tensor]:
            *good, stats = (
                torch.where(is_good, t, torch.zeros_like(t)) for t in (*own.gradients, own.stats)
            )
            means, _ = self._averages.mean(good, own.num_samples * is_good.double(), partner)
            has_some = stats.new_tensor([own.is_trained]) * is_good
            return means, self._exchange.gather(torch.cat((stats.flatten(), has_some)), partner)

        with self._averaging():
            exchanged = self._unless_lost(exchange, partner)
            if exchanged is None:
                return Outcome(own.stats)
            means, by_replica = exchanged
            num_microbatches = len(by_replica) * len(own.stats)
            all_stats = by_replica[:, :-1].reshape(num_microbatches, *own.stats.shape[1:])
            for gradient, mean in zip(own.gradients, means, strict=True):
                gradient.copy_(mean)
        return Outcome(all_stats, by_replica[:, -1].any())

    def _give_nothing(self, partner: int) -> None:
        """Come to an average of gradients between two steps, after the pool's last item."""
        zeros = [torch.zeros_like(p) for p in self._weights.parameters.values()]
        no_stats = zeros[0].new_zeros(self._position.num_stats, dtype=torch.float64)
        is_finite = zeros[0].new_ones((), dtype=torch.bool)
        self._average_gradients(Computed(zeros, no_stats, is_finite, 0, False, None), partner)

    @torch.no_grad()
    def average_weights(self) -> None:
        """Average weights and running statistics, weighted with the samples trained on."""
        averaged, partner = list(self._weights.averaged.values()), self._partner
        with self._averaging():
            weight = averaged[0].new_tensor(self._samples, dtype=torch.float64)
            exchange = partial(self._averages.mean, averaged, weight, partner)
            found = self._unless_lost(exchange, partner)
            if found is None:
                return
            means, total = found
            for tensor, new in zip(averaged, self._apply(means), strict=True):
                tensor.copy_(new)
            self._count_samples(self._samples_after(total))

    def _unless_lost(self, exchange: Callable[[], T], partner: int) -> T | None:
        """Exchange something with a partner; return None if a rank of it is lost meanwhile."""
        if not self.membership.outlives or partner == ALL:
            return exchange()
        before = {name: tensor.clone() for name, tensor in self.tensors().items()}
        result, is_done = None, True
        try:
            result = exchange()
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            is_done = False
        if agree(Status(finite=is_done), self.peers).finite:
            return result
        # The exchange does not count, so compression goes on with what it had before.
        for name, tensor in self.tensors().items():
            tensor.copy_(before[name])
        if self._member is not None:
            with contextlib.suppress(StoreLostError):
                self._member.part(partner)
            self._position.give_up(partner)
        return None

    @contextmanager
    def _averaging(self) -> Iterator[None]:
        with self._diary.doing("averaged"):
            yield
        self._num_averages += 1

    def _count_samples(self, num_samples: int) -> None:
        self._samples = num_samples
        if isinstance(self._member, Member):
            self._member.samples = num_samples

    def hear(self, agreement: Agreement, *, is_full: bool = True) -> None:
        """Close the pool if a rank of this replica wants a checkpoint, or to stop."""
        self._is_full = is_full
        self._count_samples(self._samples + (self._last_samples or 0))
        self._num_samples += self._last_samples or 0
        if agreement.save or agreement.stop:
            self._ask_to_rest(stop=agreement.stop)

    def _ask_to_rest(self, *, stop: bool) -> None:
        """Close the pool, so that all rest, save, and perhaps stop."""
        if self._member is not None:
            with contextlib.suppress(StoreLostError):
                self._member.close(stop=stop)

    def average_at_the_end(self, left: Counterparts) -> None:
        """Make the replicas that are left equal after the last step; all ranks call this together.

        This averages their weights, unless the last step has done so. If the run averages
        gradients, it counts all samples since the start. It is never compressed.
        """
        if self._samples_at_end is None:
            self._samples_at_end = self._samples
        # If a replica is lost meanwhile, all try this again, with the samples from before.
        self._samples = self._samples_at_end
        num_bytes = self._exchange.bytes_sent
        self._averages = self._exchange = Exchange(left)
        self._exchange.bytes_sent = num_bytes
        some = next(iter(self._weights.parameters.values()))
        samples = some.new_tensor([self._samples], dtype=torch.float64)
        if self._exchange.gather(samples).any():
            self._partner = ALL
            self.average_weights()
        self._tell()

    def progress(self) -> Mapping[str, Any]:
        """Return how far each replica is, for a checkpoint; all ranks of a pipeline call this."""
        own = None if self._member is None else self._member.rested.progress()
        return all_gather_values(own, *self.peers)[0]

    def left_over(self) -> LeftOver:
        """Return what is known of all replicas once the store is lost; all ranks call this."""
        if self._samples_at_end is not None:  # the last average is not complete, and not counted
            self._count_samples(self._samples_at_end)
        own = None
        if self._member is not None:
            table = self._member.known()
            own = [self._course.steps_with(table.drawn), table.seen()]
        self._tell()
        step, seen = all_gather_values(own, *self.peers)[0]
        return LeftOver(step, seen, self._outbox.kept)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return what the compressor keeps: residuals, and the memory of the next average."""
        compressor = self._compressor
        return {} if compressor is None else compressor.residuals() | compressor.memory()

    def stored(self) -> Mapping[str, Tensor]:
        """Return the tensors that are mapped files; they change only after a `Loop.flush`."""
        return {}

    def account(self) -> Mapping[str, Any]:
        """Return counts, seconds and bytes of this rank by name, for summary.json."""
        seconds = self._diary.seconds
        return {
            "items": self._num_items,
            "partial_items": self._num_partial,
            "samples": self._num_samples,
            "averages": self._num_averages,
            "busy_seconds": seconds["worked"],
            "partial_busy_seconds": self._partial_seconds,
            "waiting_seconds": seconds["waited"],
            "averaging_seconds": seconds["averaged"],
            "bytes_sent": self._exchange.bytes_sent,
        }


def make_rules(options: TrainConfig, course: Course, *, is_free: bool) -> Rules:
    """Return what the options say of replicas that follow them, or a record if not `is_free`."""
    from_pool = options.items == "pool"
    return Rules(
        course,
        options.average_every or 0,
        gradients=options.average == "gradients",
        from_pool=from_pool,
        looks_ahead=from_pool and options.workers > 0 and is_free,
        overlap=(options.overlap or 0) if course.num_replicas > 1 else 0,
        in_sets=options.pairs == "sets",
        answers_after_item=options.answer == "item",
        staleness=options.staleness if isinstance(options.staleness, int) else None,
        seed=options.seed,
    )
