"""Say where numbers come from: command, commit, hardware and versions."""

import functools
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from vigpipe.launch.device import hardware
from vigpipe.messages import program
from vigpipe.version import __version__

_PACKAGES = ("torch", "torchvision", "torch-geometric", "timm", "numpy", "scikit-learn")


def origin(device: torch.device, ranks: str | None = None) -> str:
    """Describe as a Markdown list where a result is from; `ranks` says what each rank used."""
    facts = provenance()
    ranks = ranks or f"{torch.get_num_threads()} thread(s) a rank"
    return (
        f"- command: `{this_command()}`\n- commit: {facts['commit']}\n"
        f"- hardware: {hardware(device)}; {ranks}\n"
        f"- versions: {format_versions(facts['versions'])}\n"
    )


def this_command() -> str:
    """Return the command line of this process, quoted for a shell."""
    return shlex.join([*program(), *sys.argv[1:]])


def format_versions(versions: Mapping[str, str]) -> str:
    """List packages and their versions in one line."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def provenance() -> dict[str, Any]:
    """Return the versions, the commit and the host, which every result is published with."""
    versions = {"vigpipe": __version__, "python": platform.python_version()}
    versions |= {package: version_of(package) for package in _PACKAGES}
    return {"versions": versions, "commit": commit(), "host": platform.node()}


@functools.cache
def version_of(package: str) -> str:
    """Return the version of an installed package, or "absent"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


@functools.cache
def commit() -> str | None:
    """Return the commit of this checkout, with a "+" if files differ; None outside a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
