"""From a run's folder to its numbers."""

import json

import pytest

from benchmarks.study.measured import read_measured
from tests.report.runs import COMMIT, NUM_BLOCKS, NUM_STEPS, NUM_WARMUP, going_on, write_run
from vigpipe.errors import InputError
from vigpipe.parallel.layout import Layout
from vigpipe.timing.recorder import Phase

LAYOUT = Layout(2, 4, 2)


def span(name, rank, start, end, batch=1, phase="test"):
    args = {"step": batch, "phase": phase, "stage": rank % 2}
    times = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
    return {"ph": "X", "cat": "span", "name": name, "pid": rank // 2, "tid": rank, **times,
            "args": args}  # fmt: skip


EVENTS = [
    {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "rank 0"}},
    span("wait input 0", 1, 0.0, 1.0),  # it waited before the batch began
    span("forward 0", 0, 0.5, 1.0),
    span("forward 1", 0, 1.0, 1.5),
    span("forward 1", 1, 1.5, 2.25),
    span("other", 1, 2.25, 9.0),
    span("forward 0", 2, 1.0, 2.0),  # the other copy
    span("forward 0", 0, 1.5, 2.0, batch=2),
    span("forward 0", 0, 0.0, 9.0, phase="train"),
    {"ph": "X", "cat": "forward", "name": "forward", "pid": 0, "tid": 0, "ts": 0, "dur": 9e6,
     "args": {"step": 1, "microbatch": 0}},
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    path = write_run(tmp_path / "run", stages=2, replicas=2, microbatches=4)
    (path / "trace.json").write_text(json.dumps({"traceEvents": EVENTS}))
    return path


def test_a_step_lasts_as_long_as_its_slowest_rank(folder):
    measured = read_measured(folder, "2x2x4", LAYOUT, 3)
    assert (measured.name, measured.round_number) == ("2x2x4", 3)
    assert len(measured.losses) == NUM_STEPS
    train = measured.step_seconds["train"]
    assert sorted(train) == list(range(NUM_WARMUP + 1, NUM_STEPS + 1))
    with (folder / "timing.csv").open() as file:
        rows = [line.strip().split(",") for line in file]
    first = [float(r[8]) for r in rows if r[:2] == ["train", "11"] and r[5] == "step"]
    assert len(first) == 4
    assert train[11] == max(first) > min(first) - 1e-9


def test_a_block_and_the_readout_are_taken_forward(folder):
    measured = read_measured(folder, "2x2x4", LAYOUT, 1)
    blocks = measured.block_seconds["train"]
    assert len(blocks) == NUM_BLOCKS * (NUM_STEPS - NUM_WARMUP)
    assert max(blocks) < 4 * 0.03 / 2  # both directions would take as long
    assert len(measured.readout_seconds["test"]) == 3
    assert measured.bubble == 0.262
    assert list(measured.peak_bytes) == [650e6, 651e6, 652e6, 653e6]
    assert measured.facts["commit"] == COMMIT


def test_the_all_reduce_is_that_of_the_copy_that_comes_last(folder):
    lines = (folder / "timing.csv").read_text().splitlines()
    kept = [line for line in lines if ",all-reduce," not in line]
    # Seconds by rank: of stage 0 the copies take 0.1 and 0.3, of stage 1 0.2 and 0.25.
    for rank, seconds in enumerate((0.1, 0.2, 0.3, 0.25)):
        kept += [f"train,{s},{rank},{rank // 2},-1,all-reduce,,1,{seconds},1,1" for s in (11, 12)]
    (folder / "timing.csv").write_text("\n".join(kept) + "\n")
    measured = read_measured(folder, "2x2x4", LAYOUT, 1)
    assert measured.all_reduce_seconds == pytest.approx((0.2, 0.3))


def test_partial_batches_do_not_count(folder, tmp_path):
    partial = write_run(tmp_path / "partial", stages=2, replicas=2, microbatches=4, partial=28)
    (partial / "trace.json").write_text((folder / "trace.json").read_text())
    whole, measured = (read_measured(path, "2x2x4", LAYOUT, 1) for path in (folder, partial))
    last_batches: dict[Phase, tuple[int, ...]] = {"train": (15, 30), "test": (3,)}
    for phase, last in last_batches.items():
        expected = {n: s for n, s in whole.step_seconds[phase].items() if n not in last}
        assert measured.step_seconds[phase] == pytest.approx(expected)
    assert len(measured.block_seconds["train"]) == NUM_BLOCKS * (NUM_STEPS - NUM_WARMUP - 2)
    assert len(measured.readout_seconds["test"]) == 2
    assert len(measured.losses) == NUM_STEPS


def test_latency_is_from_first_forward_to_last_of_every_copy(folder):
    latencies = read_measured(folder, "2x2x4", LAYOUT, 1).latency_seconds
    assert sorted(latencies) == pytest.approx([0.5, 1.0, 1.75])


def test_a_broken_run_or_one_that_goes_on_is_refused(folder):
    with going_on(folder), pytest.raises(InputError, match="still writing to it; wait for its end"):
        read_measured(folder, "GPipe", LAYOUT, 1)
    for file, content, expected in (
        ("trace.json", '{"traceEvents": [{"cat": "span", "args": {}}]}', "is not a trace"),
        ("trace.json", None, "cannot be read"),
        ("timing.csv", None, "holds no timed step"),
        ("summary.json", None, "there is no summary.json"),
        ("metrics.jsonl", None, "holds no run"),
    ):
        before = (folder / file).read_bytes()
        if content is None:
            (folder / file).unlink()
        else:
            (folder / file).write_text(content)
        with pytest.raises(InputError, match=expected):
            read_measured(folder, "2x2x4", LAYOUT, 1)
        (folder / file).write_bytes(before)
