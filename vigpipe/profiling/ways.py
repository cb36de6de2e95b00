"""Measure all ways in which m ranks can train on one graph, each by rehearsal.

    one rank             the step itself
    mixed, halo          the shares of the ranks, without the others (`rehearse`)
    replicas             the step of a replica
    layers               the pieces of the model, for the planner of pipelines (`measure`)

A share is rehearsed by one rank alone, and by as many at once as this machine has cores or GPUs
for: that shows how much they slow one another down. Between two exchanges, the slowest counts.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from vigpipe.config.check_job import check_job
from vigpipe.config.demands import filled_in
from vigpipe.config.options import TrainConfig, as_given, with_model_defaults
from vigpipe.errors import InputError
from vigpipe.graphs.features import are_sparse
from vigpipe.graphs.job import GraphJob
from vigpipe.graphs.split.halo import work_of_parts
from vigpipe.launch.device import default_sync, hardware, has_own_cores, peak_bytes
from vigpipe.parallel.layout import Layout
from vigpipe.parallel.plan import even_plan
from vigpipe.parallel.values import all_gather_values
from vigpipe.planning.profile import Amounts
from vigpipe.planning.ways import Layers, Measured, MeasuredWay
from vigpipe.profiling.links import LinkMeter
from vigpipe.profiling.measure import cost_options, measure_profile
from vigpipe.profiling.rehearse import Counted, Rehearsal
from vigpipe.run.facts import Run
from vigpipe.run.provenance import provenance
from vigpipe.run.room import memory_bytes

NUM_WARMUP = 2  # steps of a rehearsal that are not timed
NUM_ROUNDS = 4  # rounds over all ways
MIN_STEPS, MAX_STEPS = 1, 10  # timed steps of a way in a round
ENOUGH_SECONDS = 2.0  # aimed at for the timed steps of a rank alone, in all rounds
_MICROBATCHES_PER_STAGE = 4  # where a pipeline's steps are not those of one rank
_KEPT_LAYERS = 6  # activations of a layer that a step holds at a time, about, for `_needs`


@dataclass(frozen=True)
class PossibleWay:
    """A way that may be measured, and the options in which it differs from a run on one rank."""

    name: str
    options: Mapping[str, Any]
    is_same: bool  # whether its steps are those of one rank


def list_ways(config: TrainConfig, num_ranks: int) -> list[PossibleWay]:
    """List the ways in which m = num_ranks ranks can train on a graph, from one rank's options."""
    m, total = num_ranks, config.microbatches
    ways = [
        PossibleWay("one rank", {}, True),
        PossibleWay("mixed", {"shards": m, "split": "mixed"}, True),
    ]
    parts: dict[str, Any] = {}
    if config.sampler == "full":
        ways.append(PossibleWay("halo", {"shards": m, "split": "halo"}, True))
        parts = {"sampler": "parts"}
        ways.append(PossibleWay("replicas of parts", {**parts, "dp": m}, False))
    else:
        of_replica = total // m if total % m == 0 else 1
        replicas = {"dp": m, "microbatches": of_replica}
        ways.append(PossibleWay("replicas", replicas, total % m == 0))
    ways.append(PossibleWay("layers", {"stages": m}, True))
    num_microbatches = _MICROBATCHES_PER_STAGE * m
    if total < m:
        many = {**parts, "stages": m, "microbatches": num_microbatches}
        ways.append(
            PossibleWay("layers, many parts" if parts else "layers, more at once", many, False)
        )
    return ways


def on_one_rank(run: Run, config: TrainConfig) -> Run:
    """Return the run of a single rank that takes the same steps as a run without stages."""
    number = config.microbatches if isinstance(config.microbatches, int) else 1
    alone = {"stages": 1, "dp": 1, "shards": 1, "microbatches": number, "virtual_stages": 1}
    of_one = replace(run.config, sync=config.sync, schedule="gpipe", split=None, **alone)
    plan = even_plan(run.plan.num_blocks, 1)
    layout = Layout(num_microbatches=number)
    run.job.check(layout, run.wide_model, plan)
    return replace(run, config=of_one, layout=layout, plan=plan)


def arrange(run: Run, candidate: PossibleWay, device: torch.device) -> Run:
    """Return the run of a way, made from that of one rank; raises InputError if there is none."""
    config = filled_in(with_model_defaults(replace(run.config, **candidate.options)))
    check_job(config)
    job = run.job
    assert isinstance(job, GraphJob)
    is_same = config.sampler == run.config.sampler
    job = job.with_options(config) if is_same else job.resampled(config)
    config = job.config
    assert isinstance(config.stages, int)
    layout = Layout(
        config.stages, config.microbatches, config.dp, config.schedule, num_shards=config.shards
    )
    plan = even_plan(run.plan.num_blocks, config.stages)
    job.check(layout, run.wide_model, plan)
    sync = config.sync or default_sync(
        device, config.stages, layout.world_size, False, config.shards
    )
    return replace(run, config=replace(config, sync=sync), job=job, layout=layout, plan=plan)


