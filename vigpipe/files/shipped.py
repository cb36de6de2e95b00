"""Files that come with vigpipe beside its modules: plans and a batch file."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped(folder: str) -> Path:
    """Return stages or slurm: in a checkout's root, or inside a package from a wheel."""
    installed = _PACKAGE / "shipped" / folder
    return installed if installed.is_dir() else _PACKAGE.parent / folder
