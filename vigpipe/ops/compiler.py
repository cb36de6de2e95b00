"""Compile the C++ operators for this machine, once, and load them.

The library has a plain C interface, so it needs no headers of torch or Python and works with every
version of them. It shares the OpenMP runtime, and so the threads, that torch has loaded. Its name
in the cache is a hash of sources, flags, compiler and processor, so that hosts of several kinds can
share a home directory.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vigpipe.files.cache import cache_folder
from vigpipe.messages import one_line, tell

SOURCES = Path(__file__).parent / "cpu"
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
# The first set that the compiler accepts is used: clang on macOS has no OpenMP, and only GCC has an
# option for the width of the vectors that it makes from loops.
_MACHINE_FLAGS = (
    ("-march=native", "-mprefer-vector-width=512", "-fopenmp"),
    ("-march=native", "-fopenmp"),
    ("-march=native",),
    (),
)
_is_silent = False


@dataclass(frozen=True)
class Library:
    """The loaded operators."""

    functions: ctypes.CDLL | None  # None if the plain versions have to be used
    reason: str  # a sentence: which library was loaded, or why none was


@cache
def library() -> Library:
    """Load the operators, compiling them first if that has not been done on this machine."""
    compiler = _compiler()
    if compiler is None:
        names = ", ".join(_compiler_names())
        reason = f"no C++ compiler among {names}; install g++, or name one in CXX"
    else:
        try:
            path = cache_folder() / f"vigpipe-{_key(compiler)}.so"
            if not path.exists():
                _compile(compiler, path)
            return Library(ctypes.CDLL(str(path)), f"compiled by {compiler}: {path}")
        except (OSError, subprocess.SubprocessError) as error:
            reason = one_line(f"the C++ operators could not be made: {_reason(error)}")
    _print(f"{reason}; the plain operators serve, which are slower")
    return Library(None, reason)


def be_silent() -> None:
    """Print no messages from now on, because another rank prints them."""
    global _is_silent
    _is_silent = True


def _print(text: str) -> None:
    if not _is_silent:
        tell(text)


def _compiler_names() -> tuple[str, ...]:
    return (os.environ["CXX"],) if os.environ.get("CXX") else ("g++", "c++", "clang++")


def _compiler() -> str | None:
    return next((path for path in map(shutil.which, _compiler_names()) if path), None)


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    hashed = [version, repr((_FLAGS, _MACHINE_FLAGS)).encode(), processor()]
    hashed += [path.name.encode() + path.read_bytes() for path in sorted(SOURCES.iterdir())]
    return hashlib.sha256(b"\0".join(hashed)).hexdigest()[:16]


def processor() -> bytes:
    """Describe the processor, as far as -march=native depends on it."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".encode()
    names = (b"model name", b"flags", b"Features", b"CPU part")
    return b"".join(sorted({line for line in lines if line.startswith(names)}))


def _compile(compiler: str, path: Path) -> None:
    """Compile the library in one process at a time; those that wait find it compiled."""
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return
        _print(f"compiling the C++ operators with {compiler}, once for this kind of machine ...")
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            compiled = Path(folder) / path.name
            sources = sorted(str(source) for source in SOURCES.glob("*.cpp"))
            for flags in _MACHINE_FLAGS:
                is_last = flags == _MACHINE_FLAGS[-1]
                command = [compiler, *_FLAGS, *flags, *sources, "-o", str(compiled)]
                result = subprocess.run(command, capture_output=True, text=True, check=is_last)
                if result.returncode == 0:
                    break
            os.replace(compiled, path)


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        output = error.stderr if isinstance(error.stderr, str) else ""
        lines = [line for line in output.splitlines() if "error" in line] or output.splitlines()
        return f"{error.cmd[0]} ended with code {error.returncode}: {(lines or ['no output'])[0]}"
    return str(error)
