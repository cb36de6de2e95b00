"""Benchmark contenders in one process, and measure the memory of each in a fresh process."""

import csv
import gc
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.options import FILES, OpsBench
from benchmarks.side_by_side import NUM_WARMUP
from vigpipe import ops
from vigpipe.errors import InputError
from vigpipe.launch.device import allow_tf32, keep_freed_memory, synchronize
from vigpipe.launch.environment import threads_per_rank
from vigpipe.launch.join import device_alone
from vigpipe.run.folder import make_output_folder
from vigpipe.run.provenance import origin
from vigpipe.selftest.compared import begin_peak, end_peak

MB = 1e6


def set_up(config: OpsBench) -> torch.device:
    """Set threads and allocator as for a rank, and choose the device.

    Raises:
        InputError: a count is out of range, the device does not exist, or --out holds a benchmark.
    """
    if config.repeats < 1:
        raise InputError(f"--repeats {config.repeats}: must be at least 1")
    threads_per_rank(config.threads, 1, os.environ)
    if config.out is not None:
        make_output_folder(config.out, FILES)
    device = device_alone(config.device)
    allow_tf32(False)
    _set_threads_and_allocator(config.threads)
    return device


def _set_threads_and_allocator(threads: int) -> None:
    torch.set_num_threads(threads)
    keep_freed_memory()


def peaks(
    make: Callable[..., Callable[[], object]], *arguments: object, device: str, threads: int
) -> tuple[float, float]:
    """Measure the memory of a contender in a fresh process.

    Args:
        make: builds the contender from the arguments; must be importable by its name.
        arguments: arguments of `make`, which also gets the device as `device=`.
        device: type of the device to run on, `cpu` or `cuda`.
        threads: threads of the process.

    Returns:
        Bytes: the peak of the whole process, and how much of it two calls of the contender added.

    Raises:
        RuntimeError: the process ended before it could report.
    """
    context = multiprocessing.get_context("spawn")  # a fork would inherit the memory of its parent
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_measure_peaks, args=(sender, make, arguments, device, threads)
    )
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError as error:
        raise RuntimeError(f"{make.__name__}{arguments}: its process ended early") from error
    finally:
        process.join()


def _measure_peaks(
    sender: Any,
    make: Callable[..., Callable[[], object]],
    arguments: Sequence[object],
    device_name: str,
    threads: int,
) -> None:
    device = torch.device(device_name)
    _set_threads_and_allocator(threads)
    _load_everything(device)
    contender = make(*arguments, device=device)
    gc.collect()
    before = begin_peak(device)
    contender()
    contender()
    synchronize(device)
    peak = end_peak(device)
    sender.send((peak, peak - before))


def _load_everything(device: torch.device) -> None:
    """Let torch and the operators load what they load at first use, which must not be counted."""
    x = torch.ones(1, 4, 4, device=device, requires_grad=True)
    for fused in (False, True):
        for y in (
            ops.aggregate(x, None, ops.knn(x, None, None, 2, fused=fused), fused=fused),
            ops.norm(x, x[0, 0], x[0, 0], fused=fused)[0],
        ):
            torch.autograd.grad(y, x, torch.ones_like(y))


def write_page(
    out: Path | None,
    title: str,
    text: str,
    rows: Sequence[Mapping[str, object]],
    seconds: Mapping[str, Sequence[float]],
    device: torch.device,
    warm_up: str = f"{NUM_WARMUP} rounds",
) -> None:
    """Print a table, write it to README.md, and write every repeat to rows.csv.

    Args:
        out: folder to write to; None for runs/<time>.
        title: heading of the page.
        text: what was measured, and what the columns mean.
        rows: rows of the table, by column.
        seconds: seconds of every repeat, by contender.
        device: device of the measurement.
        warm_up: what is run before anything is timed.
    """
    folder = make_output_folder(out, FILES)
    print(f"{text}\n\n{tabulate(rows, headers='keys', disable_numparse=True)}\n")
    table = tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)
    (folder / "README.md").write_text(
        f"# {title}\n\n{text}\n\n{table}\n\n{origin(device)}- warm-up: {warm_up}; the "
        "contenders of a row's group alternate in one run, every repeat is in rows.csv; times are "
        "medians, ratios are taken repeat by repeat\n",
        encoding="utf-8",
    )
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        table_rows = csv.writer(file)
        table_rows.writerow(["contender", "repeat", "seconds"])
        table_rows.writerows(
            [name, i, value] for name, values in seconds.items() for i, value in enumerate(values)
        )
    print(f"{folder}/README.md, rows.csv")
