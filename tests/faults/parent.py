"""Run a command as a shell does: in the group of this process, whose first line tells its id.

When the last process of a group ends whose parent is outside of it, the kernel wakes those of the
group that are stopped. Under this one a launcher is not the last.
"""

import subprocess
import sys

child = subprocess.Popen(sys.argv[1:])
print(child.pid, flush=True)
code = child.wait()
sys.exit(128 - code if code < 0 else code)
