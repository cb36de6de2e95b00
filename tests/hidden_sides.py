"""A guard on allocations: nothing may be made that is as long as a whole group of channels."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# They take memory of others: a file's.
_MAPPING = (torch.ops.aten.from_file.default, torch.ops.aten.set_.source_Storage_storage_offset)


class NoHiddenSides(TorchDispatchMode):
    """Fail at an operator whose result has a forbidden length, and memory that its inputs lack.

    Views of such tensors pass, which are those that there were before, mapped files among them;
    so do tensors on meta, empty ones, and results that are written to an input. It sees the
    operators of the thread that enters it.

    Args:
        lengths: which no dimension of a new tensor may have.
    """

    def __init__(self, *lengths: int) -> None:
        super().__init__()
        self.lengths = set(lengths)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        known = {_memory(x) for x in tree_leaves((args, kwargs)) if _has_memory(x)}
        result = func(*args, **kwargs)
        if func in _MAPPING:
            return result
        for made in tree_leaves(result):
            if _has_memory(made) and self.lengths & set(made.shape) and _memory(made) not in known:
                raise AssertionError(f"{func} makes a tensor with a hidden side: {made.shape}")
        return result


def _has_memory(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.strided and not x.is_meta and x.numel() > 0


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
