"""The process that others are forked from, with its imports done: torch alone takes seconds."""

import multiprocessing
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerContext

LONGEST = 107  # bytes in the path of a Unix socket (unix(7)); bind refuses more
_NAMES = len("/pymp-12345678/listener-12345678")  # what multiprocessing adds to the folder


def start(modules: Sequence[str] = ()) -> ForkServerContext:
    """Begin to import modules in the server, which runs once a process; returns at once.

    Its socket is in a private folder (mode 0700) under TMPDIR, or under /tmp where the path would
    be too long for a socket, as Python does by itself from 3.14 on.
    """
    server = multiprocessing.get_context("forkserver")
    if modules:
        server.set_forkserver_preload(list(modules))
    own = tempfile.tempdir
    try:
        if len(tempfile.gettempdir().encode()) + _NAMES > LONGEST:
            tempfile.tempdir = "/tmp"
        util.get_temp_dir()  # made once a process, and kept
    finally:
        tempfile.tempdir = own
    forkserver.ensure_running()
    return server
