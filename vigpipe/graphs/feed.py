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
from vigpipe.graphs.graph import TRAIN, Graph
from vigpipe.graphs.items import num_training_nodes, sub_graphs
from vigpipe.graphs.repartition import Repartition
from vigpipe.graphs.samplers.sampler import Sampler
from vigpipe.graphs.samplers.whole import whole
from vigpipe.graphs.split.share import Alone, Share, Sharing
from vigpipe.graphs.stored_rows import Rows, StoredRows
from vigpipe.job.batch import NO_LABEL, ReplicaBatch
from vigpipe.model.keyed_dropout import PADDING, sample_keys
from vigpipe.ops.adjacency import Layered
from vigpipe.parallel.layout import Layout

_OF_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}
_MOST_AHEAD = 1  # items that are made ahead; each takes the memory of its features


class GraphFeed:
    """The batches of one rank.

    Args:
        graph: the graph.
        sampler: draws its sub-graphs.
        layout: the degrees.
        seed: of the keys.
        device: where the rank computes.
        dtype: of the features, and of the labels of nodes with several classes.
        has_first: whether it has the first stage, and so needs features.
        has_last: whether it has the last stage, and so needs labels.
        repartition: balances the parts of the sampler by measured time; None if nothing does.
        sharing: how the ranks of the replica share its sub-graphs; None if there is one.
    """

    def __init__(
        self,
        graph: Graph,
        sampler: Sampler,
        layout: Layout,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        has_first: bool,
        has_last: bool,
        repartition: Repartition | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        self._graph, self._sampler, self._seed = graph, sampler, seed
        self._sharing = sharing or Alone()
        self._repartition = repartition
        self._layout, self._device, self._dtype = layout, device, dtype
        self._has_first, self._has_last = has_first, has_last
        self._is_sparse = are_sparse(graph.features)
        # There is nothing to draw where all is taken, and where parts follow what was measured, the
        # next ones may not be known.
        is_ahead = not sampler.takes_all and repartition is None
        self._ahead = Ahead(self._batch, _MOST_AHEAD if is_ahead else 0)

    def batch(self, item: int, ahead: Sequence[int] = ()) -> ReplicaBatch:
        """Return the batch of a training item; see `vigpipe.job.feed.Feed.batch`."""
        return self._ahead.take(item, ahead)

    def _batch(self, item: int) -> ReplicaBatch:
        layout, bound = self._layout, self._sharing.most(self._sampler.most_nodes)
        step, replica = divmod(item, layout.num_replicas)
        num_microbatches = layout.num_microbatches
        epoch, numbers = sub_graphs(step, replica, self._sampler, layout)
        drawn = [None if n is None else self._draw(epoch, n, step) for n in numbers]
        sizes = tuple(0 if share is None else len(share.nodes) for share in drawn)
        first = (step * layout.num_replicas + replica) * num_microbatches
        keys = torch.full((num_microbatches, bound), PADDING)
        for i, (share, size) in enumerate(zip(drawn, sizes, strict=True)):
            if share is not None:
                nodes = torch.from_numpy(share.nodes)
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
        )

    def test_batches(
        self, splits: Sequence[str], num_pipelines: int, place: int, most: int | None = None
    ) -> Iterator[ReplicaBatch]:
        """Yield the whole graph; see `vigpipe.job.feed.Feed.test_batches`.

        Every pipeline computes all of it, and the first one counts: the others would only wait.
        Features in files stay there, unless training has taken all of them into memory, or several
        ranks have some of them each.
        """
        graph, whole_graph = self._graph, self._whole
        counts, num_rows = self._has_last and place == 0, len(whole_graph.nodes)
        inputs, structure = None, (whole_graph.edges,)
        is_kept = not self._sharing.is_alone or "_all_features" in vars(self)
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
            torch.from_numpy(self._labels_of(whole_graph)) if counts else None,
            (structure,),
            by_layer=True,
            samples=None if self._sharing.is_alone else whole_graph.nodes,
        )

    def hear(self, step: int, measured: int, busy_seconds: Sequence[float]) -> str | None:
        """Be told how long the ranks have worked; see `vigpipe.job.feed.Feed.hear`."""
        if self._repartition is None:
            return None
        return self._repartition.hear(step, measured, busy_seconds)

    def progress(self) -> dict[str, object]:
        """Return what its parts were balanced by."""
        return {} if self._repartition is None else self._repartition.progress()

    def restore(self, progress: Mapping[str, object]) -> None:
        """Take the parts of an earlier run; see `vigpipe.job.feed.Feed.restore`."""
        if self._repartition is not None:
            self._repartition.restore(progress)

    def close(self) -> None:
        """End the thread that draws ahead, and wait for what other ranks still send."""
        self._ahead.close()
        self._sharing.finish()

    @cached_property
    def _whole(self) -> Share:
        """All nodes, with the edges that are trained on where these are all."""
        takes_all = self._sampler.takes_all
        sub_graph = self._sampler.draw(1, 0) if takes_all else whole(self._graph)
        is_kept = takes_all and self._has_first and not self._is_sparse
        features = self._all_features if is_kept and not self._sharing.is_alone else None
        return self._sharing.share(sub_graph, self._device, features)

    def _draw(self, epoch: int, number: int, step: int) -> Share:
        """Draw a sub-graph, or take the whole graph, whose edges stay on the device."""
        if self._sampler.takes_all:
            share = self._whole
        else:
            share = self._sharing.share(self._sampler.draw(epoch, number), self._device)
        return self._sharing.at_step(share, step, self._device)

    @cached_property
    def _all_features(self) -> Any:  # noqa: ANN401
        """The features of all nodes, or of this rank's."""
        features = self._graph.features
        if self._sharing.is_alone:
            return self._sent(in_memory(features))
        return self._sent(features[self._sharing.own(np.arange(self._graph.num_nodes))])

    def _labels_of(self, share: Share) -> np.ndarray:
        labels = self._graph.labels
        return labels if self._sharing.is_alone else labels[share.nodes]

    def _features(self, nodes: np.ndarray) -> Any:  # noqa: ANN401
        """Return a tensor or SparseRows on the device; of all nodes it stays if it comes again."""
        if self._sampler.takes_all:
            return self._all_features
        if len(nodes) < self._graph.num_nodes:
            return self._sent(self._graph.features[nodes])
        return self._sent(in_memory(self._graph.features))

    def _sent(self, rows: Rows) -> Any:  # noqa: ANN401
        return for_model(rows, self._is_sparse).to(self._device, self._dtype)

    def _structure(self, share: Share) -> tuple[Any, ...]:
        """Return what a model takes besides rows: the edges, and features that are sparse."""
        if self._is_sparse and self._has_first:
            return share.edges, self._features_of(share)
        return (share.edges,)

    def _inputs(self, drawn: Sequence[Share | None], bound: int) -> Tensor:
        """Return the features of all micro-batches, padded: (M * bound, d).

        If features are sparse there are no columns, because the tensors of a pipeline are dense.
        """
        num_columns = 0 if self._is_sparse else self._graph.num_features
        first = drawn[0]
        if num_columns and len(drawn) == 1 and first is not None and len(first.nodes) == bound:
            return self._features_of(first)
        inputs = self._zeros(len(drawn), bound, num_columns)
        for rows, share in zip(inputs, drawn, strict=True):
            if num_columns and share is not None:
                rows[: len(share.nodes)] = self._features_of(share)
        return inputs.flatten(0, 1)

    def _features_of(self, share: Share) -> Any:  # noqa: ANN401
        if isinstance(share.edges, Layered):  # the nodes are in an order of their own
            return self._sent(self._graph.features[share.nodes])
        return self._features(share.nodes)

    def _zeros(self, *shape: int) -> Tensor:
        """Make zeros on the device; on a CPU, what is never written takes neither time nor room."""
        if self._device.type == "cpu" and self._dtype in _OF_NUMPY:
            return torch.from_numpy(np.zeros(shape, _OF_NUMPY[self._dtype]))
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def _labels(self, drawn: Sequence[Share | None]) -> Tensor:
        """Return the labels of all micro-batches, padded; only training nodes have one."""
        graph, bound = self._graph, self._sharing.most(self._sampler.most_targets)
        dtype = self._dtype if graph.is_multi_label else torch.int64
        shape = len(drawn), bound, *graph.labels.shape[1:]
        labels = torch.full(shape, NO_LABEL, dtype=dtype)
        for rows, share in zip(labels, drawn, strict=True):
            if share is not None:
                nodes = share.nodes[: share.num_targets]
                places = np.flatnonzero(graph.split[nodes] == TRAIN)
                of_nodes = torch.from_numpy(graph.labels[nodes[places]])
                rows[torch.from_numpy(places)] = of_nodes.to(dtype)
        return labels.flatten(0, 1)

    def _weights(self, drawn: Sequence[Share | None]) -> Tensor | None:
        """Return how often the loss of each row counts, padded; None if all count once."""
        if all(share is None or share.weights is None for share in drawn):
            return None
        bound = self._sharing.most(self._sampler.most_targets)
        weights = torch.zeros(len(drawn), bound, dtype=self._dtype)
        for rows, share in zip(weights, drawn, strict=True):
            if share is not None and share.weights is not None:
                rows[: len(share.nodes)] = torch.from_numpy(share.weights)
        return weights.flatten()
