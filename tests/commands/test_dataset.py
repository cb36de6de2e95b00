import numpy as np
import pytest
from safetensors import SafetensorError

from tests.commands.refusals import check_commands
from tests.refusals import check_refusals
from vigpipe.cli import main
from vigpipe.commands.dataset import make_debian_graph, prepare_dataset
from vigpipe.config.verbs import PrepareConfig
from vigpipe.errors import InputError
from vigpipe.graphs.formats.graph_file import read
from vigpipe.graphs.prepared.read import open_folder


@pytest.fixture
def lists(tmp_path):
    folder = tmp_path / "lists"
    folder.mkdir()
    stanzas = (
        f"Package: p{i}\nSection: {('libs', 'net')[i % 2]}\nDepends: p{i * 7 % 400}\n"
        f"Description: word{i % 30} and more\n"
        for i in range(400)
    )
    (folder / "x_Packages").write_text("\n".join(stanzas))
    return folder


def test_a_graph_file_is_written_that_can_be_opened(lists, tmp_path, capsys):
    out = tmp_path / "new" / "graph.npz"
    make_debian_graph(out, lists)
    graph = read(out)
    assert capsys.readouterr().out == f"{out}: 400 nodes, {graph.num_edges} edges, 2 classes\n"
    assert (graph.num_nodes, graph.num_features) == (400, 512)
    assert graph.num_edges == sum(i * 7 % 400 != i for i in range(400))
    assert graph.class_names == ("libs", "net")
    assert [path.name for path in out.parent.iterdir()] == ["graph.npz"]


def test_the_same_lists_give_the_same_file_and_it_replaces_its_own_only(lists, tmp_path):
    out, theirs = tmp_path / "graph.npz", tmp_path / "theirs.npz"
    make_debian_graph(out, lists)
    content = out.read_bytes()
    make_debian_graph(out, lists)
    assert out.read_bytes() == content
    np.savez_compressed(theirs, a=np.arange(3))
    with pytest.raises(
        InputError, match=r"theirs\.npz: is there already, and this command did not"
    ):
        make_debian_graph(theirs, lists)


def test_what_cannot_be_written_or_read_is_refused_before_the_work(lists, tmp_path):
    rows = [
        ("graph.txt", lists, r"must end in \.npz, but ends in '\.txt'; choose another name"),
        ("lists/x_Packages/graph.npz", lists, r"cannot be written \(Not a directory\)"),
        ("graph.npz", tmp_path, "holds no lists of packages"),
    ]
    check_refusals(rows, lambda name, source: make_debian_graph(tmp_path / name, source))
    assert list(tmp_path.iterdir()) == [lists]


def test_a_full_disk_is_one_sentence(lists, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(InputError, match=r"graph\.npz: cannot be written \(No space left on dev"):
        make_debian_graph(tmp_path / "graph.npz", lists)
    assert [path.name for path in tmp_path.iterdir()] == ["lists"]


def test_a_graph_is_prepared_and_checked(here, capsys):
    options = ["--partition", "random", "--parts", "3", "--seed", "1", "--features", "raw"]
    assert main(["dataset", "prepare", "sbm:60,3,4,5", "new/folder", *options]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("3 parts (random): ")
    graph = open_folder(here / "new" / "folder")
    assert (graph.manifest.seed, graph.manifest.source) == (1, "sbm:60,3,4,5")
    assert second == (
        f"new/folder: 60 nodes, {graph.num_edges} directed edges, 4 features (raw), in 3 parts "
        "(random), 0.00 GB"
    )
    assert main(["dataset", "check", "new/folder"]) == 0
    assert capsys.readouterr().out == f"{second}: every file is what the manifest says\n"
    assert main(["dataset", "prepare", "new/folder", "again", "--parts", "2"]) == 0
    assert open_folder(here / "again").manifest.partition == "metis"


REFUSED = [
    ("prepare sbm:60 .", "is there already; choose another name"),
    ("prepare coral f", "--data coral: no such graph; give one of Cora"),
    ("prepare sbm:60 f --parts 61", "cannot be cut into 61 parts"),
    ("prepare sbm:60 f --seed -1", "--seed -1: must be 0 or more"),
    ("prepare sbm:60 /dev/null/f", "/dev/null/f: cannot be written (File exists)"),
    ("check .", "manifest.json: cannot be read (No such file or direc"),
]


@pytest.mark.usefixtures("here")
def test_wrong_use_is_one_sentence(capsys):
    check_commands(capsys, "dataset", REFUSED)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("full")])
def test_a_full_disk_leaves_no_folder(error, tmp_path, monkeypatch):
    def full(*_, **__):
        raise error

    monkeypatch.setattr("vigpipe.graphs.prepared.write.save_file", full)
    with pytest.raises(
        InputError, match=r"f: cannot be written \((No space left on device|full)\)"
    ):
        prepare_dataset("sbm:60", tmp_path / "f", PrepareConfig())
    assert not list(tmp_path.iterdir())
