"""A run that ended goes on as if it had not: bit for bit, or in another layout by the contract."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.test_manifest import flip
from tests.oracle import first_of, images_of, shortened, with_images
from tests.refusals import check_refusals
from tests.world import run_ranks
from vigpipe import training
from vigpipe.checkpoint.manifest import list_checkpoints, read_manifest
from vigpipe.checkpoint.resume import check_same_run, resume
from vigpipe.cli import main
from vigpipe.config.options import TrainConfig
from vigpipe.errors import SAVED, InputError
from vigpipe.run.facts import prepare
from vigpipe.run.rank import make_rank_state
from vigpipe.training import train

pytestmark = pytest.mark.multiprocess

CPU = torch.device("cpu")
# 48 images an epoch in steps of 20, 20 and 8: checkpoints lie within epochs and at their ends. What
# is evaluated fits into one batch: that is most of a run's work.
SMALL = TrainConfig(
    model="vig_digits",
    batch_size=20,
    steps=8,
    epochs=9,
    microbatches=4,
    checkpoint_every=1,
    keep=99,
    ema=0.9,
    clip=1.0,
    drop_path=0.2,
    repeated_augment=2,
    mixup=0.4,
    dtype="float64",
    workers=0,
    lr_schedule="cosine",
    validation=0.01,
)

# Where neither micro-batches nor evaluations matter.
CHEAP = {"microbatches": 1, "evaluate_every": 9, "validation": 0.0}


def make_job(config):
    run = prepare(config, torch.float64)
    return with_images(run, shortened(images_of(run), 48, 20))


def run(config, folder, rank=0):
    torch.set_num_threads(1)  # fixtures of the module come before the one that does it
    folder.mkdir(parents=True, exist_ok=True)
    return train(make_job(config), rank, CPU, folder)


def run_rank(rank, world_size, config, folder):
    return run(config, folder, rank)


def rows(folder):
    """What metrics.jsonl tells, but for the times."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("step_seconds", "images_per_second", "data_seconds")
    return [{k: v for k, v in row.items() if k not in timed} for row in found if "event" not in row]


def files(folder):
    return [load_file(folder / name) for name in ("model.safetensors", "model-ema.safetensors")]


