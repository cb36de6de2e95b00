"""What do messages between the GPUs cost? Bandwidth and latency as nccl-tests define them.

all-reduce    algorithm bandwidth = bytes / seconds, bus bandwidth = that × 2 (n − 1) / n
send/recv     every rank sends to the next one and receives from the one before; both bandwidths
              are bytes / seconds

(nccl-tests, doc/PERFORMANCE.md). Bytes are those of one rank's message; the slowest rank counts.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vigpipe.config.choices import Device
from vigpipe.errors import DONE
from vigpipe.launch.device import count_gpus, synchronize
from vigpipe.launch.environment import from_environment
from vigpipe.launch.failures import run_rank
from vigpipe.launch.join import choose_gpu, join
from vigpipe.launch.local import start_local
from vigpipe.report.charts import as_html, styled
from vigpipe.report.markup import paragraph
from vigpipe.selftest.machine import Machine
from vigpipe.selftest.rows import Budget, Row, attempt
from vigpipe.selftest.tables import Column, rows_table
from vigpipe.selftest.worker import call

ABOUT_SECONDS, MOST_SECONDS = 20.0, 90.0
TIMEOUT_SECONDS = 60.0
SIZES = (8, 1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28)  # bytes
NUM_WARMUP = 5
MOST_REPEATS, MOST_BYTES = 50, 1 << 31  # a figure takes neither more messages nor more bytes


def measure(machine: Machine, budget: Budget) -> Iterator[Row]:
    """Measure two GPUs, four, and all of them."""
    num_gpus = len(machine.gpus)
    if num_gpus < 2:
        yield Row("NCCL", "skipped", note="it takes two GPUs")
        return
    for world_size in sorted({n for n in (2, 4, 8) if n <= num_gpus} | {num_gpus}):
        work = partial(_rows, world_size, machine.device)
        yield from attempt(f"{world_size} GPUs", budget, ABOUT_SECONDS, MOST_SECONDS, work)


def _rows(world_size: int, device_name: Device, seconds: float) -> list[Row]:
    return list(map(row_of, call(measure_links, world_size, device_name, SIZES, seconds=seconds)))


def row_of(values: Mapping[str, Any]) -> Row:
    """Make the row of a figure, as `measure_links` returns it."""
    what = f"{values['operation']}, {values['ranks']} GPUs, {_binary(values['bytes'])}"
    return Row(what, "measured", values)


def _binary(num_bytes: int) -> str:
    """Write a power of two in the units that have one, as nccl-tests are asked for sizes."""
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << bits:
            return f"{num_bytes >> bits} {unit}"
    return f"{num_bytes} B"


def measure_links(
    world_size: int, device_name: Device, sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """Start ranks that measure messages of `sizes` bytes, each rank on a GPU of its own."""
    with tempfile.TemporaryDirectory(prefix="vigpipe-selftest-") as name:
        out = Path(name) / "links.json"
        arguments = [device_name, str(out), *map(str, sizes)]
        code = start_local(world_size, "vigpipe.selftest.links:rank_main", arguments, threads=1)
        if code != DONE:
            raise RuntimeError(f"the ranks ended with exit code {code}")
        return json.loads(out.read_text())


def rank_main(arguments: Sequence[str]) -> int:
    """Measure as one rank; rank 0 writes the result."""
    launch = from_environment(os.environ)
    device_name, out, *sizes = arguments

    def work() -> int:
        requested: Device = "cuda" if device_name == "cuda" else "cpu"
        gpu = choose_gpu(requested, launch, count_gpus(requested, can_compute=True))
        device = join(requested, gpu, launch, TIMEOUT_SECONDS, on_one_gpu="")
        figures = [
            figure
            for num_bytes in map(int, sizes)
            for figure in _measure_size(num_bytes, launch.rank, launch.world_size, device)
        ]
        if launch.rank == 0:
            Path(out).write_text(json.dumps(figures))
        return DONE

    return run_rank(work, launch)


def _measure_size(
    num_bytes: int, rank: int, world_size: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    message = torch.zeros(num_bytes // 4, device=device)
    received = torch.zeros_like(message)
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size

    def pass_on() -> None:
        sending = dist.P2POp(dist.isend, message, following)
        receiving = dist.P2POp(dist.irecv, received, previous)
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()

    for operation, run, factor in (
        ("all-reduce", partial(dist.all_reduce, message), 2 * (world_size - 1) / world_size),
        ("send/recv", pass_on, 1.0),
    ):
        seconds = _seconds(run, max(5, min(MOST_REPEATS, MOST_BYTES // num_bytes)), device)
        yield {
            "operation": operation,
            "ranks": world_size,
            "bytes": num_bytes,
            "seconds": seconds,
            "algorithm_bandwidth": num_bytes / seconds,
            "bus_bandwidth": factor * num_bytes / seconds,
        }


def _seconds(run: Callable[[], object], num_repeats: int, device: torch.device) -> float:
    """Return the mean seconds of a call on the slowest rank, as nccl-tests does."""
    for _ in range(NUM_WARMUP):
        run()
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(num_repeats):
        run()
    synchronize(device)
    slowest = torch.tensor([(time.perf_counter() - start) / num_repeats], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def section(rows: Sequence[Row]) -> Iterator[str]:
    """Draw the bus bandwidth over the size of the messages, and show all figures."""
    figures = [row for row in rows if row.outcome == "measured"]
    if figures:
        yield paragraph(
            "Bandwidths as nccl-tests define them: algorithm bandwidth is the bytes of a message "
            "by its seconds; bus bandwidth counts an all-reduce of n ranks 2 (n − 1) / n times. "
            "The seconds of the smallest message are the latency."
        )
        yield as_html(_chart(figures), "links")
    columns = (
        Column("µs", "seconds", lambda seconds: f"{1e6 * seconds:,.1f}"),
        Column("algorithm, GB/s", "algorithm_bandwidth", _gigabytes),
        Column("bus, GB/s", "bus_bandwidth", _gigabytes),
    )
    yield rows_table("message", rows, columns)


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:,.2f}"


def _chart(rows: Sequence[Row]) -> Any:
    from plotly.graph_objects import Figure

    names = dict.fromkeys((row.values["operation"], row.values["ranks"]) for row in rows)
    figure = Figure()
    for name in names:
        chosen = [row for row in rows if (row.values["operation"], row.values["ranks"]) == name]
        figure.add_scatter(
            name=f"{name[0]}, {name[1]} GPUs",
            x=[row.values["bytes"] for row in chosen],
            y=[row.values["bus_bandwidth"] / 1e9 for row in chosen],
            mode="lines+markers",
            hovertemplate="%{x} bytes: %{y:.2f} GB/s",
        )
    figure.update_xaxes(type="log", title_text="bytes of a message")
    figure.update_yaxes(title_text="bus bandwidth, GB/s", rangemode="tozero")
    return styled(figure, height=340)
