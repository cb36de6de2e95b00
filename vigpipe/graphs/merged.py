"""Evaluate the wide model of sub-networks, of which every rank has a share."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vigpipe.model.gnn.by_columns import ByColumns
from vigpipe.model.gnn.columns import WideShare
from vigpipe.model.norm import merge_stats
from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.parallel.schedule import Pipeline


class MergedGraphModel:
    """A rank's share of a wide model, with a block of the channels of every layer.

    All replicas take the same nodes through the model together, and exchange blocks of features,
    not weights.
    """

    def __init__(self, stages: Sequence[ByColumns], share: WideShare, pipeline: Pipeline) -> None:
        self._stages, self._share, self._pipeline = stages, share, pipeline
        self._dtype = pipeline.stage_modules[0].dtype

    def logits(self, batch: ReplicaBatch) -> Tensor | None:
        return self._through(batch, 0, estimate=False)

    def take_over(self) -> None:
        """Do nothing: what the ranks store is what they compute with."""

    @torch.no_grad()
    def estimate_statistics(
        self, read: Callable[[int], ReplicaBatch], items: Sequence[int]
    ) -> None:
        for batch in map(read, items):
            for number, size in enumerate(batch.sizes):
                if size:
                    self._through(batch, number, estimate=True)
        for stage in self._stages:
            for name, stats in stage.take_stats().items():
                count, mean, deviation = merge_stats(stats)
                self._share.owned[f"{name}.running_mean"].copy_(mean)
                self._share.owned[f"{name}.running_var"].copy_(deviation / (count - 1).clamp(min=1))

    def _through(self, batch: ReplicaBatch, number: int, *, estimate: bool) -> Tensor | None:
        """Take the nodes of a micro-batch through the stages, from rank to rank."""
        structure, x = batch.structures[number], None
        if batch.inputs is not None:
            of_each = len(batch.inputs) // len(batch.sizes)
            x = batch.inputs[number * of_each :][: batch.sizes[number]]
        for stage in self._stages:
            if x is None:
                first = stage.model.span[0]
                rows = structure[0].of_layer(first).num_sources
                columns = stage.model.boundary_shapes(first)[0][0] // self._share.columns.size
                x = self._pipeline.rows_from_before((rows, columns), self._dtype)
            x = stage.forward(x, *structure, estimate=estimate)
            if not stage.model.has_readout and self._pipeline.has_peers:
                self._pipeline.pass_rows(x, to_next=True)
                x = None
        return x
