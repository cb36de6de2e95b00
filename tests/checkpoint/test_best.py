"""--keep-best: the checkpoint of the best evaluation stays, whatever else is deleted."""

import json
import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from tests.checkpoint.test_manifest import make
from tests.checkpoint.test_resume import SMALL, largest_difference, run, run_rank
from tests.refusals import check_refusals
from tests.world import run_ranks
from vigpipe import training
from vigpipe.checkpoint.best import Best, best_checkpoint, better
from vigpipe.checkpoint.manifest import list_checkpoints, read_manifest
from vigpipe.cli import main
from vigpipe.data.score import ImageScore
from vigpipe.job.score import Scores

KEEPING = replace(
    SMALL, checkpoint_every="never", keep=1, keep_best="top1", ema=None, validation=0.0
)


def scores(top1, loss=1.0, average=None):
    test = ImageScore(loss, top1, 1.0, 30)
    return Scores(test, None if average is None else replace(test, top1=average))


def play(monkeypatch, *all_scores):
    """Let the evaluations of runs say this, one after another."""
    script = iter(all_scores)
    monkeypatch.setattr(training, "evaluate_all", lambda *_: next(script))


def steps(folder):
    return [int(path.name[-8:]) for path in list_checkpoints(folder)]


# ---- which is better ------------------------------------------------------------------------


def test_more_of_top_1_and_less_of_loss_is_better_and_the_first_of_equals_stays():
    first = better(scores(0.5, loss=2.0), 3, "top1", None)
    assert first == Best(3, "top1", 0.5, "weights", "test")
    assert better(scores(0.5), 6, "top1", first) is None
    assert better(scores(0.6), 6, "top1", first) == Best(6, "top1", 0.6, "weights")
    first = better(scores(0.5, loss=2.0), 3, "loss", None)
    assert better(scores(0.9, loss=2.5), 6, "loss", first) is None
    assert better(scores(0.1, loss=1.5), 6, "loss", first) == Best(6, "loss", 1.5, "weights")


def test_the_validation_images_choose_where_there_are_some():
    validation, average = (
        ImageScore(loss, top1, 1.0, 20) for loss, top1 in ((3.0, 0.25), (2.0, 0.75))
    )
    both = scores(0.5, average=0.9)._replace(validation=validation, validation_average=average)
    first = better(both, 3, "top1", None)
    assert first == Best(3, "top1", 0.75, "ema", "validation")
    assert str(first) == "top-1 75.00% of the moving average on the validation images"
    worse = scores(0.95, average=0.95)._replace(validation=validation)
    assert better(worse, 6, "top1", first) is None
    weights = scores(0.5)._replace(validation=validation)
    assert better(weights, 3, "loss", None) == Best(3, "loss", 3.0, "weights", "validation")


def test_the_moving_average_counts_where_there_is_one():
    first = better(scores(0.5, average=0.9), 3, "top1", None)
    assert first == Best(3, "top1", 0.9, "ema")
    assert better(scores(0.95, average=0.8), 6, "top1", first) is None


# ---- in a run -------------------------------------------------------------------------------


