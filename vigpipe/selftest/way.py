"""One way to run a model, in a process of its own: steps of training and of inference."""

import gc
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.utils.model import reparameterize_model
from torch import Tensor, nn

from vigpipe.config.choices import Device, Dtype, Model
from vigpipe.config.options import TrainConfig
from vigpipe.inference.prepack import can_prepack, prepack
from vigpipe.launch.device import (
    allow_tf32,
    keep_freed_memory,
    repeat_convolutions,
    synchronize,
    weight_dtype,
)
from vigpipe.launch.join import device_alone
from vigpipe.model.shapes import VIG_SHAPES
from vigpipe.model.variants import create_model
from vigpipe.model.vig import VisionGnn
from vigpipe.run.batches import batches
from vigpipe.run.facts import prepare
from vigpipe.run.rank import RankState, make_rank_state
from vigpipe.run.step import train_step
from vigpipe.selftest.compared import begin_peak, end_peak
from vigpipe.selftest.reference import ReferenceVig

NUM_CLASSES = 1000
Formulation = Literal["reference", "ours", "products"]
Precision = Literal["float32", "tf32", "bfloat16"]
Mode = Literal["training", "inference"]
NUM_WARMUP = 3  # steps, in which kernels are compiled and the allocator grows
TURN_SECONDS, MOST_STEPS = 0.3, 20  # a turn takes about so long, but not more steps
LEAST_CPU_STEPS = 3  # other programs may interrupt one of them
NUM_COMPARED = 2  # images whose logits are compared


@dataclass(frozen=True)
class Way:
    """A way to run a model.

    Reference is the formulation that everyone uses. Ours trains with the steps of `vigpipe train`,
    and infers as `vigpipe predict` does, with the weights prepacked on a CPU, or compiled, with the
    norms folded into them. Products is our model in the loop of the reference; the benchmarks run
    the matrix products and convolutions of its step alone.
    """

    formulation: Formulation
    compiled: bool
    precision: Precision  # tf32: matrix products on tensor cores; bfloat16: autocast (AMP)
    graph: bool = False  # replay the CUDA graphs of torch.compile, or in our training --cuda-graph
    channels_last: bool = False  # keep the reference's features so; on GPUs they always are
    frozen: bool = False  # compile for constant weights, for inference
    autotuned: bool = False  # let the compiler measure its kernels

    def __str__(self) -> str:
        options = {
            "compiled": self.compiled,
            "max-autotune": self.autotuned,
            "frozen": self.frozen,
            "channels last": self.channels_last,
            "CUDA graph": self.graph,
        }
        precision = "TF32" if self.precision == "tf32" else self.precision
        chosen = [name for name, is_on in options.items() if is_on]
        return ", ".join([self.formulation, *chosen, precision])


@dataclass(frozen=True)
class Prepared:
    """What is known of a way before it is timed."""

    first_seconds: float  # with compiling
    step_seconds: float
    peak_bytes: float  # the most that weights, optimizer and the work itself take
    logits: list[list[float]]  # those of the first images; none in training


def training_step(
    model: Model,
    batch_size: int,
    dtype: Dtype,
    compiled: bool,
    device: torch.device,
    graph: bool | None = None,
) -> Callable[[], object]:
    """Make the step of `vigpipe train` on one batch of noise."""
    repeat_convolutions()
    config = TrainConfig(
        model=model,
        data="fake",
        image_size=VIG_SHAPES[model].img_size[0],
        batch_size=batch_size,
        epochs=10**6,
        dtype=dtype,
        compile=compiled,
        cuda_graph=graph,
    )
    return step_of(make_rank_state(prepare(config, weight_dtype(dtype)), 0, device))


def step_of(rank_state: RankState) -> Callable[[], object]:
    """Make a training step on the first batch of a run, which is read here."""
    batch = next(batches(rank_state))
    return lambda: train_step(rank_state, batch)


