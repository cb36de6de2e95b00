"""Compare replicas that take steps of their own with unsplit models, one process for all of them.

The ranks train as the strategy says, and keep a record (`replication.record`). Then one process
takes D unsplit models, and does with them what the record says: it takes steps with the same items
in the order of each replica, and computes the averages by their definition. The loss of every item
is compared, and the weights, running statistics and moving averages of every replica at the end.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from vigpipe.checkpoint.weights_file import gather_named
from vigpipe.commands.differences import Compared, Kinds, differences
from vigpipe.parallel.agreement import Agreement, Peers
from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.parallel.layout import Layout
from vigpipe.parallel.values import gather_tensors
from vigpipe.replication.record import Recorded, collect
from vigpipe.replication.strategy import Computed, Item, Loop, Outcome, Pushed
from vigpipe.replication.subnetworks.moments import is_moment
from vigpipe.replication.synchronous import Synchronous
from vigpipe.run.batches import read_batch
from vigpipe.run.facts import Run
from vigpipe.run.others import all_events
from vigpipe.run.rank import RankState, make_rank_state
from vigpipe.run.step import apply_gradients, complete_step, train_step
from vigpipe.schedules import RULES


def compare_replicas(
    run: Run, rank: int, device: torch.device, num_steps: int, in_turn: "type[InTurn]"
) -> Compared | None:
    """Compare what replicas do, D items a step, with `in_turn`; None but on the writing rank."""
    layout = run.layout
    run = replace(run, config=replace(run.config, steps=num_steps))
    rank_state = make_rank_state(run, rank, device)
    traces, recorded = _train(rank_state)
    if traces is None:
        return None
    reference = in_turn(run, recorded, device).carry_out()
    num_averages = sum(len(of.pairs) for of in recorded) // 2 + len(recorded[0].averages)
    models = f"{layout.num_teams} unsplit model{'s' * (layout.num_teams > 1)}"
    against = (
        f"against {models} in one process, which did in turn what the replicas had done: "
        f"{num_steps * layout.num_teams} items, {num_averages} averages"
    )
    return Compared(
        differences(_merged(traces), _merged(reference)), against, is_exact(run, device)
    )


def is_exact(run: Run, device: torch.device) -> bool:
    """Whether every sum has the same terms in the same order as in a single process.

    The replicas of a team add their gradients up in another order, and where a pool sums, layers
    ask for products in another form.
    """
    layout = run.layout
    is_alone = layout.team_size == layout.num_shards == 1 and not run.config.sparse_threads
    return is_alone and not RULES[layout.schedule].reverses and device.type == "cpu"


def _merged(traces: Sequence[Kinds]) -> Kinds:
    """Put the traces of all replicas into one, under names that say whose a tensor is."""
    return {
        kind: {
            f"{name} (replica {replica})": tensor
            for replica, trace in enumerate(traces)
            for name, tensor in trace[kind].items()
        }
        for kind in traces[0]
        if any(trace[kind] for trace in traces)
    }


def stored_kinds(rows: Mapping[str, Tensor]) -> Kinds:
    """Tell what ranks store of a wide model of sub-networks from what they do of its optimizer."""
    return {
        "wide weights": {name: tensor for name, tensor in rows.items() if not is_moment(name)},
        "wide moments": {name: tensor for name, tensor in rows.items() if is_moment(name)},
    }


def trace_of(rank_state: RankState, losses: Sequence[float]) -> Kinds | None:
    """Return the losses and tensors of a replica; None except on its last stage."""
    state = gathered(rank_state, rank_state.trained.state())
    averages = gathered(rank_state, rank_state.trained.average())
    if state is None or averages is None:
        return None
    return {
        "loss": {"loss": torch.tensor(losses, dtype=torch.float64)},
        **kinds_of_state(rank_state, state),
        "moving averages": {n: t for n, t in averages.items() if t.is_floating_point()},
    }


def kinds_of_state(rank_state: RankState, state: Mapping[str, Tensor]) -> Kinds:
    """Tell weights from running statistics in the state of an unsplit model."""
    parameters = rank_state.run.parameter_order
    numbers = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
    return {
        "weights": {n: t for n, t in numbers.items() if n in parameters},
        "running statistics": {n: t for n, t in numbers.items() if n not in parameters},
    }


def gathered(rank_state: RankState, tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """Return the tensors of all stages of a replica; None except on its last stage."""
    last = rank_state.run.layout.pipeline_size - 1
    return gather_named(tensors, rank_state.mesh.groups.pipeline, last)


def train_recorded(rank_state: RankState) -> tuple[list[float], list[Recorded]]:
    """Train to the end as one rank; return the losses that it knows, and what all have recorded."""
    loop, own_steps = _Losses(rank_state), rank_state.own_steps
    assert own_steps is not None
    for item in own_steps.items(0, is_evaluated=True, loop=loop):
        loop.losses += _take(rank_state, read_batch(rank_state, item))
    layout = rank_state.run.layout
    events = all_events(own_steps.membership, layout.world_size)
    own_steps.membership.close()
    rank_state.feed.close()
    return loop.losses, collect(events, layout.num_teams)


class _Losses(Loop):
    """A loop that keeps the losses of steps, and neither evaluates nor saves."""

    def __init__(self, rank_state: RankState) -> None:
        self._state = rank_state
        self.losses: list[float] = []

    def apply(self, pushed: Pushed) -> None:
        apply_gradients(self._state, pushed)
        self._state.strategy.hear(Agreement([]))
        self.losses.append(pushed.loss)


def _train(rank_state: RankState) -> tuple[list[Kinds] | None, list[Recorded]]:
    """Train to the end; return all replicas' traces, None but on the writing rank, and records."""
    losses, recorded = train_recorded(rank_state)
    layout = rank_state.run.layout
    own = trace_of(rank_state, losses)
    own_steps = rank_state.own_steps
    assert own_steps is not None
    if stored := own_steps.stored():  # of the wide model of sub-networks
        own_steps.average_at_the_end(rank_state.mesh.counterparts)
        rows = gathered(rank_state, dict(stored))
        own = None if own is None or rows is None else {**own, **stored_kinds(rows)}
    if rank_state.mesh.shards.rank > 0:  # of the ranks that share a replica's batch, one is enough
        own = None
    if own is None or layout.num_replicas == 1:
        return None if own is None else [own], recorded
    kinds = {f"{kind}\n{name}": tensor for kind in own for name, tensor in own[kind].items()}
    of_all = gather_tensors(kinds, layout.num_replicas, 0, rank_state.mesh.counterparts.group)
    if of_all is None or not rank_state.is_writer:
        return None, recorded
    traces: list[dict[str, dict[str, Tensor]]] = []
    for tensors in of_all[:: layout.team_size]:  # the replicas of a team are equal
        traces.append({kind: {} for kind in own})
        for name, tensor in tensors.items():
            kind, _, name = name.partition("\n")
            traces[-1][kind][name] = tensor
    return [*traces], recorded


