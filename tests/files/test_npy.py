"""Arrays are read as NumPy wrote them, and damaged or forged files are one sentence."""

import io
import struct
import warnings
import zipfile

import numpy as np
import pytest

from tests.refusals import check_refusals
from vigpipe.errors import InputError
from vigpipe.files import npy
from vigpipe.files.npy import read_npy, read_npz

GENERATOR = np.random.default_rng(0)
ARRAYS = {
    "float64": GENERATOR.random((5, 3)),
    "float16": GENERATOR.random(700).astype(np.float16),
    "big-endian": np.arange(2000, dtype=">i4").reshape(40, 50),
    "columns first": np.asfortranarray(GENERATOR.random((4, 6))),
    "three sides": np.asfortranarray(np.arange(24).reshape(2, 3, 4)),
    "truth": GENERATOR.random((3, 9)) < 0.5,
    "text": np.array(["a", "ü𝔸", ""]),
    "big-endian text": np.array(["ab", "ü"]).astype(">U2"),
    "bytes": np.array(b"csr"),
    "a number": np.array(7, np.uint8),
    "nothing": np.zeros((0, 3), np.int16),
}


MAPPED = ["float64", "float16", "a number"]  # as memory has them


def is_mapped(array):
    while isinstance(array, np.ndarray) and not isinstance(array, np.memmap):
        array = array.base
    return isinstance(array, np.memmap)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_are_those_that_were_saved(save, mapped, tmp_path):
    save(tmp_path / "x.npz", **ARRAYS)
    names = list(ARRAYS)
    wanted = names if mapped else []
    arrays = read_npz(tmp_path / "x.npz", names[:3], [*names[3:], "absent"], wanted)
    found = [name for name in names if is_mapped(arrays[name])]
    assert found == (MAPPED if mapped and save is np.savez else [])
    assert list(arrays) == list(ARRAYS)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, ARRAYS[name])
        assert array.dtype == ARRAYS[name].dtype.newbyteorder("=")


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_alone_too(name, tmp_path):
    np.save(tmp_path / "x.npy", ARRAYS[name])
    np.testing.assert_array_equal(read_npy(tmp_path / "x.npy"), ARRAYS[name])
    mapped = read_npy(tmp_path / "x.npy", mapped=True)
    np.testing.assert_array_equal(mapped, ARRAYS[name])
    assert is_mapped(mapped) == (name in MAPPED)


def test_what_is_written_into_a_mapped_array_does_not_reach_the_file(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.arange(3))
    read_npz(tmp_path / "x.npz", ["a"], mapped=["a"])["a"][0] = 7
    assert read_npz(tmp_path / "x.npz", ["a"])["a"].tolist() == [0, 1, 2]


def test_a_mapped_array_is_compared_with_its_checksum(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.full(3, 0x1234567))
    content = (tmp_path / "x.npz").read_bytes()
    (tmp_path / "x.npz").write_bytes(content.replace(b"\x67\x45\x23\x01", b"\x67\x45\x23\x02", 1))
    with pytest.raises(InputError, match=r"x\.npz: cannot be read .*another checksum"):
        read_npz(tmp_path / "x.npz", ["a"], mapped=["a"])


def test_arrays_that_nobody_asked_for_may_be_anything(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.arange(3), b=np.array([{}], dtype=object))
    assert list(read_npz(tmp_path / "x.npz", ["a"])) == ["a"]


def test_truth_values_of_any_byte_are_true_or_false(tmp_path):
    content = forged("|b1", (3,), b"\x00\x02\xff")
    (tmp_path / "x.npy").write_bytes(content)
    array = read_npy(tmp_path / "x.npy")
    assert array.view(np.uint8).tolist() == [0, 1, 1]


# ---- what is refused ------------------------------------------------------------------------


def forged(descr, shape, content=b"", is_fortran=False):
    header = f"{{'descr': {descr!r}, 'fortran_order': {is_fortran}, 'shape': {shape}, }}"
    text = header.ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + content


def zipped(members, pack=zipfile.ZIP_DEFLATED):
    stream = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w", pack) as archive:
        warnings.simplefilter("ignore")  # that a name is there twice
        for name, content in members:
            archive.writestr(name, content)
    return stream.getvalue()


