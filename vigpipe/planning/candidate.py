"""A schedule and a number of micro-batches: what every possible stage costs, and good cuts."""

from collections import defaultdict
from collections.abc import Callable
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from vigpipe.planning import memory
from vigpipe.planning.cuts import Array, Bounds, Terms, best_cuts, even_cut, value
from vigpipe.planning.profile import Piece, Profile
from vigpipe.planning.simulate import stretch
from vigpipe.planning.step import (
    Request,
    Stages,
    boundary_seconds,
    memory_bytes,
    microbatch_sizes,
    pieces_of,
    reduce_seconds,
    update_seconds,
)
from vigpipe.schedules import Schedule, orders

NUM_CUTS = 3  # to start from


class Candidate:
    """One combination that a search may choose; its cuts are given by the bounds of the stages."""

    def __init__(
        self,
        profile: Profile,
        request: Request,
        schedule: Schedule,
        virtual_stages: int,
        num_microbatches: int,
    ) -> None:
        self.profile, self.request = profile, request
        self.schedule: Schedule = schedule
        self.virtual_stages, self.num_microbatches = virtual_stages, num_microbatches
        self.num_stages = request.num_ranks * virtual_stages
        self.order = orders(schedule, request.num_ranks, virtual_stages, num_microbatches)
        self.microbatch_size = microbatch_sizes(request, num_microbatches)[0]
        self.cuts: list[Bounds] = []

    def stages(self, bounds: Bounds) -> Stages:
        """Block numbers of every stage."""
        return tuple(tuple(range(start, end)) for start, end in pairwise(bounds))

    def bytes_by_rank(self, bounds: Bounds) -> tuple[int, ...]:
        """Memory of every rank."""
        stages = self.stages(bounds)
        return memory_bytes(self.profile, self.request, self.order, stages, self.num_microbatches)

    def is_within_memory(self, bounds: Bounds) -> bool:
        """Whether every rank keeps to the limit."""
        limit = self.request.memory_limit_bytes
        return limit is None or max(self.bytes_by_rank(bounds)) <= limit

    def find_cuts(self) -> None:
        """Fill `cuts` with a few that fit: the best by the formula first, the best of all there."""
        limit, base = self.request.memory_limit_bytes, self.profile.base_bytes
        allowed = [np.inf]
        if limit is not None:
            # Where a rank has one stage the limit is exact. Where it has several, each alone must
            # fit; that may be too little, and an even share of the limit for each is enough.
            allowed = [limit, base + (limit - base) // self.virtual_stages]
        for most in dict.fromkeys(allowed):
            is_allowed = self.needs <= most if limit is not None else self._is_stage
            for slower in dict.fromkeys((None, self.slower)):
                factor = 1 if slower is None else np.array(slower)[:, None, None]
                terms = (np.where(is_allowed, term * factor, np.inf) for term in self.terms)
                cuts = [cut for cut in best_cuts(Terms(*terms)) if self.is_within_memory(cut)]
                self.cuts += cuts[:NUM_CUTS]
            if self.virtual_stages > 1 and self.cuts and self.is_within_memory(self.counted_cut):
                self.cuts.append(self.counted_cut)  # the formula is far from these schedules
            if self.cuts:
                self.cuts = list(dict.fromkeys(self.cuts))
                return
        leanest = self.leanest_cut
        self.cuts = [leanest] if self.is_within_memory(leanest) else []

    @property
    def slower(self) -> tuple[float, ...] | None:
        """How many times as long every stage takes if all ranks of its host always compute.

        None where that is the same for all stages, and so changes no cut.
        """
        num_ranks = self.request.num_ranks
        in_all = num_ranks * self.request.num_replicas
        on_host = self.request.ranks_per_host or in_all
        first = (min(on_host, in_all - rank // on_host * on_host) for rank in range(num_ranks))
        factors = [stretch(self.profile.slowdown, count) for count in first]
        if min(factors) == max(factors):
            return None
        return tuple(factors[p % num_ranks] for p in range(self.num_stages))

    def estimate(self, bounds: Bounds) -> float:
        """About how long a step takes."""
        seconds = value(self.terms, bounds)
        if self.virtual_stages > 1:
            # A rank works on all its stages, and only fill and drain are shorter.
            work = [self._work[i, j] for i, j in pairwise(bounds)]
            num_ranks = self.request.num_ranks
            busiest = max(sum(work[rank::num_ranks]) for rank in range(num_ranks))
            fill = (num_ranks - 1) * sum(work) / self.num_stages
            seconds = self.num_microbatches * busiest + fill
        return max(seconds, self.least_seconds)

    @cached_property
    def least_seconds(self) -> float:
        """Of a step if the hosts' processors were never idle."""
        request, num_ranks = self.request, self.request.num_ranks * self.request.num_replicas
        on_host = min(num_ranks, request.ranks_per_host or num_ranks)
        share = min(stretch(self.profile.slowdown, n) / n for n in range(1, on_host + 1))
        each = self._work[0, -1]
        return self.num_microbatches * each * on_host / request.num_ranks * share

    @cached_property
    def terms(self) -> Terms:
        """Seconds of every possible stage."""
        profile, samples, request = self.profile, self.microbatch_size, self.request
        repeats = self.num_microbatches - 1
        f = self._sums(lambda piece: profile.at(piece.forward, samples)) + profile.dispatch_seconds
        b = self._sums(lambda piece: profile.at(piece.backward, samples)) + profile.dispatch_seconds
        if request.num_ranks > 1:
            # A rank asks for its input when it gets to it, so the transfer adds to its stage.
            blocks = range(len(profile.blocks) - 1)
            over = np.array([boundary_seconds(profile, i, samples) for i in blocks])
            f[1:-1] += over[:, None]
            b[:, 1:-1] += over
        once = np.stack([f + b] * self.num_stages)
        weights = self._sums(lambda piece: piece.parameter_bytes)
        reduce = _line(lambda size: reduce_seconds(profile, request, size, self.num_stages))
        update = _line(lambda size: update_seconds(profile, size))
        if request.sync == "ddp":
            once += reduce(weights)
        if self.virtual_stages == 1:
            # The first rank is the last to end its backwards.
            once[0] += update(weights) + (reduce(weights) if request.sync != "ddp" else 0)
        if self.schedule == "1f1b":
            # Forwards and backwards alternate: a stage's own sum counts, not two stages' worst.
            f, b = f + b, np.zeros_like(b)
        f, b = (np.where(self._is_stage, repeats * one, np.inf) for one in (f, b))
        return Terms(*(np.stack([one] * self.num_stages) for one in (f, b)), once)

    @cached_property
    def needs(self) -> Array:
        """Memory of a rank with only that stage, of every possible stage, in bytes."""
        profile, samples, num_ranks = self.profile, self.microbatch_size, self.request.num_ranks
        weights = self._sums(lambda piece: memory.weight_bytes(profile, piece))
        kept = self._sums(lambda piece: memory.kept_bytes(profile, piece, samples))
        working = np.zeros_like(kept)
        most = [max(memory.working_bytes(profile, p, samples) for p in own) for own in self._blocks]
        for i in range(len(most)):
            working[i, i + 1 :] = np.maximum.accumulate(most[i:])
        in_flight = [
            memory.peak(self.order[p % num_ranks], defaultdict(int, {p: 1}))
            for p in range(self.num_stages)
        ]
        needs = [profile.base_bytes + weights + n * kept + working for n in in_flight]
        return np.where(self._is_stage, needs, np.inf)

    @property
    def counted_cut(self) -> Bounds:
        """As many blocks in every stage, as far as the count allows."""
        num_blocks = len(self.profile.blocks)
        return tuple(i * num_blocks // self.num_stages for i in range(self.num_stages + 1))

    @cached_property
    def leanest_cut(self) -> Bounds:
        """The cut whose largest stage needs the least memory."""
        cut = even_cut(self.needs)
        assert cut is not None  # there are at least as many blocks as stages
        return cut

    @cached_property
    def _blocks(self) -> list[list[Piece]]:
        return [pieces_of(self.profile, (i,)) for i in range(len(self.profile.blocks))]

    @cached_property
    def _is_stage(self) -> NDArray[np.bool_]:
        size = len(self.profile.blocks) + 1
        return np.triu(np.ones((size, size), dtype=bool), 1)

    @cached_property
    def _work(self) -> Array:
        """Forward and backward of one micro-batch, of every possible stage."""
        profile, samples = self.profile, self.microbatch_size
        return 2 * profile.dispatch_seconds + self._sums(
            lambda piece: profile.at(piece.forward, samples) + profile.at(piece.backward, samples)
        )

    def _sums(self, cost: Callable[[Piece], float]) -> Array:
        """[i, j]: of blocks i to j - 1 together."""
        upto = np.cumsum([0.0, *(sum(map(cost, pieces)) for pieces in self._blocks)])
        return upto[None, :] - upto[:, None]


def _line(cost: Callable[[float], float]) -> Callable[[Array], Array]:
    """A cost that is a constant and a multiple of the size, for many sizes."""
    constant = cost(0)
    slope = cost(1) - constant
    return lambda sizes: constant + slope * sizes
