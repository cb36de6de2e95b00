"""Search the best layout for a profile: cut, schedule and number of micro-batches.

1. For every legal schedule and M, dynamic programming finds the best cuts by a formula (`cuts.py`)
   that is exact for GPipe on ranks that do not share processors.
2. The most promising of them are simulated with the schedule, transfers, shared processors and
   all-reduce.
3. Starting from the best, one stage gives a block away and another takes one, as long as that makes
   the step shorter.

Steps 2 and 3 end when MAX_ACTIONS forwards and backwards have been simulated.
"""

from collections.abc import Iterable, Iterator

from vigpipe.errors import InputError
from vigpipe.planning.candidate import Candidate
from vigpipe.planning.cuts import Bounds
from vigpipe.planning.profile import Profile
from vigpipe.planning.simulate import num_simulated
from vigpipe.planning.step import Proposal, Request, predict, simulate_step, stage_costs
from vigpipe.schedules import Schedule, is_legal
from vigpipe.spans import step_seconds

MAX_ACTIONS = 60_000
NUM_PROPOSALS = 3
_NEAR = 1.3  # largest estimate of a layout that is simulated, relative to the best step


def search(profile: Profile, request: Request) -> list[Proposal]:
    """Find the best layouts, the fastest first, then by memory; raises InputError without any."""
    candidates = _candidates(profile, request)
    for candidate in candidates:
        candidate.find_cuts()
    feasible = [candidate for candidate in candidates if candidate.cuts]
    if not feasible:
        raise InputError(_what_would_fit(request, candidates))
    evaluated = _Evaluated(profile, request)
    feasible.sort(key=lambda candidate: candidate.estimate(candidate.cuts[0]))
    for candidate in feasible:
        if len(evaluated.seconds) > 1 and (
            evaluated.num_actions > MAX_ACTIONS / 2
            or candidate.estimate(candidate.cuts[0]) > _NEAR * evaluated.best
        ):
            break
        evaluated.evaluate(candidate, candidate.cuts[0])
    for candidate in dict.fromkeys(candidate for candidate, _ in evaluated.ranking()):
        for bounds in candidate.cuts:
            if evaluated.evaluate(candidate, bounds) <= _NEAR * evaluated.best:
                evaluated.climb(candidate, bounds)
            if evaluated.num_actions > MAX_ACTIONS:
                break
    ranking = sorted(
        evaluated.ranking()[: 4 * NUM_PROPOSALS],
        key=lambda key: (float(f"{evaluated.seconds[key]:.6g}"), max(key[0].bytes_by_rank(key[1]))),
    )
    return [
        predict(
            profile, request, c.stages(bounds), c.schedule, c.virtual_stages, c.num_microbatches
        )
        for c, bounds in ranking[:NUM_PROPOSALS]
    ]


class _Evaluated:
    """The layouts that have been simulated so far: their step seconds."""

    def __init__(self, profile: Profile, request: Request) -> None:
        self.profile, self.request = profile, request
        self.seconds: dict[tuple[Candidate, Bounds], float] = {}
        self.num_actions = 0  # forwards and backwards that have been simulated for them

    @property
    def best(self) -> float:
        return min(self.seconds.values())

    def ranking(self) -> list[tuple[Candidate, Bounds]]:
        return sorted(self.seconds, key=lambda key: self.seconds[key])

    def evaluate(self, candidate: Candidate, bounds: Bounds) -> float:
        """Return the step seconds of a layout, simulated at the first call."""
        key = candidate, bounds
        if key not in self.seconds:
            profile, request = self.profile, self.request
            stages, order = candidate.stages(bounds), candidate.order
            costs = stage_costs(profile, request, stages, candidate.num_microbatches)
            num_replicas = num_simulated(
                request.num_ranks, request.num_replicas, profile.slowdown, request.ranks_per_host
            )
            self.num_actions += num_replicas * sum(map(len, order))
            spans = simulate_step(profile, request, order, costs, candidate.schedule, distinct=True)
            self.seconds[key] = step_seconds(spans)
        return self.seconds[key]

    def climb(self, candidate: Candidate, bounds: Bounds) -> None:
        """Move single blocks from one stage to another while that makes the step shorter."""
        while True:
            for other in sorted(_neighbours(bounds), key=candidate.estimate):
                if self.num_actions > MAX_ACTIONS:
                    return
                if candidate.is_within_memory(other) and (
                    self.evaluate(candidate, other) < self.seconds[candidate, bounds]
                ):
                    bounds = other
                    break
            else:
                return


def _neighbours(bounds: Bounds) -> Iterator[Bounds]:
    """Yield the cuts in which one stage has one block less and another stage has one more."""
    edges = range(1, len(bounds) - 1)
    for first in edges:
        for last in range(first, len(bounds) - 1):
            for step in (-1, 1):
                moved = [*bounds[:first], *(k + step for k in bounds[first : last + 1])]
                moved += bounds[last + 1 :]
                if moved[first - 1] < moved[first] and moved[last] < moved[last + 1]:
                    yield tuple(moved)


def _candidates(profile: Profile, request: Request) -> list[Candidate]:
    num_blocks, num_ranks = len(profile.blocks), request.num_ranks
    schedules: list[tuple[Schedule, int]] = [
        (name, v) for name, v in request.schedules if num_ranks * v <= num_blocks
    ]
    if not schedules:
        fewest = num_ranks * min(v for _, v in request.schedules)
        raise InputError(
            f"--stages {num_ranks}: {fewest} stages for the {num_blocks} blocks of {profile.model} "
            f"(virtual ones counted); a stage needs at least one block, so choose at most "
            f"{num_blocks}"
        )
    most = request.most_microbatches
    legal = [
        Candidate(profile, request, schedule, virtual_stages, num_microbatches)
        for schedule, virtual_stages in schedules
        for num_microbatches in sorted({*request.microbatches})
        if num_microbatches <= most
        and is_legal(schedule, num_ranks, virtual_stages, num_microbatches)
    ]
    if not legal:
        names = ", ".join(dict.fromkeys(name for name, _ in schedules))
        is_batch = request.typical is None
        batch = f", --batch-size {request.batch_size}" if is_batch else ""
        bound = f"at most {most} (batch size / replicas), " if is_batch else ""
        raise InputError(
            f"--microbatches {', '.join(map(str, request.microbatches))}: none goes with "
            f"--stages {num_ranks}, --dp {request.num_replicas}{batch} and --schedule {names}; "
            f"choose {bound}at least {num_ranks} for 1f1b and a multiple of it for interleaved1f1b"
        )
    return legal


def _what_would_fit(request: Request, candidates: Iterable[Candidate]) -> str:
    """Write the message for a memory limit that no layout keeps to."""
    leanest = [(max(c.bytes_by_rank(c.leanest_cut)), c) for c in candidates]
    need, candidate = min(leanest, key=lambda pair: pair[0])
    rank = candidate.bytes_by_rank(candidate.leanest_cut).index(need)
    indices = range(rank, candidate.num_stages, request.num_ranks)
    stages = candidate.stages(candidate.leanest_cut)
    names = " and ".join(f"{i} (blocks {stages[i][0]} to {stages[i][-1]})" for i in indices)
    return (
        f"--memory-limit: no plan fits {request.memory_limit_bytes:,} bytes a rank; the smallest "
        f"limit that would is {need:,} bytes, which stage {names} needs with --schedule "
        f"{candidate.schedule} and --microbatches {candidate.num_microbatches}; raise the limit, "
        "or choose more stages or a smaller batch"
    )
