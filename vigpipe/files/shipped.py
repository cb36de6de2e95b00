"""Files that come with vigpipe beside its modules: plans and a batch file."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped(folder: str) -> Path:
    """Return a folder of such files.

    Args:
        folder: its name at the root of a checkout: stages or slurm.

    Returns:
        The folder, which is inside the package if it was installed from a wheel (pyproject.toml).
    """
    installed = _PACKAGE / "shipped" / folder
    return installed if installed.is_dir() else _PACKAGE.parent / folder
