"""Many short texts without an object for each: the names of a million images take 50 MB."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Texts:
    """Texts by index behind one another in UTF-8; other bytes are kept as Python does in paths."""

    content: bytes
    ends: np.ndarray  # (n,) int64

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> str:
        start = self.ends[index - 1] if index else 0
        return self.content[start : self.ends[index]].decode("utf-8", "surrogateescape")


def pack(texts: Iterable[str]) -> Texts:
    """Put texts behind one another."""
    content, ends = bytearray(), array("q")
    for text in texts:
        content += text.encode("utf-8", "surrogateescape")
        ends.append(len(content))
    return Texts(bytes(content), np.array(ends, dtype=np.int64))


def join(several: Sequence[Texts]) -> Texts:
    """Return the texts of several as one."""
    starts = np.cumsum([0, *(len(texts.content) for texts in several)])
    ends = [texts.ends + start for texts, start in zip(several, starts, strict=False)]
    content = b"".join(texts.content for texts in several)
    return Texts(content, np.concatenate([np.empty(0, dtype=np.int64), *ends]))
