"""`vigpipe plan`: what is asked for, what is written, what is refused."""

import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands.refusals import check_commands
from tests.planning.profiles import make_piece, make_profile
from tests.profiling.quick import FEWEST
from tests.small_digits import write_small_digits
from tests.world import run_command
from vigpipe.cli import main
from vigpipe.commands.cluster import network
from vigpipe.commands.plan import make_request
from vigpipe.config.choices import Sync
from vigpipe.config.options import TrainConfig
from vigpipe.config.verbs import PlanConfig
from vigpipe.errors import InputError
from vigpipe.parallel.plan import read_plan
from vigpipe.planning.profile import with_network, write_profile
from vigpipe.planning.step import Request
from vigpipe.profiling.measure import cost_options
from vigpipe.run.facts import prepare

pytestmark = pytest.mark.usefixtures("here")


def one_stage(**options: Any):
    options = {"sync": "double", **options}
    return prepare(TrainConfig(**options), torch.float32)


def request(**options) -> Request:
    config = PlanConfig(model="vig_digits", data="digits", **options)
    return make_request(config, one_stage(batch_size=config.batch_size))


def stored(folder: Path, sync: Sync = "double") -> Path:
    """A profile of vig_digits with known costs: the last of four blocks takes as long as three."""
    blocks = [make_piece(f"block {i}", s, 400, 100, 64) for i, s in enumerate((1, 1, 1, 3))]
    options = cost_options(one_stage(sync=sync))
    path = folder / "known.json"
    write_profile(replace(make_profile(blocks), model="vig_digits", options=options), path)
    return path


def plan(*arguments: str) -> int:
    return main(["plan", "--model", "vig_digits", "--data", "digits", *arguments])


def test_what_is_asked_for_follows_from_the_options():
    assert request(batch_size=12, dp=2).microbatches == (1, 2, 3, 4, 5, 6)
    found = request(microbatches=5, schedule="1f1b")
    assert (found.microbatches, found.schedules) == ((5,), (("1f1b", 1),))
    # Virtual stages are tried where there are blocks enough.
    assert ("interleaved1f1b", 2) in request(stages=2).schedules
    assert ("interleaved1f1b", 2) not in request(stages=3).schedules
    for limit, num_bytes in (("16GB", 16e9), ("1.5 GiB", 1.5 * 2**30), ("500 mb", 5e8)):
        assert request(memory_limit=limit).memory_limit_bytes == num_bytes
    with pytest.raises(InputError, match="stages"):
        request(stages=9)


def test_a_network_can_be_described():
    for bandwidth, latency, *found in (
        ("10Gb/s", "20us", 1.25e9, 20e-6),
        ("100 Mb/s", "1.5 ms", 1.25e7, 1.5e-3),
        (None, None, 1e9, 0.0),
    ):
        config = PlanConfig(bandwidth=bandwidth, latency=latency)
        described = with_network(make_profile([1.0]), *network(config))
        assert [described.bandwidth, described.latency_seconds] == pytest.approx(found)


def test_the_plan_file_is_one_that_train_reads(here, capsys):
    out = here / "deep" / "found.toml"
    options = ["--microbatches", "4", "--schedule", "gpipe", "--batch-size", "8", "--explain"]
    code = plan("--profile", str(stored(here)), *options, "--out", str(out))
    stdout, stderr = capsys.readouterr()
    assert code == 0, stderr
    assert read_plan(out, "vig_digits", 4).stages == ((0, 1, 2), (3,))
    assert "runner-up" in stdout
    assert "limit" in stdout  # the sentence of --explain
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    text = out.read_text()
    assert "# Promise" in text
    # Rows of 2; the readout, the stem and the update are free: (M + S - 1) (f + b) of 3 + 6 a row.
    assert "90000.0 ms a step" in text
    assert "--stages" in text
    assert stdout.rstrip().endswith("--microbatches 4 --schedule gpipe --batch-size 8")
    assert tomllib.loads(text)["model"] == "vig_digits"
    assert plan("--profile", str(stored(here)), *options, "--out", str(out)) == 0  # its own


def test_the_facts_of_a_profile_are_comments_of_the_plan_and_never_more(here, monkeypatch):
    """A newline in one made keys of the plan; versions that are no table were a traceback."""
    monkeypatch.setattr("vigpipe.commands.plan.draw_timeline", lambda *_: None)
    path, out = stored(here), here / "found.toml"
    for facts, code in (
        ({"versions": 3}, 2),
        ({"date": 'today\nmodel = "other"', "versions": {"torch": "\nx = 1"}}, 0),
    ):
        path.write_text(json.dumps({**json.loads(path.read_text()), "facts": facts}))
        assert plan("--profile", str(path), "--out", str(out)) == code
        assert out.exists() == (code == 0)
    assert read_plan(out, "vig_digits", 4).num_stages >= 2
    assert out.read_text().splitlines()[0].startswith(r"# Made by vigpipe plan, today\nmodel =")


def test_gradients_are_added_up_as_when_the_profile_was_measured(here, capsys, monkeypatch):
    """A profile of a GPU, where another way is the default, was refused on a host without one."""
    path = str(stored(here, sync="drain"))
    monkeypatch.setattr("vigpipe.commands.plan.draw_timeline", lambda *_: None)
    assert plan("--profile", path, "--out", "x.toml") == 0
    assert plan("--profile", path, "--out", "x.toml", "--sync", "double") == 2
    assert "was measured with sync = drain" in capsys.readouterr().err


