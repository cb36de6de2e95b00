"""Start the ranks of a benchmark that does without a model and images."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from vigpipe.launch.environment import Launch, from_environment
from vigpipe.launch.failures import run_rank
from vigpipe.launch.local import preload, start_local
from vigpipe.run.folder import make_output_folder

MAIN = "benchmarks.cli:main"  # what ranks that a benchmark starts run


def run_bench_ranks(module: str, out: Path | None, start: Callable[[Launch], int]) -> int:
    """Run a benchmark as one of its ranks, or as the process that starts them.

    Args:
        module: what the ranks that are started here import.
        out: the output folder; None for the default.
        start: runs the benchmark, or calls `start_bench_ranks` if this process is alone.

    Returns:
        The exit code.
    """
    launch = from_environment(os.environ)
    if launch.launcher == "alone":
        preload(MAIN, module)
    failures = [out] if out is not None and launch.world_size > 1 else []
    return run_rank(lambda: start(launch), launch, failures)


def start_bench_ranks(
    num_ranks: int, out: Path | None, names: Sequence[str], arguments: Sequence[str]
) -> int:
    """Start the ranks of a benchmark on this host, one thread each, and wait for them.

    Args:
        num_ranks: how many.
        out: the output folder; None for the default.
        names: what the benchmark writes there.
        arguments: the command line, which every rank gets.

    Returns:
        The exit code.
    """
    folder = make_output_folder(out, names)
    given = ["--out", str(folder)] if out is None else []
    return start_local(num_ranks, MAIN, [*arguments, *given], threads=1)
