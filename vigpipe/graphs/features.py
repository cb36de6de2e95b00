"""Scale the features of nodes, and turn them into what models take; sparse ones stay sparse."""

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from vigpipe.errors import InputError
from vigpipe.files.weights_metadata import unusable
from vigpipe.graphs.stored_rows import Rows, StoredRows
from vigpipe.ops.adjacency import Adjacency
from vigpipe.ops.sparse_rows import SparseRows

Scaling = Literal["raw", "row", "tfidf"]
WEIGHTS = "feature_weights"  # in the metadata of a file of weights
_MOST_WEIGHTED = 1 << 21
_MOST_STORED = 0.1  # up to this fraction of numbers that are not 0, sparse products are faster


def num_stored(features: Rows | StoredRows) -> int | None:
    """Return how many numbers sparse features store; None if they are dense."""
    if isinstance(features, StoredRows):
        return features.num_stored
    return features.nnz if isinstance(features, csr_array) else None


def are_sparse(features: Rows | StoredRows) -> bool:
    """Whether features are stored sparse, and products with them are faster if they stay so."""
    stored = num_stored(features)
    shape: Any = features.shape  # scipy says it can be None
    return stored is not None and stored <= _MOST_STORED * shape[0] * shape[1]


def in_memory(features: Rows | StoredRows) -> Rows:
    """Return features of all nodes, all of them in memory."""
    return features[:] if isinstance(features, StoredRows) else features


@dataclass(frozen=True)
class StoredFeatures:
    """Features in files, for a model on a device that takes some nodes at a time."""

    rows: StoredRows
    device: torch.device
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape

    def part(self, start: int, end: int) -> Tensor | SparseRows:
        """Return the features of the nodes start ... end - 1, in memory."""
        return for_model(self.rows[start:end], are_sparse(self.rows)).to(self.device, self.dtype)


def for_model(features: Rows, is_sparse: bool) -> Tensor | SparseRows:
    """Return features, (n, d), as models take them; `is_sparse` is `are_sparse` of all nodes."""
    if not isinstance(features, csr_array):
        # torch wants aligned numbers, and those in a file may not be.
        return torch.from_numpy(np.require(features, requirements="A"))
    if not is_sparse:
        return torch.from_numpy(features.toarray())
    shape: Any = features.shape
    indptr, indices = (a.astype(np.int64) for a in (features.indptr, features.indices))
    positions = Adjacency(torch.from_numpy(indptr), torch.from_numpy(indices), shape[1])
    return SparseRows(positions, torch.from_numpy(features.data))


def fitted_weights(features: Rows, where: str) -> np.ndarray:
    """Return the weight of each feature by tf-idf, (d,) float32; see `scaled`.

    All nodes count, also those of the test, because their features are known in training.
    """
    shape: Any = features.shape  # scipy says it can be None
    num_nodes, num_features = shape
    if num_features > _MOST_WEIGHTED:
        raise InputError(
            f"{where}: has {num_features:,} features, and --features tfidf keeps a weight of each "
            f"with the model, at most {_MOST_WEIGHTED:,}; take --features row"
        )
    if isinstance(features, csr_array):
        nodes_with = np.bincount(features.indices, minlength=num_features)
    else:
        nodes_with = np.count_nonzero(features, axis=0)
    return (np.log((1 + num_nodes) / (1 + nodes_with)) + 1).astype(np.float32)


def as_text(weights: np.ndarray | None) -> str | None:
    """Write the weights of features into metadata; `kept_weights` reads them."""
    return None if weights is None else b64encode(weights.astype("<f4").tobytes()).decode()


def kept_weights(metadata: Mapping[str, str], where: Path) -> np.ndarray | None:
    """Return the weights of features, (d,) float32, of a model for tf-idf; None for another."""
    if metadata.get("features") != "tfidf":
        return None
    text = metadata.get(WEIGHTS)
    if text is None:
        raise InputError(
            f"{where}: was trained with --features tfidf and does not keep the weights of its "
            "features, as older files do not; train the model again"
        )
    try:
        weights = np.frombuffer(b64decode(text, validate=True), "<f4").astype(np.float32)
    except ValueError:
        weights = np.empty(0, np.float32)
    if not len(weights) or not (np.isfinite(weights) & (weights >= 0)).all():
        raise unusable(where, WEIGHTS, text, "numbers of 0 or more, in base64")
    return weights


def scaled(features: Rows, scaling: Scaling, where: str, weights: np.ndarray | None = None) -> Rows:
    """Scale the features of all nodes, (n, d) float32, dense or sparse; `raw` leaves them.

    `row` divides each row by its sum. `tfidf` is scikit-learn's TfidfTransformer: x_ij becomes
    x_ij · (ln((1 + n) / (1 + n_j)) + 1), where n_j of the n nodes have a feature j that is not 0,
    and then each row is divided by its Euclidean length. These weights of the features are
    `fitted_weights`, or those that a model was trained with. Rows of zeros stay. Features below 0
    have no such scales: an InputError, which begins with `where`.
    """
    if scaling == "raw":
        return features
    least = (features.data if isinstance(features, csr_array) else features).min(initial=0)
    if least < 0:
        raise InputError(
            f"{where}: has features below 0 (the least is {least}), which --features {scaling} "
            "cannot scale; take --features raw"
        )
    if scaling == "row":
        return _divided(features, features.sum(axis=1, dtype=np.float64))
    assert weights is not None
    if isinstance(features, csr_array):
        weighted = features.copy()
        weighted.data *= weights[features.indices]
        squares = weighted.astype(np.float64).power(2).sum(axis=1)
    else:
        weighted = features * weights
        squares = np.einsum("ij,ij->i", weighted, weighted, dtype=np.float64)
    return _divided(weighted, np.sqrt(squares))


def _divided(features: Rows, lengths: np.ndarray) -> Rows:
    """Divide each row by its length, (n,) float64; where that is 0, the row stays."""
    lengths = np.where(lengths == 0, 1, lengths)
    if isinstance(features, csr_array):
        divided = features.copy()
        lengths = np.repeat(lengths, np.diff(features.indptr))
        np.divide(divided.data, lengths, out=divided.data, casting="same_kind")
        return divided
    return np.divide(features, lengths[:, None], out=np.empty_like(features), casting="same_kind")
