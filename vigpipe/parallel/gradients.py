"""Add up the gradients of all replicas once a step, so that the replicas stay equal.

`--sync` chooses one of three ways; `python -m benchmarks sync` times them:

    double  one all-reduce after the schedule has drained, of sums kept in twice the precision
    drain   the same all-reduce, of sums in the weights' own precision: half the traffic
    ddp     torch's DistributedDataParallel, bucket by bucket during the last backward

Under a pipeline DDP's reduction of stage s must end before the gradient of its input leaves for
stage s - 1, so the stages' reductions stand in series on the critical path; after the drain they
run side by side.

With --compress the sum is made after the drain too, of what each replica sends.

Sums in twice the precision are the same in (nearly) every order, so the weights do not depend on
the number of replicas. In single precision the last bits differ, a near-tie in a kNN graph is
resolved differently, and the runs soon diverge.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from vigpipe.config.choices import Sync
from vigpipe.ops.double_sum import DoubleSum, PairSum, offer, withdraw


def gather_vectors(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather a vector (n,) from each rank of a group, which all call this, in order: (D, n)."""
    if group is None or values.numel() == 0:
        return values.unsqueeze(0)
    all_values = values.new_empty(group.size() * values.numel())
    dist.all_gather_into_tensor(all_values, values.contiguous(), group=group)
    return all_values.view(group.size(), -1)


class NoGradients:
    """What stages have that are frozen."""

    def clear(self) -> None:
        """Do nothing."""

    def reduce(self) -> None:
        """Do nothing."""


class FlatGradients:
    """Gradients that are views of one buffer, so that a single all-reduce adds all of them up."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self.parameters, self.group = list(parameters), group
        self.buffer = self.parameters[0].new_zeros(sum(p.numel() for p in self.parameters))
        self.views = _views(self.buffer, self.parameters)

    def clear(self) -> None:
        """Prepare for the first backward of a step; backwards then add into the buffer."""
        self.buffer.zero_()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def reduce(self) -> None:
        """Add up the gradients of all replicas, after the last backward of a step."""
        if self.group is not None:
            dist.all_reduce(self.buffer, group=self.group)


class Compressor(Protocol):
    """Adds up tensors over replicas with fewer bytes; see `vigpipe.replication.feedback`."""

    def add_up(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...

    def commit(self, is_used: Tensor) -> None: ...

    def residuals(self) -> dict[str, Tensor]: ...

    def memory(self) -> dict[str, Tensor]: ...

    def account(self) -> dict[str, int]: ...


class CompressedGradients(FlatGradients):
    """Gradients that shards add up whole, and then replicas with fewer bytes (--compress)."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        compressor: Compressor,
        shards: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(parameters, shards)
        self._compressor = compressor

    def reduce(self) -> None:
        super().reduce()
        for view, total in zip(self.views, self._compressor.add_up(self.views), strict=True):
            view.copy_(total)


