"""Start the server from which processes are forked with torch imported, which takes seconds."""

import contextlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext
from pathlib import Path

from vigpipe.launch.safe_path import SAFE

# Variables of the server: its starter's process id, and the folder to remove if that is killed.
STARTER, FOLDER_OF_STARTER = "VIGPIPE_FORKSERVER_OF", "VIGPIPE_FORKSERVER_FOLDER"
LONGEST = 107  # bytes in the path of a Unix socket (unix(7)); bind refuses longer paths
_NAMES_LENGTH = len("/pymp-12345678/listener-12345678")  # added to the folder by multiprocessing


def start_fork_server(modules: Sequence[str] = ()) -> ForkServerContext:
    """Start the server unless this process has one, and let it import modules; return at once.

    Call this from the main thread: the server ends with the thread that started it. Its socket is
    in a private folder (mode 0700), which is removed even if this process is killed (on Linux).
    """
    server = multiprocessing.get_context("forkserver")
    if modules:
        server.set_forkserver_preload(["vigpipe.launch.parent_death", *modules])
    silent = "ignore::UserWarning:multiprocessing.resource_tracker"
    given = os.environ.get("PYTHONWARNINGS")
    # It removes the semaphores of this process if it is killed, without a warning.
    with _variables(PYTHONWARNINGS=f"{given},{silent}" if given else silent):
        resource_tracker.ensure_running()
    tempdir_before = tempfile.tempdir
    # The server inherits this, as do its forks, and ignores Ctrl-C itself when it has imported.
    blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        tempfile.tempdir = str(folder_for_sockets())
        util.get_temp_dir()  # made once in a process; multiprocessing remembers it
        with marked():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)
        tempfile.tempdir = tempdir_before
    return server


def marks(folder: str | None) -> dict[str, str]:
    """Return the variables by which what imports `parent_death` ends with this process.

    The folder is removed if this process is killed.
    """
    of_folder = {} if folder is None else {FOLDER_OF_STARTER: folder}
    return {STARTER: str(os.getpid()), **of_folder}


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """Let a server that starts in this context, perhaps anew, end with this process."""
    is_child = multiprocessing.parent_process() is not None  # it has the folder of its parent
    with _variables(**marks(None if is_child else util.get_temp_dir())):
        yield


def folder_for_sockets() -> Path:
    """Return the folder for private ones: TMPDIR, or /tmp if the paths of sockets were too long."""
    temporary = tempfile.gettempdir()
    return Path("/tmp" if len(temporary.encode()) + _NAMES_LENGTH > LONGEST else temporary)


@contextlib.contextmanager
def _variables(**texts: str) -> Iterator[None]:
    """Set variables, and the one for a safe import path, for a process started in this context."""
    texts |= SAFE
    before = {name: os.environ.get(name) for name in texts}
    os.environ.update(texts)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                del os.environ[name]
            else:
                os.environ[name] = text
