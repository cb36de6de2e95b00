"""One Slurm of pretend nodes for all tests of this folder."""

import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.small_digits import among_small_digits
from tests.small_model import whole_model
from tests.world import ROOT, wait_until

LOCAL = ROOT / "slurm" / "local.sh"


def free_ports(count: int) -> int:
    """Find the first of `count` neighbouring ports that are free on loopback."""
    for first in range(17000, 30000, count):
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def skip_without_slurm() -> None:
    installed = all(map(shutil.which, ("srun", "slurmctld", "slurmd", "munged")))
    if not installed and not os.environ.get("CI"):
        pytest.skip("Slurm is not installed; with CI=true and as root this installs it")


@pytest.fixture(scope="session")
def cluster():
    """Environment variables of a Slurm of two nodes, which ends with the session."""
    skip_without_slurm()
    # Not below pytest's own folder: munged wants a socket that every user could reach.
    folder = Path(tempfile.mkdtemp(prefix="vigpipe-slurm-"))
    env = {
        "SLURM_LOCAL_DIR": str(folder),
        "SLURM_LOCAL_PORT": str(free_ports(3)),
        "SLURM_LOCAL_NODES": "2",
        "SLURM_LOCAL_CPUS": "8",
        "SLURM_LOCAL_KILLWAIT": "30",  # what Slurm comes with: a busy machine needs it
        "SLURM_CONF": str(folder / "slurm.conf"),
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    run = ["bash", str(LOCAL)]
    try:
        with (folder / "start.log").open("w") as log:  # the daemons would keep a pipe open
            started = subprocess.run(
                [*run, "start"], env={**os.environ, **env}, stdout=log, stderr=log
            )
        assert started.returncode == 0, (folder / "start.log").read_text()
        yield env
    finally:
        (folder / "start.log").unlink()
        subprocess.run([*run, "wipe"], env={**os.environ, **env}, check=True)


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
