# SPDX-License-Identifier: Apache-2.0
"""Makes metadata with false numbers and right checksums, and records what loads and ``verify`` do with them."""

from __future__ import annotations

import logging
import resource
import shutil
import struct
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch.distributed.checkpoint as dcp
from support.peak_memory import REFUSAL_BYTES, with_peak
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint import BcpReader, verify
from bytecheckpoint.errors import CheckpointError
from faults.crafting import DATA_TRAILER, MetadataFile, resigned_trailer
from faults.small import CONFIG, Target

__all__ = ["tell_lies"]

WORDS = (0, 1, 0x7FFFFFFF, 0xFFFFFFFF)
LONG_WORDS = (0, 1, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
# How much address space a load may add to the process, whether it is used or not. Threads take most of it.
MEMORY_BYTES = 2 << 30


def twisted(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yields ``content`` with one of its words, or long words, at an extreme or a little off, and what was changed."""
    for size, code, extremes in ((4, "<I", WORDS), (8, "<Q", LONG_WORDS)):
        for position in range(0, len(content) - size + 1, size):
            (value,) = struct.unpack_from(code, content, position)
            near = {(value + more) % 256**size for more in (-64, -1, 1, 64)}
            for other in sorted({*extremes, *near} - {value}):
                changed = content[:position] + struct.pack(code, other) + content[position + size :]
                yield f"{value} at {position} is {other}", changed


def lies(path: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yields what each lie is, and the files that tell it."""
    whole = MetadataFile.read(path / ".metadata")
    for text, manifest in twisted(whole.manifest()):
        yield f"manifest: {text}", {".metadata": whole.to_bytes(manifest)}
    for number, name in enumerate(whole.file_names()):
        content = (path / name).read_bytes()
        for text, trailer in twisted(content[-DATA_TRAILER:]):
            changed = resigned_trailer(content[:-DATA_TRAILER] + trailer)
            accomplice = MetadataFile.read(path / ".metadata")
            accomplice.vouch_for(number, changed)
            yield f"{name}, trailer: {text}", {name: changed, ".metadata": accomplice.to_bytes()}


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, hard))


def load_outcome(path: Path, target: Target) -> tuple[str, str]:
    """Loads. Returns the outcome in one word, and what was raised."""
    target.clear()
    try:
        dcp.load(target.state, storage_reader=BcpReader(path, config=CONFIG), no_dist=True)
    except CheckpointException as caught:
        (error,) = (wrapped[0] for wrapped in caught.failures.values())
        # DCP's planner refuses wrong shapes and keys with errors of its own.
        known = isinstance(error, CheckpointError) or type(error) in (RuntimeError, ValueError)
        return "refused" if known else "other", repr(error)
    try:
        target.check(failed=False)
    except AssertionError as error:
        return "wrong", str(error)
    return "right", ""


def report_outcome(path: Path) -> tuple[str, str]:
    try:
        problems = verify(path, config=CONFIG).problems
    except CheckpointError as error:
        return "refused", repr(error)
    except Exception as error:
        return "other", repr(error)
    return ("damaged", str(problems[0])) if problems else ("whole", "")


def tell_lies(original: Path, copy: Path, part: int, num_parts: int) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Returns how often a load and ``verify`` had which outcomes, and the outcomes that are faults."""
    warnings.simplefilter("ignore")
    logging.disable()  # DCP logs every failure
    shutil.copytree(original, copy)
    target = Target()
    # Twice, because the first load may import modules, and takes memory that is kept for the next.
    for _ in range(2):
        assert load_outcome(copy, target) == ("right", "")
        assert report_outcome(copy) == ("whole", "")
    limit_memory()
    outcomes: Counter[tuple[str, str]] = Counter()
    faults = []
    for number, (lie, files) in enumerate(lies(original)):
        if number % num_parts != part:
            continue
        for name, content in files.items():
            (copy / name).write_bytes(content)
        (loaded, reported), taken = with_peak(lambda: (load_outcome(copy, target), report_outcome(copy)))
        for name in files:
            shutil.copy(original / name, copy / name)
        outcome = loaded[0], reported[0]
        outcomes[outcome] += 1
        if "other" in outcome or outcome in (("wrong", "whole"), ("refused", "whole")):
            faults.append(f"{lie}: load: {loaded}, verify: {reported}")
        if taken >= REFUSAL_BYTES:
            faults.append(f"{lie}: takes {taken:,} bytes")
    return outcomes, faults
