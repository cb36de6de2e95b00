"""Read batches in this process when they are due, or ahead of time in worker processes.

An image depends only on what is requested (`Split.decode`), so both ways give the same bits.

With workers, torch's DataLoader deals the requests out to them in turn, and returns their answers
in order. The images do not pass through its queues: a request names a slot of shared memory, the
worker decodes into it, and the slot is free again once this process has used it. The loader comes
to no end: when nothing is left to read ahead, it deals out requests for nothing. So one loader
reads one sequence of batches after the other, and one that is given up is no special case.
"""

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from vigpipe.data import images
from vigpipe.data.pixels import Erasure, Pixels
from vigpipe.data.slots import Slots
from vigpipe.data.split import Split
from vigpipe.errors import InputError, WorkerError
from vigpipe.launch import fork_server
from vigpipe.launch.device import keep_freed_memory
from vigpipe.launch.parent_death import die_with_fork_server

# Imported once by the fork server, from which workers are forked, because this process has threads
# by now. A worker imports the main module again, so imports of the command's are listed too.
PRELOAD = [
    "vigpipe.run.evaluation",
    "rich.progress",
    "timm.data",
    "vigpipe.data.augment",
    "torch.utils.data",
]
AHEAD = 2  # requests of a worker at a time: one that it works on, and the next
LOOK_SECONDS = 1  # pause between two looks whether a worker has died
LEAST_BYTES = 1 << 20  # Smaller requests would cost more to hand over than they save.


class Request(NamedTuple):
    """Images to read at once, as `Split.decode` takes them from one of the reader's splits."""

    split: int
    indices: Sequence[int]
    epoch: int = 0
    copies: Sequence[int] | None = None


