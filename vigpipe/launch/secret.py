"""Agree on a secret of the run, which its ranks know and no other user of their hosts.

Ranks that one process has started on its host have it from the private file through which they
meet. Under srun and torchrun any user may list and write the store, so that it is VIGPIPE_TOKEN, or
in a file that rank 0 makes in the user's cache folder, where all hosts share that.
"""

import contextlib
import hmac
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vigpipe.errors import InputError, StrangerError
from vigpipe.files.cache import cache_folder
from vigpipe.launch.environment import TOKEN_VARIABLE, Launch
from vigpipe.messages import tell
from vigpipe.proof import NUM_BYTES, mac

_KEY = "secret"  # of the store: the name of the file, or empty where there is none
_STALE_SECONDS = 86400.0  # an older file is that of a rank that was killed
_LOOKS, _LOOK_SECONDS = 50, 0.1  # another host may see a new file a little later


def agree_on_secret(store: Any, launch: Launch) -> bytes | None:
    """Return the secret of the run, None if a rank cannot learn it; every rank calls this.

    Raises:
        InputError: ranks have different tokens.
        StrangerError: somebody else answers for a rank.
    """
    if launch.world_size == 1:
        return None
    if launch.launcher == "local":
        if launch.rank == 0:
            store.set(_KEY, secrets.token_hex(NUM_BYTES))
        return bytes.fromhex(store.get(_KEY).decode())
    token = os.environ.get(TOKEN_VARIABLE)
    with _secret_of(token, store, launch) as secret:
        if isinstance(secret, bytes):
            way, answer = ("token" if token else "file"), _answer(secret, launch, launch.rank)
        else:
            way, answer = "none", secret
        store.set(f"knows/{launch.rank}", f"{way} {answer}")
        said = [store.get(f"knows/{rank}").decode() for rank in range(launch.world_size)]
    answers = [text.partition(" ")[2] for text in said]
    ways = [text.partition(" ")[0] for text in said]
    if "token" in ways and (without := [rank for rank, w in enumerate(ways) if w != "token"]):
        raise InputError(
            f"{TOKEN_VARIABLE}: is set on rank {ways.index('token')}, but not on rank "
            f"{without[0]}; give all ranks of the run the same"
        )
    if "none" in ways:
        if launch.rank == 0:
            rank = ways.index("none")
            tell(
                f"note: ranks cannot prove to one another who they are, as rank {rank} has no "
                f"secret ({answers[rank]}); set {TOKEN_VARIABLE} to one random text on all hosts"
            )
        return None
    assert isinstance(secret, bytes)
    for rank, answer in enumerate(answers):
        if hmac.compare_digest(answer.encode(), _answer(secret, launch, rank).encode()):
            continue
        if token:
            raise InputError(
                f"{TOKEN_VARIABLE}: rank {rank} has another one than rank {launch.rank}; give all "
                "ranks of the run the same"
            )
        raise StrangerError(
            f"a process that does not know the secret of {launch.run_id} answers for rank {rank}; "
            "see who else uses these hosts, and start the run again"
        )
    return secret


def _answer(secret: bytes, launch: Launch, rank: int) -> str:
    """Return what shows that a rank knows the secret, and does not reveal it."""
    return mac(secret, "knows", launch.run_id, str(rank)).hex()


@contextlib.contextmanager
def _secret_of(token: str | None, store: Any, launch: Launch) -> Iterator[bytes | str]:
    """Yield this rank's secret, or why it has none; rank 0 removes its file after this context."""
    with contextlib.ExitStack() as stack:
        name, secret = "", f"{TOKEN_VARIABLE} is not set, and rank 0 has made no file"
        try:
            if token:
                secret = mac(token.encode(), "token", launch.run_id)
            elif launch.rank == 0:
                name, secret = stack.enter_context(_new_file(cache_folder()))
            elif name := store.get(_KEY).decode():
                secret = _read(cache_folder(), name)
        except OSError as error:
            secret = str(error)
        if launch.rank == 0:
            store.set(_KEY, name)
        yield secret


@contextlib.contextmanager
def _new_file(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Make a file with a new secret; it goes with this context, and so do those of killed ranks."""
    for old in folder.glob("secret-*"):
        with contextlib.suppress(OSError):
            if time.time() - old.lstat().st_mtime > _STALE_SECONDS:
                old.unlink()
    path, secret = folder / f"secret-{secrets.token_hex(16)}", os.urandom(NUM_BYTES)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(secret)
        yield path.name, secret
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _read(folder: Path, name: str) -> bytes:
    """Read the secret from the file that rank 0 has made, or raise OSError."""
    if not re.fullmatch("secret-[0-9a-f]{32}", name):
        raise OSError("the name of its file is malformed")
    for _ in range(_LOOKS):
        if (folder / name).exists():
            break
        time.sleep(_LOOK_SECONDS)
    with open(os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        is_private = stat.S_ISREG(status.st_mode) and not status.st_mode & 0o077
        if is_private and (status.st_uid, status.st_size) == (os.getuid(), NUM_BYTES):
            return file.read()
    raise OSError(f"{folder / name} is not a file of {NUM_BYTES} bytes that only you can read")
