# SPDX-License-Identifier: Apache-2.0
"""Writes golden checkpoints with stock DCP: ``python tests/interop/make_stock_golden.py FOLDER/stock KIND...``.

The installed torch writes them, and they are named after it; ``python tests/support/goldens.py
tests/interop/golden/stock-VERSION.tar.xz FOLDER`` packs them. The script does not need bytecheckpoint. Some kinds need
the package of their writer: fsspec, zstandard, safetensors, ai2-olmo-core.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["KINDS", "write"]

# How many ranks save each kind.
KINDS = {
    "dtypes": 1,
    "plain": 1,
    "files": 1,  # one per tensor
    "threads": 1,  # two files a rank
    "unflattened": 1,
    "single": 1,
    "aligned": 1,  # records on pages of their own
    "no_crc": 1,
    "sharded": 2,
    "mesh": 4,
    "fsspec": 1,
    "no_collectives": 2,
    "quantized": 1,
    "subclass": 1,
    "wrapper": 1,  # a subclass of Tensor that has no memory of its own
    "olmo": 1,
    "compressed": 1,
    "safetensors": 1,
}


def write(kind: str, name: str) -> None:
    """Saves a checkpoint of ``kind`` into the directory ``name``, which is also its id. Collective."""
    from support.equality import settled

    from interop.stock_states import Counter, as_saved, laid_out, state_of

    major, minor = torch.__version__.split(".")[:2]
    version = int(major), int(minor)
    dcp = _dcp()
    state = laid_out(kind, state_of(kind, version, dist.get_rank()))
    if kind == "plain" and version >= (2, 2):
        state["stateful"] = Counter(7)
    state = as_saved(state, version)
    if kind == "safetensors":
        state = settled(state)  # safetensors refuses views
    options: dict[str, Any] = {}
    if kind == "no_collectives":
        options["use_collectives"] = False
    if kind == "unflattened":
        options["planner"] = dcp.DefaultSavePlanner(flatten_state_dict=False)
    if kind == "aligned":
        import_module("torch.utils.serialization").config.save.storage_alignment = 4096
    if kind == "no_crc":
        torch.serialization.set_crc32_options(False)
    writer = _writer(dcp, kind, name)
    if hasattr(dcp, "save"):
        dcp.save(state, storage_writer=writer, **options)
    else:
        dcp.save_state_dict(state, writer, **options)


def _dcp() -> Any:
    try:
        return import_module("torch.distributed.checkpoint")
    except ImportError:
        return import_module("torch.distributed._shard.checkpoint")  # DCP was here until 2.0


def _writer(dcp: Any, kind: str, name: str) -> Any:
    if kind == "fsspec":
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        return FsspecWriter(f"file://{name}")
    if kind == "olmo":
        from olmo_core.distributed.checkpoint.filesystem import RemoteFileSystemWriter

        return RemoteFileSystemWriter(name, thread_count=1)
    options: dict[str, Any] = {"single_file_per_rank": kind != "files"}
    if kind == "threads":
        options["thread_count"] = 2
    if kind == "compressed":
        from torch.distributed.checkpoint._extension import ZStandard

        options["_extensions"] = [ZStandard()]
    if kind == "safetensors":
        from torch.distributed.checkpoint.filesystem import SerializationFormat

        options["serialization_format"] = SerializationFormat.SAFETENSORS
    return dcp.FileSystemWriter(name, **options)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from support.ranks import run_ranks

    from interop.make_stock_golden import write as importable_write

    # The id of a checkpoint is its path. A relative path does not reveal the machine.
    os.chdir(sys.argv[1])
    # Python 3.13 pickles paths differently, so it is part of the name.
    python = "-py3.13" if sys.version_info[:2] == (3, 13) else ""
    for kind in sys.argv[2:]:
        name = f"{torch.__version__.partition('+')[0]}-{kind}{python}"
        run_ranks(KINDS[kind], importable_write, kind, name)
