"""Cut a model into the modules that its stages run."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from vigpipe.parallel.plan import Plan


class SampleDraws(Protocol):
    """Random choices for some samples; `vigpipe.model.keyed_dropout.Draws` implements this."""

    def part(self, start: int, end: int) -> "SampleDraws":
        """Return those of the samples start ... end - 1."""
        ...

    def sent(self, send: Callable[[Tensor], Tensor]) -> "SampleDraws":
        """Return these draws on the device that `send` copies a tensor to."""
        ...


class Cuttable(Protocol):
    """What a model must offer to be cut; `vigpipe.model.staged.StagedModel` does."""

    has_stem: bool  # whether it begins with the model's input; without the stem, with features
    has_readout: bool  # whether its output is logits; without the readout it is node features
    num_classes: int
    span: tuple[int, int]  # number of its first block, and of the block after its last
    recompute: bool  # whether to compute activations again in the backward instead of keeping them

    @property
    def num_heads(self) -> int:
        """How many layers give logits; in training, the output of two is a tuple."""
        ...

    @property
    def is_leading(self) -> bool:
        """Whether neither it nor what comes before is trained."""
        ...

    @property
    def follows_leading(self) -> bool:
        """Whether nothing that comes before is trained."""
        ...

    def boundary_shapes(self, block: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of what one sample passes to a block, without the batch dimension."""
        ...

    def keep(self, blocks: Iterable[int], stem: bool, readout: bool) -> None:
        """Delete everything but the given blocks, the stem and the readout."""

    def draw(self, keys: Tensor, dtype: torch.dtype) -> SampleDraws:
        """Make the random choices for samples in what has been kept.

        The keys, (B,) int64, are what random masks are keyed by. The features have the given type.
        """
        ...

    def __call__(self, x: Any, keys: Any, *structure: Any) -> Any:
        """Run what has been kept on inputs or features, (b, ...), of b rows.

        Where several tensors cross a boundary, it takes and gives a tuple of them.
        The keys are the rows' draws; None in evaluation mode. A structure is what the model takes
        besides, such as edges; nothing for most models.
        """
        ...


Model = TypeVar("Model", bound=Cuttable)


