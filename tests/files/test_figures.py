"""Pictures are drawn as by default, whatever a matplotlibrc says."""

import sys

import matplotlib
import pytest

from vigpipe.files.figures import matplotlib_defaults


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a\x1b[2Jb: 3\n", b"text.usetex: True\n"])
def test_a_matplotlibrc_is_neither_followed_nor_echoed(content, tmp_path, monkeypatch, capfd):
    """Symptom: a traceback, or its escape sequences on the terminal."""
    (tmp_path / "matplotlibrc").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)  # as a notebook has it
    with matplotlib_defaults():
        assert not matplotlib.rcParams["text.usetex"]
    assert matplotlib.rcParams["text.usetex"]
    monkeypatch.delitem(sys.modules, "matplotlib")  # as a command finds it
    with matplotlib_defaults():
        assert not sys.modules["matplotlib"].rcParams["text.usetex"]
    assert capfd.readouterr() == ("", "")
