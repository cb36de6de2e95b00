"""Some columns of the graph's features, for a sub-model whose input is divided too."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vigpipe.model.gnn.chunks import part
from vigpipe.model.gnn.layer import Features
from vigpipe.ops.sparse_rows import SparseRows


def of_columns(x: Features, columns: Tensor) -> Features:
    """Return some columns of features, (c,) int64, ascending: in memory, or part by part."""
    if isinstance(x, Tensor):
        return x.index_select(1, columns)
    return x.columns(columns) if isinstance(x, SparseRows) else _Columns(x, columns)


@dataclass(frozen=True)
class _Columns:
    """Some columns of features in files; see `GraphModel.by_layer`."""

    rows: Features
    columns: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.columns)

    @property
    def device(self) -> torch.device:
        return self.rows.device

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    def part(self, start: int, end: int) -> Features:
        return of_columns(part(self.rows, start, end), self.columns)
