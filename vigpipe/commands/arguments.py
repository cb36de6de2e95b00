"""Say in one sentence what is wrong with the words of a command line, and with their values."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from cyclopts import (
    UNSET,
    App,
    ArgumentCollection,
    CoercionError,
    CycloptsError,
    UnusedCliTokensError,
)

from vigpipe.config.typed import choices_of, expected
from vigpipe.errors import InputError
from vigpipe.files.names import escaped, is_plain
from vigpipe.files.untrusted import check_name
from vigpipe.messages import program


def with_negative_values(arguments: Sequence[str]) -> list[str]:
    """Join `--node -1,-1` to `--node=-1,-1`: the parser would take the value for an option."""
    joined: list[str] = []
    for argument in arguments:
        is_name = bool(joined) and re.fullmatch(r"--[a-z-]+", joined[-1])
        if is_name and re.match(r"-(\.?[0-9]|inf|nan)", argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def check_values(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Raise InputError for values that cyclopts would take in another sense than the user's.

    An empty path would be the current folder, a fraction would be rounded to a count, and what is
    not text on one line could not be kept in config.toml.
    """
    for argument in arguments:
        is_count = argument.hint is int or int in get_args(argument.hint)
        for token in argument.tokens:
            if not token.value and token.implicit_value is UNSET:
                raise InputError(f"{argument.name}: is empty; leave it out or give a value")
            if argument.name.startswith("-") and not is_plain(token.value):
                raise InputError(
                    f"{argument.name} {escaped(token.value)}: has control characters, or bytes "
                    "that are not UTF-8; give text on one line"
                )
            if argument.hint is Path or Path in get_args(argument.hint):
                try:
                    check_name(token.value)
                except InputError as error:
                    raise InputError(f"{argument.name} {error}") from error
            if is_count and re.fullmatch(r"[+-]?[0-9]*\.[0-9]*", token.value.strip()):
                raise InputError(f"{argument.name} {token.value}: must be a whole number")


def wrong_use(error: CycloptsError) -> str:
    """Word an error of the parser; its own words speak of Python's types and differ by version."""
    if isinstance(error, UnusedCliTokensError):
        words = " ".join(error.unused_tokens or ())
        return f"{words}: options start with --; see {' '.join(program())} --help"
    if isinstance(error, CoercionError) and error.token and error.argument and not error.msg:
        token, name = error.token, error.token.keyword or error.argument.name
        where = "" if token.source in ("", "cli") else f"{token.source}: "
        value = escaped(token.value)
        choices = choices_of(error.argument.hint)
        close = difflib.get_close_matches(value, choices, n=1)
        advice = f"; did you mean {close[0]}?" if close else ""
        return f"{where}{name} {value}: must be {expected(error.argument.hint)}{advice}"
    return str(error)
