"""Predict what the ways to use m ranks on one graph take, and choose one.

    computing     seconds of the fullest rank's share, by itself
    slow cores    what ranks that compute on the same host at the same time add to it
    messages      exchanges of rows and columns, and sums, between ranks that share a graph
    agreement     adding up the gradients of weights, and agreeing that the step is taken
    waiting       of a pipeline: what is left of its step, in which ranks wait for one another

A message takes latency + bytes / bandwidth where a network is described; otherwise it takes what
ranks of this machine took. A tensor is added up around a ring: 2 (m - 1) messages in turn, which
are 2 (m - 1) / m times its bytes together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from vigpipe.errors import InputError
from vigpipe.planning.explain import in_seconds
from vigpipe.planning.profile import with_network
from vigpipe.planning.simulate import StageCosts, stretch
from vigpipe.planning.step import Request, predict, stage_costs
from vigpipe.planning.ways import Curve, Layers, Links, Measured, MeasuredWay

_FAR_OFF = 100.0  # largest ratio of a step to its pieces, either way round
_TINY_SECONDS = 1e-12
_LEAST_SHARE = 0.02  # least share of a step that is given as a reason


@dataclass(frozen=True)
class Cluster:
    """The machines to predict for; None where those that were measured on are meant."""

    latency_seconds: float | None = None  # of a message between two ranks
    bandwidth: float | None = None  # bytes a second
    ranks_per_host: int | None = None  # None if one host has all
    memory_limit_bytes: int | None = None


class Parts(NamedTuple):
    """Seconds of a step by what they go to; see the module."""

    computing: float
    slow_cores: float = 0.0
    messages: float = 0.0
    agreement: float = 0.0
    waiting: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What a way is predicted to take."""

    way: MeasuredWay
    parts: Parts
    sent_bytes: int  # by all ranks together in a step, gradients of weights included
    peak_bytes: int  # of the fullest rank
    fits: bool  # whether this is within the limit

    @cached_property
    def step_seconds(self) -> float:
        return sum(self.parts)

    @property
    def epoch_seconds(self) -> float:
        return self.step_seconds * self.way.steps_per_epoch


class Choice(NamedTuple):
    """What to take, and why in one or more sentences, with the outcomes of all measured ways."""

    best: Outcome
    outcomes: tuple[Outcome, ...]
    reason: str


def choose(measured: Measured, cluster: Cluster) -> Choice:
    """Choose the fastest way that fits and has one rank's steps; raises InputError without any."""
    ways = [way for way in measured.ways if not way.why_not]
    outcomes = tuple(predict_way(way, measured, cluster) for way in ways)
    same = [outcome for outcome in outcomes if outcome.way.is_same]
    fitting = [outcome for outcome in same if outcome.fits]
    if not same:
        reasons = "; ".join(f"{w.name}: {w.why_not}" for w in measured.ways if w.why_not)
        raise InputError(f"--ranks {measured.num_ranks}: no way can be measured here ({reasons})")
    if not fitting:
        leanest = min(same, key=lambda outcome: outcome.peak_bytes)
        limit = cluster.memory_limit_bytes
        assert limit is not None
        raise InputError(
            f"--memory-limit {_bytes(limit)}: every way needs more; the leanest, "
            f"{leanest.way.name}, needs {_bytes(leanest.peak_bytes)}; allow as much, or take more "
            "--ranks"
        )
    best = min(fitting, key=lambda outcome: outcome.epoch_seconds)
    return Choice(best, outcomes, _reason(best, outcomes, measured, cluster))


def predict_way(way: MeasuredWay, measured: Measured, cluster: Cluster) -> Outcome:
    """Predict a step of one way."""
    if way.layers is not None:
        return _predict_layers(way, way.layers, measured, cluster)
    network = _Network(measured.links, cluster, way.num_ranks)
    on_host = min(cluster.ranks_per_host or way.num_ranks, way.num_ranks)
    alone = way.seconds[0]
    at_once = alone * stretch([seconds / alone for seconds in way.seconds], on_host)
    messages = sum(count * network.exchange(size) for size, count in way.exchanges)
    messages += sum(count * network.sum(size) for size, count in way.sums)
    agreement = network.agreement
    if way.num_ranks > 1:
        agreement += network.sum(way.gradient_bytes)
    sent = way.exchanged_bytes + way.reduced_bytes
    parts = Parts(alone, max(0.0, at_once - alone), messages, agreement)
    return Outcome(way, parts, sent, way.peak_bytes, _fits(way.peak_bytes, cluster))


