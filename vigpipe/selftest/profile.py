"""Where does the time of one training step go, kernel by kernel?"""

import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile

from vigpipe.config.choices import Device, Dtype, VigModel
from vigpipe.launch.device import allow_tf32, keep_freed_memory, synchronize
from vigpipe.launch.join import device_alone
from vigpipe.report.markup import Shortened, folded, paragraph, share, size, table
from vigpipe.selftest.compared import begin_peak, end_peak
from vigpipe.selftest.machine import Machine
from vigpipe.selftest.rows import Budget, Row, attempt
from vigpipe.selftest.speed import batch_size_of
from vigpipe.selftest.tables import rows_table
from vigpipe.selftest.way import training_step
from vigpipe.selftest.worker import call

ABOUT_SECONDS, MOST_SECONDS = 15.0, 90.0
NUM_WARMUP, NUM_TIMED, NUM_PROFILED = 3, 5, 3  # steps
NUM_SHOWN, LONGEST_NAME = 20, 70


def measure(machine: Machine, budget: Budget) -> Iterator[Row]:
    """Profile a training step of the first model that speed is measured of."""
    model: VigModel = "vig_ti_224" if machine.gpus else "vig_cifar_ti"
    dtype: Dtype = "bfloat16" if machine.gpus else "float32"
    batch_size = batch_size_of(machine)

    def work(seconds: float) -> list[Row]:
        shape = (model, batch_size, dtype, machine.device, machine.num_threads)
        found = call(profile_step, *shape, seconds=seconds)
        whole = found["step_seconds"]
        kernels = [
            Row(kernel.pop("name"), "measured", {**kernel, "share": kernel["seconds"] / whole})
            for kernel in found.pop("kernels")
        ]
        values = {"model": model, "dtype": dtype, "batch_size": batch_size, **found}
        return [Row("step", "measured", values), *kernels]

    yield from attempt("step", budget, ABOUT_SECONDS, MOST_SECONDS, work)


def profile_step(
    model: VigModel, batch_size: int, dtype: Dtype, device_name: Device, num_threads: int
) -> dict[str, Any]:
    """Profile a step of `vigpipe train`; runs in a process of its own."""
    torch.set_num_threads(num_threads)
    keep_freed_memory()
    device = device_alone(device_name)
    before = begin_peak(device)
    step = training_step(model, batch_size, dtype, False, device)
    allow_tf32(False)
    for _ in range(NUM_WARMUP):
        step()
    synchronize(device)
    peak = end_peak(device) - before
    seconds: list[float] = []
    for _ in range(NUM_TIMED):
        start = time.perf_counter()
        step()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    start = time.perf_counter()
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(NUM_PROFILED):
            step()
        synchronize(device)
        profiled_seconds = (time.perf_counter() - start) / NUM_PROFILED
    return {
        # The profiler slows down a CPU's operators, so their shares are of a profiled step.
        "step_seconds": median(seconds) if on_gpu else profiled_seconds,
        "peak_bytes": peak,
        "kernels": kernels_of(profiler.key_averages(), NUM_PROFILED, on_gpu),
    }


def kernels_of(events: EventList, num_steps: int, on_gpu: bool) -> list[dict[str, Any]]:
    """Return a GPU's kernels, or the CPU's operators, with their seconds a step, longest first."""
    found: list[dict[str, Any]] = []
    for event in events:
        # The range of an annotation, such as the optimizer's, lasts as long as its kernels.
        if on_gpu != (event.device_type == DeviceType.CUDA) or event.is_user_annotation:
            continue
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if microseconds > 0:
            calls, seconds = event.count / num_steps, microseconds / 1e6 / num_steps
            found.append({"name": event.key, "calls": calls, "seconds": seconds})
    return sorted(found, key=lambda kernel: -kernel["seconds"])


def section(rows: Sequence[Row]) -> Iterator[str]:
    """Show the share of every kernel in a step."""
    step, kernels = rows[0], rows[1:]
    if not kernels:
        yield rows_table("step", rows, ())
        return
    values = step.values
    covered = sum(row.values["share"] for row in kernels)
    yield paragraph(
        f"A step of vigpipe train of {values['model']} in {values['dtype']}, "
        f"{values['batch_size']} images: {1e3 * values['step_seconds']:.2f} ms, at most "
        f"{size(values['peak_bytes'])} of memory. {len(kernels)} kinds of kernels take "
        f"{share(covered)} of it; in the rest nothing ran on the device, or it was not seen."
    )
    shown = [_line(row) for row in kernels[:NUM_SHOWN]]
    rest = kernels[NUM_SHOWN:]
    if rest:
        total = sum(row.values["share"] for row in rest)
        shown.append([f"{len(rest)} others", "", "", share(total)])
    heads = ["kernel", "calls a step", "ms a step", "share of the step"]
    yield table(heads, shown)
    if rest:
        yield folded("The others", table(heads, [_line(row) for row in rest]))


def _line(row: Row) -> list[str | Shortened]:
    name = row.what
    if len(name) > LONGEST_NAME:
        name = Shortened(f"{name[:LONGEST_NAME]}…", row.what)
    values = row.values
    return [
        name,
        f"{values['calls']:.0f}",
        f"{1e3 * values['seconds']:.3f}",
        share(values["share"]),
    ]
