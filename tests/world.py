"""Start ranks and commands from a test, and leave none of them behind.

`run_ranks` and `start_command` fork ranks and Python commands from one server process that has
imported torch already (tests/warm.py), so that they cost tenths of a second.
"""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.small_model import take_model
from tests.warm import TOKEN_VARIABLE, ForkedPython, means_python, server, start_python

ROOT = Path(__file__).parents[1]
GUARD = 300.0  # seconds to wait for an event; nothing takes as long, however busy the machine is
PROMPT = 25.0  # seconds for what is left to end; ranks wait a minute for silent peers
_EXITING = 4  # PF_EXITING of Linux, in a process's flags
CAUSE_SECONDS = 2.0  # after one rank has failed, how long the others may take to tell why


class RankFailed(RuntimeError):
    """A rank raised; the text holds its number and its own traceback."""


# ---- worlds of ranks ------------------------------------------------------------------------


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = GUARD
) -> list[Any]:
    """Call function(rank, world_size, *args) on every rank of a gloo world.

    Args:
        function: a module-level function; torch.distributed is initialised when it is called. Its
            environment variables are those of the first world: pass what it needs in args.
        world_size: number of ranks.
        args: anything pickle can carry; results are carried back the same way.
        timeout: seconds until the world is taken down, and of every collective.

    Returns:
        what the ranks returned, by rank.

    Raises:
        RankFailed: a rank raised, the first one that failed by itself rather than by losing a
            peer; its exception is the cause.
        TimeoutError: names the ranks that had not finished.
    """
    (by_rank,) = _run(function, world_size, [args], timeout)
    return by_rank


def run_each(
    function: Callable[..., Any], world_size: int, *args: Iterable[Any], timeout: float = GUARD
) -> list[list[Any]]:
    """Do what `run_ranks` does with one element of each of args after the other, as map does.

    It takes one world. All ranks wait for each other before each call, and `timeout` is for each.

    Returns:
        what the ranks returned, by call and rank.
    """
    return _run(function, world_size, list(zip(*args, strict=True)), timeout)


def _run(
    function: Callable[..., Any], world_size: int, calls: list[tuple[Any, ...]], timeout: float
) -> list[list[Any]]:
    context = server()
    pickled = pickle.dumps((function, calls))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        ranks: dict[Connection, int] = {}
        processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            stack.callback(ours.close)
            place = (rank, world_size, f"{folder}/store", timeout)
            # Not a daemon: those may not start data loaders.
            process = context.Process(target=_rank, args=(theirs, place, dict(os.environ), pickled))
            process.start()
            theirs.close()
            stack.callback(_end, process)
            ranks[ours] = rank
            processes.append(process)
        results, failures = _collect(ranks, len(calls), timeout)
        if failures:
            raise _chosen(failures)
        if any(len(of_rank) < len(calls) for of_rank in results.values()):
            raise TimeoutError(_still_running(results, len(calls), timeout))
        for process in processes:
            process.join(10)
        return [[results[rank][i] for rank in range(world_size)] for i in range(len(calls))]


def _collect(
    ranks: Mapping[Connection, int], num_calls: int, timeout: float
) -> tuple[dict[int, list[Any]], dict[int, tuple[str, bool, Exception | None]]]:
    waiting = dict(ranks)
    results: dict[int, list[Any]] = {rank: [] for rank in ranks.values()}
    failures: dict[int, tuple[str, bool, Exception | None]] = {}
    deadline = time.monotonic() + timeout
    while waiting and time.monotonic() < deadline:
        for ready in wait(list(waiting), max(0.0, deadline - time.monotonic())):
            assert isinstance(ready, Connection)
            rank = waiting[ready]
            try:
                kind, *content = pickle.loads(ready.recv_bytes())
            except EOFError:
                kind, content = (
                    "failure",
                    ["ended without a word, perhaps by a signal", False, None],
                )
            if kind == "failure":
                failures[rank] = (content[0], content[1], content[2])  # pyrefly: ignore[unsupported-operation]
                del waiting[ready]
                continue
            results[rank].append(content[0])
            deadline = time.monotonic() + timeout  # until the next
            if len(results[rank]) == num_calls:
                del waiting[ready]
        if any(not lost for _, lost, _ in failures.values()):
            break  # the cause is known
        if failures:
            deadline = min(deadline, time.monotonic() + CAUSE_SECONDS)
    return results, failures


def _still_running(results: Mapping[int, list[Any]], num_calls: int, timeout: float) -> str:
    missing = [rank for rank, of_rank in results.items() if len(of_rank) < num_calls]
    done = min(map(len, results.values()))
    which = f", in call {done} of {num_calls}" if num_calls > 1 else ""
    return f"ranks {missing} of {len(results)} still ran after {timeout} s{which}"


def _chosen(failures: Mapping[int, tuple[str, bool, Exception | None]]) -> RankFailed:
    own = {rank: failure for rank, failure in failures.items() if not failure[1]}
    rank, (text, _, error) = next(iter((own or failures).items()))
    chosen = RankFailed(f"rank {rank}: {text}")
    chosen.__cause__ = error
    return chosen


def _end(process: Any) -> None:
    if process.is_alive():
        process.kill()
    process.join()
    process.close()


