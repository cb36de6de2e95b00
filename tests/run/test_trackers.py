"""The rows of a run in the hands of others."""

import csv
import json
from types import SimpleNamespace

import pytest

from tests.world import wait_until
from vigpipe.errors import InputError
from vigpipe.run import trackers
from vigpipe.run.record import RunRecord, step_row
from vigpipe.run.trackers import check_tracker

CONFIG = {"lr": 0.5, "model": "vig_digits"}
NUMBERS = {"loss": 0.75, "top1": 0.5, "top5": 1.0, "images": 8}
AVERAGE = {"loss": 0.5, "top1": 0.75, "top5": 1.0}
SCORES = {
    **NUMBERS,
    "ema": AVERAGE,
    "validation": {**NUMBERS, "loss": 0.125, "ema": {**AVERAGE, "top1": 0.25}},
}


def train(folder, track, *, steps_done=0, steps=3, logged=None):
    """Write the rows of a run of some steps, which ends with an evaluation."""
    log = [] if logged is None else logged
    record = RunRecord(folder, CONFIG, steps_done, log.append, track)
    for step in range(steps_done + 1, steps + 1):
        record.add_step(step_row(step, 1, 1 / step, 0.5, 0.25, {"images_per_second": 32.0}, 0.125))
    record.add_event("straggler", steps, "rank 1 is slow")
    record.add_evaluation(1, SCORES)
    record.finish({})


@pytest.fixture
def offline(monkeypatch, tmp_path):
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": f"file:{tmp_path / 'server'}",
    }.items():
        monkeypatch.setenv(name, value)


def test_csv_has_every_row_also_of_the_steps_before_a_resumption(tmp_path):
    train(tmp_path, "csv", steps=5)
    train(tmp_path, "csv", steps_done=2, steps=4)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [row for row in rows if row["lr"]]
    assert [row["step"] for row in steps] == ["1", "2", "3", "4"]
    assert [float(row["loss"]) for row in steps] == [1 / 1, 1 / 2, 1 / 3, 1 / 4]
    assert {(row["step_seconds"], row["data_seconds"]) for row in steps} == {("0.25", "0.125")}
    event, evaluation = rows[4:]
    assert (event["step"], event["event"], event["message"]) == ("4", "straggler", "rank 1 is slow")
    assert (evaluation["step"], evaluation["top1"], evaluation["ema_top1"]) == ("4", "0.5", "0.75")
    names = ("validation_loss", "validation_images", "validation_ema_top1")
    assert [evaluation[name] for name in names] == ["0.125", "8", "0.25"]
    assert float(evaluation["training_loss"]) == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)


IMAGES = (
    "step,epoch,loss,lr,step_seconds,images_per_second,data_seconds,training_loss,top1,top5,"
    "images,ema_loss,ema_top1,ema_top5,validation_loss,validation_top1,validation_top5,"
    "validation_images,validation_ema_loss,validation_ema_top1,validation_ema_top5,event,message"
)
NODES = (
    "step,epoch,loss,lr,step_seconds,nodes_per_second,training_nodes,data_seconds,training_loss,"
    "accuracy,micro_f1,macro_f1,nodes,ema_loss,ema_accuracy,ema_micro_f1,ema_macro_f1,"
    "validation_loss,validation_accuracy,validation_micro_f1,validation_macro_f1,validation_nodes,"
    "validation_ema_loss,validation_ema_accuracy,validation_ema_micro_f1,"
    "validation_ema_macro_f1,event,message"
)


def test_csv_has_the_columns_of_the_kind_of_run(tmp_path):
    scores = {"loss": 0.5, "accuracy": 0.75, "micro_f1": 0.75, "macro_f1": 0.25, "nodes": 8}
    for model, header in (("vig_digits", IMAGES), ("sage", NODES)):
        folder = tmp_path / model
        folder.mkdir()
        record = RunRecord(folder, {"model": model}, track="csv")
        rates = {"nodes_per_second": 32.0, "training_nodes": 5}
        record.add_step(step_row(1, 1, 1.0, 0.5, 0.25, rates, 0.125))
        record.add_evaluation(1, {**scores, "validation": scores})
        record.finish({})
        lines = (folder / "metrics.csv").read_text().splitlines()
        assert lines[0] == header
    with (tmp_path / "sage" / "metrics.csv").open(newline="") as file:
        step, evaluation = csv.DictReader(file)
    assert (step["nodes_per_second"], step["training_nodes"]) == ("32.0", "5")
    names = ("accuracy", "macro_f1", "nodes", "validation_micro_f1", "validation_nodes")
    assert [evaluation[name] for name in names] == ["0.75", "0.25", "8", "0.75", "8"]


