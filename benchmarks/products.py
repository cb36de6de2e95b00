"""The matrix products and convolutions of a step alone: what the rest of it cannot beat."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from vigpipe.selftest.way import Contender

_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "convolution",
    "convolution_backward",
    "grouped",
    "grouped_backward",
)


class _Recorded(TorchDispatchMode):
    """Keeps the products that run inside, with tensors like their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__ in _NAMES:
            like = tree_map_only(Tensor, _like, (args, kwargs or {}))
            self.calls.append((func, *like))
        return func(*args, **(kwargs or {}))


def _like(x: Tensor) -> Tensor:
    """Make a tensor of random numbers with the shape, strides and type of another."""
    y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return y.normal_() if x.is_floating_point() else y.copy_(x)


class Products(Contender):
    """A contender whose step is the matrix products and convolutions of a step."""

    def make_step(self) -> Callable[[], object]:
        return products_of(super().make_step())


def products_of(step: Callable[[], object]) -> Callable[[], object]:
    """Run a step once, and return a function that repeats its matrix products and convolutions.

    Their inputs have the shapes, strides and types of the step's, and as in the step are other
    memory for every product. The function returns what the step returned.
    """
    with _Recorded() as recorded:
        result = step()
    calls = recorded.calls

    @torch.no_grad()
    def run() -> object:
        for function, arguments, options in calls:
            function(*arguments, **options)
        return result

    return run
