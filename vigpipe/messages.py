"""Print sentences for the user on stderr, whatever others have put into them.

Sentences quote file names, class names, options, metadata, manifests, profiles and the environment.
Every error and note goes through `tell`, so that no place that words one has to think of that.
"""

import re
import sys

from vigpipe.files.names import escaped, shortened

_program = ["vigpipe"]  # what the user has called
LONGEST_WORD = 300  # a name in a path has at most 255 bytes
LONGEST_SENTENCE = 3000  # weights that do not fit a model are a sentence of some 2,000 characters


def name_program(words: str) -> None:
    """Note what the user has called: vigpipe, or python -m and another package's name."""
    _program[:] = words.split()


def program() -> list[str]:
    """Return the words of what the user has called."""
    return list(_program)


def one_line(sentence: str) -> str:
    r"""Make a sentence safe to print on one line; leave out the middle of what is too long.

    Characters that a terminal acts upon are written as \x1b, \n or \u202e.
    """
    words = re.sub(r"\S+", lambda word: shortened(word[0], LONGEST_WORD), sentence)
    return escaped(words, LONGEST_SENTENCE)


def line(sentence: str) -> str:
    """Return the line that `tell` prints, with the newline at its end."""
    return f"vigpipe: {one_line(sentence)}\n"


def tell(sentence: str) -> None:
    """Print a sentence on stderr, as one line in one call, so that ranks do not mix theirs."""
    sys.stderr.write(line(sentence))
    sys.stderr.flush()
