"""What the edges of a graph have in common, however ranks share it."""

from collections.abc import Callable

from torch import Tensor, nn

from vigpipe.job.shared_norm import shared_batch_norm
from vigpipe.model.gnn.edges import Edges
from vigpipe.model.norm import BatchNorm
from vigpipe.ops.adjacency import Adjacency
from vigpipe.parallel.shards import Shards


class SharedEdges(Edges):
    """The edges between nodes that several ranks share.

    A layer has the rows of this rank's nodes, and makes rows of the same ones. `features` are rows
    that are the same in every call, so that what other ranks have of them is fetched only once.
    """

    def __init__(
        self,
        adjacency: Adjacency,
        shards: Shards,
        num_rows: int,
        features: Tensor | None,
        *,
        fused: bool = True,
    ) -> None:
        super().__init__(adjacency, fused=fused)
        self.shards, self._num_rows, self._features = shards, num_rows, features
        # What was fetched for the features; the list is shared with the same edges with loops.
        self._fetched: list[Tensor] = []
        # Rows, and what was fetched for them: attention scores these, then sums the same ones.
        self._scored: tuple[Tensor, Tensor] | None = None

    @property
    def num_sources(self) -> int:
        return self._num_rows

    @property
    def num_targets(self) -> int:
        return self._num_rows

    def own(self, x: Tensor) -> Tensor:
        return x

    def own_and_mean(self, both: Tensor) -> Tensor:
        """Add the second half of the channels, which does not travel."""
        sent, kept = both.chunk(2, dim=1)
        return self.sums(sent, "mean", kept)

    def normalised(self, norm: nn.Module, x: Tensor) -> Tensor:
        if isinstance(norm, BatchNorm) and norm.training:
            return shared_batch_norm(norm, x, self.shards)
        return norm(x)

    def _fetch_once(self, x: Tensor, fetch: Callable[[], Tensor]) -> Tensor:
        """Return what others have of x; it is kept if x are the features."""
        if not self._is_features(x):
            return fetch()
        if not self._fetched:
            self._fetched.append(fetch())
        return self._fetched[0]

    def _take_scored(self, x: Tensor) -> Tensor | None:
        """Return what was fetched for x, if these rows were scored last, and forget it."""
        rows, fetched = self._scored or (None, None)
        self._scored = None
        return fetched if rows is x else None

    def _is_features(self, x: Tensor) -> bool:
        """Whether x is the rows that are the same in every call, or another view of them."""
        features = self._features
        if features is None or x.requires_grad or x.dtype != features.dtype:
            return False
        return x.data_ptr() == features.data_ptr() and x.shape == features.shape