@pytest.mark.multiprocess
def test_the_best_stays_beside_the_newest_and_is_exported(tmp_path, monkeypatch, capsys):
    play(monkeypatch, scores(0.5), scores(0.9), scores(0.7))
    folder = tmp_path / "run"
    assert run(KEEPING, folder) == 0
    assert steps(folder) == [8, 6]
    said = capsys.readouterr().out
    assert "best at step 6: top-1 90.00% of the weights on the test images" in said
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["best"] == Best(6, "top1", 0.9, "weights", "test").as_table()

    best, same = tmp_path / "best.safetensors", tmp_path / "same.safetensors"
    assert main(["checkpoint", "export", "--best", str(folder), str(best)]) == 0
    assert "step-00000006, the best by top-1 90.00%" in capsys.readouterr().out
    there = folder / "checkpoints" / "step-00000006"
    assert main(["checkpoint", "export", str(there), str(same)]) == 0
    assert best.read_bytes() == same.read_bytes()
    assert main(["checkpoint", "list", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "the best, top-1 90.00%" in line] == [
        "step-00000006"
    ]


@pytest.mark.multiprocess
def test_the_best_is_remembered_by_a_longer_run_in_the_same_folder_only(tmp_path, monkeypatch):
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    play(monkeypatch, scores(0.5), scores(0.9), scores(0.7), scores(0.8), scores(0.8))
    assert run(KEEPING, folder) == 0
    shutil.copytree(folder, tmp_path / "copy")
    longer = replace(KEEPING, steps=9)
    assert run(replace(longer, resume="auto"), folder) == 0
    assert steps(folder) == [9, 6]
    assert run(replace(longer, resume=str(tmp_path / "copy")), elsewhere) == 0
    assert steps(elsewhere) == [9]
    assert best_checkpoint(elsewhere)[1].value == 0.8


@pytest.mark.multiprocess
def test_another_measure_starts_anew(tmp_path, monkeypatch):
    play(monkeypatch, scores(0.5), scores(0.9), scores(0.7), scores(0.1, loss=9.0))
    assert run(KEEPING, tmp_path) == 0
    assert run(replace(KEEPING, steps=9, keep_best="loss", resume="auto"), tmp_path) == 0
    assert best_checkpoint(tmp_path)[1] == Best(9, "loss", 9.0, "weights")
    assert steps(tmp_path) == [9]


@pytest.mark.multiprocess
def test_all_ranks_keep_the_same(tmp_path):
    """With real scores of validation images, which only ranks of the last stages know."""
    config = replace(
        KEEPING, stages=2, dp=2, microbatches=2, keep_best="loss", ema=0.5, validation=0.02
    )
    assert run_ranks(run_rank, 4, config, tmp_path) == [0] * 4
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = {
        step: row["validation"]["ema"]["loss"]
        for step, row in zip((3, 6, 8), (r for r in rows if "top1" in r), strict=True)
    }
    lowest = min(losses, key=lambda step: losses[step])
    assert steps(tmp_path) == sorted({8, lowest}, reverse=True)
    checkpoint, best = best_checkpoint(tmp_path)
    assert best == Best(lowest, "loss", losses[lowest], "ema", "validation")
    target = tmp_path / "best.safetensors"
    assert main(["checkpoint", "export", "--best", str(tmp_path), str(target)]) == 0
    average = tmp_path / "average.safetensors"
    assert main(["checkpoint", "export", "--ema", str(checkpoint), str(average)]) == 0
    assert largest_difference([load_file(target)], [load_file(average)]) == 0


# ---- what is on disk ------------------------------------------------------------------------


def test_a_run_without_a_best_checkpoint_is_refused(tmp_path, capsys):
    make(tmp_path / "checkpoints")
    target = str(tmp_path / "w.safetensors")
    assert main(["checkpoint", "export", "--best", str(tmp_path), target]) == 2
    assert "has no best checkpoint; train with --keep-best" in capsys.readouterr().err
    place = str(tmp_path / "checkpoints" / "step-00000050")
    assert main(["checkpoint", "export", "--best", place, target]) == 2
    assert "--best wants the folder of a run" in capsys.readouterr().err


def test_a_malformed_entry_or_one_of_a_checkpoint_that_is_gone_is_refused(tmp_path):
    rows = [
        ({"step": "6"}, "is malformed"),
        ({"step": 10**30}, "is malformed"),
        ({"step": -1}, "is malformed"),
        ({"by": "top5"}, "is malformed"),
        ({"value": float("inf")}, "is malformed|is not the JSON"),
        ({"value": 10**400}, "is malformed|is not the JSON"),  # was an OverflowError
        ({"of": 1}, "is malformed"),
        ({"images": "training"}, "is malformed"),
        ({"more": 1}, "is malformed"),
        ({"step": 40}, "its best checkpoint, step-00000040, is gone"),
    ]

    def read(change):
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        best = Best(50, "top1", 0.5, "weights").as_table()
        make(tmp_path / "checkpoints", best={**best, **change})
        best_checkpoint(tmp_path)

    check_refusals(rows, read, where=tmp_path)


@pytest.mark.parametrize(("version", "lacks"), [(1, ["best", "replicas"]), (2, ["replicas"])])
def test_a_checkpoint_from_before_is_read(version, lacks, tmp_path):
    """The format 1 had no entry of the best checkpoint, and 2 none of replicas that differ."""
    checkpoint = make(tmp_path)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    from vigpipe.checkpoint.manifest import _digest

    for key in lacks:
        del manifest["checkpoint"][key]
    manifest |= {
        "format": f"vigpipe checkpoint {version}",
        "sha256": _digest(manifest["checkpoint"]),
    }
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert (read_manifest(checkpoint).best, read_manifest(checkpoint).replicas) == ({}, {})
    assert read_manifest(checkpoint).step == 50
