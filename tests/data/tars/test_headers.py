"""Members are found where Python's tarfile finds them, and hostile tars are refused."""

import gzip
import io
import lzma
import os
import tarfile

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.data.tars.writing import END, header, member, pax, pax_records, tar_of
from tests.refusals import check_refusals
from tests.test_fuzz import damaged
from vigpipe.data.tars.headers import find_members
from vigpipe.errors import InputError


def find(content: bytes, start: int = 0, end: int | None = None):
    """The members in the bytes of a file: name, offset and size of each."""
    descriptor = os.memfd_create("tar")
    try:
        os.write(descriptor, content)
        members = find_members(descriptor, start, len(content) if end is None else end, "x.tar")
    finally:
        os.close(descriptor)
    names = [members.names[i] for i in range(len(members))]
    return list(zip(names, members.offsets.tolist(), members.sizes.tolist(), strict=True))


# ---- as tarfile -------------------------------------------------------------------------------

parts = st.text("aZ09-_ .äß日🐈", min_size=1, max_size=40).filter(lambda p: not p.startswith("."))
paths = st.lists(parts, min_size=1, max_size=6).map("/".join)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example({"a" * 80 + "/" + "b" * 60: b"1"}, tarfile.USTAR_FORMAT, "")  # a name in two parts
@given(
    st.dictionaries(paths | paths.map(lambda path: path * 5), st.binary(max_size=1500), max_size=6),
    st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    st.sampled_from(["", "./"]),
)
def test_members_are_where_tarfile_finds_them(files, format, before):
    try:
        content = tar_of({before + name: data for name, data in files.items()}, format)
    except ValueError:  # too long for ustar
        content = tar_of(files, tarfile.GNU_FORMAT)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        expected = [(m.name.removeprefix("./"), m.offset_data, m.size) for m in tar.getmembers()]
    assert find(content) == expected
    assert [content[at : at + size] for _, at, size in expected] == list(files.values())


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_damaged_tars_are_read_inside_the_file_or_refused(data):
    format = data.draw(st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
    good = tar_of({"cat/1.png": b"1" * 700, "ä" * 120: b"2", "dog/2.png": b""}, format)
    content = data.draw(damaged(good))
    members, said = [], "x.tar: "
    try:
        members = find(content)
    except InputError as error:
        said = str(error)
    assert all(at >= 0 and at + size <= len(content) for _, at, size in members)
    assert said.startswith("x.tar: ")
    assert said.isprintable()


def test_a_pax_size_wins_over_the_headers():
    content = pax(size=b"3") + header(b"a.png", 0) + b"abc".ljust(512, b"\0") + END
    assert find(content) == [("a.png", 1536, 3)]


def test_sizes_may_be_binary_as_gnu_tar_writes_them():
    size = b"\x80" + (700).to_bytes(11, "big")
    assert find(header(b"a.png", size) + bytes(1024) + END) == [("a.png", 512, 700)]


def test_old_headers_have_no_prefix_and_a_slash_for_folders():
    content = member(b"cat/", kind=b"\0", magic=b"") + member(b"cat/1.png", b"1", b"\0", magic=b"")
    content += member(b"b.png", b"2", magic=b"ustar  ", prefix=b"14000000000")  # GNU: a time
    assert find(content + END) == [("cat/1.png", 1024, 1), ("b.png", 2048, 1)]


def test_old_checksums_of_signed_bytes_are_right_too():
    block = bytearray(header("ä.png".encode()))
    block[148:156] = b"%06o\0 " % (int(block[148:154], 8) - 512)  # two bytes above 127
    assert find(bytes(block) + END) == [("ä.png", 512, 0)]


def test_a_tar_inside_another_is_found_from_its_start_to_its_end():
    inner = tar_of({"a.png": b"1"})
    outer = b"?" * 77 + inner + b"?" * 1000
    assert find(outer, 77, 77 + len(inner)) == [("a.png", 77 + 512, 1)]
    with pytest.raises(InputError, match="cut off"):
        find(outer, 77, 77 + 600)


def test_hidden_files_and_those_in_hidden_folders_are_left_out():
    names = ["a/.b.png", "._a.png", ".cache/a.png", "./.x/a.png", "a/./b.png", "a..png"]
    assert [name for name, *_ in find(tar_of(dict.fromkeys(names, b"")))] == ["a/b.png", "a..png"]


# ---- hostile ----------------------------------------------------------------------------------

GOOD = member(b"b.png", b"2")
NOISE = np.random.default_rng(0).bytes(999)


def raw_name(name: bytes) -> bytes:
    return member(b"name", name + b"\0", b"L") + member(b"short")


HOSTILE = [
    (b"", "without the end mark"),
    (b"hello " * 1000, "is not a tar file"),
    (gzip.compress(NOISE, mtime=0), "is compressed by gzip"),
    (lzma.compress(NOISE), "is compressed by xz"),
    (member(b"a.png", b"1" * 600)[:-600], r"a\.png: has 600 bytes, but the tar ends after 424"),
    (member(b"a.png", b"1"), "without the end mark"),
    (GOOD + b"?" * 512 + END, r"header at byte 1024 is damaged \(its checksum"),
    (GOOD + END + GOOD + END, "more behind its end mark at byte 1024"),
    (member(b"../a.png") + END, r"\.\./a\.png: leads out of the tar"),
    (member(b"a/..", kind=b"5") + END, "leads out"),
    (member(b"/etc/passwd") + END, "leads out"),
    (pax(path=b"../a.png") + member(b"a.png") + END, "leads out"),
    (raw_name(b"../a.png") + END, "leads out"),
    (member(b"a.png", kind=b"1") + END, r"a\.png: is a hard link"),
    (member(b"a.png", kind=b"2") + END, "is a symbolic link"),
    (member(b"a.png", kind=b"3") + END, "is a device"),
    (member(b"a.png", kind=b"Z") + END, "unknown type b'Z'"),
    (pax(GNU_sparse_major=b"1") + member(b"a.png") + END, "is a sparse file"),
    (header(b"a.png", b"\xff" * 12) + END, "its size is no octal number"),
    (header(b"a.png", b"89") + END, "its size is no octal number"),
    (header(b"a.png", b"\x80" + b"\xff" * 11) + END, "but the tar ends after 1024"),
    (header(b"a", 5, b"5") + bytes(512) + END, "a folder of 5 bytes"),
    (header(b"x", 8**11 - 1, b"L") + END, "announces 8589934591 bytes .* at most 65536"),
    (raw_name(b"a" * 5000) + END, "a name of 5000 bytes, expected at most 4096"),
    (member(b"x", b"99 path=a\n", b"x") + member(b"a") + END, "pax header at byte 0 is damage"),
    (member(b"x", b"3 \n", b"x") + member(b"a") + END, "pax header at byte 0 is damaged"),
    (pax(size=b"-1") + member(b"a") + END, "pax header at byte 0 is damaged"),
    (pax(size=b"9" * 4500) + member(b"a") + END, "pax header at byte 0 is damaged"),
    (member(b"x", pax_records(path=b"a"), b"g") + END, "gives all members one path"),
    (pax(path=b"b") + raw_name(b"a") + END, "given two names or sizes"),
    (pax(path=b"b") + END, "whose member is missing"),
    (member(b"a.png") + GOOD + member(b"a.png") + END, r"a\.png: is there 2 times"),
    (member(b"a.png") + member(b"./a.png") + END, r"a\.png: is there 2 times"),
    (member(b"caf\xe9.png") + END, r"caf\\xe9\.png: has control characters .* not UTF-8"),
    (member(b"a\x1b[2J.png") + END, r"a\\x1b\[2J\.png: has control characters"),
    (member(b"") + END, "has no name"),
]


def test_hostile_tars_are_refused_by_name_and_reason():
    check_refusals(HOSTILE, find, "^x.tar: .*")
