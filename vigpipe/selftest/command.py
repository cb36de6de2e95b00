"""Run vigpipe's own commands, each in a process of its own, and keep what they print."""

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vigpipe.launch.child import child_process, shell_code, vigpipe_command
from vigpipe.selftest.worker import OutOfTime


@dataclass(frozen=True)
class Finished:
    """A command that has ended; its code is 128 + n if signal n ended it."""

    code: int
    stdout: str
    stderr: str
    seconds: float


@contextlib.contextmanager
def command(words: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start `vigpipe WORDS` with its output in a folder; it ends with this context."""
    with (
        (folder / "stdout").open("wb") as stdout,
        (folder / "stderr").open("wb") as stderr,
        child_process(vigpipe_command(*words), stdout=stdout, stderr=stderr) as child,
    ):
        yield child


def exit_code(child: "subprocess.Popen[bytes]", seconds: float) -> int:
    """Wait for a command and return its exit code, 128 + n for signal n; else raise OutOfTime."""
    try:
        return shell_code(child.wait(seconds))
    except subprocess.TimeoutExpired:
        raise OutOfTime(f"the command had not ended after {seconds:.0f} s") from None


def run_command(words: Sequence[str], seconds: float) -> Finished:
    """Run `vigpipe WORDS` to its end; after `seconds` it is killed with OutOfTime."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="vigpipe-selftest-") as name:
        folder = Path(name)
        with command(words, folder) as child:
            code = exit_code(child, seconds)
        stdout, stderr = (read_output(folder / name) for name in ("stdout", "stderr"))
    return Finished(code, stdout, stderr, time.perf_counter() - start)


def read_output(path: Path) -> str:
    """Read what a command has written so far, which may not be UTF-8."""
    return path.read_text("utf-8", errors="replace")
