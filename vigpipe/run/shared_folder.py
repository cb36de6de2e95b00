"""Check that all hosts of a run share its folder, where each of their ranks writes."""

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from vigpipe.errors import InputError
from vigpipe.launch.environment import Launch
from vigpipe.messages import tell
from vigpipe.parallel.agreement import run_with_heartbeats
from vigpipe.parallel.values import all_gather_values, broadcast_value

PATIENCE_SECONDS = 30.0  # within which a host must see what another one has written
_NOTE_SECONDS = 5.0
_LOOK_SECONDS = 0.1


def check_shared(folder: Path, launch: Launch) -> None:
    """Raise InputError, the same on all ranks, unless all hosts see and write the same folder.

    All ranks call this. The first rank of each host writes a file; rank 0 looks for those of all
    hosts, and the others for that of rank 0.
    """
    if launch.is_local:
        return
    token = broadcast_value(secrets.token_hex(8), launch.world_size)
    here = socket.gethostname() if launch.local_rank == 0 else ""
    hosts = all_gather_values(here, launch.world_size)
    others = [rank for rank in range(launch.world_size) if hosts[rank]] if launch.rank == 0 else [0]

    def marker(rank: int) -> Path:
        return folder / f".seen-{token}-{rank}"

    problem = run_with_heartbeats(
        lambda: _problem(folder, marker, launch.rank, hosts, others), launch.world_size
    )
    problems = [p for p in all_gather_values(problem, launch.world_size) if p]
    if here:
        with contextlib.suppress(OSError):
            marker(launch.rank).unlink()
    if problems:
        # What another host says is more exact than that rank 0 does not see it.
        raise InputError(f"--out {folder}: {problems[-1]}; choose a folder that all hosts share")


def _problem(
    folder: Path,
    marker: Callable[[int], Path],
    rank: int,
    hosts: Sequence[str],
    others: Sequence[int],
) -> str:
    """Write this host's file, and look for those of others; return what is wrong, empty if none."""
    if not hosts[rank]:
        return ""
    began, has_told = time.monotonic(), False

    def has_time(what: str) -> bool:
        nonlocal has_told
        waited = time.monotonic() - began
        if waited > _NOTE_SECONDS and not has_told:
            has_told = True
            tell(f"note: {hosts[rank]} waits to see in {folder} {what}")
        time.sleep(_LOOK_SECONDS)
        return waited < PATIENCE_SECONDS

    while True:
        try:
            marker(rank).touch(exist_ok=False)
            break
        except FileNotFoundError:
            if not has_time(f"what {hosts[0]} has written there"):
                return f"is not there on {hosts[rank]}, but on {hosts[0]}"
        except OSError as error:
            return f"{hosts[rank]} cannot write there ({error.strerror or error})"
    for other in others:
        what = f"what {hosts[other]} has written there"
        while not os.path.lexists(marker(other)):
            if not has_time(what):
                return f"{hosts[rank]} does not see {what}"
    return ""
