"""Make the fork server, which imports this module, end when the process that started it ends.

multiprocessing's own check begins only after the server's imports, which take seconds; a command
that is refused at once would leave the server running until then.
"""

import ctypes
import os
import signal
import sys

from vigpipe.launch.fork_server import STARTER

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2); a fork does not inherit it

if sys.platform == "linux" and STARTER in os.environ:
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != int(os.environ.pop(STARTER)):  # the starter ended before the call
        os._exit(1)
