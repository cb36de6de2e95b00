"""The folder for what can be made again: compiled operators, and where images are in archives."""

import contextlib
import os
from pathlib import Path

INDUCTOR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # where torch keeps code that it has compiled


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


def inductor_folder(kind: str = "") -> str:
    """Return the folder for code that torch compiles on one kind of processor, or raise OSError."""
    return str(cache_folder() / f"inductor{kind and '-'}{kind}")


def hide_inductor_folder() -> None:
    """Let torch make its folder in the cache unless the user has named one; before it is imported.

    To import its pipelining makes one, by default $TMPDIR/torchinductor_USER, which anybody can
    have made before.
    """
    with contextlib.suppress(OSError):  # there is no cache
        os.environ.setdefault(INDUCTOR_VARIABLE, inductor_folder())


def _base() -> Path:
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"])
    try:
        return Path.home() / ".cache"
    except RuntimeError as error:  # a container's user may be in no list and have no HOME
        raise OSError(f"{error}; name a folder in VIGPIPE_CACHE") from error
