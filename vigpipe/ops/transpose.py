"""Turn the edges of a sparse graph round, on the host."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vigpipe.ops.call import call, sizes
from vigpipe.ops.compiler import library

if TYPE_CHECKING:
    from scipy.sparse import csc_array


def transpose(indptr: Tensor, indices: Tensor, num_sources: int) -> tuple[Tensor, Tensor]:
    """Turn every edge round, and return the rows, ascending; tensors are int64, on the host."""
    if library().functions is None:
        turned = _by_scipy(indptr, indices, num_sources)
        return _tensor(turned.indptr), _tensor(turned.indices)
    turned_indptr, targets = indptr.new_empty(num_sources + 1), torch.empty_like(indices)
    shape = sizes(len(indptr) - 1, num_sources)
    call("csr_transpose", indptr, indices, turned_indptr, targets, None, *shape)
    return turned_indptr, targets


def turned_edges(indptr: Tensor, indices: Tensor, num_sources: int) -> Tensor:
    """Return the number that each edge of the `transpose` has in the graph, (e,) int64."""
    if library().functions is None:
        return _tensor(_by_scipy(indptr, indices, num_sources).data)
    turned_indptr, edges = indptr.new_empty(num_sources + 1), torch.empty_like(indices)
    shape = sizes(len(indptr) - 1, num_sources)
    call("csr_transpose", indptr, indices, turned_indptr, None, edges, *shape)
    return edges


def is_symmetric(indptr: Tensor, indices: Tensor) -> bool:
    """Tell whether every edge has its reverse, in a graph whose indices ascend in each row."""
    num_nodes = len(indptr) - 1
    if library().functions is not None:
        return bool(call("csr_is_symmetric", indptr, indices, *sizes(num_nodes)))
    turned = transpose(indptr, indices, num_nodes)
    return torch.equal(turned[0], indptr) and torch.equal(turned[1], indices)


def _by_scipy(indptr: Tensor, indices: Tensor, num_sources: int) -> "csc_array":
    from scipy.sparse import csr_array  # a tenth of a second, which no model of images needs

    numbered = np.arange(len(indices)), indices.numpy(), indptr.numpy()
    return csr_array(numbered, shape=(len(indptr) - 1, num_sources)).tocsc()


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int64, copy=False))
