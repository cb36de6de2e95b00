"""Check what a caller gives from Python by the declared types, and say in words what is wrong."""

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from vigpipe.errors import InputError
from vigpipe.files.names import escaped, is_plain

P = ParamSpec("P")
R = TypeVar("R")

MOST_TEXT = 1000  # characters: longer ones name nothing, and their errors would be as long
_KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
}


def parts_of(hint: Any) -> tuple[Any, ...]:
    """Return the types that a declared one is made of: int and None of `int | None`."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def choices_of(hint: Any) -> list[str]:
    """Return the fixed values that a declared type has."""
    literals = (part for part in parts_of(hint) if get_origin(part) is Literal)
    return [str(choice) for part in literals for choice in get_args(part)]


def expected(hint: Any) -> str:
    """Say in words what a declared type takes."""
    choices = choices_of(hint)
    named = [f"one of {', '.join(choices)}" if len(choices) > 1 else c for c in choices[:1]]
    others = [p for p in parts_of(hint) if p is not NoneType and get_origin(p) is not Literal]
    named[:0] = [_KINDS.get(part) or _kind(part) for part in others]
    return " or ".join(named)


def _kind(part: Any) -> str:
    origin, of = get_origin(part), get_args(part)
    if origin is tuple:
        return f"{len(of)} times {expected(of[0])}"
    if origin is Callable:
        return "a function"
    if origin is not None:
        return f"several of: {expected(of[0])}"
    return getattr(part, "__name__", str(part))


def checked(name: str, value: Any, hint: Any) -> Any:
    """Return a value as its declared type has it: a path for text, Python's numbers for NumPy's.

    Raises:
        InputError: it has another type, or is text that the command line would refuse.
    """
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        value = value.item()
    for part in parts_of(hint):
        try:
            found = _as(part, value)
        except InputError as error:  # of one of several
            raise InputError(f"{name}: {error}") from error
        if found is not None:
            return found[0]
    why = ""
    if isinstance(value, str) and str in parts_of(hint):
        why = f" on one line, of UTF-8 and 1 to {MOST_TEXT} characters"
    raise InputError(f"{name}={shown(value)}: must be {expected(hint)}{why}")


def shown(value: Any) -> str:
    """Return a value as an error quotes it; of what is no plain value, the name of its type."""
    if isinstance(value, bool | int | float | str | bytes | os.PathLike | list | tuple | NoneType):
        try:
            return escaped(repr(value), 80)
        except ValueError:  # more digits than Python prints
            return "a number without end"
    return type(value).__name__


def _as(part: Any, value: Any) -> tuple[Any] | None:
    """Return a value, as a type has it, in a tuple; None if it is not of that type."""
    origin, is_number = get_origin(part), isinstance(value, int) and not isinstance(value, bool)
    if part is Any:
        return (value,)
    if origin is Literal:
        fits = [c for c in get_args(part) if type(c) is type(value) and c == value]
        return (fits[0],) if fits else None
    if part is Path:
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        return (Path(value),) if isinstance(value, str) and _can_be_path(value) else None
    if part is str:
        is_usual = isinstance(value, str) and 0 < len(value) <= MOST_TEXT and is_plain(value)
        return (str(value),) if is_usual else None
    if part is int:
        return (value,) if is_number and -(1 << 63) <= value < 1 << 63 else None
    if part is float:
        if is_number and abs(value) < 1 << 63:
            return (value,)
        return (value,) if isinstance(value, float) else None
    if origin is tuple:
        if not isinstance(value, tuple | list) or len(value) != len(get_args(part)):
            return None
        found = [_as(p, v) for p, v in zip(get_args(part), value, strict=True)]
        return None if None in found else (tuple(v for (v,) in found),)  # pyrefly: ignore[not-iterable]
    if origin is Callable:
        return (value,) if callable(value) else None
    if origin is Iterable:
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            return None
        return ([checked("one of them", v, get_args(part)[0]) for v in value],)
    return (value,) if isinstance(value, part) else None


def _can_be_path(text: str) -> bool:
    """Whether a file can have this path, however strange the name that others gave it."""
    try:
        return bool(text) and "\0" not in text and bool(os.fsencode(text))
    except UnicodeEncodeError:
        return False


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """Check the arguments of a function by its annotations, before it runs; see `checked`."""
    signature = inspect.signature(function)
    hints_of = functools.cache(get_type_hints)  # at the first call, when all names are there

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        hints = hints_of(function)
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            is_options = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            if name in hints and not is_options:
                where = f"{function.__qualname__.removesuffix('.__call__')}: {name}"
                bound.arguments[name] = checked(where, value, hints[name])
        return function(*bound.args, **bound.kwargs)

    return call