class StageModule(nn.Module):
    """One stage of a model, run on micro-batches of a fixed size.

    Padding is dropped before the model sees it and comes back as zeros, so it enters no statistic,
    no graph and no gradient.
    """

    def __init__(
        self,
        model: Cuttable,  # the stage, as `Cuttable.keep` left it
        microbatch_size: int,  # rows of a micro-batch of the model's input, padding included
        row_shape: tuple[int, ...],  # of one row of the model's input, (C, H, W) of an image
        dtype: torch.dtype,  # of the weights
        autocast_dtype: torch.dtype | None = None,  # of matrix products; None for `dtype`
        boundary: torch.dtype | None = None,  # of what passes between stages; None for `dtype`
        # Number of micro-batches, from the first of a step, whose activations are computed again in
        # the backward.
        num_recomputed: int = 0,
        # Rows of a micro-batch of the stage's input, and of its output, padding included; None for
        # those of the model's input.
        rows: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.dtype, self.autocast_dtype = model, dtype, autocast_dtype
        boundary = boundary or dtype
        self.input_dtype = dtype if model.has_stem else boundary
        self.output_dtype = dtype if model.has_readout else boundary
        self.num_recomputed = num_recomputed
        self.microbatch_size, self.rows = microbatch_size, rows
        rows_in, rows_out = rows or (microbatch_size, microbatch_size)
        self.begin((microbatch_size,))
        start, end = (model.boundary_shapes(block) for block in model.span)
        logits = (model.num_classes, *([model.num_heads] if model.num_heads > 1 else []))
        # Shapes of all tensors that the stage takes, and of all that it gives.
        self.input_shapes = _of_rows(rows_in, (row_shape,) if model.has_stem else start)
        self.output_shapes = _of_rows(rows_out, (logits,) if model.has_readout else end)

    def begin(
        self,
        sizes: Sequence[int],
        draws: SampleDraws | None = None,
        structures: Sequence[tuple[Any, ...]] = (),
    ) -> None:
        """Prepare for the micro-batches of a step, which a stage takes in order.

        All that depends on numbers is known on the host before, so that a stage on a GPU never has
        to wait for one. Sizes do not count padding. Of a micro-batch that several ranks share, one
        may have no samples; it has a structure, and takes part. The draws are those for all rows of
        the step, padding included, on the device of the stage; None for an evaluation.
        """
        self.sizes, self.draws, self.num_forwards = sizes, draws, 0
        self.structures = structures

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the stage on the next micro-batch of b rows, padding included, which comes last.

        Inputs or features, (b, ...), become features or logits, (b, ...), or as many rows as the
        stage is said to have; zeros on padding. The logits of two heads are (b, num_classes, 2); in
        an evaluation both are their mean. It gives a tuple where several tensors cross a boundary.
        """
        x = inputs[0]
        index, num_rows = self.num_forwards, len(x) if self.rows is None else self.rows[1]
        self.num_forwards += 1
        self.model.recompute = index < self.num_recomputed
        num_samples = self.sizes[index]
        structure = self.structures[index] if self.structures else ()
        if num_samples == 0 and not structure:
            return _alone(self._connected_zeros(inputs, num_rows))
        start = index * (len(x) if self.rows is None else self.microbatch_size)
        draws = None if self.draws is None else self.draws.part(start, start + num_samples)
        # What the stage passes on as it is, is a view of its input: an input itself cannot be what
        # a backward begins with.
        samples = tuple(x[:num_samples].to(self.dtype) for x in inputs)
        with self._precision(x):
            y = self.model(_alone(samples), draws, *structure)
        if self.model.has_readout:
            y = self._one_tensor(y)
        outputs = y if isinstance(y, tuple) else (y,)
        return _alone(tuple(self._padded(y, num_rows) for y in outputs))

    def _padded(self, y: Tensor, num_rows: int) -> Tensor:
        y = y.to(self.output_dtype).contiguous()  # messages have to be contiguous
        if len(y) == num_rows:
            return y
        return torch.cat((y, y.new_zeros(num_rows - len(y), *y.shape[1:])))

    def _one_tensor(self, logits: Tensor | tuple[Tensor, ...]) -> Tensor:
        """Put the logits of the heads into one tensor."""
        if isinstance(logits, tuple):
            return torch.stack(logits, -1)
        num_heads = self.model.num_heads
        return logits if num_heads == 1 else logits.unsqueeze(-1).expand(-1, -1, num_heads)

    @torch.no_grad()
    def by_layer(self, x: Tensor, structure: tuple[Any, ...], chunk: int) -> Tensor:
        """Evaluate all n rows of a large input, (n, ...), `chunk` rows of each layer at a time."""
        model: Any = self.model  # of a graph, with a structure; these offer `by_layer`
        with self._precision(x):
            y = model.by_layer(x.to(self.dtype), *structure, chunk=chunk)
        return y.to(self.output_dtype).contiguous()

    def _precision(self, x: Tensor) -> AbstractContextManager[Any]:
        dtype = self.autocast_dtype
        return nullcontext() if dtype is None else torch.autocast(x.device.type, dtype)

    def _connected_zeros(self, inputs: tuple[Tensor, ...], num_rows: int) -> tuple[Tensor, ...]:
        # Other ranks wait for the gradients of the inputs, and DDP for a gradient of every
        # parameter, so these zeros depend on both.
        zero = 0 * inputs[0].sum()
        for tensor in (*inputs[1:], *self.parameters()):
            zero = zero + 0 * tensor.sum()
        zero = zero.to(self.output_dtype)
        return tuple(zero.expand(num_rows, *s[1:]).contiguous() for s in self.output_shapes)


def _of_rows(num_rows: int, shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    return tuple((num_rows, *shape) for shape in shapes)


def _alone(tensors: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """Return the only tensor of a tuple, or the tuple of several."""
    return tensors[0] if len(tensors) == 1 else tensors


def cut_stages(
    build: Callable[[], Model], plan: Plan, stage_indices: tuple[int, ...]
) -> list[Model]:
    """Build a rank's stages from the whole model, so that its weights do not depend on the cut."""
    model = build()
    stage_modules: list[Model] = []
    for index in stage_indices:
        stage_module = model if index == stage_indices[-1] else deepcopy(model)
        stage_module.keep(plan.stages[index], plan.is_first(index), plan.is_last(index))
        stage_modules.append(stage_module)
    return stage_modules
