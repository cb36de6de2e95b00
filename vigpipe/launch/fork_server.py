"""The process that others are forked from, with its imports done: torch alone takes seconds."""

import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerContext

STARTER = "VIGPIPE_FORKSERVER_OF"  # in the server's environment: who started it
LONGEST = 107  # bytes in the path of a Unix socket (unix(7)); bind refuses more
_NAMES = len("/pymp-12345678/listener-12345678")  # what multiprocessing adds to the folder


def start_fork_server(modules: Sequence[str] = ()) -> ForkServerContext:
    """Begin to import modules in the server, which runs once a process; returns at once.

    To be called from the main thread: the server ends when the thread that started it does.
    Its socket is in a private folder (mode 0700) under TMPDIR, or under /tmp where the path would
    be too long for a socket, as Python does by itself from 3.14 on.
    """
    server = multiprocessing.get_context("forkserver")
    if modules:
        server.set_forkserver_preload(["vigpipe.launch.parent_death", *modules])
    own = tempfile.tempdir
    os.environ[STARTER] = str(os.getpid())
    try:
        if len(tempfile.gettempdir().encode()) + _NAMES > LONGEST:
            tempfile.tempdir = "/tmp"
        util.get_temp_dir()  # made once a process, and kept
        forkserver.ensure_running()
    finally:
        tempfile.tempdir = own
        del os.environ[STARTER]
    return server
