"""How what replicas send one another is compressed (--compress)."""

import re
from dataclasses import dataclass
from typing import Literal

from vigpipe.errors import InputError


@dataclass(frozen=True)
class Compression:
    """A parsed --compress."""

    method: Literal["none", "bfloat16", "top-k", "powersgd"]
    ratio: float = 1.0  # of top-k: the share of the numbers of each tensor that is sent
    rank: int = 0  # of powersgd: columns of the two matrices that are sent instead of one


def parse_compress(text: str) -> Compression:
    """Parse none, bfloat16, top-k:RATIO or powersgd:RANK; raises InputError for another text."""
    if text in ("none", "bfloat16"):
        return Compression(text)
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
