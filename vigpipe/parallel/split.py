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
        boundary_shape: of one sample's node features between two blocks.
        num_classes: width of the logits.
    """

    has_stem: bool
    has_readout: bool
    boundary_shape: tuple[int, ...]
    num_classes: int

    def keep(self, blocks: Iterable[int], stem: bool, readout: bool) -> None:
        """Delete everything else."""
        ...

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        """Run what is present."""
        ...


Model = TypeVar("Model", bound=Cuttable)


class Part(nn.Module):
    """One stage's part of a model, run on micro-batches of a fixed number of rows.

    Rows without a sample are dropped before the model sees them and come back as zeros, so padding
    enters no statistic, no graph and no gradient.

    Args:
        model: what `Cuttable.keep` left.
        rows: rows of a micro-batch, padding included.
        image_shape: (C, H, W) of the images.
        dtype: of the weights and of what crosses a boundary.
        autocast: run the matrix products in bfloat16.
    """

    def __init__(
        self,
        model: Cuttable,
        rows: int,
        image_shape: tuple[int, ...],
        dtype: torch.dtype,
        autocast: bool,
    ) -> None:
        super().__init__()
        self.model, self.dtype, self.autocast = model, dtype, autocast
        self.input_shape = (rows, *(image_shape if model.has_stem else model.boundary_shape))
        outputs = (model.num_classes,) if model.has_readout else model.boundary_shape
        self.output_shape = (rows, *outputs)

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        """(rows, ...) -> (rows, ...); keys (rows,) int64 on the CPU, negative on padding."""
        num_samples = int((keys >= 0).sum())
        if num_samples == 0:
            return self._connected_zeros(x)
        lowered = torch.autocast(x.device.type, torch.bfloat16) if self.autocast else nullcontext()
        with lowered:
            y = self.model(x[:num_samples], keys[:num_samples])
        y = y.to(self.dtype).contiguous()  # what crosses a boundary has to be
        if num_samples == len(keys):
            return y
        return torch.cat((y, y.new_zeros(len(keys) - num_samples, *y.shape[1:])))

    def _connected_zeros(self, x: Tensor) -> Tensor:
        # Peers wait for the gradient of x, and DDP for one of every parameter: zeros that depend on
        # both.
        zero = 0 * x.sum()
        for parameter in self.parameters():
            zero = zero + 0 * parameter.sum()
        return zero.to(self.dtype).expand(self.output_shape).contiguous()


def cut_parts(build: Callable[[], Model], plan: Plan, part_indices: tuple[int, ...]) -> list[Model]:
    """Build the whole model, so that weights do not depend on the cut, and keep parts of it."""
    model = build()
    parts: list[Model] = []
    for index in part_indices:
        part = model if index == part_indices[-1] else deepcopy(model)
        part.keep(plan.stages[index], stem=plan.is_first(index), readout=plan.is_last(index))
        parts.append(part)
    return parts
