"""Write docs/command-line.md from the command line's own parser: `python -m docs.command_line`."""

from collections.abc import Iterator
from pathlib import Path

from cyclopts import App

from benchmarks import cli as benchmarks
from vigpipe import cli
from vigpipe.commands.help import (
    Option,
    beside_train,
    default_text,
    options_of,
    options_of_train,
    subcommands,
    summary,
)
from vigpipe.config.choices import GRAPH_MODELS, MODELS
from vigpipe.config.options import OPTIONS, flag
from vigpipe.config.recipes import RECIPES

PAGE = Path(__file__).with_name("command-line.md")
TRAINING = Path(__file__).with_name("training.md")
_IMAGE_MODELS = ("vig_digits", "vig_study", "vig_ti_224", "vig_cifar_ti")
HEAD = """\
# Command line

`vigpipe VERB` and `python -P -m vigpipe VERB` are the same; `python -P -m vigpipe.train` is
`vigpipe train`. `--help` after any verb prints its options; `vigpipe train --help` prints those
that matter most, and `--help-all` all of them. This page is written by
`python -m docs.command_line` from the parser itself, and a test compares the two. What compares and
measures is not part of the package: `python -m benchmarks NAME`, in a checkout.

Where no default is given, the value follows from the model, the recipe or the machine, or the
option is off. Options may also come from a TOML file (`--config FILE`); those on the command line
win over it. Exit codes are on the page about [faults](faults.md#exit-codes).

`vigpipe completion bash` (or `zsh`, `fish`) prints a script that completes verbs, options and
choices. It belongs into a file that the shell reads by itself:

| shell | file |
|---|---|
| bash, with bash-completion | `~/.local/share/bash-completion/completions/vigpipe` |
| zsh | `_vigpipe` in a folder of `$fpath`; then `compinit` |
| fish | `~/.config/fish/completions/vigpipe.fish` |
"""


def page() -> str:
    """The whole page in Markdown."""
    trains, parts = options_of_train(), [HEAD]
    for app in (cli.make_app([]), benchmarks.make_app([])):
        commands = _commands(app, (app.name[0],))
        parts += [_section(name, command, trains) for name, command in commands]
    return "\n".join(parts)


def defaults_table() -> str:
    """Table of training.md: what the models and the recipes say of each option, as Markdown."""
    columns = [(model, None) for model in _IMAGE_MODELS]
    columns += [("vig_digits", recipe) for recipe in RECIPES]
    heads = (*(f"`{model}`" for model in _IMAGE_MODELS), *(f"recipe `{name}`" for name in RECIPES))
    rows = [f"| option | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for name in OPTIONS:
        values = [default_text(name, model, recipe) for model, recipe in columns]
        if len({*values}) == 1:
            continue
        for i, recipe in enumerate(RECIPES, len(_IMAGE_MODELS)):
            values[i] *= name in RECIPES[recipe]
        rows.append(f"| `{flag(name)}` | {' | '.join(values)} |")
    return "\n".join(rows)


def _commands(app: App, names: tuple[str, ...]) -> Iterator[tuple[str, App]]:
    """Every command that does something, by its full name, in the order of the parser."""
    for name in subcommands(app):
        command = app[name]
        if subcommands(command):
            yield from _commands(command, (*names, name))
        else:
            yield " ".join((*names, name)), command


def _section(name: str, command: App, trains: list[Option]) -> str:
    """Heading, what the command does, and a table of its arguments and options."""
    options = options_of(command)
    text = [f"## {name}", "", summary(command), ""]
    own = beside_train(options, trains)
    if own is not None and name != "vigpipe train":
        options = own
        text += [
            "It takes every option of [vigpipe train](#vigpipe-train)"
            + ("; these are its own, or differ:" if own else "."),
            "",
        ]
    if options:
        text += ["| option | meaning |", "|---|---|"]
        text += [f"| {' | '.join(_row(option))} |" for option in options]
        text.append("")
    return "\n".join(text)


def _row(option: Option) -> tuple[str, str]:
    """Name and meaning of an option, as cells of a table."""
    default = "required" if option.is_required else _default(option)
    choices = [f"`{choice}`" for choice in option.choices]
    if {*MODELS} <= {*option.choices}:
        of = "" if {*GRAPH_MODELS} <= {*option.choices} else " of images"
        choices = [f"one of the [models{of}](models.md)"]
    values = [*option.kinds, *choices]
    value = " or ".join(filter(None, (", ".join(values[:-1]), *values[-1:])))
    of_recipes = ", ".join(f"{recipe} `{text}`" for recipe, text in option.of_recipes)
    if of_recipes:
        of_recipes = f"with recipe {of_recipes}"
    facts = "; ".join(filter(None, [value, default, of_recipes]))
    meaning = _escaped(option.meaning)
    names = "<br>".join(f"`{name}`" for name in option.names)
    return names, f"{meaning}<br>*{facts}*" if facts else meaning


def _default(option: Option) -> str:
    if not option.default:
        return ""
    is_flag = option.default in ("on", "off")
    return f"default: {option.default}" if is_flag else f"default: `{option.default}`"


def _escaped(text: str) -> str:
    for character in "\\|<*_":
        text = text.replace(character, f"\\{character}")
    return text


def training_page() -> str:
    """The page about training, with its table of defaults written again."""
    before, _, rest = TRAINING.read_text(encoding="utf-8").partition("| option | `vig_digits`")
    _, end, after = rest.partition("\n\n")
    return before + defaults_table() + end + after


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    TRAINING.write_text(training_page(), encoding="utf-8")
