"""The command line, and what it says to every wrong use: one sentence, code 2, nothing started."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.commands.refusals import check_commands, refused
from tests.launch.test_environment import ONE_NODE, SRUN
from tests.world import ROOT
from vigpipe.cli import main
from vigpipe.commands.arguments import with_negative_values
from vigpipe.config.files import as_toml
from vigpipe.config.options import TrainConfig, flag
from vigpipe.config.verbs import GraphConfig, PredictConfig
from vigpipe.model.variants import create_model

pytestmark = pytest.mark.oldest


def make_pictures(root, train=3, test=2, size=(8, 8)):
    """Write a folder of two classes of noise."""
    random = np.random.default_rng(0)
    for split, count in (("train", train), ("test", test)):
        for name in ("cat", "dog"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 256, (*size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return root


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty working folder; a command that would start ranks, or train, fails."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vigpipe.training.train", _no_training)
    monkeypatch.setattr("vigpipe.start.preload", lambda *modules: None)
    monkeypatch.setattr("vigpipe.ranks.start_local", _no_ranks)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


def _no_ranks(*args):
    raise AssertionError("ranks were started")


def _no_training(*args):
    raise AssertionError("training began")


def toml(path, text):
    path.write_text(text)
    return str(path)


WRONG = [
    ("--modl x", "--modl", "--model"),
    ("fast", "fast"),
    ("--steps", "--steps", "requires an argument"),
    ("--model resnet", "resnet", "vig_digits", "vig_b_224"),
    ("--schedule zigzag", "zigzag", "loopedbfs"),
    ("--data imagenet", "imagenet", "digits, cifar10, fake"),
    ("--data ./pictures", "./pictures", "folder"),
    ("--data cifar10", "cifar-10-batches", "--download"),
    ("--stages 0", "--stages 0", "at least 1"),
    ("--stages 5", "5 stages for 4 blocks", "1 to 4"),
    ("--stages 2.5", "--stages 2.5", "whole number"),
    ("--stages four.toml", "four.toml", "cannot be read"),
    ("--microbatches 0", "--microbatches 0", "at least 1"),
    (
        "--microbatches 26 --dp 2 --batch-size 50",
        *("--microbatches 26 x --dp 2", "52 micro-batches", "50 samples"),
    ),
    ("--dp 0", "--dp 0", "at least 1"),
    (
        "--stages 3 --schedule 1f1b --microbatches 2",
        *("--microbatches 2 < --stages 3", "--schedule gpipe"),
    ),
    (
        "--stages=2 --virtual-stages=2 --schedule=interleaved1f1b --microbatches=5",
        *("5 is not a multiple of 2", "--microbatches 4 or 6"),
    ),
    ("--stages 2 --virtual-stages 2", "--virtual-stages 2", "interleaved1f1b or loopedbfs"),
    ("--graph knn,ring", "--graph knn,ring", "'ring'", "knn"),
    ("--model vig_study --graph pattern --data fake", "--graph pattern", "vig_study", "grid"),
    ("--aggregator mean", "--aggregator", "maxmean"),
    ("--stem-stride 3", "--stem-stride 3", "power"),
    ("--image-size large", "--image-size large", "HEIGHTxWIDTH"),
    ("--weights best.pth", "best.pth", "No such file"),
    ("--device cuda", "no GPU", "--device cpu"),
    ("--lr nan", "--lr nan", "from 0 to"),
    ("--lr high", "--lr", "high"),
    ("--ema 1", "--ema 1", "0.999999", "never leave"),
    ("--new-classifier", "--new-classifier", "--weights"),
    ("--checkpoint-every -5m", "--checkpoint-every -5m", "10m"),
    ("--graph -1,-1", "--graph -1,-1", "is not one of"),
    ("--timeout inf", "--timeout inf", "from 1 to"),
    ("--timeout 0", "--timeout 0", "from 1 to"),
    ("--batch-size 1.5", "--batch-size 1.5", "whole number"),
    ("--seed -1", "--seed -1"),
    ("--epochs 0", "--epochs 0"),
    ("--threads 0", "--threads 0"),
    ("--config a.toml", "a.toml", "cannot be read"),
    ("--config", "--config", "requires an argument"),
    ("--config /proc/self/mem", "--config /proc/self/mem: cannot be read (Input/output error)"),
    ("--stages /proc/self/mem", "/proc/self/mem: cannot be read (Input/output error)"),
    (f"--replay {'x' * 300}", "--replay xxx", "cannot be read (File name too long)"),
    (f"--resume {'x' * 300}", "xxx: cannot be read (File name too long)"),
    # What is empty, or cannot be kept or shown.
    ("--out ''", "--out: is empty; leave it out or give a value"),
    ("--out=", "--out: is empty"),
    ("--graph ''", "--graph: is empty"),
    (["--out", "a\nb"], r"--out a\nb: has control characters"),
    (["--data", os.fsdecode(b"caf\xe9")], r"--data caf\xe9: has control characters"),
    (["--model", "\x1b[2J"], r"--model \x1b[2J: has control characters"),
]
PLANS = [
    ("stages = [[0, 1], [2]]", "block 3 is in no stage"),
    ("stages = [[0, 1], [1, 2, 3]]", "block 1 is in stages 0 and 1"),
    ("stages = [[0, 2], [1, 3]]", "block 2 comes after block 0"),
    ("stages = [[0, 1], [2, 3, 4]]", "names block 4", "blocks 0 to 3"),
    ("stages = [[0, 1, 2, 3], []]", "stage 1", "at least one block"),
    ("blocks = [[0, 1], [2, 3]]", "'blocks'"),
    ("stages = ", "not a TOML file"),
]
CONFIGS = [
    ("batchsize = 3", "unknown key 'batchsize'", "batch_size"),
    ('config = "other.toml"', "unknown key 'config'"),
    ("[train]\nlr = 1", "unknown key 'train'"),
    ("lr = ", "not a TOML file"),
    ('batch_size = "many"', "batch-size", "many"),
    ("batch_size = 1.5", "batch-size", "1.5", "whole number"),
    ("seed = true", "seed", "True"),
    ("epochs = [1, 2]", "epochs", "[1, 2]", "single value"),
    ('download = "maybe"', "download", "maybe"),
    ('model = "resnet"', "resnet", "vig_digits"),
    ('dtype = "int8"', "int8", "float64"),
    ("lr = nan", "--lr nan"),
]
OTHER_VERBS = [
    ("chek", "train, check"),
    ("--modl", "train, check"),
    ("report '' --out a.html", "is empty"),
    ("weights convert", "SOURCE"),
    ("weights convert a.pth", "TARGET"),
    ("weights convert a.pth b.safetensors", "a.pth", "No such file"),
    ("weights convert a.pth b.pth", "b.pth", "safetensors"),
    ("weights convert a.pth b.safetensors c", "c: "),
    ("weights unpack a.pth", "unpack"),
]


def test_wrong_use_is_told_in_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    check_commands(capsys, "train", WRONG)
    check_commands(capsys, "", OTHER_VERBS)


def test_a_wrong_plan_or_config_file_is_named_with_its_block_or_key(capsys, here):
    rows: list[tuple[str, ...]] = []
    for i, (text, *words) in enumerate(PLANS):
        path = toml(here / f"plan-{i}.toml", f'model = "vig_digits"\n{text}\n')
        rows.append((f"--stages {path}", path, *words))
    for i, (text, *words) in enumerate(CONFIGS):
        rows.append((f"--config {toml(here / f'config-{i}.toml', text)}", *words))
    check_commands(capsys, "train", rows)


def test_a_plan_for_another_model_is_refused(capsys):
    sentence = refused(capsys, "train", "--stages", str(ROOT / "stages" / "study-2.toml"))
    assert "'vig_study'" in sentence
    assert "'vig_digits'" in sentence


def test_a_world_of_another_size_is_refused(capsys, monkeypatch):
    variables = {"RANK": 0, "WORLD_SIZE": 3, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 3}
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    told = "3 ranks were started, but --stages 2 x --dp 2 needs 4"
    rest = "--stages 2 --dp 2 --microbatches 2"
    check_commands(capsys, "", [(f"{verb} {rest}", told) for verb in ("train", "check")])


def test_an_explicit_timeout_bounds_the_meeting_of_ranks_too(capsys, monkeypatch):
    """Rank 1 never comes: ten minutes were waited for it, whatever --timeout said."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rank_0 = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "MASTER_PORT": str(port)}
    two = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    for name, value in {**SRUN, **ONE_NODE, **rank_0, **two}.items():
        monkeypatch.setenv(name, value)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    code = main(["train", "--stages", "2", "--timeout", "1", "--device", "cpu"])
    for number, handler in before.items():
        signal.signal(number, handler)
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 70
    came = f"rank 1 of 2 did not come to 127.0.0.1 port {port} within 1 s"
    assert line == f"vigpipe: {came}: start all ranks"


