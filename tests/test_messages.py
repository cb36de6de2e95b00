"""What others have chosen is printed as text, on the line that it is in, whoever reads it."""

import json
import os
from dataclasses import replace
from pathlib import Path

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
from vigpipe.messages import LONGEST_SENTENCE, one_line, tell
from vigpipe.model.variants import create_model
from vigpipe.planning.profile import write_profile

EVIL = "x\x1b[2J\nvigpipe: forged\u202egnp"
SHOWN = r"x\x1b[2J\nvigpipe: forged\u202egnp"


@pytest.mark.parametrize(
    "text", ["", "photos/日本.png: cannot be read (Is a directory)", "a  b\\n"]
)
def test_a_plain_sentence_stays_as_it_is(text):
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


# ---- every reader of what others have written --------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vigpipe.launch.local.preload", lambda *modules: None)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


def weights(**metadata):
    torch.manual_seed(0)
    state = create_model("vig_digits", num_classes=2).state_dict()
    facts = {"model": "vig_digits", "num_classes": "2", "in_chans": "3", "img_size": "8x8"}
    save_weights(Path("w.safetensors"), state, facts | metadata)


def image(name):
    Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(name, "png")


def class_names(here):
    weights(class_names=json.dumps(["cat", EVIL]))
    image("cat.png")
    return ["predict", "--weights", "w.safetensors", "cat.png"]


def half_a_character(here):
    """JSON can hold what UTF-8 cannot; printing it was a UnicodeEncodeError."""
    weights(class_names='["cat", "\\ud800"]')
    image("cat.png")
    return ["predict", "--weights", "w.safetensors", "cat.png"]


def a_model_in_metadata(here):
    weights(model=EVIL)
    return ["graph", "--weights", "w.safetensors", "--image", "cat.png"]


def a_policy_in_metadata(here):
    weights(graph=f"knn,{EVIL}")
    image("cat.png")
    return ["predict", "--weights", "w.safetensors", "cat.png"]


def a_name_of_weights(here):
    torch.save({EVIL: torch.ones(2)}, EVIL)
    return ["weights", "convert", EVIL, "new.safetensors"]


def a_name_of_a_model(here):
    weights()
    os.rename("w.safetensors", EVIL)
    return ["weights", "convert", EVIL, f"{EVIL}.safetensors"]


def a_name_of_an_image(here):
    weights()
    image(EVIL)
    return ["predict", "--weights", "w.safetensors", EVIL]


def a_name_of_a_broken_image(here):
    weights()
    (here / EVIL).write_bytes(b"none")
    return ["predict", "--weights", "w.safetensors", EVIL]


def a_name_of_a_class(here):
    (make_pictures(here / "pictures") / "train" / "cat").rename(here / "pictures/train" / EVIL)
    return ["train", "--data", "./pictures"]


def a_name_below_a_class(here):
    root = make_pictures(here / "pictures")
    (root / "train" / "cat" / "0.png").rename(root / "train" / "cat" / f"{EVIL}.png")
    (root / "train" / "cat" / f"{EVIL}.png").write_bytes(b"none")
    for name in ("1.png", "2.png"):
        (root / "train" / "cat" / name).unlink()
    return ["train", "--data", "./pictures"]


def a_manifest(here):
    make_checkpoint(here / "run", config={"model": EVIL}, layout={"text": EVIL})
    return ["checkpoint", "list", "run"]


def a_manifest_with_other_keys(here):
    checkpoint = make_checkpoint(here / "run")
    manifest = checkpoint / "manifest.json"
    table = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**table, "format": EVIL}))
    return ["checkpoint", "list", "run"]


def a_name_of_a_checkpoint(here):
    make_checkpoint(here / EVIL)
    return ["checkpoint", "verify", EVIL]


def profile(**changes):
    given = {"model": "vig_digits", "facts": {"date": "today"}} | changes
    write_profile(replace(make_profile([1.0] * 4), **given), Path("profile.json"))
    return ["plan", "--model", "vig_digits", "--data", "digits", "--profile", "profile.json"]


def the_model_of_a_profile(here):
    return profile(model=EVIL)


