"""Products of weights and features whose channels are divided among m ranks.

Of a group of n channels, rank k has block k, the channels k n / m ... (k + 1) n / m - 1:

    features x, (N, d)     its columns, (N, d / m)
    weights W, (d', d)     the rows of the linear layer's outputs, (d' / m, d); or, if its outputs
                           stay whole, the columns of its inputs, (d', d / m)

No rank makes a tensor with d or d' entries in a dimension.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from vigpipe.model.gnn.features import AnyFeatures, dense, rows_at_once, slice_rows
from vigpipe.model.slicing import Side, Slicing
from vigpipe.ops.sparse_rows import SparseRows, linear


class Columns(Protocol):
    """Collective operations of m ranks, which all call them in the same order.

    An argument need not be contiguous, and is not changed. A result is a new tensor, or the
    argument itself.
    """

    @property
    def size(self) -> int: ...  # m, the number of ranks

    @property
    def rank(self) -> int: ...  # k, the index of this rank's block of channels

    def from_(self, source: int, block: Tensor) -> Tensor:
        """Return the block of rank `source`; every rank passes its own, all of one shape."""
        ...

    def total(self, part: Tensor) -> Tensor:
        """Sum the parts in the order of the ranks: the same bits on all of them."""
        ...

    def total_at(self, target: int, part: Tensor) -> Tensor | None:
        """Sum the parts on rank `target`, as `total` does; None on the others."""
        ...


@dataclass(frozen=True)
class WideShare:
    """One rank's part of the tensors of a model, or of the part whose names begin with a prefix.

    Of every tensor that has sides, `owned` has the entries of the rank's block of channels in the
    dimension `slicing.owned(name)`. They may be mapped from a file, and on another device than the
    features.
    """

    slicing: Slicing
    owned: Mapping[str, Tensor]
    whole: Mapping[str, Tensor]  # the tensors without sides
    columns: Columns
    chunk: int  # most rows of the graph's features that are read at a time
    prefix: str = ""

    def of(self, prefix: str) -> "WideShare":
        return replace(self, prefix=self.prefix + prefix)

    def tensor(self, name: str, device: torch.device) -> Tensor:
        """Return the rank's part of a tensor; of a weight with two sides, `_blocks` copies less."""
        return self._stored(name).to(device)

    def linear(self, x: AnyFeatures, name: str) -> Tensor:
        """Run a linear layer, with its bias: see `products`."""
        (y,) = self.products(x, f"{name}.weight")
        return y + self.tensor(f"{name}.bias", y.device)

    def products(self, x: AnyFeatures, *names: str) -> list[Tensor]:
        """Multiply features by weights of linear layers, (d', d): x W^T for each name.

        x are the rank's columns of features, (n, d / m); or all, (n, d), of the graph's features.
        A result is the rank's columns, (n, d' / m), if the layer's outputs are divided; otherwise
        whole, (n, d'), with the same bits on all ranks.
        """
        if all(self._takes_whole(x, name) for name in names):
            return self._from_whole(x, names)
        divided = [name for name in names if self._sides(name)[0] is not None]
        products = self._from_blocks(x, divided) if divided else {}
        for name in names:
            if name not in products:
                products[name] = self.columns.total(x @ self.tensor(name, x.device).T)
        return [products[name] for name in names]

    def product_of_inputs(self, x: Tensor, name: str) -> Tensor:
        """Multiply x, (n, d / m), by weights, (d, d'), of which it has rows: (n, d' / m)."""
        own = None
        for rank in range(self.columns.size):
            parts = [x @ weight for weight in self._blocks(name, rank, x.device)]
            product = self.columns.total_at(rank, torch.cat(parts, 1))
            own = product if rank == self.columns.rank else own
        assert own is not None
        return own

    def layer_norm(self, x: Tensor, eps: float) -> Tensor:
        """Normalise the rank's columns, (n, d / m), with the statistics of all channels."""
        num_channels = x.shape[1] * self.columns.size
        centred = x - self.columns.total(x.sum(1, keepdim=True)) / num_channels
        squares = self.columns.total(centred.square().sum(1, keepdim=True))
        scaled = centred * torch.rsqrt(squares / num_channels + eps)
        return scaled * self.tensor("weight", x.device) + self.tensor("bias", x.device)

    def summed(self, name: str, products: Tensor) -> Tensor:
        """Sum products with a vector over the ranks, unless every rank has the whole vector."""
        is_whole = self.slicing.owned(self.prefix + name) is None
        return products if is_whole else self.columns.total(products)

    def _sides(self, name: str) -> tuple[Side | None, ...]:
        return self.slicing.sides[self.prefix + name]

    def _takes_whole(self, x: AnyFeatures, name: str) -> bool:
        """Return whether x has all inputs of a weight, whether or not these are divided."""
        side = self._sides(name)[1]
        return side is None or x.shape[1] == side.length(self.slicing.sizes[side.group])

    def _from_whole(self, x: AnyFeatures, names: Sequence[str]) -> list[Tensor]:
        weights = [self.tensor(name, x.device) for name in names]
        own = [self._own_inputs(name) for name in names]
        if isinstance(x, Tensor | SparseRows):
            products = list(map(_product, [x] * len(names), weights, own))
        else:  # features in files: read once for all weights
            products = [weight.new_empty(len(x), len(weight)) for weight in weights]
            rows = rows_at_once(x, self.chunk)
            for start in range(0, len(x), rows):
                end = min(start + rows, len(x))
                some = slice_rows(x, start, end)
                for product, weight, columns in zip(products, weights, own, strict=True):
                    product[start:end] = _product(some, weight, columns)
        return [
            product if columns is None else self.columns.total(product)
            for product, columns in zip(products, own, strict=True)
        ]

    def _own_inputs(self, name: str) -> list[slice] | None:
        """Return the inputs for which the rank has weights; None for all."""
        if self.slicing.owned(self.prefix + name) != 1:
            return None
        return self._stretches(name, self.columns.rank)

    def _from_blocks(self, x: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Multiply all columns, one rank's after the other's, by this rank's rows of weights."""
        products = {name: x.new_zeros(len(x), len(self._stored(name))) for name in names}
        for rank in range(self.columns.size):
            block = self.columns.from_(rank, x)
            for name, product in products.items():
                weights = self._blocks(name, rank, x.device)
                for some, weight in zip(block.chunk(len(weights), 1), weights, strict=True):
                    product.addmm_(some, weight.T)
        return products

    def _stored(self, name: str) -> Tensor:
        name = self.prefix + name
        is_whole = self.slicing.owned(name) is None
        return (self.whole if is_whole else self.owned)[name].detach()

    def _blocks(self, name: str, rank: int, device: torch.device) -> list[Tensor]:
        """Return the columns of weights that belong to a rank's block; copy only these, if any."""
        weight = self._stored(name)
        return [weight[:, entries].to(device) for entries in self._stretches(name, rank)]

    def _stretches(self, name: str, rank: int) -> list[slice]:
        """Return which columns of weights belong to a rank's block, as in `Side.entries`."""
        side = self._sides(name)[1]
        assert side is not None
        num_channels = self.slicing.sizes[side.group]
        length = num_channels // self.columns.size * side.run
        firsts = [i * num_channels * side.run + rank * length for i in range(side.repeats)]
        return [slice(first, first + length) for first in firsts]


def _product(x: Tensor | SparseRows, weight: Tensor, inputs: list[slice] | None) -> Tensor:
    """Multiply by weights of all inputs, or of some."""
    if inputs is None:
        return linear(x, weight)
    all_inputs = dense(x, len(x))
    return torch.cat([all_inputs[:, some] for some in inputs], 1) @ weight.T