def _rank(
    pipe: Connection,
    place: tuple[int, int, str, float],
    variables: Mapping[str, str],
    pickled: bytes,
) -> None:
    """Run in the rank: meet the others, call, tell the parent."""
    import torch
    import torch.distributed as dist

    from vigpipe.launch.environment import Launch
    from vigpipe.launch.failures import is_lost_peer
    from vigpipe.launch.parent_death import die_with_fork_server
    from vigpipe.launch.rendezvous import init_process_group

    rank, world_size, store, timeout = place
    die_with_fork_server()
    torch.set_num_threads(1)
    take_model(variables)
    launch = Launch(rank, world_size, rank, world_size, "local", f"file://{store}", "test")
    calls: list[tuple[Any, ...]] = []
    args: tuple[Any, ...] = ()
    try:
        function, calls = pickle.loads(pickled)
        init_process_group(launch, "gloo", timeout)
        for args in calls:
            # A rank may be connected while its peer still waits for it to be. If the function ended
            # its group then, the peer would fail: "Gloo connectFullMesh failed ... closed by peer".
            dist.barrier()
            message = pickle.dumps(("result", function(rank, world_size, *args)))
            pipe.send_bytes(message)
    except BaseException as error:
        if len(calls) > 1:
            error.add_note(f"with {args[0]}")
        pipe.send_bytes(_failure(error, is_lost_peer(error)))
        os._exit(1)  # at once, so that the others notice
    with contextlib.suppress(Exception):  # a peer may have failed meanwhile; it will say so
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


def _failure(error: BaseException, lost: bool) -> bytes:
    text = f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}"
    try:
        message = pickle.dumps(("failure", text, lost, error))
        pickle.loads(message)
    except Exception:
        message = pickle.dumps(("failure", text, lost, None))
    return message


def free_ports(count: int) -> int:
    """Find the first of so many neighbouring ports that are free on loopback."""
    for first in range(17000, 30000, count):
        with contextlib.suppress(OSError):
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
            return first
    raise AssertionError("no free ports")


# ---- commands -------------------------------------------------------------------------------


@dataclass
class Command:
    """A command under way, with everything it started."""

    popen: "subprocess.Popen[str] | ForkedPython"
    token: str
    folder: Path

    def processes(self) -> list[int]:
        """Process ids of the command and its descendants, zombies left out."""
        mark = f"{TOKEN_VARIABLE}={self.token}".encode()
        # A fork that has just begun does not show the mark yet.
        found = [self.popen.pid] if self.popen.poll() is None else []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return sorted(set(found))

    def wait(self, timeout: float = GUARD) -> "subprocess.CompletedProcess[str]":
        """Wait for its end; all it started must be gone soon after."""
        code = self.popen.wait(timeout)
        wait_until(
            lambda: not self.processes() and not some_process_is_exiting(),
            "no process of the command is left",
            PROMPT,
        )
        stdout, stderr = ((self.folder / name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(self.popen.args, code, stdout, stderr)


def some_process_is_exiting() -> bool:
    """Whether a process is about to end: it shows no environment any more, but holds its locks."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()  # from the third on, see proc(5)
            if int(fields[6]) & _EXITING and fields[0] not in "ZX":
                return True
    return False


@contextlib.contextmanager
def start_command(
    args: Sequence[str], env: Mapping[str, str] | None = None, *, fresh: bool = False
) -> Iterator[Command]:
    """Start a command in a process group of its own; kill what is left of it at the end.

    Args:
        args: the command line.
        env: variables on top of this process's own.
        fresh: whether a Python command needs a new interpreter; by default it runs in a fork of one
            that has imported everything (tests/warm.py).
    """
    token = uuid.uuid4().hex
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {}), TOKEN_VARIABLE: token}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
            if means_python(args) and not fresh:
                popen = start_python(args, variables, folder / "stdout", folder / "stderr")
            else:
                with default_signals():
                    popen = subprocess.Popen(
                        args,
                        env=variables,
                        stdin=subprocess.DEVNULL,
                        stdout=stdout,
                        stderr=stderr,
                        text=True,
                        process_group=0,
                    )
        command = Command(popen, token, folder)
        try:
            yield command
        finally:
            while left := command.processes():
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)
            popen.wait()


@contextlib.contextmanager
def default_signals() -> Iterator[None]:
    """Let programs that are executed meanwhile find no signal ignored.

    They would inherit what nohup, or a shell that starts a job in the background, ignores; of a
    signal that has a handler here they get the default.
    """
    ignored = [
        number
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
        if signal.getsignal(number) == signal.SIG_IGN
    ]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


def run_command(
    args: Sequence[str],
    env: Mapping[str, str] | None = None,
    timeout: float = 600,
    *,
    fresh: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end and check that nothing it started is left; see `start_command`."""
    with start_command(args, env, fresh=fresh) as command:
        return command.wait(timeout)


def wait_until(
    condition: Callable[[], bool],
    what: str,
    seconds: float = GUARD,
    running: Command | None = None,
) -> None:
    """Look again and again until the condition holds; fail with `what` when time is up.

    Args:
        condition: what must hold.
        what: the same in words.
        seconds: how long to wait.
        running: the command that brings it about; if it ends before, that is told at once.
    """
    start = time.monotonic()
    while True:
        ended = running if running is not None and running.popen.poll() is not None else None
        if condition():
            return
        if ended is not None:
            code, told = ended.popen.poll(), (ended.folder / "stderr").read_text()
            raise AssertionError(f"the command ended with {code}, before: {what}\n{told}")
        waited = time.monotonic() - start
        if waited > seconds:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.02 + min(waited / 20, 0.2))  # to look may cost much of a core
