"""The whole command: its options, the guard around its parts, its files and its exit code."""

import json
import sys

import pytest

from tests.commands.refusals import check_commands
from tests.selftest.made_up import CPU
from tests.world import run_command
from vigpipe.cli import main
from vigpipe.config.verbs import SelftestConfig
from vigpipe.selftest import run
from vigpipe.selftest.rows import Part, Row
from vigpipe.selftest.worker import WorkerError


def test_wrong_use_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [
        ("--budget 600", "--budget 600: must be a time from 1s to 1d, such as 10m"),
        ("--budget never", "--budget never: must be a time from 1s to 1d, such as 10m"),
        ("--budget 0.5s", "--budget 0.5s: must be a time"),
        ("--parts operators,nccl", "--parts operators,nccl: 'nccl' is not one of operators,"),
    ]
    check_commands(capsys, "selftest", rows)


@pytest.fixture
def parts(monkeypatch):
    """Replace the parts of the self-test, and what looks at the machine."""
    given = []

    def measure(rows, error):
        def rows_within(machine, budget):
            given.append(round(budget.seconds))
            yield from rows
            if error is not None:
                raise error

        return rows_within

    def replace_by(*described):
        made = [
            Part(name, name.title(), weight, measure(rows, error), lambda rows: iter(()))
            for name, weight, rows, error in described
        ]
        monkeypatch.setattr(run, "PARTS", made)
        monkeypatch.setattr(SelftestConfig, "parts", ",".join(part.name for part in made))
        return given

    monkeypatch.setattr(run, "call", lambda *arguments, seconds: CPU)
    return replace_by


def test_a_part_that_raises_is_a_row_and_does_not_end_the_others(parts, tmp_path, capsys):
    passed = Row("one", "passed")
    parts(("first", 1, [passed], RuntimeError("CUDA error")), ("second", 1, [passed], None))
    assert main(["selftest", "--parts", "first,second", "--out", str(tmp_path / "out")]) == 1
    read = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [[row["outcome"] for row in part["rows"]] for part in read["parts"]] == [
        ["passed", "failed"], ["passed"]
    ]  # fmt: skip
    assert read["parts"][0]["rows"][1]["note"] == "RuntimeError: CUDA error"
    printed = capsys.readouterr().out
    assert "2 passed, 1 failed, in " in printed
    assert "Failed: first: first (RuntimeError: CUDA error)." in printed


def test_all_passed_is_exit_code_0_and_skipped_is_no_failure(parts, tmp_path):
    parts(("only", 1, [Row("one", "passed"), Row("two", "skipped", note="no GPU")], None))
    assert main(["selftest", "--parts", "only", "--out", str(tmp_path / "out")]) == 0
    # Results of an earlier self-test are not overwritten.
    assert main(["selftest", "--parts", "only", "--out", str(tmp_path / "out")]) == 2


def test_a_machine_that_cannot_be_looked_at_is_told(monkeypatch, tmp_path, capsys):
    def call(function, device, seconds):
        raise WorkerError("RuntimeError: CUDA unknown error")

    monkeypatch.setattr(run, "call", call)
    assert main(["selftest", "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "(RuntimeError: CUDA unknown error); see whether nvidia-smi can talk" in told
    assert told.count("\n") == 1


def test_parts_share_the_budget_by_their_weights(parts, tmp_path):
    given = parts(("a", 1, [], None), ("b", 1, [], None), ("c", 2, [], None))
    words = ["selftest", "--parts", "a,b,c", "--budget", "1h", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    # They take no time, so that all is left to the later ones.
    assert given == [pytest.approx(share, abs=60) for share in (855, 1140, 3420)]


def test_an_interrupted_selftest_leaves_what_it_has(parts, tmp_path):
    passed = Row("one", "passed")
    parts(("first", 1, [passed], None), ("second", 1, [passed], KeyboardInterrupt()))
    words = ["selftest", "--parts", "first,second", "--out", str(tmp_path / "out")]
    assert main(words) == 130
    read = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [part["name"] for part in read["parts"]] == ["first"]
    assert (tmp_path / "out" / "page.html").exists()


def selftest(folder, *words):
    command = [sys.executable, "-m", "vigpipe", "selftest", *words, "--out", str(folder)]
    return run_command(command, {"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.multiprocess
def test_a_gpu_that_is_not_there_is_wrong_use(tmp_path):
    done = selftest(tmp_path / "out", "--device", "cuda")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--device cuda: torch sees no GPU here" in done.stderr


@pytest.mark.multiprocess
def test_the_operators_of_this_machine(tmp_path):
    done = selftest(tmp_path / "out", "--parts", "operators,links")
    assert done.returncode == 0, done.stdout + done.stderr
    read = json.loads((tmp_path / "out" / "result.json").read_text())
    operators, links = (part["rows"] for part in read["parts"])
    names = {"knn", "aggregate", "norm", "hidden"}
    assert {row["values"]["operator"] for row in operators} == names
    assert {row["outcome"] for row in operators} == {"passed"}
    assert [row["note"] for row in links] == ["it takes two GPUs"]


@pytest.mark.multiprocess
@pytest.mark.heavy
def test_layouts_and_lost_ranks_of_a_machine_without_a_gpu(tmp_path):
    done = selftest(tmp_path / "out", "--parts", "check,links,faults", "--budget", "20m")
    assert done.returncode == 0, done.stdout + done.stderr
    read = json.loads((tmp_path / "out" / "result.json").read_text())
    rows = {part["name"]: part["rows"] for part in read["parts"]}
    skipped = [row["what"] for part in rows.values() for row in part if row["outcome"] == "skipped"]
    assert skipped == ["NCCL"]
    layouts = [row["values"]["identical"] for row in rows["check"]]
    assert len(layouts) == 9
    killed, frozen = (row["values"] for row in rows["faults"])
    assert (killed["code"], frozen["code"]) == (137, 70)
    assert killed["resumed"]
    assert frozen["resumed"]
    assert frozen["seconds"] > 7  # of --timeout 8
