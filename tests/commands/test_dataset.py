import numpy as np
import pytest

from vigpipe.commands.dataset import make_debian_graph
from vigpipe.errors import InputError
from vigpipe.graphs.formats.graph_file import read


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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("graph.txt", r"must end in \.npz, but ends in '\.txt'; choose another name"),
        ("lists/x_Packages/graph.npz", r"cannot be written \(Not a directory\)"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(name, message, lists, tmp_path):
    with pytest.raises(InputError, match=message):
        make_debian_graph(tmp_path / name, lists)


def test_without_lists_nothing_is_written(tmp_path):
    with pytest.raises(InputError, match="holds no lists of packages"):
        make_debian_graph(tmp_path / "graph.npz", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_sentence(lists, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(InputError, match=r"graph\.npz: cannot be written \(No space left on dev"):
        make_debian_graph(tmp_path / "graph.npz", lists)
    assert [path.name for path in tmp_path.iterdir()] == ["lists"]
