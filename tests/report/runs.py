"""Write folders of runs like those of vigpipe train, of any layout, in milliseconds."""

import atexit
import contextlib
import fcntl
import functools
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vigpipe.analysis.account import make_accounts
from vigpipe.job.rows import Fill, partial_batch
from vigpipe.parallel.layout import Layout
from vigpipe.planning.simulate import StageCosts, simulate
from vigpipe.run.folder import LOCK
from vigpipe.run.record import RunRecord
from vigpipe.schedules import orders
from vigpipe.spans import KINDS, Span, SpanKind, step_seconds
from vigpipe.timing.recorder import Row
from vigpipe.timing.tables import statistics, step_statistics, write_rows

NUM_STEPS, NUM_WARMUP, NUM_TESTS, NUM_BLOCKS = 30, 10, 3, 4
FULL = 100  # samples of a full batch
COMMIT = "0123456789abcdef0123456789abcdef01234567+"
FORWARD, BACKWARD, TRANSFER = 0.010, 0.019, 0.001  # seconds of a micro-batch on one stage
SHARES = {"": 1.0, "/grapher": 0.6, "/grapher/knn": 0.1, "/grapher/aggregation": 0.3, "/ffn": 0.35}
SHARED = tempfile.TemporaryDirectory()
atexit.register(SHARED.cleanup)
SHARES_OF_LAYER = {"": 1.0, "/aggregation": 0.5, "/update": 0.3}  # of a graph model's block


def seconds_by_kind(spans: Iterable[Span]) -> dict[SpanKind, float]:
    """The total seconds of every kind; kinds that do not occur have 0."""
    totals: dict[SpanKind, float] = dict.fromkeys(KINDS, 0.0)
    for span in spans:
        totals[span.kind] += span.seconds
    return totals


def gpipe(num_stages: int, num_replicas: int, num_microbatches: int, slow: float) -> list[Span]:
    """A GPipe step whose last stage takes `slow` times as long."""
    factors = [1.0] * (num_stages - 1) + [slow]
    costs = StageCosts(
        forward=[[FORWARD * factor] * num_microbatches for factor in factors],
        backward=[[BACKWARD * factor] * num_microbatches for factor in factors],
        features=[TRANSFER] * (num_stages - 1),
        gradients=[TRANSFER] * (num_stages - 1),
        dispatch=0.0,
        reduce=[0.004] * num_stages,
        update=[0.003] * num_stages,
    )
    return simulate(orders("gpipe", num_stages, 1, num_microbatches), costs, num_replicas)


def rows_of(
    spans: list[Span], phase, step: int, num_stages: int, shares=SHARES, samples: int = FULL
) -> Iterator[Row]:
    """What timing.csv says of one step."""
    make = functools.partial(Row, phase, step, samples=samples, full_batch=FULL)
    for rank in sorted({span.rank for span in spans}):
        own = [span for span in spans if span.rank == rank]
        replica, stage = divmod(rank, num_stages)
        yield make(rank, replica, -1, "step", "", 1, step_seconds(own))
        for kind, seconds in seconds_by_kind(own).items():
            if seconds and (phase == "train" or kind in ("forward", "wait input")):
                place = stage if kind not in ("all-reduce", "optimizer", "other") else -1
                count = sum(span.kind == kind for span in own)
                yield make(rank, replica, place, kind, "", count, seconds)
        num_own = NUM_BLOCKS // num_stages or 1
        for direction in ("forward", "backward") if phase == "train" else ("forward",):
            seconds = seconds_by_kind(own)[direction] / num_own
            count = sum(span.kind == direction for span in own)
            names = [
                (f"block {stage * num_own + i}{part}", share)
                for i in range(num_own)
                for part, share in shares.items()
            ]
            names += [("stem", 0.05)] * (stage == 0)
            names += [("readout", 0.04), ("loss", 0.01)] * (stage == num_stages - 1)
            for name, share in names:
                yield make(rank, replica, stage, name, direction, count, share * seconds)


