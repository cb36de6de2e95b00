"""Replicas take steps of their own, and all of them are averaged every TAU steps (--average-every).

gradients  AllReduce-GCN, Y. Zhang, "Efficient Asynchronous GCN Training on a GPU Cluster",
           Concordia 2021, algorithm 4: every TAU steps the optimizer takes the mean gradient of all
           replicas, and the replica's own in between. Weights are never exchanged, so with TAU > 1
           the replicas drift apart. With TAU = 1 it is synchronous training.
weights    Local SGD, Stich, arXiv:1805.09767: after every TAU steps all replicas take the mean of
           their weights. With a TAU as long as the run it is one-shot averaging.
outer      DiLoCo, Douillard et al., arXiv:2311.08105, algorithm 1: what the mean differs by from
           the weights after the last average drives an optimizer of its own (`replication.outer`).

Averages weigh by samples: gradients by those of the item, weights by those that a replica was
trained on since it was averaged. BatchNorm's running statistics are averaged with the weights; with
gradients, the moments of all replicas are pooled. The optimizer's state stays with the replica.

A rank sends 2 (D - 1) / D * 4 P bytes in an average of P numbers in float32: gradients, or weights
and running statistics (`replication.exchange`).
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from vigpipe.replication.course import Course
from vigpipe.replication.decisions import Decision, Decisions
from vigpipe.replication.exchange import Exchange
from vigpipe.replication.member import FreeMember, Member, NoItem
from vigpipe.replication.outer import Outer
from vigpipe.replication.place import Place
from vigpipe.replication.record import Recorded, RecordedMember
from vigpipe.replication.strategy import AverageWeights, Evaluate, Outcome, Rest, TakeItem, Turn
from vigpipe.replication.table import SharedTable, new_table, resumed_table

# Kinds of decisions; the first three say with which gradients the step is taken, if it is.
OWN_GRADIENTS, AVERAGE, NO_STEP, TAKE, EVALUATE, REST, END = range(7)


def decide(
    member: Member, course: Course, *, gradients: bool, evaluates: bool
) -> Iterator[Decision | None]:
    """Make the decisions of one replica, on its first rank.

    Args:
        member: the replica.
        course: the steps of the run.
        gradients: whether gradients are averaged, in the midst of a step; otherwise weights are,
            between two steps.
        evaluates: whether this replica evaluates its weights after an epoch.

    Yields:
        Decisions, and None while the replica waits for others.
    """
    item: int | NoItem = NoItem.CLOSED
    while True:
        # Weights are averaged between two steps. Gradients are too if the pool has nothing left:
        # others then come to an average with their last ones, and this replica has none to give.
        is_between = not gradients or item is NoItem.NONE_LEFT
        if is_between and member.is_average_due() and (yield from member.join(int(gradients))):
            yield Decision(AVERAGE)
        item = member.take()
        if item is NoItem.CLOSED:
            yield from member.rest()
            yield Decision(REST, course.steps_with(member.see().drawn))
        elif item is NoItem.NONE_LEFT:
            if not member.is_average_due() and (yield from member.finish()):
                yield Decision(END)
                return
        elif evaluates and (epoch := member.epoch_to_evaluate(course, item)):
            yield Decision(EVALUATE, epoch)
        else:
            yield Decision(TAKE, item)
            if gradients and member.is_average_due(num_open=1):
                if not (yield from member.join(num_open=1)):
                    yield Decision(NO_STEP)
                    continue
                yield Decision(AVERAGE)
            elif gradients:
                yield Decision(OWN_GRADIENTS)
            member.finish_item()


class Periodic:
    """The strategy of ranks whose replicas are averaged now and then; see `Strategy`.

    Args:
        options: which average, how often, and where items come from.
        course: the steps of the run.
        place: this rank among the others.
        parameters: those of this rank's stages, by name.
        statistics: BatchNorm's running means and variances there, in order.
        recorded: what each replica is to do again; None if it is free.
    """

    sums_replicas = False

    def __init__(
        self,
        options: TrainConfig,
        course: Course,
        place: Place,
        parameters: Mapping[str, Tensor],
        statistics: Sequence[Tensor],
        recorded: Sequence[Recorded] | None = None,
    ) -> None:
        assert options.average_every is not None
        self.peers, self._course, self._place = place.peers, course, place
        self._every, self._from_pool = options.average_every, options.items == "pool"
        self._gradients = options.average == "gradients"
        self._parameters, self._recorded = parameters, recorded
        self._averaged = [*parameters.values(), *statistics]
        self._outer: Outer | None = None
        if options.average == "outer":
            assert options.outer_lr is not None
            assert options.outer_momentum is not None
            self._outer = Outer(parameters, options.outer_lr, options.outer_momentum)
        self._exchange = Exchange(place.replica_group)
        self._store = place.open_store()
        self._first = new_table(course.num_replicas)
        self._member: Member | None = None  # on the first rank of the pipeline, once it runs
        self._decisions = Decisions(self.peers)
        self._alive: Alive | None = None
        self._stops = False
        self._samples = 0  # that the replica was trained on since it was averaged
        self._new_samples: int | None = None  # of the last item; None if it was given back
        self._num_items = self._num_averages = 0
        self._busy_seconds = self._averaging_seconds = 0.0

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Go on where an earlier run has rested; its tensors are in `tensors` already."""
        self._first = resumed_table(progress, self._course.num_replicas)
        self._samples = self._first.samples[self._place.replica_index]

    def turns(self, first_step: int, is_evaluated: bool) -> Iterator[Turn]:
        """Yield what this replica does; the same on all ranks of its pipeline."""
        if self._place.is_first:
            self._decisions.begin(self._decide(), self._watch())
        while True:
            kind, number = self._decisions.next()
            if kind == TAKE:
                began, idle_before = time.perf_counter(), self._idle_seconds
                yield TakeItem(number, ahead=self._ahead(number))
                idle = self._idle_seconds - idle_before
                self._busy_seconds += time.perf_counter() - began - idle
                self._num_items += self._new_samples is not None
            elif kind == EVALUATE:
                yield Evaluate(number)
            elif kind == AVERAGE and self._gradients:  # this replica has none to give
                self._give_nothing()
            elif kind == AVERAGE:
                yield AverageWeights()
            elif kind == REST:
                wish = Status(stop=self._stops)
                everybody = Peers(self._place.num_ranks)
                self._stops = agree(wish, everybody).stop
                yield Rest(number, self._stops)
            else:
                break
        if self._first.drawn < self._course.num_items or max(self._first.leases) >= 0:
            yield Rest(self._course.num_steps, stop=False)

    def _decide(self) -> Iterator[Decision | None]:
        index = self._place.replica_index
        table = SharedTable(self._store, self._first, index)
        if self._recorded is not None:
            self._member = RecordedMember(table, index, self._recorded[index])
        else:
            how_often, from_pool = self._every, self._from_pool
            self._member = FreeMember(table, index, self._course, how_often, from_pool=from_pool)
        return decide(self._member, self._course, gradients=self._gradients, evaluates=index == 0)

    def _watch(self) -> Callable[[], None]:
        place, num_replicas = self._place, self._course.num_replicas
        alive = Alive(self._store, place.replica_index, num_replicas, place.timeout_seconds)
        self._alive = alive
        return alive.check

    def _ahead(self, item: int) -> Sequence[int]:
        if self._from_pool or self._recorded is not None:
            return ()
        step, share = divmod(item, self._course.num_replicas)
        return self._course.items(step, self._course.next_evaluation(step), share)[1:]

    def combine_gradients(
        self, gradients: Sequence[Tensor], moments: Tensor, is_finite: Tensor, num_samples: int
    ) -> Outcome:
        """Average gradients if that is due, each weighted with the samples of its item.

        A gradient that is not finite is not sent: its item counts as one without samples. A step
        without samples is not taken, unless other replicas have some.
        """
        self._new_samples = num_samples
        kind = self._decisions.next().kind if self._gradients else OWN_GRADIENTS
        if kind == AVERAGE:
            return self._average_gradients(gradients, moments, is_finite, num_samples)
        if kind == NO_STEP:
            self._new_samples = None
        is_taken = kind == OWN_GRADIENTS and num_samples > 0
        return Outcome(moments, None if is_taken else torch.zeros_like(is_finite))

    def _average_gradients(
        self, gradients: Sequence[Tensor], moments: Tensor, is_finite: Tensor, num_samples: int
    ) -> Outcome:
        with self._averaging():
            is_good = holds_everywhere(is_finite, self.peers)
            good = [torch.where(is_good, g, torch.zeros_like(g)) for g in gradients]
            means, num_all = self._exchange.mean(good, num_samples * is_good.double())
            good_moments = torch.where(is_good, moments, torch.zeros_like(moments))
            all_moments = self._exchange.gather(good_moments.flatten()).view(-1, *moments.shape[1:])
            for gradient, mean in zip(gradients, means, strict=True):
                gradient.copy_(mean)
        return Outcome(all_moments, num_all > 0)

    def _give_nothing(self) -> None:
        """Come to an average of gradients between two steps, after the pool's last item."""
        zeros = [torch.zeros_like(parameter) for parameter in self._parameters.values()]
        no_moments = zeros[0].new_zeros(self._place.num_moments, dtype=torch.float64)
        is_finite = zeros[0].new_ones((), dtype=torch.bool)
        self._average_gradients(zeros, no_moments, is_finite, num_samples=0)

    @torch.no_grad()
    def average_weights(self) -> None:
        """Average weights and running statistics, weighted with the samples trained on."""
        with self._averaging():
            weight = self._averaged[0].new_tensor(self._samples, dtype=torch.float64)
            means, _ = self._exchange.mean(self._averaged, weight)
            if self._outer is not None:
                num_parameters = len(self._parameters)
                means[:num_parameters] = self._outer.step(means[:num_parameters])
            for tensor, mean in zip(self._averaged, means, strict=True):
                tensor.copy_(mean)
        self._count_samples(0)

    @property
    def _idle_seconds(self) -> float:
        return self._decisions.waiting_seconds + self._averaging_seconds

    @contextmanager
    def _averaging(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._averaging_seconds += time.perf_counter() - began
        self._num_averages += 1

    def _count_samples(self, num_samples: int) -> None:
        self._samples = num_samples
        if self._member is not None:
            self._member.samples = num_samples

    def hear(self, agreement: Agreement) -> None:
        """Close the pool if a rank of this replica wants a checkpoint, or to stop."""
        self._count_samples(self._samples + (self._new_samples or 0))
        self._stops |= agreement.stop
        if agreement.save or agreement.stop:
            self.ask_to_save()

    def ask_to_save(self) -> None:
        """Close the pool."""
        if self._member is not None:
            self._member.close()

    def average_at_the_end(self) -> None:
        """Make all replicas equal after the last step; their ranks call this together.

        With weights, this is an average like any other, unless the last step ended with one. With
        gradients, it is the only one of weights, and counts all samples since the start.
        """
        samples = self._averaged[0].new_tensor([self._samples], dtype=torch.float64)
        if self._exchange.gather(samples).any():
            self.average_weights()

    def progress(self) -> Mapping[str, Any]:
        """Return how far each replica is; the ranks of a pipeline call this together."""
        own = None if self._member is None else self._member.see().progress()
        return all_gather_values(own, *self.peers)[0]

    def take_events(self) -> list[dict[str, int]]:
        """Return what this replica has done since it was last asked, on its first rank."""
        if self._member is None:
            return []
        events, self._member.events = self._member.events, []
        return events

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the state of the outer optimizer."""
        return {} if self._outer is None else self._outer.tensors()

    def account(self) -> Mapping[str, float]:
        """Return what this replica has done, as far as this rank knows."""
        return {
            "items": self._num_items,
            "averages": self._num_averages,
            "busy_seconds": self._busy_seconds,
            "waiting_seconds": self._decisions.waiting_seconds,
            "averaging_seconds": self._averaging_seconds,
            "bytes_sent": self._exchange.bytes_sent,
        }

    def close(self) -> None:
        """End the thread that shows the others that this replica is there."""
        if self._alive is not None:
            self._alive.close()