def _take(rank_state: RankState, batch: ReplicaBatch) -> list[float]:
    """Take a step, and return its loss in a list; an empty one where it is not known."""
    step = train_step(rank_state, batch)
    rank_state.strategy.hear(step.agreement)
    complete_step(rank_state)
    return [step.loss] if step.loss is not None and any(batch.sizes) else []


class Alone(Synchronous):
    """The strategy of a model that is trained in turn with the others."""

    given: "Average | None" = None  # that the next step is taken with; None for its own

    def combine_gradients(self, own: Computed) -> Outcome:
        if self.given is None:
            return Outcome(own.stats)
        for gradient, mean in zip(own.gradients, self.given.means, strict=True):
            gradient.copy_(mean)
        is_taken = torch.full_like(own.is_finite, self.given.is_trained)
        return Outcome(self.given.stats, is_taken)


class Average(NamedTuple):
    """A mean of the gradients of some replicas."""

    means: list[Tensor]
    stats: Tensor  # those of BatchNorm of all the replicas
    is_trained: bool  # whether any of their items has something to train on


class Act(NamedTuple):
    """What a replica does next; without item and group, it gives its weights for an average."""

    item: int | None  # that it takes a step with; None for what is done without a step
    group: tuple[int, ...] = ()  # the replicas that are averaged, it among them


