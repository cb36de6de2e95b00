"""What --help prints, and what a shell completes."""

import io
import re
import subprocess
from contextlib import redirect_stdout
from dataclasses import fields

import pytest
from cyclopts import App

from vigpipe.cli import main, make_app
from vigpipe.commands.completion import completion_script
from vigpipe.commands.help import help_text, options_of_train
from vigpipe.config.options import OPTIONS, TrainConfig, flag

SHORT = [name for name, facts in OPTIONS.items() if facts.short]
GROUPS = dict.fromkeys(facts.group for facts in OPTIONS.values())


def options_in(text: str) -> list[str]:
    """The first name of every entry."""
    return re.findall(r"^  (--[a-z0-9-]+)", text, re.MULTILINE)


def help_of(words: str, width: int = 80) -> str:
    return help_text(make_app([]), words.split(), width)


@pytest.mark.parametrize(
    ("words", "width"), [("", 80), ("train --help-all", 110), ("predict -h", 60)]
)
def test_no_line_is_wider_than_the_terminal(words, width):
    lines = help_of(words, width).splitlines()
    assert max(map(len, lines)) <= width
    assert max(map(len, lines)) > width * 0.8


def test_train_shows_what_matters_in_groups_and_says_how_many_more_there_are():
    short, everything = help_of("train --help"), help_of("train --help-all")
    assert set(options_in(short)) == {flag(name) for name in SHORT}
    assert sorted(options_in(everything)) == sorted(flag(f.name) for f in fields(TrainConfig))
    assert [line for line in short.splitlines() if line in GROUPS] == [*GROUPS]
    more = len(fields(TrainConfig)) - len(SHORT)
    assert f"There are {more} more: vigpipe train --help-all." in short


def test_every_option_of_train_says_its_default_and_what_a_recipe_makes_of_it():
    text = " ".join(help_of("train --help-all").split())
    assert "[default: 15; with recipe imagenet 300, cifar 100, finetune 20]" in text
    assert "[default: 0.004; with recipe imagenet 0.002 for 1,024 images a step, cifar" in text
    published = " ".join(help_of("train --model=pvig_b_224 --help-all").split())
    assert "[default: 300; with recipe cifar 100, finetune 20]" in published
    assert "test image that is kept. [default: 0.95]" in published
    assert "[default: 16]" in help_of("train --model gcn2 --help-all")
    told = [o.default or "by default" in o.meaning.lower() for o in options_of_train()]
    assert all(told)


def test_check_time_and_plan_show_what_differs_and_point_to_train():
    for verb, *own in (
        ("check", "--compare-steps"),
        ("time", "--steps", "--test-batches"),
        ("plan", "--bandwidth", "--profile", "--explain"),
    ):
        text = help_of(f"{verb} --help")
        assert set(own) <= set(options_in(text))
        assert "--lr" not in text
        assert "the options of vigpipe train as well" in text
    assert "--lr" in help_of("plan --help-all")


def test_a_positional_argument_is_named_by_its_place():
    text = help_of("weights convert --help")
    assert text.startswith("Usage: vigpipe weights convert SOURCE TARGET [OPTIONS]")
    assert "  TARGET                    the .safetensors file to write. [required]" in text


def test_a_switch_that_is_on_shows_how_it_is_turned_off():
    assert "\n  --timing  " in help_of("train --help-all")
    assert "\n  --augment, --no-augment" in help_of("train --help-all")


def test_bash_completes_verbs_options_and_choices(tmp_path):
    script = tmp_path / "vigpipe.bash"
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["completion", "bash"]) == 0
    script.write_text(printed.getvalue())

    def completed(*words: str) -> list[str]:
        line = " ".join(words)
        code = f"""
            source {script}
            COMP_WORDS=({" ".join(word or "''" for word in words)})
            COMP_CWORD={len(words) - 1} COMP_LINE="{line}" COMP_POINT={len(line)}
            $(complete -p vigpipe | sed 's/.*-F \\([^ ]*\\).*/\\1/') vigpipe "{words[-1]}"
            printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
        return [word.strip() for word in done.stdout.splitlines()]

    assert "train" in completed("vigpipe", "tr")
    assert "--keep-best" in completed("vigpipe", "train", "--keep")
    assert completed("vigpipe", "train", "--schedule", "1") == ["1f1b"]


def test_zsh_and_fish_have_scripts_with_the_options():
    """By hand, in zsh 5.9, from a folder of $fpath and sourced: what bash completes above."""
    app = App("vigpipe", version_flags=())

    @app.command
    def train(*, keep_best: str = "none"):
        """Train."""

    assert "keep-best" in completion_script(app, "fish")
    script = completion_script(app, "zsh")
    assert "keep-best" in script
    (function,) = re.findall(r"^(_\w+)\(\)", script, re.MULTILINE)
    assert script.endswith(f'  {function} "$@"\nelse\n  compdef {function} vigpipe\nfi')


def test_another_shell_is_refused(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "tcsh" in capsys.readouterr().err
