"""For pytest: note what each test runs, or run chosen tests in a given order and tell of each.

python -m pytest -p tests.mutants.plugin --note-lines FOLDER
python -m pytest -p tests.mutants.plugin --in-order FILE --tell FILE
"""

import mmap
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.lines import VARIABLE, Ran


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--note-lines", type=Path)
    parser.addoption("--size", type=int, help="how many statements there are")
    parser.addoption("--in-order", type=Path)
    parser.addoption("--tell", type=Path)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Begin before the first conftest.py imports vigpipe: forks have what this process mapped."""
    options = early_config.known_args_namespace
    if options.note_lines is not None and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
        path = options.note_lines / f"hits-{worker}"
        path.write_bytes(bytes(options.size))
        os.environ[VARIABLE] = str(path)
        early_config.pluginmanager.register(
            Noting(path, options.note_lines / f"ran-{worker}.jsonl")
        )
    if options.in_order is not None:
        early_config.pluginmanager.register(InOrder(options.in_order, options.tell))


class Noting:
    """Note what runs in each test, and in each fixture that tests share, for all that use it."""

    def __init__(self, hits: Path, out: Path) -> None:
        self._out = out.open("a")
        with hits.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._size = len(self._map)
        self._fixtures: dict[int, tuple[float, bytes]] = {}
        self._passed = True
        self._in_fixtures = 0.0

    def _taken(self) -> bytes:
        hits = self._map[:]
        self._map[:] = bytes(self._size)
        return hits

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        before, start, inner = self._taken(), time.monotonic(), self._in_fixtures
        try:
            return (yield)
        finally:
            # What it asks other fixtures for is theirs; a test that uses it lists them as well.
            self._in_fixtures = inner + time.monotonic() - start
            self._fixtures[id(fixturedef)] = (time.monotonic() - start, self._taken())
            self._map[:] = before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Generator[None, object, object]:
        self._taken()
        self._passed, self._in_fixtures, start = True, 0.0, time.monotonic()
        try:
            return (yield)
        finally:
            seconds = time.monotonic() - start - self._in_fixtures
            hits, shared = int.from_bytes(self._taken()), {}
            for name, fixture in getattr(item, "_used", {}).items():
                if id(fixture) in self._fixtures:
                    taken, ran = self._fixtures[id(fixture)]
                    shared[f"{item.nodeid.partition('::')[0]}:{name}"] = taken
                    hits |= int.from_bytes(ran)
            ran = Ran(item.nodeid, seconds, shared, self._passed, hits.to_bytes(self._size))
            print(ran.line(), file=self._out, flush=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: Any) -> Generator[None, object, object]:
        item._used = dict(item._request._fixture_defs)  # pytest forgets them at the end
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._passed &= report.passed


class InOrder:
    """Run the tests that a file names, in its order, and tell when each begins and fails."""

    def __init__(self, order: Path, tell: Path) -> None:
        self._order = {test: place for place, test in enumerate(order.read_text().splitlines())}
        self._tell = tell.open("a")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self._order]
        items[:] = sorted(chosen, key=lambda item: self._order[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        print("begin", time.monotonic(), nodeid, file=self._tell, flush=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print("failed", time.monotonic(), report.nodeid, file=self._tell, flush=True)
