"""What a pickle would run is named without running it."""

import os
import pickle
import warnings

import pytest
import torch

from vigpipe.errors import InputError
from vigpipe.files.pickled import imported_by
from vigpipe.model.weights import read_weights


class Hostile:
    """Makes a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("made",)


WRITERS = {
    **{f"pickle {n}": lambda content, file, n=n: pickle.dump(content, file, n) for n in range(6)},
    **{
        f"torch {n}": lambda content, file, n=n: torch.save(content, file, pickle_protocol=n)
        for n in (2, 4)
    },
    **{
        f"torch's old files {n}": lambda content, file, n=n: torch.save(
            content, file, pickle_protocol=n, _use_new_zipfile_serialization=False
        )
        for n in (2, 4)
    },
}


@pytest.fixture(params=WRITERS)
def write(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(content):
        with open(tmp_path / "w.pth", "wb") as file:
            WRITERS[request.param](content, file)
        return tmp_path / "w.pth"

    return write


@pytest.mark.parametrize("content", [Hostile(), {"w": Hostile()}], ids=["alone", "within"])
def test_a_pickle_that_wants_to_run_code_is_refused_for_that_reason(content, write, tmp_path):
    """Those of protocol 0, 4 and 5 were said to be damaged, or not wholly downloaded."""
    path = write(content)
    assert imported_by(path) == "posix.mkdir"
    with pytest.raises(
        InputError, match=r"needs posix\.mkdir, and loading that would execute code"
    ):
        read_weights(path)
    assert not (tmp_path / "made").exists()


def test_one_that_only_holds_numbers_needs_nothing(write):
    assert imported_by(write({"w": [1.0, 2.0]})) is None


def test_what_torch_itself_needs_is_no_code_of_the_file(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pth")
    assert imported_by(tmp_path / "w.pth") is None


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"no pickle", b"\x80\x04\x95", b"cos\n"])
def test_what_is_no_pickle_needs_nothing(content, tmp_path):
    (tmp_path / "x").write_bytes(content)
    assert imported_by(tmp_path / "x") is None


def test_an_escape_that_there_is_not_is_no_warning(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"S'\\d'\ncposix\nsystem\n.")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert imported_by(path) == "posix.system"
