"""What `--help` and `--help-all` print, from the parser: in groups, wrapped to the terminal."""

import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from cyclopts import App, Parameter

from vigpipe.config.choices import Recipe
from vigpipe.config.options import OPTIONS, TrainConfig
from vigpipe.config.recipes import GRAPH_MODEL, MODEL_DEFAULTS, RECIPES, default_of

FLAGS = ("--help", "-h", "--help-all")
_INDENT = 28  # columns before the meaning of an option
_WIDEST = 110


@dataclass(frozen=True)
class Option:
    """An option or a positional argument of a command."""

    names: tuple[str, ...]  # --name and, where it can be turned off, --no-name; or one word
    kinds: tuple[str, ...]  # of value that it takes: whole number, number, text, path
    choices: tuple[str, ...]
    default: str  # empty where it has none, or its meaning says by what it is decided
    of_recipes: tuple[tuple[str, str], ...]  # the recipes that set it otherwise, and what to
    is_required: bool
    meaning: str

    @property
    def field(self) -> str:
        """Name of the field of the options' dataclass: batch_size for --batch-size."""
        return self.names[0].removeprefix("--").replace("-", "_")

    @property
    def is_positional(self) -> bool:
        """Whether it is given by its place in the command."""
        return not self.names[0].startswith("-")


def options_of(command: App, model: str = TrainConfig.model) -> list[Option]:
    """Read the options of a command from its parser, in their order, with a model's defaults."""
    options = []
    for argument in command.assemble_argument_collection(parse_docstring=True):
        if not argument.show:
            continue
        name, meaning = argument.names[0], " ".join((argument.parameter.help or "").split())
        is_graph = MODEL_DEFAULTS[model].job == "graph"
        default = _default(argument.field_info.default) or _filled(name)
        if name == "--data" and is_graph and default == TrainConfig.data:
            default = "none, as a graph has to be named"
        of_recipes: dict[str, str] = {}
        is_told = argument.required or not name.startswith("-") or "by default" in meaning.lower()
        if not default and not is_told:
            default, of_recipes = _of_model(name, model)
        options.append(
            Option(
                tuple(argument.names),
                *_values(argument.hint),
                default or ("" if is_told else "none"),
                tuple(of_recipes.items()),
                bool(argument.required),
                meaning,
            )
        )
    return options


def options_of_train(model: str = TrainConfig.model) -> list[Option]:
    """Return the options of `vigpipe train`, with the defaults of a model."""

    def train(*, config: Annotated[TrainConfig, Parameter(name="*")] = TrainConfig()) -> None:  # noqa: B008
        pass

    return options_of(App(default_command=train), model)


def subcommands(command: App) -> list[str]:
    """Return the names of the commands below a command, in their order; none if it is a verb."""
    return [name for name in command if not name.startswith("-")]


def beside_train(options: Sequence[Option], trains: Sequence[Option]) -> list[Option] | None:
    """Return a command's options that train lacks or has otherwise; None if it lacks train's."""
    if not {option.field for option in trains} <= {option.field for option in options}:
        return None
    return [option for option in options if option not in trains]


def default_text(field: str, model: str, recipe: Recipe | None = None) -> str:
    """Write what an option that is left open is with a model and a recipe; empty if it is not."""
    return _default(default_of(field, model, recipe))


def wants_help(app: App, arguments: Sequence[str]) -> bool:
    """Whether a command line asks for help, or names no command that does something."""
    if any(flag in arguments for flag in FLAGS):
        return True
    _, apps, rest = app.parse_commands(arguments)
    return apps[-1].default_command is None and not rest


def help_text(app: App, arguments: Sequence[str], width: int | None = None) -> str:
    """Write the help of the command that a command line names, without the program."""
    width = width or min(shutil.get_terminal_size().columns, _WIDEST)
    names, apps, _ = app.parse_commands([word for word in arguments if word not in FLAGS])
    name, command = " ".join((app.name[0], *names)), apps[-1]
    if subcommands(command):
        return "\n".join(_list_commands(name, command, width))
    model, is_full = _model_in(arguments), "--help-all" in arguments
    return "\n".join(_list_options(name, command, model, width, is_full=is_full))


def summary(command: App) -> str:
    """Return what a command does: the first paragraph of its docstring, on one line."""
    return " ".join((command.help or "").split("\n\n")[0].split())


def _list_commands(name: str, command: App, width: int) -> list[str]:
    parts = [f"Usage: {name} COMMAND", "", *textwrap.wrap(summary(command), width), "", "Commands"]
    for sub in subcommands(command):
        parts += _entry(sub, summary(command[sub]), width, indent=14)
    return [*parts, "", f"{name} COMMAND --help tells the options of a command."]


def _model_in(arguments: Sequence[str]) -> str:
    """Return the model that a command line names, by default that of train."""
    for word, after in zip(arguments, [*arguments[1:], ""], strict=True):
        named = after if word == "--model" else word.removeprefix("--model=")
        if named in MODEL_DEFAULTS:
            return named
    return TrainConfig.model


