"""What is read of a run's folder: finished, unfinished, untimed, and no run at all."""

import json
import shutil

import pytest

from tests.refusals import check_refusals
from tests.report.runs import NUM_STEPS, NUM_WARMUP, going_on, shared_run, write_run
from vigpipe.report.read import read_runs


def test_a_finished_run_has_steps_evaluations_and_options():
    (run,) = read_runs([shared_run()])
    assert run.name == "run"
    assert not run.unfinished
    assert not run.running
    assert [step.number for step in run.steps] == list(range(1, NUM_STEPS + 1))
    assert run.steps[0].loss == pytest.approx(2.3 * 0.93)
    assert run.steps[0].per_second == pytest.approx(100 / run.steps[0].seconds)
    assert [(row.step, row.epoch) for row in run.evaluations] == [(15, 1), (30, 2)]
    assert {step.epoch for step in run.steps[15:]} == {2}
    assert {step.lr for step in run.steps} == {4e-3}
    assert {(step.unit, round(step.samples, 6)) for step in run.steps} == {("images", 100)}
    assert run.evaluations[1].training_loss == 0.25
    assert run.evaluations[1].test.shares == pytest.approx({"top1": 0.9, "top5": 0.99})
    assert run.evaluations[1].test.average == pytest.approx(0.6)
    assert run.options["microbatches"] == 4
    assert run.timing is not None
    assert run.timing.warmup_steps == NUM_WARMUP
    (untimed,) = read_runs([shared_run(timed=False)])
    assert untimed.timing is None


def test_a_run_on_a_graph_is_known_by_the_names_of_its_numbers():
    (run,) = read_runs([shared_run(graph=True)])
    assert run.unit == "nodes"
    step = run.steps[0]
    assert (step.unit, step.samples, round(step.num_processed, 6)) == ("nodes", 60, 100)
    last = run.evaluations[-1]
    shares = {"accuracy": 0.9, "micro_f1": 0.9, "macro_f1": 0.99}
    assert (last.unit, last.test.shares) == ("nodes", pytest.approx(shares))
    assert (last.test.main, last.test.average) == pytest.approx((0.9, 0.6))


def test_a_run_that_crashed_is_unfinished_and_tells_why(tmp_path):
    folder = write_run(tmp_path / "run", finished=False)
    for rank, kind, message in ((0, "lost peer", "no answer"), (1, "own", "KeyError: 'x'")):
        record = {"rank": rank, "kind": kind, "message": message}
        (folder / f"failed-rank{rank}.json").write_text(json.dumps(record))
    (run,) = read_runs([folder])
    assert run.unfinished == (
        "it ended after step 30: there is no summary.json; rank 1: KeyError: 'x'"
    )
    assert len(run.steps) == NUM_STEPS
    assert run.timing is not None  # timing.csv is there
    assert run.timing.rows
    assert run.timing.accounts == ()


def test_a_torn_last_line_is_left_out_and_told(tmp_path):
    folder = write_run(tmp_path / "run")
    metrics = folder / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes() + '{"step": 31, "loss": 0.1, "é'.encode()[:-1])
    (run,) = read_runs([folder])
    assert run.steps[-1].number == NUM_STEPS
    assert run.unfinished == "it ended after step 30: the last line of metrics.jsonl is torn"


def test_a_whole_last_line_needs_no_newline(tmp_path):
    folder = write_run(tmp_path / "run")
    metrics = folder / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes().rstrip(b"\n"))
    (run,) = read_runs([folder])
    assert len(run.evaluations) == 2
    assert not run.unfinished


