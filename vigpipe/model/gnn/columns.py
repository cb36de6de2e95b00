"""Products of weights and features that m ranks share by blocks of channels.

Of a group of n channels, rank k has block k, the channels k n / m ... (k + 1) n / m - 1:

    features x, (N, d)     its columns, (N, d / m)
    weights W, (d', d)     the rows of the linear layer's outputs, (d' / m, d); or, if its outputs
                           stay whole, the columns of its inputs, (d', d / m)

No rank makes a tensor with d or d' entries in a dimension.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from vigpipe.model.gnn.chunks import part, rows_at_once
from vigpipe.model.gnn.layer import Features
from vigpipe.model.slicing import Side, Slicing
from vigpipe.ops.sparse_rows import SparseRows, linear


class Columns(Protocol):
    """What m ranks exchange. All of them call the same methods in the same order.

    What they give need not be contiguous, and stays as it is; what they get is theirs alone, or
    the tensor that they gave.
    """

    @property
    def size(self) -> int:
        """How many ranks there are, m."""
        ...

    @property
    def place(self) -> int:
        """Which block of channels this rank has, k."""
        ...

    def from_(self, source: int, block: Tensor) -> Tensor:
        """Return the block of rank `source`; every rank gives its own, all of one shape."""
        ...

    def total(self, part: Tensor) -> Tensor:
        """Return the sum of what the ranks give, in their order: the same bits on all of them."""
        ...

    def total_at(self, target: int, part: Tensor) -> Tensor | None:
        """Return the sum of what the ranks give on rank `target`, and None on the others."""
        ...


class WideShare:
    """What one rank has of the tensors of a model or of a part of it.

    Args:
        slicing: the model's table.
        owned: the rank's part of every tensor that has sides, by name: of the dimension
            `slicing.owned(name)`, the entries of the rank's block of channels. They may be mapped
            from a file, and on another device than the features.
        whole: the tensors without sides, by name.
        columns: what the ranks exchange.
        chunk: number of rows of the graph's features that are read at a time, at most.
        prefix: what the names of the part's tensors begin with.
    """

    def __init__(
        self,
        slicing: Slicing,
        owned: Mapping[str, Tensor],
        whole: Mapping[str, Tensor],
        columns: Columns,
        chunk: int,
        prefix: str = "",
    ) -> None:
        self.slicing, self.owned, self.whole = slicing, owned, whole
        self.columns, self.chunk, self.prefix = columns, chunk, prefix

    def of(self, prefix: str) -> "WideShare":
        """Return what the rank has of a part of this part."""
        prefix = self.prefix + prefix
        return WideShare(self.slicing, self.owned, self.whole, self.columns, self.chunk, prefix)

    def tensor(self, name: str, device: torch.device) -> Tensor:
        """Return a tensor, or the rank's part of it, on a device.

        The copy of one with two sides would be as long as a whole group: see `_blocks`.
        """
        return self._stored(name).to(device)

    def linear(self, x: Features, name: str) -> Tensor:
        """Run a linear layer, with its bias: see `products`."""
        (y,) = self.products(x, f"{name}.weight")
        return y + self.tensor(f"{name}.bias", y.device)

    def products(self, x: Features, *names: str) -> list[Tensor]:
        """Multiply features by weights of linear layers, (d', d).

        Args:
            x: the rank's columns of features, (n, d / m); or all, (n, d), of the graph's features.
            names: of the weights.

        Returns:
            For each weight, x W^T: the rank's columns of it, (n, d' / m), if the layer's outputs
            are divided; otherwise all of it, (n, d'), with the same bits on all ranks.
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
        """Multiply features by weights, (d, d'), of which a rank has the rows of its inputs.

        Args:
            x: the rank's columns of features, (n, d / m).
            name: of the weights.

        Returns:
            The rank's columns of x W, (n, d' / m).
        """
        own = None
        for rank in range(self.columns.size):
            parts = [x @ weight for weight in self._blocks(name, rank, x.device)]
            product = self.columns.total_at(rank, torch.cat(parts, 1))
            own = product if rank == self.columns.place else own
        assert own is not None
        return own

    def layer_norm(self, x: Tensor, eps: float) -> Tensor:
        """Apply LayerNorm to the rank's columns of features, with the statistics of all channels.

        Args:
            x: (n, d / m).
            eps: added to the variance.

        Returns:
            (n, d / m).
        """
        num_channels = x.shape[1] * self.columns.size
        centred = x - self.columns.total(x.sum(1, keepdim=True)) / num_channels
        squares = self.columns.total(centred.square().sum(1, keepdim=True))
        scaled = centred * torch.rsqrt(squares / num_channels + eps)
        return scaled * self.tensor("weight", x.device) + self.tensor("bias", x.device)

    def summed(self, name: str, products: Tensor) -> Tensor:
        """Sum products with a vector over the ranks, unless all of them have the whole vector."""
        is_whole = self.slicing.owned(self.prefix + name) is None
        return products if is_whole else self.columns.total(products)

    def _sides(self, name: str) -> tuple[Side | None, ...]:
        return self.slicing.sides[self.prefix + name]

    def _takes_whole(self, x: Features, name: str) -> bool:
        """Whether a weight's inputs are whole, or x has all of them although they are divided."""
        side = self._sides(name)[1]
        return side is None or x.shape[1] == side.length(self.slicing.sizes[side.group])

    def _from_whole(self, x: Features, names: Sequence[str]) -> list[Tensor]:
        weights = [self.tensor(name, x.device) for name in names]
        own = [self._own_inputs(name) for name in names]
        if isinstance(x, Tensor | SparseRows):
            products = list(map(_product, [x] * len(names), weights, own))
        else:  # features in files: read once for all weights
            products = [weight.new_empty(len(x), len(weight)) for weight in weights]
            rows = rows_at_once(x, self.chunk)
            for start in range(0, len(x), rows):
                end = min(start + rows, len(x))
                some = part(x, start, end)
                for product, weight, columns in zip(products, weights, own, strict=True):
                    product[start:end] = _product(some, weight, columns)
        return [
            product if columns is None else self.columns.total(product)
            for product, columns in zip(products, own, strict=True)
        ]

    def _own_inputs(self, name: str) -> list[slice] | None:
        """Return which inputs the rank has weights of; None for all."""
        if self.slicing.owned(self.prefix + name) != 1:
            return None
        return self._stretches(name, self.columns.place)

    def _from_blocks(self, x: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Multiply by the rank's rows of weights, with one rank's columns after the other."""
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
        """Return the columns of weights that are those of a rank's block: views, or copies of few.

        Nothing is copied where the weights are on the device; elsewhere, a rank's columns only.
        """
        weight = self._stored(name)
        return [weight[:, entries].to(device) for entries in self._stretches(name, rank)]

    def _stretches(self, name: str, rank: int) -> list[slice]:
        """Return which columns of weights are those of a rank's block, as in `Side.entries`."""
        side = self._sides(name)[1]
        assert side is not None
        num_channels = self.slicing.sizes[side.group]
        length = num_channels // self.columns.size * side.run
        firsts = [i * num_channels * side.run + rank * length for i in range(side.repeats)]
        return [slice(first, first + length) for first in firsts]


def dense(x: Features, chunk: int) -> Tensor:
    """Return features in memory, with all numbers, (n, d)."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, SparseRows):
        return x.dense()
    whole = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = rows_at_once(x, chunk)
    for start in range(0, len(x), rows):
        some = part(x, start, min(start + rows, len(x)))
        whole[start : start + rows] = some.dense() if isinstance(some, SparseRows) else some
    return whole


def _product(x: Tensor | SparseRows, weight: Tensor, inputs: list[slice] | None) -> Tensor:
    """Multiply by weights of all inputs, or of some."""
    if inputs is None:
        return linear(x, weight)
    all_inputs = dense(x, len(x))
    return torch.cat([all_inputs[:, some] for some in inputs], 1) @ weight.T
