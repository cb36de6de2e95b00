"""Where numbers come from: versions, commit, host, and the lines that every page of results has."""

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

import vigpipe
from vigpipe.launch.device import hardware

_PACKAGES = ("torch", "torchvision", "torch-geometric", "timm", "numpy", "scikit-learn")


def origin(device: torch.device, ranks: str | None = None) -> str:
    """Command, commit, hardware and versions, as lines of Markdown.

    Args:
        device: where it was measured.
        ranks: what the ranks had; by default this one's threads.
    """
    facts = provenance()
    ranks = ranks or f"{torch.get_num_threads()} thread(s) a rank"
    return (
        f"- command: `{this_command()}`\n- commit: {facts['commit']}\n"
        f"- hardware: {hardware(device)}; {ranks}\n"
        f"- versions: {format_versions(facts['versions'])}\n"
    )


def this_command() -> str:
    """The command line of this process."""
    return shlex.join(["vigpipe", *sys.argv[1:]])


def format_versions(versions: Mapping[str, str]) -> str:
    """Versions by package, in words."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def provenance() -> dict[str, Any]:
    """Versions, commit and host: what a number needs to be believed."""
    versions = {"vigpipe": vigpipe.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    return {"versions": versions, "commit": commit(), "host": platform.node()}


@functools.cache
def commit() -> str | None:
    """The commit of this package's checkout, "+" behind it if files differ; None outside one."""
    root = Path(vigpipe.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    try:
        git = ["git", "-c", f"safe.directory={root}", "-C", str(root)]
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
