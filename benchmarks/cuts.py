"""How good is the planner's cut? Measure it beside every other cut into two stages."""

from pathlib import Path
from statistics import median

import torch

from benchmarks.predict import Case, check_two_stages, time_layouts
from benchmarks.side_by_side import write_results
from vigpipe.parallel.plan import Plan, even_plan
from vigpipe.planning.profile import write_profile
from vigpipe.planning.search import search
from vigpipe.planning.step import Request
from vigpipe.profiling.measure import measure_profile
from vigpipe.run.facts import Run


def bench_cuts(run: Run, rank: int, device: torch.device, folder: Path, num_repeats: int) -> None:
    """Profile the model, plan two stages, and time every cut in turn, as one of two ranks.

    Args:
        run: the run with the layout, model and data to time.
        rank: position in the world.
        device: device of this rank.
        folder: folder of the results.
        num_repeats: timed repeats of every contender.

    Raises:
        InputError: the layout does not have two stages with equal numbers of blocks.
    """
    check_two_stages(run, "cuts")
    num_blocks = run.plan.num_blocks
    profile = measure_profile(run, rank, device, [run.microbatch_size])
    blocks = tuple(range(num_blocks))
    cuts = {n: Plan((blocks[:n], blocks[n:])) for n in range(1, num_blocks)}
    case_of = {n: Case(run.layout, plan) for n, plan in cuts.items()}
    timings = time_layouts(run, rank, device, list(case_of.values()), num_repeats)
    if profile is None:
        return
    write_profile(profile, folder / "profile.json")
    num_microbatches = run.layout.num_microbatches
    assert run.config.sync is not None
    batch_size, schedule = run.batch_size, run.layout.schedule
    request = Request(2, 1, batch_size, (num_microbatches,), ((schedule, 1),), sync=run.config.sync)
    planned = len(search(profile, request)[0].stages[0])
    even = len(even_plan(num_blocks, 2).stages[0])
    seconds = {n: median(timings.seconds[str(case)]) for n, case in case_of.items()}
    best = min(seconds, key=lambda n: seconds[n])
    summary = (
        f"{run.config.model} on {run.job.name} images, {run.batch_size} a step, "
        f"{num_microbatches} micro-batches, {run.layout.schedule}: the planner puts {planned} of "
        f"{num_blocks} blocks into the first stage, {seconds[planned] / seconds[best] - 1:.1%} "
        f"slower than the best of all {len(seconds)} cuts ({best}); equal numbers of blocks "
        f"({even}) are {seconds[even] / seconds[best] - 1:.1%} slower."
    )
    print(f"{summary}\n\n{timings.table()}\n")
    write_results(folder, "Every cut against the planner's", summary, timings, device)
