"""Find clusters among the rows of an embedding."""

import warnings

import numpy as np
from sklearn.cluster import KMeans, MiniBatchKMeans
from sklearn.exceptions import ConvergenceWarning

MOST_AT_ONCE = 5000  # k-means on so many points takes seconds; on more, batches do as well


def clusters(points: np.ndarray, num_clusters: int, draws: np.random.Generator) -> np.ndarray:
    """Run k-means on the directions of vectors: their lengths follow the degrees of the nodes.

    Of at most as many clusters as points, (n, d), one may be empty if there are fewer directions.
    """
    lengths = np.linalg.norm(points, axis=1, keepdims=True)
    directions = points / np.where(lengths > 0, lengths, 1)
    k_means = KMeans if len(points) <= MOST_AT_ONCE else MiniBatchKMeans
    method = k_means(
        num_clusters,
        n_init=10,  # takes more than its default's type
        random_state=int(draws.integers(1 << 31)),
    )
    # It warns of fewer directions than clusters.
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        return method.fit_predict(directions).astype(np.int64)