def test_a_run_is_never_written_over_another(capsys, here):
    # With results and without a checkpoint, as runs under ten minutes left their folders,
    # --resume auto trained anew, in silence and with other options, and wrote over the weights.
    for name, options in {
        "metrics.jsonl": "",
        "config.toml": "--resume auto",
        "model.safetensors": "--resume auto",
        "summary.json": "--resume auto",
    }.items():
        (here / "old").mkdir()
        (here / "old" / name).write_text("precious\n")
        sentence = refused(capsys, "train", "--out", "old", *options.split())
        assert f"holds {name}" in sentence
        if not options:
            assert "already; choose another folder, or go on with --res" in sentence
        assert (here / "old" / name).read_text() == "precious\n"
        shutil.rmtree(here / "old")


def test_config_does_not_bring_the_folder_of_the_run_it_is_of(here):
    assert "out" not in as_toml(TrainConfig(out=here / "old"))


def test_an_output_folder_that_cannot_be_made_is_refused(capsys, here):
    (here / "file").write_text("")
    sentence = refused(capsys, "train", "--out", "file/run")
    assert "file/run: cannot be written" in sentence


def test_test_classes_that_were_never_trained_on_are_refused(capsys, here):
    root = make_pictures(here / "pictures")
    (root / "train" / "dog").rename(root / "train" / "wolf")
    assert "no class 'dog'" in refused(capsys, "train", "--data", str(root))