def test_a_plan_of_ones_own_is_not_overwritten(here, capsys):
    out = here / "mine.toml"
    out.write_text('model = "vig_digits"\nstages = [[0, 1, 2, 3]]\n')
    assert plan("--profile", str(stored(here)), "--out", str(out)) == 2
    assert "this command did not write it" in capsys.readouterr().err
    assert out.read_text().startswith("model")


LIMIT = "must be a number with one of the units"
WRONG = [
    ("--stages 5", "5 stages for 4 blocks"),
    ("--stages 0", "--stages 0"),
    ("--microbatches 9 --batch-size 8", "choose 1 to 8"),
    ("--memory-limit 16", f"--memory-limit 16: {LIMIT}"),
    ("--memory-limit 0.1kB", "the smallest limit that would"),
    (f"--memory-limit {'9' * 400}GB", LIMIT),
    ("--ranks-per-host 0", "--ranks-per-host 0: must be at least 1"),
    ("--microbatches x", "--microbatches x: must be a whole number or auto"),
    ("--bandwidth fast", "--bandwidth fast"),
    ("--bandwidth 0b/s", "must be more than 0"),
    ("--latency '3 weeks'", "--latency 3 weeks"),
    ("--norm layer", "norm = batch"),
    ("--out known.json/x.toml", "cannot be written"),
    ("--model vig_ti_224", "is a profile of 'vig_digits', but --model is 'vig_ti_224'"),
]


def test_wrong_use_is_one_sentence(here, capsys):
    stored(here)
    verb = "plan --data digits --profile known.json"
    check_commands(capsys, f"{verb} --model vig_digits", WRONG[:-1])
    check_commands(capsys, verb, WRONG[-1:])


def test_a_cluster_that_cannot_be_is_refused_before_any_rank_is_started(capsys, monkeypatch):
    monkeypatch.setattr("vigpipe.commands.start_plan.run_on_ranks", lambda *_, **__: 0)
    assert plan("--ranks-per-host", "0") == plan("--latency", "-5us") == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.fixture
def quick(monkeypatch):
    """Measure as little as can be, as on a host with one GPU."""
    for module, name, value in FEWEST:
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr("vigpipe.commands.start_plan.ranks_to_measure", lambda *_: 1)


@pytest.mark.usefixtures("quick")
def test_one_gpu_is_measured_by_one_rank(here, capsys, monkeypatch):
    """Two ranks were started, and refused because there was one GPU."""
    monkeypatch.setattr("vigpipe.commands.plan.has_own_cores", lambda _: True)
    options = "--stages 4 --batch-size 8 --microbatches 4 --out x.toml --threads 1"
    assert plan(*options.split()) == 0
    stdout, stderr = capsys.readouterr()
    assert stderr == ""
    assert "messages between ranks count as free" in stdout
    # Four GPUs compute at once as fast as one, unlike ranks that share cores.
    assert json.loads((here / "x.profile.json").read_text())["slowdown"] == [1.0] * 4


GRAPH = ("--model", "gcn2", "--data", "sbm:400,4,12,6", "--layers", "4", "--sampler", "parts")


@pytest.mark.usefixtures("quick")
def test_the_layers_of_a_graph_model_are_planned(here, capsys):
    options = (*GRAPH, "--parts", "10", "--stages", "2", "--out", "x.toml", "--threads", "1")
    assert main(["plan", *options, "--microbatches", "4", "--explain"]) == 0
    stdout, stderr = capsys.readouterr()
    assert stderr == ""
    assert "nodes/s" in stdout
    assert "micro-batches" not in stdout.split("most would help")[-1]
    # No option that is as it would be anyway; it had --chunks 1 and --no-partition-input too.
    assert stdout.rstrip().endswith("--data sbm:400,4,12,6 --layers 4 --sampler parts --parts 10")
    assert read_plan(here / "x.toml", "gcn2", 4).num_stages == 2
    assert "160 nodes a step" in (here / "x.toml").read_text()
    # A profile is used again, and --microbatches auto is refused: other steps are other runs.
    (here / "x.toml").unlink()
    assert main(["plan", *options, "--microbatches", "4", "--profile", "x.profile.json"]) == 0
    capsys.readouterr()
    assert main(["plan", *options]) == 2
    assert (
        "--microbatches auto: with --model gcn2 their number decides how many nodes a step"
        in capsys.readouterr().err
    )


@pytest.mark.multiprocess
def test_stages_auto_cuts_by_cost_and_says_so(here):
    write_small_digits(here)
    options = "--data digits.npz --model vig_digits --stages auto --microbatches 2 --steps 1"
    command = [sys.executable, "-m", "vigpipe.train", *options.split(), "--batch-size", "8"]
    done = run_command([*command, "--out", "run"], {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "planned: " in done.stdout
    assert read_plan(here / "run" / "plan.toml", "vig_digits", 4).num_stages >= 2
    config = tomllib.loads((here / "run" / "config.toml").read_text())
    assert config["stages"].endswith("plan.toml")
