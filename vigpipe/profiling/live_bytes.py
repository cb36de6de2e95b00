"""How many bytes of tensors exist at a time, whatever memory an allocator keeps for them."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts bytes of tensors made inside; a storage counts once, until its last view is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._count(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x.untyped_storage() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # A view, or what was written in place, was there before.
            if isinstance(leaf, Tensor) and all(leaf.untyped_storage() is not old for old in given):
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = id(storage), storage.nbytes()
        if key in self._known:
            return

        def gone(_: Any) -> None:
            del self._known[key]
            self.now -= num_bytes

        self._known[key] = weakref.ref(storage, gone)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
