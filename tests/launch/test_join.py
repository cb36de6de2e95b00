"""Which device each rank gets, or what the user is told, however ranks and GPUs are started."""

import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from tests.launch.driver import pretend_four_gpus
from vigpipe.cli import main
from vigpipe.config.choices import Device
from vigpipe.errors import InputError
from vigpipe.launch import device, fork_server, rendezvous
from vigpipe.launch.environment import FOLDER_VARIABLE, Launch, from_environment
from vigpipe.launch.join import choose_gpu, join
from vigpipe.launch.processes import RankProcesses

# launcher, --device, the GPUs that each rank of each host sees; the devices of the ranks, or a part
# of the sentence that ends the run.
MATRIX = {
    "alone": ("alone", "auto", ["a"], "cuda:0"),
    "alone beside four": ("alone", "cuda", ["abcd"], "cuda:0"),
    "alone on a host without": ("alone", "auto", ["-"], "cpu"),
    "alone, and asked for": ("alone", "cuda", ["-"], "torch sees no GPU here"),
    "its own launcher": ("local", "auto", ["ab ab"], "cuda:0 cuda:1"),
    "the CPU beside GPUs": ("local", "cpu", ["ab ab"], "cpu cpu"),
    "no GPU anywhere": ("local", "auto", ["- -"], "cpu cpu"),
    "no GPU, and asked for": ("local", "cuda", ["- -"], "torch sees no GPU here"),
    "one GPU, and asked for": ("local", "cuda", ["a a"], "2 ranks on this host, but 1 GPU;"),
    "torchrun": ("torchrun", "cuda", ["ab ab", "cd cd"], "cuda:0 cuda:1 cuda:0 cuda:1"),
    "torchrun --virtual-local-rank": ("torchrun", "cuda", ["a b"], "cuda:0 cuda:0"),
    "torchrun, a poor host": ("torchrun", "cuda", ["ab ab", "c c"], "2 ranks on host1, but 1 GPU;"),
    "srun --gpus-per-node": ("srun", "auto", ["ab ab", "cd cd"], "cuda:0 cuda:1 cuda:0 cuda:1"),
    "srun --gpus-per-task=1": ("srun", "auto", ["a b", "c d"], "cuda:0 cuda:0 cuda:0 cuda:0"),
    "srun of 2 + 1 tasks": ("srun", "cuda", ["ab ab", "cd"], "cuda:0 cuda:1 cuda:0"),
    "srun, the same two": ("srun", "cuda", ["ab ba"], "2 of 2 ranks on host0 have the same GPU (a"),
    "CUDA_VISIBLE_DEVICES=0": ("srun", "cuda", ["a a"], "2 ranks on host0, but 1 GPU;"),
}  # fmt: skip
# For --device auto, a part of the line that is told once.
FALLBACKS = {
    "one GPU for two": ("local", ["a a"], "2 ranks on host0, but 1 GPU: "),
    "srun, a poor host": ("srun", ["ab ab", "c c"], "2 ranks on host1, but 1 GPU: "),
    "srun, a host without": ("srun", ["ab ab", "- -"], "2 ranks on host1, but 0 GPUs: "),
    "srun, the same two": ("srun", ["ab ba"], "2 of 2 ranks on host0 have the same GPU (a): "),
}


