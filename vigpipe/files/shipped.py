"""Files that come with vigpipe beside its modules: plans and a batch file."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped(folder: str) -> Path:
    """Return a folder of a checkout's root, stages or slurm.

    It is inside the package if that was installed from a wheel (pyproject.toml).
    """
    installed = _PACKAGE / "shipped" / folder
    return installed if installed.is_dir() else _PACKAGE.parent / folder
