"""Planetoid's files: nothing in them is executed, and what is wrong with them is one sentence."""

import builtins
import os
import pickle
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from tests.graphs.formats.raw_files import planetoid_parts, write_planetoid, write_python2
from tests.graphs.restored import restored
from tests.refusals import check_refusals
from vigpipe.errors import InputError
from vigpipe.graphs.formats import old_pickle
from vigpipe.graphs.formats.old_pickle import read_pickle
from vigpipe.graphs.formats.planetoid import read

MATRIX = sparse.csr_matrix(np.diag([1.0, 2.0, 3.0])[:, [0, 2, 1]])
CONTENTS: list[Any] = [
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(3, dtype=">f8"),
    MATRIX,
    defaultdict(list, {0: [1, 2], 5: []}),
    {1: [2]},
]


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, "of Python 2"])
def test_arrays_matrices_and_tables_are_read(protocol, tmp_path):
    path = tmp_path / "x"
    for content in CONTENTS:
        if protocol == "of Python 2":
            write_python2(path, content)
        else:
            path.write_bytes(pickle.dumps(content, protocol))
        found = read_pickle(path)
        if sparse.issparse(content):
            np.testing.assert_array_equal(found.toarray(), content.toarray())
        else:
            np.testing.assert_array_equal(found, content)
            assert getattr(found, "shape", None) == getattr(content, "shape", None)


class Calls:
    """Calls a function when it is unpickled."""

    def __init__(self, function, *arguments, state=None):
        self.reduced = function, arguments, state

    def __reduce__(self):
        return self.reduced


CALLS = [
    (Calls(os.mkdir, "made"), "posix.mkdir"),
    (Calls(builtins.eval, "1"), r"(__builtin__|builtins)\.eval"),
    (Calls(pickle.loads, b""), r"_?pickle\.loads"),
]


