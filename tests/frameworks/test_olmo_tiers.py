# SPDX-License-Identifier: Apache-2.0
"""OLMo-core's trainer in ``Tiers``: what is saved where, and from where a restart goes on."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.equality import assert_equal
from support.ranks import run_ranks

pytest.importorskip("olmo_core", reason="OLMo-core is not installed: pip install ai2-olmo-core==3.0.0")

import olmo_core.distributed.checkpoint as olmo_checkpoint
from olmo_core.train.checkpoint import Checkpointer

import bytecheckpoint
import bytecheckpoint.olmo
from bytecheckpoint import Config, MemoryTier, Tiers
from bytecheckpoint.checkpoint.tier_drains import wait_for_drains
from bytecheckpoint.errors import CheckpointError, ConfigError
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.memory.connection import stop_holder
from bytecheckpoint.storage.step_folder import step_paths
from frameworks.olmo_states import change, states, train_module

LIMIT_S = 200.0
pytestmark = pytest.mark.filterwarnings("ignore:.*it is on one device with.*:RuntimeWarning")


def tiers_in(folder: Path, **fields: Any) -> Tiers:
    return Tiers(memory=MemoryTier(keep=1), near=folder / "run", durable=folder / "durable", **fields)


def checkpointer(folder: Path, **options: Any) -> Checkpointer:
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    return Checkpointer(work_dir=folder / "work", process_group=dist.new_group(backend="gloo"), **options)


def train(folder: Path) -> tuple[dict[str, Any], str]:
    """Saves step 1, and step 2 in the background while tensors change. Returns what step 2 has."""
    tiers, run = tiers_in(folder), folder / "run"
    saver = checkpointer(folder)
    module = train_module(seed=0, num_steps=2)
    with bytecheckpoint.olmo.installed(tiers=tiers):
        saver.save(run / "step1", module, {"global_step": 1, "rank": dist.get_rank()})
        change(module)
        saved = states(module)
        future = saver.save_async(run / "step2", module, {"global_step": 2, "rank": dist.get_rank()})
        change(module)
        future.result(timeout=LIMIT_S)
        if dist.get_rank() == 0:
            saver.write_file(run / "step2", "config.json", "{}")  # as OLMo-core's callback, behind all else
            wait_for_drains(LIMIT_S)
            tiers.open()
            assert [step for step, _ in step_paths(tiers.in_memory)] == [2]
        dist.barrier()
    return saved, tiers.in_memory


def go_on(folder: Path, run: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Loads the newest step of a folder, as OLMo-core finds it."""
    module = train_module(seed=1, num_steps=1)
    with bytecheckpoint.olmo.installed(tiers=tiers_in(folder)):
        path = Checkpointer.latest_checkpoint(run)
        train_state = checkpointer(folder).load(path, module)
    return path, train_state, states(module)


def test_each_place_has_what_a_restart_needs(tmp_path: Path) -> None:
    near, durable = tmp_path / "run", tmp_path / "durable"
    saved, in_memory = run_ranks(2, train, tmp_path, limit_s=LIMIT_S)[0]
    try:
        for run in (near, durable):
            assert sorted(Checkpointer.find_checkpoints(run)) == [(n, f"{run}/step{n}") for n in (1, 2)]
            beside = {path.name for path in (run / "step2").rglob("*") if path.suffix in (".pt", ".json")}
            assert beside == {"rank0.pt", "rank1.pt", ".metadata.json", "config.json"}
            bytecheckpoint.verify(run / "step2" / "model_and_optim").raise_if_damaged()
        assert not [*near.glob("step*/.bcp/drain.txt")]
        for path in (near / "step2" / "model_and_optim").glob("*.distcp"):
            path.unlink()  # what memory has is not read from there
        [(path, train_state, state)] = run_ranks(1, go_on, tmp_path, near, limit_s=LIMIT_S)
        assert (path, train_state) == (f"{near}/step2", {"global_step": 2, "rank": 0})
        assert_equal(state, saved)
    finally:
        stop_holder(in_memory.rpartition("/")[2])
    shutil.rmtree(near)
    for rank, (path, train_state, state) in enumerate(run_ranks(4, go_on, tmp_path, durable, limit_s=LIMIT_S)):
        assert (path, train_state) == (f"{durable}/step2", {"global_step": 2, "rank": rank if rank < 2 else 0})
        assert_equal(state, saved)