def write_run(
    folder: Path,
    *,
    model: str = "vig_digits",
    stages: int = 2,
    replicas: int = 2,
    microbatches: int = 4,
    slow: float = 1.2,  # how much longer the last stage takes than the others
    timed: bool = True,  # with the files of --timing
    finished: bool = True,  # with summary.json
    validated: bool = False,  # with scores of validation images
    graph: bool = False,  # of nodes instead of images: 100 a step, of which 60 are trained on
    partial: int | None = None,  # samples of the last batch of an epoch, and of a test
    told: bool = True,  # whether the files say so; those of earlier versions do not
) -> Path:
    """Write all files of a run and return its folder, which is made here."""
    folder.mkdir(parents=True)
    layout = Layout(stages, microbatches, replicas)
    shares = SHARES_OF_LAYER if graph else SHARES
    config = {"model": model, "data": "digits", "batch_size": 100, "stages": stages, "lr": 4e-3}
    config |= {"epochs": 2, "dp": replicas, "microbatches": microbatches, "schedule": "gpipe"}
    record = RunRecord(folder, config)
    rows: list[Row] = []
    spans = gpipe(stages, replicas, microbatches, slow)
    for step in range(1, NUM_STEPS + 1):
        wobble = 1 + 0.04 * ((step * 7919) % 11) / 11  # the same in every run of the tests
        samples = partial if partial and step % 15 == 0 else FULL
        wobble *= samples / FULL
        now = [s._replace(start=s.start * wobble, end=s.end * wobble) for s in spans]
        seconds = step_seconds(now)
        record.add(
            step=step,
            epoch=1 + (step - 1) // 15,
            loss=2.3 * 0.93**step,
            lr=4e-3,
            step_seconds=seconds,
            **(
                {"nodes_per_second": samples / seconds, "training_nodes": 0.6 * samples}
                if graph
                else {"images_per_second": samples / seconds}
            ),
            **(partial_batch(Fill(samples, FULL)) if told else {}),
            data_seconds=seconds / 8,
        )
        if step > NUM_WARMUP:
            rows += rows_of(now, "train", step, stages, shares, samples)
        if step % 15 == 0:
            ema = {"loss": 1.0, "top1": 0.02 * step, "top5": 0.95}
            test = {
                "training_loss": 0.25,
                "loss": 2.3 * 0.95**step,
                "top1": 0.03 * step,
                "top5": 0.99,
                "images": 360,
            }
            validation: dict[str, Any] = {"ema": {**ema, "top1": 0.015 * step}}
            validation |= {"loss": 0.5, "top1": 0.025 * step, "top5": 0.9, "images": 90}
            scores = {"validation": validation} if validated else {}
            row = {**test, "ema": ema, **scores}
            record.add(epoch=step // 15, **(_of_nodes(row) if graph else row))
    for batch in range(1, NUM_TESTS + 1):
        forward = [span for span in spans if span.kind in ("forward", "wait input")]
        samples = partial if partial and batch == NUM_TESTS else FULL
        now = [s._replace(end=s.start + s.seconds * samples / FULL) for s in forward]
        rows += rows_of(now, "test", batch, stages, shares, samples)
    if timed:
        write_rows(rows, folder / "timing.csv")
        if not told:
            cut_off_columns(folder / "timing.csv")
        expected = gpipe(stages, replicas, microbatches, 1.0)
        timeline = {"step": 20, "microbatches": microbatches, "clock_error_seconds": 2e-5}
        timeline |= {"measured": spans, "predicted": expected}
        (folder / "timeline.json").write_text(json.dumps(timeline))
    if not finished:
        record.close()
        return folder
    summary = {
        "model": model,
        "data": "digits",
        "loss": 2.3 * 0.93**NUM_STEPS,
        "test": {"loss": 0.5, "top1": 0.9, "top5": 0.99, "images": 360},
        "steps": NUM_STEPS,
        **({"graph": {"nodes": 1200, "edges": 9876}} if graph else {}),
        "layout": {
            "stages": [[stage] for stage in range(stages)],
            "ranks": layout.world_size,
            "microbatches": microbatches,
            "replicas": replicas,
            "schedule": "gpipe",
        },
        "threads_per_rank": 1,
        "hardware": "A processor, 4 cores",
        "peak_bytes": 650_000_000,
        "wall_seconds": 12.5,
        "versions": {"vigpipe": "0.1.0", "torch": "2.15.0"},
        "commit": COMMIT,
        "host": "node1",
        **({"timing": _timing(rows, stages, replicas, microbatches)} if timed else {}),
    }
    record.finish(summary)
    return folder


@functools.cache
def shared_run(name: str = "run", **options: Any) -> Path:
    """Write a run as `write_run` does, once for all tests that only read it."""
    return write_run(Path(tempfile.mkdtemp(dir=SHARED.name), name), **options)


def _of_nodes(row: dict) -> dict:
    """Turn the scores of images in an evaluation's row into scores of nodes."""
    names = {"top1": "accuracy", "top5": "macro_f1", "images": "nodes"}
    turned = {
        names.get(name, name): _of_nodes(value) if isinstance(value, dict) else value
        for name, value in row.items()
    }
    return {**turned, "micro_f1": row["top1"]}


def cut_off_columns(path: Path) -> None:
    """Turn timing.csv into that of a version that did not tell how full batches were."""
    lines = [line.rsplit(",", 2)[0] for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines) + "\n")


@contextlib.contextmanager
def going_on(folder: Path) -> Iterator[Path]:
    """Hold the lock of a run's folder, as the run does until its process ends."""
    folder.mkdir(exist_ok=True)
    with (folder / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield folder


def _timing(rows: list[Row], stages: int, replicas: int, microbatches: int):
    accounts = make_accounts(rows, Layout(stages, microbatches, replicas))
    step = step_statistics(rows, "train") or statistics([0.0])
    return {
        "warmup_steps": NUM_WARMUP,
        "step_seconds": vars(step),
        "overhead": 0.0042,
        "accounting": [account.as_table() for account in accounts],
        "bubble": {
            "measured": 0.262,
            "formula": (stages - 1) / (microbatches + stages - 1),
            "fill_and_drain": 0.2,
            "imbalance": 0.041,
            "variation": 0.013,
            "transfer": 0.008,
        },
        "peak_bytes": [650_000_000 + 1_000_000 * rank for rank in range(stages * replicas)],
    }
