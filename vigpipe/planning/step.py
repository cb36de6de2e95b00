"""Predict one training step from a cut, a schedule and a number of micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vigpipe.config.choices import Sync
from vigpipe.planning.memory import rank_bytes
from vigpipe.planning.profile import Amounts, Piece, Profile, Size
from vigpipe.planning.simulate import StageCosts, bubble, simulate
from vigpipe.schedules import Orders, Schedule, messages_ahead, orders
from vigpipe.spans import Span, step_seconds

Stages = tuple[tuple[int, ...], ...]  # block indices of every stage, in the order of the stages


@dataclass(frozen=True)
class Request:
    """The layouts to choose from, and the limits that they must keep to."""

    num_ranks: int  # S, of one pipeline
    num_replicas: int  # D, copies of the pipeline
    batch_size: int  # B, samples of a step over all replicas
    microbatches: tuple[int, ...]  # numbers M to choose from
    # Pairs of a schedule and virtual stages per rank to choose from.
    schedules: tuple[tuple[Schedule, int], ...] = (("gpipe", 1), ("1f1b", 1))
    memory_limit_bytes: int | None = None  # of a rank, Profile.base_bytes included
    ranks_per_host: int | None = None  # filled in the order of ranks; None if one host has all
    sync: Sync = "double"
    typical: Amounts | None = None  # a micro-batch's size where each is drawn; None if B is cut

    @property
    def most_microbatches(self) -> int:
        if self.typical is None:
            return self.batch_size // self.num_replicas
        return max(self.microbatches)

    def num_samples(self, num_microbatches: int) -> float:
        """Return the samples, or rows, of a step over all replicas."""
        if self.typical is None:
            return self.batch_size
        return self.num_replicas * num_microbatches * self.typical.rows


@dataclass(frozen=True)
class Proposal:
    """A layout, of V virtual stages a rank and M micro-batches a replica, and what it may cost."""

    stages: Stages
    schedule: Schedule
    virtual_stages: int
    num_microbatches: int
    step_seconds: float
    bubble: float  # the share of the schedule in which ranks wait
    memory_bytes: tuple[int, ...]  # of every rank of one pipeline, Profile.base_bytes included
    costs: StageCosts = field(repr=False)
    spans: tuple[Span, ...] = field(repr=False)  # of all ranks


def predict(
    profile: Profile,
    request: Request,
    stages: Stages,
    schedule: Schedule,
    virtual_stages: int,
    num_microbatches: int,
    costs: StageCosts | None = None,
) -> Proposal:
    """Simulate a step of one cut; costs replace those of the profile, for "what if" questions.

    M must be legal for the schedule, and M × D at most the batch size.
    """
    order = orders(schedule, request.num_ranks, virtual_stages, num_microbatches)
    if costs is None:
        costs = stage_costs(profile, request, stages, num_microbatches)
    spans = simulate_step(profile, request, order, costs, schedule)
    return Proposal(
        stages,
        schedule,
        virtual_stages,
        num_microbatches,
        step_seconds(spans),
        bubble(spans),
        memory_bytes(profile, request, order, stages, num_microbatches),
        costs,
        tuple(spans),
    )


def simulate_step(
    profile: Profile,
    request: Request,
    order: Orders,
    costs: StageCosts,
    schedule: Schedule,
    *,
    distinct: bool = False,
) -> list[Span]:
    """Simulate a step with the request's replicas and hosts; for `distinct` see `simulate`."""
    return simulate(
        order,
        costs,
        request.num_replicas,
        profile.slowdown,
        request.ranks_per_host,
        reduce_before_send=request.sync == "ddp",
        ahead=messages_ahead(schedule, profile.device),
        distinct=distinct,
    )


def microbatch_sizes(request: Request, num_microbatches: int) -> tuple[Size, ...]:
    """Return the size of each micro-batch of replica 0, the largest first.

    B samples are cut into D * M micro-batches whose sizes differ by at most one. The first replica
    has the larger ones, and the others wait for it. Micro-batches that are drawn count as equal.
    """
    if request.typical is not None:
        return (request.typical,) * num_microbatches
    smallest, larger = divmod(request.batch_size, request.num_replicas * num_microbatches)
    return tuple(smallest + (m < larger) for m in range(num_microbatches))


