"""What does a micro-batch cost, whatever its size? Cut one batch into ever more of them."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import linear_regression, median

import torch
from tabulate import tabulate

from benchmarks.side_by_side import Timings, alternate, write_results
from benchmarks.trained import parse_numbers
from vigpipe.errors import InputError
from vigpipe.job.job import TrialStep
from vigpipe.profiling.seconds import TimedSteps
from vigpipe.profiling.trial import MAX_STEPS, NUM_WARMUP, Trial, make_trial
from vigpipe.run.facts import Run
from vigpipe.run.step import train_step
from vigpipe.spans import COMPUTE
from vigpipe.timing.recorder import Row

_BETWEEN, _ONCE = "between the pieces", "once a step"
_AFTER = ("other", "optimizer", "all-reduce")  # the spans of what is done once a step


def check_numbers(numbers: str, batch_size: int) -> list[int]:
    """Return the numbers of micro-batches to compare, ascending; the first is 1.

    Args:
        numbers: of the option, with commas between them.
        batch_size: B.

    Raises:
        InputError: they are no numbers, do not divide the batch, or are only 1.
    """
    every = sorted({1, *parse_numbers("numbers", numbers)})
    if uneven := [number for number in every if batch_size % number]:
        raise InputError(
            f"--numbers {numbers}: micro-batches must be equal, and {uneven[0]} does not divide "
            f"the batch; choose divisors of --batch-size {batch_size}"
        )
    if len(every) == 1:
        raise InputError(f"--numbers {numbers}: one micro-batch is the whole; give a second number")
    return every


def bench_microbatches(
    run: Run, rank: int, device: torch.device, folder: Path, num_repeats: int, numbers: str
) -> None:
    """Time the same step in 1, 2, ... micro-batches on one rank, and account for their cost.

    A step in M micro-batches of a batch of B is taken to last M times what each costs whatever its
    size, and B times what a sample costs, with what is done once a step; least squares over all
    M. Parts of a step are measured in further, recorded steps of the same models, and taken apart
    in the same way.

    Args:
        run: the run with the model and data to time.
        rank: position in the world, which has this rank alone.
        device: device of this rank.
        folder: folder of the results.
        num_repeats: timed repeats of every contender.
        numbers: M,M,... of micro-batches.

    Raises:
        InputError: the layout has several ranks or micro-batches, or the numbers do not suit the
            batch.
    """
    if run.layout.world_size != 1 or run.layout.num_microbatches != 1:
        raise InputError(
            f"microbatches: times one rank, with the micro-batches of --numbers, got "
            f"{run.layout}; leave --stages, --dp, --shards and --microbatches at 1"
        )
    every = check_numbers(numbers, run.batch_size)
    trials = {
        number: make_trial(run, TrialStep(run.config, number, item=0, size={}), device)
        for number in every
    }
    contenders = {str(number): partial(train_step, *trial) for number, trial in trials.items()}
    timings = alternate(contenders, str(every[0]), num_repeats, device)
    recorded = record_in_turn(trials, num_repeats)
    text = (
        f"{describe(run, timings)}\n\n{account(recorded, run.batch_size)}\n\n"
        "Parts are fitted in the same way to recorded steps, whose stamps cost time themselves. A "
        "gradient that is added to its sum counts for the part whose backward computed it."
    )
    print(f"{text}\n\n{timings.table()}\n")
    write_results(folder, "What a micro-batch costs", text, timings, device)


def describe(run: Run, timings: Timings) -> str:
    """Say what a micro-batch and a sample cost, and how much longer cut batches take."""
    numbers = [int(name) for name in timings.seconds]
    slope, intercept = linear_regression(numbers, [median(s) for s in timings.seconds.values()])
    longer = ", ".join(
        f"{number} take {median(1 / ratio for ratio in timings.ratios(str(number))):.2f}×"
        for number in numbers[1:]
    )
    return (
        f"{run.config.model} on {run.job.name}, steps of {run.batch_size} on one rank, "
        f"{run.config.dtype}: a micro-batch costs {1e3 * slope:.1f} ms whatever its size, and a "
        f"sample {1e3 * intercept / run.batch_size:.2f} ms, with what is done once a step. Micro-"
        f"batches relative to one: {longer} as long (medians, turn by turn)."
    )


def record_in_turn(trials: Mapping[int, Trial], num_repeats: int) -> dict[int, list[Row]]:
    """Run recorded steps of all trials in turn, at most MAX_STEPS, and return the rows of each."""
    timed = {number: TimedSteps(trial) for number, trial in trials.items()}
    for _ in range(NUM_WARMUP + min(num_repeats, MAX_STEPS)):
        for of_trial in timed.values():
            of_trial.step()
    return {number: of_trial.rows() for number, of_trial in timed.items()}


def part_seconds(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Return what the parts of a step take, the median over the steps, by part and direction."""
    by_step: dict[int, dict[tuple[str, str], float]] = {}
    for row in rows:
        parts = by_step.setdefault(row.step, {})
        for part, seconds in _parts_of(row):
            parts[part] = parts.get(part, 0.0) + seconds
    return {
        part: median(parts.get(part, 0.0) for parts in by_step.values())
        for part in dict.fromkeys(part for parts in by_step.values() for part in parts)
    }


def _parts_of(row: Row) -> list[tuple[tuple[str, str], float]]:
    """Return the parts that a row counts for: a piece's time is taken from that between pieces."""
    if row.name in COMPUTE:
        return [((_BETWEEN, row.name), row.seconds)]
    if row.name in _AFTER:
        return [((_ONCE, ""), row.seconds)]
    if "/" in row.name or row.direction not in COMPUTE:
        return []
    name, _, number = row.name.partition(" ")
    if not number and name not in ("stem", "readout", "loss"):
        return []
    piece = "blocks" if number else "stem" if name == "stem" else "readout and loss"
    return [((piece, row.direction), row.seconds), ((_BETWEEN, row.direction), -row.seconds)]


def account(recorded: Mapping[int, Sequence[Row]], batch_size: int) -> str:
    """Make a table of what the parts of a step add to a micro-batch and to a sample.

    Args:
        recorded: rows of recorded steps by the number of micro-batches.
        batch_size: B.
    """
    by_number = {number: part_seconds(rows) for number, rows in recorded.items()}
    first = next(iter(by_number.values()))
    lines = []
    for part, direction in sorted(first, key=lambda part: part[0] == _ONCE):
        values = [parts[part, direction] for parts in by_number.values()]
        slope, intercept = linear_regression(list(by_number), values)
        share = intercept if part == _ONCE else intercept / batch_size
        lines.append(
            (
                f"{part}, {direction}" if direction else part,
                *(f"{1e3 * value:.1f}" for value in values),
                f"{1e3 * slope:z.2f}",
                f"{1e3 * share:z.2f}" + (" a step" if part == _ONCE else ""),
            )
        )
    headers = [
        "",
        *(f"M = {number}, ms" for number in by_number),
        "ms a micro-batch",
        "ms a sample",
    ]
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)
