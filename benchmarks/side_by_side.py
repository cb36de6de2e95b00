"""Time contenders in turn in one run, and write the results with their spread and origin."""

import csv
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate

from vigpipe.launch.device import synchronize
from vigpipe.run.provenance import origin

NUM_WARMUP = 2  # rounds that are not timed


@dataclass(frozen=True)
class Timings:
    """Seconds of every repeat of every contender."""

    # Seconds by contender, in the order of the repeats; a repeat lasts as long as its slowest rank.
    seconds: Mapping[str, list[float]]
    reference: str  # name of the contender that the others are compared with

    def ratios(self, name: str) -> list[float]:
        """Compute how many times faster a contender is than the reference, repeat by repeat."""
        pairs = zip(self.seconds[self.reference], self.seconds[name], strict=True)
        return [reference / other for reference, other in pairs]

    def table(self, fmt: str = "simple") -> str:
        """Make a table of the median and spread of every contender and of its ratio."""
        rows = [
            (
                name,
                f"{statistics.median(values):.4f}",
                f"{min(values):.4f} – {max(values):.4f}",
                f"{statistics.median(self.ratios(name)):.3f}×",
                f"{min(self.ratios(name)):.3f} – {max(self.ratios(name)):.3f}",
            )
            for name, values in self.seconds.items()
        ]
        headers = ["", "seconds a step (median)", "min – max", "ratio (median)", "min – max"]
        return tabulate(rows, headers=headers, tablefmt=fmt, disable_numparse=True)


def alternate(
    contenders: Mapping[str, Callable[[], object]],
    reference: str,
    num_repeats: int,
    device: torch.device,
) -> Timings:
    """Run all contenders once, then all of them again, and so on, so that noise hits all alike.

    Every rank calls this with the same names; a lone process may call it too. The clock starts
    after a barrier and stops when the device has done its work. NUM_WARMUP rounds are left out.

    Args:
        contenders: functions to time, by name.
        reference: name of the contender that the others are compared with.
        num_repeats: timed rounds.
        device: device that the contenders work on.

    Returns:
        The seconds of every repeat, the same on every rank.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(NUM_WARMUP + num_repeats):
        for name, contender in contenders.items():
            if dist.is_initialized():
                dist.barrier()
            synchronize(device)
            start = time.perf_counter()
            contender()
            synchronize(device)
            slowest = torch.tensor([time.perf_counter() - start], device=device)
            if dist.is_initialized():
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if repeat >= NUM_WARMUP:
                seconds[name].append(float(slowest))
    return Timings(seconds, reference)


def write_results(
    folder: Path, title: str, question: str, timings: Timings, device: torch.device
) -> None:
    """Write README.md and rows.csv of a benchmark.

    Args:
        folder: folder to write to.
        title: heading of the page.
        question: what was measured, and what the answer is.
        timings: the measured seconds.
        device: device of this rank, whose hardware the page names.
    """
    (folder / "README.md").write_text(
        f"# {title}\n\n{question}\n\n{timings.table('github')}\n\n"
        f"{origin(device)}"
        f"- warm-up: {NUM_WARMUP} rounds; the contenders alternate; a step lasts as long as its "
        "slowest rank; ratios are taken repeat by repeat; reading images is not timed\n",
        encoding="utf-8",
    )
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["repeat", *timings.seconds])
        rows.writerows(
            [i, *values] for i, values in enumerate(zip(*timings.seconds.values(), strict=True))
        )
