"""Activation recomputation: discard a block's activations, compute them again in the backward.

Chen et al. 2016 (arXiv:1604.06174), through `torch.utils.checkpoint`. Two things must not happen
twice: a kNN graph must not be built again, because rounding could give another one, and BatchNorm
must not count its micro-batch again. So the first forward records its graphs, and the second
forward replays them and can tell that it is a repetition. Random masks are keyed by sample, so they
repeat by themselves.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class _State(threading.local):  # CUDA's backward runs in another thread
    tape: Iterator[Tensor] | None = None  # graphs that the current repetition replays
    record: list[Tensor] | None = None  # graphs that the current first forward records


_state = _State()


def is_recomputing() -> bool:
    """Tell whether the current forward repeats an earlier one."""
    return not torch.compiler.is_compiling() and _state.tape is not None


def build_or_replay(build: Callable[[], Tensor]) -> Tensor:
    """Build a graph, or return the one that was built when this block first ran."""
    if torch.compiler.is_compiling():
        return build()
    if _state.tape is not None:
        return next(_state.tape)
    graph = build()
    if _state.record is not None:
        _state.record.append(graph)
    return graph


def run_with_recompute(block: Callable[..., Any], *inputs: Any) -> Any:
    """Call `block(*inputs)`, keeping only inputs, outputs and graphs; the backward repeats it."""
    record: list[Tensor] = []

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return _during(record=record), _during(tape=record)

    return checkpoint(
        block, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
    )


@contextmanager
def _during(record: list[Tensor] | None = None, tape: list[Tensor] | None = None) -> Iterator[None]:
    before = _state.record, _state.tape
    _state.record, _state.tape = record, None if tape is None else iter(tape)
    try:
        yield
    finally:
        _state.record, _state.tape = before
