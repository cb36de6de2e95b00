"""Whole runs: their files, their losses under every launcher and layout, and how they end."""

import json
import re
import shutil
import sys
import tomllib
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.oracle import images_of, with_images
from tests.small_digits import NUM_TEST, NUM_TRAIN, SMALL_DIGITS, among_small_digits
from tests.small_model import whole_model
from tests.test_cli import make_pictures
from tests.world import ROOT, run_command, run_each, run_ranks
from vigpipe.cli import main
from vigpipe.config.options import TrainConfig
from vigpipe.data import open_source
from vigpipe.data.batches import epoch_order
from vigpipe.data.split import Split
from vigpipe.model.variants import create_model
from vigpipe.run.batches import batches
from vigpipe.run.facts import prepare
from vigpipe.run.rank import make_rank_state
from vigpipe.training import train

pytestmark = pytest.mark.multiprocess

CPU = torch.device("cpu")
CIFAR10_SUBSET = ROOT.parent / "shared" / "data" / "cifar10-subset"
STEP = {"step", "epoch", "loss", "lr", "step_seconds", "images_per_second", "data_seconds"}
EVALUATION = {"epoch", "training_loss", "loss", "top1", "top5", "images"}
SHORT = [*SMALL_DIGITS, "--steps", "3", "--epochs", "50", "--batch-size", "30", "--seed", "5"]
FOUR_RANKS = ["--stages", "2", "--dp", "2", "--microbatches", "2"]
# Processes that read images are fresh ones, which import torch: here there is one, of rank 0.
ONE_READER = ["--stages", "2", "--microbatches", "2", "--workers", "1"]


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    """Of every step and every evaluation."""
    return [row["loss"] for row in rows(folder)]


def run_here(folder: Path, *arguments: str) -> Path:
    """Train in this process; returns the run's folder."""
    assert main(["train", *arguments, "--out", str(folder), "--threads", "1"]) == 0
    return folder


@pytest.fixture(scope="module", autouse=True)
def _data(tmp_path_factory):
    with among_small_digits(tmp_path_factory.mktemp("data")), whole_model():
        yield


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Three steps in one process, on the micro-batches of FOUR_RANKS."""
    folder = tmp_path_factory.mktemp("alone")
    return run_here(folder, *SHORT, "--microbatches", "4")


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """The same on two stages × two replicas."""
    folder = tmp_path_factory.mktemp("four")
    line = [sys.executable, "-m", "vigpipe.train", *FOUR_RANKS, *SHORT, "--out", str(folder)]
    done = run_command(line, fresh=True)  # the README's command as a user starts it
    assert (done.returncode, done.stderr) == (0, "")
    (folder / "stdout").write_text(done.stdout)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Two classes of 5 train and 3 test pictures: CIFAR-10's where they are, else noise."""
    root = tmp_path_factory.mktemp("data") / "pictures"
    if not CIFAR10_SUBSET.is_dir():
        return make_pictures(root, 5, 3, (32, 32))
    for split, count in (("train", 5), ("test", 3)):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for path in sorted((CIFAR10_SUBSET / split / name).iterdir())[:count]:
                shutil.copy(path, root / split / name)
    return root


def logits_of(folder: Path, images: Split) -> torch.Tensor:
    """What the unsplit model makes of all images with a run's weights."""
    model = create_model("vig_digits", num_classes=10, in_chans=1, img_size=(8, 8))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    with torch.no_grad():
        return model.eval()(images.read(range(len(images))), torch.arange(len(images)))


# ---- files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["alone", "four_ranks"])
def test_every_step_and_the_evaluation_have_a_row(run, request):
    *steps, evaluation = rows(request.getfixturevalue(run))
    assert [row.keys() for row in steps] == [STEP] * 3  # --steps wins over --epochs
    assert evaluation.keys() == EVALUATION
    assert [(row["step"], row["epoch"]) for row in steps] == [(1, 1), (2, 1), (3, 1)]
    assert all(row["images_per_second"] > 0 < row["step_seconds"] for row in steps)
    assert all(row["data_seconds"] > 0 for row in steps)
    assert evaluation["images"] == NUM_TEST
    assert 0 <= evaluation["top1"] <= evaluation["top5"] <= 1