def _predict_layers(
    way: MeasuredWay, layers: Layers, measured: Measured, cluster: Cluster
) -> Outcome:
    profile = with_network(layers.profile, cluster.latency_seconds, cluster.bandwidth)
    num_microbatches = layers.num_microbatches
    request = Request(
        way.num_ranks,
        1,
        num_microbatches,
        (num_microbatches,),
        ranks_per_host=cluster.ranks_per_host,
        typical=layers.typical,
    )
    costs = stage_costs(profile, request, layers.stages, num_microbatches)
    costs = _scaled(costs, _calibration(way, layers, measured))
    proposal = predict(profile, request, layers.stages, "gpipe", 1, num_microbatches, costs)
    work = sum(map(sum, costs.forward)) + sum(map(sum, costs.backward)) + sum(costs.update)
    computing = work / way.num_ranks
    crossing = [
        profile.boundary_bytes(profile.blocks[stage[-1]], layers.typical)
        for stage in layers.stages[:-1]
    ]
    agreement = _Network(measured.links, cluster, way.num_ranks).agreement
    parts = Parts(computing, agreement=agreement, waiting=proposal.step_seconds - computing)
    peak = max(proposal.memory_bytes)
    sent = round(2 * num_microbatches * sum(crossing))
    return Outcome(way, parts, sent, peak, _fits(peak, cluster))


def _calibration(way: MeasuredWay, layers: Layers, measured: Measured) -> float:
    """Return how many times longer steps take than their pieces were timed."""
    # The step of a rank alone is known: the single rank's, or where a pipeline takes other steps,
    # a replica's, which is that of one sub-graph.
    alone = [
        other.seconds[0]
        for other in measured.ways
        if other.seconds and other.is_same == way.is_same and not other.exchanges
    ]
    if not alone:
        return 1.0
    number = layers.num_microbatches if way.is_same else 1
    request = Request(1, 1, number, (number,), typical=layers.typical)
    blocks = tuple(range(len(layers.profile.blocks)))
    predicted = predict(layers.profile, request, (blocks,), "gpipe", 1, number).step_seconds
    return min(_FAR_OFF, max(1 / _FAR_OFF, alone[0] / max(_TINY_SECONDS, predicted)))


def _scaled(costs: StageCosts, factor: float) -> StageCosts:
    return replace(
        costs,
        forward=[[factor * seconds for seconds in of_stage] for of_stage in costs.forward],
        backward=[[factor * seconds for seconds in of_stage] for of_stage in costs.backward],
        update=[factor * seconds for seconds in costs.update],
        dispatch=factor * costs.dispatch,
    )


class _Network:
    """Messages between ranks, by the cluster's network if given, or as `links` measured them."""

    def __init__(self, links: Links, cluster: Cluster, num_ranks: int) -> None:
        self._links, self._num_ranks = links, num_ranks
        given = cluster.latency_seconds
        self._latency = links.latency_seconds if given is None else given
        self._bandwidth = cluster.bandwidth or links.bandwidth
        self._is_described = cluster.latency_seconds is not None or cluster.bandwidth is not None
        # How many times as many messages follow one another as between the ranks that measured.
        self._relative_steps = (num_ranks - 1) / max(1, links.num_ranks - 1)

    @property
    def agreement(self) -> float:
        """Seconds in which the ranks agree on a step."""
        if self._num_ranks == 1:
            return 0.0
        if self._is_described:
            return 2 * (self._num_ranks - 1) * self._latency
        return self._links.agreement_seconds * self._relative_steps

    def exchange(self, num_bytes: float) -> float:
        """Return the seconds in which every rank gives the others so many bytes."""
        if self._is_described:
            return self._latency + num_bytes / self._bandwidth
        first = self._links.exchanges[0][1]
        return first * (self._relative_steps - 1) + at(self._links.exchanges, num_bytes)

    def sum(self, num_bytes: float) -> float:
        """Return the seconds in which a tensor of so many bytes is added up."""
        steps = 2 * (self._num_ranks - 1)
        if self._is_described:
            return steps * self._latency + steps / self._num_ranks * num_bytes / self._bandwidth
        first = self._links.sums[0][1]
        measured = self._links.num_ranks
        relative_bytes = (1 - 1 / self._num_ranks) / (1 - 1 / measured) if measured > 1 else 1.0
        rest = max(0.0, at(self._links.sums, num_bytes) - first)
        return first * self._relative_steps + rest * relative_bytes


