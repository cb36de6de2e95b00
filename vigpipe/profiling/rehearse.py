"""Rehearse the share of one of several ranks, in a process without the others.

What the others would give it are zeros, but as many; what it would give them is written somewhere.
So its work, its memory and its traffic are those of a real rank, and what is missing is the time
that messages and waiting take.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from vigpipe.graphs.job import GraphJob
from vigpipe.launch.device import synchronize
from vigpipe.parallel.agreement import Peers
from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.parallel.shards import Contribution, Shards
from vigpipe.profiling.live_bytes import LiveBytes
from vigpipe.profiling.steps import Steps
from vigpipe.replication.synchronous import Synchronous
from vigpipe.run.facts import Run
from vigpipe.run.step import complete_step, train_step


class CountedShards(Shards):
    """One rank of a group of m, without the others; it counts from `begin_step` on."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.size, self.rank = size, rank
        self.begin_step()

    def begin_step(self) -> None:
        self.given: Counter[int] = Counter()  # how often so many bytes were given in an exchange
        self.summed: Counter[int] = Counter()  # how often a tensor of so many bytes was added up
        self.marks: list[float] = []  # when each of these was ready, by `time.perf_counter`

    def exchange(self, contribution: Contribution, what: str) -> Tensor:
        (write, shapes, index, like), rank = contribution, self.rank
        mine = like.new_zeros(shapes[rank])
        with _disable_current_modes():  # what others hold does not count
            blocks = [
                like.new_empty(shape)[index(rank, to)].clone() for to, shape in enumerate(shapes)
            ]
        blocks[rank] = mine[index(rank, rank)]
        num_given = sum(block.numel() for block in blocks) - blocks[rank].numel()
        self.sent[what] += num_given * like.itemsize
        write(blocks)
        self.given[num_given * like.itemsize] += 1
        self._mark(like)
        return mine

    def total(self, values: Tensor, what: str) -> Tensor:
        self.sent[what] += 2 * (self.size - 1) * values.nbytes // self.size  # at least
        self.summed[values.nbytes] += 1
        self._mark(values)
        return values.clone()

    def _mark(self, like: Tensor) -> None:
        synchronize(like.device)
        self.marks.append(time.perf_counter())


class Counted(NamedTuple):
    """What one rank sends and holds in a step; see `CountedShards`."""

    sent_bytes: int
    given: Counter[int]
    summed: Counter[int]
    peak_bytes: int  # of all tensors that exist at a time, but for the graph itself


class Rehearsal(Steps):
    """One rank's share of the steps of a run with one stage, whose other ranks are not there."""

    def __init__(self, run: Run, rank: int, device: torch.device) -> None:
        layout, self.device = run.layout, device
        self._shards = CountedShards(layout.num_shards, layout.shard_of(rank))
        alone = Synchronous(run.course, layout.replica_index(rank), Peers())
        super().__init__(run, rank, device, alone, self._shards)

    def timed(self) -> list[float]:
        """Take a step; return its seconds to the first exchange, to the next, ..., to its end."""
        self._shards.begin_step()
        synchronize(self.device)
        began = time.perf_counter()
        self.take()
        synchronize(self.device)
        return [b - a for a, b in pairwise([began, *self._shards.marks, time.perf_counter()])]

    def count(self) -> Counted:
        """Take a step, and count what it sends and holds; a step must have been taken before."""
        batch, live = next(self.batches), LiveBytes()
        live.add(tensor for tensor in self._held(batch) if not self._is_of_graph(tensor))
        self._shards.begin_step()
        before = self._shards.sent.total()
        with live:
            train_step(self.state, batch)
        complete_step(self.state)
        sent = self._shards.sent.total() - before
        return Counted(sent, self._shards.given, self._shards.summed, live.peak)

    @property
    def gradient_bytes(self) -> int:
        parameters = list(self.state.trained.parameters().values())
        width = 2 if self.state.run.config.sync == "double" else 1
        return width * sum(p.numel() * p.element_size() for p in parameters)

    def _held(self, batch: ReplicaBatch) -> Iterator[Tensor]:
        state = self.state
        yield from (t for model in state.trained.models for t in model.state_dict().values())
        yield from (p.grad for p in state.trained.parameters().values() if p.grad is not None)
        yield from _tensors_in(vars(state.reducer.gradients), set())
        yield from _tensors_in(list(state.trained.optimizer.state.values()), set())
        yield from _tensors_in((batch.inputs, batch.labels, batch.keys, batch.structures), set())

    def _is_of_graph(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is memory of the graph, which the process has anyway."""
        assert isinstance(self.state.run.job, GraphJob)
        graph = self.state.run.job.graph
        arrays = [graph.indptr, graph.sources(), graph.features]
        begins = [a.ctypes.data for a in arrays if hasattr(a, "ctypes")]
        return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in begins


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors that an object refers to, but not what other ranks are given."""
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen or isinstance(value, Shards | torch.nn.Module):
        return
    seen.add(id(value))
    inside: Sequence[Any] = ()
    if isinstance(value, dict):
        inside = list(value.values())
    elif isinstance(value, list | tuple | set):
        inside = list(value)
    elif hasattr(value, "__dict__") and type(value).__module__.startswith("vigpipe."):
        inside = list(vars(value).values())
    for each in inside:
        yield from _tensors_in(each, seen)
