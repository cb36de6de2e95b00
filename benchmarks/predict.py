"""How far off is a predicted step? Predict and measure layouts of one and two ranks."""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist
from tabulate import tabulate

from benchmarks.options import PredictBench
from benchmarks.side_by_side import Timings, alternate, write_results
from vigpipe.errors import InputError
from vigpipe.parallel.layout import Layout
from vigpipe.parallel.plan import Plan, describe_cut, even_plan
from vigpipe.planning.interval import SHARE, interval_text, step_interval
from vigpipe.planning.profile import Profile, write_profile
from vigpipe.planning.step import Request, predict
from vigpipe.profiling.measure import measure_profile
from vigpipe.run.facts import Run
from vigpipe.run.rank import make_rank_state
from vigpipe.selftest.way import step_of


@dataclass(frozen=True)
class Case:
    """A layout to predict and to measure."""

    layout: Layout  # degrees of parallelism and the schedule
    plan: Plan  # the cut into stages

    def __str__(self) -> str:
        cut = describe_cut(self.plan.stages)
        replicas = f"{self.layout.num_replicas} × " if self.layout.num_replicas > 1 else ""
        return f"{replicas}{cut}, M = {self.layout.num_microbatches}, {self.layout.schedule}"


def list_cases(num_blocks: int, batch_size: int) -> list[Case]:
    """List layouts of at most two ranks with various stages, micro-batches, schedules and cuts."""
    degrees: list[tuple[int, int, int, Literal["gpipe", "1f1b"], int]] = [
        (1, 5, 1, "gpipe", 0),  # stages, micro-batches, replicas, schedule, blocks moved
        (1, 2, 1, "gpipe", 0),
        (2, 2, 1, "gpipe", 0),
        (2, 5, 1, "gpipe", 0),
        (2, 10, 1, "gpipe", 0),
        (2, 5, 1, "1f1b", 0),
        (2, 5, 1, "gpipe", 1),
        (2, 5, 1, "gpipe", -2),
        (1, 5, 2, "gpipe", 0),
    ]
    cases: list[Case] = []
    for num_stages, num_microbatches, num_replicas, schedule, moved in degrees:
        if num_microbatches * num_replicas > batch_size:
            continue
        plan = even_plan(num_blocks, num_stages)
        middle = len(plan.stages[0]) - moved
        if num_stages == 2 and 0 < middle < num_blocks:
            plan = Plan((tuple(range(middle)), tuple(range(middle, num_blocks))))
        layout = Layout(num_stages, num_microbatches, num_replicas, schedule)
        cases.append(Case(layout, plan))
    return cases


def bench_predict(
    run: Run, rank: int, device: torch.device, folder: Path, num_repeats: int
) -> None:
    """Profile the model, predict a step of every layout, and measure it, as one of two ranks.

    Args:
        run: the run with the layout, model and data to time.
        rank: position in the world.
        device: device of this rank.
        folder: folder of the results.
        num_repeats: timed repeats of every contender.

    Raises:
        InputError: a layout was asked for; the benchmark has its own.
    """
    check_two_stages(run, "predict")
    asked, default = run.layout, Layout(2, PredictBench.microbatches)
    if asked != default:
        raise InputError(
            f"predict: compares layouts of its own, got {asked}; leave --microbatches and "
            "--schedule out"
        )
    cases = list_cases(run.plan.num_blocks, run.batch_size)
    microbatch_sizes = sorted({with_layout(run, case).microbatch_size for case in cases})
    profile = measure_profile(run, rank, device, microbatch_sizes)
    timings = time_layouts(run, rank, device, cases, num_repeats)
    if profile is None:
        return
    write_profile(profile, folder / "profile.json")
    lines, errors, num_inside = compare_steps(profile, run, cases, timings)
    headers = ["layout", "predicted, ms", "interval", "measured, ms", "min – max", "error"]
    table = tabulate(lines, headers=headers, disable_numparse=True)
    summary = (
        f"{run.config.model} on {run.job.name} images, {run.batch_size} a step: predicted and "
        f"measured steps differ by {median(errors):.1%} (median over {len(errors)} layouts), at "
        f"most by {max(errors):.1%}. Of {len(errors)} measured medians, {num_inside} lie inside "
        f"the interval, in which {SHARE:.0%} are expected."
    )
    print(f"{summary}\n\n{table}\n")
    markdown = tabulate(lines, headers=headers, disable_numparse=True, tablefmt="github")
    write_results(folder, "Predicted against measured", f"{summary}\n\n{markdown}", timings, device)


def check_two_stages(run: Run, name: str) -> None:
    """Raise InputError unless the layout is two ranks, each with half of the blocks."""
    even = even_plan(run.plan.num_blocks, 2)
    if run.layout.world_size != 2 or run.layout.virtual_stages != 1 or run.plan != even:
        raise InputError(
            f"{name}: cuts the model in several ways for two ranks, got {run.layout} with "
            f"{describe_cut(run.plan.stages)} blocks; leave --stages 2 "
            "and --dp 1 as they are"
        )


def with_layout(run: Run, case: Case) -> Run:
    """Return the run with the layout and the plan of a case."""
    return replace(run, layout=case.layout, plan=case.plan)


def time_layouts(
    run: Run, rank: int, device: torch.device, cases: list[Case], num_repeats: int
) -> Timings:
    """Time the steps of all layouts in turn; where one rank is enough, the other waits.

    Args:
        run: the run with the model and data.
        rank: position in the world.
        device: device of this rank.
        cases: layouts to time; the first is the reference of the ratios.
        num_repeats: timed steps of every layout.
    """
    contenders = {}
    for case in cases:
        takes_part = rank < case.layout.world_size
        rank_state = make_rank_state(with_layout(run, case), rank, device) if takes_part else None
        contenders[str(case)] = step_of(rank_state) if rank_state else lambda: None
    timings = alternate(contenders, str(cases[0]), num_repeats, device)
    dist.barrier()
    return timings


def compare_steps(
    profile: Profile, run: Run, cases: list[Case], timings: Timings
) -> tuple[list[tuple[str, ...]], list[float], int]:
    """Compare predicted with measured steps.

    Args:
        profile: costs of the model's pieces.
        run: the run with the batch size.
        cases: layouts to compare.
        timings: measured steps by the name of the layout.

    Returns:
        Rows of a table; the errors of the predictions as shares of the measured median; and the
        number of these medians that lie in the interval of the prediction.
    """
    lines: list[tuple[str, ...]] = []
    errors: list[float] = []
    num_inside = 0
    for case in cases:
        layout = case.layout
        assert run.config.sync is not None
        request = Request(
            layout.pipeline_size, layout.num_replicas, run.batch_size, (), sync=run.config.sync
        )
        proposal = predict(
            profile,
            request,
            case.plan.stages,
            layout.schedule,
            layout.virtual_stages,
            layout.num_microbatches,
        )
        seconds = timings.seconds[str(case)]
        error = proposal.step_seconds / median(seconds) - 1
        errors.append(abs(error))
        interval = step_interval(profile, request, proposal)
        num_inside += interval is not None and interval[0] <= median(seconds) <= interval[1]
        lines.append(
            (
                str(case),
                f"{1e3 * proposal.step_seconds:.1f}",
                interval_text(interval),
                f"{1e3 * median(seconds):.1f}",
                f"{1e3 * min(seconds):.1f} – {1e3 * max(seconds):.1f}",
                f"{error:+.1%}",
            )
        )
    return lines, errors, num_inside
