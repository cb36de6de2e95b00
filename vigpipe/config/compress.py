"""How what replicas send one another is compressed (--compress)."""

import re
from dataclasses import dataclass
from typing import Literal

from vigpipe.errors import InputError


@dataclass(frozen=True)
class Compression:
    """A parsed --compress.

    Attributes:
        method: how numbers are compressed.
        ratio: of top-k: the share of the numbers of each tensor that is sent.
        rank: of powersgd: columns of the two matrices that are sent instead of one.
    """

    method: Literal["none", "bfloat16", "top-k", "powersgd"]
    ratio: float = 1.0
    rank: int = 0


def parse_compress(text: str) -> Compression:
    """Parse a value of --compress: none, bfloat16, top-k:RATIO or powersgd:RANK.

    Raises:
        InputError: the text is not one of these, or its number is out of range.
    """
    if text == "none":
        return Compression("none")
    if text == "bfloat16":
        return Compression("bfloat16")
    method, _, number = text.partition(":")
    is_number = re.fullmatch(r"[0-9]{0,9}\.?[0-9]{1,9}", number) is not None
    if method == "top-k" and is_number and 0 < float(number) <= 1:
        return Compression("top-k", ratio=float(number))
    if method == "powersgd" and re.fullmatch(r"[1-9][0-9]{0,3}", number):
        return Compression("powersgd", rank=int(number))
    raise InputError(
        f"--compress {text}: must be none; bfloat16; top-k:RATIO, with a share of the numbers up "
        "to 1, such as top-k:0.01; or powersgd:RANK, with a whole number from 1 to 9999, such as "
        "powersgd:4"
    )