FORGED = [
    (b"text", "does not begin as NumPy's do"),
    (forged("<f8", (1 << 40,), bytes(8)), "136 bytes, but its header says"),
    (forged("<f8", (1 << 62, 4), bytes(0)), "its header says"),  # a product that overflows
    (forged("<i4", (-1, -2), bytes(8)), r"says \(-1, -2\) of <i4"),
    (forged("<U0", (1 << 40,)), r"says \(1099511627776,\) of <U0"),
    (forged("|O", (1,), bytes(8)), "holds Python objects, expected numbers or text"),
    (forged([("a", "<i4")], (1,), bytes(4)), "expected numbers or text"),
    (forged("<c16", (1,), bytes(16)), "holds complex128, expected numbers"),
    (forged("<i4", (1,), bytes(5)), "has 133 bytes"),
    (forged("<U1", (1,), b"\xff\xff\xff\x7f"), "none of Unicode's"),
    (b"\x93NUMPY\x02\x00\xff\xff\xff\x7f{", "does not begin"),  # a header without end
    (b"\x93NUMPY\x01\x00" + struct.pack("<H", 9001) + b"-" * 9000 + b"1", "does not begin"),
    (forged("<i4", "__import__('os')"), "does not begin"),
    (forged("<i4", (1,), bytes(4)).replace(b"Y\x01", b"Y\x03"), "does not begin"),
    (forged("<i4", ("a",), bytes(4)), "does not begin"),
    (forged("<i4", (1,) * 65, bytes(4)), "cannot be read"),
]


@pytest.mark.parametrize("where", ["npy", "npz"])
def test_a_forged_array_is_one_sentence(where, tmp_path):
    path = tmp_path / f"x.{where}"

    def read(content):
        if where == "npy":
            path.write_bytes(content)
            return read_npy(path)
        path.write_bytes(zipped([("a.npy", content)]))
        return read_npz(path, ["a"])

    check_refusals(FORGED, read, f"^{path}: .*")


GOOD = forged("<i4", (2,), bytes(8))


def test_what_is_no_npz_file_is_one_sentence(tmp_path):
    path = tmp_path / "x.npz"
    rows = [
        (b"", "cannot be read as a .npz file"),
        (zipped([("a.npy", GOOD)])[:-30], "is damaged or not wholly downloaded"),
        (zipped([("a.npy", GOOD), ("a.npy", GOOD)]), "has two arrays a; save it again with one"),
        (zipped([("b\n.npy", GOOD)]), r"has the arrays b\\n, but lacks a; save it again with"),
        (zipped([("a", GOOD)]), "has the arrays none, but lacks a"),
        (zipped([("a.npy", GOOD)], zipfile.ZIP_BZIP2), "in a way that NumPy does not use"),
    ]
    check_refusals(rows, lambda content: (path.write_bytes(content), read_npz(path, ["a"])))
    rows = [(tmp_path / "absent.npz", "No such file"), (tmp_path, "is not a regular file")]
    check_refusals(rows, lambda path: read_npz(path, ["a"]))


def test_a_bomb_is_not_unpacked(tmp_path, monkeypatch):
    small = {"bits": np.zeros(3_000, np.uint8), "texts": np.full(200, "ab")}
    np.savez_compressed(tmp_path / "x.npz", a=np.zeros(100_000), b=np.zeros(10), **small)
    monkeypatch.setattr(npy, "MOST_UNPACKED", 10_000)
    with pytest.raises(InputError, match=r"have 800128 bytes.* most 10000 .* without compress"):
        read_npz(tmp_path / "x.npz", ["a"])
    for name, num_bytes in {"bits": 12_000, "texts": 12_800}.items():
        with pytest.raises(InputError, match=f"have {num_bytes} bytes, where a number counts as"):
            read_npz(tmp_path / "x.npz", [name])
    assert read_npz(tmp_path / "x.npz", ["b"])["b"].size == 10


def test_a_member_that_says_it_is_larger_takes_no_memory(tmp_path):
    """The size in the zip file's list and in the header agree, but the bytes are not there."""
    num_bytes = 1 << 40
    content = bytearray(zipped([("a.npy", forged("|u1", (num_bytes - 128,)))], zipfile.ZIP_STORED))
    place = content.rindex(b"PK\x01\x02")
    struct.pack_into("<II", content, place + 20, 0xFFFFFFFE, 0xFFFFFFFE)
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(InputError, match="is not wholly there"):
        read_npz(tmp_path / "x.npz", ["a"])
