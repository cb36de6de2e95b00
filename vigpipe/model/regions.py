"""Named regions of a model, for whoever wants to time them; nobody listens unless asked to.

    block 3                    forward and backward
    block 3/grapher
    block 3/grapher/knn        no gradient flows through the choice of neighbours
    block 3/grapher/aggregation
    block 3/ffn

A listener sees the region's function and inputs, and must return what the function returns.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Listener = Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]

_listener: Listener | None = None


def region(name: str, function: Callable[..., Any], *inputs: Any) -> Any:  # noqa: ANN401
    """`function(*inputs)`, under a name.

    The listener may put an alias in the place of an input that carries a gradient. So that sums of
    gradients keep their order then, to the last bit, an input must be used by nothing outside the
    region, or only once inside it.
    """
    if _listener is None or torch.compiler.is_compiling():
        return function(*inputs)
    return _listener(name, function, inputs)


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Let `listener` hear of the regions that run meanwhile; with None nobody does."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before
