"""Write docs/command-line.md from the command line's own parser: `python -m docs.command_line`."""

from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from cyclopts import App

from vigpipe.cli import make_app

PAGE = Path(__file__).with_name("command-line.md")
HEAD = """\
# Command line

`vigpipe VERB` and `python -m vigpipe VERB` are the same; `python -m vigpipe.train` is
`vigpipe train`. `--help` after any verb prints its options. This page is written by
`python -m docs.command_line` from the parser itself, and a test compares the two.

Where no default is given, the value follows from the model, the recipe or the machine, or the
option is off. Options may also come from a TOML file (`--config FILE`); those on the command line
win over it. Exit codes are on the page about [faults](faults.md#exit-codes).
"""


def page() -> str:
    """The whole page in Markdown."""
    app = make_app([])
    train = {row[0]: row for row in _rows(app["train"])}
    parts = [HEAD, *(_section(names, command, train) for names, command in _commands(app))]
    return "\n".join(parts)


def _commands(app: App, names: tuple[str, ...] = ("vigpipe",)) -> Iterator[tuple[str, App]]:
    """Every command that does something, by its full name, in the order of the parser."""
    for name in app:
        if name.startswith("-"):
            continue
        command = app[name]
        if any(not sub.startswith("-") for sub in command):
            yield from _commands(command, (*names, name))
        else:
            yield " ".join((*names, name)), command


def _section(name: str, command: App, train: dict[str, list[str]]) -> str:
    """Heading, what the command does, and a table of its arguments and options."""
    rows = _rows(command)
    text = [f"## {name}", "", (command.help or "").split("\n\n")[0].replace("\n", " "), ""]
    if name != "vigpipe train" and train.keys() <= {row[0] for row in rows}:
        rows = [row for row in rows if train.get(row[0]) != row]
        text += [
            "It takes every option of [vigpipe train](#vigpipe-train)"
            + ("; these are its own, or differ:" if rows else "."),
            "",
        ]
    if rows:
        text += ["| option | meaning |", "|---|---|"]
        text += [f"| {' | '.join(row)} |" for row in rows]
        text.append("")
    return "\n".join(text)


def _rows(command: App) -> list[list[str]]:
    """Name and meaning of every argument of a command, as cells of a table."""
    rows: list[list[str]] = []
    for argument in command.assemble_argument_collection(parse_docstring=True):
        if not argument.show:
            continue
        kinds, choices = _value(argument.hint)
        default = "required" if argument.required else _default(argument.field_info.default)
        values = [*kinds, *choices]
        value = " or ".join(filter(None, [", ".join(values[:-1]), *values[-1:]]))
        facts = "; ".join(filter(None, [value, default]))
        meaning = _escaped(" ".join((argument.parameter.help or "").split()))
        names = "<br>".join(f"`{name}`" for name in argument.names)
        rows.append([names, f"{meaning}<br>*{facts}*" if facts else meaning])
    return rows


def _value(hint: Any) -> tuple[list[str], list[str]]:  # noqa: ANN401
    """The kinds of value that an option takes, and its fixed choices."""
    if get_origin(hint) in (Union, UnionType):
        found = [_value(each) for each in get_args(hint)]
        kinds = dict.fromkeys(kind for kinds, _ in found for kind in kinds)
        return [*kinds], [choice for _, choices in found for choice in choices]
    if get_origin(hint) is Literal:
        return [], [f"`{choice}`" for choice in get_args(hint)]
    if get_origin(hint) is tuple:
        (kind,), _ = _value(get_args(hint)[0])
        return [f"{kind} …"], []
    names = {int: "whole number", float: "number", str: "text", Path: "path"}
    return [names[hint]] if hint in names else [], []


def _default(default: object) -> str:
    """What an option is where it is not given; nothing where that depends on something else."""
    if isinstance(default, bool):
        return "default: on" if default else "default: off"
    return f"default: `{default}`" if isinstance(default, int | float | str | Path) else ""


def _escaped(text: str) -> str:
    for character in "\\|<*_":
        text = text.replace(character, f"\\{character}")
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
