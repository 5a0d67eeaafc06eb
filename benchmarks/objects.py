# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of an object: torch.save and torch.load against dump_builtin and load_builtin, in microseconds.

Contenders take turns, in another order each round. The first round does not count. Each turn is the mean of as many
calls as fit into --turn-ms. The table shows the shortest turn, because other work can only add to it. --json keeps all
turns. load_builtin reads both its own archives and torch.save's. Every value is compared before it is timed.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measurement import machine
from measurement.conditions import wait_until_idle
from rich.console import Console
from rich.table import Table

from bytecheckpoint._core import dump_builtin, load_builtin

OBJECTS: dict[str, Any] = {
    "int": 1000,
    "float": 3e-4,
    "str": "model.layers.0.attention.wq.weight",
    "tuple of 2": (0.9, 0.95),
    "param_group": {
        "lr": 3e-4,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": True,
        "decoupled_weight_decay": True,
        "initial_lr": 3e-4,
        "params": [*range(21)],
    },
    "200 names": [f"model.layers.{i // 10}.feed_forward.w{i % 10}.weight" for i in range(200)],
}
Figures = dict[str, dict[str, list[float]]]


def torch_save(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def torch_load(archive: bytes, weights_only: bool) -> Any:
    return torch.load(io.BytesIO(archive), weights_only=weights_only)


def calls_of(value: Any) -> dict[str, Callable[[], Any]]:
    """Returns the contenders by their column in the table."""
    ours, theirs = dump_builtin(value), torch_save(value)
    assert ours is not None
    calls: dict[str, Callable[[], Any]] = {
        "torch.save": lambda: torch_save(value),
        "dump_builtin": lambda: dump_builtin(value),
        "torch.load": lambda: torch_load(theirs, False),
        "weights_only": lambda: torch_load(theirs, True),
        "load_builtin": lambda: load_builtin(ours),
        "of torch's": lambda: load_builtin(theirs),
    }
    for name in ("load_builtin", "of torch's"):
        assert calls[name]() == (value,), name
    assert torch_load(ours, True) == torch_load(ours, False) == value
    return calls


def microseconds(call: Callable[[], Any], turn_s: float) -> float:
    """Returns the mean time of one call, over a turn."""
    number, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < turn_s:
        for _ in range(10):
            call()
        number += 10
    return elapsed / number * 1e6


def measure(repetitions: int, turn_s: float) -> Figures:
    """Returns microseconds by object and contender, one figure for each round."""
    figures: Figures = {}
    for name, value in OBJECTS.items():
        calls = calls_of(value)
        figures[name] = {contender: [] for contender in calls}
        order = [*calls]
        for repetition in range(repetitions + 1):
            for contender in order:
                figure = microseconds(calls[contender], turn_s)
                if repetition:
                    figures[name][contender].append(figure)
            order.reverse()
    return figures


def print_table(figures: Figures, title: str, console: Console) -> None:
    console.print(title)
    table = Table()
    table.add_column("us")
    for column in next(iter(figures.values())):
        table.add_column(column, justify="right")
    for name, by_contender in figures.items():
        table.add_row(name, *(f"{min(turns):.1f}" for turns in by_contender.values()))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20, help="counted rounds, after one more (default 20)")
    parser.add_argument("--turn-ms", type=float, default=10.0, help="length of a turn (default 10)")
    parser.add_argument("--idle-limit-s", type=float, default=20.0, help="longest wait for idleness (default 20)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    arguments = parser.parse_args()
    console = Console(highlight=False, width=100)

    if not wait_until_idle(arguments.idle_limit_s):
        console.print(f"the machine was still busy after {arguments.idle_limit_s:g} s")
    figures = measure(arguments.repetitions, arguments.turn_ms / 1e3)
    facts = machine.facts(Path.cwd())
    print_table(figures, machine.summary(facts), console)
    if arguments.json:
        report: dict[str, Any] = {"command": machine.command("objects.py", arguments, parser), "machine": facts}
        report |= {"versions": machine.versions(), "microseconds": figures}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
