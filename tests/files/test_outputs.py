"""Nothing that is there already is replaced, unless the same command wrote it."""

import os
import socket
from pathlib import Path

import pytest

from tests.refusals import check_refusals
from vigpipe.errors import InputError
from vigpipe.files.outputs import check_new_file, check_new_names, check_replaceable

MARK = "# Made by a test"


def check(path, overwrite=None):
    check_new_file(path, "--out ", (".toml", ".tml"), mark=MARK, overwrite=overwrite)


def test_a_new_file_may_be_written_and_its_folder_is_made(tmp_path):
    check(tmp_path / "a" / "b" / "new.toml")
    assert (tmp_path / "a" / "b").is_dir()
    check(tmp_path / "a" / "NEW.TML")


def test_only_what_carries_the_mark_is_replaced(tmp_path):
    ours, theirs = tmp_path / "ours.toml", tmp_path / "theirs.toml"
    ours.write_bytes(b"\xff\n" + MARK.encode() + b"\n")
    theirs.write_text("precious\n")
    check(ours)
    for overwrite, advice in ((None, "$"), (False, " or add --overwrite$")):
        with pytest.raises(InputError, match=f"did not write it; choose another name{advice}"):
            check(theirs, overwrite)
    check(theirs, overwrite=True)


def test_without_a_mark_every_file_is_somebody_else_s(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"")
    with pytest.raises(InputError, match="is there already; choose another name or add --over"):
        check_new_file(path, "", (".safetensors",), overwrite=False)


@pytest.mark.parametrize("kind", ["a folder", "a symbolic link", "a pipe", "a socket", "a device"])
def test_what_is_not_a_file_is_never_replaced(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("out.toml")
    if kind == "a folder":
        path.mkdir()
    elif kind == "a symbolic link":
        path.symlink_to("target.toml")
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    else:
        path = Path("/dev/null")
    suffixes = (path.suffix,)
    for overwrite in (None, True):
        with pytest.raises(InputError, match=rf"--out {path}: is {kind}, where a file"):
            check_new_file(path, "--out ", suffixes, mark=MARK, overwrite=overwrite)
    if kind != "a device":
        with pytest.raises(InputError, match=f"is {kind}"):
            check_replaceable(Path(), ["absent", path.name])
        with pytest.raises(InputError, match=r"holds out\.toml already; go away"):
            check_new_names(Path(), ["absent", path.name], "go away")


def test_a_name_that_cannot_be_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    rows = [
        ("plan.txt", r"must end in \.toml or \.tml, but ends in '\.txt'"),
        ("file/plan.toml", r"cannot be written \(Not a directory\)"),
        ("x" * 300 + ".toml", r"cannot be written \(File name too long\)"),
    ]
    check_refusals(rows, lambda name: check(tmp_path / name))
