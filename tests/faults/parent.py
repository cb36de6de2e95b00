"""Run a command as a shell does: in the group of this process, whose first line tells its id.

When the last process of a group ends whose parent is outside of it, the kernel wakes those of the
group that are stopped, so this one stays until they are gone. If they do not go, it ends with 99.
"""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path


def group() -> set[int]:
    """Return the process ids of the group of this process."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(int(path.name)) == os.getpgid(0):
                found.add(int(path.name))
    return found


child = subprocess.Popen(sys.argv[1:])
print(child.pid, flush=True)
code = child.wait()
until = time.monotonic() + 10
while group() != {os.getpid()}:
    if time.monotonic() > until:
        sys.exit(99)
    time.sleep(0.01)
sys.exit(128 - code if code < 0 else code)
