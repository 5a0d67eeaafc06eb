# SPDX-License-Identifier: Apache-2.0
"""Findings about this machine, and about the directory of a checkpoint, that matter to saves and loads."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import resource
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bytecheckpoint.config import Config
from bytecheckpoint.errors import ConfigError
from bytecheckpoint.native import _core

__all__ = ["Condition", "findings_of_machine", "findings_of_path"]

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_BLOCK_BYTES = 4096


@dataclass(frozen=True)
class Condition:
    """One line of the report.

    Attributes:
        name: What the finding is about.
        state: ``ok``; ``slow`` or ``note`` if something can be done about it; ``broken`` if something that is asked for
            cannot work.
        text: What was found.
        advice: What to do; empty if there is nothing to do.
    """

    name: str
    state: str
    text: str
    advice: str = ""


def findings_of_machine() -> Iterator[Condition]:
    """Returns the findings about the machine in the order in which they are shown."""
    config: Config | None = None
    try:
        config = Config.from_env()
        defaults = Config()
        changed = {name: value for name, value in vars(config).items() if value != getattr(defaults, name)}
        listed = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        yield Condition("settings", "ok", listed or "none of BYTECHECKPOINT_* differs from the default")
    except ConfigError as error:
        yield Condition("settings", "broken", str(error), "correct or unset this BYTECHECKPOINT_* variable")
    yield _crc()
    yield _memory(config)
    yield _huge_pages()
    yield _shared_memory()
    yield from _gpu()


def _crc() -> Condition:
    kernel = _core.build_info()["crc32"]
    if kernel == "table":
        return Condition(
            "checksum", "slow", "kernel: table", "this CPU has no carry-less multiplication: more io_threads help"
        )
    return Condition("checksum", "ok", f"kernel: {kernel}")


def _memory(config: Config | None) -> Condition:
    available = _core.available_memory_bytes()
    limits = {"RLIMIT_AS": resource.RLIMIT_AS, "RLIMIT_DATA": resource.RLIMIT_DATA}
    set_limits = {name: resource.getrlimit(limit)[0] for name, limit in limits.items()}
    listed = [f"{name} {_size(number)}" for name, number in set_limits.items() if number != resource.RLIM_INFINITY]
    least = min([available, *(number for number in set_limits.values() if number != resource.RLIM_INFINITY)])
    text = f"{_size(available)} for staging, in the limits of the control group; {', '.join(listed) or 'no RLIMIT'}"
    wanted = 0 if config is None else config.staging_bytes * (2 if config.on_staging_busy == "double_buffer" else 1)
    if available >= 0 and wanted > least:
        return Condition(
            "memory",
            "broken",
            f"{text}; staging_bytes asks for {_size(wanted)}",
            "lower BYTECHECKPOINT_STAGING_BYTES, or raise the limit",
        )
    if listed:
        return Condition(
            "memory", "note", text, "staging maps as much memory as a state takes: the limit must leave room for it"
        )
    return Condition("memory", "ok", text)


def _chosen(file: str) -> str:
    """Returns the word in brackets in a file of the kernel, which is the setting in use."""
    try:
        return (_HUGE_PAGES / file).read_text().partition("[")[2].partition("]")[0] or "unknown"
    except OSError:
        return "unknown"


def _huge_pages() -> Condition:
    own, shared = _chosen("enabled"), _chosen("shmem_enabled")
    text = f"transparent: {own}; for memory that processes share: {shared}"
    if shared in ("never", "deny"):
        text += " (a memory tier is faster with advise)"
    if own in ("always", "madvise"):
        return Condition("huge pages", "ok", text)
    return Condition(
        "huge pages",
        "slow",
        text,
        f"staging is about half as fast without them; turn them on: echo madvise > {_HUGE_PAGES / 'enabled'}",
    )


def _shared_memory() -> Condition:
    try:
        about = os.statvfs("/dev/shm")
    except OSError as error:
        return Condition("/dev/shm", "note", f"{error.strerror}", "torch's own shared tensors need it; ours do not")
    free, size = about.f_bavail * about.f_frsize, about.f_blocks * about.f_frsize
    return Condition(
        "/dev/shm", "ok", f"{_size(free)} of {_size(size)} free; saves in a process of their own do not use it"
    )


def _driver_version() -> tuple[int, int] | None:
    """Returns the CUDA version that the driver supports; None if there is no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


def _gpu() -> Iterator[Condition]:
    try:
        import torch

        from bytecheckpoint.native import _C
    except ImportError:
        return  # the versions report it already
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    has_device = any(Path("/dev").glob("nvidia[0-9]*"))
    yield gpu_finding(has_device, torch.version.cuda, _driver_version(), _C.build_info()["cuda"], capability)


