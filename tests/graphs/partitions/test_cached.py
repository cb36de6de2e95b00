"""Partitions are kept between runs, and read as a stranger's."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from tests.graphs.partitions.small_graphs import blocks_graph
from vigpipe.errors import InputError
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


def cached(beside, graph=GRAPH, method: Any = "metis", parts=3, seed=5):
    return cached_partition(graph, method, parts, seed, beside)


def only_file(folder):
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize("method", ["metis", "spectral", "walks"])
def test_the_second_time_the_partition_is_read(method, beside, cache):
    made = cached(beside, method=method)
    read = cached(beside, method=method)
    assert not made.was_read
    assert read.was_read
    assert (read.parts == made.parts).all()
    assert read.seconds == made.seconds > 0
    assert made.read_seconds is not None
    assert read.read_seconds is not None
    assert (read.num_kept, read.num_edges) == (made.num_kept, made.num_edges)
    path = only_file(beside.with_name("graph.npz.parts"))
    assert path.name == f"{method}-3-5-{GRAPH.sha256}-1.safetensors"
    assert not cache.exists()


def test_another_graph_method_number_or_seed_has_a_file_of_its_own(beside):
    cached(beside)
    other, _ = blocks_graph(60, 3, degree_in=8, degree_out=2, seed=1)
    assert not cached(beside, other).was_read
    assert not cached(beside, method="spectral").was_read
    assert not cached(beside, parts=4).was_read
    assert not cached(beside, seed=6).was_read


def test_random_parts_are_not_kept(beside, cache):
    for _ in range(2):
        partition = cached(beside, method="random")
        assert (partition.was_read, partition.read_seconds) == (False, None)
    assert not beside.with_name("graph.npz.parts").exists()
    assert not cache.exists()


def test_without_a_place_beside_the_graph_the_users_cache_serves(cache):
    cached(None)
    assert only_file(cache).name.startswith("metis-3-5-")
    assert cached(None).was_read


@pytest.mark.parametrize("what", ["file", "read-only", "proc"])
def test_a_folder_that_cannot_be_written_is_no_error(what, beside, cache, capsys):
    folder = beside.with_name("graph.npz.parts")
    if what == "file":
        folder.write_text("not a folder")
    elif what == "read-only":
        beside.parent.joinpath("cache").mkdir(mode=0o700)
        beside.parent.chmod(0o500)
        if os.access(beside.parent, os.W_OK):
            pytest.skip("root may write everywhere")
    else:
        beside = Path("/proc/graph.npz")  # where not even root can make a folder
    assert not cached(beside).was_read
    assert cached(beside).was_read
    assert only_file(cache).is_file()
    assert capsys.readouterr().err == ""


def test_without_any_place_the_partition_is_made_each_time(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("not a folder")
    for _ in range(2):
        partition = cached(None)
        assert not partition.was_read
        assert (partition.parts == MADE.parts).all()


def parts_file(parts, name="parts", seconds: float | list[float] = 1.0):
    return save({name: np.ascontiguousarray(parts), "seconds": np.array(seconds)})


DAMAGES = [
    b"",
    b"these are no parts" * 10,
    (1 << 62).to_bytes(8, "little") + b"{}",  # a large header
    bytes(1 << 17),
    parts_file(MADE.parts)[:-1],
    parts_file(MADE.parts, "parties"),
    parts_file(MADE.parts[:-1]),
    parts_file(MADE.parts[:, None]),
    parts_file(MADE.parts.astype(np.int32)),
    parts_file(MADE.parts.astype(np.float64)),
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


def test_what_cannot_be_made_is_refused_before_files_are_looked_for(beside):
    with pytest.raises(InputError, match="cannot be cut into 61 parts"):
        cached(beside, parts=61)