def pieces_of(profile: Profile, blocks: Sequence[int]) -> list[Piece]:
    """List the pieces of a stage: the stem goes with the first block, the readout with the last."""
    pieces = [profile.blocks[i] for i in blocks]
    if blocks[0] == 0:
        pieces.insert(0, profile.stem)
    if blocks[-1] == len(profile.blocks) - 1:
        pieces.append(profile.readout)
    return pieces


def stage_costs(
    profile: Profile, request: Request, stages: Stages, num_microbatches: int
) -> StageCosts:
    """Compute what every stage of a cut costs, in seconds by stage and micro-batch.

    A transfer takes latency + bytes / bandwidth. Its bytes are those of the largest micro-batch,
    because the others are padded to its size; a stage drops the padding before it computes. Adding
    gradients up over D replicas goes around a ring: 2(D - 1) latencies, and 2(D - 1) / D of the
    bytes. The optimizer's time is shared out in proportion to the bytes of the weights.
    """
    sizes = microbatch_sizes(request, num_microbatches)
    distinct_sizes = sorted(set(sizes))
    pieces = [pieces_of(profile, blocks) for blocks in stages]
    forward = [[sum(profile.at(p.forward, n) for p in s) for n in distinct_sizes] for s in pieces]
    backward = [[sum(profile.at(p.backward, n) for p in s) for n in distinct_sizes] for s in pieces]
    size_index = [distinct_sizes.index(n) for n in sizes]
    transfers = [boundary_seconds(profile, blocks[-1], sizes[0]) for blocks in stages[:-1]]
    # A stage that begins where nothing before it is trained sends no gradients back.
    num_leading = profile.num_leading
    back = [
        0.0 if blocks[-1] < num_leading else seconds
        for blocks, seconds in zip(stages[:-1], transfers, strict=True)
    ]
    weights = [sum(piece.num_trained_bytes for piece in s) for s in pieces]
    num_ranks = request.num_ranks
    return StageCosts(
        forward=[[by_size[i] for i in size_index] for by_size in forward],
        backward=[[by_size[i] for i in size_index] for by_size in backward],
        features=transfers,
        gradients=back,
        dispatch=profile.dispatch_seconds,
        reduce=[reduce_seconds(profile, request, size, len(stages)) for size in weights],
        update=[
            update_seconds(profile, sum(weights[rank::num_ranks])) for rank in range(num_ranks)
        ],
    )


def reduce_seconds(
    profile: Profile, request: Request, weight_bytes: float, num_stages: int
) -> float:
    """Compute the seconds of adding up a stage's gradients over the replicas; 0 with only one."""
    # The stages of a rank share the latency, but DDP adds up each stage on its own.
    at_once = 1 if request.sync == "ddp" else num_stages // request.num_ranks
    width = 2 if request.sync == "double" else 1  # float64 sums of float32 gradients
    steps = 2 * (request.num_replicas - 1)
    traffic = steps / request.num_replicas * width * weight_bytes
    return steps * profile.latency_seconds / at_once + traffic / profile.bandwidth


def update_seconds(profile: Profile, weight_bytes: float) -> float:
    """Compute the seconds of the optimizer step on a rank with so many bytes of weights."""
    shared = profile.update_seconds - profile.fixed_seconds
    return profile.fixed_seconds + shared * weight_bytes / max(1, profile.trained_bytes)


def boundary_seconds(profile: Profile, block: int, microbatch_size: Size) -> float:
    """Compute the seconds of sending a block's output, or its gradient, to another rank."""
    size = profile.boundary_bytes(profile.blocks[block], microbatch_size)
    return profile.latency_seconds + size / profile.bandwidth


def memory_bytes(
    profile: Profile, request: Request, order: Orders, stages: Stages, num_microbatches: int
) -> tuple[int, ...]:
    """Compute the peak memory of every rank of one pipeline, Profile.base_bytes included."""
    largest = microbatch_sizes(request, num_microbatches)[0]
    return tuple(
        profile.base_bytes
        + rank_bytes(
            profile,
            actions,
            {i: pieces_of(profile, stages[i]) for i in range(rank, len(stages), request.num_ranks)},
            largest,
        )
        for rank, actions in enumerate(order)
    )