def gpu_finding(
    has_device: bool,
    of_torch: str | None,
    driver: tuple[int, int] | None,
    architectures: list[str],
    capability: tuple[int, int] | None,
) -> Condition:
    """Returns whether device, driver and builds fit together.

    Args:
        has_device: Whether the machine has an NVIDIA device.
        of_torch: CUDA version that torch is built for; None if it is built without CUDA.
        driver: CUDA version that the driver supports; None if there is no driver.
        architectures: Architectures that our device code is compiled for.
        capability: Compute capability of the device; None if torch sees no device.
    """
    text = (
        f"device code of ours: {' '.join(architectures) or 'none'}; torch for CUDA {of_torch or '(none)'}; "
        f"driver for CUDA {'.'.join(map(str, driver)) if driver else '(none)'}"
    )
    if not has_device and capability is None:
        return Condition("GPU", "ok", f"{text}; no GPU here")
    if of_torch is None:
        return Condition("GPU", "note", text, "this torch cannot use the GPU: install one that is built for CUDA")
    if driver is None or int(of_torch.split(".")[0]) > driver[0]:
        return Condition("GPU", "broken", text, "the driver is too old for torch: update it, or install another torch")
    if not architectures:
        return Condition(
            "GPU",
            "slow",
            text,
            "tensors are copied one by one: build again on a machine with nvcc (docs/getting_started.md)",
        )
    if capability is None:
        return Condition("GPU", "note", text, "torch sees no device: look at CUDA_VISIBLE_DEVICES")
    major, minor = capability
    text += f"; device sm_{major}{minor}"
    binaries = [divmod(int(name[3:]), 10) for name in architectures if name.startswith("sm_")]
    if any(major == of_binary and minor >= least for of_binary, least in binaries):
        is_same = (major, minor) in binaries
        return Condition("GPU", "ok", f"{text}, {'compiled for it' if is_same else 'runs code of its generation'}")
    for name in architectures:
        if name.startswith("compute_") and divmod(int(name.removeprefix("compute_")), 10) <= (major, minor):
            return Condition("GPU", "ok", f"{text}, by PTX of {name}")
    return Condition("GPU", "slow", text, "no device code for it: tensors are copied one by one")


def findings_of_path(path: Path) -> Iterator[Condition]:
    """Returns findings about the directory at ``path``, or about its nearest existing parent. Leaves nothing behind."""
    folder = path
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    where = "" if folder == path else f"; {path} is not there yet"
    about = os.statvfs(folder)
    free = about.f_bavail * about.f_frsize
    kind = _file_system(folder)
    text = f"{folder}: {kind}, {_size(free)} free{where}"
    if path.exists() and not path.is_dir():
        yield Condition(
            "path", "broken", f"{path} is not a directory", "give the directory of a checkpoint or of a run"
        )
        return
    if kind in ("tmpfs", "ramfs"):
        yield Condition(
            "path", "note", text, "this file system is in memory: checkpoints are lost when the machine restarts"
        )
    elif not free and about.f_blocks:
        yield Condition(
            "path", "broken", text, "make room: a save writes a whole checkpoint before it removes the old one"
        )
    else:
        yield Condition("path", "ok", text)
    try:
        fd, name = tempfile.mkstemp(dir=folder, prefix=".bcp-doctor-")
        with os.fdopen(fd):
            yield _direct_io(name)
            yield _flock(fd)
    except OSError as error:
        yield Condition(
            "writing",
            "broken",
            f"no file can be made in {folder}: {error.strerror}",
            "allow this user to write there",
        )


def _direct_io(name: str) -> Condition:
    """Tries a file, and removes its name once it is open. Some file systems open it and refuse the first write."""
    block = mmap.mmap(-1, _BLOCK_BYTES)  # O_DIRECT needs aligned memory
    try:
        try:
            fd = os.open(name, os.O_RDWR | os.O_DIRECT)
        finally:
            Path(name).unlink()
        with os.fdopen(fd):
            os.pwrite(fd, block, 0)
    except OSError as error:
        return Condition(
            "O_DIRECT",
            "slow",
            f"refused: {error.strerror}; everything goes through the page cache",
            "another file system is faster for large checkpoints",
        )
    return Condition("O_DIRECT", "ok", "works")


def _flock(fd: int) -> Condition:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return Condition(
            "flock",
            "note",
            f"refused: {error.strerror}",
            "a prune cannot tell running saves from dead ones: mount with locks, or let only one process prune",
        )
    return Condition("flock", "ok", "works")


def _file_system(folder: Path) -> str:
    """Returns the type of the file system of ``folder``: of the nearest mount above it, and of the last one there."""
    found = ("", "file system of an unknown type")
    real = os.path.realpath(folder)
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return found[1]
    for line in lines:
        fields, _, rest = line.partition(" - ")
        place = fields.split()[4].replace("\\040", " ")
        is_above = real == place or real.startswith(place.rstrip("/") + "/")
        if is_above and len(place) >= len(found[0]):
            found = (place, rest.split()[0])
    return found[1]


def _size(num_bytes: int) -> str:
    if num_bytes < 0:
        return "an unknown number of bytes"
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:,.1f} MB"
