"""Hosts with an address and a name each: those of slurm/hosts.sh, host1 and so on."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.world import ROOT

HOSTS = str(ROOT / "slurm" / "hosts.sh")
PORT = "29600"
# torchrun on two hosts, which meet on the first.
TORCHRUN = ("-m", "torch.distributed.run", "--nnodes", "2", "--rdzv-backend", "c10d")
TORCHRUN += ("--rdzv-endpoint", f"host1:{PORT}", "--rdzv-id", "x")


def on_host(number: int) -> tuple[str, ...]:
    """Return the words with which a command of Python begins that runs on a host, from 1."""
    return HOSTS, "run", f"host{number}", sys.executable


def ranks_by_hand(ranks_a_host: Sequence[int]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the host of each rank, of so many on each, and the variables that tell its place."""
    rank = 0
    for host, count in enumerate(ranks_a_host, 1):
        for local_rank in range(count):
            yield (
                host,
                {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(sum(ranks_a_host)),
                    "LOCAL_RANK": str(local_rank),
                    "LOCAL_WORLD_SIZE": str(count),
                    "MASTER_ADDR": "host1",
                    "MASTER_PORT": PORT,
                },
            )
            rank += 1


def skip_without(stderr: str) -> None:
    """Skip a test if hosts could not be started because there may be none here."""
    if "allows no namespaces" in stderr or "needs root" in stderr:
        pytest.skip(stderr.strip())


def skip_without_nft() -> None:
    """Skip a test of what slurm/hosts.sh does with nftables where there is none."""
    if shutil.which("nft", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        pytest.skip("nft is missing: install Debian's nftables")


@contextlib.contextmanager
def some_hosts(folder: Path, *options: str, count: int = 2) -> Iterator[dict[str, str]]:
    """Start hosts with options of slurm/hosts.sh; yield the variables that name them."""
    variables = {"VIGPIPE_HOSTS_DIR": str(folder / "hosts")}
    environment = os.environ | variables
    line = [HOSTS, "start", str(count), "--until", str(os.getpid()), *options]
    started = subprocess.run(line, env=environment, capture_output=True, text=True)
    skip_without(started.stderr)
    assert started.returncode == 0, started.stderr
    try:
        yield variables
    finally:
        change(variables, "stop")


def change(hosts: Mapping[str, str], *words: str) -> str:
    """Call slurm/hosts.sh with those variables besides, and return what it prints."""
    line, variables = [HOSTS, *words], os.environ | hosts
    return subprocess.run(line, env=variables, check=True, capture_output=True, text=True).stdout
