"""A graph whose features are more than memory trains and is evaluated."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.world import run_command

_MEMORY = Path("/sys/fs/cgroup/memory")  # version 1 of control groups
_UNIFIED = Path("/sys/fs/cgroup")  # version 2
LIMIT = 800 << 20
FEATURES = 120_000 * 2_000 * 4  # bytes; the process takes some 500 MB besides


@pytest.fixture
def group():
    """Make a control group whose processes have LIMIT bytes of memory, and return its folder."""
    name = f"vigpipe-test-{os.getpid()}"
    unified = _UNIFIED / "cgroup.subtree_control"
    try:
        if _MEMORY.is_dir():
            folder, limit = _MEMORY / name, "memory.limit_in_bytes"
        elif "memory" in unified.read_text().split():
            folder, limit = _UNIFIED / name, "memory.max"
        else:
            pytest.skip("no control groups for memory")
        folder.mkdir()
        (folder / limit).write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"control groups may not be made ({error.strerror})")
    yield folder
    folder.rmdir()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Write a folder, and leave no page of it in memory, so that who reads it pays for it."""
    folder = tmp_path_factory.mktemp("prepared") / "f"
    words = ["dataset", "prepare", "sbm:120000,4,2000,4", str(folder), "--partition", "random"]
    line = [sys.executable, "-m", "vigpipe", *words, "--parts", "100"]
    done = run_command(line)  # which takes half a GB
    assert done.returncode == 0, done.stderr
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.heavy
def test_features_beyond_the_limit_of_a_control_group(prepared, group, tmp_path):
    assert FEATURES > LIMIT
    line = [sys.executable, "-m", "vigpipe", "train", "--model", "sage", "--width", "8", "--data"]
    line += [str(prepared), "--sampler", "parts", "--steps", "20", "--out", "out", "--threads", "1"]
    joined = ["sh", "-c", f'echo $$ > {group / "cgroup.procs"} && exec "$@"', "sh", *line]
    done = subprocess.run(joined, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["steps"] == 20
    assert summary["test"]["accuracy"] > 0.9
