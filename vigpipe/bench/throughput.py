"""Benchmark training and inference of a ViG against the usual formulation, in images/s."""

from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from timm.utils.model import reparameterize_model
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vigpipe.bench.alone import MB, peaks, relative_difference, set_up, write_page
from vigpipe.bench.options import VigBench
from vigpipe.bench.reference import ReferenceVig
from vigpipe.bench.side_by_side import alternate
from vigpipe.config.choices import MODELS
from vigpipe.launch.device import synchronize
from vigpipe.model.blocks import parse_names
from vigpipe.model.variants import VIG_SHAPES, create_model
from vigpipe.model.vig import VisionGnn

NUM_CLASSES = 1000
SIDES = {"cuda": 8192, "cpu": 2048}  # of the square matrices whose product shows a device's peak


def make_model(model_name: str, name: str) -> nn.Module:
    """Make a model in one of the formulations, all with the same weights.

    Args:
        model_name: name of the model.
        name: a text that begins with `reference`, `plain` or `fused`.
    """
    torch.manual_seed(0)
    impl = "plain" if name.startswith("plain") else "fused"
    model = create_model(model_name, num_classes=NUM_CLASSES, impl=impl)
    assert isinstance(model, VisionGnn)
    return ReferenceVig(model) if name.startswith("reference") else model


def make(
    model_name: str, name: str, dtype: str, batch_size: int, train: bool, device: torch.device
) -> Callable[[], Tensor]:
    """Make a training step with AdamW, or a forward in evaluation mode; both return the logits.

    Args:
        model_name: name of the model.
        name: `reference`, `plain` or `fused`; with `, compiled` it runs through torch.compile, and
            with `, compiled, CUDA graph` that replays CUDA graphs (mode reduce-overhead).
        dtype: `float32`, or `bfloat16` for autocast.
        batch_size: images of a step.
        train: whether to make a training step.
        device: device to run on.
    """
    model = make_model(model_name, name).to(device).train(train)
    if not train and name.startswith("fused"):
        model = reparameterize_model(model)  # norms folded into the weights
    is_graph = name.endswith("CUDA graph")
    mode = "reduce-overhead" if is_graph else None
    run: Any = torch.compile(model, mode=mode) if "compiled" in name else model
    generator = torch.Generator().manual_seed(0)
    size = VIG_SHAPES[model_name].img_size
    images = torch.randn(batch_size, 3, *size, generator=generator).to(device)
    if name.startswith("reference") and device.type == "cuda":  # as torch advises with AMP
        images = images.contiguous(memory_format=torch.channels_last)
        model = model.to(memory_format=torch.channels_last)
    labels = torch.randint(NUM_CLASSES, (batch_size,), generator=generator).to(device)
    torch_dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    autocast = torch.autocast(device.type, torch_dtype) if dtype == "bfloat16" else nullcontext()
    optimizer = torch.optim.AdamW(model.parameters(), fused=not name.startswith("reference"))

    def train_step() -> Tensor:
        if is_graph:
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad()
        with autocast:
            logits = run(images)
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        return logits.detach()

    @torch.inference_mode()
    def infer() -> Tensor:
        if is_graph:
            torch.compiler.cudagraph_mark_step_begin()
        with autocast:
            return run(images)

    return train_step if train else infer


def matrix_rate(dtype: str, device: torch.device) -> float:
    """Measure this machine's peak as the FLOP/s of a large square matrix product, best of ten."""
    side = SIDES[device.type]
    torch_dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=torch_dtype) for _ in range(2))
    times = alternate({"product": lambda: a @ b}, "product", 10, device).seconds["product"]
    return 2 * side**3 / min(times)


def flops(model_name: str, train: bool) -> int:
    """Count the FLOP of one image in matrix products and convolutions; a multiply-add is two."""
    model = make_model(model_name, "fused").train(train)
    images = torch.randn(1 + train, 3, *VIG_SHAPES[model_name].img_size)
    with FlopCounterMode(display=False) as counter:
        logits = model(images)
        if train:
            logits.sum().backward()
    return counter.get_total_flops() // len(images)


def bench_vig(config: VigBench) -> None:
    """Run `vigpipe bench vig`: time the formulations of models side by side."""
    device = set_up(config)
    rows: list[dict[str, object]] = []
    seconds: dict[str, list[float]] = {}
    dtypes = parse_names(config.dtypes, ("float32", "bfloat16"), "--dtypes")
    of_timm = [name for name in MODELS if name in VIG_SHAPES]
    model_names = parse_names(config.models, of_timm, "--models")
    formulations = ("reference", "plain", "fused")
    if config.compiled:
        formulations += ("reference, compiled", "fused, compiled")
    rates = {dtype: matrix_rate(dtype, device) for dtype in dtypes}
    for model_name in model_names:
        for train in (True, False):
            work = flops(model_name, train)
            kinds = [(dtype, name) for dtype in dtypes for name in formulations]
            kinds = [kind for kind in kinds if train or kind[1] != "plain"]
            names = [f"{name}, {dtype}" for dtype, name in kinds]
            contenders = {
                label: make(model_name, name, dtype, config.batch_size, train, device)
                for label, (dtype, name) in zip(names, kinds, strict=True)
            }
            first = {label: contender().float() for label, contender in contenders.items()}
            timings = alternate(contenders, names[0], config.repeats, device)
            contenders.clear()
            synchronize(device)
            for label, (dtype, name) in zip(names, kinds, strict=True):
                values, ratios = timings.seconds[label], timings.ratios(label)
                off = relative_difference(first[label], first[names[0]])
                arguments = (model_name, name, dtype, config.batch_size, train)
                _, added = peaks(make, *arguments, device=device.type, threads=config.threads)
                rate = config.batch_size / median(values)
                seconds[f"{model_name} {'train' if train else 'infer'}: {label}"] = values
                rows.append(
                    {
                        "model": model_name,
                        "": "training" if train else "inference",
                        "formulation": label,
                        "images/s": f"{rate:.1f}",
                        "ratio": f"{median(ratios):.2f}× ({min(ratios):.2f} – {max(ratios):.2f})",
                        "of the matrix rate": f"{rate * work / rates[dtype]:.0%}",
                        "memory, MB": f"{added / MB:.0f}",
                        "logits off by": f"{off:.0e}",
                    }
                )
    limits = "; ".join(f"{dtype} {rate / 1e9:.0f} GFLOP/s" for dtype, rate in rates.items())
    write_page(
        config.out,
        "Images a second",
        f"Batches of {config.batch_size}, {config.threads} thread(s). Training: forward, backward, "
        "AdamW; inference: evaluation mode, norms folded into the weights where fused. Ratio: to "
        f"the reference in {dtypes[0]}. The matrix rate is that of a large square product in this "
        f"run ({limits}); a share of it counts matrix products and convolutions as work and "
        "everything else as loss. Memory is what the work adds to a fresh process. Off by: logits "
        "of the first step against those of the first row, largest difference; a near-tie that "
        "falls the other way shows there.",
        rows,
        seconds,
        device,
    )
