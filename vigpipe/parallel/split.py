"""Cut a model into the parts its stages run."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from copy import deepcopy
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from vigpipe.parallel.plan import Plan


class Cuttable(Protocol):
    """What a model must offer to be cut; `vigpipe.model.staged.StagedModel` does.

    Attributes:
        has_stem: it takes images, not node features.
        has_readout: it gives logits, not node features.
        num_classes: width of the logits.
        span: first of its blocks, and the one after the last.
        recompute: compute activations again in the backward instead of keeping them.
    """

    has_stem: bool
    has_readout: bool
    num_classes: int
    span: tuple[int, int]
    recompute: bool

    def boundary_shape(self, block: int) -> tuple[int, ...]:
        """Shape of what one sample hands to a block."""
        ...

    def keep(self, blocks: Iterable[int], stem: bool, readout: bool) -> None:
        """Delete everything else."""
        ...

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        """Run what is present."""
        ...


Model = TypeVar("Model", bound=Cuttable)


class StageModule(nn.Module):
    """One stage's part of a model, run on micro-batches of a fixed size.

    Padding is dropped before the model sees it and comes back as zeros, so it enters no statistic,
    no graph and no gradient.

    Args:
        model: what `Cuttable.keep` left.
        microbatch_size: samples of a micro-batch, padding included.
        image_shape: (C, H, W) of the images.
        dtype: of the weights.
        autocast: run the matrix products in bfloat16.
        boundary: dtype of what crosses from stage to stage; by default that of the weights.
        num_recomputed: micro-batches of a step, the first ones, whose activations are computed
            again in the backward.
    """

    def __init__(
        self,
        model: Cuttable,
        microbatch_size: int,
        image_shape: tuple[int, ...],
        dtype: torch.dtype,
        autocast: bool,
        boundary: torch.dtype | None = None,
        num_recomputed: int = 0,
    ) -> None:
        super().__init__()
        self.model, self.dtype, self.autocast = model, dtype, autocast
        boundary = boundary or dtype
        self.input_dtype = dtype if model.has_stem else boundary
        self.output_dtype = dtype if model.has_readout else boundary
        self.num_recomputed, self.num_forwards = num_recomputed, 0
        start, end = (model.boundary_shape(block) for block in model.span)
        self.input_shape = (microbatch_size, *(image_shape if model.has_stem else start))
        self.output_shape = (microbatch_size, *((model.num_classes,) if model.has_readout else end))

    def begin_step(self) -> None:
        """Before the first micro-batch of a training step; a stage takes them in order."""
        self.num_forwards = 0

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        """Run the stage on one micro-batch of b samples, padding included.

        Args:
            x: images or node features, (b, ...).
            keys: (b,) int64 on the CPU, negative on padding, which comes last.

        Returns:
            Node features or logits, (b, ...), zeros on padding.
        """
        self.model.recompute = self.num_forwards < self.num_recomputed
        self.num_forwards += 1
        num_samples = int((keys >= 0).sum())
        if num_samples == 0:
            return self._connected_zeros(x)
        lowered = torch.autocast(x.device.type, torch.bfloat16) if self.autocast else nullcontext()
        with lowered:
            y = self.model(x[:num_samples].to(self.dtype), keys[:num_samples])
        y = y.to(self.output_dtype).contiguous()  # what crosses a boundary has to be
        if num_samples == len(keys):
            return y
        return torch.cat((y, y.new_zeros(len(keys) - num_samples, *y.shape[1:])))

    def _connected_zeros(self, x: Tensor) -> Tensor:
        # Peers wait for the gradient of x, and DDP for one of every parameter: zeros that depend on
        # both.
        zero = 0 * x.sum()
        for parameter in self.parameters():
            zero = zero + 0 * parameter.sum()
        return zero.to(self.output_dtype).expand(self.output_shape).contiguous()


def cut_stages(
    build: Callable[[], Model], plan: Plan, stage_indices: tuple[int, ...]
) -> list[Model]:
    """Build the whole model, so that weights do not depend on the cut, and keep parts of it."""
    model = build()
    stage_modules: list[Model] = []
    for index in stage_indices:
        stage_module = model if index == stage_indices[-1] else deepcopy(model)
        stage_module.keep(
            plan.stages[index], stem=plan.is_first(index), readout=plan.is_last(index)
        )
        stage_modules.append(stage_module)
    return stage_modules
