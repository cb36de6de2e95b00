"""How much faster are the ranks of a replica than the same micro-batches on one rank?"""

from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from benchmarks.side_by_side import alternate, write_results
from vigpipe.errors import InputError
from vigpipe.run.facts import Run
from vigpipe.run.rank import make_rank_state
from vigpipe.selftest.way import step_of


def bench_pipeline(
    run: Run, rank: int, device: torch.device, folder: Path, num_repeats: int
) -> None:
    """Time a step of the layout against a step of the unsplit model on the same micro-batches.

    One rank runs the unsplit model, with as many threads as every rank has, while the others wait.
    Then every rank runs it by itself, all at the same time. What they lose compared with the lone
    rank is due to the machine (shared caches, memory, two hardware threads on a core), and no
    pipeline can gain it back.

    Args:
        run: the run with the layout, model and data to time.
        rank: position in the world.
        device: device of this rank.
        folder: folder of the results.
        num_repeats: timed repeats of every contender.

    A single rank with --sparse-threads is compared with one whose threads both sum and multiply.

    Raises:
        InputError: there is nothing to compare with one rank.
    """
    layout = run.layout
    if layout.world_size == 1 and run.config.sparse_threads:
        _bench_pool(run, device, folder, num_repeats)
        return
    if layout.world_size == 1:
        raise InputError(
            "pipeline: compares with one rank; choose --stages or --shards 2 or more, or "
            "--sparse-threads"
        )
    rank_state = make_rank_state(run, rank, device)
    sequential = make_rank_state(run.unsplit(), 0, device)
    kind = "stage" if layout.num_shards == 1 else "shard"
    alone, all_at_once, split = (
        f"one {kind}",
        f"one {kind} on every rank at once",
        f"{layout.replica_size} {kind}s",
    )
    contenders = {
        alone: step_of(sequential) if rank_state.is_writer else lambda: None,
        all_at_once: step_of(sequential),
        split: step_of(rank_state),
    }
    timings = alternate(contenders, alone, num_repeats, device)
    if not rank_state.is_writer:
        return
    waves = layout.num_microbatches + layout.pipeline_size - 1
    ceiling = layout.world_size * layout.num_microbatches / waves
    cores = layout.world_size * median(timings.ratios(all_at_once))
    width = "" if run.config.width is None else f", width {run.config.width:,}"
    question = (
        f"{run.config.model}{width} on {run.job.name}, {run.job.describe_step(layout)} a step, "
        f"{layout}, {run.config.dtype}, against the same micro-batches on one {kind}. With equal "
        f"{kind}s, no transfer and {layout.world_size} full cores the ratio would be "
        f"{ceiling:.2f}×. While every rank is busy, {layout.world_size} ranks together work like "
        f"{cores:.2f} of one alone on this machine: {ceiling * cores / layout.world_size:.2f}× is "
        "the most that it can give."
    )
    print(f"{question}\n\n{timings.table()}\n")
    title = "Pipeline against one stage" if kind == "stage" else "Shards against one rank"
    write_results(folder, title, question, timings, device)


def _bench_pool(run: Run, device: torch.device, folder: Path, num_repeats: int) -> None:
    """Time a step whose sums have threads of their own, against the same number for all work."""
    own, besides = torch.get_num_threads(), run.config.sparse_threads
    states = [make_rank_state(of, 0, device) for of in (run.unsplit(), run)]
    one_after_another, at_once = (step_of(state) for state in states)

    def with_threads(number: int) -> Callable[[], object]:
        def step() -> None:
            torch.set_num_threads(number)
            one_after_another()
            torch.set_num_threads(own)

        return step

    alone = f"{own} thread{'s' * (own > 1)} for all work"
    contenders = {
        alone: one_after_another,
        f"{own + besides} threads for all work": with_threads(own + besides),
        f"{own} that multipl{'y' if own > 1 else 'ies'}, {besides} for sums": at_once,
    }
    timings = alternate(contenders, alone, num_repeats, device)
    for state in states:
        state.feed.close()
    question = (
        f"{run.config.model}, width {run.config.width:,}, on {run.job.name}, "
        f"{run.job.describe_step(run.layout)} a step, {run.config.dtype}, on one rank: chunks of "
        "nodes that some threads sum while others multiply, against threads that do all of it."
    )
    print(f"{question}\n\n{timings.table()}\n")
    write_results(folder, "Threads for sums beside threads for products", question, timings, device)
