"""Check --auto-augment: timm's names of random augmentations, with bounds on their numbers.

timm leaves out what it does not understand (`rand-fast`, `rand-mstdinf`), and takes any number:
with a thousand million layers an image takes days.

    none
    original, originalr, v0, v0r, 3a    then -mstd
    rand                                then -m, -n, -p, -mstd, -mmax, -inc, -t, in any order
    augmix                              then -m, -w, -d, -a, -b, -mstd, in any order
"""

import re

from vigpipe.errors import InputError

_POLICIES = ("original", "originalr", "v0", "v0r", "3a")
_WHOLE: dict[str, tuple[int, int]] = {
    "m": (0, 30),  # magnitude
    "n": (1, 16),  # layers: operations on an image
    "mmax": (1, 30),
    "inc": (0, 1),
    "w": (1, 16),  # chains of AugMix
    "d": (1, 16),  # operations of each chain
    "b": (0, 1),
}
_REAL: dict[str, tuple[float, float]] = {"p": (0, 1), "mstd": (0, 1000), "a": (0.01, 100)}
_SETS = ("weights", "3aw", "3a")  # of operations; timm takes other names for its usual set
_KEYS = {
    **dict.fromkeys(_POLICIES, ("mstd",)),
    "rand": ("m", "n", "p", "mstd", "mmax", "inc", "t"),
    "augmix": ("m", "w", "d", "a", "b", "mstd"),
}


def check_auto_augment(text: str) -> None:
    """Raise InputError for a text that is not the name of an augmentation."""
    name, *sections = text.split("-")
    if name not in _KEYS and text != "none":
        raise _wrong(text, f"{name!r} is not one of {', '.join(_KEYS)} or none")
    seen: set[str] = set()
    for section in sections:
        match = re.fullmatch(r"(t)([a-z0-9]{1,16})|([a-z]+)([0-9]{1,4}(?:\.[0-9]{1,6})?)", section)
        key, value = (match[1] or match[3], match[2] or match[4]) if match else ("", "")
        if key not in _KEYS[name] or key in seen:
            keys = ", ".join(f"-{key}" for key in _KEYS[name])
            raise _wrong(text, f"-{section} is not one of {keys} with a number, each once")
        seen.add(key)
        least, most = _WHOLE.get(key) or _REAL.get(key) or (0, 0)
        is_whole = value.isdecimal() or key not in _WHOLE
        if key == "t" and value not in _SETS:
            raise _wrong(text, f"-{section} must name one of {', '.join(_SETS)}")
        if key != "t" and not (is_whole and least <= float(value) <= most):
            kind = "whole number" if key in _WHOLE else "number"
            raise _wrong(text, f"-{section} must have a {kind} from {least} to {most}")


def _wrong(text: str, why: str) -> InputError:
    return InputError(f"--auto-augment {text}: {why}; choose one such as rand-m9-mstd0.5-inc1")
