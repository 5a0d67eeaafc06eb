# SPDX-License-Identifier: Apache-2.0
"""Hooks and fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
from support import times
from support.ending_ranks import EndingRanks
from support.fork_server import ForkServer
from support.leaks import holdings, leaks_since, wait_for_watch
from support.sanitizing import IS_UNDER_ASAN
from support.slow_files import SLOWEST_FIRST

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "bytecheckpoint"
FAILPOINT_BUILD = ROOT / "build" / "failpoints" / "lib"


def pytest_configure(config: pytest.Config) -> None:
    # A shell makes its background processes ignore Ctrl-C, and their children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(times)
    config.addinivalue_line("markers", "not_under_asan(reason): left out by `make sanitize-python`")
    config.addinivalue_line("markers", "long: takes minutes or many gigabytes; runs with BCP_LONG=1")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what each campaign covered, also when all tests passed."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "covered" and report.when == "teardown":
                    terminalreporter.write_line(value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    places = {tests / name: place for place, name in enumerate(SLOWEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    is_long = os.environ.get("BCP_LONG") == "1"
    for item in items:
        if item.get_closest_marker("long") and not is_long:
            item.add_marker(pytest.mark.skip(reason="long: set BCP_LONG=1 to run it"))
        marker = item.get_closest_marker("not_under_asan")
        if marker is not None and IS_UNDER_ASAN:
            item.add_marker(pytest.mark.skip(reason=f"under ASan: {marker.args[0]}"))


def pytest_collection_finish() -> None:
    """Makes garbage collections skip the objects that torch and the modules of the tests have made."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else triton lists all its objects as leaked


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """Yields a fork server of the installed package."""
    server = ForkServer()
    yield server
    server.close()


def _is_same(file: Path) -> bool:
    built = FAILPOINT_BUILD / file.relative_to(ROOT)
    return built.exists() and built.read_bytes() == file.read_bytes()


@pytest.fixture(scope="session")
def failpoint_server() -> Iterator[ForkServer]:
    """Yields a fork server of the build with failpoints."""
    if not (FAILPOINT_BUILD / "bytecheckpoint").is_dir():
        pytest.skip(f"KILL TESTS NOT RUN: {FAILPOINT_BUILD} is missing; `make build/failpoints/.built` makes it")
    stale = [str(file) for file in PACKAGE.rglob("*.py") if not _is_same(file)]
    if stale:
        pytest.fail(f"{FAILPOINT_BUILD} is not of these sources; `make build/failpoints/.built` updates it: {stale}")
    server = ForkServer(FAILPOINT_BUILD)
    assert Path(server.info["file"]).is_relative_to(FAILPOINT_BUILD), server.info
    assert server.info["failpoints"], "this build has no failpoints"
    yield server
    server.close()


@pytest.fixture(scope="session", autouse=True)
def temporary_files_of_this_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Gives this process its own folder for temporary files, so that it does not take those of others for its own.

    Every user can enter the folder, because some tests let other users in.
    """
    tmp_path_factory.getbasetemp()  # made first, so that it is not in that folder
    with tempfile.TemporaryDirectory(prefix="bcp-") as folder:
        Path(folder).chmod(0o755)
        tempfile.tempdir = folder
        yield
        tempfile.tempdir = None


@pytest.fixture(scope="session")
def servers_of_multiprocessing() -> None:
    """Starts the servers of multiprocessing before the first test.

    They stay once they run, so a test that started them would seem to leave them behind.
    """
    resource_tracker.ensure_running()
    if "support.ranks" in sys.modules:
        forkserver.ensure_running()


@pytest.fixture(scope="session")
def ending_ranks() -> Iterator[EndingRanks]:
    """Yields a process that forks ranks. They run a function or script, have not used the package, and end as usual."""
    started = EndingRanks()
    yield started
    started.close()


_HAS_PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[_HAS_PASSED] = report.passed
    return report


@pytest.fixture(scope="module", autouse=True)
def calls_have_ended(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a module behind which a call counts as running. Not if a test failed: its error may keep the call."""
    yield
    assert request.session.testsfailed or wait_for_watch(), "a save or load of this module is watched for ever"


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest, servers_of_multiprocessing: None) -> Iterator[None]:
    """Fails a test that leaves threads, open files, processes or temporary files behind.

    What fixtures of a module hold exists before the test, so it does not count. A test that failed is not checked: its
    error keeps alive what its frames hold, and the error is enough to look at.
    """
    before = holdings()
    yield
    leaks = leaks_since(before) if request.node.stash.get(_HAS_PASSED, False) else []
    assert not leaks, f"left behind: {', '.join(leaks)}"