def acts_of(
    recorded: Recorded, replica: int, num_replicas: int, *, in_step: bool, overlap: int = 0
) -> list[Act]:
    """Return a replica's acts in order; averages are in a step, after it, or `overlap` steps on."""
    if overlap:
        return _overlapping_acts(recorded, tuple(range(num_replicas)), overlap)
    groups: dict[int, list[tuple[int, ...]]] = {}  # that it was averaged with, by step
    for step in recorded.averages:
        groups.setdefault(step, []).append(tuple(range(num_replicas)))
    for step, partner in recorded.pairs:
        groups.setdefault(step, []).append((min(replica, partner), max(replica, partner)))
    acts: list[Act] = [Act(None, group) for group in groups.get(0, [])]
    for step, item in enumerate(recorded.items, 1):
        of_step = groups.get(step, [])
        acts.append(Act(item, next(iter(of_step), ())) if in_step else Act(item))
        acts += [Act(None, group) for group in of_step[in_step:]]
    return acts + [Act(None, group) for group in groups.get(len(recorded.items) + 1, [])]


def _overlapping_acts(recorded: Recorded, group: tuple[int, ...], overlap: int) -> list[Act]:
    """Return what it did: an average is applied late, but before the next one and the end."""
    num_steps = len(recorded.items)
    ends = [*recorded.averages[1:], num_steps]
    acts: dict[int, list[Act]] = {step: [] for step in range(num_steps + 1)}  # after each step
    for given, end in zip(recorded.averages, ends, strict=False):
        acts[given].append(Act(None))
        acts[min(given + overlap, end)].append(Act(None, group))
    items = [Act(item) for item in recorded.items]
    steps = chain.from_iterable([item, *acts[step]] for step, item in enumerate(items, 1))
    return [*acts[0], *steps]


@dataclass
class Model:
    """An unsplit model that stands for a replica."""

    state: RankState
    alone: Alone
    acts: deque[Act]  # what it has left to do
    samples: int = 0  # that stand behind its weights
    # A copy of what is averaged, for an average that it has not applied yet.
    given: dict[str, Tensor] = field(default_factory=dict)
    given_samples: int = 0
    losses: list[float] = field(default_factory=list)

    @property
    def averaged(self) -> dict[str, Tensor]:
        """What is averaged of weights and running statistics, by name."""
        return {n: t for n, t in self.state.trained.state().items() if t.is_floating_point()}

    def step(self, item: int) -> None:
        batch = read_batch(self.state, Item(item))
        self.losses += _take(self.state, batch)
        self.samples += batch.num_samples if batch.is_trained else 0

    def give(self) -> None:
        """Leave a copy of what is averaged."""
        self.given = {name: tensor.clone() for name, tensor in self.averaged.items()}
        self.given_samples, self.samples = self.samples, 0

    def gradients(self, item: int) -> tuple[ReplicaBatch, Tensor, list[Tensor]]:
        """Compute BatchNorm's statistics and gradients of an item's batch, and change nothing."""
        batch, state = read_batch(self.state, Item(item)), self.state
        state.trained.follow_schedule(batch.step)
        state.reducer.gradients.clear()
        state.pipeline.train_step(batch)
        state.reducer.gradients.reduce()
        gradients = [p.grad for p in state.trained.parameters().values() if p.grad is not None]
        if state.trained.loss_scale is not None:
            state.trained.loss_scale.unscale(gradients)
        return batch, state.trained.statistics.take(), [g.clone() for g in gradients]