def test_a_run_that_never_made_a_step_can_be_shown(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    (run,) = read_runs([tmp_path])
    assert run.steps == ()
    assert run.unfinished == "it ended before its first step: there is no summary.json"


@pytest.mark.parametrize("torn", [b"", b'{"step": 31, "loss": 0.1, "l'])
def test_a_run_that_goes_on_is_running_whatever_its_last_line_is(torn, tmp_path):
    folder = write_run(tmp_path / "run", timed=False, finished=False)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    with going_on(folder):
        (run,) = read_runs([folder])
        assert (run.running, run.unfinished) == (True, "")
        assert len(run.steps) == NUM_STEPS
    (run,) = read_runs([folder])  # its process has died
    assert not run.running
    assert run.unfinished.startswith("it ended after step 30: there is no summary.json")


def test_a_finished_run_that_is_made_longer_is_running(tmp_path):
    with going_on(write_run(tmp_path / "run")) as folder:
        (run,) = read_runs([folder])
    assert run.running
    assert "commit" not in run.summary  # it is of the part before


def test_runs_of_one_name_are_told_apart(tmp_path):
    folders = [write_run(tmp_path / parent / "run", timed=False) for parent in "ab"]
    assert [run.name for run in read_runs(folders)] == [str(folder) for folder in folders]


def test_what_is_no_run_is_refused(tmp_path):
    run = write_run(tmp_path / "run", timed=False)
    (tmp_path / "empty").mkdir()
    rows = [
        ([], "no run was given"),
        ([tmp_path / "none"], "does not exist"),
        ([run / "config.toml"], "is a file"),
        ([tmp_path / "empty"], r"no metrics\.jsonl"),
        ([run, run / ".." / "run"], "was given twice"),
    ]
    check_refusals(rows, read_runs)


EPOCH, STEP = b'{"epoch": 1, "loss": 1, "top1": 1, "top5": 1', b'{"step": 1, "epoch": 1, "loss": 1'
BROKEN = [
    ("metrics.jsonl", b"\x89PNG\r\n\x1a\n\xff\xfe\n", "line 1: is not text"),
    ("metrics.jsonl", b'{"step": 1,\n{}\n', "line 1: is not JSON"),
    ("metrics.jsonl", b"[]\n", "line 1: must be a JSON object"),
    ("metrics.jsonl", b'{"step": 1, "loss": "low"}\n', 'loss must be a number, is "low"'),
    ("metrics.jsonl", b'{"step": 1, "loss": NaN}\n', "loss must be a finite number"),
    ("metrics.jsonl", b'{"step": -1}\n', "step must be a whole number from 0, is -1"),
    ("metrics.jsonl", b'{"epoch": 1, "loss": 1}\n', "top1 must be a number, is missing"),
    ("metrics.jsonl", EPOCH + b', "nodes": 3}\n', "accuracy must be a number, is missing"),
    (
        "metrics.jsonl",
        STEP + b', "lr": 1, "step_seconds": 1, "nodes_per_second": 5}\n',
        "training_nodes must be a number, is missing",
    ),
    ("metrics.jsonl", b'{"epoch": 1, "validation": 1}\n', "validation must be an object, is 1"),
    ("metrics.jsonl", b'{"step": 1' + b"0" * 400 + b"}\n", "step must be at most 9007199254740992"),
    ("metrics.jsonl", b'{"step": 1' + b"0" * 5000 + b"}\n", "line 1: is not JSON"),
    ("metrics.jsonl", b'{"step": 1, "loss": 1e999}\n', "loss must be a finite number"),
    ("config.toml", b"model = \n", "not a TOML file .*; name a folder that vigpipe train wrote"),
    ("config.toml", b"\xff\xfe", "is not UTF-8 text"),
    ("summary.json", b"[" * 100_000, "is not JSON"),
    ("failed-rank0.json", b"{}", "kind must be a string"),
]


def test_a_broken_file_is_named_in_one_sentence(tmp_path):
    def read(file, content):
        folder = write_run(tmp_path / "run", timed=False, finished=file != "failed-rank0.json")
        (folder / file).write_bytes(content)
        try:
            read_runs([folder])
        finally:
            shutil.rmtree(folder)

    rows = [(file, content, f"{file}.*{words}") for file, content, words in BROKEN]
    check_refusals(rows, read, where=tmp_path / "run")
