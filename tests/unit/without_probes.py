# SPDX-License-Identifier: Apache-2.0
"""``python without_probes.py FOLDER``: finds out what works with a torch in which one probe does not hold.

Breaks one probe after the other, each in a child that is forked before the rest of the package has been imported: for
the package the name is gone, while torch goes on using it. Prints JSON: for the path of each probe, what each use of
the package said, empty if it worked.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor  # noqa: F401  # before any child
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import FullyShardedDataParallel

from bytecheckpoint.probes import of_torch, probe
from bytecheckpoint.probes.probe import Feature, Probe

__all__ = ["FAULT", "FEATURES_OF"]

FAULT = "it is gone in this test"

# The features that each use relies on.
_BASE = (of_torch.SAVE_AND_LOAD,)
_ENTRY = (*_BASE, of_torch.ENTRY_POINTS)
FEATURES_OF: dict[str, tuple[Feature, ...]] = {
    "dcp.save and dcp.load": _BASE,
    "register": (*_BASE, of_torch.REGISTER),
    "entry points": _ENTRY,
    "async_save_state_dict": (*_ENTRY, of_torch.STAGING),
    "dcp.async_save": (*_BASE, of_torch.STAGING, of_torch.DCP_ASYNC_SAVE),
    "a model": (*_ENTRY, of_torch.FRAMEWORKS),
    "a process": (*_BASE, of_torch.STAGING, of_torch.DCP_ASYNC_SAVE, of_torch.PROCESS_MODE),
    "a checkpoint with gaps": (of_torch.LOADS_OF_GAPS,),
    "dcp.save and dcp.load with a group": _BASE,
    "entry points with a group": (*_ENTRY, of_torch.GROUPS),
    "meta tensors": (*_BASE, of_torch.META_TENSORS),
    "FSDP1": (*_ENTRY, of_torch.GROUPS, of_torch.FRAMEWORKS, of_torch.FSDP1),
}


def _uses(folder: Path) -> dict[str, Callable[[], None]]:
    import bytecheckpoint as bcp
    from bytecheckpoint.dcp import rank_load

    state = {"w": torch.arange(4.0), "deep": {"step": 7}}

    def check(load: Callable[[dict[str, Any]], object]) -> None:
        loaded: dict[str, Any] = {"w": torch.zeros(4), "deep": {"step": 0}}
        load(loaded)
        assert torch.equal(loaded["w"], state["w"])
        assert loaded["deep"]["step"] == 7

    def by_dcp() -> None:
        dcp.save(state, storage_writer=bcp.BcpWriter(folder / "a"), planner=bcp.BcpSavePlanner())
        reader = bcp.BcpReader(folder / "a")
        check(lambda into: dcp.load(into, storage_reader=reader, planner=bcp.BcpLoadPlanner()))

    def by_register() -> None:
        with bcp.registered():
            dcp.save(state, checkpoint_id=folder / "b")
            check(lambda into: dcp.load(into, checkpoint_id=folder / "b"))

    def by_entry_points() -> None:
        bcp.save_state_dict(folder / "c", state)
        check(lambda into: bcp.load_state_dict(folder / "c", into))

    def in_background() -> None:
        bcp.async_save_state_dict(folder / "d", state).committed.result(60)

    def by_dcp_in_background(kind: AsyncCheckpointerType = AsyncCheckpointerType.THREAD) -> None:
        writer, stager = bcp.BcpWriter(folder / "e"), bcp.BcpStager()
        future: Any = dcp.async_save(state, storage_writer=writer, async_stager=stager, async_checkpointer_type=kind)
        future.result(60)

    def of_model(framework: str, model: torch.nn.Module) -> None:
        bcp.save(folder / framework, {"model": model}, framework)
        bcp.load(folder / framework, {"model": model}, framework)

    def of_fsdp1() -> None:
        model = torch.nn.Linear(2, 2)
        of_model("fsdp", FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True))

    def gaps() -> None:
        class Checkpoint:
            def tensors_with_gaps(self) -> list[str]:
                return ["w"]

        rank_load.check_requested(Checkpoint(), None)  # type: ignore[arg-type]

    def meta() -> None:
        bcp.BcpWriter(folder / "m")
        dcp.save({"w": state["w"]}, storage_writer=dcp.FileSystemWriter(folder / "m"))
        loaded = {"w": torch.empty(4, device="meta")}
        dcp.load(loaded, storage_reader=bcp.BcpReader(folder / "m"), planner=bcp.BcpLoadPlanner())
        assert torch.equal(loaded["w"], torch.arange(4.0))

    def with_group(use: Callable[[], None]) -> Callable[[], None]:
        def using() -> None:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            try:
                use()
            finally:
                dist.destroy_process_group()

        return using

    return {
        "dcp.save and dcp.load": by_dcp,
        "register": by_register,
        "entry points": by_entry_points,
        "async_save_state_dict": in_background,
        "dcp.async_save": by_dcp_in_background,
        "a model": lambda: of_model("ddp", torch.nn.Linear(2, 2)),
        "a process": with_group(lambda: by_dcp_in_background(AsyncCheckpointerType.PROCESS)),
        "a checkpoint with gaps": gaps,
        "dcp.save and dcp.load with a group": with_group(by_dcp),
        "entry points with a group": with_group(by_entry_points),
        "meta tensors": with_group(meta),
        "FSDP1": with_group(of_fsdp1),
    }


def _lose(path: str) -> None:
    fault, find = Probe.fault, probe.find

    def lost_fault(self: Probe) -> str:
        return FAULT if self.path == path else fault(self)

    def lost_find(wanted: str, default: Any = None) -> Any:
        return default if wanted == path else find(wanted, default)

    Probe.fault = lost_fault  # type: ignore[method-assign]
    probe.find = lost_find


def _said(path: str, folder: Path) -> dict[str, str]:
    """Returns what each use says. A save in a process takes seconds to begin, so it is tried only if it is refused."""
    warnings.simplefilter("ignore")
    _lose(path)
    said = {}
    for name, use in _uses(folder).items():
        if name == "a process" and not _is_refused("a process", path):
            continue
        try:
            use()
            said[name] = ""
        except BaseException as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def _is_refused(use: str, path: str) -> bool:
    return any(one.path == path and not one.fallback for feature in FEATURES_OF[use] for one in feature.probes)


def _in_child(path: str, folder: Path) -> int:
    child = os.fork()
    if child == 0:
        try:
            folder.mkdir()
            (folder / "said").write_text(json.dumps(_said(path, folder)))
        finally:
            os._exit(0)
    return child


def main(folder: Path) -> None:
    """Runs a child for each probe, two at a time, and prints what they said."""
    paths = sorted({one.path for feature in of_torch.TORCH_FEATURES for one in feature.probes})
    folders = [folder / str(number) for number in range(len(paths))]
    running: list[int] = []
    for path, own in zip(paths, folders, strict=True):
        if len(running) == 2:
            os.waitpid(running.pop(0), 0)
        running.append(_in_child(path, own))
    for child in running:
        os.waitpid(child, 0)
    said = {path: json.loads((own / "said").read_text()) for path, own in zip(paths, folders, strict=True)}
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
