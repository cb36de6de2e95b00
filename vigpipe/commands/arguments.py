"""Say in one sentence what is wrong with the words of a command line, and with their values."""

import difflib
import re
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from cyclopts import (
    UNSET,
    App,
    ArgumentCollection,
    CoercionError,
    CycloptsError,
    UnusedCliTokensError,
)

from vigpipe.errors import InputError
from vigpipe.files.names import escaped, is_plain
from vigpipe.messages import program

_TYPES = {int: "a whole number", float: "a number", bool: "true or false"}


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
        choices = _choices(error.argument.hint)
        close = difflib.get_close_matches(value, choices, n=1)
        advice = f"; did you mean {close[0]}?" if close else ""
        return f"{where}{name} {value}: must be {_expected(error.argument.hint)}{advice}"
    return str(error)


def _choices(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return [str(choice) for choice in get_args(hint)]
    return [choice for part in get_args(hint) for choice in _choices(part)]


def _expected(hint: Any) -> str:
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    named = [_TYPES[part] for part in parts if part in _TYPES]
    choices = _choices(hint)
    if choices:
        named.append(f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0])
    others = [p for p in parts if p not in (*_TYPES, NoneType) and get_origin(p) is not Literal]
    return " or ".join(named or [getattr(part, "__name__", str(part)) for part in others])
