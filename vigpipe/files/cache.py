"""The folder for what can be made again: compiled operators, and where images are in archives."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return a folder that only the user can write to, or raise OSError: its files are executed."""
    folder = Path(os.environ.get("VIGPIPE_CACHE") or _base() / "vigpipe")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise OSError(
            f"{folder}: others may write there, so nothing is loaded from it; take the folder to "
            "yourself (chown, chmod 700), or name another in VIGPIPE_CACHE"
        )
    return folder


def _base() -> Path:
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"])
    try:
        return Path.home() / ".cache"
    except RuntimeError as error:  # a container's user may be in no list and have no HOME
        raise OSError(f"{error}; name a folder in VIGPIPE_CACHE") from error
