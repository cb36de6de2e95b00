"""Measure what nodes and edges take in training, so that parts can be balanced by it."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from vigpipe.graphs.items import steps_per_epoch, sub_graphs
from vigpipe.graphs.partitions.generations import Rates, fit_rates
from vigpipe.graphs.samplers.parts import Parts
from vigpipe.parallel.layout import Layout
from vigpipe.parallel.values import broadcast_value

_KEY = "seconds per node and per edge, of each generation of parts"


class Repartition:
    """Ends each generation of parts with the times that its sub-graphs took on all ranks.

    The replicas of the layout take every step together. `num_steps` are those of the run, which may
    be made longer later.
    """

    def __init__(self, sampler: Parts, layout: Layout, num_steps: int) -> None:
        self._sampler, self._generations = sampler, sampler.generations
        self._layout, self._num_steps = layout, num_steps
        self._sizes: list[tuple[int, int]] = []  # nodes and edges that were measured
        self._seconds: list[float] = []
        self._is_warm = False

    def hear(self, step: int, measured: int, busy_seconds: Sequence[float]) -> str | None:
        steps, generations = steps_per_epoch(self._sampler, self._layout), self._generations
        epoch, next_epoch = step // steps + 1, (step + 1) // steps + 1
        number = generations.number(epoch)
        if measured >= 0 and generations.number(measured // steps + 1) == number:
            self._add(measured, busy_seconds)
        new_number = generations.number(next_epoch)
        if new_number == number:
            return None
        sizes, seconds = self._sizes, self._seconds
        if len(generations.rates) < new_number:
            # Different processors may fit rates that differ in the last bits.
            rates = broadcast_value(fit_rates(sizes, seconds), self._layout.world_size)
            generations.rates += [rates] * (new_number - len(generations.rates))
        self._sizes, self._seconds = [], []
        if step + 1 == self._num_steps:
            return None
        return f"parts from epoch {next_epoch} on: {generations.describe(new_number)}"

    def _add(self, step: int, busy_seconds: Sequence[float]) -> None:
        """Keep the size of each replica's sub-graphs in a step, and the time of all its stages."""
        if not any(busy_seconds):  # there is no step before the first one
            return
        if not self._is_warm:
            self._is_warm = True
            return
        of_replica = np.zeros(self._layout.num_replicas)
        for rank, seconds in enumerate(busy_seconds):
            of_replica[self._layout.replica_index(rank)] += seconds
        for replica, seconds in enumerate(of_replica.tolist()):
            epoch, numbers = sub_graphs(step, replica, self._sampler, self._layout)
            taken = [number for number in numbers if number is not None]
            if taken and seconds > 0:
                nodes = sum(self._sampler.num_nodes(epoch, number) for number in taken)
                edges = sum(self._sampler.num_edges(epoch, number) for number in taken)
                self._sizes.append((nodes, edges))
                self._seconds.append(seconds)

    def progress(self) -> dict[str, object]:
        return {_KEY: [list(rates) for rates in self._generations.rates]}

    def restore(self, progress: Mapping[str, object]) -> None:
        pairs = progress.get(_KEY)
        if not isinstance(pairs, list):
            raise ValueError(f"it has no {_KEY!r}")
        for pair in pairs:
            if not (
                isinstance(pair, list)
                and len(pair) == 2
                and all(type(rate) is float and 0 <= rate < math.inf for rate in pair)
            ):
                raise ValueError(f"{pair!r} are not seconds per node and per edge")
        self._generations.rates[:] = [Rates(*pair) for pair in pairs]
