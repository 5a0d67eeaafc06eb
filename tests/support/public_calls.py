# SPDX-License-Identifier: Apache-2.0
"""Each public call of the package, in a form that works anywhere: in any thread, process, group or hook."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import bytecheckpoint as bcp

for _name in bcp.__all__:
    getattr(bcp, _name)  # imports it, so that processes forked later have it

__all__ = ["CALLS", "LIMIT_S", "NO_CALLS", "Place", "PublicCall", "prepare"]

LIMIT_S = 30.0


@dataclass(frozen=True)
class Place:
    """Where a call reads and writes, and which ranks make it.

    Attributes:
        at: Path that the call writes to. It does not exist before.
        ready: Folder that ``prepare`` filled.
        group: Group of the ranks that make the call together; None: this process makes it alone.
    """

    at: Path
    ready: Path
    group: dist.ProcessGroup | None = None

    @property
    def ranks(self) -> dict[str, Any]:
        """Returns the arguments that name the ranks, for DCP and for our calls for state dicts."""
        return {"no_dist": True} if self.group is None else {"process_group": self.group}

    @property
    def run(self) -> Path:
        """Returns the folder that ``prepare`` filled with ``bytecheckpoint.save``."""
        return self.ready / "run"


def state(number: float = 7.0) -> dict[str, Any]:
    return {"weight": torch.full((1000,), number), "number": number, "list": [torch.arange(5)]}


def check_state(got: dict[str, Any]) -> None:
    wanted = state()
    assert torch.equal(got["weight"], wanted["weight"])
    assert torch.equal(got["list"][0], wanted["list"][0])
    assert got["number"] == wanted["number"]


def check_saved(place: Place) -> None:
    got = state(-1.0)
    bcp.load_state_dict(place.at, got, no_dist=True)
    check_state(got)
    assert bcp.verify(place.at).is_whole


def model_state(number: float) -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, number)
    optimizer = torch.optim.AdamW(model.parameters(), lr=number)
    return {"model": model, "optimizer": optimizer, "extra_state": {"number": number}}


def check_model(got: dict[str, Any]) -> None:
    assert torch.equal(got["model"].weight, torch.full((2, 3), 7.0))
    assert got["optimizer"].param_groups[0]["lr"] == 7.0
    assert got["extra_state"] == {"number": 7.0}


def check_saved_model(place: Place) -> None:
    found = bcp.find_latest_ckpt_path(place.at)
    assert found == str(place.at / "global_step_1")
    for part in ("model", "optimizer", "extra_state"):
        assert bcp.verify(Path(found, part)).is_whole
    got = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    bcp.load_state_dict(Path(found, "model"), got, no_dist=True)
    assert torch.equal(got["weight"], torch.full((2, 3), 7.0))


def prepare(ready: Path) -> None:
    """Saves the checkpoints that the calls read."""
    bcp.save_state_dict(ready / "state", state(), no_dist=True)
    for step in (1, 2, 3):
        bcp.save(ready / "run", model_state(7.0), "ddp", global_steps=step, extra_state_policy="replicated")


# The calls, in the order of `bytecheckpoint.__all__`. Each checks its result. Those that save in the background return
# the future.


def dcp_save(place: Place) -> None:
    dcp.save(state(), storage_writer=bcp.BcpWriter(place.at), planner=bcp.BcpSavePlanner(), **place.ranks)


def dcp_async_save(place: Place) -> Future[Any]:
    writer, stager = bcp.BcpWriter(place.at), bcp.BcpStager()
    future: Any = dcp.async_save(state(), storage_writer=writer, async_stager=stager, **place.ranks)
    return getattr(future, "upload_completion", future)


def dcp_load(place: Place) -> None:
    got = state(-1.0)
    reader = bcp.BcpReader(place.ready / "state")
    dcp.load(got, storage_reader=reader, planner=bcp.BcpLoadPlanner(), **place.ranks)
    check_state(got)


def registered_save(place: Place) -> None:
    with bcp.registered():
        dcp.save(state(), checkpoint_id=place.at, **place.ranks)


def registered_async_save(place: Place) -> Future[Any]:
    with bcp.registered():
        future: Any = dcp.async_save(state(), checkpoint_id=place.at, **place.ranks)
    return getattr(future, "upload_completion", future)


def registered_load(place: Place) -> None:
    got = state(-1.0)
    bcp.register()
    try:
        dcp.load(got, checkpoint_id=place.ready / "state", **place.ranks)
    finally:
        bcp.unregister()
    check_state(got)


def save_state_dict(place: Place) -> None:
    bcp.save_state_dict(place.at, state(), **place.ranks)


def async_save_state_dict(place: Place) -> Future[Any]:
    handle = bcp.async_save_state_dict(place.at, state(), **place.ranks)
    handle.staged.result(LIMIT_S)
    return handle.committed


def cancel(place: Place) -> None:
    handle = bcp.async_save_state_dict(place.at, state(), **place.ranks)
    if not handle.cancel(LIMIT_S):
        check_saved(place)


def load_state_dict(place: Place) -> None:
    got = state(-1.0)
    bcp.load_state_dict(place.ready / "state", got, **place.ranks)
    check_state(got)


def save(place: Place) -> None:
    bcp.save(place.at, model_state(7.0), "ddp", global_steps=1, process_group=place.group)


def save_fast(place: Place) -> Future[Any]:
    handle = bcp.DDPCheckpointer.save(
        place.at, model_state(7.0), fast_saving=True, global_steps=1, process_group=place.group
    )
    handle.staged.result(LIMIT_S)
    return handle.committed


def load(place: Place) -> None:
    got = model_state(1.0)
    bcp.load(place.run / "global_step_3", got, "ddp", process_group=place.group)
    check_model(got)


def convert(place: Place) -> None:
    bcp.bytecheckpoint_ckpt_to_pytorch_ckpt(place.run / "global_step_3", place.at)
    assert torch.equal(torch.load(place.at / "model.pt")["weight"], torch.full((2, 3), 7.0))


def latest(place: Place) -> None:
    found = str(place.run / "global_step_3")
    assert bcp.latest(place.run) == bcp.find_latest_ckpt_path(place.run) == found


def read(place: Place) -> None:
    assert bcp.read(place.ready / "state")["weight"].shape == (1000,)


def resume(place: Place) -> None:
    got = model_state(1.0)
    resumed = bcp.resume(place.run, got, framework="ddp", process_group=place.group, must_exist=True)
    assert resumed is not None
    assert resumed.step == 3
    check_model(got)
    assert bcp.resume(place.ready / "new", {"weight": torch.zeros(1)}, **place.ranks) is None


def prune(place: Place) -> None:
    shutil.copytree(place.run, place.at)
    bcp.pin(place.at / "global_step_1", "stays for now")
    assert bcp.Retention(place.at, keep_latest=2).prune().removed == []
    assert bcp.unpin(place.at / "global_step_1")
    assert len(bcp.Retention(place.at, keep_latest=2).prune().removed) == 1
    assert len(bcp.Retention(place.at, keep_latest=1).prune().removed) == 1
    assert [step.step for step in bcp.scan_steps(place.at)] == [3]


def copy_checkpoint(place: Place) -> None:
    assert bcp.copy_checkpoint(place.ready / "state", place.at / "copied").is_new
    assert not bcp.copy_checkpoint(place.ready / "state", place.at / "copied").is_new
    bcp.verify(place.at / "copied").raise_if_damaged()


def drain(place: Place) -> None:
    assert bcp.drain(place.run, place.at / "drained", most_waiting=9).drained
    assert not bcp.drain(place.run, place.at / "drained", most_waiting=9).drained


def tiers(place: Place) -> None:
    made = bcp.Tiers(near=place.at / "near", durable=place.at / "durable")
    bcp.save_state_dict(made / "step-1", state(), **place.ranks)
    assert bcp.latest(made) == str(place.at / "near/step-1")
    assert bcp.load_state_dict(made / "step-1", state(), **place.ranks).save_id
    assert [step.tiers["near"] for step in bcp.scan_steps(made)] == ["complete"]


def publish(place: Place) -> None:
    publisher = bcp.Publisher(place.at, base_every=2, **place.ranks)
    subscriber, got = bcp.Subscriber(place.at, **place.ranks), state(-1.0)
    for version in (1, 2, 3):
        report: bcp.PublishReport = publisher.publish(state(), version)
        assert report.version == version
        assert subscriber.update(got) == version
    check_state(got)
    subscriber.close()


def scan_steps(place: Place) -> None:
    assert [step.step for step in bcp.scan_steps(place.run, deep=True) if step.is_complete] == [1, 2, 3]


def verify(place: Place) -> None:
    looked = []
    assert bcp.verify(place.ready / "state", progress=lambda done, total: looked.append(total)).is_whole
    assert looked


def digest(place: Place) -> None:
    looked = []
    assert bcp.digest(place.ready / "state", progress=lambda done, total: looked.append(total)).keys
    assert looked


def merge_and_scatter(place: Place) -> None:
    tensors = [torch.arange(60_000.0).reshape(200, 300).t(), torch.arange(3)]
    merged = bcp.merge(tensors)
    got = [torch.zeros(300, 200), torch.zeros(3, dtype=torch.int64)]
    bcp.scatter(merged, got)
    assert all(torch.equal(*pair) for pair in zip(tensors, got, strict=True))


def rng_state(place: Place) -> None:
    before = bcp.get_rng_state()
    drawn = torch.rand(3)
    bcp.set_rng_state(before)
    assert torch.equal(torch.rand(3), drawn)


def shutdown(place: Place) -> None:
    bcp.shutdown(LIMIT_S)


def build_info(place: Place) -> None:
    assert bcp.build_info()["core"]


@dataclass(frozen=True)
class PublicCall:
    """One call.

    Attributes:
        names: Public names of the package that the call uses.
        begin: Makes the call; returns its future, if it has one.
        check: Checks what the call wrote.
        is_collective: Whether all ranks of a group make the call together.
        may_fail: Whether it raises an error of ours if ``Place.at`` cannot be made and ``Place.ready`` does not exist.
    """

    names: tuple[str, ...]
    begin: Callable[[Place], Future[Any] | None]
    check: Callable[[Place], None] = lambda _: None
    is_collective: bool = True
    may_fail: bool = True

    def __str__(self) -> str:
        return self.begin.__name__

    def run(self, place: Place) -> None:
        """Makes the call, waits until it has ended, and checks the result."""
        future = self.begin(place)
        if future is not None:
            future.result(LIMIT_S)
        self.check(place)


CALLS = (
    PublicCall(("BcpWriter", "BcpSavePlanner"), dcp_save, check_saved),
    PublicCall(("BcpWriter", "BcpStager"), dcp_async_save, check_saved),
    PublicCall(("BcpReader", "BcpLoadPlanner"), dcp_load),
    PublicCall(("registered",), registered_save, check_saved),
    PublicCall(("registered",), registered_async_save, check_saved),
    PublicCall(("register", "unregister"), registered_load),
    PublicCall(("save_state_dict",), save_state_dict, check_saved),
    PublicCall(("async_save_state_dict", "SaveHandle"), async_save_state_dict, check_saved),
    PublicCall(("SaveHandle",), cancel, may_fail=False),
    PublicCall(("load_state_dict",), load_state_dict),
    PublicCall(("save",), save, check_saved_model),
    PublicCall(("DDPCheckpointer",), save_fast, check_saved_model),
    PublicCall(("load",), load),
    PublicCall(("bytecheckpoint_ckpt_to_pytorch_ckpt",), convert, is_collective=False),
    PublicCall(("latest", "find_latest_ckpt_path"), latest, is_collective=False, may_fail=False),
    PublicCall(("read",), read, is_collective=False),
    PublicCall(("resume",), resume),
    PublicCall(("pin", "Retention", "unpin"), prune, is_collective=False, may_fail=False),
    PublicCall(("scan_steps",), scan_steps, is_collective=False),
    PublicCall(("verify",), verify, is_collective=False),
    PublicCall(("copy_checkpoint",), copy_checkpoint, is_collective=False),
    PublicCall(("drain",), drain, is_collective=False, may_fail=False),
    PublicCall(("Tiers",), tiers, is_collective=False),
    PublicCall(("Publisher", "PublishReport", "Subscriber"), publish),
    PublicCall(("digest",), digest, is_collective=False),
    PublicCall(("merge", "scatter"), merge_and_scatter, is_collective=False, may_fail=False),
    PublicCall(("get_rng_state", "set_rng_state"), rng_state, is_collective=False, may_fail=False),
    PublicCall(("shutdown",), shutdown, is_collective=False, may_fail=False),
    PublicCall(("build_info",), build_info, is_collective=False, may_fail=False),
)

# Public names that have no call here, and why.
NO_CALLS = {
    "CheckpointError": "is raised",
    "Config": "settings, of plain values",
    "LoadSpec": "a description, of plain values",
    "MemoryTier": "settings, of plain values",
    "FSDP2Checkpointer": "as DDPCheckpointer, with a name of a framework",
    "FSDPCheckpointer": "as DDPCheckpointer, with a name of a framework",
    "__version__": "a text",
    "observe": "hears of calls: tests/unit/test_observers.py",
    "stop_observing": "hears of calls: tests/unit/test_observers.py",
    "sweep": "is for object stores: tests/storage/test_store_sweep.py",
    "new_group": "needs several ranks: tests/distributed/test_calls_in_subgroups.py",
    **dict.fromkeys(
        (
            "CheckpointReport",
            "CopyReport",
            "DrainReport",
            "LoadReport",
            "LoadResult",
            "PlanReport",
            "Problem",
            "RankLoadReport",
            "RankSaveReport",
            "Resumed",
            "StoredState",
            "RetentionReport",
            "SaveReport",
            "StepFolder",
            "SweepReport",
            "Digest",
            "VerifyReport",
        ),
        "what calls give back",
    ),
}
