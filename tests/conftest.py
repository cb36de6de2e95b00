"""Settings of every test, and which tests stay together when several workers run them."""

import os
import re
import signal
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist import is_xdist_worker
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.small_model import small_model
from tests.warm import start_server
from tests.world import ROOT

# The same examples in every run, so that chance fails none that changed nothing; others are drawn
# with --hypothesis-profile default.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.load_profile("steady")

# Before torch is imported, here and by all that is started from here. Threads of OpenMP spin while
# they wait, by default: two runs of two threads on two cores took eight times as long as one.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Workers and ranks have many threads one after the other, and glibc keeps memory for each.
os.environ.setdefault("MALLOC_ARENA_MAX", "2")

# A shell lets its background jobs ignore Ctrl-C, which tests send to themselves.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Files with tests of these stay whole, as their tests share worlds of ranks. Of the last two one
# run, of timm's own tests and of Triton's interpreter, answers for all files.
WHOLE, TOGETHER = "multiprocess", ("timm", "triton")


class Scheduling(LoadScopeScheduling):
    """Start with what stays together, the most tests first, and deal out the rest test by test.

    xdist's own groups do nothing, and say nothing, with pytest 9.2 (pytest-xdist's issue 1386).
    """

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid.partition("::")[0]) or nodeid


@cache
def group(file: str) -> str | None:
    """With what the tests of a file stay; this process knows their names, not their marks."""
    text = (ROOT / file).read_text(encoding="utf-8")
    for name in TOGETHER:
        if f"pytest.mark.{name}" in text:
            return name
    return file if f"pytest.mark.{WHOLE}" in text else None


@pytest.hookimpl(optionalhook=True)  # there is none with -p no:xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    return Scheduling(config, log)


class Cost:
    """Tell at the end what the tests took of this machine, and what the largest worker held.

    Forks of the tests' server are nobody's children, so that only the whole machine's busy time
    counts them; the largest worker is without the ranks and commands that it started.
    """

    def __init__(self) -> None:
        self._start = busy_seconds()
        self._peaks: list[int] = []
        self._num_tests = 0

    def pytest_runtest_logfinish(self) -> None:
        """Give back what commands of this process have kept for their next steps: it adds up."""
        self._num_tests += 1
        if self._num_tests % 10 == 0 and "torch" in sys.modules:
            from vigpipe.launch.device import return_freed_memory

            return_freed_memory()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if is_xdist_worker(session):
            output: dict[str, int] = session.config.workeroutput  # pyrefly: ignore[missing-attribute]
            output["peak_bytes"] = peak_bytes()
        elif not self._peaks:
            self._peaks = [peak_bytes()]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: WorkerController) -> None:
        self._peaks.append(getattr(node, "workeroutput", {}).get("peak_bytes", 0))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(
            f"{busy_seconds() - self._start:,.0f} core-seconds of this machine; "
            f"the largest worker held {max(self._peaks, default=0) / 1e9:.1f} GB"
        )


def busy_seconds() -> float:
    """What all cores together have worked since the machine started: proc(5), /proc/stat."""
    user, nice, system, _, _, *interrupts = Path("/proc/stat").read_text().split()[1:8]
    return sum(map(int, (user, nice, system, *interrupts))) / os.sysconf("SC_CLK_TCK")


def peak_bytes() -> int:
    """The most memory that this process has held."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def asks_for_gpus(marks: str) -> bool:
    """Whether pytest's -m begins with the mark of tests that need a GPU."""
    return re.match(r"gpu\b", marks) is not None


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from the tests and from all that they start, before anybody looks for one.

    What a test shows must not depend on the machine; ranks of a test would fill its GPUs, too.
    """
    if not asks_for_gpus(config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    config.pluginmanager.register(Cost())


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        if not asks_for_gpus(item.config.option.markexpr):
            pytest.skip("needs a GPU; run with -m gpu")
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU, and torch sees none")


@pytest.fixture(scope="session", autouse=True)
def _server_and_operators():
    """Before the first test: compiling is in no rank's time and told among no command's words."""
    from vigpipe.ops.compiler import library

    start_server()
    library()


@pytest.fixture(scope="session", autouse=True)
def _narrow_model():
    """Half of the time of a step; what needs all channels asks for the whole model."""
    with small_model(4):
        yield


@pytest.fixture(autouse=True)
def _one_thread():
    """More threads only wait for each other on small tensors; commands choose their own."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_variables():
    """What a test's code sets in the environment is gone before the next one.

    monkeypatch.delenv does not remember a variable that is not there.
    """
    before = dict(os.environ)
    yield
    set_by_pytest = "PYTEST_CURRENT_TEST"
    for name in {*before, *os.environ} - {set_by_pytest}:
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]
