"""Named regions of a model, which a listener can time.

    block 3                    forward and backward
    block 3/grapher
    block 3/grapher/knn        forward only: choosing neighbours has no gradient
    block 3/grapher/aggregation
    block 3/ffn
    block 3/aggregation        graph models: messages are reduced along the edges
    block 3/update             graph models: new features, norm and activation

Without a listener, a region only calls its function. A listener gets the region's name, function
and inputs, and must return what the function returns.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Listener = Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]

_listener: Listener | None = None


def region(name: str, function: Callable[..., Any], *inputs: Any) -> Any:
    """Call `function(*inputs)` as a named region that a listener may time.

    The name is relative to the region around it. A listener may replace an input that carries a
    gradient by an alias. To keep the order in which gradients are summed, and thus every bit of the
    sum, such an input is used either nowhere outside the region, or only once inside it.
    """
    if _listener is None or torch.compiler.is_compiling():
        return function(*inputs)
    return _listener(name, function, inputs)


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Call `listener` for every region that runs inside the with-block; None calls nothing."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before
