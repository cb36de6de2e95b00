"""Activation recomputation: forget a block's activations, compute them again in the backward.

Chen et al. 2016 (arXiv:1604.06174), through `torch.utils.checkpoint`. Two things must not happen
twice: a kNN graph is not chosen anew, or rounding could choose another one, and BatchNorm does not
count its micro-batch again. So the first forward writes its graphs on a tape, and the second reads
them from there and knows that it is a repetition. Random masks need no care: they are keyed.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class _State(threading.local):  # CUDA's backward runs in a thread of its own
    tape: "Iterator[Tensor] | None" = None  # of the repetition that is going on
    record: "list[Tensor] | None" = None  # of the first forward that is going on


_state = _State()


def recomputing() -> bool:
    """Whether this forward repeats an earlier one."""
    return not torch.compiler.is_compiling() and _state.tape is not None


def remembered(build: Callable[[], Tensor]) -> Tensor:
    """What `build` gives, or gave when this block was run the first time."""
    if torch.compiler.is_compiling():
        return build()
    if _state.tape is not None:
        return next(_state.tape)
    graph = build()
    if _state.record is not None:
        _state.record.append(graph)
    return graph


def run_and_forget(block: Callable[..., Any], *inputs: Any) -> Any:  # noqa: ANN401
    """`block(*inputs)`, of which only inputs, outputs and graphs are kept for the backward."""
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
