"""Checkpoints are untrusted input: what is damaged, swapped or forged is refused by name."""

import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.refusals import check_refusals
from vigpipe.checkpoint.manifest import (
    NAME,
    Manifest,
    list_checkpoints,
    read_manifest,
    read_tensors,
    tensor_names,
    verify,
)
from vigpipe.errors import InputError
from vigpipe.files.untrusted import file_digest

FILES = ("stage0-replica0.safetensors", "stage1-replica0.safetensors")
PLAIN = Manifest(
    step=50,
    num_steps=100,
    evaluated=True,
    loss=0.5,
    config={"model": "vig_digits"},
    data={},
    layout={},
    weights={},
    versions={},
)


def make(folder, step=50, **changes: Any):
    """A checkpoint of two files of one tensor each."""
    checkpoint = folder / f"step-{step:08d}"
    checkpoint.mkdir(parents=True)
    files = {}
    for i, name in enumerate(FILES):
        save_file({f"model/{i}": torch.full((4,), float(i))}, checkpoint / name)
        size, digest = file_digest(checkpoint / name)
        files[name] = {"bytes": size, "sha256": digest}
    changes = {"step": step, "files": files, **changes}
    manifest = replace(PLAIN, **changes)
    (checkpoint / NAME).write_text(manifest.text())
    return checkpoint


def test_what_is_written_is_read(tmp_path):
    checkpoint = make(tmp_path, loss=None)
    manifest = verify(checkpoint)
    assert (manifest.step, manifest.loss, manifest.config) == (50, None, {"model": "vig_digits"})
    where = tensor_names(checkpoint, manifest)
    assert where == {"model/0": FILES[0], "model/1": FILES[1]}
    tensors = dict(read_tensors(checkpoint, where, ["model/1", "model/2"]))
    assert list(tensors) == ["model/1"]
    assert torch.equal(tensors["model/1"], torch.ones(4))


def test_the_newest_comes_first_and_hidden_ones_do_not_count(tmp_path):
    for step in (9, 100000000, 70):
        make(tmp_path / "checkpoints", step)
    (tmp_path / "checkpoints" / ".step-00000080-abcd").mkdir()
    (tmp_path / "checkpoints" / "step-00000090").touch()
    names = ["step-100000000", "step-00000070", "step-00000009"]
    assert [path.name for path in list_checkpoints(tmp_path)] == names
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == names
    assert list_checkpoints(tmp_path / "nowhere") == []


