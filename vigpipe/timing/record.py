"""The files of a run: config.toml, metrics.jsonl, summary.json."""

import contextlib
import itertools
import json
import platform
import subprocess
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tomli_w

import vigpipe
from vigpipe.errors import InputError

_PACKAGES = ("torch", "torchvision", "torch-geometric", "timm", "numpy", "scikit-learn")


def make_output_folder(folder: Path | None) -> Path:
    """Make the folder of a run; by default runs/<time>.

    Raises:
        InputError: it cannot be made, or already holds a run.
    """
    try:
        if folder is None:
            return _new_default_folder()
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"--out {folder or 'runs'}: cannot be written ({error.strerror}); choose another folder"
        ) from error
    if (folder / "metrics.jsonl").exists():
        raise InputError(f"--out {folder}: holds a run already; choose another folder or delete it")
    return folder


def _new_default_folder() -> Path:
    name = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):  # another run may have begun in the same second
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("itertools.count ended")


def provenance() -> dict[str, Any]:
    """Versions, commit and host: what a number needs to be believed."""
    versions = {"vigpipe": vigpipe.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    return {"versions": versions, "commit": commit(), "host": platform.node()}


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


class RunRecord:
    """Writes a run's files as it goes; one rank of a run has one.

    Args:
        folder: an existing folder.
        config: the resolved options.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder
        (folder / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
        self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)

    def add(self, **row: float | int | str) -> None:
        """Append one row to metrics.jsonl; it is on disk when this returns."""
        self._metrics.write(json.dumps(row) + "\n")

    def add_step(
        self, step: int, epoch: int, loss: float, lr: float, seconds: float, num_samples: int
    ) -> None:
        """Append the row of an optimizer step; `num_samples` are those of all replicas."""
        self.add(
            step=step,
            epoch=epoch,
            loss=loss,
            lr=lr,
            step_seconds=seconds,
            images_per_second=num_samples / seconds,
        )

    def close(self) -> None:
        """After the last row, or when the run fails."""
        self._metrics.close()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json and close."""
        self.close()
        text = json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
        (self.folder / "summary.json").write_text(text, encoding="utf-8")
