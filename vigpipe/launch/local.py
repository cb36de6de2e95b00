"""Start all ranks on this host, so that the command that srun runs on a cluster runs on a laptop.

It takes seconds to import torch. Ranks are therefore forked from one server process that imports it
while this process imports what it needs for its own checks.
"""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import Any, NoReturn

from vigpipe.errors import PEER_LOST, SAVED
from vigpipe.launch import fork_server
from vigpipe.launch.environment import FOLDER_VARIABLE, LAUNCHER_VARIABLE
from vigpipe.launch.failures import SAVED_FILE, read_failures
from vigpipe.launch.second_signal import SAME_SECONDS, left_to_handlers
from vigpipe.launch.signals import STOPPING, Stopped, deferred_signals, handled_signals
from vigpipe.launch.watchdog import LostRanks, kill_ranks, watch
from vigpipe.messages import tell

_SERVER_GONE = 255  # multiprocessing's exit code of processes whose fork server has ended
COMMAND_LINE = "vigpipe.cli:main"  # the function that the ranks of a command run


def preload(*modules: str) -> None:
    """Let the server that ranks are forked from import modules; return at once."""
    fork_server.start_fork_server(modules)


def start_local(world_size: int, main: str, arguments: Sequence[str], threads: int) -> int:
    """Run `main(arguments)` as world_size ranks on this host, and wait for them.

    torchrun's agent starts and ends the ranks. They meet through files in a private folder, so the
    only open ports are gloo's own on loopback.

    Args:
        world_size: number of ranks.
        main: a function as "module:function", so that this package does not depend on the command
            line; it takes a list of arguments and returns the rank's exit code.
        arguments: the arguments of main.
        threads: value of OMP_NUM_THREADS for the ranks.

    Returns:
        0 if every rank returned 0; SAVED if the ranks stopped with a checkpoint because they or
        this launcher were asked to; else the code of the first rank that failed by itself, or
        128 + n if signal n ended a rank or this launcher. A second signal kills the ranks, which
        otherwise have half a minute to end.
    """
    fork_server.start_fork_server()
    folder = Path()

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        asked_at = time.monotonic()

        def end_ranks(again: int, frame: FrameType | None) -> None:
            if again == signal.SIGINT or time.monotonic() - asked_at > SAME_SECONDS:
                kill_ranks(folder, world_size)  # which may be stuck; the clean-up goes on

        for number in STOPPING:
            signal.signal(number, end_ranks)
        raise Stopped(signum)

    with left_to_handlers(), handled_signals(STOPPING, stop):
        try:
            with contextlib.ExitStack() as stack:
                with deferred_signals():
                    temporary = tempfile.TemporaryDirectory(prefix="vigpipe-")  # mode 0700
                    folder = Path(stack.enter_context(temporary))
                try:
                    return _start_agent(world_size, main, arguments, threads, folder)
                except Stopped as stopped:
                    return SAVED if (folder / SAVED_FILE).exists() else 128 + stopped.signum
        except Stopped as stopped:
            return 128 + stopped.signum


def _start_agent(
    world_size: int,
    main: str,
    arguments: Sequence[str],
    threads: int,
    folder: Path,
) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("distributed.elastic", "distributed.launcher", "multiprocessing"):
        logging.getLogger(f"torch.{name}").addHandler(logging.NullHandler())
        logging.getLogger(f"torch.{name}").propagate = False  # the ranks print their own errors
    # It counts the GPUs, to bind ranks to the cores near them: not through CUDA.
    with _environment({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world_size,
            run_id=folder.name,
            rdzv_backend="c10d",
            rdzv_endpoint=str(folder / "agent"),
            rdzv_configs={"store_type": "file"},
            max_restarts=0,
            local_addr="127.0.0.1",  # avoids a look-up of this host's name
            logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
            signals_to_handle="",  # start_local has its own handlers
            start_method="forkserver",
        )
    variables = {
        FOLDER_VARIABLE: str(folder),
        LAUNCHER_VARIABLE: str(os.getpid()),
        "OMP_NUM_THREADS": str(threads),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # otherwise the agent opens a port for a store
    }
    has_ended, lost_ranks = threading.Event(), LostRanks()
    watcher = threading.Thread(target=watch, args=(folder, world_size, has_ended, lost_ranks))
    watcher.start()
    try:
        with _environment(variables):
            elastic_launch(config, _rank)(main, list(arguments), variables)
    except ChildFailedError as error:
        exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        has_ended.set()
        watcher.join()
        return _root_cause(exit_codes, read_failures(folder, folder.name), lost_ranks)
    finally:
        has_ended.set()
        watcher.join()
    return 0


def _rank(main: str, arguments: list[str], variables: Mapping[str, str]) -> None:
    os.environ.update(variables)  # the fork server was started before they were set
    code = resolve_name(main)(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)


def _root_cause(
    exit_codes: Mapping[int, int], records: Sequence[Mapping[str, Any]], lost_ranks: LostRanks
) -> int:
    """Choose the exit code of a failed world, and print a cause that no rank could print.

    Args:
        exit_codes: exit codes by rank, of the ranks that the agent saw end first.
        records: records of the ranks that failed, earliest first.
        lost_ranks: ranks that could not leave a record.
    """
    causes = [record for record in records if record["kind"] == "own"]
    if causes:
        return causes[0]["code"]
    if _SERVER_GONE in exit_codes.values():
        tell("the process that ranks are forked from has ended, and so have they; out of memory?")
        return PEER_LOST
    for rank in sorted(lost_ranks.frozen):
        tell(f"rank {rank} answered no more, and was killed; was it stopped?")
        return PEER_LOST
    first, code = next(iter(exit_codes.items()))
    # The agent ends the remaining ranks with SIGTERM, so any other signal came first.
    killed = {r: -c for r, c in exit_codes.items() if c < 0 and -c != signal.SIGTERM}
    killed = killed or {r: -exit_codes.get(r, -signal.SIGKILL) for r in sorted(lost_ranks.gone)}
    if not killed and code < 0:
        killed = {first: -code}
    for rank, number in killed.items():
        hint = "; out of memory?" if number == signal.SIGKILL else ""
        tell(f"rank {rank} was ended by {signal.Signals(number).name}{hint}")
        return 128 + number
    for record in records:  # the launcher cannot see which rank was lost
        tell(f"rank {record['rank']} lost a peer: {record['message']}")
        return record["code"]
    return code


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
