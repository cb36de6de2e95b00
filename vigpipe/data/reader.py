"""Read batches in this process when they are due, or ahead of time in worker processes.

An image depends only on what is requested (`Split.read`), so both ways give the same bits.

The workers replace torch's DataLoader, whose queues use semaphores that remain when a rank is
killed, so that Python complains at the end of the run. Pipes are closed with the rank, and the
workers then end by themselves. Worker i of N reads batches i, i + N, ... and waits until each of
them is taken:

    worker 0   read 0 | read 2 | read 4 | ...
    worker 1   read 1 | read 3 | ...
"""

import signal
import traceback
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import torch
from torch import Tensor

from vigpipe.data import images
from vigpipe.data.split import Split
from vigpipe.errors import InputError
from vigpipe.launch import fork_server

# Imported once by the fork server, from which workers are forked, because this process has threads
# by now. A worker imports the main module again, so imports of the command's are listed too.
PRELOAD = ["vigpipe.run.evaluation", "rich.progress", "timm.data", "vigpipe.data.augment"]


class Request(NamedTuple):
    """Images to read as one batch.

    Attributes:
        split: index of the split among the reader's splits.
        indices: indices of the images in the split.
        epoch: index of the epoch.
        copies: numbers that distinguish the visits of an image; None for all 0.
    """

    split: int
    indices: list[int]
    epoch: int
    copies: list[int] | None


class Reader:
    """Reads sequences of batches, one sequence after the other.

    Args:
        splits: the splits that may be read.
        num_workers: number of processes that read ahead, which start with the first sequence; with
            0 this process reads.
    """

    def __init__(self, splits: Sequence[Split], num_workers: int = 0) -> None:
        self._splits, self._num_workers = tuple(splits), num_workers
        self._workers: list[tuple[Connection, BaseProcess]] = []

    def read(
        self, split: Split, batches: Iterable[tuple[list[int], list[int] | None]], epoch: int
    ) -> Iterator[Tensor]:
        """Read a sequence of batches; with workers, several at the same time.

        Args:
            split: one of the reader's splits.
            batches: indices and copies of each batch, as `Split.read` takes them.
            epoch: index of the epoch.

        Returns:
            An iterator over the batches in order, each (b, C, H, W) float32.

        Raises:
            InputError: while iterating, an image cannot be read, as in `Split.read`.
            RuntimeError: while iterating, a worker failed for another reason, or has ended.
        """
        split_index = next(i for i, candidate in enumerate(self._splits) if candidate is split)
        requests = (Request(split_index, indices, epoch, copies) for indices, copies in batches)
        if self._num_workers == 0:
            return (_read(self._splits, request) for request in requests)
        return self._ahead(requests)

    def close(self) -> None:
        """End the workers."""
        for pipe, _ in self._workers:
            pipe.close()
        for _, process in self._workers:
            process.join()
        self._workers.clear()

    def _ahead(self, requests: Iterator[Request]) -> Iterator[Tensor]:
        if not self._workers:
            self._workers = [self._start() for _ in range(self._num_workers)]
        num_waiting = 0
        try:
            for (pipe, _), request in zip(self._workers, requests, strict=False):
                pipe.send(request)
                num_waiting += 1
            for pipe, process in cycle(self._workers):
                if num_waiting == 0:
                    return
                batch = _receive(pipe, process)
                num_waiting -= 1
                for request in requests:  # the next one, if there is any
                    pipe.send(request)
                    num_waiting += 1
                    break
                yield batch
        finally:
            if num_waiting:  # batches that are on their way will not be received
                self.close()

    def _start(self) -> tuple[Connection, BaseProcess]:
        context = fork_server.start_fork_server(PRELOAD)
        pipe, worker_pipe = context.Pipe()
        process = context.Process(target=_work, args=(worker_pipe, self._splits), daemon=True)
        process.start()
        worker_pipe.close()
        return pipe, process


def _receive(pipe: Connection, process: BaseProcess) -> Tensor:
    try:
        answer = pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        batch = torch.empty(answer)
        if batch.numel():
            pipe.recv_bytes_into(batch.numpy().data.cast("B"))
        return batch
    except (EOFError, ConnectionError) as error:
        process.join()
        raise RuntimeError(
            f"a process that reads images ahead has ended with exit code {process.exitcode}; if "
            "memory ran out, choose fewer --workers"
        ) from error


def _work(pipe: Connection, splits: tuple[Split, ...]) -> None:
    """Answer requests until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to every process; the rank decides
    torch.set_num_threads(1)
    images.NUM_THREADS = 1  # there are several workers instead
    try:
        while True:
            request: Request = pipe.recv()
            try:
                batch = _read(splits, request)
            except InputError as error:
                pipe.send(error)
            except Exception:
                pipe.send(RuntimeError(f"while reading images ahead:\n{traceback.format_exc()}"))
            else:
                pipe.send(tuple(batch.shape))
                if batch.numel():
                    pipe.send_bytes(batch.numpy().data.cast("B"))
    except (EOFError, ConnectionError):
        return


def _read(splits: tuple[Split, ...], request: Request) -> Tensor:
    split, indices, epoch, copies = request
    if copies is None:
        return splits[split].read(indices, epoch)
    return splits[split].read(indices, epoch, copies)
