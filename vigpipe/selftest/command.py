"""Run one of vigpipe's own commands in a process of its own, with what it prints."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vigpipe.launch.child import child_process, shell_code
from vigpipe.selftest.worker import OutOfTime


@dataclass(frozen=True)
class Finished:
    """A command that has ended.

    Attributes:
        code: its exit code, or 128 + n if signal n ended it.
        stdout: what it printed.
        stderr: what it told.
        seconds: from its start to its end.
    """

    code: int
    stdout: str
    stderr: str
    seconds: float


def run_command(
    words: Sequence[str], seconds: float, variables: Mapping[str, str] | None = None
) -> Finished:
    """Run `python -m vigpipe WORDS` to its end, and leave nothing behind.

    Args:
        words: the command line after `vigpipe`.
        seconds: after this time it is killed.
        variables: its whole environment; by default that of this process.

    Raises:
        OutOfTime: it had not ended in time.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="vigpipe-selftest-") as name:
        stdout, stderr = Path(name) / "stdout", Path(name) / "stderr"
        with (
            stdout.open("wb") as output,
            stderr.open("wb") as errors,
            child_process(
                [sys.executable, "-m", "vigpipe", *words],
                stdout=output,
                stderr=errors,
                env=None if variables is None else dict(variables),
            ) as child,
        ):
            try:
                code = child.wait(seconds)
            except subprocess.TimeoutExpired:
                raise OutOfTime(f"vigpipe {words[0]} had not ended after {seconds:.0f} s") from None
        said, told = (path.read_text("utf-8", errors="replace") for path in (stdout, stderr))
    return Finished(shell_code(code), said, told, time.perf_counter() - start)
