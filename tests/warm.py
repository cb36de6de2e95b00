"""Run Python commands of tests in forks of one process that has imported everything already.

A fresh Python that imports torch, timm and vigpipe takes five seconds of a core, and a whole run of
the tests starts hundreds. `start_python` starts what such a command line means in a fork of a
server instead: multiprocessing's fork server, which starts before the first test of a pytest
process and ends with that process, however it ends.

A fork differs from a fresh interpreter in what it has imported, and in nothing else that a command
may notice: it has its own session, the environment, folder, output and arguments it is given,
default signals, and an exit code or signal. Its fork server for local ranks, and the Python
commands that it starts in turn, are forked as well.
Tests of what happens before or while modules are imported start a fresh one.
"""

import atexit
import contextlib
import ctypes
import functools
import importlib
import logging
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import forkserver, process, resource_tracker, util
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from tests.small_model import take_model
from vigpipe.launch.fork_server import FOLDER_OF_STARTER, marks
from vigpipe.launch.parent_death import die_with_fork_server
from vigpipe.launch.second_signal import SignalThread

TOKEN_VARIABLE = "VIGPIPE_TEST_TOKEN"  # in the environment of every descendant of a command
_NO_TOKEN = "0" * 32
_MAIN_PROCESS = multiprocessing.current_process()  # the server's, where it imports this
_PARENT_DEATH = "vigpipe.launch.parent_death"


@functools.cache
def start_server() -> None:
    """Start the server and return at once, while it imports.

    This comes before the first test: a process has one fork server, and what a reader of images
    would start has neither the imports nor room for a token.
    """
    forkserver.set_forkserver_preload([_PARENT_DEATH, "tests.preload"])
    # The first is room for the token of a command, see _show.
    variables = {TOKEN_VARIABLE: _NO_TOKEN, **marks(None)}
    os.environ.update(variables)
    try:
        forkserver.ensure_running()
    finally:
        for name in variables:
            del os.environ[name]


@functools.cache
def server() -> Any:
    """Return the server's context; wait for its imports, so that they count in nobody's timeout."""
    start_server()
    context = multiprocessing.get_context("forkserver")
    first = context.Process(target=os.getpid)
    first.start()
    first.join()
    return context


class ForkedPython:
    """A command in a fork, with the part of subprocess.Popen's interface that tests use.

    Attributes:
        args: the command line.
        pid: its process id.
    """

    def __init__(self, args: Sequence[str], forked: Any) -> None:
        self.args, self._forked = args, forked
        self.pid: int = forked.pid

    def poll(self) -> int | None:
        """Return its exit code, -n if signal n has ended it, None if it still runs."""
        return self._forked.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        self._forked.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def means_python(args: Sequence[str]) -> bool:
    """Whether a command line is `python -m MODULE ...`, `python -c CODE ...` or a script's."""
    if args[0] != sys.executable:
        return False
    what = args[1 + (args[1] == "-P")]
    return what in ("-m", "-c") or what.endswith(".py")


def start_python(
    args: Sequence[str], variables: Mapping[str, str], stdout: Path, stderr: Path
) -> ForkedPython:
    """Start a Python command in a fork of the server, in the current folder.

    Args:
        args: the command line, of which `means_python` is true.
        variables: its whole environment; $VIGPIPE_TEST_TOKEN, of 32 characters, marks it and its
            descendants in /proc.
        stdout: an existing file to append its output to.
        stderr: an existing file to append its errors to.
    """
    call = (list(args[1:]), dict(variables), os.getcwd(), (stdout, stderr))
    forked = server().Process(target=_run, args=call, daemon=True)
    forked.start()
    return ForkedPython(args, forked)


# ---- in the fork ----------------------------------------------------------------------------


def _run(
    words: list[str], variables: dict[str, str], folder: str, outputs: tuple[Path, Path]
) -> NoReturn:
    os.setsid()
    die_with_fork_server()
    _show(variables[TOKEN_VARIABLE])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    util.spawnv_passfds = _fork_passfds  # pyrefly: ignore[bad-assignment]
    subprocess._fork_exec = _fork_exec  # pyrefly: ignore[missing-attribute]
    _become(words, variables, folder)


def _become(words: list[str], variables: Mapping[str, str], folder: str) -> NoReturn:
    """Do what `python WORDS` does, and end as that ends."""
    _forget_the_parent()
    os.environ.clear()
    os.environ.update(variables)
    _import_parent_death_again()
    take_model(variables)
    os.chdir(folder)
    # OpenMP reads the variable when it is loaded, which it is already.
    threads = variables.get("OMP_NUM_THREADS", "")
    if re.fullmatch("[1-9][0-9]{0,2}", threads) and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(threads))
    process.ORIGINAL_DIR = folder  # pyrefly: ignore[missing-attribute]
    tempfile.tempdir = None
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(line_buffering=False)  # pyrefly: ignore[missing-attribute]
    paths = [path for path in variables.get("PYTHONPATH", "").split(":") if path]
    sys.path[:] = [*paths, *(path for path in sys.path[1:] if path not in paths)]
    code = 1
    try:
        _interpret(words)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # pyrefly: ignore[missing-attribute]
    atexit._run_exitfuncs()
    _leave(code)


