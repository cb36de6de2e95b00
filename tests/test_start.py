"""What is decided between the command line and a rank's work."""

import shutil

import pytest
import torch

from vigpipe import ranks
from vigpipe.cli import main
from vigpipe.config.files import as_toml

GPU = torch.device("cuda", 0)


@pytest.fixture
def options_of(monkeypatch, tmp_path):
    """Start one rank, of one or two; return the options with which its work begins."""
    seen = []
    monkeypatch.setattr("vigpipe.training.train", lambda run, *_: seen.append(as_toml(run.config)))

    def start(*arguments, device=None, pipeline_size=1, replicas=1, verb="train"):
        if device is not None:
            monkeypatch.setattr(ranks, "join", lambda *_, **__: device)
        if pipeline_size * replicas > 1:
            monkeypatch.setattr(ranks, "broadcast_value", lambda value, _: value)
            monkeypatch.setattr(ranks, "check_alike", lambda *_: None)
            values = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
            values |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
            for name, value in values.items():
                monkeypatch.setenv(name, value)
            monkeypatch.setattr("vigpipe.launch.failures._has_process_group", lambda: False)
        layout = ("--stages", str(pipeline_size), "--dp", str(replicas))
        arguments = (*arguments, *layout, "--threads", "1")
        assert main([verb, *arguments, "--out", str(tmp_path / "run")]) == 0
        return seen[-1]

    return start


@pytest.mark.parametrize(
    ("device", "stages", "replicas", "sync"),
    [
        (None, 1, 1, "double"),
        (torch.device("cpu"), 2, 1, "double"),
        (GPU, 1, 1, "drain"),
        (GPU, 1, 2, "ddp"),
        (GPU, 2, 1, "drain"),
    ],
)
def test_how_gradients_are_added_up_depends_on_the_device(
    options_of, device, stages, replicas, sync
):
    assert options_of(device=device, pipeline_size=stages, replicas=replicas)["sync"] == sync


def test_a_given_way_to_add_gradients_up_stays(options_of):
    assert options_of("--sync", "double", device=GPU)["sync"] == "double"


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [((), 60), (("--compile",), 600), (("--compile", "--timeout", "7"), 7)],
)
def test_ranks_wait_longer_for_one_that_compiles(options_of, arguments, seconds):
    """One rank's compiler ended the others after a minute."""
    assert options_of(*arguments)["timeout"] == seconds


def test_ctrl_c_before_the_first_step_of_a_resumed_run_says_what_there_is(
    tmp_path, monkeypatch, capsys
):
    def interrupt(*_):
        raise KeyboardInterrupt

    words = ["train", "--steps", "1", "--threads", "1", "--out"]
    assert main([*words, str(tmp_path / "run")]) == 0
    again = shutil.copytree(tmp_path / "run", tmp_path / "again")  # this process has locked the run
    monkeypatch.setattr("vigpipe.training.train", interrupt)
    assert main([*words, str(again), "--resume", "auto"]) == 130
    told = capsys.readouterr().err
    assert "stopped by Ctrl-C, and the newest checkpoint is step-00000001; go on with " in told


def test_what_is_known_before_is_refused_before_ranks_start(tmp_path, monkeypatch, capsys):
    """Most of it was said when all of them had started, had met, and had read the data."""
    before = tmp_path / "before"
    steps = ["--batch-size", "72", "--steps", "2", "--evaluate-every", "9", "--threads", "1"]
    gossip = ["--strategy", "gossip", "--dp", "2"]
    assert main(["train", *steps, "--out", str(before)]) == 0
    monkeypatch.setattr("vigpipe.ranks._start_ranks", lambda *_: pytest.fail("ranks were started"))
    rows = [
        (["--stages", "2", "--cuda-graph"], "--cuda-graph: a graph runs on a GPU, and this rank"),
        (["--stages", "2", "--stop-before", "2001-01-01"], "give a later moment"),
        (["--stages", "2", "--resume", str(before), "--lr", "9"], "its --lr is 0.004, this run's"),
        (["--stages", "2", "--resume", str(tmp_path)], "holds no checkpoints"),
        (["--stages", "2", "--resume", "auto", "--lr", "9", "--out", str(before)], "its --lr is"),
        ([*gossip, "--replay", str(before)], "its --answer is not set, this run's is item"),
        ([*gossip, "--replay", str(tmp_path)], f"{tmp_path}/config.toml"),
    ]
    for options, message in rows:
        capsys.readouterr()
        if "--out" not in options:
            options += ["--out", str(tmp_path / "new")]
        assert main(["train", *steps, *options]) == 2, options
        said = capsys.readouterr().err
        assert message in said, said
        assert said.count("\n") == 1
    late = ["--model", "gcn", "--data", "sbm:60,3", "--shards", "2", "--split", "halo"]
    for options, message in (
        ([*late, "--halo", "stale"], "--halo stale: does not train like one rank"),
        (["--strategy", "periodic", "--dp", "2"], "--compare-steps 3: expected at least one"),
    ):
        assert main(["check", *options, "--out", str(tmp_path / "new")]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_ranks_of_a_launcher_are_refused_before_they_meet(monkeypatch, capsys):
    values = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    values |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "join", lambda *_, **__: pytest.fail("they met"))
    threads = torch.get_num_threads()
    try:
        assert main(["train", "--stages", "2", "--cuda-graph", "--threads", "1"]) == 2
    finally:
        torch.set_num_threads(threads)
    assert "--cuda-graph: a graph runs on a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "allowed"), [((), False), (("--tf32",), True)])
def test_tf32_is_as_asked_for_products_and_convolutions(options_of, arguments, allowed):
    """By itself torch computes float32 convolutions in TF32."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = not allowed
    try:
        assert options_of(*arguments)["tf32"] == allowed
        assert torch.backends.cuda.matmul.allow_tf32 == allowed
        assert torch.backends.cudnn.allow_tf32 == allowed
        assert torch.get_float32_matmul_precision() == ("high" if allowed else "highest")
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = True, False
