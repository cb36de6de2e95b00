"""Record the forwards and backwards of a step once, and then replay them as one CUDA graph.

A step of a small model is thousands of kernels that take less time than the host needs to start
them. A graph starts them all at once. Its kernels read and write where they did when they were
recorded, so what changes from step to step is copied there first.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from vigpipe.parallel.batch import ReplicaBatch

NUM_WARMUP = 3  # steps before the recording, in which libraries and compilers choose their kernels

Send = Callable[[Tensor], Tensor]
# Records a function without running it: returns what replays it, and where its result will be.
Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


class StepGraph:
    """Takes steps by replaying one; smaller batches, which have other shapes, are not for it.

    Of a batch, `send_batch` sends all that a step needs to the device, tensor after tensor by a
    function; `take_step` does so, runs all forwards and backwards, and returns the losses, (M,).
    `send` copies a tensor of the host to the device. `record` makes a graph, see
    `launch.device.record_graph`. `timing` is a context that is entered for every replay.
    """

    def __init__(
        self,
        num_samples: int,
        send_batch: Callable[[ReplicaBatch, Send], Any],
        take_step: Callable[[ReplicaBatch, Send], Tensor],
        send: Send,
        record: Record,
        timing: AbstractContextManager[Any],
    ) -> None:
        self._num_samples = num_samples
        self._send_batch, self._take_step, self._send = send_batch, take_step, send
        self._record, self._timing = record, timing
        self._num_steps = 0
        self._inputs: list[Tensor] = []  # They are on the device, in the order of sending.
        self._replay: Callable[[], None] | None = None

    def fits(self, batch: ReplicaBatch) -> bool:
        return batch.num_samples == self._num_samples

    def __call__(self, batch: ReplicaBatch) -> Tensor:
        """Run a full batch; return its losses, (M,) float64, with gradients added up in `.grad`."""
        if self._num_steps < NUM_WARMUP:
            self._num_steps += 1
            with self._timing:
                return self._take_step(batch, self._send)
        if self._replay is None:
            self._send_batch(batch, self._keep)
            self._replay, self._losses = self._record(lambda: self._take_sent_step(batch))
        else:
            places = iter(self._inputs)
            self._send_batch(batch, lambda tensor: next(places).copy_(self._send(tensor)))
        with self._timing:
            self._replay()
        return self._losses.clone()

    def _take_sent_step(self, batch: ReplicaBatch) -> Tensor:
        places = iter(self._inputs)
        return self._take_step(batch, lambda _: next(places))

    def _keep(self, tensor: Tensor) -> Tensor:
        self._inputs.append(self._send(tensor))
        return self._inputs[-1]