def save_to_what_refuses(folder: Path) -> None:
    """Saves where the copy is impossible, and ends."""
    (folder / "durable").touch()
    with bytecheckpoint.olmo.installed(tiers={"near": folder / "run", "durable": folder / "durable"}):
        Checkpointer(work_dir=folder / "work").save(folder / "run" / "step1", Module(), {})
        with pytest.raises(CheckpointError, match="step1 is near by, and not in durable storage"):
            wait_for_drains(LIMIT_S)


def load_what_waits(folder: Path) -> None:
    found = {"w": torch.zeros(5)}
    with bytecheckpoint.olmo.installed(tiers={"near": folder / "run", "durable": folder / "durable"}):
        olmo_checkpoint.load_state_dict(folder / "run" / "step1" / "model_and_optim", found)
        wait_for_drains(LIMIT_S)
    assert_equal(found, {"w": torch.arange(5.0)})


def test_a_later_process_copies_what_waits(tmp_path: Path) -> None:
    run_ranks(1, save_to_what_refuses, tmp_path, limit_s=LIMIT_S)
    (tmp_path / "durable").unlink()
    run_ranks(1, load_what_waits, tmp_path, limit_s=LIMIT_S)
    assert Checkpointer.latest_checkpoint(tmp_path / "durable") == f"{tmp_path}/durable/step1"


# One process, without a process group.


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    made = Tiers(near=tmp_path / "run", durable=tmp_path / "durable")
    with bytecheckpoint.olmo.installed(tiers=made):
        yield made


class Module:
    """What a Checkpointer needs of a train module."""

    def state_dict_to_save(self) -> dict[str, Any]:
        return {"w": torch.arange(5.0)}


def test_a_step_that_is_saved_again_is_copied_again(tiers: Tiers, tmp_path: Path) -> None:
    """What only the copy has is of other ranks, and would be loaded by them."""
    saver = Checkpointer(work_dir=tmp_path / "work", save_overwrite=True)
    saver.save(tmp_path / "run" / "step1", Module(), {"first": True})
    wait_for_drains(LIMIT_S)
    (tmp_path / "durable" / "step1" / "train" / "rank1.pt").write_bytes(b"of more ranks")
    saver.save(tmp_path / "run" / "step1", Module(), {"first": False})
    wait_for_drains(LIMIT_S)

    assert [path.name for path in (tmp_path / "durable" / "step1" / "train").iterdir()] == ["rank0.pt"]
    assert torch.load(tmp_path / "durable" / "step1" / "train" / "rank0.pt") == {"first": False}
    assert Checkpointer.dir_is_checkpoint(tmp_path / "durable" / "step1")


def test_a_file_that_is_written_behind_the_copy(tiers: Tiers, tmp_path: Path) -> None:
    saver = Checkpointer(work_dir=tmp_path / "work")
    saver.save(tmp_path / "run" / "step1", Module(), {})
    wait_for_drains(LIMIT_S)
    marked_at = (tmp_path / "durable" / "step1" / ".metadata.json").stat().st_mtime_ns
    saver.write_file(tmp_path / "run" / "step1", "config.json", "{}")
    wait_for_drains(LIMIT_S)
    assert (tmp_path / "durable" / "step1" / "config.json").read_text() == "{}"
    assert (tmp_path / "durable" / "step1" / ".metadata.json").stat().st_mtime_ns == marked_at


def save_before_a_store(tmp_path: Path) -> None:
    store = f"memory://olmo/{tmp_path.name}"
    saver = Checkpointer(work_dir=tmp_path / "work", save_overwrite=True)
    with bytecheckpoint.olmo.installed(tiers={"near": tmp_path / "run", "durable": store}):
        for number in (1, 2):
            saver.save(tmp_path / "run" / "step1", Module(), {"save": number})
            wait_for_drains(LIMIT_S)
    names = {file.name for file in folder_at(f"{store}/step1").files(without=("model_and_optim",))}
    assert names == {".metadata.json", "train/rank0.pt"}
    content = folder_at(f"{store}/step1").read_file("train/rank0.pt", 1 << 20)
    assert content is not None
    assert torch.load(io.BytesIO(content)) == {"save": 2}
    bytecheckpoint.verify(f"{store}/step1/model_and_optim").raise_if_damaged()


