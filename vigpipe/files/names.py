"""Text that others have chosen: which of it can be kept as it is, and how to print the rest."""

import unicodedata
from collections.abc import Sequence

from vigpipe.errors import InputError

# Control characters, halves of surrogate pairs (Python's stand-in for bytes that are not UTF-8),
# and separators of lines and paragraphs.
_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")
# Marks that change the direction of what stands around them (Unicode Standard Annex 9).
_BIDIRECTIONAL = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)


MOST_NAMED = 5  # of many names in a sentence


def is_plain(text: str) -> bool:
    """Whether a text is UTF-8 on one line, without characters that a terminal acts upon."""
    return all(map(_is_plain, text))


def escaped(text: str, most: int = 200) -> str:
    r"""Make a text safe to print: nothing in it moves the cursor, forges a line or hides others.

    Such characters are written as \x1b or \u202e, and bytes that are not UTF-8 as \xff. The middle
    of a text of more than `most` characters is left out.
    """
    return "".join(c if _is_plain(c) else _escape(c) for c in shortened(text, most))


def shortened(text: str, most: int) -> str:
    """Leave out the middle of a text of more than `most` characters: its ends tell what it is."""
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end]}…{text[len(text) - end :]}"


def first_few(names: Sequence[str], most: int = MOST_NAMED) -> str:
    """Name the first of many, safe to print: `a, b, …`."""
    shown = [escaped(name) for name in names[:most]]
    return ", ".join([*shown, "…"] if len(names) > most else shown)


def are_numbers(names: Sequence[str]) -> bool:
    """Whether classes are named after their labels, as those without names are, or not at all."""
    return all(name == str(label) for label, name in enumerate(names))


def check_class_names(names: Sequence[str], where: str) -> None:
    """Raise InputError, which begins with `where`, if names cannot be shown, or two are equal."""
    seen: set[str] = set()
    for label, name in enumerate(names):
        if not name.strip() or not is_plain(name):
            raise InputError(
                f"{where}: the name of class {label}, '{escaped(name)}', is empty or has control "
                "characters in it; rename it"
            )
        if name in seen:
            raise InputError(
                f"{where}: two classes are called '{escaped(name)}'; give each a name of its own"
            )
        seen.add(name)


def _is_plain(character: str) -> bool:
    return character not in _BIDIRECTIONAL and unicodedata.category(character) not in _CATEGORIES


def _escape(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # PEP 383: a byte that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
