"""The wide model of sub-networks in evaluations: every replica puts it together."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vigpipe.model.gnn.columns import WideShare
from vigpipe.model.norm import PooledStatistics
from vigpipe.model.staged import StagedModel
from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.parallel.schedule import Pipeline


class MergedImageModel:
    """A rank's stages of the wide model, whose tensors are empty; see `job.feed.Merged`."""

    def __init__(self, stages: Sequence[StagedModel], share: WideShare, pipeline: Pipeline) -> None:
        self._share, self._pipeline = share, pipeline
        self._state = {k: v for stage in stages for k, v in stage.state_dict().items()}
        self._statistics = PooledStatistics(stages, pipeline.num_microbatches)
        names = {id(b): name for stage in stages for name, b in stage.named_buffers()}
        self._running = [names[id(statistic)] for statistic in self._statistics.running]

    @torch.no_grad()
    def take_over(self) -> None:
        """Fill the stages' tensors with what all ranks store."""
        slicing, columns = self._share.slicing, self._share.columns
        for name, tensor in self._state.items():
            dim = slicing.owned(name)
            if dim is None:
                tensor.copy_(self._share.whole[name])
                continue
            own = self._share.owned[name].to(tensor.device)
            for rank in range(columns.size):
                entries = slicing.owned_entries(name, columns.size, rank).to(tensor.device)
                tensor.index_copy_(dim, entries, columns.from_(rank, own))

    def logits(self, batch: ReplicaBatch) -> Tensor | None:
        return self._pipeline.logits(batch)

    @torch.no_grad()
    def estimate_statistics(
        self, read: Callable[[int], ReplicaBatch], items: Sequence[int]
    ) -> None:
        slicing, columns = self._share.slicing, self._share.columns
        found: list[Tensor] = []
        for first in range(0, len(items), columns.size):
            number = first + columns.rank
            if number < len(items):
                self._pipeline.forward_only(read(items[number]))
            found.append(self._statistics.take())  # Zeros, if this rank had no batch.
        own = torch.cat(found)
        stats = [columns.from_(rank, own) for rank in range(columns.size)]
        self._statistics.update(torch.cat(stats), momentum=1.0)
        for name in self._running:
            dim, tensor = slicing.owned(name), self._state[name]
            if dim is None:
                self._share.whole[name].copy_(tensor)
            else:
                entries = slicing.owned_entries(name, columns.size, columns.rank)
                owned = tensor.index_select(dim, entries.to(tensor.device))
                self._share.owned[name].copy_(owned)
