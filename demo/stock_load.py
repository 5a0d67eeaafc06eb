# SPDX-License-Identifier: Apache-2.0
"""Loads a checkpoint with nothing but PyTorch, in a process that cannot import bytecheckpoint, and compares it.

Usage: ``python stock_load.py CHECKPOINT REFERENCE``, where REFERENCE is a ``torch.save`` file of the full state dict.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType

HIDDEN = "bytecheckpoint"


class HidingFinder(MetaPathFinder):
    """Makes every import of the hidden package fail, installed or not."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname.partition(".")[0] == HIDDEN:
            raise ModuleNotFoundError(f"No module named {fullname!r} (hidden by the demo)", name=fullname)


def hide_bytecheckpoint() -> None:
    """Hides the package, then proves that it is hidden. Call it before anything else is imported."""
    assert_not_imported()
    sys.meta_path.insert(0, HidingFinder())
    try:
        importlib.import_module(HIDDEN)
    except ModuleNotFoundError as error:
        print(f"import {HIDDEN}: {error}")
        return
    raise RuntimeError(f"{HIDDEN} is still importable: loading here would prove nothing")


def assert_not_imported() -> None:
    imported = [name for name in sys.modules if name.partition(".")[0] == HIDDEN]
    if imported:
        raise RuntimeError(f"{imported} already imported: loading here would prove nothing")


def load_and_compare(checkpoint: Path, reference: Path) -> bool:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from training.comparison import blank_copy, compare

    # DCP warns about every tensor that one process loads alone, which is the purpose here.
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    wanted = torch.load(reference, weights_only=True, mmap=True)

    loaded = blank_copy(wanted)
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    by_load = compare(wanted, loaded)
    print(f"dcp.load with FileSystemReader: {by_load}")

    converted = reference.with_name("converted.pt")
    dcp_to_torch_save(checkpoint, converted)
    by_conversion = compare(wanted, torch.load(converted, weights_only=True, mmap=True))
    print(f"dcp_to_torch_save and torch.load: {by_conversion}")
    return by_load.equal and by_conversion.equal


def main() -> int:
    checkpoint, reference = map(Path, sys.argv[1:])
    hide_bytecheckpoint()
    equal = load_and_compare(checkpoint, reference)
    assert_not_imported()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
