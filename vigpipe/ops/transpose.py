"""Turn the edges of a sparse graph round, on the host."""

import numpy as np
import torch
from torch import Tensor

from vigpipe.ops.call import call, sizes
from vigpipe.ops.compiler import library


def transpose(
    indptr: Tensor, indices: Tensor, num_sources: int, *, numbers: bool = False
) -> tuple[Tensor, Tensor]:
    """Turn every edge round, and return the rows, ascending; tensors are int64, on the host.

    With `numbers`, each edge has its number in the graph instead of the node that it comes from.
    """
    shape = len(indptr) - 1, num_sources
    if library().functions is None:
        from scipy.sparse import csr_array  # a tenth of a second, which no model of images needs

        numbered = np.arange(len(indices)), indices.numpy(), indptr.numpy()
        turned = csr_array(numbered, shape=shape).tocsc()
        return _tensor(turned.indptr), _tensor(turned.data if numbers else turned.indices)
    turned_indptr, edges = indptr.new_empty(num_sources + 1), torch.empty_like(indices)
    results = (None, edges) if numbers else (edges, None)
    call("csr_transpose", indptr, indices, turned_indptr, *results, *sizes(*shape))
    return turned_indptr, edges


def is_symmetric(indptr: Tensor, indices: Tensor) -> bool:
    """Tell whether every edge has its reverse, in a graph whose indices ascend in each row."""
    num_nodes = len(indptr) - 1
    if library().functions is not None:
        return bool(call("csr_is_symmetric", indptr, indices, *sizes(num_nodes)))
    turned = transpose(indptr, indices, num_nodes)
    return torch.equal(turned[0], indptr) and torch.equal(turned[1], indices)


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int64, copy=False))
