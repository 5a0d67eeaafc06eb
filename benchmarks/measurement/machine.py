# SPDX-License-Identifier: Apache-2.0
"""The facts needed to interpret a figure: machine, versions and command. No host names and no paths."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import bytecheckpoint

# No free stretch of pages has this order (include/linux/mmzone.h), so none is reported.
_MOST_ORDER = 10
PACKAGES = ("torch", "safetensors", "torch_checkpointing", "fastsafetensors", "runai-model-streamer")


def facts(directory: Path) -> dict[str, Any]:
    """Returns facts about the machine and the file system of ``directory``."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _field(Path("/proc/cpuinfo"), "model name"),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30), 1),
        "file_system": _file_system(directory),
        "free_page_reporting": _gives_free_pages_back(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def versions() -> dict[str, Any]:
    """Returns versions of the compared packages. None for one that is not installed."""
    found: dict[str, Any] = {"bytecheckpoint": bytecheckpoint.build_info()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def summary(machine: dict[str, Any]) -> str:
    """Returns the same in one line, for a table's or a figure's caption."""
    gpu = f"{machine['gpu']}, " if machine.get("gpu") else ""
    return (
        f"{gpu}{machine['cores']} cores, {machine['memory_gib']:.0f} GiB, {machine['file_system']}, "
        f"torch {machine['torch']}, Python {machine['python']}, {machine['date'][:10]}"
    )


def command(script: str, arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """Returns the command that repeats the run, with all arguments not at their defaults.

    Paths become metavars or are omitted.
    """
    words = ["python", f"benchmarks/{script}"]
    for action in parser._actions:
        value = getattr(arguments, action.dest, None)
        if value is None or value == action.default:
            continue
        if action.type is Path:
            if action.metavar is None:
                continue
            value = action.metavar
        values = value if isinstance(value, (list, tuple)) else [] if value is True else [value]
        words += [*action.option_strings[-1:], *map(str, values)]
    return " ".join(words)


def _gives_free_pages_back() -> bool:
    """Whether this is a virtual machine that returns free pages to its host. It waits for each again: writes through
    the page cache then take up to three times as long in some minutes as in others.
    """
    order = Path("/sys/module/page_reporting/parameters/page_reporting_order")
    return order.exists() and int(order.read_text()) < _MOST_ORDER


def _field(file: Path, name: str) -> str:
    for line in file.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return platform.machine()


def _file_system(directory: Path) -> str:
    device = directory.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1]
    return "unknown file system"