class DoubleGradients:
    """Gradients summed in twice their precision over micro-batches and replicas, then rounded once.

    float32 gradients are added up in float64, which holds their sums exactly unless one term is
    about 2^25 times smaller than another. That loss matters only if the sum lies halfway between
    two float32 numbers: it changed one last bit in twenty steps of the study model. float64
    gradients, which the checks use, are added up as pairs of float64.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self.parameters, self.group = list(parameters), group
        self.rounded = self.parameters[0].new_zeros(sum(p.numel() for p in self.parameters))
        self.high = self.rounded.double()
        self.low = self.high.clone() if self.rounded.dtype == torch.float64 else None
        self.views = _views(self.rounded, self.parameters)
        highs = _views(self.high, self.parameters)
        self._sums: list[DoubleSum] | list[PairSum]
        if self.low is None:
            self._sums = list(map(DoubleSum, highs))
        else:
            self._sums = list(map(PairSum, highs, _views(self.low, self.parameters)))
        for parameter, own in zip(self.parameters, self._sums, strict=True):
            _collect(parameter, own)

    def clear(self) -> None:
        for parameter, own in zip(self.parameters, self._sums, strict=True):
            parameter.grad = None
            own.begin()
            if isinstance(own, DoubleSum):
                offer(parameter, own)

    def reduce(self) -> None:
        for parameter, own in zip(self.parameters, self._sums, strict=True):
            withdraw(parameter)
            own.end()
        if self.low is None:
            if self.group is not None:
                dist.all_reduce(self.high, group=self.group)
            self.rounded.copy_(self.high)
        else:
            highs = gather_vectors(self.high, self.group)
            lows = gather_vectors(self.low, self.group)
            total = PairSum(highs[0].clone(), lows[0].clone())
            for other_high, other_low in zip(highs[1:], lows[1:], strict=True):
                total.add(other_high)
                total.low += other_low
            torch.add(total.high, total.low, out=self.rounded)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view


def _collect(parameter: nn.Parameter, own: DoubleSum | PairSum) -> None:
    """Make every backward move its gradient of a parameter into a sum."""

    def move(parameter: Tensor) -> None:
        if parameter.grad is not None:  # there is none if the backward has added to the sum itself
            own.add(parameter.grad)
            parameter.grad = None

    parameter.register_post_accumulate_grad_hook(move)


def _views(buffer: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    ranges = buffer.split([p.numel() for p in parameters])
    return [values.view_as(p) for values, p in zip(ranges, parameters, strict=True)]


class DDPGradients:
    """Gradients that DistributedDataParallel adds up during the last backward."""

    def __init__(
        self,
        stage_modules: Sequence[nn.Module],
        group: dist.ProcessGroup,
        reducing: Callable[[], None] | None,
    ) -> None:
        self.reducing = reducing
        self.modules: list[nn.Module] = []
        for stage_module in stage_modules:
            if not any(p.requires_grad for p in stage_module.parameters()):
                self.modules.append(stage_module)
                continue
            with warnings.catch_warnings():
                # 2.15 renames broadcast_buffers, and says itself to keep the old name for this use.
                warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
                module = DistributedDataParallel(
                    stage_module,
                    process_group=group,
                    broadcast_buffers=False,  # running statistics are pooled, not copied
                    init_sync=False,  # weights are equal: they depend on the seed only
                    gradient_as_bucket_view=True,
                )
            # The loss already weights the replicas, so buckets are summed, not averaged.
            module.register_comm_hook(group, self._sum_bucket)
            self.modules.append(module)

    def clear(self) -> None:
        for module in self.modules:
            module.zero_grad(set_to_none=True)

    def reduce(self) -> None:
        """Do nothing: the gradients have been added up when the last backward ends."""

    def _sum_bucket(
        self,
        group: dist.ProcessGroup,
        bucket: dist.GradBucket,
    ) -> Future[Tensor]:
        if self.reducing is not None and bucket.is_last():
            self.reducing()
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])


class GradientReducer:
    """The replicas of this rank's stages, and how their gradients are added up (see above).

    The `group` has all ranks that hold the same stages; of these, `shards` share a replica's batch.
    Under ddp, `reducing` is called when a backward has only the last all-reduce left to do. A
    compressor adds the gradients up instead. The schedule must run the `modules`.
    """

    def __init__(
        self,
        stage_modules: Sequence[nn.Module],
        group: dist.ProcessGroup | None,
        num_microbatches: int,
        sync: Sync = "double",
        reducing: Callable[[], None] | None = None,
        compressor: Compressor | None = None,
        shards: dist.ProcessGroup | None = None,
    ) -> None:
        self.compressor = compressor
        self.group = group if group is not None and group.size() > 1 else None
        # The gradient of the only micro-batch of the only replica is its sum already, and takes no
        # more memory.
        is_sum = self.group is not None or num_microbatches != 1
        self.modules = list(stage_modules)
        parameters = [p for m in stage_modules for p in m.parameters() if p.requires_grad]
        self.gradients: DoubleGradients | FlatGradients | DDPGradients | NoGradients
        if not parameters:  # all stages are frozen
            self.gradients = NoGradients()
        elif compressor is not None:
            self.gradients = CompressedGradients(parameters, compressor, shards)
        elif sync == "double" and is_sum:
            self.gradients = DoubleGradients(parameters, self.group)
        elif sync == "ddp" and self.group is not None:
            self.gradients = DDPGradients(stage_modules, self.group, reducing)
            self.modules = self.gradients.modules
        else:
            self.gradients = FlatGradients(parameters, self.group)

    def end_step(self, is_taken: Tensor) -> None:
        """Be told whether the step with the last sums is taken, a scalar on the device."""
        if self.compressor is not None:
            self.compressor.commit(is_taken)

    def gather(self, values: Tensor) -> Tensor:
        """Gather a vector (n,) from each rank with the same stages, in rank order: (D * m, n)."""
        return gather_vectors(values, self.group)
