"""What is imported when, told by the modules and not by seconds, which differ on a busy machine."""

import json
import os
import subprocess
import sys
from typing import NoReturn

import pytest

from tests.world import ROOT
from vigpipe.cli import main, make_app
from vigpipe.commands.help import subcommands

SLOW = {"torch", "numpy", "timm", "PIL", "matplotlib", "scipy", "sklearn", "torch_geometric"}


def imported(code: str, *arguments: str) -> list[set[str]]:
    """Run code in a fresh interpreter, and return the sets of modules that it has told."""
    code = f"import json, sys\ntell = lambda: print(json.dumps(['M', *sys.modules]))\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return [set(json.loads(line)) for line in done.stdout.splitlines() if line.startswith('["M"')]


def tops(modules: set[str]) -> set[str]:
    """The packages that these modules are in."""
    return {name.partition(".")[0] for name in modules}


# Rules of options alone: of one number, of two options, of the model, of degrees, of the verb.
REFUSED = [
    "train --lr -1",
    "train --data nowhere --ema 1",
    "train --dp 2 --overlap 3",
    "train --model gcn --mixup 1",
    "train --stages 2 --compress top-k:2",
    "train --stages 3 --schedule 1f1b --microbatches 2",
    "train --dp 0",
    "train --halo sampled:2",
    "train --strategy gossip --dp 3 --pairs sets",
    "train --resume auto",
    "train --stop-before tomorrow",
    "train --threads 0",
    "train --modl x",
    "check --resume auto",
    "check --compare-steps 0",
    "check --lr nan",
    "time --steps 3",
    "time --lr -1",
    "plan --lr -1",
    "plan --bandwidth -1",
    "plan --profile nowhere.json",
    "plan --ranks 1",
    "plan --shards 2",
    "plan --out README.md",
    "predict --weights nowhere --dp 0",
    "predict --weights nowhere --batch-size 0",
    "predict --weights nowhere --split test",
    "predict --weights nowhere --data sbm:300 x.png",
    "selftest --budget -1",
    "selftest --parts nonsense",
    "graph --image x.png --out README.md",
    "dataset prepare sbm:300 README.md",
    "dataset prepare sbm:300 nowhere --seed -1",
    "dataset debian README.md",
    "weights convert nowhere README.md",
]


def test_an_option_is_refused_before_torch_is_imported():
    code = "from vigpipe.cli import main\nfor line in sys.argv[1:]:\n"
    code += "    assert main(line.split()) == 2, line\n    tell()"
    told = imported(code, *REFUSED)
    late = {line: tops(modules) & SLOW for line, modules in zip(REFUSED, told, strict=True)}
    assert {line: slow for line, slow in late.items() if slow} == {}


def test_help_imports_nothing_that_is_slow():
    lines = ["", "--help"]
    for verb in subcommands(make_app([])):
        lines += [f"{verb} --help", f"{verb} --help-all"]
    code = "from vigpipe.cli import main\nfor line in sys.argv[1:]:\n"
    code += "    assert main(line.split()) == 0, line\ntell()"
    (modules,) = imported(code, *lines)
    assert tops(modules) & (SLOW | {"rich"}) == set()


FIRST_STEP = """
import vigpipe.run.step
from vigpipe.cli import main
def first_step(*_):
    tell()
    raise SystemExit
vigpipe.run.step.train_step = first_step
main(sys.argv[1:])
"""
NOT_OF_THE_DEFAULT_JOB = {
    *("matplotlib", "pandas", "plotly", "pymetis", "scipy", "sklearn", "torch_geometric"),
    *("vigpipe.api", "vigpipe.graphs", "vigpipe.inference", "vigpipe.profiling"),
    *("vigpipe.report", "vigpipe.selftest", "vigpipe.commands.check", "vigpipe.commands.time"),
    *("vigpipe.commands.plan", "vigpipe.commands.inference", "vigpipe.commands.start_plan"),
}


def test_a_rank_of_the_default_job_imports_nothing_of_other_verbs_and_jobs(tmp_path):
    (modules,) = imported(FIRST_STEP, "train", "--out", str(tmp_path / "run"))
    assert "vigpipe.data.job" in modules
    assert modules & NOT_OF_THE_DEFAULT_JOB == set()


def tell_new_modules(arguments: list[str]) -> int:
    """Run a command as a rank; tell what it has imported when its first step begins."""
    inherited = set(sys.modules)
    import torch

    import vigpipe.training

    def first_step(*_: object, **__: object) -> NoReturn:
        os.write(1, (json.dumps(["M", *(sys.modules.keys() - inherited)]) + "\n").encode())
        torch.distributed.barrier()  # the other one has not told yet, and needs this one until then
        os._exit(0)

    vigpipe.training.train_step = first_step
    return main(arguments)


FORKED = """
from pathlib import Path
from vigpipe.config.options import TrainConfig
from vigpipe.start import run_on_ranks
out = Path(sys.argv[1])
words = ["train", "--stages", "2", "--timeout", "600", "--out", str(out)]
config = TrainConfig(stages=2, timeout=600, out=out)
work, main = "vigpipe.training:train", "tests.test_imports:tell_new_modules"
run_on_ranks(config, words, work, ["config.toml"], trains=True, main=main)
"""


@pytest.mark.multiprocess
def test_forked_ranks_have_inherited_what_is_slow_to_import(tmp_path):
    told = imported(FORKED, str(tmp_path / "run"))
    assert len(told) == 2
    for modules in told:
        own = {name for name in modules if name.startswith("vigpipe.")}
        assert own <= {f"vigpipe.launch.{name}" for name in ("rendezvous", "interface", "secret")}
        assert tops(modules) & {"torch", "torchvision", "timm", "cyclopts"} == set()
