# SPDX-License-Identifier: Apache-2.0
"""Writes a golden checkpoint: ``python tests/interop/make_golden.py FOLDER/v1`` for format version 1.

``... FOLDER/v2`` writes one with a manifest of version 2, whose tensors are partial. ``... FOLDER/torch`` writes one
under the installed torch, in a directory named after it. ``python tests/support/goldens.py
tests/interop/golden/ours.tar.xz FOLDER`` then adds it to the others.

Each is made once. If a test of one fails, the format has changed. That needs a new version with its own golden file.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch

__all__ = ["DTYPES", "OBJECTS", "SHARDED_SHAPES", "USER_METADATA", "golden_state", "partial_state", "pattern"]

DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
    "complex128",
    "complex32",
    "uint16",
    "uint32",
    "uint64",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)

# Shapes of tensors that are sharded over two ranks: by rows, by uneven rows, with one empty shard, by columns.
SHARDED_SHAPES = {"rows": (8, 4), "uneven": (5, 3), "one": (1, 6), "columns": (3, 10)}

OBJECTS: dict[str, Any] = {
    "step": 1234,
    "loss": 0.125,
    "name": "golden \u00e4\U0001f600",
    "nothing": None,
    "flags": [True, False],
    "nested": {"pair": (1, "two"), "bytes": b"\x00\xff"},
}

USER_METADATA = {"made by": "tests/interop/make_golden.py", "numbers": [1, 2.5, None]}


def pattern(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns bytes as ``dtype`` that follow from the name alone, without a random generator that may change."""
    elements = 1
    for size in shape:
        elements *= size
    seed = sum(name.encode())
    values = (torch.arange(elements * dtype.itemsize) * 37 + seed) % (2 if dtype == torch.bool else 256)
    return values.to(torch.uint8).view(dtype).reshape(shape)


def golden_state(*, filled: bool) -> dict[str, Any]:
    """Returns the whole content of the checkpoint, or the same with zeros, to load into."""
    tensors = {name: pattern(name, getattr(torch, name), (3, 4)) for name in DTYPES}
    tensors["scalar"] = pattern("scalar", torch.float32, ())
    tensors["empty"] = pattern("empty", torch.int16, (0, 7))
    tensors["five dims"] = pattern("five dims", torch.int32, (2, 1, 3, 2, 2))
    sharded = {name: pattern(name, torch.float32, shape) for name, shape in SHARDED_SHAPES.items()}
    state: dict[str, Any] = {"tensors": tensors, "sharded": sharded, "objects": OBJECTS}
    if filled:
        return state
    for group in (tensors, sharded):
        for name, value in group.items():
            group[name] = torch.zeros(value.nbytes, dtype=torch.uint8).view(value.dtype).reshape(value.shape)
    objects = {"step": 0, "loss": 0.0, "name": "", "nothing": 0, "flags": [0, 0], "nested": {"pair": 0, "bytes": 0}}
    return {**state, "objects": objects}


def partial_state(*, filled: bool) -> dict[str, Any]:
    """Returns the content of the checkpoint of version 2: rows 1 and 2 of 5, a box, a whole tensor, and an object."""
    from bytecheckpoint.tensors.chunks import LocalChunks

    def part(name: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> LocalChunks:
        box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        whole = pattern(name, torch.float32, shape)
        tensor = whole[box].clone() if filled else torch.zeros(sizes)
        return LocalChunks(shape, [offsets], [tensor], torch.float32)

    whole = pattern("whole", torch.int32, (3, 4))
    return {
        "rows": part("rows", (5, 3), (1, 0), (2, 3)),
        "box": part("box", (4, 6), (2, 3), (1, 2)),
        "whole": whole if filled else torch.zeros_like(whole),
        "step": 7 if filled else 0,
    }


def write_partial(path: str) -> None:
    """Writes the checkpoint of version 2 in one process."""
    import torch.distributed.checkpoint as dcp

    from bytecheckpoint import BcpSavePlanner, BcpWriter, Config

    config = Config(allow_partial_tensors=True)
    writer = BcpWriter(path, overwrite=False, config=config)
    dcp.save(partial_state(filled=True), storage_writer=writer, planner=BcpSavePlanner(config=config), no_dist=True)


def write(path: str, planner: Any = None) -> None:
    """Writes the checkpoint of version 1. Runs on each of two ranks."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from bytecheckpoint import BcpWriter, Config

    state = golden_state(filled=True)
    mesh = init_device_mesh("cpu", (2,))
    for name, value in state["sharded"].items():
        placements = [Shard(1 if name == "columns" else 0)]
        state["sharded"][name] = distribute_tensor(value, mesh, placements, src_data_rank=None)
    writer = BcpWriter(path, overwrite=False, config=Config(), user_metadata=USER_METADATA)
    dcp.save(state, storage_writer=writer, planner=planner)


def write_with_our_planner(path: str) -> None:
    from bytecheckpoint import BcpSavePlanner

    write(path, BcpSavePlanner())


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.ranks import run_ranks

    from interop import make_golden

    if Path(sys.argv[1]).name == "v2":
        write_partial(sys.argv[1])
    elif Path(sys.argv[1]).name == "torch":
        version = torch.__version__.partition("+")[0]
        # A checkpoint contains its path, so this one must not reveal the machine.
        run_ranks(2, make_golden.write_with_our_planner, f"/tmp/golden/{version}")
        shutil.move(f"/tmp/golden/{version}", sys.argv[1])
    else:
        run_ranks(2, make_golden.write, sys.argv[1])
