"""Install Debian's packages for tests that need them: in CI, as root."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest


def need_package(name: str, is_installed: Callable[[], bool]) -> None:
    """Install a package in CI, and skip the test elsewhere if it is not there."""
    if is_installed():
        return
    if os.environ.get("CI") != "true" or os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip(f"{name} is not installed; with CI=true and as root this installs it")
    # Another worker of pytest-xdist may come here at the same time, and apt lets only one in.
    with (Path(tempfile.gettempdir()) / "vigpipe-apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_installed():
            quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            subprocess.run(["apt-get", "update", "-qq"], env=quiet, check=True, timeout=300)
            install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", name]
            subprocess.run(install, env=quiet, check=True, timeout=900)
