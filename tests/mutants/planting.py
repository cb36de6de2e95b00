"""Plant one fault in a copy of the repository, and look which test finds it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutants.faults import Fault
from tests.mutants.lines import Ran

BUDGET = 300.0  # seconds for all tests of one fault
_STUCK = (30.0, 5.0)  # a test is stuck after so many seconds and so many times its usual ones
_DEAR = 1.0  # seconds of a fixture from which on the tests that share it stay together
_STEADY = 2.0  # seconds up to which a test is believed at once; a longer one must pass without
_MARK = "VIGPIPE_TEST_FAULT"  # in the environment of all that a fault's tests start


@dataclass(frozen=True)
class Verdict:
    """What came of one fault.

    Attributes:
        fault: in words.
        room: the folder of the package that it is in.
        found: whether it was found.
        how: the test that failed or was stuck, or why none did.
        seconds: of the whole.
    """

    fault: str
    room: str
    found: bool
    how: str
    seconds: float

    def line(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)


def in_order(tests: Sequence[Ran]) -> list[Ran]:
    """Cheapest first; tests that share a dear fixture stay together, and share its cost."""
    groups: dict[object, list[Ran]] = defaultdict(list)
    for ran in tests:
        dear = any(seconds > _DEAR for seconds in ran.shared.values())
        groups[ran.test.partition("::")[0] if dear else ran.test].append(ran)

    def cost(group: list[Ran]) -> float:
        shared = {name: seconds for ran in group for name, seconds in ran.shared.items()}
        return (sum(shared.values()) + sum(ran.seconds for ran in group)) / len(group)

    return [ran for group in sorted(groups.values(), key=cost) for ran in group]


def plant(fault: Fault, tests: Sequence[Ran], copy: Path) -> Verdict:
    """Run the tests that run the fault's line in a copy that has it, until one fails.

    Args:
        fault: what to plant.
        tests: those that run its line.
        copy: a clone of the repository, as it was committed; it is so again afterwards.
    """
    start = time.monotonic()
    left = in_order(tests)
    how, found = "no test runs the line" if not tests else "", False
    while left and not how:
        seconds = BUDGET - (time.monotonic() - start)
        with _planted(fault, copy):
            found, how, test = _run(left, copy, seconds)
        usual = {ran.test: ran.seconds for ran in left}
        if found and test and usual[test] > _STEADY and not _passes(test, copy):
            left = [ran for ran in left if ran.test != test]  # it fails without the fault too
            found, how = False, "" if left else "no steady test"
    return Verdict(str(fault), fault.room, found, how, round(time.monotonic() - start, 1))


@contextlib.contextmanager
def _planted(fault: Fault, copy: Path) -> Iterator[None]:
    path = copy / fault.file
    text = path.read_bytes()
    try:
        fault.plant(copy)
        _forget_compiled(path)
        yield
    finally:
        path.write_bytes(text)
        _forget_compiled(path)


def _forget_compiled(path: Path) -> None:
    """Python compares a file's seconds and size only, which a fault may leave as they were."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def _passes(test: str, copy: Path) -> bool:
    found, _, _ = _run([Ran(test, BUDGET, {}, True, b"")], copy, BUDGET)
    return not found


def _run(tests: Sequence[Ran], copy: Path, seconds: float) -> tuple[bool, str, str]:
    """Run tests until one fails; return whether one did, how that was noticed, and its node id."""
    order, told, log = (copy.parent / f"{copy.name}.{name}" for name in ("order", "told", "log"))
    order.write_text("".join(f"{ran.test}\n" for ran in tests))
    told.write_text("")
    paths = dict.fromkeys(ran.test.partition("::")[0] for ran in tests)
    args = ["-x", "-q", "-p", "no:cacheprovider", "-p", "tests.mutants.plugin"]
    args += [f"--rootdir={copy}", "-c", "pyproject.toml", f"--in-order={order}", f"--tell={told}"]
    args += paths
    variables = {**os.environ, "PYTHONPATH": str(copy), _MARK: str(copy)}
    with log.open("w") as out, _nothing_left(copy):
        pytest = subprocess.Popen(
            [sys.executable, "-m", "pytest", *args],
            cwd=copy,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = pytest.wait(max(1.0, seconds))
    pytest.wait()
    events = [line.split(" ", 2) for line in told.read_text().splitlines()]
    if failed := [test for event, _, test in events if event == "failed"]:
        return True, failed[0], failed[0]
    if code is None:
        _, began, test = events[-1] if events else ("", "0", "before the first test")
        usual = next((ran.seconds for ran in tests if ran.test == test), 0.0)
        if time.monotonic() - float(began) > _STUCK[0] + _STUCK[1] * usual:
            return True, f"stuck: {test}", ""
        return False, f"{len(events)} of {len(tests)} tests in {BUDGET:.0f} s", ""
    if code == 0:
        return False, f"all {len(tests)} tests passed", ""
    return True, f"pytest ended with {code}: {log.read_text()[-300:]}", ""


@contextlib.contextmanager
def _nothing_left(copy: Path) -> Iterator[None]:
    """End all that the tests have started and that outlives them."""
    try:
        yield
    finally:
        mark = f"{_MARK}={copy}".encode()
        while pids := [pid for pid, variables in _environments() if mark in variables]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def _environments() -> Iterator[tuple[int, list[bytes]]]:
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            yield int(path.parent.name), path.read_bytes().split(b"\0")
