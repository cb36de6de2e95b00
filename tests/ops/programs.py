"""Run a test file as a program, because Triton decides at its import whether it interprets."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.world import ROOT


def run_program(file: str, what: str, cache: Path, **environment: str) -> Any:
    """What the program `file` prints last, as JSON, when its argument is `what`."""
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", file, what],
        env={key: v for key, v in os.environ.items() if key != "TRITON_INTERPRET"} | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