def test_a_run_scores_its_validation_images_and_lets_them_choose(tmp_path, capsys):
    options = ["--validation", "0.2", "--keep-best", "loss", "--ema", "0.5"]
    folder = run_here(tmp_path, *SHORT, *options)
    *_, evaluation = rows(folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert evaluation.keys() == EVALUATION | {"ema", "validation"}
    numbers = evaluation["validation"]
    assert numbers.keys() == {"loss", "top1", "top5", "images", "ema"}
    assert (evaluation["images"], numbers["images"]) == (NUM_TEST, 30)
    assert summary["validation"] == numbers
    assert (
        summary["best"] | {"value": numbers["ema"]["loss"], "images": "validation"}
        == (summary["best"])
    )
    *_, held_out, line, best, _ = capsys.readouterr().out.splitlines()
    assert held_out == f"30 of {NUM_TRAIN} training images are held out for validation"
    assert re.match(r"epoch 1 of \d+: training loss [0-9.]+; validation loss [0-9.]+, top-1 ", line)
    assert "of the moving average on the validation images, which chose it" in best
    validation = open_source("digits.npz", seed=5, validation=0.2).validation
    assert isinstance(validation, Split)
    logits = logits_of(folder, validation)
    labels = torch.from_numpy(validation.labels)
    loss = torch.nn.functional.cross_entropy(logits.double(), labels).item()
    assert numbers["loss"] == pytest.approx(loss, rel=1e-5)
    assert numbers["top1"] == pytest.approx((logits.argmax(1) == labels).double().mean().item())


def test_the_written_config_repeats_the_run(alone, tmp_path):
    written = tomllib.loads((alone / "config.toml").read_text())
    assert written["opt"] == "adamw"  # the model's defaults are resolved
    again = run_here(tmp_path, "--config", str(alone / "config.toml"))
    assert losses(again) == losses(alone)


@pytest.mark.parametrize("run", ["alone", "four_ranks"])
def test_the_summary_says_what_was_run(run, request):
    folder = request.getfixturevalue(run)
    summary = json.loads((folder / "summary.json").read_text())
    last = rows(folder)[-1]
    assert summary["test"] == {key: last[key] for key in EVALUATION - {"epoch", "training_loss"}}
    assert (summary["steps"], summary["skipped_images"]) == (3, 0)
    assert summary["layout"]["ranks"] == (4 if run == "four_ranks" else 1)
    assert {"versions", "commit", "host", "hardware"} < summary.keys()
    assert summary["wall_seconds"] > sum(row["step_seconds"] for row in rows(folder)[:-1])


@pytest.mark.parametrize("run", ["alone", "four_ranks"])
def test_the_weights_load_into_the_unsplit_model_and_score_the_same(run, request):
    folder = request.getfixturevalue(run)
    test = open_source("digits.npz").test
    right = (logits_of(folder, test).argmax(1).numpy() == test.labels).mean()
    assert right == pytest.approx(rows(folder)[-1]["top1"], abs=1e-9)


def test_one_rank_speaks_in_lines_and_draws_no_bar_into_a_file(four_ranks):
    lines = (four_ranks / "stdout").read_text().splitlines()
    images, course, layout, evaluation, last = [x for x in lines if not x.startswith("load ")]
    assert images == (
        "vig_digits on digits.npz: 144 training and 24 test images in 10 classes (0, 1, 2, 3, 4, …)"
    )
    assert re.fullmatch(r"3 steps of \d+ images, \d\.\d epochs; [\d,]+ parameters", course)
    assert layout.startswith("2 replicas × 2 stages, 2 micro-batches, gpipe, on cpu; results in ")
    assert re.match(r"epoch 1 of 1: training loss [0-9.]+; test loss [0-9.]+,", evaluation)
    assert str(four_ranks) in last
    assert "\x1b" not in "".join(lines)


# ---- losses ---------------------------------------------------------------------------------


def test_four_ranks_have_the_losses_of_one_process(alone, four_ranks):
    # The contract's bound in float32; the evaluation comes after three updates.
    assert losses(four_ranks)[:3] == pytest.approx(losses(alone)[:3], rel=1e-5)
    assert losses(four_ranks)[3] == pytest.approx(losses(alone)[3], rel=1e-4)


@pytest.mark.heavy
def test_torchrun_has_the_losses_of_plain_python(alone, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    line = ["-m", "vigpipe.train", "--stages", "2", "--microbatches", "4", *SHORT, "--threads", "1"]
    done = run_command([*torchrun, *line, "--out", str(tmp_path / "run")])
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == losses(alone)


def test_features_that_are_no_numbers_name_the_block(tmp_path, capsys):
    state = create_model("vig_digits", num_classes=10, in_chans=1).state_dict()
    state["backbone.1.1.fc2.1.weight"][0] = 3e38  # a number of more than 1.2 times that is infinite
    torch.save(state, tmp_path / "large.pth")
    options = ["--weights", str(tmp_path / "large.pth"), "--steps", "2", "--batch-size", "10"]
    folders = iter((tmp_path / "looks", tmp_path / "does-not"))
    assert main(["train", *options, "--detect-anomaly", "--out", str(next(folders))]) == 76
    expected = "block 2: 640 of 640 nodes, in 10 of 10 images, have NaN or infinite features"
    assert expected in capsys.readouterr().err
    assert main(["train", *options, "--out", str(next(folders))]) == 76  # the loss tells, later
    told = capsys.readouterr().err
    assert "step 1: the loss or a gradient is NaN or infinite" in told
    expected = (
        r"; no weight has moved yet, .* input, whose largest number is 1 \(a pixel .*--weights"
    )
    assert re.search(expected, told)
    assert "--lr" not in told


def test_epochs_pass_over_every_image_and_evaluations_can_be_rarer(pictures, tmp_path):
    options = ["--epochs", "3", "--batch-size", "4", "--image-size", "8", "--evaluate-every", "2"]
    folder = run_here(tmp_path, "--data", str(pictures), *options)
    kinds = ["top1" in row for row in rows(folder)]
    # 10 = 4 + 4 + 2 images; the last epoch ends in an evaluation in any case.
    assert kinds == [False] * 3 + 2 * [False, False, False, True]
    assert [row["epoch"] for row in rows(folder)] == [1] * 3 + [2] * 4 + [3] * 4
    assert rows(folder)[-1]["images"] == 6


@pytest.mark.heavy
def test_the_study_model_trains_on_a_folder_of_pictures(pictures, tmp_path):
    options = ["--model", "vig_study", "--steps", "6", "--batch-size", "10"]
    folder = run_here(tmp_path, "--data", str(pictures), *options)
    first, *_, last = [row["loss"] for row in rows(folder) if "step" in row]
    assert last < first / 2


def test_bad_images_are_left_out_and_counted(pictures, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    root = tmp_path / "pictures"
    shutil.copytree(pictures, root)
    # Sorted first, so that the size of all images cannot come from it; and one of the test images.
    for split in ("train", "test"):
        (root / split / "cat" / "!.png").write_bytes(b"no picture")
    cut_off = next((root / "train" / "dog").glob("*"))
    cut_off.write_bytes(cut_off.read_bytes()[:-40])  # its header can be read
    options = ["--data", "~/pictures", "--epochs", "1", "--batch-size", "5", "--skip-bad-images"]
    folder = run_here(tmp_path / "run", *options)
    summary = json.loads((folder / "summary.json").read_text())
    bad = [root / "train/cat/!.png", cut_off, root / "test/cat/!.png"]
    assert (summary["skipped_images"], summary["skipped_image_names"]) == (3, list(map(str, bad)))
    told = f"left out as unreadable: 3 images ({', '.join(map(str, bad))})"
    assert told in capsys.readouterr().out.splitlines()
    assert [row["images"] for row in rows(folder) if "images" in row] == [6]
    assert len(rows(folder)) == 3  # 9 images in batches of 5, and the evaluation


TWO_STAGES: dict[str, dict[str, Any]] = {
    "looped": {"schedule": "loopedbfs", "virtual_stages": 2, "microbatches": 3, "clip": 0.1},
    "bfloat16": {"schedule": "1f1b", "dtype": "bfloat16", "microbatches": 3},
    "group": {"norm": "group", "microbatches": 2},
}


def trained(rank, world_size, config, folder):
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    train(prepare(config, torch.float32), rank, CPU, folder)


def test_two_stages_have_the_losses_and_scores_of_one(pictures, tmp_path):
    common = TrainConfig(data=str(pictures), image_size=8, steps=2, batch_size=10, seed=2)
    split = {name: replace(common, stages=2, **more) for name, more in TWO_STAGES.items()}
    unsplit = {
        name: replace(config, stages=1, schedule="gpipe", virtual_stages=1)
        for name, config in split.items()
    }
    run_each(trained, 2, split.values(), [tmp_path / "two" / name for name in split])
    for name in TWO_STAGES:
        trained(0, 1, unsplit[name], tmp_path / "one" / name)
        ours, reference = losses(tmp_path / "two" / name), losses(tmp_path / "one" / name)
        assert len(ours) == 4  # every step is an epoch
        assert ours == pytest.approx(reference, rel=1e-5), name


# ---- who reads what -------------------------------------------------------------------------


class Recording:
    """A split that notes what is read."""

    def __init__(self, split):
        self.split, self.images, self.labels_read = split, [], 0

    def __len__(self):
        return len(self.split)

    @property
    def labels(self):
        self.labels_read += 1
        return self.split.labels

    def __getattr__(self, name):
        return getattr(self.split, name)

    def decode(self, indices, epoch=0, copies=None, out=None):
        self.images.append(list(indices))
        return self.split.decode(indices, epoch, copies, out)


def reads(rank, world_size, config):
    """Images read in each step, and whether labels were."""
    run = prepare(config, torch.float32)
    split: Any = Recording(images_of(run).train)
    run = with_images(run, replace(images_of(run), train=split))
    split.labels_read = 0  # the source itself looked at their range
    shares = list(batches(make_rank_state(run, rank, CPU)))
    assert all((batch.labels is not None) == bool(split.labels_read) for batch in shares)
    return split.images, bool(split.labels_read)


READ = TrainConfig(batch_size=50, steps=31, seed=9)  # 28 full steps, one of 37, two of epoch 2


@pytest.fixture(scope="module")
def read_by_four():
    return run_ranks(reads, 4, replace(READ, stages=2, dp=2, microbatches=3))


def test_images_go_to_first_stages_and_labels_to_last_ones(read_by_four):
    assert [len(images) for images, _ in read_by_four] == [31, 0] * 2
    assert [labels for _, labels in read_by_four] == [False, True] * 2


def test_replicas_read_disjoint_shares_in_the_order_of_the_seed(read_by_four):
    steps = [a + b for a, b in zip(read_by_four[0][0], read_by_four[2][0], strict=True)]
    visits = list(chain.from_iterable(steps))
    first, second = epoch_order(9, 1, 1437), epoch_order(9, 2, 1437)
    assert visits == [*first.tolist(), *second[:100].tolist()]
    assert sorted(first) == list(range(1437))
    assert steps == reads(0, 1, replace(READ, microbatches=7))[0]  # whatever the layout
    assert not np.array_equal(first, epoch_order(8, 1, 1437))


# ---- ends -----------------------------------------------------------------------------------

BROKEN = """
import os, signal, sys
from pathlib import Path
from vigpipe.cli import main
from vigpipe.data.split import Split

whole_decode, reads = Split.decode, 0

def decode(self, indices, epoch=0, copies=None, out=None):
    global reads
    reads += 1
    if reads == 3:
        Path(sys.argv[1]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return whole_decode(self, indices, epoch, copies, out)

Split.decode = decode
if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
"""


def test_a_worker_that_is_killed_ends_all_ranks_with_one_sentence(tmp_path):
    script, out = tmp_path / "broken.py", tmp_path / "out"
    script.write_text(BROKEN)
    train = ["train", *ONE_READER, "--out", str(out)]
    done = run_command([sys.executable, str(script), str(tmp_path / "broke"), *train])
    assert (tmp_path / "broke").exists()
    (said,) = done.stderr.splitlines()
    assert said.startswith("vigpipe: rank 0: a process that reads images ahead has ended with")
    assert "exit code -9" in said
    assert done.returncode == 70
    record = json.loads((out / "failed-rank0.json").read_text())
    assert (record["kind"], record["code"]) == ("own", 70)


@pytest.mark.parametrize("layout", [FOUR_RANKS, pytest.param(ONE_READER, marks=pytest.mark.heavy)])
def test_an_unreadable_image_ends_all_ranks_with_its_path_told_once(layout, pictures, tmp_path):
    root, out = tmp_path / "pictures", tmp_path / "out"
    shutil.copytree(pictures, root)
    bad = root / "train" / "dog" / "bad.png"
    bad.write_bytes(b"no picture")
    options = ["--data", str(root), "--batch-size", "11", "--out", str(out)]
    done = run_command([sys.executable, "-m", "vigpipe", "train", *layout, *options])
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"vigpipe: {bad}: cannot be read as an image")
    assert "--skip-bad-images" in line
    assert len(list(out.glob("failed-rank*.json"))) >= 1


def test_a_run_removes_the_failures_of_an_earlier_one_with_more_ranks(tmp_path):
    record = {"host": "here", "job": "x", "code": 1, "kind": "own", "message": "no", "time": 1.0}
    for rank in (0, 3):
        text = json.dumps({"rank": rank, **record})
        (tmp_path / f"failed-rank{rank}.json").write_text(text)
    options = ["--data", "fake", "--image-size", "8", "--batch-size", "20", "--steps", "1"]
    assert main(["train", *options, "--threads", "1", "--out", str(tmp_path)]) == 0
    assert list(tmp_path.glob("failed-rank*.json")) == []


def test_a_loss_that_grows_beyond_all_numbers_ends_the_run_with_one_sentence(tmp_path, capsys):
    options = ["--opt", "sgd", "--lr", "1e6", "--warmup-epochs", "0", "--batch-size", "50"]
    assert main(["train", *options, "--threads", "1", "--out", str(tmp_path)]) == 76
    (line,) = capsys.readouterr().err.splitlines()
    assert "the loss or a gradient is NaN" in line
    assert "lower --lr" in line
