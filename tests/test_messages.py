"""What others have chosen is printed as text, on the line that it is in, whoever reads it."""

import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from PIL import Image

from tests.checkpoint.test_manifest import make as make_checkpoint
from tests.planning.profiles import make_piece, make_profile
from tests.test_cli import make_pictures
from vigpipe.checkpoint.weights_file import save_weights
from vigpipe.cli import main
from vigpipe.messages import LONGEST_SENTENCE, one_line, safe_streams, tell
from vigpipe.model.variants import create_model
from vigpipe.planning.profile import write_profile

EVIL = "x\x1b[2J\nvigpipe: forged\u202egnp"
SHOWN = r"x\x1b[2J\nvigpipe: forged\u202egnp"


def test_a_plain_sentence_stays_as_it_is():
    for text in ("", "photos/日本.png: cannot be read (Is a directory)", "a  b\\n"):
        assert one_line(text) == text


def test_a_sentence_keeps_its_line_whatever_it_quotes(capsys):
    tell(f"{EVIL}: is not a model; name one")
    assert capsys.readouterr() == ("", f"vigpipe: {SHOWN}: is not a model; name one\n")


def test_numbers_and_names_without_end_are_told_by_their_ends():
    number = "7" * 4000
    assert one_line(f"--seed {number}9: must be smaller") == (
        f"--seed {number[:200]}…{number[:98]}9: must be smaller"
    )
    sentence = one_line("a " * 10_000 + "end")
    assert len(sentence) == LONGEST_SENTENCE + 1
    assert sentence.startswith("a a a ")
    assert sentence.endswith(" a end")


def test_any_text_can_be_printed_whatever_the_streams_are(capfd, monkeypatch):
    """Symptom: a traceback, or an exit code and no word, with `>&-`, a full disk and ASCII."""
    reader, gone = os.pipe()
    os.close(reader)
    full, file = os.open("/dev/full", os.O_WRONLY), os.dup(1)
    said = "vigpipe: stdout: cannot be written ({}), so that the rest of it is left out; "
    for descriptor, code, why in (
        (file, 0, ""),
        (gone, 141, ""),
        (full, 2, said.format("No space left on device")),
        (None, 2, said.format("Bad file descriptor")),
    ):
        os.close(1) if descriptor is None else os.dup2(descriptor, 1)
        ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", ascii_only)
        monkeypatch.setattr(sys, "__stdout__", ascii_only)
        with safe_streams() as stdout:
            assert os.get_inheritable(1)  # else what a child opens first would be its stdout
            print("2×2\udcff")
            sys.stdout.flush()
            assert stdout.exit_code() == code
        assert sys.stdout is ascii_only
        os.dup2(file, 1)
        out, err = capfd.readouterr()
        assert out == ("2\\xd72\\udcff\n" if descriptor == file else "")
        assert err.startswith(why)
        assert err.count("\n") == bool(why)
    for descriptor in (gone, full, file):
        os.close(descriptor)


# ---- every reader of what others have written --------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vigpipe.start.preload", lambda *modules: None)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


def predict(name="cat.png", **metadata):
    """Predict the class of an image with weights that say so of themselves."""
    torch.manual_seed(0)
    state = create_model("vig_digits", num_classes=2).state_dict()
    facts = {"model": "vig_digits", "num_classes": "2", "in_chans": "3", "img_size": "8x8"}
    save_weights(Path("w.safetensors"), state, facts | metadata)
    if not Path(name).exists():
        Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(name, "png")
    return ["predict", "--weights", "w.safetensors", name]


def convert(is_whole):
    if is_whole:
        predict()
        Path("w.safetensors").rename(EVIL)
        return ["weights", "convert", EVIL, f"{EVIL}.safetensors"]
    torch.save({EVIL: torch.ones(2)}, EVIL)
    return ["weights", "convert", EVIL, "new.safetensors"]


def pictures(*, is_broken):
    root = make_pictures(Path("pictures"))
    if not is_broken:
        (root / "train" / "cat").rename(root / "train" / EVIL)
    else:
        for path in (root / "train" / "cat").iterdir():
            path.unlink()
        (root / "train" / "cat" / f"{EVIL}.png").write_bytes(b"none")
    return ["train", "--data", "./pictures"]


def checkpoint(**changes):
    """List checkpoints of a manifest with other entries."""
    manifest = make_checkpoint(Path("run")) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | changes))
    return ["checkpoint", "list", "run"]


