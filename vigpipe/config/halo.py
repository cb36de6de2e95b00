"""What a rank gets of its neighbours' nodes in other parts of a graph (--halo)."""

import re
from dataclasses import dataclass
from typing import Literal

from vigpipe.errors import InputError


@dataclass(frozen=True)
class HaloKind:
    """A parsed --halo: the rows of this step, those of the step before, or some of this step."""

    method: Literal["exact", "stale", "sampled"] = "exact"
    rate: float = 1.0  # of sampled: the probability of a row


def parse_halo(text: str | None) -> HaloKind:
    """Parse exact, stale or sampled:P, and None as exact; raises InputError for another text."""
    if text is None or text == "exact":
        return HaloKind()
    if text == "stale":
        return HaloKind("stale")
    method, _, number = text.partition(":")
    is_number = re.fullmatch(r"[0-9]{0,9}\.?[0-9]{1,9}", number) is not None
    if method == "sampled" and is_number and 0 < float(number) <= 1:
        return HaloKind("sampled", float(number))
    raise InputError(
        f"--halo {text}: must be exact, stale, or sampled:P with the probability of a row, from 0 "
        "to 1, such as sampled:0.1"
    )