class InTurn:
    """D unsplit models that do in one process what the replicas of a run did."""

    def __init__(self, run: Run, recorded: Sequence[Recorded], device: torch.device) -> None:
        self._config, num_replicas = run.config, len(recorded)
        self._in_step = self._config.average == "gradients"
        # A model does by itself what a team of replicas does together.
        num_microbatches = run.layout.team_size * run.layout.num_microbatches
        layout = Layout(1, num_microbatches, num_replicas, num_teams=num_replicas)
        run = replace(run.unsplit(), layout=layout)
        self.models: list[Model] = []
        for replica, of in enumerate(recorded):
            alone = Alone(run.course, replica, Peers())
            state = make_rank_state(run, replica, device, strategy=alone)
            overlap = (run.config.overlap or 0) if num_replicas > 1 else 0
            acts = acts_of(of, replica, num_replicas, in_step=self._in_step, overlap=overlap)
            self.models.append(Model(state, alone, deque(acts)))
        parameters = self.models[0].state.trained.parameters()
        self._old = {name: p.detach().clone() for name, p in parameters.items()}
        self._velocity = {name: torch.zeros_like(old) for name, old in self._old.items()}

    def carry_out(self) -> list[Kinds]:
        """Do all that was recorded, and return the traces of the replicas."""
        while any(model.acts for model in self.models):
            for model in self.models:
                while model.acts and not model.acts[0].group:
                    act = model.acts.popleft()
                    if act.item is None:
                        model.give()
                    else:
                        model.step(act.item)
            group = next(filter(None, map(self._ready, self.models)), ())
            if group and self._in_step:
                self._step_with_mean([self.models[replica] for replica in group])
            elif group and self._config.overlap:
                self._apply_given([self.models[replica] for replica in group])
            elif group:
                self._average_weights([self.models[replica] for replica in group])
            else:
                assert not any(model.acts for model in self.models), "nobody can go on"
        for model in self.models:
            model.state.feed.close()
        traces = [trace_of(model.state, model.losses) for model in self.models]
        return [trace for trace in traces if trace is not None]

    def _ready(self, model: Model) -> tuple[int, ...]:
        """Return with whom a model is averaged next, if all of them have come to that."""
        group = model.acts[0].group if model.acts else ()
        heads = [self.models[replica].acts for replica in group]
        return group if all(acts and acts[0].group == group for acts in heads) else ()

    def _step_with_mean(self, group: Sequence[Model]) -> None:
        """Let those with items left take a step with their mean gradient, weighted by samples."""
        items = [model.acts.popleft().item for model in group]
        taking = [(m, item) for m, item in zip(group, items, strict=True) if item is not None]
        there = [model.gradients(item) for model, item in taking]
        samples = [batch.num_samples for batch, _, _ in there]
        counts = samples if any(samples) else [1] * len(there)
        is_trained = any(batch.is_trained for batch, _, _ in there)
        means = [mean_of(each, counts) for each in zip(*(g for _, _, g in there), strict=True)]
        stats = torch.cat([stats for _, stats, _ in there])
        for model, item in taking:
            model.alone.given = Average(means, stats, is_trained)
            model.step(item)
            model.alone.given = None

    @torch.no_grad()
    def _average_weights(self, group: Sequence[Model]) -> None:
        """Give replicas the mean of their weights and statistics, weighted by samples."""
        for model in group:
            model.acts.popleft()
        counts = [model.samples for model in group]
        tensors = [model.averaged for model in group]
        for name, new in self._new_weights(tensors, counts).items():
            for own in tensors:
                own[name].copy_(new)
        # All replicas count anew; two of them share their samples, the first takes an odd one.
        is_pair = self._config.strategy == "gossip"
        for place, model in enumerate(group):
            model.samples = (sum(counts) + (place == 0)) // 2 if is_pair else 0

    @torch.no_grad()
    def _apply_given(self, group: Sequence[Model]) -> None:
        """Add to each replica's weights what the average changes of those that it has given."""
        counts = [model.given_samples for model in group]
        news = self._new_weights([model.given for model in group], counts)
        for model in group:
            model.acts.popleft()
            for name, tensor in model.averaged.items():
                is_weight = name in self._old  # running statistics become the mean itself
                moved = tensor - model.given[name] if is_weight else 0
                tensor.copy_(news[name] + moved)

    def _new_weights(
        self, tensors: Sequence[dict[str, Tensor]], counts: Sequence[int]
    ) -> dict[str, Tensor]:
        """Return what all replicas take instead of their weights and statistics."""
        counts = counts if any(counts) else [1] * len(counts)
        means = {name: mean_of([own[name] for own in tensors], counts) for name in tensors[0]}
        return means | self._outer(means) if self._config.average == "outer" else means

    def _outer(self, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the new parameters: SGD with Nesterov momentum on old - mean (DiLoCo)."""
        lr, momentum = self._config.outer_lr, self._config.outer_momentum
        assert lr is not None
        assert momentum is not None
        for name, old in self._old.items():
            velocity = self._velocity[name].mul_(momentum).add_(old - means[name])
            self._old[name] = torch.lerp(old, means[name], lr).sub(velocity, alpha=lr * momentum)
        return self._old


def mean_of(tensors: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Return a weighted mean, summed in order in float64 and rounded once."""
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor, count in zip(tensors, counts, strict=True):
        total += tensor.double() * count
    return (total / sum(counts)).to(tensors[0].dtype)