def _list_options(name: str, command: App, model: str, width: int, *, is_full: bool) -> list[str]:
    options = options_of(command, model)
    arguments = [option for option in options if option.is_positional]
    words = [option.names[0] for option in arguments]
    parts = [" ".join(("Usage:", name, *words, "[OPTIONS]")), ""]
    parts += [*textwrap.wrap(summary(command), width), ""]
    trains = options_of_train(model)
    own = beside_train(options, trains)
    more = ""  # where the options are that are left out
    if name == "vigpipe train":
        shown = [o for o in options if is_full or OPTIONS[o.field].short]
        groups = _grouped(shown)
        more = f"There are {len(options) - len(shown)} more: vigpipe train --help-all."
        of_models = f"Defaults are those of {model}; --model NAME --help tells those of another."
        parts += [*textwrap.wrap(of_models, width), ""]
    elif own is not None:
        groups = {"Options": own} | (_grouped(trains) if is_full else {})
        more = "It takes the options of vigpipe train as well, which vigpipe train --help tells."
    else:
        flags = [option for option in options if not option.is_positional]
        groups = {"Arguments": arguments, "Options": flags}
    for group, members in groups.items():
        if members:
            parts.append(group)
            for option in members:
                parts += _entry(_label(option), _meaning(option), width)
            parts.append("")
    return parts if is_full else [*parts, *textwrap.wrap(more, width)]


def _grouped(options: Iterable[Option]) -> dict[str, list[Option]]:
    by_field = {option.field: option for option in options}
    groups: dict[str, list[Option]] = {}
    for name, facts in OPTIONS.items():
        groups.setdefault(facts.group, []).extend([by_field[name]] if name in by_field else [])
    return groups


def _entry(label: str, meaning: str, width: int, indent: int = _INDENT) -> list[str]:
    """Lay an entry out in two columns; a label that is too long has a line of its own."""
    lines = textwrap.wrap(meaning, width - indent, break_long_words=False, break_on_hyphens=False)
    if len(label) + 4 > indent:
        lines.insert(0, "")
    first, *rest = lines or [""]
    return [f"  {label:<{indent - 2}}{first}".rstrip(), *(" " * indent + line for line in rest)]


def _label(option: Option) -> str:
    if option.is_positional:
        return option.names[0]
    is_off = option.default == "off" and not option.of_recipes
    names = option.names[:1] if is_off else option.names
    kinds = ["CHOICE"] if option.choices and not option.kinds else []
    kinds += [{"whole number": "N", "number": "X"}.get(kind, kind.upper()) for kind in option.kinds]
    return " ".join((", ".join(names), "|".join(kinds))).strip()


def _meaning(option: Option) -> str:
    default = "required" if option.is_required else ""
    if option.default and (option.default != "off" or option.of_recipes):
        default = f"default: {option.default}"
    of_recipes = ", ".join(f"{recipe} {value}" for recipe, value in option.of_recipes)
    if of_recipes:
        of_recipes = f"with recipe {of_recipes}"
    choices = ", ".join(option.choices)
    if choices:
        choices = f"{'or' if option.kinds else 'one of'} {choices}"
    facts = "; ".join(filter(None, [choices, default, of_recipes]))
    return f"{option.meaning} [{facts}]" if facts else option.meaning


def _values(hint: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the kinds of value that an option takes, and its fixed choices."""
    if get_origin(hint) in (Union, UnionType):
        found = [_values(each) for each in get_args(hint)]
        kinds = dict.fromkeys(kind for kinds, _ in found for kind in kinds)
        return (*kinds,), tuple(choice for _, choices in found for choice in choices)
    if get_origin(hint) is Literal:
        return (), tuple(str(choice) for choice in get_args(hint))
    if get_origin(hint) is tuple:
        (kind,), _ = _values(get_args(hint)[0])
        return (f"{kind} …",), ()
    names = {int: "whole number", float: "number", str: "text", Path: "path"}
    return ((names[hint],), ()) if hint in names else ((), ())


def _filled(name: str) -> str:
    """Return the value that an option of training takes where it counts but is not given."""
    facts = OPTIONS.get(name.removeprefix("--").replace("-", "_"))
    if facts is None or facts.filled is None:
        return ""
    if isinstance(facts.filled, Mapping):
        return ", ".join(f"{value} with {of}" for of, value in facts.filled.items())
    return str(facts.filled)


def _of_model(name: str, model: str) -> tuple[str, dict[str, str]]:
    """Return what an option of training takes by a model, and what by recipes that differ."""
    field = name.removeprefix("--").replace("-", "_")
    facts = OPTIONS.get(field)
    if facts is None:
        return "", {}
    job = MODEL_DEFAULTS[model].job
    if facts.job not in (None, job):
        model = TrainConfig.model if job == "graph" else GRAPH_MODEL
    default = default_text(field, model)
    if MODEL_DEFAULTS[model].job == "graph":
        return default, {}
    of_recipes = {recipe: default_text(field, model, recipe) for recipe in RECIPES}
    return default, {recipe: text for recipe, text in of_recipes.items() if text != default}


def _default(default: object) -> str:
    """Write a default; nothing is one that depends on something else."""
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default) if isinstance(default, int | float | str | Path) else ""
