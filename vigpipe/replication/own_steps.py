"""What strategies have in common whose replicas take steps of their own, and are averaged at times.

The first rank of a replica decides (`decide`), with what it knows of the others from the table, and
the ranks of its pipeline follow. With --gossip-between hosts, all replicas of a host take every
step together, and whatever is said here of a replica holds for such a team.

Averages weigh by samples: gradients by those of the item, weights by those that a replica was
trained on. BatchNorm's running statistics are averaged with the weights; with gradients, the
moments of those who are averaged are pooled. The optimizer's state stays with the replica.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vigpipe.config.options import TrainConfig
from vigpipe.parallel.agreement import (
    Agreement,
    Peers,
    Status,
    agree,
    all_gather_values,
    holds_everywhere,
)
from vigpipe.replication.alive import Alive
from vigpipe.replication.averages import Averages, RoundedWeights
from vigpipe.replication.course import Course
from vigpipe.replication.decisions import ALL, OWN_GRADIENTS, Decision, Decisions, Kind
from vigpipe.replication.diary import Diary
from vigpipe.replication.exchange import Exchange
from vigpipe.replication.feedback import make_compressor
from vigpipe.replication.member import Member, NoItem, Rules
from vigpipe.replication.place import Place
from vigpipe.replication.record import Recorded
from vigpipe.replication.serving import ServerMember
from vigpipe.replication.strategy import AverageWeights, Evaluate, Outcome, Rest, TakeItem, Turn
from vigpipe.replication.table import SharedTable, new_table, resumed_table


@dataclass(frozen=True)
class Weights:
    """What may be averaged of the stages of a rank.

    Attributes:
        parameters: by name.
        statistics: BatchNorm's running means and variances, by name.
    """

    parameters: Mapping[str, Tensor]
    statistics: Mapping[str, Tensor]

    @property
    def averaged(self) -> dict[str, Tensor]:
        """All of them, parameters first."""
        return {**self.parameters, **self.statistics}


def decide(member: Member, *, evaluates: bool) -> Iterator[Decision | None]:
    """Make the decisions of one replica, on its first rank.

    Args:
        member: the replica.
        evaluates: whether this replica evaluates its weights after an epoch.

    Yields:
        Decisions, and None while the replica waits for others.
    """
    gradients = member.rules.gradients
    item: int | NoItem = NoItem.CLOSED
    while True:
        # Weights are averaged between two steps. Gradients are too if the pool has nothing left:
        # others then come to an average with their last ones, and this replica has none to give.
        if not gradients or item is NoItem.NONE_LEFT:
            came = yield from member.average(in_step=False)
            if came.kind in (Kind.AVERAGE, Kind.GIVE):
                yield came
                continue
        item = member.take()
        if item is NoItem.CLOSED:
            if (yield from member.rest()):
                yield Decision(Kind.REST, member.rules.course.steps_with(member.see().drawn))
        elif isinstance(item, NoItem):  # none is left
            if (yield from member.finish()):
                yield Decision(Kind.END)
                return
        elif evaluates and (epoch := member.epoch_to_evaluate(item)):
            yield Decision(Kind.EVALUATE, epoch)
        else:
            yield Decision(Kind.TAKE, item, member.ahead)
            if gradients:
                came = yield from member.average(in_step=True)
                yield came
                if came.kind is Kind.NO_STEP:
                    continue
            member.finish_item()


class OwnSteps:
    """A strategy of replicas that take steps of their own; see `Strategy`.

    Args:
        options: what is averaged, how often, and where items come from.
        course: the steps of the run.
        place: this rank among the others.
        weights: those of this rank's stages.
        recorded: what each replica is to do again; None if it is free.
    """

    sums_replicas = False

    def __init__(
        self,
        options: TrainConfig,
        course: Course,
        place: Place,
        weights: Weights,
        recorded: Sequence[Recorded] | None = None,
    ) -> None:
        self.peers, self._whole_course, self._place = place.peers, course, place
        self._course = course = replace(course, num_replicas=course.num_replicas // place.team_size)
        gradients, from_pool = options.average == "gradients", options.items == "pool"
        looks_ahead = from_pool and options.workers > 0 and recorded is None
        every = options.average_every or 0
        self._rules = Rules(course, every, gradients, from_pool, looks_ahead)
        self._options, self._weights, self._recorded = options, weights, recorded
        self._exchange = Exchange(place.between)
        self._compressor = make_compressor(options, self._exchange, weights.parameters)
        self._averages: Averages = self._compressor or self._exchange
        is_rounded = options.average == "weights" and options.compress != "none"
        if is_rounded and place.between is not None:
            self._averages = RoundedWeights(self._exchange, len(weights.parameters))
        self._store = place.open_store()
        self._first = new_table(course.num_replicas)
        # On the first rank of the pipeline, once it runs.
        self._member: Member | ServerMember | None = None
        self._decisions = Decisions(self.peers)
        self._alive: Alive | None = None
        self._stops = False
        self._partner = ALL  # with whom weights are averaged next
        self._samples = 0  # that the replica was trained on since it was averaged
        self._new_samples: int | None = None  # of the last item; None if it was given back
        self._num_items = self._num_averages = self._num_samples = 0
        self._diary = Diary()
        self._prepare()

    def _prepare(self) -> None:
        """Prepare what only this strategy needs; all ranks do so together."""

    def _make_member(self, table: SharedTable, recorded: Recorded | None) -> Member:
        """Return this replica's part in the table."""
        raise NotImplementedError

    def _apply(self, means: list[Tensor]) -> list[Tensor]:
        """Return the new weights, given their means; running statistics come last in both."""
        return means

    def _samples_after(self, total: Tensor) -> int:
        """Return how many samples stand behind the new weights.

        Args:
            total: those behind all weights that they are the mean of, a scalar on the device.
        """
        raise NotImplementedError

    def _give(self, number: int) -> None:
        """Give the weights for an average, by its number, and go on without waiting for it."""
        raise NotImplementedError

    def _before_rest(self, stop: bool) -> None:
        """Leave nothing under way between the ranks, all of which rest.

        Args:
            stop: whether the run ends.
        """

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Go on where an earlier run has rested; its tensors are in `tensors` already."""
        self._first = resumed_table(progress, self._course.num_replicas)
        self._samples = self._first.samples[self._place.team]

    def turns(self, first_step: int, is_evaluated: bool) -> Iterator[Turn]:
        """Yield what this replica does; the same on all ranks of its pipeline."""
        if self._place.is_first:
            self._decisions.begin(self._decide(), self._watch())
        while (decision := self._next_decision()).kind is not Kind.END:
            yield from self._do(decision)
        unfinished = max(*self._first.leases, *self._first.ahead) >= 0
        if self._first.drawn < self._course.num_items or unfinished:
            with self._diary.doing("saved"):
                yield Rest(self._course.num_steps, stop=False)

    def _do(self, decision: Decision) -> Iterator[Turn]:
        """Do what was decided."""
        kind, number, ahead = decision
        if kind is Kind.TAKE:
            with self._diary.doing("worked"):
                yield self._own_share(number, ahead)
            self._num_items += self._new_samples is not None
        elif kind is Kind.EVALUATE:
            with self._diary.doing("evaluated"):
                yield Evaluate(number)
        elif kind is Kind.AVERAGE and self._rules.gradients:  # this replica has none to give
            self._give_nothing(number)
        elif kind is Kind.AVERAGE:
            self._partner = number
            yield AverageWeights()
        elif kind is Kind.GIVE:
            self._give(number)
        else:
            assert kind is Kind.REST
            with self._diary.doing("saved"):
                yield from self._rest(number)

    def _rest(self, number: int) -> Iterator[Turn]:
        """Save a checkpoint after a number of steps; all ranks rest."""
        self._stops = agree(Status(stop=self._stops), Peers(self._place.num_ranks)).stop
        self._before_rest(self._stops)
        yield Rest(number, self._stops)

    def _next_decision(self) -> Decision:
        with self._diary.doing("waited"):
            return self._decisions.next()

    def _decide(self) -> Iterator[Decision | None]:
        index = self._place.team
        recorded = None if self._recorded is None else self._recorded[index]
        member = self._make_member(SharedTable(self._store, self._first, index), recorded)
        self._member = member
        return decide(member, evaluates=index == 0)

    def _watch(self) -> Callable[[], None]:
        place = self._place
        num_replicas = 1 if place.between is None else place.between.size()
        alive = Alive(self._store, place.team, num_replicas, place.timeout_seconds)
        self._alive = alive
        return alive.check

    def _own_share(self, item: int, ahead: int) -> TakeItem:
        """Return what this rank computes of an item of its team, and may read ahead."""
        own = self._own_items(item)
        if not self._rules.from_pool and self._recorded is None:
            return TakeItem(own[0], ahead=own[1:])
        return TakeItem(own[0], ahead=self._own_items(ahead)[:1] if ahead >= 0 else ())

    def _own_items(self, item: int) -> range:
        """Return this rank's shares of an item, and of those with fixed items after it."""
        step, team = divmod(item, self._course.num_replicas)
        share = team * self._place.team_size + self._place.of_team
        return self._whole_course.items(step, self._course.next_evaluation(step), share)

    def combine_gradients(
        self,
        gradients: Sequence[Tensor],
        moments: Tensor,
        is_finite: Tensor,
        num_samples: int,
        loss: Tensor | None,
    ) -> Outcome:
        """Average gradients if that is due, each weighted with the samples of its item.

        A gradient that is not finite is not sent: its item counts as one without samples. A step
        without samples is not taken, unless other replicas have some.
        """
        self._new_samples = num_samples
        kind, partner, _ = self._next_decision() if self._rules.gradients else OWN_GRADIENTS
        if kind is Kind.AVERAGE:
            return self._average_gradients(gradients, moments, is_finite, num_samples, partner)
        if kind is Kind.NO_STEP:
            self._new_samples = None
        is_taken = kind is Kind.OWN_GRADIENTS and num_samples > 0
        return Outcome(moments, None if is_taken else torch.zeros_like(is_finite))

    def _average_gradients(
        self,
        gradients: Sequence[Tensor],
        moments: Tensor,
        is_finite: Tensor,
        num_samples: int,
        partner: int,
    ) -> Outcome:
        with self._averaging():
            is_good = holds_everywhere(is_finite, self.peers)
            good = [torch.where(is_good, g, torch.zeros_like(g)) for g in gradients]
            weight = num_samples * is_good.double()
            means, num_all = self._averages.mean(good, weight, partner)
            good_moments = torch.where(is_good, moments, torch.zeros_like(moments)).flatten()
            by_replica = self._exchange.gather(good_moments, partner)
            num_microbatches = len(by_replica) * len(moments)
            all_moments = by_replica.view(num_microbatches, *moments.shape[1:])
            for gradient, mean in zip(gradients, means, strict=True):
                gradient.copy_(mean)
        return Outcome(all_moments, num_all > 0)

    def _give_nothing(self, partner: int) -> None:
        """Come to an average of gradients between two steps, after the pool's last item."""
        zeros = [torch.zeros_like(p) for p in self._weights.parameters.values()]
        no_moments = zeros[0].new_zeros(self._place.num_moments, dtype=torch.float64)
        is_finite = zeros[0].new_ones((), dtype=torch.bool)
        self._average_gradients(zeros, no_moments, is_finite, 0, partner)

    @torch.no_grad()
    def average_weights(self) -> None:
        """Average weights and running statistics, weighted with the samples trained on."""
        averaged = list(self._weights.averaged.values())
        with self._averaging():
            weight = averaged[0].new_tensor(self._samples, dtype=torch.float64)
            means, total = self._averages.mean(averaged, weight, self._partner)
            for tensor, new in zip(averaged, self._apply(means), strict=True):
                tensor.copy_(new)
            self._count_samples(self._samples_after(total))

    @contextmanager
    def _averaging(self) -> Iterator[None]:
        with self._diary.doing("averaged"):
            yield
        self._num_averages += 1

    def _count_samples(self, num_samples: int) -> None:
        self._samples = num_samples
        if isinstance(self._member, Member):
            self._member.samples = num_samples

    def hear(self, agreement: Agreement) -> None:
        """Close the pool if a rank of this replica wants a checkpoint, or to stop."""
        self._count_samples(self._samples + (self._new_samples or 0))
        self._num_samples += self._new_samples or 0
        self._stops |= agreement.stop
        if agreement.save or agreement.stop:
            self.ask_to_save()

    def ask_to_save(self) -> None:
        """Close the pool."""
        if self._member is not None:
            self._member.close()

    def average_at_the_end(self) -> None:
        """Make all replicas equal after the last step; their ranks call this together.

        This is an average of weights like any other, of all replicas, unless the last step ended
        with one. With gradients, it is the only one of weights, and counts all samples since the
        start. It is never compressed.
        """
        self._averages = self._exchange
        some = next(iter(self._weights.parameters.values()))
        samples = some.new_tensor([self._samples], dtype=torch.float64)
        if self._exchange.gather(samples).any():
            self._partner = ALL
            self.average_weights()

    def progress(self) -> Mapping[str, Any]:
        """Return how far each replica is; the ranks of a pipeline call this together."""
        own = None if self._member is None else self._member.see().progress()
        return all_gather_values(own, *self.peers)[0]

    def take_events(self) -> list[dict[str, Any]]:
        """Return what this replica has done since it was last asked, on its first rank."""
        told = self._diary.take_rows(self._place.team)  # or the others' would pile up
        if self._member is None:
            return []
        events, self._member.events = self._member.events, []
        return events + told

    def tensors(self) -> Mapping[str, Tensor]:
        """Return what compressed averages have left out, and what the next one begins with."""
        compressor = self._compressor
        return {} if compressor is None else compressor.residuals() | compressor.memory()

    def account(self) -> Mapping[str, Any]:
        """Return what this replica has done, as far as this rank knows."""
        seconds = self._diary.seconds
        return {
            "items": self._num_items,
            "samples": self._num_samples,
            "averages": self._num_averages,
            "busy_seconds": seconds["worked"],
            "waiting_seconds": seconds["waited"],
            "averaging_seconds": seconds["averaged"],
            "bytes_sent": self._exchange.bytes_sent,
        }

    def close(self) -> None:
        """End the thread that shows the others that this replica is there."""
        if self._alive is not None:
            self._alive.close()
