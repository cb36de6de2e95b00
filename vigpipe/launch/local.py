"""Start all ranks on this host, so that the command that srun runs on a cluster runs on a laptop.

One server imports torch, which takes seconds, while this process checks; ranks are its forks.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import NoReturn

from vigpipe.errors import DONE, INTERRUPTED, SAVED
from vigpipe.launch import fork_server
from vigpipe.launch.environment import FOLDER_VARIABLE, LAUNCHER_VARIABLE
from vigpipe.launch.failures import SAVED_FILE
from vigpipe.launch.parent_death import die_with_fork_server
from vigpipe.launch.processes import RankProcesses
from vigpipe.launch.second_signal import SAME_SECONDS, left_to_handlers
from vigpipe.launch.signals import (
    STOPPING,
    Stopped,
    deferred_signals,
    handled_signals,
    leave_ignored,
)
from vigpipe.launch.supervisor import Supervisor


def preload(main: str, *modules: str) -> None:
    """Let the server that ranks are forked from import modules and `main`'s; return at once."""
    fork_server.start_fork_server((main.partition(":")[0], *modules))


def start_local(
    world_size: int,
    main: str,
    arguments: Sequence[str],
    threads: int,
    replicas: Sequence[Sequence[int]] = (),
) -> int:
    """Run `main(arguments)` as world_size ranks on this host, and wait for them.

    The ranks meet through files in a private folder, so the only open ports are gloo's own on
    loopback. Ctrl-C is handed on, and the ranks take their time to save; other signals give them
    half a minute to end. A second signal kills them. `main`, "module:function", returns a rank's
    exit code. `Supervisor` tells of `replicas`.

    Returned is 0 if every rank returned 0, but for those of lost replicas; SAVED if the ranks
    stopped with a checkpoint because they or this launcher were asked to, and INTERRUPTED if that
    was by Ctrl-C; else the code of the first rank that failed by itself, or 128 + n if signal n
    ended a rank or this launcher.

    Raises:
        KeyboardInterrupt: Ctrl-C has ended the ranks, and they have not saved.
    """
    server = fork_server.start_fork_server()
    ranks = RankProcesses()

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        asked_at = time.monotonic()

        def end_ranks(again: int, frame: FrameType | None) -> None:
            is_person = again == signal.SIGINT != signum
            if is_person or time.monotonic() - asked_at > SAME_SECONDS:
                ranks.kill()  # they may be stuck; the clean-up goes on

        for number in STOPPING:
            leave_ignored(number, end_ranks)
        raise Stopped(signum)

    with left_to_handlers(), handled_signals(STOPPING, stop):
        try:
            with contextlib.ExitStack() as stack:
                with deferred_signals():
                    folder = Path(stack.enter_context(_private_folder()))
                calls = [
                    (main, list(arguments), _variables(rank, world_size, threads, folder))
                    for rank in range(world_size)
                ]
                supervisor = Supervisor(ranks, folder, replicas)
                stack.callback(ranks.end)
                try:
                    with fork_server.marked():  # if the server has ended, another one is started
                        ranks.start(server, _run, calls)
                    supervisor.wait()
                    ranks.end()
                    return supervisor.exit_code()
                except Stopped as stopped:
                    ranks.end(signal.Signals(stopped.signum))  # what is left of them
                    if supervisor.is_done(world_size):
                        return DONE  # the last step had been taken
                    return _code_of_stopped(stopped, folder, supervisor)
        except Stopped as stopped:
            if stopped.signum == signal.SIGINT:
                raise KeyboardInterrupt from None
            return 128 + stopped.signum


def _private_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder of mode 0700 within the fork server's, which is removed if this is killed."""
    return tempfile.TemporaryDirectory(prefix=f"vigpipe-{os.getpid()}-", dir=util.get_temp_dir())


def find_ranks(launcher: int) -> dict[int, int]:
    """Return the process ids of the ranks of a launcher whose TMPDIR is this one's, by rank."""
    pids: dict[int, int] = {}
    for private in fork_server.folder_for_sockets().glob("pymp-*"):
        with contextlib.suppress(OSError, ValueError):  # something has just been removed
            if private.lstat().st_uid != os.getuid():  # others may have folders of this name
                continue
            for path in private.glob(f"vigpipe-{launcher}-*/rank*.pid"):
                pids[int(path.stem.removeprefix("rank"))] = int(path.read_text())
    return pids


def _code_of_stopped(stopped: Stopped, folder: Path, supervisor: Supervisor) -> int:
    """Return the exit code of ranks whose launcher was asked to stop, or raise that again."""
    is_interrupted = stopped.signum == signal.SIGINT
    if (folder / SAVED_FILE).exists():
        return INTERRUPTED if is_interrupted else SAVED
    supervisor.tell_of_killed()
    if is_interrupted:
        raise stopped
    return 128 + stopped.signum


def _variables(rank: int, world_size: int, threads: int, folder: Path) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        FOLDER_VARIABLE: str(folder),
        LAUNCHER_VARIABLE: str(os.getpid()),
        "OMP_NUM_THREADS": str(threads),
    }


def _run(main: str, arguments: list[str], variables: Mapping[str, str]) -> None:
    """Call main as a rank, in a fork of the server."""
    die_with_fork_server()
    # Ctrl-C ends this fork, which has nothing to tell, until it trains, and saves first.
    leave_ignored(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # the server has blocked it
    os.environ.update(variables)
    if not Path(variables[FOLDER_VARIABLE]).is_dir():
        return  # the launcher was stopped while the server had yet to make this fork
    faulthandler.enable()  # a rank that crashes in C code prints where
    code = resolve_name(main)(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