def _interpret(words: list[str]) -> None:
    """Do what `python WORDS` does."""
    is_safe = words[0] == "-P" or bool(os.environ.get("PYTHONSAFEPATH"))
    what, *rest = words[words[0] == "-P" :]
    folder = {"-c": "", "-m": os.getcwd()}.get(what, str(Path(what).resolve().parent))
    if not is_safe:
        sys.path.insert(0, folder)
    if what == "-c":
        code, *arguments = rest
        main = sys.modules["__main__"] = ModuleType("__main__")
        sys.argv = ["-c", *arguments]
        exec(compile(code, "<string>", "exec"), vars(main))
    elif what == "-m":
        name, *arguments = rest
        sys.argv = ["-m", *arguments]
        if not hasattr(sys.modules.get(name), "__path__"):
            sys.modules.pop(name, None)  # runpy would warn that it is imported already
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [what, *rest]
        runpy.run_path(what, run_name="__main__")


def _show(token: str) -> None:
    """Let /proc/<pid>/environ of this process and its forks have the token.

    That file shows the memory in which the server's own environment came with exec, and os.environ
    does not change it.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])  # env_start and env_end, 50 and 51 of proc(5)
    before = f"{TOKEN_VARIABLE}={_NO_TOKEN}".encode()
    place = ctypes.string_at(begin, end - begin).index(before)
    after = f"{TOKEN_VARIABLE}={token}".encode()
    assert len(after) == len(before)
    ctypes.memmove(begin + place, after, len(after))


def _forget_the_parent(kept: Iterable[int] = ()) -> None:
    """Leave what an executed process has not: handlers, files, parents, things to do at exit.

    Args:
        kept: open files to keep besides stdin, stdout and stderr.
    """
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    first = 3
    for last in (*sorted(kept), os.sysconf("SC_OPEN_MAX")):
        os.closerange(first, last)
        first = last + 1
    process._current_process = _MAIN_PROCESS  # pyrefly: ignore[missing-attribute]
    _MAIN_PROCESS.name = "MainProcess"
    process._parent_process = None  # pyrefly: ignore[missing-attribute]
    process._children = set()  # pyrefly: ignore[missing-attribute]
    # At its exit a fork would remove the temporary folders that its parent still needs.
    util._finalizer_registry.clear()  # pyrefly: ignore[missing-attribute]
    weakref.finalize._registry.clear()  # pyrefly: ignore[missing-attribute]
    weakref.finalize._registered_with_atexit = False
    atexit._clear()
    atexit.register(logging.shutdown)
    atexit.register(util._exit_function)  # pyrefly: ignore[missing-attribute]
    forkserver._forkserver.__init__()
    resource_tracker._resource_tracker.__init__()


def _import_parent_death_again() -> None:
    """Do what the import of that module does, but for folders, which the tests look for."""
    os.environ.pop(FOLDER_OF_STARTER, None)
    importlib.reload(sys.modules[_PARENT_DEATH])


def _fork() -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or both would write what waits
    return os.fork()


def _has_other_threads() -> bool:
    """Whether a fork would lack a thread; it does not miss the one that waits for signals."""
    waiting = sum(isinstance(thread, SignalThread) for thread in threading.enumerate())
    return len(os.listdir("/proc/self/task")) > 1 + waiting


_executed_passfds: Any = util.spawnv_passfds


def _fork_passfds(path: Any, args: Sequence[str], passfds: Sequence[int]) -> int:
    """Start a helper of multiprocessing, such as its fork server, by a fork of this process.

    Only where a fork of it lacks nothing.
    """
    if "-c" not in args or _has_other_threads():
        return _executed_passfds(path, args, passfds)
    pid = _fork()
    if pid > 0:
        return pid
    code = 1
    try:
        _forget_the_parent(passfds)
        for option in filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")):
            warnings._setoption(option)  # pyrefly: ignore[missing-attribute]
        _import_parent_death_again()
        _, program, *sys.argv[1:] = args[args.index("-c") :]
        sys.argv[0] = "-c"
        exec(program, {"__name__": "__main__"})
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        _leave(code)


_executed: Any = vars(subprocess)["_fork_exec"]


def _fork_exec(*given: Any) -> int:
    """Start what subprocess.Popen of a forked command starts: Python too by a fork, if it can be.

    Args:
        given: the arguments of CPython's _posixsubprocess.fork_exec.
    """
    args, _, _, _, folder, variables, stdin, _, _, stdout, _, stderr = given[:12]
    new_session, process_group = given[15:17]
    words = list(map(os.fsdecode, args))
    if not means_python(words) or _has_other_threads():
        return _executed(*given)
    pid = _fork()
    if pid > 0:
        return pid
    try:
        for number, file in enumerate((stdin, stdout, stderr)):
            if file >= 0:
                os.dup2(file, number)
        if new_session:
            os.setsid()
        if process_group >= 0:
            os.setpgid(0, process_group)
        pairs = os.environb.items() if variables is None else (v.split(b"=", 1) for v in variables)
        environment = {os.fsdecode(name): os.fsdecode(value) for name, value in pairs}
        _become(words[1:], environment, os.fsdecode(folder or os.getcwd()))
    finally:
        os._exit(255)


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):  # it is closed
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
