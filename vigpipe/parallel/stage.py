"""torch's pipeline stage, which asks for messages early and tells a watcher what it does.

gloo sends a message once its receiver has asked for it. torch's schedules with one stage a rank ask
when they need it, and so wait for all of it every time. Here a rank asks for the next message of a
kind before it waits for one, and the next one arrives while it computes:

    asks when it needs   [wait 0][forward 0][wait 1][forward 1][wait 2][forward 2]
    asks one ahead       [wait 0][forward 0][forward 1][forward 2]

Schedules with several stages a rank ask early by themselves. NCCL runs what one stream is given in
its order, so there every message must be asked for in the order of the schedule.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import P2POp

from vigpipe.files.cache import hide_inductor_folder
from vigpipe.spans import SpanKind

hide_inductor_folder()
from torch.distributed.pipelining import PipelineStage  # noqa: E402 - which would make it


class Watcher(Protocol):
    """Follows what a rank does; `vigpipe.timing.recorder.Recorder` implements this."""

    def enter(
        self, kind: SpanKind, stage: int = -1, microbatch: int = -1, gap: SpanKind | None = None
    ) -> None:
        """Begin an activity of a stage for a micro-batch, -1 for none; what was going on ends.

        The `gap` is what the rank did since the last activity ended or since it began to send; None
        for `other`.
        """

    def leave(self) -> None:
        """End the activity that is going on."""

    def resume(self) -> None:
        """Continue the activity that ended last."""

    def region(self, name: str, function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        """Call a function as a named region of the model, and return its value."""
        ...


class Stage(PipelineStage):
    """A stage of a rank; what is not named here goes to torch's stage.

    The watcher follows what the rank does; the stopwatch is a context that is entered for every
    forward and backward of a training step. To ask for messages one ahead, `num_ahead` is M, the
    number of micro-batches; otherwise 0. A frozen stage has no backward, and the stage after it
    sends no gradients back, as its input does not need any.
    """

    def __init__(
        self,
        watcher: Watcher | None,
        stopwatch: AbstractContextManager[Any],
        num_ahead: int,
        *args: Any,
        is_frozen: bool = False,
        sends_back: bool = True,
        **options: Any,
    ) -> None:
        self._is_frozen, self._sends_back = is_frozen, sends_back
        super().__init__(*args, **options)
        self._watcher, self._stopwatch = watcher, stopwatch
        ask = super().get_fwd_recv_ops, super().get_bwd_recv_ops
        self._features, self._gradients = (_Received(one, num_ahead) for one in ask)

    @property
    def has_backward(self) -> bool:
        return self._has_backward and not self._is_frozen

    @has_backward.setter
    def has_backward(self, has_backward: bool) -> None:
        self._has_backward = has_backward

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        with self._watched("forward", fwd_chunk_id, None if self.is_first else "wait input"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        if not self.has_backward:  # evaluations call this too
            return super().backward_one_chunk(bwd_chunk_id, *args, **options)
        with self._watched("backward", bwd_chunk_id, None if self.is_last else "wait gradient"):
            return super().backward_one_chunk(bwd_chunk_id, *args, **options)

    @contextmanager
    def _watched(self, kind: SpanKind, microbatch: int, gap: SpanKind | None) -> Iterator[None]:
        if self._watcher is not None:
            self._watcher.enter(kind, self.stage_index, microbatch, gap)
        with self._stopwatch if self._has_backward else nullcontext():
            yield
        if self._watcher is not None:
            self._watcher.leave()

    # A rank posts a receive before it waits for it, and waits for a send at the end or before the
    # next send. So "send" is what a rank does between a send and its next receive.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        return self._received(self._features(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        return self._received(self._gradients(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        return self._sent(super().get_fwd_send_ops(fwd_chunk_id), fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        if not self._sends_back:
            self.bwd_cache.pop(bwd_chunk_id, None)
            return []
        return self._sent(super().get_bwd_send_ops(bwd_chunk_id), bwd_chunk_id)

    def _received(self, operations: list[P2POp]) -> list[P2POp]:
        if self._watcher is not None and operations:
            self._watcher.leave()
        return operations

    def _sent(self, operations: list[P2POp], microbatch: int) -> list[P2POp]:
        if self._watcher is not None and operations:
            self._watcher.enter("send", self.stage_index, microbatch, gap="send")
        return operations


class _Received:
    """The messages of one kind, in the order of the micro-batches, which is that of the sender.

    `make` returns the operations that receive a micro-batch's message; none if there is none. Each
    of the `num_ahead` messages is asked for before the one before it is waited for; 0 leaves that
    to the schedule.
    """

    def __init__(self, make: Callable[[int], list[P2POp]], num_ahead: int) -> None:
        self._make, self._num_ahead = make, num_ahead
        self._asked: dict[int, list[P2POp]] = {}

    def __call__(self, microbatch: int) -> list[P2POp]:
        if not self._num_ahead:
            return self._make(microbatch)
        for i in range(microbatch, min(microbatch + 2, self._num_ahead)):
            if i not in self._asked:
                self._asked[i] = [_begun(operation) for operation in self._make(i)]
        return self._asked.pop(microbatch)


def _begun(operation: P2POp) -> P2POp:
    """Begin to receive; return an operation that only gives what is to be waited for."""
    works = dist.batch_isend_irecv([operation])
    operation.op = lambda *_, **__: works[0]
    return operation
