"""Keep the current folder off the import path: a data set in it may hold a random.py.

Python puts that folder first for `-m` and `-c`, and so would every Python that this process starts.
The package imports this module before any other: Python itself has imported only its own by then.
"""

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))  # where this package lies
SAFE = {"PYTHONSAFEPATH": "1"}  # the variable that does what Python's option -P does


def protect_children(root: str = ROOT) -> None:
    """Let no Python that this process starts import from its current folder.

    `root` is where this process has its own modules from, which those Pythons find all the same.
    """
    os.environ.update(SAFE)
    if sys.path[0] == root and root not in sys.path[1:]:
        given = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{given}{os.pathsep}{root}" if given else root


def _leave_current_folder() -> None:
    """Take that folder out again if this process is `python -m vigpipe...`.

    It stays where it is all that lets Python find this package: in a checkout without installation.
    """
    if sys.flags.safe_path or sys.argv[:1] != ["-m"] or sys.path[0] == ROOT:
        return  # while Python looks for a module to run, its name has not replaced -m yet
    module = sys.orig_argv[-len(sys.argv)].rpartition("-m")[2]
    if module.partition(".")[0] == "vigpipe":
        del sys.path[0]


_leave_current_folder()
