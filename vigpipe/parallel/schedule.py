"""Run micro-batches through the stages: with torch's schedules, or in a loop on a single rank.

GPipe on two stages and three micro-batches (F forward, B backward, . waiting):

    stage 0   F0 F1 F2 .  .  B0 B1 B2       duration of a step with S equal stages:
    stage 1   .  F0 F1 F2 B0 B1 B2 .        (M + S - 1) * (f + b)
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pkgutil import resolve_name
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.parallel.layout import Layout
from vigpipe.parallel.split import StageModule
from vigpipe.parallel.stage import Stage, Watcher
from vigpipe.parallel.step_graph import Record, Send, StepGraph
from vigpipe.schedules import RULES, messages_ahead
from vigpipe.spans import SpanKind

ROWS_AT_ONCE = 1 << 14  # A large input is taken layer by layer, so many rows at a time.
LONG_WAIT_SECONDS = 600.0  # Another stage computes whole layers of it meanwhile.


class Loss(Protocol):
    """A micro-batch's share of the loss of the step; each job has one."""

    def begin(self, num_samples: int, weights: Sequence[Tensor] = ()) -> None:
        """Prepare for the micro-batches of a step, which come in order.

        The loss of the step is the mean of `num_samples`, over all replicas. The losses of each
        micro-batch's rows are multiplied by its weights, if there are any.
        """

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return a scalar for logits (microbatch_size, num_classes) and their labels."""
        ...


class Pipeline:
    """The stages of one rank, in the order of the plan, with the schedule that runs them.

    The `modules` are the same stages, which may be wrapped in DistributedDataParallel. `send`
    copies a tensor of the host to the device. The stopwatch is a context that is entered for every
    forward and backward of a training step.
    """

    def __init__(
        self,
        stage_modules: list[StageModule],
        modules: Sequence[nn.Module],
        stage_indices: tuple[int, ...],
        layout: Layout,
        device: torch.device,
        pipeline_group: ProcessGroup | None,
        loss: Loss,
        send: Callable[[Tensor], Tensor],
        watcher: Watcher | None = None,
        stopwatch: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.stage_modules, self.loss, self.send = stage_modules, loss, send
        self.watcher = watcher
        stopwatch = stopwatch or nullcontext()
        self._graph: StepGraph | None = None
        self.num_microbatches, self._stage_indices = layout.num_microbatches, stage_indices
        self.device, self._group, self._size = device, pipeline_group, layout.pipeline_size
        self.has_peers = layout.pipeline_size > 1
        self.has_first = stage_modules[0].model.has_stem
        self.has_last = stage_modules[-1].model.has_readout
        if layout.pipeline_size == 1:
            self._schedule = _OneRank(
                modules, stage_indices[-1], layout.num_microbatches, self._loss, watcher, stopwatch
            )
            return
        ahead = messages_ahead(layout.schedule, device.type)
        stages = [
            Stage(
                watcher,
                stopwatch,
                layout.num_microbatches if ahead == 1 else 0,
                module,
                index,
                layout.num_stages,
                device,
                # Input and output are given so that torch does not probe the model, which would
                # change BatchNorm's statistics. Boundaries require grad, or torch 2.13+ makes no
                # buffers for their gradients.
                input_args=_examples(
                    stage.input_shapes, stage.input_dtype, not stage.model.follows_leading
                ),
                output_args=_examples(
                    stage.output_shapes, stage.output_dtype, not stage.model.is_leading
                ),
                is_frozen=stage.model.is_leading,
                sends_back=not stage.model.follows_leading,
                group=pipeline_group,
            )
            for stage, module, index in zip(stage_modules, modules, stage_indices, strict=True)
        ]
        rule = RULES[layout.schedule]
        self._schedule = resolve_name(rule.class_name)(
            stages if rule.is_virtual else stages[0],
            n_microbatches=layout.num_microbatches,
            loss_fn=self._loss,
            scale_grads=False,  # `Loss` already weights the micro-batches
        )

    def train_step(self, batch: ReplicaBatch, *, eager: bool = False) -> Tensor | None:
        """Run the forward and backward of every micro-batch; gradients add up in `.grad`.

        With `eager`, no recorded step is replayed. The rank of the last stage returns the share of
        each micro-batch in the loss, (M,) float64 on the device.
        """
        for stage_module in self.stage_modules:
            stage_module.train()
        if self._graph is not None and self._graph.fits(batch) and not eager:
            return self._graph(batch)
        return self._take_step(batch, self.send)

    def record_steps(self, record: Record, num_samples: int) -> None:
        """Record a step once it is warm, and replay it as one graph from then on.

        Only for a pipeline of one rank, without a watcher. A full step has `num_samples` over all
        replicas, and micro-batches of one size.
        """
        schedule = self._schedule
        assert isinstance(schedule, _OneRank)
        # Times are those of whole replays: none can be taken inside.
        stopwatch, schedule.stopwatch = schedule.stopwatch, nullcontext()
        steps = self._send_batch, self._take_step
        self._graph = StepGraph(num_samples, *steps, self.send, record, stopwatch)

    def _take_step(self, batch: ReplicaBatch, send: Send) -> Any:
        inputs, options = self._send_batch(batch, send)
        self._schedule.step(*inputs, return_outputs=False, **options)
        return torch.stack(options["losses"]).detach().double() if self.has_last else None

    def _send_batch(
        self, batch: ReplicaBatch, send: Send
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        for stage_module in self.stage_modules:
            draws = stage_module.model.draw(batch.keys, stage_module.dtype).sent(send)
            stage_module.begin(batch.sizes, draws, batch.structures)
        return self._send_samples(batch, send)

    @torch.no_grad()
    def logits(self, batch: ReplicaBatch) -> Tensor | None:
        """Run all micro-batches forward only, in evaluation mode.

        Only the rank of the last stage has logits, (M * microbatch_size, num_classes).
        """
        for stage_module in self.stage_modules:
            stage_module.eval()
            stage_module.begin(batch.sizes, structures=batch.structures)
        if batch.by_layer:
            return self._logits_by_layer(batch)
        inputs, options = self._send_samples(batch, self.send)
        logits = self._schedule.eval(*inputs, **options)
        return logits[..., 0] if logits is not None and logits.dim() == 3 else logits

    @torch.no_grad()
    def forward_only(self, batch: ReplicaBatch) -> None:
        """Run all micro-batches forward as in training, so that norms see their features."""
        for stage_module in self.stage_modules:
            stage_module.train()
        inputs, options = self._send_batch(batch, self.send)
        self._schedule.eval(*inputs, **options)

    def _logits_by_layer(self, batch: ReplicaBatch) -> Tensor | None:
        (structure,), (num_rows,) = batch.structures, batch.sizes
        x = None if batch.inputs is None else self.send(batch.inputs)
        for stage_module, index in zip(self.stage_modules, self._stage_indices, strict=True):
            if not stage_module.model.has_stem and self.has_peers:
                shape = num_rows, *stage_module.input_shapes[0][1:]
                self._watch("wait input", index)
                x = self.rows_from_before(shape, stage_module.input_dtype)
            self._watch("forward", index)
            assert x is not None
            x = stage_module.by_layer(x, structure, ROWS_AT_ONCE)
            self._watch(None)
            if not stage_module.model.has_readout and self.has_peers:
                self._watch("send", index)
                self.pass_rows(x, to_next=True)
        return x if self.has_last else None

    def rows_from_before(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        x = torch.empty(shape, dtype=dtype, device=self.device)
        self.pass_rows(x, to_next=False)
        return x

    def pass_rows(self, x: Tensor, *, to_next: bool) -> None:
        """Send all rows to the rank of the next stage, or receive them from the one before."""
        assert self._group is not None
        other = (dist.get_rank(self._group) + (1 if to_next else -1)) % self._size
        for rows in x.split(ROWS_AT_ONCE):
            if to_next:
                work = dist.isend(rows, group=self._group, group_dst=other)
            else:
                work = dist.irecv(rows, group=self._group, group_src=other)
            assert work is not None
            work.wait(timedelta(seconds=LONG_WAIT_SECONDS))

    def _watch(self, kind: SpanKind | None, stage: int = -1) -> None:
        if self.watcher is None:
            return
        if kind is None:
            self.watcher.leave()
        else:
            self.watcher.enter(kind, stage, 0)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.watcher is None:
            return self.loss(logits, labels)
        self.watcher.resume()  # the forward of the last stage
        share = self.watcher.region("loss", self.loss, (logits, labels))
        self.watcher.leave()
        return share

    def _send_samples(
        self, batch: ReplicaBatch, send: Send
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Send the inputs and labels that this rank needs; the schedule fills the `losses`."""
        weights = () if batch.weights is None else send(batch.weights).chunk(len(batch.sizes))
        self.loss.begin(batch.num_samples, weights)
        inputs = () if batch.inputs is None else (send(batch.inputs),)
        return inputs, {} if batch.labels is None else {"target": send(batch.labels), "losses": []}


