"""Hosts with an address and a name each: those of slurm/hosts.sh, host1 and so on."""

import sys
from collections.abc import Iterator, Sequence

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
