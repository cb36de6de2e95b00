"""A folder in which a host sees seconds late what other hosts have made, as on some clusters.

    python -m tests.late_folder BACKING MOUNT SECONDS

shows the folder BACKING at MOUNT with FUSE, until it is ended. A name that something else has put
into BACKING cannot be found at MOUNT before so many seconds have passed; what this host makes
itself, and what was there before, can.
"""

import errno
import os
import sys
import time
from pathlib import Path

from mfusepy import FUSE, FuseOSError, Operations


class LateFolder(Operations):
    """Hands everything on to the folder behind it."""

    use_ns = True

    def __init__(self, backing: str, seconds: float) -> None:
        self._backing, self._seconds = backing, seconds
        self._seen_from: dict[str, float] = {"/": 0.0}
        for folder, folders, files in os.walk(backing):
            for name in (*folders, *files):
                self._seen_from["/" + os.path.relpath(os.path.join(folder, name), backing)] = 0.0

    def _at(self, path: str) -> str:
        return self._backing + path

    def _seen(self, path: str) -> str:
        """Return where a path is; FileNotFoundError while this host does not see it."""
        if path not in self._seen_from:
            self._seen_from[path] = os.lstat(self._at(path)).st_ctime + self._seconds
        if time.time() < self._seen_from[path]:
            raise FuseOSError(errno.ENOENT)
        return self._at(path)

    def _made(self, path: str) -> str:
        """Return where this host makes something: it sees at once that, or what is there."""
        self._seen_from[path] = 0.0
        return self._at(path)

    def getattr(self, path, fh=None):
        found = os.lstat(self._seen(path)) if fh is None else os.fstat(fh)
        names = ("mode", "nlink", "uid", "gid", "size", "ino", "blocks")
        times = {
            f"st_{kind}": getattr(found, f"st_{kind}_ns") for kind in ("atime", "mtime", "ctime")
        }
        return times | {f"st_{name}": getattr(found, f"st_{name}") for name in names}

    def readdir(self, path, fh):
        for name in os.listdir(self._seen(path)):
            try:
                self._seen(os.path.join(path, name))
            except OSError:  # also gone meanwhile
                continue
            yield name

    def access(self, path, amode):
        if not os.access(self._seen(path), amode):
            raise FuseOSError(errno.EACCES)
        return 0

    def mkdir(self, path, mode):
        os.mkdir(self._made(path), mode)

    def create(self, path, mode, fi=None):
        return os.open(self._made(path), os.O_RDWR | os.O_CREAT, mode)

    def open(self, path, flags):
        return os.open(self._seen(path), flags & ~os.O_CREAT)

    def rename(self, old, new):
        os.rename(self._seen(old), self._made(new))
        for path in [path for path in self._seen_from if path.startswith(f"{old}/")]:
            self._seen_from[new + path.removeprefix(old)] = self._seen_from.pop(path)
        self._seen_from.pop(old, None)

    def unlink(self, path):
        os.unlink(self._seen(path))
        self._seen_from.pop(path, None)

    def rmdir(self, path):
        os.rmdir(self._seen(path))
        self._seen_from.pop(path, None)

    def chmod(self, path, mode):
        os.chmod(self._seen(path), mode)
        return 0

    def chown(self, path, uid, gid):
        os.chown(self._seen(path), uid, gid)
        return 0

    def truncate(self, path, length, fh=None):
        os.truncate(self._seen(path) if fh is None else fh, length)
        return 0

    def utimens(self, path, times):
        os.utime(self._seen(path), ns=times)
        return 0

    def read(self, path, size, offset, fh):
        return os.pread(fh, size, offset)

    def write(self, path, data, offset, fh):
        return os.pwrite(fh, data, offset)

    def fsync(self, path, datasync, fh):
        os.fsync(fh)
        return 0

    def release(self, path, fh):
        os.close(fh)
        return 0

    def statfs(self, path):
        found = os.statvfs(self._backing)
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}


if __name__ == "__main__":
    backing, mount, seconds = sys.argv[1:]
    Path(mount).mkdir(exist_ok=True)
    folder = LateFolder(backing, float(seconds))
    options = {"attr_timeout": 0, "entry_timeout": 0, "negative_timeout": 0, "nothreads": True}
    FUSE(folder, mount, foreground=True, **options)