def test_an_unreadable_first_image_is_named_with_the_way_out(capsys, here):
    root = make_pictures(here / "pictures")
    (root / "train" / "cat" / "0.png").write_bytes(b"no picture")
    sentence = refused(capsys, "train", "--data", str(root))
    assert f"{root}/train/cat/0.png: cannot be read as an image" in sentence
    assert "--skip-bad-images" in sentence


def test_a_negative_value_belongs_to_its_option():
    for words, joined in {
        "graph --node -1,-1 --out a": "graph --node=-1,-1 --out a",
        "plan --memory-limit -1GB": "plan --memory-limit=-1GB",
        "train --lr -.5 --clip -inf": "train --lr=-.5 --clip=-inf",
        "train --lr=1 -5": "train --lr=1 -5",
        "train --download --dp 2": "train --download --dp 2",
        "-1": "-1",
    }.items():
        assert with_negative_values(words.split()) == joined.split()


def test_the_version_is_told(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip().count(".") == 2


def test_help_lists_every_verb_and_option():
    lines = ("", "--help", "-h", "weights convert --help")
    options = {"train": TrainConfig, "graph": GraphConfig, "predict": PredictConfig}
    code = "import sys; from vigpipe.cli import main\n"
    for line in (*lines, *(f"{verb} --help-all" for verb in options)):
        code += f"main({line.split()}); print('END')\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    bare, long, short, convert, *verbs, _ = done.stdout.split("END\n")
    assert bare == long == short
    for verb in ("train", "check", "graph", "predict", "weights", "slurm"):
        assert verb in bare
    assert "SOURCE" in convert
    assert "TARGET" in convert
    for told, config in zip(verbs, options.values(), strict=True):
        assert [f.name for f in fields(config) if flag(f.name) not in told] == []


def test_commands_that_have_moved_say_where_they_are(capsys):
    for words, now in ((["bench", "ops", "--repeats", "3"], "NAME"), (["study"], "study")):
        assert f"; run python -m benchmarks {now} in a checkout" in refused(capsys, *words)


@pytest.mark.parametrize("words", ["train --help-all", "weights --help"])  # long and short
def test_output_that_goes_nowhere_is_an_exit_code_and_one_sentence_at_most(words):
    """Nobody reads it, or it is closed, with which Python has no sys.stdout."""
    reader, writer = os.pipe()
    os.close(reader)
    is_gone = words.startswith("train")
    with open(writer, "wb") as nobody_reads:
        done = subprocess.run(
            [sys.executable, "-m", "vigpipe", *words.split()],
            **{"stdout": nobody_reads, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT},
            preexec_fn=None if is_gone else lambda: os.close(1),
            env={name: x for name, x in os.environ.items() if name != "PYTHONUNBUFFERED"},
        )
    told = "" if is_gone else "vigpipe: stdout: cannot be written (Bad file descriptor), so that"
    assert done.returncode == (141 if is_gone else 2)
    assert done.stderr.startswith(told)
    assert done.stderr.count("\n") == (not is_gone)


def test_weights_of_the_reference_code_are_converted(capsys, here):
    model = create_model("vig_digits", num_classes=7, in_chans=1)
    state = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"epoch": 3, "state_dict": state}, here / "old.pth")
    assert main(["weights", "convert", "old.pth", "new.safetensors"]) == 0
    assert capsys.readouterr().out == f"new.safetensors: vig_digits, {len(state)} tensors\n"
    new = load_file(here / "new.safetensors")
    assert all(torch.equal(new[name], tensor) for name, tensor in model.state_dict().items())