def at(curve: Curve, num_bytes: float) -> float:
    """Interpolate a curve linearly; beyond its last point it goes on, but does not fall."""
    below = [point for point in curve if point[0] <= num_bytes]
    if not below or len(curve) == 1:
        return curve[0][1]
    i = min(len(below), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[i - 1], curve[i]
    slope = (y1 - y0) / (x1 - x0)
    if num_bytes > x1:
        return y1 + max(0.0, slope) * (num_bytes - x1)
    return y0 + slope * (num_bytes - x0)


def _fits(peak_bytes: int, cluster: Cluster) -> bool:
    return cluster.memory_limit_bytes is None or peak_bytes <= cluster.memory_limit_bytes


def _reason(
    best: Outcome, outcomes: Sequence[Outcome], measured: Measured, cluster: Cluster
) -> str:
    same = [outcome for outcome in outcomes if outcome.way.is_same]
    others = [
        f"{outcome.way.name} {_what_limits(outcome, best, cluster)}"
        for outcome in same
        if outcome is not best
    ]
    others += [f"{way.name} cannot be: {way.why_not}" for way in measured.ways if way.why_not]
    sentence = f"Take {best.way.name}: {in_seconds(best.epoch_seconds)} an epoch"
    if len(same) > 1:
        sentence += f", the least of {len(same)} ways whose steps are those of one rank"
        sentence += " and that fit" if not all(outcome.fits for outcome in same) else ""
    text = f"{sentence}."
    if others:
        text += f" Of the others, {'; '.join(others)}."
    quicker = [
        f"{outcome.way.name}, {in_seconds(outcome.epoch_seconds)} in {outcome.way.steps_per_epoch}"
        for outcome in outcomes
        if not outcome.way.is_same and outcome.fits and outcome.epoch_seconds < best.epoch_seconds
    ]
    if quicker:
        text += f" With other steps an epoch is quicker: {'; '.join(quicker)}."
    return text


def _what_limits(outcome: Outcome, best: Outcome, cluster: Cluster) -> str:
    """Say what makes a way slower than the best one, or that it does not fit."""
    way, parts = outcome.way, outcome.parts
    if not outcome.fits:
        assert cluster.memory_limit_bytes is not None
        limit = _bytes(cluster.memory_limit_bytes)
        return f"needs {_bytes(outcome.peak_bytes)} of memory a rank, and the limit is {limit}"
    step = outcome.step_seconds
    took = f"takes {in_seconds(outcome.epoch_seconds)}"
    if way.num_ranks == 1:
        return f"{took}, with all the work on it"
    more = {name: getattr(parts, name) - getattr(best.parts, name) for name in Parts._fields}
    largest = max(more, key=lambda name: more[name])
    if more[largest] < _LEAST_SHARE * step:
        return f"{took}, hardly more"
    share = f"{getattr(parts, largest) / step:.0%} of a step"
    computing = f"a rank computes {in_seconds(parts.computing)} a step"
    if way.sources > 1:
        computing = f"with its halo the fullest part sums over {way.sources:.2f} times its rows"
    why = {
        "computing": computing,
        "slow_cores": f"ranks that compute at once slow one another down, by {share}",
        "messages": f"messages are {share}, {_bytes(outcome.sent_bytes)}",
        "agreement": f"adding up gradients and agreeing are {share}",
        "waiting": f"its ranks wait for one another in {share} (the bubble, and transfers)",
    }
    return f"{took}: {why[largest]}"


def _bytes(value: float) -> str:
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:,.1f} MB"
