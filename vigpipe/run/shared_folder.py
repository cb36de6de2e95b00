"""Check that all hosts of a run share its folder, where each of their ranks writes."""

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from vigpipe.errors import InputError
from vigpipe.launch.environment import Launch
from vigpipe.messages import tell
from vigpipe.parallel.agreement import run_with_heartbeats
from vigpipe.parallel.values import all_gather_values, broadcast_value

_PATIENCE_SECONDS = 30.0  # within which a host must see what another one has written
_NOTE_SECONDS = 5.0
_LOOK_SECONDS = 0.1


def check_shared(folder: Path, launch: Launch) -> None:
    """Raise InputError, the same on all ranks, unless all hosts see and write the same folder.

    All ranks call this. The first rank of each host writes a file. When all have, rank 0 looks for
    those of all hosts, and the others for that of rank 0: nobody looks before a file is there, as
    NFS would remember for a minute that it is not.
    """
    if launch.is_local:
        return
    world_size = launch.world_size
    token = broadcast_value(secrets.token_hex(8), world_size)
    here = socket.gethostname() if launch.local_rank == 0 else ""

    def marker(rank: int) -> Path:
        return folder / f".seen-{token}-{rank}"

    try:
        problem = _write(marker(launch.rank), folder, here) if here else ""
        facts = all_gather_values({"host": here, "problem": problem}, world_size)
        hosts = [fact["host"] for fact in facts]
        problems = [fact["problem"] for fact in facts if fact["problem"]]
        if not problems:
            others = range(1, world_size) if launch.rank == 0 else range(1)
            host_of = {marker(rank): hosts[rank] for rank in others if here and hosts[rank]}
            look = partial(_look, folder, here, host_of)
            # It may take longer than --timeout.
            problems = list(
                filter(None, all_gather_values(run_with_heartbeats(look, world_size), world_size))
            )
    finally:
        with contextlib.suppress(OSError):
            marker(launch.rank).unlink()
    if problems:
        raise InputError(f"--out {folder}: {problems[0]}; choose a folder that all hosts share")


def _write(own: Path, folder: Path, here: str) -> str:
    """Write the file of this host; return what is wrong, empty if nothing is."""
    try:
        for place in (*reversed(folder.parents), folder):
            if not place.is_dir() and not _is_made_elsewhere(place):
                return f"is not there on {here}"
        own.touch(exist_ok=False)
    except OSError as error:
        return f"{here} cannot write there ({error.strerror or error})"
    return ""


def _is_made_elsewhere(place: Path) -> bool:
    """Whether a folder is there that this host does not see yet: it cannot be made again."""
    try:
        place.mkdir()
    except FileExistsError:
        return True
    place.rmdir()
    return False


def _look(folder: Path, here: str, host_of: Mapping[Path, str]) -> str:
    """Look for files of other hosts; return what is wrong, empty if nothing is."""
    began, has_told = time.monotonic(), False
    for path, host in host_of.items():
        while not os.path.lexists(path):
            waited = time.monotonic() - began
            if waited > _PATIENCE_SECONDS:
                return f"{here} does not see what {host} has written there"
            if waited > _NOTE_SECONDS and not has_told:
                has_told = True
                tell(f"note: {here} waits to see in {folder} what {host} has written there")
            time.sleep(_LOOK_SECONDS)
    return ""