class Contender:
    """A model that is run in one way, in turns with others in other processes."""

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
        self._make = partial(make_step, model, way, mode, batch_size, self._device)
        self._step: Callable[[], object] | None = None
        self._num_steps = 1

    def make_step(self) -> Callable[[], object]:
        return self._make()

    def prepare(self) -> Prepared:
        """Make the model, run its first steps, measure its memory; may be tried again."""
        try:
            return self._prepare()
        finally:
            gc.collect()  # the frames of an error hold tensors
            torch.cuda.empty_cache()  # for the processes beside this one; nothing without CUDA

    def _prepare(self) -> Prepared:
        before = begin_peak(self._device)
        if self._step is None:
            self._step = self.make_step()
        allow_tf32(self._precision == "tf32")
        first_seconds, result = self._timed(self._step)
        logits: list[list[float]] = []
        if self._mode == "inference":
            assert isinstance(result, torch.Tensor)
            logits = result[:NUM_COMPARED].float().tolist()
        seconds = min(self._timed(self._step)[0] for _ in range(NUM_WARMUP - 1))
        least = LEAST_CPU_STEPS if self._device.type == "cpu" else 1
        self._num_steps = min(MOST_STEPS, max(least, round(TURN_SECONDS / seconds)))
        peak = end_peak(self._device) - before
        return Prepared(first_seconds, seconds, peak, logits)

    def turn(self) -> float:
        """Run some steps and return the seconds of one: the median, or on a GPU the mean."""
        assert self._step is not None
        self._step()  # takes from the device the memory that it gave back
        if self._device.type == "cpu":
            seconds = median(self._timed(self._step)[0] for _ in range(self._num_steps))
        else:
            # The GPU is asked only after the last step, so that it never waits for the host.
            synchronize(self._device)
            seconds = self._timed(self._run_steps)[0] / self._num_steps
        torch.cuda.empty_cache()
        return seconds

    def _run_steps(self) -> None:
        assert self._step is not None
        for _ in range(self._num_steps):
            self._step()

    def _timed(self, step: Callable[[], object]) -> tuple[float, object]:
        start = time.perf_counter()
        result = step()
        synchronize(self._device)
        return time.perf_counter() - start, result


def make_model(model_name: str, formulation: Formulation) -> nn.Module:
    """Make a model in one of the formulations, all with the same weights."""
    torch.manual_seed(0)
    model = create_model(model_name, num_classes=NUM_CLASSES)
    assert isinstance(model, VisionGnn)
    return ReferenceVig(model) if formulation == "reference" else model


def make_step(
    model_name: Model, way: Way, mode: Mode, batch_size: int, device: torch.device
) -> Callable[[], object]:
    """Make a training step with AdamW, or a forward in evaluation mode that returns the logits."""
    is_training = mode == "training"
    if is_training and way.formulation == "ours":
        dtype: Dtype = "bfloat16" if way.precision == "bfloat16" else "float32"
        return training_step(model_name, batch_size, dtype, way.compiled, device, way.graph)
    model = make_model(model_name, way.formulation).to(device).train(is_training)
    narrow = torch.bfloat16 if way.precision == "bfloat16" else torch.float32
    if not is_training and way.formulation != "reference":
        if way.formulation == "ours" and not way.compiled and can_prepack(model, narrow):
            assert isinstance(model, VisionGnn)
            prepack(model, narrow)
        else:
            model = reparameterize_model(model)  # norms folded into the weights
    generator = torch.Generator().manual_seed(0)
    size = VIG_SHAPES[model_name].img_size
    images = torch.randn(batch_size, 3, *size, generator=generator).to(device)
    is_reference_on_gpu = way.formulation == "reference" and device.type == "cuda"
    if way.channels_last or is_reference_on_gpu:  # torch advises it with AMP
        images = images.contiguous(memory_format=torch.channels_last)
        model = model.to(memory_format=torch.channels_last)
    labels = torch.randint(NUM_CLASSES, (batch_size,), generator=generator).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    run = _compiled(model, way) if way.compiled else model

    def autocast() -> Any:
        is_narrow = way.precision == "bfloat16"
        return torch.autocast(device.type, torch.bfloat16) if is_narrow else nullcontext()

    def begin() -> None:
        if way.compiled and way.graph:
            torch.compiler.cudagraph_mark_step_begin()

    def train_step() -> Tensor:
        begin()
        optimizer.zero_grad()
        with autocast():
            logits = run(images)
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        return logits.detach()

    @torch.no_grad()  # freezing takes weights for constants here, but not in inference mode
    def infer() -> Tensor:
        begin()
        with autocast():
            return run(images)

    return train_step if is_training else infer


def _compiled(model: nn.Module, way: Way) -> Any:
    from torch._inductor import config  # takes 2 s

    config.freezing = way.frozen
    mode = "reduce-overhead" if way.graph else None
    return torch.compile(model, mode="max-autotune-no-cudagraphs" if way.autotuned else mode)