def test_a_store_behind(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed: NO STORE IS TESTED")
    run_ranks(1, save_before_a_store, tmp_path, limit_s=LIMIT_S)  # the store is of that process


def test_a_step_waits_until_olmo_has_written_all_of_it(tiers: Tiers, tmp_path: Path) -> None:
    state = {"w": torch.arange(5.0)}
    olmo_checkpoint.save_state_dict(tmp_path / "run" / "step1" / "model_and_optim", state)
    wait_for_drains(LIMIT_S)
    bytecheckpoint.drain(tmp_path / "run", tmp_path / "durable")
    assert not (tmp_path / "durable").exists()

    Checkpointer(work_dir=tmp_path / "work").write_file(tmp_path / "run" / "step1", ".metadata.json", "{}")
    wait_for_drains(LIMIT_S)
    assert (tmp_path / "durable" / "step1" / "model_and_optim" / ".metadata").exists()


def test_the_command_copies_what_is_whole(tmp_path: Path) -> None:
    saver = Checkpointer(work_dir=tmp_path / "work")
    with bytecheckpoint.olmo.installed():
        saver.save(tmp_path / "run" / "step1", Module(), {})
    durable = tmp_path / "durable"

    assert bytecheckpoint.drain(tmp_path / "run", durable).drained == [f"{durable}/step1"]
    assert Checkpointer.latest_checkpoint(durable) == f"{durable}/step1"
    assert not bytecheckpoint.drain(tmp_path / "run", durable).drained
    (durable / "step1" / ".metadata.json").unlink()  # the drain was killed
    bytecheckpoint.drain(tmp_path / "run", durable)
    assert Checkpointer.latest_checkpoint(durable) == f"{durable}/step1"


def test_a_save_that_failed_is_not_copied(tiers: Tiers, tmp_path: Path) -> None:
    (tmp_path / "run" / "step1").mkdir(parents=True)
    Checkpointer(work_dir=tmp_path / "work").write_file(tmp_path / "run" / "step1", ".metadata.json", "{}")
    wait_for_drains(LIMIT_S)
    assert not (tmp_path / "durable").exists()


def test_other_paths(tiers: Tiers, tmp_path: Path) -> None:
    state = {"w": torch.arange(5.0)}
    with pytest.raises(ConfigError, match=r"this step is not in Tiers\(.*/run\): pass the save folder of OLMo-core"):
        olmo_checkpoint.save_state_dict(tmp_path / "other" / "step1" / "model_and_optim", state)
    with pytest.raises(ConfigError, match="must be the name of a step"):
        olmo_checkpoint.save_state_dict(tmp_path / "run" / "final", state)
    olmo_checkpoint.save_state_dict(tmp_path / "export", state)
    found = {"w": torch.zeros(5)}
    olmo_checkpoint.load_state_dict(tmp_path / "export", found)
    assert_equal(found, state)


def test_settings(tmp_path: Path) -> None:
    write_file = Checkpointer.write_file
    for wrong, text in (
        (tiers_in(tmp_path, near_every=2), "would not find those in memory alone"),
        (Tiers(memory=MemoryTier(name="run")), "pass its save folder as near"),
        ({"nearby": "run"}, "no such argument: 'nearby'"),
        ("run", "must be Tiers, or a dict"),
    ):
        with pytest.raises(ConfigError, match=text):
            bytecheckpoint.olmo.install(tiers=wrong)
    assert Checkpointer.write_file is write_file
    given = {"near": str(tmp_path / "run"), "durable": str(tmp_path / "durable")}
    with bytecheckpoint.olmo.installed(tiers=given, config=Config(io_threads=3)):
        with bytecheckpoint.olmo.installed(tiers=given):
            pass
        with (
            pytest.raises(ConfigError, match="tiers have no effect within"),
            bytecheckpoint.olmo.installed(tiers=tiers_in(tmp_path)),
        ):
            pass
    assert Checkpointer.write_file is write_file
