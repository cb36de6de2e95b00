"""A store whose values the ranks sign: gloo, too, would follow what somebody else has written."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from vigpipe.proof import signed, verified

_kept: list["SignedStore"] = []  # torch's own references let the Python half of a store go


class SignedStore(dist.Store):
    """A section of a store whose values raise StrangerError unless a rank has written them.

    Numbers, which are only counted, are not signed.

    Attributes:
        unsigned: the store itself.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.unsigned: Any = store
        _kept.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        self.unsigned.set(key, signed(key, value))

    def get(self, key: str) -> bytes:
        return verified(key, self.unsigned.get(key))

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        before = signed(key, expected_value) if expected_value else b""  # empty: there is none yet
        found = self.unsigned.compare_set(key, before, signed(key, desired_value))
        return found and verified(key, found)

    def add(self, key: str, value: int) -> int:
        return self.unsigned.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self.unsigned.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.unsigned.wait(keys, *([] if timeout is None else [timeout]))

    def delete_key(self, key: str) -> bool:
        return self.unsigned.delete_key(key)

    deleteKey = delete_key  # the name by which torch's C++ calls it

    def set_timeout(self, timeout: timedelta) -> None:
        self.unsigned.set_timeout(timeout)
