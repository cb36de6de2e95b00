"""The pages: their commands are parsed or run, and what they copy from elsewhere is what is there.

Every command in a fence marked `sh`, and behind a `$` in one marked `console`, is either one of
vigpipe's, and then the real parser must take it, or listed in `OTHERS`. `RUN` are really run here.
CI runs the README's two commands to the letter, and docs/build.py checks links, anchors, images and
names of the Python API. What needs minutes, several ranks, a network or the checkout was last run
by hand on 2026-11-25; under Slurm, tests/slurm runs the same options.
"""

import os
import re
import shlex
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import matplotlib as mpl
import pytest
import torch
from cyclopts import CycloptsError
from PIL import Image
from safetensors.torch import save_file

import vigpipe
from benchmarks import cli as benchmarks
from docs import command_line
from tests.world import ROOT
from vigpipe import api, cli
from vigpipe.model.variants import create_model

PAGES = sorted(
    path
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/*.md", "slurm/*.md", "stages/*.md")
    for path in ROOT.glob(pattern)
)
# Commands that are not vigpipe's own, by how they begin, and who runs them.
OTHERS = {
    ".ci/run": "CI",
    ". .venv/bin/activate": "by hand",
    ".uv/bin/uv pip sync --python .venv-docs --require-hashes requirements-docs.lock": "CI",
    ".uv/bin/uv venv --allow-existing .venv-docs": "CI",
    ".venv-docs/bin/python docs/build.py": "CI",
    ".venv/bin/pyrefly": "CI",
    ".venv/bin/python -m pytest": "CI",
    ".venv/bin/ruff": "CI",
    "eval": "tests/slurm",
    "export": "tests/slurm",
    "python -m examples.digits": "below",
    "python -m vigpipe.model.table": "tests/model/test_table.py",
    "slurm/hosts.sh": "tests/slurm",
    "slurm/local.sh": "tests/slurm",
    "wait": "by hand",
    "uv pip compile": "by hand",
}
# Commands that are run here, in this order and in one folder, and what is added to make them short.
RUN = {
    "vigpipe train --model vig_cifar_ti --data pictures --image-size 32 --recipe cifar "
    "--out runs/first": "--steps 2 --batch-size 4 --checkpoint-every 1 --threads 1 "
    "--keep-best top1",
    "vigpipe evaluate --weights runs/first/model.safetensors --data pictures "
    "--page mistakes.html": "--threads 1",
    "vigpipe predict --weights runs/first/model.safetensors cat.jpg": "--threads 1",
    "vigpipe explain --weights runs/first/model.safetensors --image cat.jpg": "",
    "vigpipe checkpoint list runs/a": "",
    "vigpipe checkpoint verify runs/a": "",
    "vigpipe checkpoint export runs/a weights.safetensors": "",
    "vigpipe checkpoint export --best runs/a best.safetensors": "",
    "vigpipe report runs/first runs/second --out report.html": "",
    "vigpipe train --model sage --data sbm:2000 --dropout 0.5 --epochs 20": "--steps 2 --threads 1 "
    "--out runs/graph",
    "vigpipe doctor": "",
    "vigpipe plan --model vig_ti_224 --stages 2 --batch-size 20 --explain --profile "
    "results/2026-11-21-predict-vig-ti-2core/profile.json": "",
}


@dataclass(frozen=True)
class Fence:
    """A fenced block of a page."""

    page: Path
    language: str
    text: str

    def commands(self) -> list[str]:
        """The command lines in it, without comments, continued lines joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [
            shlex.join(words) if "&&" not in words and "$(" not in line else line
            for line in lines
            if (words := shlex.split(line, comments=True))
        ]


def fences(*languages):
    return [
        Fence(page, *found.groups())
        for page in PAGES
        for found in re.finditer(
            r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
        if found[1] in languages
    ]


def arguments(command):
    """What a command gives to vigpipe behind its name; None if it is another program's.

    Those of `python -m benchmarks` begin with that word.
    """
    words = shlex.split(command)
    if words[0] == "sbatch":
        script = next(i for i, word in enumerate(words) if word.endswith(".sbatch"))
        assert (ROOT / words[script]).is_file(), command
        verb = ["benchmarks", "study"] if "study" in words[script] else ["train"]
        return [*verb, *words[script + 1 :]]
    if words[0] in ("srun", "torchrun"):
        starts = ("python", "-m", "vigpipe")
        words = words[next(i for i, word in enumerate(words) if i and word in starts) :]
    while words[0] in ("python", ".venv/bin/python", "-m"):
        words = words[1:]
    if words[0] == "vigpipe.train":
        return ["train", *words[1:]]
    if words[0] == "benchmarks":
        return words
    return words[1:] if words[0] == "vigpipe" else None


COMMANDS = [
    (fence.page.relative_to(ROOT), command)
    for fence in fences("sh", "console")
    for command in fence.commands()
]


def test_every_command_of_a_page_is_one_that_there_is():
    app, failures = cli.make_app([]), []
    apps = {True: benchmarks.make_app([]), False: app}
    for command, page in {command: page for page, command in COMMANDS}.items():
        given = arguments(command)
        try:
            if given is not None:
                is_benchmark = given[0] == "benchmarks"
                words = given[is_benchmark:]
                apps[is_benchmark].parse_args(words, exit_on_error=False, print_error=False)
            elif not any(command.startswith(other) for other in OTHERS):
                failures.append(f"{page}: who runs {command}?")
        except CycloptsError as error:
            failures.append(f"{page}: {command}: {error}")
    assert not failures, "\n".join(failures)
    given = arguments("srun -n 4 python -m vigpipe.train --stages 2 --micro-batches 5")
    assert given == ["train", "--stages", "2", "--micro-batches", "5"]
    with pytest.raises(CycloptsError, match="--micro-batches"):
        app.parse_args(given, exit_on_error=False, print_error=False)


def test_the_lists_name_no_command_that_no_page_has():
    # `vigpipe` is written `python -m vigpipe` here and there; the words behind are what counts.
    listed = [command for _, command in COMMANDS]
    parsed = [given for command in listed if (given := arguments(command)) is not None]
    for command in RUN:
        assert arguments(command) in parsed
    inline = " ".join(page.read_text(encoding="utf-8") for page in PAGES)
    for other in OTHERS:
        assert any(command.startswith(other) for command in listed) or f"`{other}`" in inline


def make_pictures():
    """The pictures that the pages speak of, in the current folder."""
    for split in ("train", "test"):
        for index, name in enumerate(("cat", "dog", "fox")):
            folder = Path("pictures", split, name)
            folder.mkdir(parents=True)
            for shade in range(2):
                Image.new("RGB", (40, 36), (60 * index, 90 * shade, 120)).save(
                    folder / f"{shade}.png"
                )
    Image.new("RGB", (40, 36), "orange").save("cat.jpg")


def train_here(*, on_step=None, **options):
    """vigpipe.train, only shorter than a reader would run it: two steps, in this process."""
    options |= {"steps": 2, "stages": 1, "threads": 1, "batch_size": 6}
    folder = Path(options.setdefault("out", "runs/python"))
    assert cli.main(["train", *api.as_arguments(options)]) == 0
    run = api.read_training(folder, is_done=True)
    if on_step is not None:
        for row in run.steps:
            on_step(row)
    return run


def test_the_cheap_commands_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.symlink(ROOT / "results", "results")
    make_pictures()
    shown = {command: fence.text for fence in fences("console") for command in fence.commands()}
    for command, more in RUN.items():
        given = arguments(command)
        assert given is not None
        assert cli.main([*given, *more.split()]) == 0, (command, capsys.readouterr())
        printed = capsys.readouterr().out
        if command in shown:
            assert shown[command].partition("\n")[2].rstrip("\n") in printed
        if "--out runs/first" in command:
            shutil.copytree("runs/first", "runs/a")
            shutil.copytree("runs/first", "runs/second")
    weights = ("weights.safetensors", "best.safetensors")
    for made in (*weights, "explain.png", "report.html", "runs/first/summary.json"):
        assert Path(made).stat().st_size > 0


def test_the_python_of_the_pages_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vigpipe, "train", train_here)
    make_pictures()
    torch.save(create_model("vig_ti_224", num_classes=1000).state_dict(), "vig_ti_74.5.pth")
    Path("runs", "<time>").mkdir(parents=True)
    digits = create_model("vig_digits", num_classes=10, in_chans=1)
    save_file(digits.state_dict(), "runs/<time>/model.safetensors")
    blocks = [fence for fence in fences("python") if fence.page.name != "python.md"]
    assert {fence.page.name for fence in blocks} == {"README.md", "models.md", "start.md"}
    for fence in blocks:
        names = {"image": Image.new("RGB", (300, 260), "orange")}
        exec(compile(fence.text, str(fence.page), "exec"), names)
        assert isinstance(names["model"], torch.nn.Module)


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(vigpipe, "train", train_here)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = ROOT / "examples" / "digits.py"
    with mpl.rc_context({"backend": "agg"}):
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {})
    printed = capsys.readouterr().out
    assert "after 2 steps" in printed
    assert "of 360 test images are right" in printed
    assert "four.png is a " in printed
    pictures = {picture.name for picture in tmp_path.glob("*/digits/*.png")}
    assert pictures == {"graph.png", "four.png"}


def test_the_page_of_the_example_shows_what_is_in_it():
    example = (ROOT / "examples" / "digits.py").read_text(encoding="utf-8").splitlines()
    blocks = [fence for fence in fences("python") if fence.page.name == "python.md"]
    assert blocks
    for fence in blocks:
        for line in fence.text.splitlines():
            assert line in example


@pytest.mark.skipif(
    f"cyclopts=={version('cyclopts')} " not in (ROOT / "requirements.lock").read_text(),
    reason="earlier cyclopts knows less about options that are inherited",
)
@pytest.mark.parametrize(
    ("path", "page"),
    [
        (command_line.PAGE, command_line.page),
        (command_line.TRAINING, command_line.training_page),
    ],
)
def test_the_pages_about_options_are_what_the_parser_and_the_recipes_say(path, page):
    assert path.read_text(encoding="utf-8") == page(), (
        "an option has changed: write the page again with python -m docs.command_line"
    )


def test_the_map_of_the_code_names_files_and_folders_that_there_are():
    package = ROOT / "vigpipe"
    text = (ROOT / "docs" / "code.md").read_text(encoding="utf-8")
    named = re.findall(r"^[0-9]\. `([a-z_]+/[a-z_]+\.py|[a-z_]+\.py)`", text, re.MULTILINE)
    assert len(named) == 8  # the way of one batch; `test_way.py` takes it
    rows = re.findall(r"^\| `([a-z_]+)/` \| .* \| (.*) \|$", text, re.MULTILINE)
    for folder, files in rows:
        inside = "" if folder == "vigpipe" else f"{folder}/"
        named += [inside + name for name in re.findall(r"`([a-z_/*]+\.[a-z]+)`", files)]
    assert [name for name in named if not any(package.glob(name))] == []
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    assert folders == {folder for folder, _ in rows} - {"vigpipe"}


def test_the_tests_that_promises_stand_on_are_there():
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    files = {path: (ROOT / "tests" / path).read_text(encoding="utf-8") for path, _ in named}
    assert [f"{path}::{name}" for path, name in named if f"def {name}(" not in files[path]] == []
    assert len(named) > 30


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_the_pages_name_what_the_environment_decides():
    page = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
    assert "`CXX`" in page
    assert "`VIGPIPE_CACHE`" in page
