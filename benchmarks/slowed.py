"""A training run whose replicas sleep before each item, the last one longer than the others.

    python -m benchmarks.slowed RANKS SECONDS TIMES D train OPTIONS...

It stands for machines of which one is slow: an item takes each of D replicas some seconds more,
which need no core, and the last one TIMES as many. All else is `vigpipe train` on this host, with
one stage and so many ranks.
"""

import os
import sys
import time
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

from vigpipe.launch.environment import from_environment
from vigpipe.launch.local import preload, start_local
from vigpipe.start import COMMAND_LINE


def rank(arguments: Sequence[str]) -> int:
    """Run the command as one rank, and sleep before each of its items."""
    seconds, times, num_replicas, *command = arguments
    from vigpipe import training

    is_slow = from_environment(os.environ).rank == int(num_replicas) - 1
    sleep = float(seconds) * (float(times) if is_slow else 1.0)
    train_step = training.train_step

    def after_sleep(*given: Any, **options: Any) -> Any:
        time.sleep(sleep)
        return train_step(*given, **options)

    training.train_step = after_sleep
    return resolve_name(COMMAND_LINE)(command)


if __name__ == "__main__":
    preload(COMMAND_LINE, "vigpipe.training", "rich.progress")
    num_started, *given = sys.argv[1:]
    sys.exit(start_local(int(num_started), "benchmarks.slowed:rank", given, 1))