def test_charts_of_a_graph_have_its_scores_and_no_counts_of_nodes():
    scores = {"loss": 0.5, "accuracy": 0.75, "nodes": 8}
    row = {"epoch": 1, **scores, "ema": {"accuracy": 0.25}, "validation": scores}
    of_scores = {"test/loss": 0.5, "test/accuracy": 0.75, "test/ema_accuracy": 0.25}
    of_scores |= {"validation/loss": 0.5, "validation/accuracy": 0.75}
    assert trackers._named(row) == of_scores
    row = {"step": 1, "epoch": 1, "nodes_per_second": 32.0, "training_nodes": 5}
    assert trackers._named(row) == {"train/nodes_per_second": 32.0, "train/training_nodes": 5}


@pytest.mark.heavy
@pytest.mark.track
def test_tensorboard_s_event_file_has_the_numbers_of_the_rows(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import (  # pyrefly: ignore[missing-import]
        EventAccumulator,
    )

    train(tmp_path, "tensorboard", steps=5)
    train(tmp_path, "tensorboard", steps_done=2, steps=4)  # as after a checkpoint of step 2
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    loss = {event.step: event.value for event in events.Scalars("train/loss")}
    assert loss == pytest.approx({1: 1, 2: 1 / 2, 3: 1 / 3, 4: 1 / 4})
    for name, value in {
        **{"test/top1": 0.5, "test/ema_top1": 0.75, "train/lr": 0.5},
        **{"validation/loss": 0.125, "validation/ema_top1": 0.25},
    }.items():
        assert events.Scalars(name)[-1].step == 4
        assert events.Scalars(name)[-1].value == value
    assert "event/straggler/text_summary" in events.Tags()["tensors"]


@pytest.mark.heavy
@pytest.mark.track
def test_mlflow_has_one_run_that_goes_on_after_a_resumption(tmp_path, offline):
    from mlflow.tracking import MlflowClient  # pyrefly: ignore[missing-import]

    folder = tmp_path / "run"
    folder.mkdir()
    train(folder, "mlflow", steps=2)
    train(folder, "mlflow", steps_done=2, steps=4)
    client = MlflowClient()
    experiment = client.get_experiment_by_name("vigpipe")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params == {"lr": "0.5", "model": "vig_digits"}
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert {m.step: m.value for m in losses} == {1: 1, 2: 1 / 2, 3: 1 / 3, 4: 1 / 4}
    assert run.data.metrics["test/top1"] == 0.5
    assert run.data.metrics["validation/loss"] == 0.125
    assert run.data.tags["straggler at step 4"] == "rank 1 is slow"


@pytest.mark.heavy
@pytest.mark.track
def test_wandb_offline_keeps_one_run_of_all_rows(tmp_path, offline):
    train(tmp_path, "wandb", steps=3)
    name = (tmp_path / ".wandb-run").read_text().strip()
    (kept,) = (tmp_path / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb")
    for word in (b"train/loss", b"test/ema_top1", b"event/straggler", b"rank 1 is slow"):
        # wandb's own process writes the file, now and then after the run has been finished.
        wait_until(lambda word=word: word in kept.read_bytes(), f"{word} is in {kept}")


def test_a_package_that_is_not_installed_is_named_before_the_run(monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    with pytest.raises(InputError, match="--track wandb: the package wandb is not installed"):
        check_tracker("wandb")
    check_tracker("csv")
    check_tracker(None)


def test_a_tracker_that_fails_is_named_once_and_the_run_goes_on(tmp_path, monkeypatch):
    def fail(*_):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(trackers, "_Csv", lambda *_: SimpleNamespace(add=fail))
    logged = []
    train(tmp_path, "csv", logged=logged)
    (sentence,) = logged
    assert "--track: failed at step 1 (ConnectionError: no route to host)" in sentence
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "lr" in row] == [1, 2, 3]


def test_a_closed_tracker_is_told_nothing_more(tmp_path):
    log = []
    record = RunRecord(tmp_path, CONFIG, log=log.append, track="csv")
    record.close()
    record.add(event="data", step=1, message="late")
    record.close()
    assert not log
    assert "late" in (tmp_path / "metrics.jsonl").read_text()


def test_a_tracker_that_cannot_begin_ends_the_run_before_its_first_step(tmp_path):
    (tmp_path / "metrics.csv").mkdir()
    with pytest.raises(InputError, match=r"--track csv: cannot begin \(.*Is a directory"):
        train(tmp_path, "csv")
