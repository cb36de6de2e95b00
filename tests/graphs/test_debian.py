"""The lists of apt are read as Debian's policy describes them, and become one graph, always."""

import bz2
import gzip
import hashlib
import lzma
import os
import shutil
import subprocess

import numpy as np
import pytest

from vigpipe.errors import InputError
from vigpipe.graphs import debian
from vigpipe.graphs.debian import Package, make_arrays, read_packages
from vigpipe.graphs.graph import TEST, TRAIN, VALIDATION

TEXT = """\
Package: a
Version: 2
Section: contrib/net
Depends: b (>= 1) | c:any, libd1 [amd64] <!nocheck>,
 g++ (<< 2),e
Suggests: z
Pre-Depends: f
Description: The tool a, für C# and C++
 Depends: lines of the long description
Description-md5: 0

Package: b
Source: a (1.0)
Section: libs
Recommends: a|b

Package: a
Version: 1
Depends: old
Description: old
"""
PACKAGES = {
    "a": Package("a", "net", "The tool a, für C# and C++", ("b", "c", "libd1", "g++", "e", "f")),
    "b": Package("a", "libs", "", ("a", "b")),
}
NAME = "deb.debian.org_dists_bookworm_main_binary-amd64_Packages"


PACKED = [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)]


@pytest.mark.parametrize(("ending", "pack"), [("", bytes), *PACKED])
def test_a_list_is_read(ending, pack, tmp_path):
    (tmp_path / f"{NAME}{ending}").write_bytes(pack(TEXT.encode()))
    (tmp_path / f"{NAME}.diff_Index").write_text("Package: c\n")
    (tmp_path / "InRelease").write_text("Package: c\n")
    assert read_packages(tmp_path) == PACKAGES


@pytest.mark.skipif(not shutil.which("lz4"), reason="no lz4 here")
@pytest.mark.skipif(not shutil.which(debian._APT), reason="no apt here")
def test_a_list_is_read_as_apt_keeps_it(tmp_path):
    path = tmp_path / f"{NAME}.lz4"
    path.write_bytes(subprocess.run(["lz4"], input=TEXT.encode(), capture_output=True).stdout)
    assert read_packages(tmp_path) == PACKAGES


@pytest.mark.parametrize(("ending", "pack"), PACKED)
def test_a_damaged_list_is_one_sentence(ending, pack, tmp_path):
    path = tmp_path / f"{NAME}{ending}"
    packed = pack(np.random.default_rng(0).bytes(500))
    for content in (packed[:-20], packed[:90] + bytes(100) + packed[190:]):
        path.write_bytes(content)
        message = f"^{path}: cannot be decompressed .*; run apt-get update"
        with pytest.raises(InputError, match=message):
            read_packages(tmp_path)


def test_of_several_lists_the_first_by_name_counts(tmp_path):
    (tmp_path / f"a_{NAME}").write_text("Package: a\nSection: first\n")
    (tmp_path / f"b_{NAME}").write_text("Package: a\nSection: other\n\nPackage: c\n")
    packages = read_packages(tmp_path)
    assert list(packages) == ["a", "c"]
    assert packages["a"].section == "first"


@pytest.mark.parametrize("ending", ["", ".gz", ".xz", ".bz2", ".lz4"])
def test_what_is_no_list_is_one_sentence(ending, tmp_path, monkeypatch):
    message = r"holds no lists of packages \(\*_Packages\*\); run apt-get"
    with pytest.raises(InputError, match=message):
        read_packages(tmp_path)
    (tmp_path / f"{NAME}{ending}").write_bytes(b"\0damage")
    monkeypatch.setattr(debian, "_APT", "/bin/false")
    with pytest.raises(InputError, match="run apt-get update"):
        read_packages(tmp_path)


def test_a_pipe_a_device_and_a_list_without_end_are_one_sentence(tmp_path, monkeypatch):
    path = tmp_path / NAME

    def pipe():
        os.mkfifo(path)

    for make in (pipe, lambda: path.symlink_to("/dev/zero"), path.mkdir):
        make()
        with pytest.raises(InputError, match="is not a regular file"):
            read_packages(tmp_path)
        path.rmdir() if path.is_dir() else path.unlink()
    monkeypatch.setattr(debian, "_MOST_BYTES", 1 << 20)
    for ending, pack in [("", bytes), *PACKED]:
        large = tmp_path / f"{NAME}{ending}"
        large.write_bytes(pack(bytes(1 << 21)))
        with pytest.raises(InputError, match="unpacks to more than 1048576 bytes"):
            read_packages(tmp_path)
        large.unlink()


def distribution(num_packages=600):
    """Packages of three large sections and a small one, three of each source."""
    return {
        f"p{i}": Package(
            source=f"s{i // 3}",
            section="small" if i < 9 else ("net", "libs", "libs", "")[i // 3 % 4],
            description=f"The p{i} tool no-{i % 50} for C#, x86",
            needs=(f"p{i}", f"p{i * 7 % 600}", "p1", "p1", "absent"),
        )
        for i in range(num_packages)
    }


def test_the_arrays_are_what_the_lists_say():
    packages = distribution()
    arrays = make_arrays(packages)
    names = arrays["names"].tolist()
    assert names == sorted(packages)
    assert arrays["classes"].tolist() == ["libs", "net"]  # the largest first
    edges = set()
    for name, package in packages.items():
        edges |= {(name, other) for other in package.needs if other in packages and other != name}
    ends = [[names[i] for i in arrays[part]] for part in ("edge_src", "edge_dst")]
    assert sorted(zip(*ends, strict=True)) == sorted(edges)
    for i, name in enumerate(names):
        label = arrays["y"][i]
        section = packages[name].section
        assert (arrays["classes"][label] if label >= 0 else "") == section.replace("small", "")
        row = arrays["x_indices"][arrays["x_indptr"][i] : arrays["x_indptr"][i + 1]]
        words = ("the", "tool", f"no-{int(name[1:]) % 50}", "for", "c#", "x86")
        digests = (hashlib.md5(word.encode()).digest() for word in words)
        expected = sorted({int.from_bytes(digest, "little") % 512 for digest in digests})
        assert row.tolist() == expected
    assert arrays["x_shape"].tolist() == [600, 512]


def test_the_packages_of_a_source_are_in_one_part_of_the_split():
    arrays = make_arrays(distribution(6000))
    parts = {}
    for name, label, part in zip(arrays["names"], arrays["y"], arrays["split"], strict=True):
        if label < 0:
            assert part == -1
        else:
            parts.setdefault(int(name[1:]) // 3, set()).add(int(part))
    assert all(len(part) == 1 for part in parts.values())
    shares = np.bincount([part.pop() for part in parts.values()]) / len(parts)
    np.testing.assert_allclose(shares[[TRAIN, VALIDATION, TEST]], (0.6, 0.2, 0.2), atol=0.04)


def test_a_section_of_one_source_is_no_class_if_that_is_not_for_training():
    sources = {part: f"s{i}" for i in range(50) for part in (debian._part(f"s{i}"),)}
    packages = {
        f"{part}-{i}": Package(source, f"section{part}", "", ())
        for part, source in sources.items()
        for i in range(100)
    }
    assert set(sources) == {TRAIN, VALIDATION, TEST}
    assert make_arrays(packages)["classes"].tolist() == [f"section{TRAIN}"]


def test_a_few_packages_are_no_graph_to_train_on():
    message = "of 50 packages, no section has 100 or more to be a class"
    with pytest.raises(InputError, match=message):
        make_arrays(distribution(50))
