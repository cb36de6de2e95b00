"""One Slurm of pretend nodes for all tests of this folder."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import skip_without
from tests.small_digits import among_small_digits
from tests.small_model import whole_model
from tests.world import ROOT, free_ports, wait_until

LOCAL = ROOT / "slurm" / "local.sh"


@contextlib.contextmanager
def started_cluster(num_nodes: int, *words: str, **more: str) -> Iterator[dict[str, str]]:
    """Start slurm/local.sh with words and variables; yield the variables of its commands."""
    installed = all(map(shutil.which, ("srun", "slurmctld", "slurmd", "munged")))
    if not installed and not os.environ.get("CI"):
        pytest.skip("Slurm is not installed; with CI=true and as root this installs it")
    # Not below pytest's own folder: munged wants a socket that every user could reach.
    folder = Path(tempfile.mkdtemp(prefix="vigpipe-slurm-"))
    env = {
        "SLURM_LOCAL_DIR": str(folder),
        "SLURM_LOCAL_PORT": str(free_ports(num_nodes + 1)),
        "SLURM_CONF": str(folder / "slurm.conf"),
        **more,
    }
    run, log = ["bash", str(LOCAL)], folder / "start.log"
    try:
        with log.open("w") as file:  # the daemons would keep a pipe open
            line, variables = [*run, "start", *words], {**os.environ, **env}
            started = subprocess.run(line, env=variables, stdout=file, stderr=file)
        skip_without(log.read_text())
        assert started.returncode == 0, log.read_text()
        yield env
    finally:
        log.unlink()
        subprocess.run([*run, "wipe"], env={**os.environ, **env}, check=True)


@pytest.fixture(scope="session")
def cluster():
    """Environment variables of a Slurm of two nodes, which ends with the session."""
    with started_cluster(
        2,
        SLURM_LOCAL_NODES="2",
        SLURM_LOCAL_CPUS="8",
        SLURM_LOCAL_KILLWAIT="30",  # what Slurm comes with: a busy machine needs it
        MASTER_ADDR="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
    ) as env:
        yield env


@pytest.fixture(scope="module", autouse=True)
def _data(tmp_path_factory):
    with among_small_digits(tmp_path_factory.mktemp("data")), whole_model():
        yield


@pytest.fixture
def slurm(cluster):
    """The same; jobs that a test leaves behind are cancelled: that of a killed srun holds nodes."""
    yield cluster
    env = {**os.environ, **cluster}

    def jobs() -> list[str]:
        listed = ["squeue", "--noheader", "--format=%i"]
        return subprocess.run(listed, env=env, capture_output=True, text=True).stdout.split()

    if left := jobs():
        subprocess.run(["scancel", *left], env=env, check=True)
        wait_until(lambda: not jobs(), f"jobs {left} are gone")