def a_piece_of_a_profile(here):
    return profile(stem=make_piece(EVIL))


def an_option_of_a_profile(here):
    return profile(options={EVIL: EVIL})


def a_key_of_a_profile(here):
    words = profile()
    (here / "profile.json").write_text(json.dumps({EVIL: 1}))
    return words


def a_table(name, **entries):
    with open(name, "w", encoding="utf-8") as file:
        file.write(tomli_w.dumps(entries))


def a_key_of_a_config(here):
    a_table("c.toml", **{EVIL: 1})
    return ["train", "--config", "c.toml"]


def a_value_of_a_config(here):
    a_table("c.toml", model=EVIL)
    return ["train", "--config", "c.toml"]


def a_mark_in_a_config(here):
    a_table("c.toml", model="vig\u202egnp")
    return ["train", "--config", "c.toml"]


def a_key_of_a_plan(here):
    a_table("p.toml", **{EVIL: 1})
    return ["train", "--stages", "p.toml"]


def the_model_of_a_plan(here):
    a_table("p.toml", model=EVIL, stages=[[0]])
    return ["train", "--stages", "p.toml"]


def the_stages_of_a_plan(here):
    a_table("p.toml", model="vig_digits", stages=[EVIL])
    return ["train", "--stages", "p.toml"]


def a_row_of_metrics(here):
    (here / "run").mkdir()
    (here / "run" / "metrics.jsonl").write_text(json.dumps({"step": EVIL}) + "\n")
    return ["report", "run"]


def a_row_that_is_none(here):
    (here / "run").mkdir()
    (here / "run" / "metrics.jsonl").write_text("\x1b[2J\u202e\n")
    return ["report", "run"]


def a_record_of_a_failure(here):
    (here / "run").mkdir()
    record = {"kind": EVIL, "message": EVIL, "rank": EVIL}
    (here / "run" / "failed-rank0.json").write_text(json.dumps(record))
    (here / "run" / "metrics.jsonl").write_text("")
    return ["report", "run"]


def a_word(here):
    return ["train", EVIL]


def an_option(here):
    return ["train", f"--{EVIL}"]


def a_verb(here):
    return [EVIL]


def a_path(here):
    return ["report", EVIL]


READERS = [
    class_names, half_a_character, a_model_in_metadata, a_policy_in_metadata, a_name_of_weights,
    a_name_of_a_model, a_name_of_an_image, a_name_of_a_broken_image, a_name_of_a_class,
    a_name_below_a_class, a_manifest, a_manifest_with_other_keys, a_name_of_a_checkpoint,
    the_model_of_a_profile, a_piece_of_a_profile, an_option_of_a_profile, a_key_of_a_profile,
    a_key_of_a_config, a_value_of_a_config, a_mark_in_a_config, a_key_of_a_plan,
    the_model_of_a_plan, the_stages_of_a_plan, a_row_of_metrics, a_row_that_is_none,
    a_record_of_a_failure, a_word, an_option, a_verb, a_path,
]  # fmt: skip


def check_printed(code, printed):
    """Whatever the verdict: nothing that a terminal acts upon, and no line of another's."""
    for text in printed:
        assert all(row.isprintable() for row in text.split("\n")), text
        assert not any(row.startswith("vigpipe: forged") for row in text.split("\n")), text
    assert code == 0 or printed[1].startswith("vigpipe: ") or not printed[1]
    assert len(printed[1].splitlines()) <= 1


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_nothing_of_what_others_wrote_moves_the_cursor_or_forges_a_line(reader, here, capsys):
    words = reader(here)
    code = main(words)
    printed = capsys.readouterr()
    assert code in (0, 2)
    assert printed.out or printed.err
    check_printed(code, printed)


@pytest.mark.parametrize(
    "name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"]
)
def test_nothing_of_the_environment_does_either(name, here, capsys, monkeypatch):
    ranks = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    for variable, value in {**ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": 9}.items():
        monkeypatch.setenv(variable, str(value))
    monkeypatch.setenv(name, EVIL)
    code = main(["train", "--stages", "2"])
    printed = capsys.readouterr()
    assert code == 2
    assert SHOWN in printed.err
    check_printed(code, printed)
