"""One predicted step: what a given cut, schedule and number of micro-batches cost."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vigpipe.config.choices import Sync
from vigpipe.planning.memory import rank_bytes
from vigpipe.planning.profile import Piece, Profile
from vigpipe.planning.simulate import StageCosts, bubble, simulate
from vigpipe.schedules import VIRTUAL, Orders, Schedule, orders
from vigpipe.spans import Span, step_seconds

Stages = tuple[tuple[int, ...], ...]  # block numbers of every stage, virtual ones counted


@dataclass(frozen=True)
class Request:
    """What a plan is wanted for.

    Attributes:
        num_ranks: S, of one pipeline.
        num_replicas: D.
        batch_size: B, samples of a step over all replicas.
        microbatches: numbers M to choose from.
        schedules: (schedule, virtual stages) to choose from.
        memory_limit_bytes: of a rank, Profile.base_bytes included; None: no limit.
        ranks_per_host: hosts are filled in the order of ranks; None: one host has them all.
        sync: how replicas' gradients are added up.
    """

    num_ranks: int
    num_replicas: int
    batch_size: int
    microbatches: tuple[int, ...]
    schedules: tuple[tuple[Schedule, int], ...] = (("gpipe", 1), ("1f1b", 1))
    memory_limit_bytes: int | None = None
    ranks_per_host: int | None = None
    sync: Sync = "double"


@dataclass(frozen=True)
class Proposal:
    """A layout and what it is predicted to cost.

    Attributes:
        stages: block numbers of every stage, virtual ones counted.
        schedule: its name.
        virtual_stages: V, stages each rank holds.
        num_microbatches: M, of one replica.
        step_seconds: of a training step.
        bubble: share of the schedule that ranks wait.
        memory_bytes: of every rank of one pipeline, Profile.base_bytes included.
        costs: of the stages.
        spans: of all ranks.
    """

    stages: Stages
    schedule: Schedule
    virtual_stages: int
    num_microbatches: int
    step_seconds: float
    bubble: float
    memory_bytes: tuple[int, ...]
    costs: StageCosts = field(repr=False)
    spans: tuple[Span, ...] = field(repr=False)


def predict(
    profile: Profile,
    request: Request,
    stages: Stages,
    schedule: Schedule,
    virtual_stages: int,
    num_microbatches: int,
    costs: StageCosts | None = None,
) -> Proposal:
    """Simulate a step of a given layout.

    Args:
        profile: costs of the pieces.
        request: of it num_ranks, num_replicas, batch_size, ranks_per_host and sync.
        stages: the cut.
        schedule: its name.
        virtual_stages: V.
        num_microbatches: M; legal for the schedule, and M * D at most the batch.
        costs: to use instead of those of the cut, for "what if".
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
    """The spans of a step on the request's machine; `distinct` as in `simulate`."""
    return simulate(
        order,
        costs,
        request.num_replicas,
        profile.slowdown,
        request.ranks_per_host,
        reduce_before_send=request.sync == "ddp",
        ask_ahead=schedule in VIRTUAL,
        distinct=distinct,
    )


def microbatch_sizes(request: Request, num_microbatches: int) -> tuple[int, ...]:
    """Samples of each micro-batch of replica 0, the largest first.

    B samples are cut into D * M micro-batches whose sizes differ by at most one. The first replica
    has the larger ones, and the others wait for it.
    """
    smallest, larger = divmod(request.batch_size, request.num_replicas * num_microbatches)
    return tuple(smallest + (m < larger) for m in range(num_microbatches))


def pieces_of(profile: Profile, blocks: Sequence[int]) -> list[Piece]:
    """A stage's pieces: the stem goes with the first block, the readout with the last."""
    pieces = [profile.blocks[i] for i in blocks]
    if blocks[0] == 0:
        pieces.insert(0, profile.stem)
    if blocks[-1] == len(profile.blocks) - 1:
        pieces.append(profile.readout)
    return pieces


def stage_costs(
    profile: Profile, request: Request, stages: Stages, num_microbatches: int
) -> StageCosts:
    """The seconds of every stage of a cut.

    A transfer takes latency + bytes / bandwidth, for the largest micro-batch: the others are padded
    to it, and the padding is dropped before a stage computes. Adding up over D replicas goes around
    a ring: 2(D - 1) latencies, and 2(D - 1) / D of the bytes. The optimizer's share goes by bytes
    of weights.
    """
    sizes = microbatch_sizes(request, num_microbatches)
    pieces = [pieces_of(profile, blocks) for blocks in stages]
    forward = [[sum(profile.at(p.forward, n) for p in s) for n in sorted({*sizes})] for s in pieces]
    backward = [
        [sum(profile.at(p.backward, n) for p in s) for n in sorted({*sizes})] for s in pieces
    ]
    which = [sorted({*sizes}).index(n) for n in sizes]
    transfers = [boundary_seconds(profile, blocks[-1], sizes[0]) for blocks in stages[:-1]]
    weights = [sum(piece.parameter_bytes for piece in s) for s in pieces]
    num_ranks = request.num_ranks
    return StageCosts(
        forward=[[own[i] for i in which] for own in forward],
        backward=[[own[i] for i in which] for own in backward],
        features=transfers,
        gradients=transfers,
        dispatch=profile.dispatch_seconds,
        reduce=[reduce_seconds(profile, request, size, len(stages)) for size in weights],
        update=[
            update_seconds(profile, sum(weights[rank::num_ranks])) for rank in range(num_ranks)
        ],
    )


def reduce_seconds(
    profile: Profile, request: Request, weight_bytes: float, num_stages: int
) -> float:
    """All-reduce of a stage's gradients, its share of the latency where a rank has several."""
    # A rank adds up all of its stages at once, DDP each on its own.
    at_once = 1 if request.sync == "ddp" else num_stages // request.num_ranks
    width = 2 if request.sync == "double" else 1  # float64 sums of float32 gradients
    steps = 2 * (request.num_replicas - 1)
    traffic = steps / request.num_replicas * width * weight_bytes
    return steps * profile.latency_seconds / at_once + traffic / profile.bandwidth


def update_seconds(profile: Profile, weight_bytes: float) -> float:
    """Optimizer step of a rank with so many bytes of weights."""
    shared = profile.update_seconds - profile.fixed_seconds
    return profile.fixed_seconds + shared * weight_bytes / max(1, profile.parameter_bytes)


def boundary_seconds(profile: Profile, block: int, microbatch_size: int) -> float:
    """Transfer of what a block hands on, or of its gradient."""
    size = profile.at(profile.blocks[block].boundary_bytes, microbatch_size)
    return profile.latency_seconds + size / profile.bandwidth


def memory_bytes(
    profile: Profile, request: Request, order: Orders, stages: Stages, num_microbatches: int
) -> tuple[int, ...]:
    """Of every rank of one pipeline, Profile.base_bytes included."""
    microbatch_size = microbatch_sizes(request, num_microbatches)[0]
    return tuple(
        profile.base_bytes
        + rank_bytes(
            profile,
            own,
            {i: pieces_of(profile, stages[i]) for i in range(rank, len(stages), request.num_ranks)},
            microbatch_size,
        )
        for rank, own in enumerate(order)
    )