def flip(path, position=-3):
    """Turn one bit over."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def edit(checkpoint, **changes):
    """Forge a manifest, checksum and all."""
    manifest = read_manifest(checkpoint)
    (checkpoint / NAME).write_text(replace(manifest, **changes).text())


def forge(name, num_bytes=1):
    return {name: {"bytes": num_bytes, "sha256": "0" * 64}}


def replaced_by(make_other):
    def change(checkpoint):
        (checkpoint / FILES[1]).unlink()
        make_other(checkpoint / FILES[1])

    return change


def swap(checkpoint):
    first, second = (checkpoint / name for name in FILES)
    first.rename(checkpoint / "x")
    second.rename(first)
    (checkpoint / "x").rename(second)


def rewrite(old, new):
    def change(checkpoint):
        text = (checkpoint / NAME).read_text()
        assert old in text
        (checkpoint / NAME).write_text(text.replace(old, new, 1))

    return change


DAMAGES = [  # what is done to a checkpoint, the file that is named, and what is said
    (lambda c: flip(c / FILES[1]), FILES[1], "its SHA-256 does not fit"),
    (lambda c: os.truncate(c / FILES[1], 70), FILES[1], "has 70 bytes, expected"),
    (lambda c: (c / FILES[0]).unlink(), FILES[0], "No such file"),
    (swap, FILES[0], "its SHA-256 does not fit"),
    (replaced_by(os.mkfifo), FILES[1], "is not a regular file"),
    (replaced_by(os.mkdir), FILES[1], "Is a directory|is not a regular file"),
    (lambda c: (c / NAME).unlink(), NAME, "No such file"),
    (lambda c: os.truncate(c / NAME, 300), NAME, "is not the JSON"),
    (rewrite('"step": 50', '"step": 51'), NAME, "damaged or edited"),
    (lambda c: edit(c, step=10**30), NAME, "step is not a count of steps: 10+;"),
    (lambda c: edit(c, num_steps=10**30), NAME, "num_steps is not a count of steps"),
    (lambda c: edit(c, step=101), NAME, "step is 101 of 100 steps"),
    (lambda c: edit(c, loss=10**400), NAME, "loss is not a number"),
    (lambda c: edit(c, files=forge(FILES[0], 10**30)), NAME, "entry of the file '.*' is malformed"),
    (rewrite('"step": 50', '"step": 50, "step": 51'), NAME, "'step' is there twice"),
    (rewrite('"loss": 0.5', '"loss": NaN'), NAME, "NaN is no JSON number"),
    (rewrite("checkpoint 3", "checkpoint 9"), NAME, "expected the format"),
    (lambda c: (c / NAME).write_text("[" * 100000), NAME, "nested too deeply|not the JSON"),
    (lambda c: (c / NAME).write_bytes(b"\xff\xfe"), NAME, "is not UTF-8"),
    (lambda c: (c / NAME).write_text("[1]"), NAME, "expected the format"),
    (lambda c: os.truncate(c / NAME, 1 << 40), NAME, "expected at most"),
    (lambda c: (c / NAME).write_bytes(pickle.dumps(os.system)), NAME, "is not"),
    (lambda c: edit(c, files={}), NAME, "names no files"),
    (lambda c: edit(c, files=forge("../secret.safetensors")), NAME, "malformed"),
    (lambda c: edit(c, files={FILES[0]: {"bytes": "1"}}), NAME, "malformed"),
    (lambda c: edit(c, step=-1), NAME, "step is not a count"),
    (lambda c: edit(c, loss="small"), NAME, "loss is not a number"),
    (lambda c: edit(c, config=[1]), NAME, "config is not a table"),
]


def test_what_is_not_whole_is_refused_by_name_and_reason(tmp_path):
    whole = make(tmp_path / "whole")
    verify(whole)

    def read(damage, _):
        shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
        checkpoint = Path(shutil.copytree(whole, tmp_path / "damaged" / whole.name))
        damage(checkpoint)
        verify(checkpoint)

    rows = [(damage, file, f"{file}: .*({message})") for damage, file, message in DAMAGES]
    check_refusals(rows, read, where=tmp_path / "damaged")


def resealed(checkpoint, name, write):
    """Put other content under a file's name, and its checksum into the manifest."""
    write(checkpoint / name)
    files = read_manifest(checkpoint).files
    size, digest = file_digest(checkpoint / name)
    edit(checkpoint, files={**files, name: {"bytes": size, "sha256": digest}})


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_bytes(pickle.dumps(os.system)), "is not a safetensors file"),
        (lambda path: path.write_bytes(b"\xff" * 8 + b"{}"), "is not a safetensors file"),
        (lambda path: save_file({"model/0": torch.ones(1)}, path), "both have model/0"),
    ],
)
def test_a_forged_file_with_a_fitting_checksum_is_read_as_safetensors_only(
    write, message, tmp_path
):
    checkpoint = make(tmp_path)
    resealed(checkpoint, FILES[1], write)
    manifest = verify(checkpoint)
    with pytest.raises(InputError, match=message):
        tensor_names(checkpoint, manifest)


def test_pickles_that_lie_beside_are_never_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    checkpoint = make(tmp_path)
    for name in (".metadata", "__0_0.distcp", "optimizer.pt"):
        (checkpoint / name).write_bytes(pickle.dumps(Bomb()))
    manifest = verify(checkpoint)
    dict(read_tensors(checkpoint, tensor_names(checkpoint, manifest), ["model/0"]))
    assert not (tmp_path / "executed").exists()