def largest_difference(ours, theirs):
    assert [table.keys() for table in ours] == [table.keys() for table in theirs]
    return max(
        float((ours[i][name].double() - theirs[i][name].double()).abs().max())
        for i in range(len(ours))
        for name in ours[i]
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(SMALL, folder) == 0
    return folder


def cut_off(whole, folder, step):
    """The run as it was when it died some time after the checkpoint of a step."""
    shutil.copytree(whole, folder)
    for checkpoint in list_checkpoints(folder):
        if int(checkpoint.name[-8:]) > step:
            shutil.rmtree(checkpoint)
    for name in ("model.safetensors", "model-ema.safetensors", "summary.json"):
        (folder / name).unlink()
    if step < 8:  # what a checkpoint has behind it is on disk
        lines = (folder / "metrics.jsonl").read_bytes()
        (folder / "metrics.jsonl").write_bytes(lines[:-40])  # torn in the middle of a line
    return folder


@pytest.mark.oldest
@pytest.mark.parametrize("step", [5, 8])  # 3 and 8: where a run is asked to stop
def test_the_same_layout_goes_on_bit_for_bit(whole, step, tmp_path):
    folder = cut_off(whole, tmp_path / "run", step)
    assert run(replace(SMALL, resume="auto"), folder) == 0
    assert largest_difference(files(folder), files(whole)) == 0
    assert rows(folder) == rows(whole)
    assert json.loads((folder / "summary.json").read_text())["resumed_at_step"] == step


@pytest.mark.oldest
@pytest.mark.parametrize(
    "layout",
    [
        {"stages": 2, "dp": 2, "microbatches": 2, "schedule": "1f1b"},
        {"stages": 2, "schedule": "interleaved1f1b", "virtual_stages": 2},
    ],
    ids=str,
)
def test_another_layout_goes_on_within_the_contract(whole, layout, tmp_path):
    config = replace(SMALL, **layout)
    step = 4
    there = cut_off(whole, tmp_path / "there", step)
    assert isinstance(config.stages, int)
    ranks = config.stages * config.dp
    resumed = replace(config, resume="auto")
    assert run_ranks(run_rank, ranks, resumed, there) == [0] * ranks
    bound = 0 if layout.get("dp", 1) == 1 else 1e-10
    assert largest_difference(files(there), files(whole)) <= bound
    # And back: what these ranks have saved, each its share, one process goes on from.
    back = cut_off(there, tmp_path / "back", 6)
    newest = list_checkpoints(back)[0]
    assert len(list(newest.glob("*.safetensors"))) == ranks
    assert run(replace(SMALL, resume="auto"), back) == 0
    assert largest_difference(files(back), files(whole)) <= bound


# Each kind of state: a counter beside two tensors of each weight, one tensor, and another two.
@pytest.mark.oldest
@pytest.mark.parametrize("opt", ["nadamw", "sgd", "rmsprop"])
def test_every_other_optimizer_goes_on(opt, tmp_path):
    config = replace(SMALL, opt=opt, lr=1e-3, steps=2, dtype="float32", **CHEAP)
    assert run(config, tmp_path / "whole") == 0
    folder = cut_off(tmp_path / "whole", tmp_path / "run", 1)
    assert run(replace(config, resume="auto"), folder) == 0
    assert largest_difference(files(folder), files(tmp_path / "whole")) == 0


@pytest.mark.parametrize("step", [3, 8])
def test_asked_to_stop_a_run_saves_and_loses_not_even_an_evaluation(
    whole, step, tmp_path, monkeypatch
):
    def due(save_and_stop):
        save_and_stop.why = "somebody asked"
        return len(seen) == step or seen.append(1)

    seen = [1]
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(training.SaveAndStop, "is_stop_due", due)
        assert run(replace(SMALL, checkpoint_every="never"), folder) == SAVED
    assert [path.name for path in list_checkpoints(folder)] == [f"step-{step:08d}"]
    assert not (folder / "summary.json").exists()
    assert run(replace(SMALL, resume="auto"), folder) == 0
    assert largest_difference(files(folder), files(whole)) == 0
    assert rows(folder) == rows(whole)


def test_a_finished_run_can_be_made_longer_though_it_saved_never(tmp_path, capsys):
    config = replace(SMALL, checkpoint_every="never", ema=None, **CHEAP)
    assert run(replace(config, steps=2), tmp_path / "run") == 0
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000002"]
    assert run(replace(config, steps=4, resume="auto"), tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert "going on after step 2" in said
    assert "the run has 4 steps, not 2" in said
    # The learning rates are those of the new length, from the first new step on.
    assert run(replace(config, steps=4), tmp_path / "new") == 0
    longer, new = (
        [row for row in rows(tmp_path / name) if "step" in row] for name in ("run", "new")
    )
    assert [row["step"] for row in longer] == [1, 2, 3, 4]
    assert [row["lr"] for row in longer[2:]] == [row["lr"] for row in new[2:]]
    assert longer[1]["lr"] != new[1]["lr"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 4


def test_a_finished_run_that_goes_on_unchanged_is_the_same_and_says_so(whole, tmp_path, capsys):
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    assert run(replace(SMALL, resume="auto"), folder) == 0
    assert "all 8 steps are done; a larger --steps or --epochs" in capsys.readouterr().out
    assert largest_difference(files(folder), files(whole)) == 0


def test_auto_falls_back_to_the_newest_that_is_whole_and_says_so(whole, tmp_path, capsys):
    folder = cut_off(whole, tmp_path / "run", 6)
    flip(list_checkpoints(folder)[0] / "stage0-replica0.safetensors")
    (list_checkpoints(folder)[1] / "manifest.json").unlink()
    assert run(replace(SMALL, resume="auto"), folder) == 0
    said = capsys.readouterr().out
    assert f"passed over: {folder}/checkpoints/step-00000006/stage0-replica0.safetensors" in said
    assert f"passed over: {folder}/checkpoints/step-00000005/manifest.json" in said
    assert f"going on after step 4, from {folder}/checkpoints/step-00000004" in said
    assert largest_difference(files(folder), files(whole)) == 0


def test_auto_begins_anew_where_there_is_nothing_and_says_so(whole, tmp_path, capsys):
    folder = cut_off(whole, tmp_path / "run", 0)
    assert run(replace(SMALL, steps=1, resume="auto"), folder) == 0
    assert f"{folder} holds no checkpoint: starting anew" in capsys.readouterr().out
    assert [row.get("step") for row in rows(folder)] == [1, None]  # and the evaluation


def test_without_a_whole_checkpoint_nothing_is_begun_anew_in_silence(whole, tmp_path):
    folder = cut_off(whole, tmp_path / "run", 2)
    for checkpoint in list_checkpoints(folder):
        flip(checkpoint / "stage0-replica0.safetensors")
    with pytest.raises(InputError, match=r"none of the 2 checkpoints in .* is whole"):
        run(replace(SMALL, resume="auto"), folder)


def test_a_named_checkpoint_is_taken_or_refused_but_not_replaced(whole, tmp_path):
    folder = cut_off(whole, tmp_path / "run", 7)
    fresh = tmp_path / "fresh"
    assert run(replace(SMALL, resume=str(list_checkpoints(folder)[1])), fresh) == 0
    assert [row["step"] for row in rows(fresh) if "step" in row] == [7, 8]
    assert largest_difference(files(fresh), files(whole)) == 0
    flip(list_checkpoints(folder)[1] / "stage0-replica0.safetensors")
    with pytest.raises(InputError, match=r"step-00000006/.*SHA-256"):
        run(replace(SMALL, resume=str(list_checkpoints(folder)[1])), tmp_path / "fresh2")
    assert run(replace(SMALL, resume=str(folder)), tmp_path / "fresh3") == 0  # a run: its newest


def test_another_run_s_checkpoint_is_refused(whole, tmp_path):
    rows = [
        ({"steps": 7}, "8 steps are done already, but the run has 7"),
        ({"lr": 0.5}, r"its --lr is 0.004, this run's is 0.5"),
        ({"seed": 7}, "its --seed is 0, this run's is 7"),
        ({"batch_size": 16}, "its --batch-size is 20"),
        ({"graph": "grid"}, "its --graph is not set, this run's is grid"),
        ({"opt": "sgd"}, "its --opt is adamw"),
        ({"ema": 0.0}, "its --ema is 0.9"),
        ({"validation": 0.0}, "its --validation is 0.01, this run's is 0.0"),
    ]
    resumed = replace(SMALL, resume=str(whole))
    check_refusals(rows, lambda changes: run(replace(resumed, **changes), tmp_path / "run"))


def test_other_images_are_refused(whole, tmp_path):
    run = make_job(replace(SMALL, resume=str(whole)))
    source = images_of(run)
    other = replace(source, validation=first_of(source.validation, 9))
    with pytest.raises(InputError, match="validation images was 10, is 9; give the same data"):
        train(with_images(run, other), 0, CPU, tmp_path)


def test_a_checkpoint_from_before_an_option_existed_goes_on_with_its_default(whole):
    manifest = read_manifest(list_checkpoints(whole)[0])
    without = {name: value for name, value in manifest.config.items() if name != "dropout"}
    before = replace(manifest, config=without)
    assert check_same_run(before, make_job(SMALL), whole) == (
        check_same_run(manifest, make_job(SMALL), whole)
    )
    with pytest.raises(InputError, match=r"its --dropout is 0.0, this run's is 0.1"):
        check_same_run(before, make_job(replace(SMALL, dropout=0.1)), whole)


def test_what_only_ranks_that_share_a_graph_have_is_not_asked_of_one_that_is_alone(whole):
    manifest, alone = read_manifest(list_checkpoints(whole)[0]), make_job(SMALL)

    def of(**options):
        return replace(manifest, config=manifest.config | {"shards": 2} | options)

    check_same_run(of(split="mixed", chunks=4), alone, whole)
    check_same_run(of(split="mixed", adjacency="split", sparse_threads=2), alone, whole)
    check_same_run(of(split="halo", halo="exact"), alone, whole)
    with pytest.raises(InputError, match="its --halo is stale, this run's is not set"):
        check_same_run(of(split="halo", halo="stale"), alone, whole)


def test_one_rank_alone_makes_what_was_saved_into_a_checkpoint(whole, tmp_path, monkeypatch):
    """Two that share a batch did so at once, and each removed what the other one had begun."""
    rank_state = make_rank_state(make_job(replace(SMALL, resume="auto")), 0, CPU)
    rank_state.mesh.shards.size, rank_state.mesh.shards.rank = 2, 1
    rank_state.mesh = replace(rank_state.mesh, rank=1)
    monkeypatch.setattr("vigpipe.checkpoint.resume.broadcast_value", lambda value, _: value)
    monkeypatch.setattr("vigpipe.checkpoint.resume.salvage", lambda folder: pytest.fail("salvaged"))
    assert resume(rank_state, whole, lambda text: None) is None


def test_other_micro_batches_go_on_with_a_word(whole, tmp_path, capsys):
    assert run(replace(SMALL, resume=str(whole), microbatches=2, steps=9), tmp_path) == 0
    assert "--microbatches x --dp was 4, is 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume", "auto"], "--resume auto: goes on with the run in --out"),
        (["--resume", "nowhere", "--out", "{}/a"], "--resume nowhere: is not a folder"),
        (["--resume", "{}", "--out", "{}/a"], "holds no checkpoints"),
        (["--checkpoint-every", "0"], "--checkpoint-every 0: must be a number of steps"),
        (["--keep", "0"], "--keep 0: must be a number from 1"),
        (["--stop-before", "soon"], "--stop-before soon: must be a time"),
    ],
)
def test_wrong_use_is_one_sentence(arguments, message, tmp_path, capsys):
    given = [a.format(tmp_path) for a in arguments]
    assert main(["train", "--steps", "1", *given]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", [["--resume", "auto"], ["--elastic"]])
def test_what_is_for_training_is_refused_elsewhere(option, tmp_path, capsys):
    assert main(["check", *option, "--out", str(tmp_path / "a")]) == 2
    assert "is for vigpipe train only" in capsys.readouterr().err


def test_the_verbs(whole, tmp_path, capsys):
    assert main(["checkpoint", "list", str(whole)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:4] == ["step-00000008", "8", "of", "8"]
    assert len(lines) == 10
    assert main(["checkpoint", "verify", str(whole)]) == 0
    assert capsys.readouterr().out.count(": whole, ") == 8
    target = tmp_path / "w.safetensors"
    assert main(["checkpoint", "export", str(whole), str(target)]) == 0
    assert target.read_bytes() == (whole / "model.safetensors").read_bytes()
    assert main(["checkpoint", "export", str(whole), str(target), "--ema"]) == 2
    assert target.read_bytes() == (whole / "model.safetensors").read_bytes()
    assert main(["checkpoint", "export", str(whole), str(target), "--ema", "--overwrite"]) == 0
    assert target.read_bytes() == (whole / "model-ema.safetensors").read_bytes()
    damaged = Path(shutil.copytree(list_checkpoints(whole)[0], tmp_path / "step-00000008"))
    flip(damaged / "stage0-replica0.safetensors")
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(damaged), str(whole)]) == 2
    assert f"{damaged}/stage0-replica0.safetensors: its SHA-256" in capsys.readouterr().out
    assert main(["checkpoint", "list", str(tmp_path / "nowhere")]) == 2
    assert main(["checkpoint", "verify"]) == 2
    assert main(["checkpoint", "export", str(damaged), str(target), "--overwrite"]) == 2
    assert target.read_bytes() == (whole / "model-ema.safetensors").read_bytes()
