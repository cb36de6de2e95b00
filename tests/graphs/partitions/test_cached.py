"""Partitions are kept between runs, and read as a stranger's."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from tests.graphs.partitions.small_graphs import blocks_graph
from vigpipe.graphs.partitions.cached import cached_partition
from vigpipe.graphs.partitions.make import make_partition

GRAPH, _ = blocks_graph(60, 3, degree_in=8, degree_out=2, seed=0)
MADE = make_partition(GRAPH, "metis", 3, seed=5)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VIGPIPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "parts"


@pytest.fixture
def beside(tmp_path):
    return tmp_path / "graph.npz"


def cached(beside, method: Any = "metis", parts=3, seed=5):
    return cached_partition(GRAPH, method, parts, seed, beside)


def only_file(folder):
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize("method", ["metis", "spectral", "walks"])
def test_the_second_time_the_partition_is_read(method, beside, cache):
    assert not cached(beside, method=method, parts=4).was_read
    assert not cached(beside, method=method, seed=6).was_read
    made = cached(beside, method=method)
    read = cached(beside, method=method)
    assert not made.was_read
    assert read.was_read
    assert (read.parts == made.parts).all()
    assert read.seconds == made.seconds > 0
    assert made.read_seconds is not None
    assert read.read_seconds is not None
    assert (read.num_kept, read.num_edges) == (made.num_kept, made.num_edges)
    files = {path.name for path in beside.with_name("graph.npz.parts").iterdir()}
    assert f"{method}-3-5-{GRAPH.sha256}-1.safetensors" in files
    assert not cache.exists()


def test_random_parts_are_not_kept(beside, cache):
    for _ in range(2):
        partition = cached(beside, method="random")
        assert (partition.was_read, partition.read_seconds) == (False, None)
    assert not beside.with_name("graph.npz.parts").exists()
    assert not cache.exists()


@pytest.mark.parametrize("what", ["file", "proc", "none"])
def test_where_a_folder_cannot_be_written_the_users_cache_serves(what, beside, cache, capsys):
    if what == "file":
        beside.with_name("graph.npz.parts").write_text("not a folder")
    else:  # no place at all, or one where not even root can make a folder
        beside = None if what == "none" else Path("/proc/graph.npz")
    assert not cached(beside).was_read
    assert cached(beside).was_read
    assert only_file(cache).is_file()
    assert capsys.readouterr().err == ""


def parts_file(parts, name="parts", seconds: float | list[float] = 1.0):
    return save({name: np.ascontiguousarray(parts), "seconds": np.array(seconds)})


DAMAGES = [
    b"",
    (1 << 62).to_bytes(8, "little") + b"{}",  # a large header
    bytes(1 << 17),
    parts_file(MADE.parts)[:-1],
    parts_file(MADE.parts, "parties"),
    parts_file(MADE.parts + 1),
    parts_file(MADE.parts - 1),
    parts_file(MADE.parts, seconds=np.nan),
    parts_file(MADE.parts, seconds=[1.0, 2.0]),
    parts_file(np.where(MADE.parts == 1, 2, MADE.parts)),  # a part is empty
]


def test_a_damaged_file_is_made_again_with_a_note(beside, capsys):
    cached(beside)
    path = only_file(beside.with_name("graph.npz.parts"))
    for damage in DAMAGES:
        path.write_bytes(damage)
        made = cached(beside)
        assert (made.parts == MADE.parts).all()
        assert not made.was_read, damage
        note = capsys.readouterr().err
        assert str(path) in note
        assert note.endswith("made again\n")
        assert note.count("\n") == 1
        assert (load_file(path)["parts"] == MADE.parts).all()
    assert cached(beside).was_read


@pytest.mark.parametrize("put", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_neither_stops_nor_blocks(put, beside, capsys):
    cached(beside)
    path = only_file(beside.with_name("graph.npz.parts"))
    path.unlink()
    put(path)
    assert (cached(beside).parts == MADE.parts).all()
    assert "made again" in capsys.readouterr().err