def profile(content=None, **changes: Any):
    given: dict[str, Any] = {"model": "vig_digits", "facts": {"date": "today"}} | changes
    write_profile(replace(make_profile([1.0] * 4), **given), Path("profile.json"))
    if content is not None:
        Path("profile.json").write_text(content)
    return ["plan", "--model", "vig_digits", "--data", "digits", "--profile", "profile.json"]


def table(option, **entries):
    Path("t.toml").write_text(tomli_w.dumps(entries), encoding="utf-8")
    return ["train", option, "t.toml"]


def report(**files):
    """Report a run with such files."""
    Path("run").mkdir()
    for name, content in {"metrics_jsonl": "", **files}.items():
        Path("run", name.replace("_", ".")).write_text(content)
    return ["report", "run"]


def broken_image():
    Path(EVIL).write_bytes(b"none")
    return predict(EVIL)


def verify():
    make_checkpoint(Path(EVIL))
    return ["checkpoint", "verify", EVIL]


FAILURE = json.dumps({"kind": EVIL, "message": EVIL, "rank": EVIL})
READERS = {
    "class names": lambda: predict(class_names=json.dumps(["cat", EVIL])),
    # JSON can hold what UTF-8 cannot; printing it was a UnicodeEncodeError.
    "half a character": lambda: predict(class_names='["cat", "\\ud800"]'),
    "a model in metadata": lambda: ["graph", *predict(model=EVIL)[1:3], "--image", "cat.png"],
    "a policy in metadata": lambda: predict(graph=f"knn,{EVIL}"),
    "a name of weights": lambda: convert(False),
    "a name of a model": lambda: convert(True),
    "a name of an image": lambda: predict(EVIL),
    "a name of a broken image": broken_image,
    "a name of a class": lambda: pictures(is_broken=False),
    "a name below a class": lambda: pictures(is_broken=True),
    "a manifest": lambda: checkpoint(config={"model": EVIL}, layout={"text": EVIL}),
    "a manifest's format": lambda: checkpoint(format=EVIL),
    "a name of a checkpoint": verify,
    "the model of a profile": lambda: profile(model=EVIL),
    "a piece of a profile": lambda: profile(stem=make_piece(EVIL)),
    "an option of a profile": lambda: profile(options={EVIL: EVIL}),
    "a key of a profile": lambda: profile(json.dumps({EVIL: 1})),
    "a key of a config": lambda: table("--config", **{EVIL: 1}),
    "a value of a config": lambda: table("--config", model=EVIL),
    "a mark in a config": lambda: table("--config", model="vig\u202egnp"),
    "a key of a plan": lambda: table("--stages", **{EVIL: 1}),
    "the model of a plan": lambda: table("--stages", model=EVIL, stages=[[0]]),
    "the stages of a plan": lambda: table("--stages", model="vig_digits", stages=[EVIL]),
    "a row of metrics": lambda: report(metrics_jsonl=json.dumps({"step": EVIL}) + "\n"),
    "a row that is none": lambda: report(metrics_jsonl="\x1b[2J\u202e\n"),
    "a record of a failure": lambda: report(**{"failed-rank0_json": FAILURE}),
    "a word": lambda: ["train", EVIL],
    "an option": lambda: ["train", f"--{EVIL}"],
    "a verb": lambda: [EVIL],
    "a path": lambda: ["report", EVIL],
}


def check_printed(code, printed):
    """Whatever the verdict: nothing that a terminal acts upon, and no line of another's."""
    for text in printed:
        assert all(row.isprintable() for row in text.split("\n")), text
        assert not any(row.startswith("vigpipe: forged") for row in text.split("\n")), text
    assert code == 0 or printed[1].startswith("vigpipe: ") or not printed[1]
    assert len(printed[1].splitlines()) <= 1


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("reader", READERS)
def test_nothing_of_what_others_wrote_moves_the_cursor_or_forges_a_line(reader, capsys):
    code = main(READERS[reader]())
    printed = capsys.readouterr()
    assert code in (0, 2)
    assert printed.out or printed.err
    check_printed(code, printed)


@pytest.mark.usefixtures("here")
def test_nothing_of_the_environment_does_either(capsys, monkeypatch):
    ranks = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    ranks |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 9}
    for name in (*(name for name in ranks if name != "LOCAL_WORLD_SIZE"), "OMP_NUM_THREADS"):
        with monkeypatch.context() as patch:
            for variable, value in {**ranks, name: EVIL}.items():
                patch.setenv(variable, str(value))
            code = main(["train", "--stages", "2"])
        printed = capsys.readouterr()
        assert code == 2, name
        assert SHOWN in printed.err
        check_printed(code, printed)
