# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that says where the time of a run goes: of each file its set-up, calls and processor time.

The summary lists the twenty slowest files. ``BCP_TEST_TIMES=FILE`` writes all of them as JSON, the slowest first.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

__all__ = ["pytest_runtest_makereport", "pytest_runtest_protocol", "pytest_terminal_summary"]

_NUM_LISTED = 20
_CPU = "cpu_s_of_file"
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_last_of_file = pytest.StashKey[bool]()
_cpu_before = 0.0


@dataclass
class FileTimes:
    """Seconds that a file of tests took.

    Attributes:
        setup_s: Fixtures, their end included.
        call_s: The tests themselves.
        cpu_s: Processor time of the worker and all processes that came from it.
        num_tests: How many tests ran.
    """

    setup_s: float = 0.0
    call_s: float = 0.0
    cpu_s: float = 0.0
    num_tests: int = 0


def _cpu_s_of_tree() -> float:
    """Returns the processor time of this process and of all that it and they have started."""
    children: dict[int, list[int]] = defaultdict(list)
    seconds: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        children[int(fields[1])].append(int(folder.name))
        # Its own time, and that of its children that were waited for.
        seconds[int(folder.name)] = sum(map(int, fields[11:15])) / _TICKS_A_SECOND
    waiting, total = [os.getpid()], 0.0
    while waiting:
        pid = waiting.pop()
        total += seconds.get(pid, 0.0)
        waiting += children[pid]
    return total


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Notes which test is the last of its file."""
    item.stash[_last_of_file] = nextitem is None or nextitem.path != item.path
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Adds the processor time of a file to the last report of its last test."""
    global _cpu_before
    report = yield
    if call.when == "teardown" and item.stash[_last_of_file]:
        cpu_s = _cpu_s_of_tree()
        report.user_properties.append((_CPU, max(0.0, cpu_s - _cpu_before)))
        _cpu_before = cpu_s
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the slowest files."""
    files: dict[str, FileTimes] = defaultdict(FileTimes)
    for report in (report for of_kind in terminalreporter.stats.values() for report in of_kind):
        if not isinstance(report, pytest.TestReport):
            continue
        times = files[report.nodeid.partition("::")[0]]
        if report.when == "call":
            times.call_s += report.duration
            times.num_tests += 1
        else:
            times.setup_s += report.duration
        times.cpu_s += sum(value for name, value in report.user_properties if name == _CPU)
    slowest = sorted(files.items(), key=lambda item: item[1].setup_s + item[1].call_s, reverse=True)
    if place := os.environ.get("BCP_TEST_TIMES"):
        Path(place).write_text(json.dumps({name: asdict(times) for name, times in slowest}, indent=1) + "\n")
    if len(slowest) < _NUM_LISTED:
        return
    total = sum(times.setup_s + times.call_s for _, times in slowest)
    terminalreporter.section(f"the {_NUM_LISTED} slowest of {len(slowest)} files, which took {total:.0f} s in sum")
    for name, times in slowest[:_NUM_LISTED]:
        terminalreporter.write_line(
            f"{times.call_s:6.1f} s of {times.num_tests:4} tests, {times.setup_s:5.1f} s set-up, "
            f"{times.cpu_s:6.1f} s processor  {name}"
        )
