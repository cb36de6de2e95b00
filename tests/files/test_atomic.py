"""Files and folders are written under names drawn by chance, and what killed writers left goes."""

import fcntl
import os
import re

import pytest

from vigpipe.files import atomic
from vigpipe.files.atomic import making, replacing, write_atomically

LEFT = f".vigpipe-{16 * '0'}.partial"


@pytest.fixture(autouse=True)
def _has_swept_nothing(monkeypatch):
    monkeypatch.setattr(atomic, "_swept", set())


def test_nothing_that_others_have_put_beside_a_file_is_touched(tmp_path):
    """A link under the name that a file had while it was written led to the loss of its target."""
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    (tmp_path / ".x.partial").symlink_to(victim)
    (tmp_path / ".y.partial").mkdir()
    os.mkfifo(tmp_path / LEFT.replace("0", "f"))
    (tmp_path / "x").symlink_to(victim)
    before = set(os.listdir(tmp_path)) - {LEFT.replace("0", "f")}
    write_atomically(tmp_path / "x", "new")
    assert victim.read_text() == "as it was"
    assert (tmp_path / "x").read_text() == "new"
    assert not (tmp_path / "x").is_symlink()  # the link itself was replaced
    assert set(os.listdir(tmp_path)) == before


def test_a_name_is_free_and_hard_to_guess_and_goes_with_an_exception(tmp_path):
    names = set()

    def write_half(of, name):
        with of(tmp_path / name) as partial:
            names.add(partial.name)
            (partial if of is replacing else partial / "file").write_text("half")
            raise KeyError

    for _ in range(2):
        for of in (replacing, making):
            with pytest.raises(KeyError):
                write_half(of, "x")
    assert len(names) == 4
    assert all(re.fullmatch(r"\.vigpipe-[0-9a-f]{16}\.partial", name) for name in names)
    assert os.listdir(tmp_path) == []


def test_what_killed_writers_have_left_goes_and_what_living_ones_write_stays(tmp_path):
    left, written = tmp_path / LEFT, tmp_path / LEFT.replace("0", "1")
    (left / "folder").mkdir(parents=True)
    others = {".vigpipe-x.partial", f"{LEFT}.old", f"x{LEFT}", ".partial"}
    for name in (*others, written.name):
        (tmp_path / name).touch()
    with written.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as its writer does
        with making(tmp_path / "folder") as folder:
            (folder / "file").touch()
    assert set(os.listdir(tmp_path)) == {*others, written.name, "folder"}


def test_what_belongs_to_others_stays(tmp_path, monkeypatch):
    (tmp_path / LEFT).touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    write_atomically(tmp_path / "file", "")
    assert set(os.listdir(tmp_path)) == {LEFT, "file"}


def test_files_have_the_users_permissions(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "file", "")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