def test_what_a_file_wants_to_call_is_named_and_not_called(read_bytes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = "x: needs {}, and loading that would execute code"
    rows = [
        (pickle.dumps({1: calls}, protocol), message.format(name))
        for protocol in (0, 2, 4)
        for calls, name in CALLS
    ]
    check_refusals(rows, read_bytes)
    assert os.listdir() == ["x"]


def array_of(dtype, shape, content):
    """A pickle of an array whose parts need not fit together."""
    make, arguments, _ = np.zeros(0).__reduce__()
    state = (1, shape, dtype, False, content)
    return pickle.dumps(Calls(make, *arguments, state=state), 2)


F8 = np.dtype("f8")
DAMAGED = [
    (b"", "damaged or not wholly downloaded"),
    (b"x", "cannot be read as a pickle of numbers"),
    (pickle.dumps(CONTENTS[0], 2)[:-9], "cannot be read as a pickle of numbers"),
    (pickle.dumps(np.array([{}, 1], object), 2), "holds object, no numbers"),
    (array_of(F8, (1 << 40,), b"12345678"), "has 8 bytes"),
    (array_of(F8, (-1, -1), b"12345678"), r"has the shape \(-1, -1\)"),
    (array_of(F8, (2,) * 3, bytes(64)), r"has the shape \(2, 2, 2\)"),
    # An array without its state, and a memo without end
    (b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)R.", "cannot be"),
    (b"\x80\x02]r\xff\xff\xff\x7f.", "remembers more than it holds"),
    # Nested so deep that comparing or removing them ended the process, or took a minute
    (b"\x80\x02)" + 200_000 * b"\x85" + b".", "nests more than 1000"),
    (200_000 * b"(" + 200_000 * b"t" + b".", "nests more than 1000"),
    (b"\x80\x02" + 100_000 * b"]" + 99_999 * b"a" + b".", "nests more than 1000"),
    # A state for a type, a table and a name; a matrix without rows
    (b"\x80\x02cnumpy\ndtype\n}b.", "missing 1 required positional"),
    (b"\x80\x02ccollections\ndefaultdict\n)R}b.", "is given a state"),
    (b"\x80\x02c_codecs\nencode\nX\1\0\0\0a\x85R}b.", "is given a state"),
    (b"\x80\x02cscipy.sparse.csr\ncsr_matrix\n)\x81}b.", "_shape"),
]


@pytest.fixture
def read_bytes(tmp_path):
    """Reads a pickle of such bytes from the file x."""

    def read_bytes(content):
        (tmp_path / "x").write_bytes(content)
        return read_pickle(tmp_path / "x")

    return read_bytes


def test_a_damaged_or_forged_pickle_is_one_sentence(read_bytes, tmp_path):
    check_refusals(DAMAGED, read_bytes, where=tmp_path / "x")


def test_no_attribute_of_a_class_of_ours_can_be_set(read_bytes):
    before = dict(vars(old_pickle._Array))
    for name in (b"numpy\ndtype", b"numpy.core.multiarray\n_reconstruct", b"__builtin__\nlist"):
        state = b"(N}U\x07as_rowsK\x01st"  # (None, {'as_rows': 1}): attributes to set
        with pytest.raises(InputError):
            read_bytes(b"\x80\x02c" + name + b"\n" + state + b"b.")
    assert dict(vars(old_pickle._Array)) == before


def test_a_matrix_that_is_none_is_one_sentence(tmp_path):
    def attempt(name, wrong):
        matrix = MATRIX.copy()
        matrix.__dict__[name] = wrong
        write_python2(tmp_path / "x", matrix)
        read_pickle(tmp_path / "x")

    rows = [
        ("indptr", np.array([0, 3, 1, 3])),
        ("indptr", np.array([0.0, 1, 2, 3])),
        ("indices", np.array([0, 9, 1])),
        ("indices", np.array([0, -1, 1])),
        ("data", np.zeros(2)),
        *(("_shape", shape) for shape in ((1 << 40, 3), (3, 1 << 40), (3,))),
    ]
    check_refusals([(*row, "") for row in rows], attempt, where=f"{tmp_path / 'x'}: ")


def test_a_large_file_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(old_pickle, "MOST_BYTES", 10)
    (tmp_path / "x").write_bytes(pickle.dumps(CONTENTS[0], 2))
    with pytest.raises(InputError, match="bytes, expected at most 10"):
        read_pickle(tmp_path / "x")


PARTS = planetoid_parts(0)
MANY = [7] * 3000
NOT_FITTING = [
    ("ally", PARTS["ally"][:-1], "files do not fit together .allx .532, 9."),
    ("y", PARTS["y"][:, :2], "do not fit together"),
    ("y", PARTS["ally"][:40], "500 nodes for validation"),
    ("allx", PARTS["ally"], "allx: holds no sparse matrix"),
    ("y", np.zeros(12), "y: holds no array of a row of classes"),
    ("test.index", [532] * 30, "lie in 532 … 532, expected each once, from 532"),
    ("test.index", [*range(532, 561), 1 << 40], "at most 1124;"),
    ("test.index", [*range(532, 561), 4_000_000], "at most 1124;"),  # rows of zeros for all these
    ("test.index", ["a"] * 30, "holds no list of numbers"),
    ("test.index", [], "holds no list of numbers"),
    ("ally", np.ones_like(PARTS["ally"]), "node 0 has not exactly one class"),
    ("graph", [0, 1], "graph: holds no table of the neighbours"),
    ("graph", dict.fromkeys(range(500), MANY), "holds no table"),  # grows when it is unpickled
    ("graph", {"a": [0]}, "holds no table"),
    ("graph", {0: [1 << 70]}, "expected whole numbers"),
]


def test_files_that_do_not_fit_are_one_sentence(tmp_path):
    folder = write_planetoid(tmp_path, "Cora", PARTS)

    def attempt(part, content):
        with restored(folder / f"ind.cora.{part}"):
            write_planetoid(tmp_path, "Cora", {part: content})
            read("Cora", folder)

    check_refusals(NOT_FITTING, attempt, where=folder)


def test_damage_anywhere_is_a_sentence_or_harmless(tmp_path):
    generator = np.random.default_rng(0)
    folder = write_planetoid(tmp_path, "Cora", PARTS)
    path = folder / "ind.cora.graph"
    good, refused = path.read_bytes(), []
    for _ in range(30):
        content = bytearray(good)
        for place in (generator.random(2) ** 3 * len(good)).astype(int):
            content[place] = generator.integers(256)
        path.write_bytes(content[: generator.integers(len(good) // 2, 2 * len(good))])
        try:
            read("Cora", folder)
        except InputError as error:
            refused.append(str(folder) in str(error))
    assert all(refused)
    assert len(refused) > 10
