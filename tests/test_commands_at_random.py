"""Whole commands drawn at random: options, damaged files and environment, before one judge.

Whatever a user or an attacker gives, a command does its work or says in one sentence why not. By
default 40 commands are drawn, always the same; others, and more, with

    VIGPIPE_COMMANDS=2000 python -m pytest -q -m heavy tests/test_commands_at_random.py
"""

import contextlib
import os
import shutil
import sys
import tempfile
import unicodedata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.test_cli import make_pictures
from tests.test_fuzz import damaged
from tests.world import run_command
from vigpipe.cli import main
from vigpipe.config.options import TrainConfig, flag
from vigpipe.model.variants import create_model

pytestmark = [pytest.mark.heavy, pytest.mark.multiprocess]

ALWAYS = 40
NUM_COMMANDS = int(os.environ.get("VIGPIPE_COMMANDS", ALWAYS))
LONGEST = 800  # characters of what a refused command says
# A command that computes for 10 s, or takes 8 GiB, is killed, and then judged.
COMMAND = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (10, 12))
resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
from vigpipe.cli import main
sys.exit(main())
"""

# ---- commands that work -------------------------------------------------------------------------

SHAPE = "--model vig_digits --data pictures --image-size 8 --batch-size 4 --threads 1"
STEPS = f"{SHAPE} --steps 2"
LINES = {
    "train": f"train {STEPS} --out new",
    "ranks": f"train {STEPS} --out new --stages 2 --microbatches 2",
    "options of a file": "train --config run/config.toml --out new",
    "plan of a file": f"train {STEPS} --stages plan.toml --out new",
    "weights": f"train {STEPS} --weights run/model.safetensors --out new",
    "resume": f"train {SHAPE} --steps 3 --out run --resume auto",
    "check": f"check {STEPS} --microbatches 2 --compare-steps 1 --out new",
    "time": f"time {STEPS} --timing-warmup 1 --test-batches 1 --out new",
    "plan": f"plan {SHAPE} --profile plan.profile.json --out made.toml",
    "predict": "predict --weights run/model.safetensors pictures/test",
    "predict json": "predict --weights weights.pth --format json cat.png",
    "graph": "graph --weights run/model.safetensors --image cat.png --out g.png",
    "explain": "explain --weights run/model.safetensors --image cat.png --most 1 --out e.png",
    "report": "report run --out r.html",
    "list": "checkpoint list run",
    "verify": "checkpoint verify run",
    "export": "checkpoint export run e.safetensors",
    "convert": "weights convert weights.pth c.safetensors",
    "slurm": "slurm write batch",
    "completion": "completion bash",
    "help": "train --help",
}
WORKING = {name: line.split() for name, line in LINES.items()}


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    """A folder with everything that the commands above read."""
    folder = tmp_path_factory.mktemp("template")
    with contextlib.chdir(folder):
        make_pictures(Path("pictures"))
        Image.new("RGB", (20, 16), "orange").save("cat.png")
        Path("precious.txt").write_text("do not touch")
        Path("precious.png").write_text("do not touch")
        assert main(["plan", *SHAPE.split(), "--out", "plan.toml"]) == 0
        torch.save(create_model("vig_cifar_ti", num_classes=3).state_dict(), "weights.pth")
        assert main(["train", *STEPS.split(), "--out", "run"]) == 0
    return folder


# ---- what goes wrong ----------------------------------------------------------------------------

TEXTS = [
    "0", "1", "2", "3", "-1", "-1,-1", "1,1", "-1GB", "-5m", "2.5", "nan", "inf", "1e400",
    "1e-300", "9" * 4000, "0x10", "٣", "x" * 4000, "none", "auto", "never", "knn", "knn,,grid", ",",
    "..", ".", "/", "/dev/null", "/dev/zero", "/proc/self/mem", "precious.txt", "precious.png",
    "cat.png", "run", "pictures", "nowhere", "plan.toml", "plan.profile.json", "--help",
    "run/model.safetensors", "\x1b[2J", "a\nb", "a\rb", "\u202egnp", "\udcff", "a b", "%s{0}",
    "$(touch x)", "rand-m9-n999999", "rand-m1e9-n2-mstd1e308", "augmix-w1e9-d9", "original", "1e3",
    "127.0.0.1", "nowhere.invalid", "a[1-1000000000]", "a[1-3", "4(x1000000000)", "65536",
    "float64", "cuda", "csv", "top1",
]  # fmt: skip
LONG = {"compile", "download"}  # they may take minutes, rightly
HINTS = {name: hint for name, hint in get_type_hints(TrainConfig).items() if name not in LONG}
OTHERS = ("--node", "--block", "--image", "--profile", "--memory-limit", "--bandwidth", "--latency")
OTHERS += ("--ranks-per-host", "--explain", "--format", "--best", "--ema", "--compare-steps")
OTHERS += ("--test-batches", "--target", "--most", "--arrays", "--nonsense", "-x")
VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_NUM_NODES", "SLURM_JOB_ID", "OMP_NUM_THREADS",
    "COLUMNS", "FORCE_COLOR", "VIGPIPE_CACHE",
)  # fmt: skip
# In place of a file.
STRANGE = ("empty", "folder", "pipe", "link to a device", "link to nowhere", "gone")


@dataclass(frozen=True)
class Case:
    """A command, its environment, and what files become."""

    words: list[str]
    variables: dict[str, str]
    files: dict[str, bytes | str]  # content, or one of STRANGE


def choices(hint: Any) -> list[str]:
    """The values that an option names, if it does."""
    found = [value for part in (hint, *get_args(hint)) for value in get_args(part)]
    return [value for value in found if isinstance(value, str)]


@st.composite
def options(draw) -> list[str]:
    name = draw(st.sampled_from(sorted(HINTS)))
    hint = HINTS[name]
    if hint is bool or bool in get_args(hint):
        return [draw(st.sampled_from([flag(name), flag(f"no_{name}")]))]
    value = draw(st.sampled_from(choices(hint) or TEXTS) | st.sampled_from(TEXTS))
    return draw(st.sampled_from([[flag(name), value], [f"{flag(name)}={value}"], [flag(name)]]))


@st.composite
def cases(draw, template: Path) -> Case:
    words = list(WORKING[draw(st.sampled_from(sorted(WORKING)))])
    variables: dict[str, str] = {}
    files: dict[str, bytes | str] = {}
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["option", "option", "other", "word", "variable", "file"]))
        if kind == "option":
            words += draw(options())
        elif kind == "other":
            words += [draw(st.sampled_from(OTHERS)), draw(st.sampled_from(TEXTS))]
        elif kind == "word":
            words[draw(st.integers(0, len(words) - 1))] = draw(st.sampled_from(TEXTS))
        elif kind == "variable":
            variables[draw(st.sampled_from(VARIABLES))] = draw(st.sampled_from(TEXTS))
        else:
            given = [path for path in sorted(template.rglob("*")) if path.is_file()]
            path = draw(st.sampled_from(given))
            content = draw(st.sampled_from(STRANGE) | damaged(path.read_bytes()))
            files[str(path.relative_to(template))] = content
    return Case(words, variables, files)


def place(case: Case) -> None:
    """Let the files of this folder be as the case wants them."""
    for name, content in case.files.items():
        path = Path(name)
        path.unlink()
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content == "empty":
            path.touch()
        elif content == "folder":
            path.mkdir()
        elif content == "pipe":
            os.mkfifo(path)
        elif content.startswith("link"):
            path.symlink_to("/dev/zero" if "device" in content else "nowhere")


# ---- the judge ----------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, Any]:
    """What is in every file of a folder and below."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        is_plain = path.is_file() and not path.is_symlink()
        found[str(path)] = path.read_bytes() if is_plain else path.lstat().st_mode
    return found


