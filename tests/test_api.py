"""vigpipe.train from a script: what it returns, tells, raises, and that nothing of it is left."""

import json
import re
import signal
import sys
import textwrap
from pathlib import Path

import pytest

import vigpipe
from tests.small_digits import write_small_digits
from tests.world import run_command, start_command, wait_until
from vigpipe.api import as_arguments
from vigpipe.run.stop_and_save import ANSWER

pytestmark = pytest.mark.multiprocess

SHORT = "data='digits.npz', model='vig_digits', threads=1, batch_size=36, quiet=True"
LOUD = SHORT.replace("True", "False")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """Run in a folder that has a few images only."""
    monkeypatch.chdir(tmp_path)
    write_small_digits(tmp_path)


def run_script(code: str):
    """Run a script, without a main guard; return the finished process."""
    script = Path("script.py")
    script.write_text("import json, os, vigpipe\n" + textwrap.dedent(code))
    # Jupyter's kernels set this variable, but what they show is no terminal.
    return run_command([sys.executable, str(script)], {"FORCE_COLOR": "1"})


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_script_trains_in_ranks_and_gets_rows_and_model():
    ended = run_script(
        """
        told = []
        run = vigpipe.train(
            stages=2, microbatches=2, steps=4, augment=None, data="digits.npz",
            model="vig_digits", batch_size=36, threads=1,
            on_step=told.append, on_evaluation=told.append,
        )
        assert run.steps + run.evaluations == told
        assert run.is_done and run.weights.exists() and run.averaged_weights is None
        digits = vigpipe.load(run.weights)
        assert digits.model.state_dict().keys() == run.model.state_dict().keys()
        print(json.dumps([str(run.folder), told, run.summary]))
        """
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "\x1b" not in ended.stdout
    *lines, last = ended.stdout.splitlines()
    assert lines[2].startswith("2 stages, 2 micro-batches, gpipe, on cpu; results in runs")
    assert any("epoch 1 of 1: training loss" in line for line in lines)
    folder, told, summary = json.loads(last)
    assert Path(folder).parent == Path("runs")
    assert told == rows(Path(folder))
    assert [row.get("step") for row in told] == [1, 2, 3, 4, None]
    assert summary["test"]["top1"] == told[-1]["top1"]


def test_a_graph_in_memory_is_trained_on_and_predicted():
    ended = run_script(
        """
        import numpy as np
        y = np.arange(60) % 3
        edges = np.stack((np.arange(59), np.arange(1, 60)))
        graph = {"x": np.eye(3)[y], "edge_index": edges, "y": y}
        masks = {"train_mask": np.arange(60) < 40, "test_mask": np.arange(60) >= 40}
        run = vigpipe.train(data=graph | masks, model="sage", steps=3, threads=1, quiet=True)
        assert run.evaluations[-1]["nodes"] == 20
        model, transform, _ = vigpipe.load_graph_model(run.weights)
        few = {"x": graph["x"][:5], "edge_index": np.zeros((2, 0), int)}
        assert model(*transform(few)).shape == (5, 3)
        for wrong in (3, {"x": y}, graph):
            try:
                vigpipe.train(data=wrong)
            except vigpipe.InputError as error:
                print(error)
        """
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    told = ended.stdout.splitlines()
    assert told[0].startswith("data=3: must be text, a path, torch-geometric's Data, a Netw")
    assert told[1].startswith("data: has x, but lacks edge_src, edge_dst, y, split, or masks, as")
    assert told[2].startswith("data: has x, y, edge_src, edge_dst, but lacks split, or masks, as")


def test_a_callback_stops_a_run_which_goes_on_later():
    ended = run_script(
        f"""
        options = dict(out="run", {SHORT})
        stop = lambda row: row["step"] >= 2
        run = vigpipe.train(epochs=1000, on_step=stop, **{{**options, "quiet": False}})
        assert not run.is_done and not run.summary
        try:
            run.model
        except vigpipe.InputError as error:
            assert "resume='auto'" in str(error)
        last = run.steps[-1]["step"]
        told = []
        run = vigpipe.train(steps=last + 2, resume="auto", on_step=told.append, **options)
        assert [row["step"] for row in told] == [last + 1, last + 2]
        assert [row["step"] for row in run.steps] == list(range(1, last + 3))
        """
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    *_, told = ended.stdout.splitlines()
    assert " of 4000 (on_step returned True) with a checkpoint in run/checkpoints; " in told
    assert told.endswith("go on with vigpipe.train(out='run', resume='auto', ...)")


def test_what_goes_wrong_is_an_exception():
    ended = run_script(
        f"""
        try:
            vigpipe.train(lr=-1, {SHORT})
        except vigpipe.InputError as error:
            print(error)
        try:
            vigpipe.train(opt="sgd", lr=1e6, warmup_epochs=0, out="nan", {SHORT})
        except FloatingPointError as error:
            print(error)

        def fail(row):
            raise LookupError("mine")

        try:
            vigpipe.train(epochs=1000, out="failed", on_step=fail, {LOUD})
        except LookupError as error:
            print(error)

        def interrupt(row):
            os.kill(os.getpid(), 2)

        try:
            vigpipe.train(epochs=1000, out="int", on_step=interrupt, {LOUD})
        except KeyboardInterrupt:
            print("interrupted")

        def kill(row):
            (child,) = open("/proc/self/task/%d/children" % os.getpid()).read().split()
            os.kill(int(child), 9)

        try:
            vigpipe.train(epochs=1000, out="killed", on_step=kill, {SHORT})
        except vigpipe.TrainingError as error:
            print(error.code, error)
        """
    )
    assert (ended.returncode, ended.stderr) == (0, f"vigpipe: {ANSWER}\n")
    header = r".* training and .*|.* steps of .*|on cpu; .*|load .*"
    told = [line for line in ended.stdout.splitlines() if not re.fullmatch(header, line)]
    wrong, infinite, failed, mine, stopped, interrupted, killed = told
    assert "(on_step raised LookupError) with a checkpoint in failed/checkpoints" in failed
    assert "(Ctrl-C) with a checkpoint in int/checkpoints; go on with vigpipe.train(out" in stopped
    assert interrupted == "interrupted"
    assert wrong == "--lr -1.0: must be a number from 0 to 1e+06"
    assert "the loss or a gradient is NaN or infinite" in infinite
    assert mine == "mine"
    assert killed == "-9 the training in killed was ended by SIGKILL"
    assert not list(Path("runs").iterdir())  # of the run that was refused
    assert list(Path("failed", "checkpoints").iterdir())


def test_a_run_ends_with_the_process_that_started_it():
    options = f"epochs=10000, stages=2, out='run', {SHORT}"
    Path("script.py").write_text(f"import vigpipe; vigpipe.train({options})")
    metrics = Path("run", "metrics.jsonl")
    with start_command([sys.executable, "script.py"]) as command:
        wait_until(
            lambda: metrics.exists() and metrics.stat().st_size > 0, "it trains", running=command
        )
        command.popen.send_signal(signal.SIGKILL)
        assert command.wait().returncode == -signal.SIGKILL  # and nothing is left


def test_options_become_the_words_of_the_command():
    given = {"stages": Path("a b.toml"), "lr": 1e-6, "timing": True, "augment": False}
    assert as_arguments({**given, "download": False, "ema": None}) == [
        "--stages=a b.toml",
        "--lr=1e-06",
        "--timing",
        "--no-augment",
        "--no-download",
    ]
    assert as_arguments({"lr": 1, "out": "-x"}) == ["--lr=1", "--out=-x"]
    with pytest.raises(TypeError, match=r"no option 'micro_batches'; did you mean microbatches\?"):
        vigpipe.train(micro_batches=2)  # pyrefly: ignore[unexpected-keyword]


def test_a_run_is_refused_where_it_could_not_be_found_or_started(monkeypatch):
    with pytest.raises(vigpipe.InputError, match="name that folder"):
        vigpipe.train(resume="auto")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(vigpipe.InputError, match=r"one of 2 of torchrun; start one process"):
        vigpipe.train(out="run")
    assert list(Path().iterdir()) == [Path("digits.npz")]


def test_the_package_lists_what_it_offers():
    assert {"train", "load", "predict", "create_model", "InputError"} < set(dir(vigpipe))
    for name in dir(vigpipe):
        assert getattr(vigpipe, name) is not None
    with pytest.raises(AttributeError, match="'vigpipe' has no attribute 'training_'"):
        vigpipe.training_  # noqa: B018