@dataclass
class _OneRank:
    """All stages on one rank, one micro-batch after the other; called like torch's schedules."""

    modules: Sequence[nn.Module]
    stage_index: int
    num_microbatches: int
    loss: Callable[[Tensor, Tensor], Tensor]
    watcher: Watcher | None
    stopwatch: AbstractContextManager[Any]

    def step(
        self, inputs: Tensor, *, target: Tensor, losses: list[Tensor], return_outputs: bool
    ) -> None:
        for i, (x, label) in enumerate(zip(self._cut(inputs), self._cut(target), strict=True)):
            with ExitStack() as stack:
                stack.enter_context(self.stopwatch)
                if i < self.num_microbatches - 1:  # DDP synchronises on the last micro-batch
                    for module in self.modules:
                        if isinstance(module, DistributedDataParallel):
                            stack.enter_context(module.no_sync())
                loss = self.loss(self._forward(x, i), label)
                if self.watcher is not None:
                    self.watcher.enter("backward", self.stage_index, i)
                loss.backward()
                if self.watcher is not None:
                    self.watcher.leave()
            losses.append(loss)

    def eval(self, inputs: Tensor, *, target: Tensor, losses: list[Tensor]) -> Tensor:
        return torch.cat([self._forward(x, i) for i, x in enumerate(self._cut(inputs))])

    def _cut(self, values: Tensor) -> tuple[Tensor, ...]:
        return torch.tensor_split(values, self.num_microbatches)

    def _forward(self, x: Tensor, microbatch: int) -> Tensor:
        if self.watcher is not None:
            self.watcher.enter("forward", self.stage_index, microbatch)
        features: Any = x
        for module in self.modules:
            features = module(*features) if isinstance(features, tuple) else module(features)
        if self.watcher is not None:
            self.watcher.leave()
        return features


def _examples(
    shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, grad: bool
) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad) for shape in shapes
    )
