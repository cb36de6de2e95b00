"""One way to run a model, in a process of its own: steps of training and of inference."""

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from vigpipe.bench import throughput
from vigpipe.bench.alone import begin_peak, end_peak
from vigpipe.bench.pipeline import step_of
from vigpipe.config.choices import Device, Dtype, Model
from vigpipe.config.options import TrainConfig
from vigpipe.launch.device import (
    allow_tf32,
    keep_freed_memory,
    repeat_convolutions,
    synchronize,
    weight_dtype,
)
from vigpipe.launch.join import device_alone
from vigpipe.run.facts import prepare
from vigpipe.run.rank import make_rank_state

Formulation = Literal["reference", "ours"]
Precision = Literal["float32", "tf32", "bfloat16"]
Mode = Literal["training", "inference"]
NUM_WARMUP = 3  # steps, in which kernels are compiled and the allocator grows
TURN_SECONDS, MOST_STEPS = 0.3, 20  # a turn takes about so long, but not more steps
NUM_COMPARED = 2  # images whose logits are compared


@dataclass(frozen=True)
class Way:
    """A way to run a model.

    Attributes:
        formulation: reference is the formulation that everyone uses; ours trains with the steps of
            `vigpipe train`, and infers with the norms folded into the weights.
        compiled: run the model through torch.compile.
        precision: float32 without any rounding, tf32 (matrix products on tensor cores), or bfloat16
            (autocast: AMP).
        graph: replay CUDA graphs: those of torch.compile (mode reduce-overhead), or, of training
            that is ours, that of --cuda-graph.
    """

    formulation: Formulation
    compiled: bool
    precision: Precision
    graph: bool = False

    def __str__(self) -> str:
        compiled = ", compiled" * self.compiled + ", CUDA graph" * self.graph
        precision = "TF32" if self.precision == "tf32" else self.precision
        return f"{self.formulation}{compiled}, {precision}"


@dataclass(frozen=True)
class Prepared:
    """What is known of a way before it is timed.

    Attributes:
        first_seconds: of the first step, with compiling.
        step_seconds: of a later step.
        peak_bytes: what weights, optimizer and the work itself take at most.
        logits: of the first images; none in training.
    """

    first_seconds: float
    step_seconds: float
    peak_bytes: float
    logits: list[list[float]]


def training_step(
    model: Model,
    batch_size: int,
    dtype: Dtype,
    compiled: bool,
    device: torch.device,
    graph: bool | None = None,
) -> Callable[[], object]:
    """Make the step of `vigpipe train` on one batch of noise.

    Args:
        model: name of the model.
        batch_size: images of the batch.
        dtype: the option --dtype.
        compiled: the option --compile.
        device: device to run on.
        graph: the option --cuda-graph.
    """
    repeat_convolutions()
    config = TrainConfig(
        model=model,
        data="fake",
        image_size=throughput.VIG_SHAPES[model].img_size[0],
        batch_size=batch_size,
        epochs=10**6,
        dtype=dtype,
        compile=compiled,
        cuda_graph=graph,
    )
    return step_of(make_rank_state(prepare(config, weight_dtype(dtype)), 0, device))


class Contender:
    """A model that is run in one way, in turns with others in other processes.

    Args:
        model: name of the model.
        way: how to run it.
        mode: what it does.
        batch_size: images of a step.
        device_name: cpu or cuda.
        num_threads: threads of this process.
        num_compilers: processes that compile kernels.
    """

    def __init__(
        self,
        model: Model,
        way: Way,
        mode: Mode,
        batch_size: int,
        device_name: Device,
        num_threads: int,
        num_compilers: int,
    ) -> None:
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(num_compilers)
        torch.set_num_threads(num_threads)
        keep_freed_memory()
        self._device = device_alone(device_name)
        self._precision, self._mode = way.precision, mode
        self._make = partial(_make_step, model, way, mode, batch_size, self._device)
        self._step: Callable[[], object] | None = None
        self._num_steps = 1

    def prepare(self) -> Prepared:
        """Make the model, run its first steps, and measure its memory.

        After an error, such as too little memory while others used it, it may be called again.
        """
        try:
            return self._prepare()
        finally:
            gc.collect()  # the frames of an error hold tensors
            release()

    def _prepare(self) -> Prepared:
        before = begin_peak(self._device)
        if self._step is None:
            self._step = self._make()
        allow_tf32(self._precision == "tf32")
        first_seconds, result = self._timed(self._step)
        logits: list[list[float]] = []
        if self._mode == "inference":
            assert isinstance(result, torch.Tensor)
            logits = result[:NUM_COMPARED].float().tolist()
        seconds = min(self._timed(self._step)[0] for _ in range(NUM_WARMUP - 1))
        self._num_steps = min(MOST_STEPS, max(1, round(TURN_SECONDS / seconds)))
        peak = end_peak(self._device) - before
        return Prepared(first_seconds, seconds, peak, logits)

    def turn(self) -> float:
        """Run some steps and return the mean seconds of one."""
        assert self._step is not None
        self._step()  # takes from the device the memory that it gave back
        synchronize(self._device)
        start = time.perf_counter()
        for _ in range(self._num_steps):
            self._step()
        synchronize(self._device)
        seconds = (time.perf_counter() - start) / self._num_steps
        release()
        return seconds

    def _timed(self, step: Callable[[], object]) -> tuple[float, object]:
        start = time.perf_counter()
        result = step()
        synchronize(self._device)
        return time.perf_counter() - start, result


def release() -> None:
    """Give memory that no tensor uses back to the GPU, for the processes beside this one."""
    torch.cuda.empty_cache()  # does nothing where CUDA has not been used


def _make_step(
    model: Model, way: Way, mode: Mode, batch_size: int, device: torch.device
) -> Callable[[], object]:
    dtype: Dtype = "bfloat16" if way.precision == "bfloat16" else "float32"
    if mode == "training" and way.formulation == "ours":
        return training_step(model, batch_size, dtype, way.compiled, device, way.graph)
    name = "reference" if way.formulation == "reference" else "fused"
    name += ", compiled" * way.compiled + ", CUDA graph" * way.graph
    return throughput.make(model, name, dtype, batch_size, mode == "training", device=device)