def ways_options(run: Run) -> dict[str, str]:
    """Return the options that the costs of all ways depend on, as text by name."""
    names = "dropout", "microbatches"
    return {**cost_options(run), **{name: str(getattr(run.config, name)) for name in names}}


def measure_ways(run: Run, rank: int, device: torch.device, num_ranks: int) -> Measured:
    """Measure every way to use m = num_ranks ranks; all ranks of this world, maybe fewer, call it.

    The run is that of one rank; only rank 0 gets to know the costs of pipelines.
    """
    world = _World(rank, dist.get_world_size() if dist.is_initialized() else 1, device)
    base_bytes = max(world.gathered(peak_bytes(device)))
    ways: list[MeasuredWay] = []
    shares: dict[int, _Share] = {}
    pipelines: dict[int, Run] = {}
    for i, candidate in enumerate(list_ways(run.config, num_ranks)):
        words = " ".join(as_given(name, value) for name, value in candidate.options.items())
        blank = MeasuredWay(candidate.name, words, candidate.is_same, 1, 1)
        try:
            of_way = arrange(run, candidate, device)
        except InputError as error:
            line = "".join(c for c in str(error) if c.isprintable())
            ways.append(replace(blank, why_not=line[:400]))  # a longer one is not read again
            continue
        layout = of_way.layout
        steps = of_way.steps_per_epoch
        way = replace(blank, num_ranks=layout.world_size, steps_per_epoch=steps)
        needed, room = _needs(of_way), memory_bytes() - world.size * base_bytes
        if device.type == "cuda":
            room = torch.cuda.mem_get_info(device)[0]
        at_once = min(world.size, layout.world_size)
        if not has_own_cores(device):
            at_once = min(at_once, int(room // max(1, needed)))
        if at_once < 1 or needed > room:
            why = f"a rank's share of a step would take about {needed / 1e9:,.1f} GB to measure"
            way = replace(way, why_not=f"{why}, and there are {max(0, room) / 1e9:,.1f} GB")
        elif layout.pipeline_size > 1:
            pipelines[i] = of_way
        else:
            way, rehearsal = _count_shares(way, of_way, world, base_bytes, at_once)
            shares[i] = _Share(rehearsal, at_once)
        ways.append(way)
    meter = LinkMeter(rank, world.size, device)
    for i, seconds in _time_shares(shares, world, meter).items():
        missing = ways[i].num_ranks - len(seconds)
        if missing > 0 and (has_own_cores(device) or len(seconds) < world.size):
            seconds += [seconds[-1]] * missing
        ways[i] = replace(ways[i], seconds=tuple(seconds))
    for i, of_way in pipelines.items():
        ways[i] = _measure_layers(ways[i], of_way, world, base_bytes, ways)
    facts = {
        "hardware": hardware(device),
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d"),
        **provenance(),
    }
    options = ways_options(run)
    return Measured(run.config.model, options, num_ranks, tuple(ways), meter.links(), facts)


class _World(NamedTuple):
    """The ranks that measure: this one, how many there are, and its device."""

    rank: int
    size: int
    device: torch.device

    def gathered(self, value: Any) -> list[Any]:
        """Return what every rank has, in their order; all ranks call this."""
        return all_gather_values(value, self.size)


class _Share(NamedTuple):
    """What this rank rehearses of a way, None for nothing, and how many ranks may do so at once."""

    rehearsal: Rehearsal | None
    at_once: int


def _count_shares(
    way: MeasuredWay, run: Run, world: _World, base_bytes: int, at_once: int
) -> tuple[MeasuredWay, Rehearsal | None]:
    """Count what a way's ranks send and hold; return also what this one rehearses of its time."""
    layout, device = run.layout, world.device
    work = _work(run)
    order = np.argsort(-work[:, 1:].sum(axis=1), kind="stable").tolist()
    counted: list[Counted] = []
    own: Rehearsal | None = None
    gradient_bytes = 0
    # Where all replicas do the same, the share of the first rank is counted.
    ranks = order if layout.num_shards > 1 else order[:1]
    mine = ranks[world.rank :: world.size]
    # A rank that counts none may rehearse one, so that as many as possible do so at once.
    for rank in mine or order[world.rank : at_once][:1]:
        rehearsal = Rehearsal(run, rank, device)
        for _ in range(NUM_WARMUP):
            rehearsal.timed()
        if mine:
            counted.append(rehearsal.count())
            gradient_bytes = rehearsal.gradient_bytes
        if own is None:
            own = rehearsal
        else:
            rehearsal.close()
    tables = [
        [each.sent_bytes, _pairs(each.given), _pairs(each.summed), each.peak_bytes]
        for each in counted
    ]
    everybody = [
        Counted(sent_bytes, Counter(dict(given)), Counter(dict(summed)), num_bytes)
        for of_rank in world.gathered(tables)
        for sent_bytes, given, summed, num_bytes in of_rank
    ]
    busiest = max(everybody, key=lambda each: each.sent_bytes)
    way = replace(
        way,
        exchanges=_as_curve(busiest.given),
        sums=_as_curve(busiest.summed),
        exchanged_bytes=sum(each.sent_bytes for each in everybody),
        gradient_bytes=max(world.gathered(gradient_bytes)),
        peak_bytes=base_bytes + max(each.peak_bytes for each in everybody),
        sources=float((work[:, 1] / np.maximum(1, work[:, 0])).max()),
    )
    return way, own


def _time_shares(
    shares: Mapping[int, _Share], world: _World, meter: LinkMeter
) -> dict[int, list[float]]:
    """Return the seconds of a step while 1, 2, ... ranks rehearse at once, by way.

    All take turns, with messages between them, so that what disturbs them hits all alike.
    """
    found: dict[tuple[int, int], list[float]] = {}
    meter.burst()
    for _ in range(NUM_ROUNDS):
        for i, share in shares.items():
            for num_ranks in dict.fromkeys((1, share.at_once)):
                steps = _rehearse(share.rehearsal, world, num_ranks)
                found.setdefault((i, num_ranks), []).extend(steps)
            meter.burst()
    seconds: dict[int, list[float]] = {}
    for i, share in shares.items():
        if share.rehearsal is not None:
            share.rehearsal.close()
        alone, together = (_middle(np.array(found[i, n])) for n in (1, share.at_once))
        counts = range(1, share.at_once + 1)
        ends = [alone, max(alone, together)]
        seconds[i] = np.interp(counts, [1, max(2, share.at_once)], ends).tolist()
    return seconds


def _rehearse(rehearsal: Rehearsal | None, world: _World, num_ranks: int) -> list[float]:
    """Let the first ranks rehearse at once, and return the seconds of each step, waits included."""
    own = rehearsal if world.rank < num_ranks else None
    number = 0
    if own is not None:
        began = time.perf_counter()
        own.timed()
        number = int(ENOUGH_SECONDS / NUM_ROUNDS / (time.perf_counter() - began))
    number = min(MAX_STEPS, max(MIN_STEPS, world.gathered(number)[0]))
    if world.size > 1:
        dist.barrier()
    steps = [] if own is None else [own.timed() for _ in range(number)]
    by_rank = np.array([of_rank for of_rank in world.gathered(steps) if of_rank])  # (ranks, s, k)
    # Ranks wait for the slowest in every exchange, so the longest stretches between them count.
    return by_rank.max(axis=0).sum(axis=1).tolist()


def _middle(values: np.ndarray) -> float:
    """Return the mean of the middle half: sub-graphs differ, and others disturb single steps."""
    ordered, quarter = np.sort(values), len(values) // 4
    return float(ordered[quarter : len(ordered) - quarter].mean())


def _measure_layers(
    way: MeasuredWay, run: Run, world: _World, base_bytes: int, before: Sequence[MeasuredWay]
) -> MeasuredWay:
    slowdown = (1.0,)
    for other in before:
        if other.num_ranks > 1 and other.seconds:  # what ranks that compute at once lose
            slowdown = tuple(max(1.0, s / other.seconds[0]) for s in other.seconds)
    profile = measure_profile(run, world.rank, world.device, [run.microbatch_size], slowdown)
    if profile is None:
        return replace(way, why_not="rank 0 knows")
    typical = run.job.typical_microbatch
    assert isinstance(typical, Amounts)
    profile = replace(profile, base_bytes=base_bytes)
    layers = Layers(profile, run.plan.stages, run.layout.num_microbatches, *typical)
    return replace(way, layers=layers)


def _work(run: Run) -> np.ndarray:
    """Return rows, rows with those of others, and edges that each rank sums, (ranks, 3)."""
    job, layout = run.job, run.layout
    assert isinstance(job, GraphJob)
    if layout.num_shards > 1 and run.config.split == "halo":
        graph, shares = job.graph, job.rank_parts
        return work_of_parts(graph.targets(), graph.sources(), shares.parts, shares.num_parts)
    return np.ones((layout.world_size, 3))


def _needs(run: Run) -> float:
    """Estimate the bytes of a rank's share of a step, to see whether it can be measured at all."""
    job, config = run.job, run.config
    assert isinstance(job, GraphJob)
    assert config.layers is not None
    assert config.width is not None
    sampler, graph = job.sampler, job.graph
    features = 0 if are_sparse(graph.features) else graph.num_features
    numbers = features + _KEPT_LAYERS * config.layers * config.width
    return sampler.most_nodes * numbers * run.dtype.itemsize / run.layout.num_shards


def _pairs(counts: Counter[int]) -> list[list[int]]:
    return [list(pair) for pair in counts.items()]


def _as_curve(counts: Counter[int]) -> tuple[tuple[float, float], ...]:
    return tuple(sorted((float(size), float(number)) for size, number in counts.items()))
