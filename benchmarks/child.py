"""Run a command to its end in a separate process."""

import subprocess
from collections.abc import Sequence
from typing import IO

from vigpipe.launch.child import child_process, shell_code
from vigpipe.launch.second_signal import left_to_handlers


def run_child(command: Sequence[str], stderr: IO[bytes] | None = None) -> int:
    """Run a command to its end without its stdout; return its exit code as `shell_code` does."""
    with (
        left_to_handlers(),
        child_process(command, stdout=subprocess.DEVNULL, stderr=stderr) as child,
    ):
        return shell_code(child.wait())
