"""The batches of one rank that trains on a graph: M sub-graphs an item (`vigpipe.graphs.items`).

Every stage makes the edges that it needs from graph, seed and item, so only features travel. A
thread draws the sub-graphs of the next item, and looks up their features and labels, while the
trainer works on the one before.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vigpipe.graphs.ahead import Ahead
from vigpipe.graphs.features import StoredFeatures, are_sparse, for_model, in_memory
from vigpipe.graphs.graph import TRAIN, UNKNOWN, Graph
from vigpipe.graphs.items import num_training_nodes, sub_graphs
from vigpipe.graphs.repartition import Repartition
from vigpipe.graphs.samplers.sampler import Sampler
from vigpipe.graphs.samplers.whole import whole
from vigpipe.graphs.split.sharding import Shard, Sharding, Unsharded
from vigpipe.graphs.stored_rows import Rows, StoredRows
from vigpipe.job.feed import Needs
from vigpipe.model.keyed_dropout import PADDING, sample_keys
from vigpipe.ops.adjacency import Layered
from vigpipe.parallel.batch import NO_LABEL, ReplicaBatch

_OF_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}
_MOST_AHEAD = 1  # items that are made ahead; each takes the memory of its features


class GraphFeed:
    """The batches of one rank; `seed` is that of the keys of dropout."""

    def __init__(
        self,
        graph: Graph,
        sampler: Sampler,
        seed: int,
        needs: Needs,
        *,
        repartition: Repartition | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        self._graph, self._sampler, self._seed = graph, sampler, seed
        self._sharding = sharding or Unsharded()
        self._repartition = repartition
        self._layout, self._device, self._dtype = needs.layout, needs.device, needs.dtype
        self._has_first, self._has_last = needs.has_first, needs.has_last
        self._is_sparse = are_sparse(graph.features)
        # The whole graph need not be drawn; parts that follow measurements may not be known yet.
        is_ahead = not sampler.takes_all and repartition is None
        self._ahead = Ahead(self._batch, _MOST_AHEAD if is_ahead else 0)

    def batch(self, item: int, ahead: Sequence[int] = ()) -> ReplicaBatch:
        return self._ahead.take(item, ahead)

    def _batch(self, item: int) -> ReplicaBatch:
        layout, bound = self._layout, self._sharding.most(self._sampler.most_nodes)
        step, replica = divmod(item, layout.num_replicas)
        epoch, numbers = sub_graphs(step, replica, self._sampler, layout)
        drawn = [None if n is None else self._draw(epoch, n, step) for n in numbers]
        sizes = tuple(0 if shard is None else len(shard.nodes) for shard in drawn)
        first = item * layout.num_microbatches
        keys = torch.full((layout.num_microbatches, bound), PADDING)
        for i, (shard, size) in enumerate(zip(drawn, sizes, strict=True)):
            if shard is not None:
                nodes = torch.from_numpy(shard.nodes)
                keys[i, :size] = sample_keys(self._seed, first + i, nodes)
        return ReplicaBatch(
            step,
            num_training_nodes(item, self._sampler, layout),
            sizes,
            keys.flatten(),
            self._inputs(drawn, bound) if self._has_first else None,
            self._labels(drawn) if self._has_last else None,
            tuple(() if s is None else self._structure(s) for s in drawn),
            weights=self._weights(drawn) if self._has_last else None,
            has_targets=any(
                self._sampler.has_training_nodes(epoch, n) for n in numbers if n is not None
            ),
        )

    def test_batches(
        self,
        splits: Sequence[str],
        num_pipelines: int,
        pipeline_index: int,
        most: int | None = None,
    ) -> Iterator[ReplicaBatch]:
        """Yield the whole graph.

        Every pipeline computes all of it, since the others would only wait; the first one counts.
        Features in files stay there, unless training has taken all of them into memory, or several
        ranks have some of them each.
        """
        graph, whole_graph = self._graph, self._whole
        labels = graph.labels if self._sharding.has_all else graph.labels[whole_graph.nodes]
        counts, num_rows = self._has_last and pipeline_index == 0, len(whole_graph.nodes)
        inputs, structure = None, (whole_graph.edges,)
        is_kept = not self._sharding.has_all or "_all_features" in vars(self)
        if isinstance(graph.features, StoredRows) and not is_kept:
            if self._has_first:
                inputs = torch.empty(num_rows, 0, dtype=self._dtype, device=self._device)
                stored = StoredFeatures(graph.features, self._device, self._dtype)
                structure = whole_graph.edges, stored
        else:
            inputs = self._inputs([whole_graph], num_rows) if self._has_first else None
            structure = self._structure(whole_graph)
        yield ReplicaBatch(
            0,
            graph.num_nodes,
            (num_rows,),
            torch.full((num_rows,), PADDING),
            inputs,
            torch.from_numpy(labels) if counts else None,
            (structure,),
            by_layer=True,
            samples=None if self._sharding.has_all else whole_graph.nodes,
        )

    def hear(self, step: int, measured: int, busy_seconds: Sequence[float]) -> str | None:
        if self._repartition is None:
            return None
        return self._repartition.hear(step, measured, busy_seconds)

    def progress(self) -> dict[str, object]:
        return {} if self._repartition is None else self._repartition.progress()

    def restore(self, progress: Mapping[str, object]) -> None:
        if self._repartition is not None:
            self._repartition.restore(progress)

    def close(self) -> None:
        self._ahead.close()
        self._sharding.finish()

    @cached_property
    def _whole(self) -> Shard:
        """All nodes, with the sampler's own edges where it takes all of them."""
        takes_all = self._sampler.takes_all
        sub_graph = self._sampler.draw(1, 0) if takes_all else whole(self._graph)
        is_kept = takes_all and self._has_first and not self._is_sparse
        features = self._all_features if is_kept and not self._sharding.has_all else None
        return self._sharding.shard(sub_graph, self._device, features)

    def _draw(self, epoch: int, number: int, step: int) -> Shard:
        if self._sampler.takes_all:
            shard = self._whole
        else:
            shard = self._sharding.shard(self._sampler.draw(epoch, number), self._device)
        return self._sharding.at_step(shard, step, self._device)

    @cached_property
    def _all_features(self) -> Any:
        """The features of all nodes, or of this rank's, which stay on the device."""
        features = self._graph.features
        if self._sharding.has_all:
            return self._sent(in_memory(features))
        return self._sent(features[self._sharding.own(np.arange(self._graph.num_nodes))])  # pyrefly: ignore[bad-argument-type]

    def _sent(self, rows: Rows) -> Any:
        return for_model(rows, self._is_sparse).to(self._device, self._dtype)

    def _structure(self, shard: Shard) -> tuple[Any, ...]:
        """Return what a model takes besides rows: the edges, and sparse features."""
        if self._is_sparse and self._has_first:
            return shard.edges, self._features_of(shard)
        return (shard.edges,)

    def _inputs(self, drawn: Sequence[Shard | None], bound: int) -> Tensor:
        """Return the features of all micro-batches, padded: (M * bound, d)."""
        # The tensors of a pipeline are dense: sparse features give them no columns.
        num_columns = 0 if self._is_sparse else self._graph.num_features
        first = drawn[0]
        if num_columns and len(drawn) == 1 and first is not None and len(first.nodes) == bound:
            return self._features_of(first)
        inputs = self._zeros(len(drawn), bound, num_columns)
        for rows, shard in zip(inputs, drawn, strict=True):
            if num_columns and shard is not None:
                rows[: len(shard.nodes)] = self._features_of(shard)
        return inputs.flatten(0, 1)

    def _features_of(self, shard: Shard) -> Any:
        features, nodes = self._graph.features, shard.nodes
        if self._sampler.takes_all:
            return self._all_features
        # With edges of its own for every layer, a sub-graph has its nodes in an order of its own.
        if len(nodes) < self._graph.num_nodes or isinstance(shard.edges, Layered):
            return self._sent(features[nodes])  # pyrefly: ignore[bad-argument-type]
        return self._sent(in_memory(features))

    def _zeros(self, *shape: int) -> Tensor:
        """Make zeros; NumPy's take neither time nor memory on a CPU until they are written to."""
        if self._device.type == "cpu" and self._dtype in _OF_NUMPY:
            return torch.from_numpy(np.zeros(shape, _OF_NUMPY[self._dtype]))
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def _labels(self, drawn: Sequence[Shard | None]) -> Tensor:
        """Return the labels of all micro-batches, padded; only training nodes have one."""
        graph, bound = self._graph, self._sharding.most(self._sampler.most_targets)
        dtype = self._dtype if graph.is_multi_label else torch.int64
        shape = len(drawn), bound, *graph.labels.shape[1:]
        labels = torch.full(shape, NO_LABEL, dtype=dtype)
        for rows, shard in zip(labels, drawn, strict=True):
            if shard is not None:
                nodes = shard.nodes[: shard.num_targets]
                trained = np.flatnonzero(graph.split[nodes] == TRAIN)
                of_nodes = torch.from_numpy(graph.labels[nodes[trained]])
                if graph.is_multi_label:
                    of_nodes = of_nodes.to(dtype).masked_fill(of_nodes == UNKNOWN, NO_LABEL)
                rows[torch.from_numpy(trained)] = of_nodes
        return labels.flatten(0, 1)

    def _weights(self, drawn: Sequence[Shard | None]) -> Tensor | None:
        """Return how often the loss of each row counts, padded; None if all count once."""
        if all(shard is None or shard.weights is None for shard in drawn):
            return None
        bound = self._sharding.most(self._sampler.most_targets)
        weights = torch.zeros(len(drawn), bound, dtype=self._dtype)
        for rows, shard in zip(weights, drawn, strict=True):
            if shard is not None and shard.weights is not None:
                rows[: len(shard.nodes)] = torch.from_numpy(shard.weights)
        return weights.flatten()
