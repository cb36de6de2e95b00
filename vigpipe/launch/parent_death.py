"""To be imported by the process that others are forked from: it ends when its starter ends.

multiprocessing's own fork server looks for that only after its imports, which take seconds: a
command that is refused at once would leave it running for so long.
"""

import ctypes
import os
import signal
import sys

from vigpipe.launch.fork_server import STARTER

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2); a fork does not inherit it

if sys.platform == "linux" and STARTER in os.environ:
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != int(os.environ.pop(STARTER)):  # it had ended before
        os._exit(1)
