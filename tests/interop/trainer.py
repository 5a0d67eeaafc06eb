# SPDX-License-Identifier: Apache-2.0
"""A user's script that does not use bytecheckpoint itself. Tests run it with and without a call of ``register`` first.

    python -m interop.trainer ROOT {stock|registered} STEP...

Prints one JSON object with the result of each step.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

ROOT = Path(sys.argv[1]) if __name__ == "__main__" else Path()


def state(number: int) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((50, 4), float(number)), "b": torch.arange(3)},
        "step": number,
        "lrs": [0.1, number],
    }


def loaded(**arguments: Any) -> dict[str, Any]:
    got = {"model": {"w": torch.zeros(50, 4), "b": torch.zeros(3, dtype=torch.int64)}, "step": 0, "lrs": [0, 0]}
    dcp.load(got, **arguments)
    return {"w": got["model"]["w"].sum().item(), "step": got["step"], "lrs": got["lrs"]}  # type: ignore[index]


def is_ours(path: Path) -> bool:
    """Whether bytecheckpoint wrote the files, judged by their content."""
    return (path / ".metadata").read_bytes()[-8:-1] == b"BCPMETA"


def save() -> Any:
    dcp.save(state(1), checkpoint_id=ROOT / "save")
    return is_ours(ROOT / "save"), loaded(checkpoint_id=str(ROOT / "save"))


def save_in_a_thread() -> Any:
    dcp.async_save(state(2), checkpoint_id=ROOT / "thread").result()
    return is_ours(ROOT / "thread"), loaded(checkpoint_id=ROOT / "thread")


def save_in_a_process() -> Any:
    results = []
    for number in (3, 4):
        path = ROOT / f"process{number}"
        kind = AsyncCheckpointerType.PROCESS
        dcp.async_save(state(number), checkpoint_id=path, async_checkpointer_type=kind).result()
        results.append((is_ours(path), loaded(checkpoint_id=path)))
    return results


def explicit_arguments() -> Any:
    planner = dcp.DefaultSavePlanner()
    dcp.save(state(5), storage_writer=dcp.FileSystemWriter(ROOT / "explicit"), planner=planner)
    mine = hasattr(planner, "plan")  # only a planner that was used has a plan
    return is_ours(ROOT / "explicit"), mine, loaded(storage_reader=dcp.FileSystemReader(ROOT / "explicit"))


def stock_checkpoint() -> Any:
    return is_ours(ROOT / "old"), loaded(checkpoint_id=ROOT / "old")


def url() -> Any:
    dcp.save(state(6), checkpoint_id=f"local://{ROOT}/url")
    return is_ours(ROOT / "url"), loaded(checkpoint_id=f"local://{ROOT}/url")


def no_path() -> Any:
    errors = []
    for call in (lambda: dcp.save({}), lambda: dcp.load({})):
        with contextlib.suppress(dcp.api.CheckpointException):
            try:
                call()
            except RuntimeError as error:
                errors.append(str(error))
    return errors


def main() -> None:
    warnings.filterwarnings("ignore")
    os.environ.update(MASTER_ADDR="localhost", RANK="0", WORLD_SIZE="1")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if sys.argv[2] == "registered":
        import bytecheckpoint

        bytecheckpoint.register()
    print(json.dumps({step: globals()[step]() for step in sys.argv[3:]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
