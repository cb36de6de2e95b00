"""Find good cuts for one schedule and number of micro-batches, from the cost of every stage."""

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
from vigpipe.schedules import Schedule, messages_ahead, orders

NUM_CUTS = 3  # cuts that the search starts from


class Candidate:
    """One schedule and number of micro-batches that a search may choose, with good cuts for it."""

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
        return tuple(tuple(range(start, end)) for start, end in pairwise(bounds))

    def bytes_by_rank(self, bounds: Bounds) -> tuple[int, ...]:
        stages = self.stages(bounds)
        return memory_bytes(self.profile, self.request, self.order, stages, self.num_microbatches)

    def is_within_memory(self, bounds: Bounds) -> bool:
        limit = self.request.memory_limit_bytes
        return limit is None or max(self.bytes_by_rank(bounds)) <= limit

    def find_cuts(self) -> None:
        """Fill `cuts` with a few that keep to the memory limit, the best by the formula first."""
        limit, base = self.request.memory_limit_bytes, self.profile.base_bytes
        allowed = [np.inf]
        if limit is not None:
            # Where a rank has one stage, the limit is exact. Where it has several, each stage must
            # keep to the limit by itself, which may not be enough for all of them together;
            # an even share of the limit for each stage is enough.
            allowed = [limit, base + (limit - base) // self.virtual_stages]
        for most in dict.fromkeys(allowed):
            is_allowed = self.needs <= most if limit is not None else self._is_stage
            for slower in dict.fromkeys((None, self.slower)):
                factor = 1 if slower is None else np.array(slower)[:, None, None]
                terms = (np.where(is_allowed, term * factor, np.inf) for term in self.terms)
                cuts = [cut for cut in best_cuts(Terms(*terms)) if self.is_within_memory(cut)]
                self.cuts += cuts[:NUM_CUTS]
            if self.virtual_stages > 1 and self.cuts and self.is_within_memory(self.counted_cut):
                self.cuts.append(self.counted_cut)  # the formula is inexact for these schedules
            if self.cuts:
                self.cuts = list(dict.fromkeys(self.cuts))
                return
        leanest = self.leanest_cut
        self.cuts = [leanest] if self.is_within_memory(leanest) else []

    @property
    def slower(self) -> tuple[float, ...] | None:
        """How many times longer each stage takes while all ranks of its host compute."""
        num_ranks = self.request.num_ranks
        world_size = num_ranks * self.request.num_replicas
        on_host = self.request.ranks_per_host or world_size
        neighbours = (
            min(on_host, world_size - rank // on_host * on_host) for rank in range(num_ranks)
        )
        factors = [stretch(self.profile.slowdown, count) for count in neighbours]
        if min(factors) == max(factors):
            return None  # it changes no cut
        return tuple(factors[p % num_ranks] for p in range(self.num_stages))

    def estimate(self, bounds: Bounds) -> float:
        """Estimate the seconds of a step by the formula of `cuts`, without a simulation."""
        seconds = value(self.terms, bounds)
        if self.virtual_stages > 1:
            # A rank works on all of its stages; only filling and draining become shorter.
            work = [self._work[i, j] for i, j in pairwise(bounds)]
            num_ranks = self.request.num_ranks
            busiest = max(sum(work[rank::num_ranks]) for rank in range(num_ranks))
            fill = (num_ranks - 1) * sum(work) / self.num_stages
            seconds = self.num_microbatches * busiest + fill
        return max(seconds, self.least_seconds)

    @cached_property
    def least_seconds(self) -> float:
        """Least seconds of a step: those it would take if no processor were ever idle."""
        request, num_ranks = self.request, self.request.num_ranks * self.request.num_replicas
        on_host = min(num_ranks, request.ranks_per_host or num_ranks)
        share = min(stretch(self.profile.slowdown, n) / n for n in range(1, on_host + 1))
        each = self._work[0, -1]
        return self.num_microbatches * each * on_host / request.num_ranks * share

    @cached_property
    def terms(self) -> Terms:
        profile, size, request = self.profile, self.microbatch_size, self.request
        repeats = self.num_microbatches - 1
        f = self._sums(lambda piece: profile.at(piece.forward, size)) + profile.dispatch_seconds
        b = self._sums(lambda piece: profile.at(piece.backward, size)) + profile.dispatch_seconds
        if request.num_ranks > 1:
            blocks = range(len(profile.blocks) - 1)
            transfers = np.array([boundary_seconds(profile, i, size) for i in blocks])
            inputs, gradients = np.zeros_like(f), np.zeros_like(b)
            back = np.where(np.arange(len(transfers)) < profile.num_leading, 0, transfers)
            inputs[1:-1], gradients[:, 1:-1] = transfers[:, None], back
            once = np.stack([f + inputs + b + gradients] * self.num_stages)
            f, b = self._with_transfers(f, inputs), self._with_transfers(b, gradients)
        else:
            once = np.stack([f + b] * self.num_stages)
        weights = self._sums(lambda piece: piece.num_trained_bytes)
        reduce = _line(lambda n: reduce_seconds(profile, request, n, self.num_stages))
        update = _line(lambda n: update_seconds(profile, n))
        if request.sync == "ddp":
            once += reduce(weights)
        if self.virtual_stages == 1:
            # The first rank is the last to end its backwards, so what it does after them counts.
            once[0] += update(weights) + (reduce(weights) if request.sync != "ddp" else 0)
        if self.schedule == "1f1b":
            # Forwards and backwards alternate, so the largest sum of a single stage counts, and not
            # the largest forward of one stage and the largest backward of another.
            f, b = f + b, np.zeros_like(b)
        f, b = (np.where(self._is_stage, repeats * one, np.inf) for one in (f, b))
        f, b = (np.stack([one] * self.num_stages) for one in (f, b))
        return Terms(f, b, once)

    def _with_transfers(self, seconds: Array, transfers: Array) -> Array:
        """Return the seconds from one micro-batch of a stage to the next.

        A transfer that a rank asks for when it needs it is added to its stage. The next one is
        hidden behind the computing of this one, as far as it does not take longer.
        """
        ahead = messages_ahead(self.schedule, self.profile.device)
        if ahead == 0:
            return seconds + transfers
        return np.maximum(seconds, (seconds + transfers) / 2) if ahead == 1 else seconds

    @cached_property
    def needs(self) -> Array:
        """Bytes that a rank with a single stage needs, for every possible stage."""
        profile, size, num_ranks = self.profile, self.microbatch_size, self.request.num_ranks
        weights = self._sums(lambda piece: memory.weight_bytes(profile, piece))
        kept = self._sums(lambda piece: memory.kept_bytes(profile, piece, size))
        working = np.zeros_like(kept)
        most = [
            max(memory.working_bytes(profile, p, size) for p in pieces) for pieces in self._blocks
        ]
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
        """The cut with the same number of blocks in every stage, as far as the count allows."""
        num_blocks = len(self.profile.blocks)
        return tuple(i * num_blocks // self.num_stages for i in range(self.num_stages + 1))

    @cached_property
    def leanest_cut(self) -> Bounds:
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
        """Seconds of one forward and backward of every possible stage."""
        profile, size = self.profile, self.microbatch_size
        return 2 * profile.dispatch_seconds + self._sums(
            lambda piece: profile.at(piece.forward, size) + profile.at(piece.backward, size)
        )

    def _sums(self, cost: Callable[[Piece], float]) -> Array:
        """Add up a cost: the result at [i, j] is that of blocks i to j - 1 together."""
        upto = np.cumsum([0.0, *(sum(map(cost, pieces)) for pieces in self._blocks)])
        return upto[None, :] - upto[:, None]


def _line(cost: Callable[[float], float]) -> Callable[[Array], Array]:
    """Turn a linear function of one size into one that takes an array of sizes."""
    constant = cost(0)
    slope = cost(1) - constant
    return lambda sizes: constant + slope * sizes