class Reader:
    """Reads sequences of requests, one sequence after the other.

    The workers, which read ahead, start with the first sequence; without any, this process reads.
    They may take `hang_seconds` for a request; None for ever. The shape is that of an image,
    (C, H, W). At most `most_images` belong together, and `cut` divides them.
    """

    def __init__(
        self,
        splits: Sequence[Split],
        num_workers: int,
        shape: tuple[int, int, int],
        most_images: int,
        hang_seconds: float | None = None,
    ) -> None:
        self._splits, self._num_workers = tuple(splits), num_workers
        least_images = -(-LEAST_BYTES // torch.Size(shape).numel())
        num_parts = max(1, min(num_workers, most_images // least_images))
        self._part_size = size = -(-most_images // num_parts)
        self._start = partial(_Workers, self._splits, num_workers, size, shape, hang_seconds)
        self._workers: _Workers | None = None

    def cut(self, num_images: int) -> list[slice]:
        """Divide images that belong together into parts, one for each worker if they are many."""
        starts = range(0, num_images, self._part_size)
        return [slice(start, min(start + self._part_size, num_images)) for start in starts]

    def read(self, requests: Iterable[Request | None]) -> Iterator[Pixels]:
        """Yield the images of each request; workers read several at the same time.

        Their images are in shared memory, and only until the next are asked for. With workers, a
        request may be None, for nothing at the moment: there must be another one by the time that
        the images of all those before have been used, and more are asked for. An image that cannot
        be read is an InputError; a worker that has ended, or takes too long, is a WorkerError.
        """
        if self._num_workers == 0:
            return (_decode(self._splits, r) for r in requests if r is not None)
        if self._workers is None:
            self._workers = self._start()
        return self._workers.read(requests)

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None


class _Task(NamedTuple):
    """A request on its way to a worker, which writes the images into the slot."""

    sequence: int
    slot: int
    request: Request


class _Answer(NamedTuple):
    """What a worker says when the images of a task are in their slot, or why they are not."""

    task: _Task
    result: tuple[Erasure, ...] | InputError


class _Workers:
    """The workers of a reader, and the requests that they are busy with."""

    def __init__(
        self,
        splits: tuple[Split, ...],
        num_workers: int,
        part_size: int,
        shape: tuple[int, int, int],
        hang_seconds: float | None,
    ) -> None:
        # One slot for each request under way, and one whose images are being used.
        num_slots = AHEAD * num_workers + 1
        self._slots = Slots(num_slots, (part_size, *shape))
        self._free = list(range(num_slots))
        self._used: list[int] = []  # the slot whose images are being used, if any
        self._hang_seconds = hang_seconds
        self._sequence = 0
        self._requests: Iterator[Request | None] = iter(())
        context = fork_server.start_fork_server(PRELOAD)
        lifeline, self._lifeline = context.Pipe(duplex=False)
        with warnings.catch_warnings():
            # torch warns of more workers than cores, but the user has said how many.
            warnings.simplefilter("ignore", UserWarning)
            uncollated: Any = _uncollated
            loader: DataLoader[Any] = DataLoader(
                _TaskDataset(splits, self._slots),
                batch_size=None,
                sampler=iter(self._next_task, object()),  # This never ends.
                num_workers=num_workers,
                collate_fn=uncollated,
                timeout=LOOK_SECONDS,
                worker_init_fn=partial(_init_worker, lifeline),
                multiprocessing_context=context,
                generator=torch.Generator(),  # By default it draws from the global one.
                prefetch_factor=AHEAD,
            )
            self._answers: Any = iter(loader)
        lifeline.close()

    def read(self, requests: Iterable[Request | None]) -> Iterator[Pixels]:
        """Read a sequence; it replaces the one before."""
        self._sequence += 1
        sequence, num_asked, num_read, is_over = self._sequence, 0, 0, False

        def counted() -> Iterator[Request | None]:
            nonlocal num_asked, is_over
            for request in requests:
                num_asked += request is not None
                yield request
            is_over = True

        self._requests = counted()
        while num_read < num_asked or not is_over:
            answer = self._next_answer()
            if answer is None:
                continue
            self._used.append(answer.task.slot)
            if answer.task.sequence != sequence:  # That sequence was given up.
                continue
            num_read += 1
            if isinstance(answer.result, InputError):
                raise answer.result
            images = self._slots[answer.task.slot][: len(answer.task.request.indices)]
            yield Pixels(images, answer.result)

    def _next_task(self) -> _Task | None:
        request = next(self._requests, None)
        return None if request is None else _Task(self._sequence, self._free.pop(), request)

    def close(self) -> None:
        """End the workers; returns when they have ended."""
        self._answers = None  # The loader's iterator ends them when it is deleted.
        self._lifeline.close()

    def _next_answer(self) -> _Answer | None:
        self._free += self._used
        self._used.clear()
        began = time.monotonic()
        while True:
            try:
                return next(self._answers)
            except RuntimeError as error:
                workers = self._answers._workers  # no other way to their exit codes
                dead = [worker.exitcode for worker in workers if not worker.is_alive()]
                if dead:
                    raise WorkerError(
                        f"a process that reads images ahead has ended with exit code {dead[0]}; if "
                        "memory ran out, choose fewer --workers"
                    ) from error
                if not str(error).startswith("DataLoader timed out"):
                    raise
                if self._hang_seconds and time.monotonic() - began > self._hang_seconds:
                    raise WorkerError(
                        f"no process that reads images ahead has given any for "
                        f"{self._hang_seconds:g} s; if the storage is slow, raise --timeout"
                    ) from error


class _TaskDataset(Dataset[Any]):
    """What a loader takes for a data set: in a worker, it carries out tasks."""

    def __init__(self, splits: tuple[Split, ...], slots: Slots) -> None:
        self._splits, self._slots = splits, slots

    def __getitem__(self, task: _Task | None) -> _Answer | None:  # pyrefly: ignore[bad-override-param-name]
        if task is None:
            return None
        out = self._slots[task.slot][: len(task.request.indices)]
        try:
            return _Answer(task, _decode(self._splits, task.request, out).erasures)
        except InputError as error:
            return _Answer(task, error)


def _decode(splits: tuple[Split, ...], request: Request, out: torch.Tensor | None = None) -> Pixels:
    split, indices, epoch, copies = request
    return splits[split].decode(indices, epoch, copies, out)


def _uncollated(answer: _Answer | None) -> _Answer | None:
    return answer


def _init_worker(lifeline: Connection, _worker: int) -> None:
    """Set up a worker process; the rank's end of the lifeline closes however the rank ends."""
    die_with_fork_server()  # for one that is stopped
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to every process; the rank decides.
    images.NUM_THREADS = 1  # There are several workers instead.
    keep_freed_memory()  # Decoded images are large, and come and go.

    def end_with_the_rank() -> None:
        lifeline.poll(None)
        os._exit(0)

    threading.Thread(target=end_with_the_rank, daemon=True).start()