def environment(launcher: str, rank: int, hosts: list[list[str]]) -> dict[str, str]:
    """The variables of a rank."""
    places = [(host, local) for host, seen in enumerate(hosts) for local in range(len(seen))]
    (host, local), world_size, num_local = places[rank], len(places), len(hosts[places[rank][0]])
    if launcher == "srun":
        return {
            "SLURM_STEP_NUM_TASKS": str(world_size),
            "SLURM_STEP_NODELIST": ",".join(f"host{i}" for i in range(len(hosts))),
            "SLURM_STEP_TASKS_PER_NODE": ",".join(str(len(seen)) for seen in hosts),
            "SLURM_PROCID": str(rank),
            "SLURM_NODEID": str(host),
            "SLURM_LOCALID": str(local),
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_ID": "0",
        }
    own = {"local": {FOLDER_VARIABLE: "/nowhere"}, "torchrun": {}, "alone": None}[launcher]
    if own is None:
        return {}
    counts = {"RANK": rank, "WORLD_SIZE": world_size}
    counts |= {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": num_local, "MASTER_PORT": 1024}
    return {**own, "MASTER_ADDR": "host0", **{name: str(count) for name, count in counts.items()}}


@pytest.fixture
def start(monkeypatch):
    """Let every rank, a thread here, choose and join on a machine with the GPUs it is said to see.

    Returns a function that gives the backend and the device of every rank.
    """
    here = threading.local()  # what this thread's rank sees
    store = dist.HashStore()
    patches = {
        (torch.cuda, "is_available"): lambda: bool(here.gpus),
        (torch.cuda, "device_count"): lambda: len(here.gpus),
        (torch.cuda, "get_device_properties"): lambda i: type("", (), {"uuid": here.gpus[i]}),
        (torch.cuda, "set_device"): lambda _: None,
        (socket, "gethostname"): lambda: here.host,
        (rendezvous, "meet"): lambda *_: store,
        (rendezvous, "init_process_group"): lambda _, name, *__: setattr(here, "backend", name),
    }
    for (owner, name), replacement in patches.items():
        monkeypatch.setattr(owner, name, replacement)

    def run(launcher: str, requested: Device, given: list[str], others: Device | None = None):
        hosts = [["" if seen == "-" else seen for seen in host.split()] for host in given]
        ranks = [(f"host{i}", seen) for i, host in enumerate(hosts) for seen in host]
        launches = [from_environment(environment(launcher, r, hosts)) for r in range(len(ranks))]

        def choose(rank: int) -> int | None:
            here.host, here.gpus = ranks[rank]
            option = others if rank and others else requested
            num_gpus = device.count_gpus(option, can_compute=True)
            return choose_gpu(option, launches[rank], num_gpus)

        def take(rank: int, launch: Launch, gpu: int | None) -> tuple[str, str]:
            here.host, here.gpus = ranks[rank]
            here.backend = "none"
            option = others if rank and others else requested
            taken = join(option, gpu, launch, 1, on_one_gpu="--these")
            return here.backend, str(taken)

        chosen = [choose(rank) for rank in range(len(ranks))]
        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(take, range(len(ranks)), launches, chosen))

    return run


@pytest.mark.parametrize("case", MATRIX)
def test_launch_matrix(case, start, capsys):
    launcher, requested, hosts, expected = MATRIX[case]
    if re.match("cpu|cuda:", expected):
        taken = start(launcher, requested, hosts)
        assert " ".join(name for _, name in taken) == expected
        wanted = "cpu:gloo,cuda:nccl" if "cuda" in expected else "gloo"
        assert {name for name, _ in taken} == {"none" if launcher == "alone" else wanted}
    else:
        with pytest.raises(InputError, match=re.escape(expected)) as refused:
            start(launcher, requested, hosts)
        assert "choose --device cpu" in str(refused.value)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("case", FALLBACKS)
def test_with_too_few_gpus_auto_means_cpus_and_says_so_once(case, start, capsys):
    launcher, hosts, expected = FALLBACKS[case]
    taken = start(launcher, "auto", hosts)
    assert set(taken) == {("gloo", "cpu")}
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"vigpipe: {expected}" in told
    assert "all ranks compute on CPUs" in told
    assert told.endswith("--these\n")


def test_ranks_with_different_options_say_so(start):
    with pytest.raises(InputError, match="device is 'cpu' on rank 1, but 'cuda' on rank 0"):
        start("srun", "cuda", ["ab ab"], others="cpu")
    assert set(start("srun", "auto", ["ab ab"], others="cpu")) == {("gloo", "cpu")}


def test_the_process_that_starts_ranks_leaves_cuda_alone(tmp_path, capsys, monkeypatch):
    """Its context on GPU 0 held memory there for the whole run."""
    started = []
    pretend_four_gpus(monkeypatch)
    monkeypatch.setattr(fork_server, "start_fork_server", lambda *_: None)
    monkeypatch.setattr(RankProcesses, "start", lambda *given: started.append(len(given[-1])))
    options = ["--threads", "1", "--out", str(tmp_path / "run")]
    assert main(["train", "--stages", "auto", "--microbatches", "5", *options]) == 0
    assert started == [4]
    assert main(["train", "--stages", "2", "--dp", "3", "--device", "cuda", *options]) == 2
    assert "6 ranks on this host, but 4 GPUs;" in capsys.readouterr().err
    assert started == [4]
