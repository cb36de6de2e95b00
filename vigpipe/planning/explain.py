"""Explain a proposal: which stage limits its step, and which change would help most."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from vigpipe.errors import InputError
from vigpipe.planning.profile import Profile
from vigpipe.planning.search import search
from vigpipe.planning.simulate import StageCosts
from vigpipe.planning.step import Proposal, Request, predict
from vigpipe.schedules import Schedule, is_legal
from vigpipe.spans import COMPUTE, by_rank

_MOST_LEFT = 0.99  # largest share of the step that a change may leave to be mentioned


def explain(profile: Profile, request: Request, proposal: Proposal) -> str:
    """Say in one sentence which stage limits the step and what would make it shorter."""
    limit = f"{_limiting(request, proposal)} of every {in_seconds(proposal.step_seconds)} step"
    others = sorted(_alternatives(profile, request, proposal), key=lambda other: other[0])
    if not others or others[0][0] > _MOST_LEFT * proposal.step_seconds:
        return f"{limit}; nothing that was tried would make it 1 % shorter."
    step_seconds, what = others[0]
    change = f"{in_seconds(proposal.step_seconds)} -> {in_seconds(step_seconds)}"
    return f"{limit}; most would help {what}: {change}."


def _limiting(request: Request, proposal: Proposal) -> str:
    """Name the stages of the rank that computes longest."""
    busy = {
        rank: sum(span.seconds for span in spans if span.kind in COMPUTE)
        for rank, spans in by_rank(proposal.spans).items()
    }
    rank = max(busy, key=lambda rank: busy[rank])
    indices = range(rank % request.num_ranks, len(proposal.stages), request.num_ranks)
    names = [f"{i} ({_blocks(proposal.stages[i])})" for i in indices]
    noun, limits = ("Stage", "limits") if len(names) == 1 else ("Stages", "limit")
    return f"{noun} {' and '.join(names)} {limits}: computing takes {in_seconds(busy[rank])}"


def _alternatives(
    profile: Profile, request: Request, proposal: Proposal
) -> Iterator[tuple[float, str]]:
    """Predict the step of every alternative: pairs of step seconds and what would differ."""
    costs, num_microbatches = proposal.costs, proposal.num_microbatches
    free = [0.0] * len(costs.features)
    supposed = {"transfers that take no time": replace(costs, features=free, gradients=free)}
    if request.num_replicas > 1:
        without = replace(costs, reduce=[0.0] * len(costs.reduce))
        supposed["an all-reduce that takes no time"] = without
    supposed["stages of equal cost"] = _equal(costs)
    chosen = proposal.schedule, proposal.virtual_stages
    for what, of_other in supposed.items():
        other = predict(profile, request, proposal.stages, *chosen, num_microbatches, of_other)
        yield other.step_seconds, what
    counts = ((2 * num_microbatches, "twice"), (num_microbatches // 2, "half"))
    # Another number of micro-batches that are drawn would be another step.
    for count, name in counts if request.typical is None else ():
        what = f"{name} the micro-batches ({count})"
        yield from _searched(profile, request, chosen, count, what, proposal)
    for pair in request.schedules:
        if pair != chosen:
            schedule, virtual_stages = pair
            each = f" with {virtual_stages} stages a rank" if virtual_stages > 1 else ""
            what = f"the schedule {schedule}{each}"
            yield from _searched(profile, request, pair, num_microbatches, what, proposal)
    for num_ranks, name in ((request.num_ranks + 1, "more"), (request.num_ranks - 1, "fewer")):
        what = f"one stage {name} ({num_ranks})"
        resized = replace(request, num_ranks=num_ranks)
        yield from _searched(profile, resized, chosen, num_microbatches, what, None)


def _searched(
    profile: Profile,
    request: Request,
    schedule: tuple[Schedule, int],
    num_microbatches: int,
    what: str,
    proposal: Proposal | None,
) -> Iterator[tuple[float, str]]:
    """Predict the best step of another layout, if it is possible, with the same cut if it fits."""
    name, virtual_stages = schedule
    degrees = name, request.num_ranks, virtual_stages, num_microbatches
    if not is_legal(*degrees) or num_microbatches > request.most_microbatches:
        return
    if proposal and virtual_stages == proposal.virtual_stages:
        other = predict(profile, request, proposal.stages, name, virtual_stages, num_microbatches)
        limit = request.memory_limit_bytes
        if limit is None or max(other.memory_bytes) <= limit:
            yield other.step_seconds, what
        return
    single = replace(request, microbatches=(num_microbatches,), schedules=(schedule,))
    try:
        yield search(profile, single)[0].step_seconds, what
    except InputError:  # too many stages, or too little memory
        return


def _equal(costs: StageCosts) -> StageCosts:
    """Spread the work of all stages evenly over them."""

    def spread(values: Sequence[Sequence[float]]) -> list[list[float]]:
        mean = [sum(column) / len(values) for column in zip(*values, strict=True)]
        return [mean] * len(values)

    return replace(costs, forward=spread(costs.forward), backward=spread(costs.backward))


def _blocks(blocks: tuple[int, ...]) -> str:
    return f"block {blocks[0]}" if len(blocks) == 1 else f"blocks {blocks[0]} to {blocks[-1]}"


def in_seconds(value: float) -> str:
    """Write a number of seconds for a sentence."""
    return f"{value:.3g} s"
