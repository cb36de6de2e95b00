"""Outcomes of an experiment that was never run, with the numbers that a test wants."""

from benchmarks.study.configs import parse_configs
from benchmarks.study.measured import MeasuredRun
from benchmarks.study.outcome import Outcome, predict_all
from tests.planning.profiles import make_profile

BATCH = 40
STEPS = (3, 5, 7)
FACTS = {
    "versions": {"vigpipe": "0.1.0", "torch": "2.15.0"},
    "commit": "c0ffee",
    "hardware": "A processor, 2 cores",
    "threads_per_rank": 1,
}


def make_measured(
    name, layout, round_number=1, *, seconds=1.0, losses=(3.0, 2.0, 1.0), all_reduce=0.001
):
    """A run whose steps take 0.9, 1 and 1.1 times so many seconds, and test batches a quarter."""
    pipelined = layout.pipeline_size > 1
    steps = {step: seconds * factor for step, factor in zip(STEPS, (0.9, 1.0, 1.1), strict=True)}
    return MeasuredRun(
        name=name,
        layout=layout,
        round_number=round_number,
        losses=dict(enumerate(losses, 1)),
        step_seconds={"train": steps, "test": {s: t / 4 for s, t in steps.items()}},
        block_seconds={"train": [seconds / 16] * 8, "test": [seconds / 32] * 8},
        readout_seconds={"train": [seconds / 1000], "test": [seconds / 2000]},
        latency_seconds=[seconds / 3],
        bubble=0.25 if pipelined else None,
        all_reduce_seconds=(all_reduce, 2 * all_reduce),
        peak_bytes=[1e8 * (rank + 1) for rank in range(layout.world_size)],
        facts=FACTS,
    )


def make_outcome(seconds, losses=None, *, num_cores=8, all_reduce=0.001, rounds=(1.0,)):
    """All layouts named in `seconds`, in rounds that are so many times slower."""
    layouts = parse_configs(",".join(seconds))
    runs = {
        name: [
            make_measured(
                name,
                layout,
                number,
                seconds=seconds[name] * factor,
                losses=(losses or {}).get(name, (3.0, 2.0, 1.0)),
                all_reduce=all_reduce,
            )
            for number, factor in enumerate(rounds, 1)
        ]
        for name, layout in layouts.items()
    }
    # A block takes 1 ms a row forward and 2 ms backward.
    profile = make_profile([1e-3] * 8, slowdown=(1.0, 1.1), latency_seconds=1e-4)
    return Outcome(
        layouts=layouts,
        runs=runs,
        predictions=predict_all(profile, layouts, BATCH),
        batch_size=BATCH,
        num_warmup=2,
        num_cores=num_cores,
        num_threads=1,
    )
