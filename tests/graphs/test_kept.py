"""What is made of a graph is kept between runs, and read as a stranger's."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from vigpipe.graphs import kept
from vigpipe.graphs.kept import Form, keep, read_kept

FORM = Form(
    "3 ages, and their names",
    {"ages": (np.int32, (3,)), "names": (np.uint8, (3, 4))},
    lambda arrays: bool((arrays["ages"] >= 0).all()),
)
ARRAYS = {"ages": np.array([3, 1, 2], np.int32), "names": np.ones((3, 4), np.uint8)}


@pytest.fixture(autouse=True)
def beside(tmp_path, monkeypatch):
    monkeypatch.setenv("VIGPIPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "graph.npz"


def test_what_is_kept_is_read_with_the_time_that_it_took_to_make(beside):
    assert read_kept("ages-3", beside, FORM) is None
    seconds = keep("ages-3", beside, FORM, ARRAYS, 2.5)
    assert seconds is not None
    assert seconds > 0
    found = read_kept("ages-3", beside, FORM)
    assert found is not None
    assert all((found.arrays[name] == ARRAYS[name]).all() for name in ARRAYS)
    assert (found.seconds, found.read_seconds > 0) == (2.5, True)
    assert read_kept("ages-4", beside, FORM) is None
    assert [path.name for path in beside.parent.rglob("*.safetensors")] == ["ages-3.safetensors"]


def test_another_form_is_told_and_not_read(beside, capsys):
    keep("ages", beside, FORM, ARRAYS, 2.5)
    path = beside.with_name("graph.npz.parts") / "ages.safetensors"
    ages, names = ARRAYS["ages"], ARRAYS["names"]
    for arrays in (
        {"ages": ages},
        {**ARRAYS, "ages": ages.astype(np.int64)},
        {**ARRAYS, "names": names.T.copy()},
        {**ARRAYS, "ages": -ages},
    ):
        save_file({**arrays, "seconds": np.array([2.5])}, path)
        assert read_kept("ages", beside, FORM) is None
        expected = f"{path}: does not hold 3 ages, and their names; they are made again"
        assert expected in capsys.readouterr().err


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path):
    (tmp_path / "cache").write_text("not a folder")
    assert keep("ages", None, FORM, ARRAYS, 2.5) is None
    assert read_kept("ages", None, FORM) is None


def test_those_who_write_at_once_leave_one_whole_file(tmp_path):
    path = tmp_path / "parts" / "ages.safetensors"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: kept._write(path, ARRAYS), range(40)))
    assert list(path.parent.iterdir()) == [path]
    assert (load_file(path)["ages"] == ARRAYS["ages"]).all()
