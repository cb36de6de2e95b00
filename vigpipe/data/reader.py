"""Read batches in this process when they are due, or ahead of time in others.

An image depends on what is asked for only (`Split.read`), so both give the same bits.

The processes are torch's DataLoader in small: its queues are made of semaphores that outlive a rank
that is killed, and Python then complains at the end of the run. Pipes close with the rank, and the
processes end with them. Worker i of N reads batches i, i + N, ... and waits until each is taken:

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

# Imported once by the process that workers are forked from; this one has threads by now. A worker
# runs the main module again, `vigpipe.train`, so what that imports is here too.
PRELOAD = ["vigpipe.run.evaluation", "rich.progress", "timm.data", "vigpipe.data.augment"]


class Request(NamedTuple):
    """Images to read as one batch.

    Attributes:
        split: number of the split.
        indices: positions in it.
        epoch: of the visit.
        copies: see `Split.read`.
    """

    split: int
    indices: list[int]
    epoch: int
    copies: list[int] | None


class Reader:
    """Reads one sequence of batches after the other.

    Args:
        splits: what may be read from.
        num_workers: processes that read ahead; 0 reads in this one. They start with the first
            sequence.
    """

    def __init__(self, splits: Sequence[Split], num_workers: int = 0) -> None:
        self._splits, self._num_workers = tuple(splits), num_workers
        self._workers: list[tuple[Connection, BaseProcess]] = []

    def read(
        self, split: Split, batches: Iterable[tuple[list[int], list[int] | None]], epoch: int
    ) -> Iterator[Tensor]:
        """Read (indices, copies) after (indices, copies); with workers, several at a time.

        Raises:
            InputError: as `Split.read`.
            RuntimeError: a worker failed otherwise, or is gone.
        """
        number = next(i for i, known in enumerate(self._splits) if known is split)
        requests = (Request(number, indices, epoch, copies) for indices, copies in batches)
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
            if num_waiting:  # nobody will take what is on its way
                self.close()

    def _start(self) -> tuple[Connection, BaseProcess]:
        context = fork_server.start_fork_server(PRELOAD)
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, self._splits), daemon=True)
        process.start()
        theirs.close()
        return ours, process


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
    images.NUM_THREADS = 1  # the workers themselves run side by side
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
