"""Partitions are kept between runs, and read as a stranger's."""

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

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


def is_read(partition):
    return partition.was_read


def only_file(folder):
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize("method", ["metis", "spectral", "walks"])
def test_the_second_time_the_partition_is_read(method, beside, cache):
    made = cached_partition(GRAPH, method, 3, 5, beside)
    read = cached_partition(GRAPH, method, 3, 5, beside)
    assert not is_read(made)
    assert is_read(read)
    assert (read.parts == made.parts).all()
    assert read.seconds == made.seconds > 0
    assert made.read_seconds is not None
    assert read.read_seconds is not None
    assert (read.num_kept, read.num_edges) == (made.num_kept, made.num_edges)
    path = only_file(beside.with_name("graph.npz.parts"))
    assert path.name == f"{method}-3-5-{GRAPH.sha256}-1.safetensors"
    assert not cache.exists()


def test_another_graph_method_number_or_seed_has_a_file_of_its_own(beside):
    cached_partition(GRAPH, "metis", 3, 5, beside)
    other, _ = blocks_graph(60, 3, degree_in=8, degree_out=2, seed=1)
    assert not is_read(cached_partition(other, "metis", 3, 5, beside))
    assert not is_read(cached_partition(GRAPH, "spectral", 3, 5, beside))
    assert not is_read(cached_partition(GRAPH, "metis", 4, 5, beside))
    assert not is_read(cached_partition(GRAPH, "metis", 3, 6, beside))


def test_random_parts_are_not_kept(beside, cache):
    for _ in range(2):
        partition = cached_partition(GRAPH, "random", 3, 5, beside)
        assert (is_read(partition), partition.read_seconds) == (False, None)
    assert not beside.with_name("graph.npz.parts").exists()
    assert not cache.exists()


def test_without_a_place_beside_the_graph_the_users_cache_serves(cache):
    cached_partition(GRAPH, "metis", 3, 5, None)
    assert only_file(cache).name.startswith("metis-3-5-")
    assert is_read(cached_partition(GRAPH, "metis", 3, 5, None))


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
    assert not is_read(cached_partition(GRAPH, "metis", 3, 5, beside))
    assert is_read(cached_partition(GRAPH, "metis", 3, 5, beside))
    assert only_file(cache).is_file()
    assert capsys.readouterr().err == ""


def test_without_any_place_the_partition_is_made_each_time(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("not a folder")
    for _ in range(2):
        partition = cached_partition(GRAPH, "metis", 3, 5, None)
        assert not is_read(partition)
        assert (partition.parts == MADE.parts).all()


def write_bytes(content):
    return lambda path: path.write_bytes(content)


def write_parts(parts, name="parts", seconds: float | list[float] = 1.0):
    tensors = {name: np.ascontiguousarray(parts), "seconds": np.array(seconds)}
    return lambda path: save_file(tensors, path)


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-1])


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


def replace_by_pipe(path):
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "empty": write_bytes(b""),
    "text": write_bytes(b"these are no parts" * 10),
    "large header": write_bytes((1 << 62).to_bytes(8, "little") + b"{}"),
    "large": write_bytes(bytes(1 << 17)),
    "cut off": cut_off,
    "other name": write_parts(MADE.parts, "parties"),
    "short": write_parts(MADE.parts[:-1]),
    "two dimensions": write_parts(MADE.parts[:, None]),
    "int32": write_parts(MADE.parts.astype(np.int32)),
    "float": write_parts(MADE.parts.astype(np.float64)),
    "too high": write_parts(MADE.parts + 1),
    "too low": write_parts(MADE.parts - 1),
    "no number of seconds": write_parts(MADE.parts, seconds=np.nan),
    "numbers of seconds": write_parts(MADE.parts, seconds=[1.0, 2.0]),
    "an empty part": write_parts(np.where(MADE.parts == 1, 2, MADE.parts)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_again_with_a_note(damage, beside, capsys):
    cached_partition(GRAPH, "metis", 3, 5, beside)
    path = only_file(beside.with_name("graph.npz.parts"))
    DAMAGES[damage](path)
    made = cached_partition(GRAPH, "metis", 3, 5, beside)
    assert (made.parts == MADE.parts).all()
    assert not is_read(made)
    note = capsys.readouterr().err
    assert str(path) in note
    assert note.endswith("made again\n")
    assert note.count("\n") == 1
    assert (load_file(path)["parts"] == MADE.parts).all()
    assert is_read(cached_partition(GRAPH, "metis", 3, 5, beside))


@pytest.mark.parametrize("replace", [replace_by_folder, replace_by_pipe])
def test_what_is_no_file_neither_stops_nor_blocks(replace, beside, capsys):
    cached_partition(GRAPH, "metis", 3, 5, beside)
    replace(only_file(beside.with_name("graph.npz.parts")))
    assert (cached_partition(GRAPH, "metis", 3, 5, beside).parts == MADE.parts).all()
    assert "made again" in capsys.readouterr().err


def test_what_cannot_be_made_is_refused_before_files_are_looked_for(beside):
    with pytest.raises(InputError, match="cannot be cut into 61 parts"):
        cached_partition(GRAPH, "metis", 61, 5, beside)