def faults(case: Case, ended: Any, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What is wrong with how a command has ended; empty if nothing is."""
    said, code = ended.stdout + ended.stderr, ended.returncode
    found = []
    if code not in (0, 2, 75, 76):
        found.append(f"exit code {code}")
    if "Traceback" in said or "Error:" in said:
        found.append("a traceback")
    if any(unicodedata.category(c) in ("Cc", "Cf") and c not in "\n\t" for c in said):
        found.append("a character that is no text")
    if code in (2, 76) and "verify" not in case.words and len(ended.stderr.splitlines()) != 1:
        found.append(f"{len(ended.stderr.splitlines())} lines where one sentence is expected")
    if code == 2 and len(ended.stderr) > LONGEST:
        found.append(f"{len(ended.stderr)} characters")
    goes_on = any(word.startswith("--resume") for word in case.words)
    changed = [
        name
        for name, content in before.items()
        if after.get(name) != content and not (goes_on and name.startswith("run"))
    ]
    if changed:
        found.append(f"changed {', '.join(changed)}")
    return found


def judge(case: Case, template: Path) -> int:
    """Run a command in a copy of the folder, and fail the test if anything is wrong with its end.

    That it ends, and leaves no process behind, is what `run_command` sees to.
    """
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        shutil.copytree(template, name, dirs_exist_ok=True)
        place(case)
        before = contents(Path())
        ended = run_command([sys.executable, "-c", COMMAND, *case.words], case.variables, 120)
        found = faults(case, ended, before, contents(Path()))
        assert not found, f"{found}\n{case}\n{ended.stdout[:2000]}\n{ended.stderr[:2000]}"
    return ended.returncode


@pytest.mark.parametrize("name", WORKING)
def test_every_command_works_as_long_as_nothing_is_wrong(name, template):
    assert judge(Case(WORKING[name], {}, {}), template) == 0


def test_commands_at_random(template):
    codes: Counter[int] = Counter()

    @settings(
        max_examples=NUM_COMMANDS,
        deadline=None,
        derandomize=NUM_COMMANDS == ALWAYS,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(case=cases(template))
    def run(case):
        codes[judge(case, template)] += 1

    run()
    print(f"judged {sum(codes.values())} commands, 0 failed; exit codes {dict(codes)}")
    assert codes[0]
    assert codes[2]
