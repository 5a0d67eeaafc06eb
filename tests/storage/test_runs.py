# SPDX-License-Identifier: Apache-2.0
"""Tests runs in an object store: their steps, the newest, training states, and ``bcp``. The store is in memory."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.cli_runs import as_json, run
from support.store_runs import loaded, names, save, states
from torch import nn

import bytecheckpoint
from bytecheckpoint import (
    BcpWriter,
    Retention,
    bytecheckpoint_ckpt_to_pytorch_ckpt,
    latest,
    load_state_dict,
    scan_steps,
)
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    StorageError,
    UnsupportedError,
)
from bytecheckpoint.storage.object_store.client import StoreClient


def test_a_run_that_has_not_begun(root: str) -> None:
    assert scan_steps(root) == []
    assert latest(root) is None
    assert Retention(root, keep_latest=1).prune().warnings == []


def test_steps_and_the_newest(root: str, client: StoreClient) -> None:
    save(root, 9, 20, 100)
    client.put("notes/readme", b"of somebody else")
    client.put("step-7/notes", b"no checkpoint")
    assert states(root) == {7: "unknown", 9: "complete", 20: "complete", 100: "complete"}
    folder = scan_steps(root)[-1]
    assert (folder.path, folder.name, folder.num_files) == (f"{root}/step-100", "step-100", 1)
    assert latest(root) == f"{root}/step-100"
    assert loaded(f"{root}/step-100") == 100
    client.delete(["step-100/.metadata"])
    assert states(root)[100] == "half"
    with pytest.warns(RuntimeWarning, match=r"step-100, which is half"):
        assert latest(root) == f"{root}/step-20"
    data = next(name for name in client.names("step-20") if name.endswith(".distcp"))
    client.delete([f"step-20/{data}"])
    assert states(root)[20] == "corrupt"
    assert states(root)[9] == "complete"


def test_bits_that_flipped_are_seen_by_a_deep_look(root: str, client: StoreClient) -> None:
    save(root, 1)
    name = next(name for name in names(client) if name.endswith(".distcp"))
    data = bytearray(client.get(name))
    data[4200] ^= 1
    client.put(name, bytes(data))
    assert states(root) == {1: "complete"}
    assert [folder.state for folder in scan_steps(root, deep=True)] == ["corrupt"]


def test_a_run_all_of_which_is_lost_is_an_error(root: str, client: StoreClient) -> None:
    save(root, 1)
    client.delete([name for name in names(client) if name.endswith(".distcp")])
    with pytest.raises(CheckpointError, match="none is whole: step-1 is corrupt"):
        latest(root)


def test_a_checkpoint_is_no_run(root: str) -> None:
    save(root, 1)
    with pytest.raises(ConfigError, match="is a checkpoint itself"):
        latest(f"{root}/step-1")
    with pytest.raises(CheckpointNotFoundError, match=r"it holds the checkpoint step-1: pass .*step-1"):
        load_state_dict(root, {"w": torch.zeros(1000)})


def test_ranks_that_commit_by_themselves_are_refused(root: str, client: StoreClient) -> None:
    with pytest.raises(UnsupportedError, match="use_collectives=False is for directories"):
        dcp.save({"step": 1}, storage_writer=BcpWriter(f"{root}/step-1"), use_collectives=False, no_dist=True)
    assert names(client) == set()


def test_the_metadata_that_a_save_returns_name_the_url(root: str) -> None:
    metadata = dcp.save({"w": torch.ones(3)}, storage_writer=BcpWriter(f"{root}/step-1"), no_dist=True)
    assert metadata is not None
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.checkpoint_id == f"{root}/step-1"
    again = pickle.loads(pickle.dumps(metadata))
    assert [*again.state_dict_metadata] == ["w"]


def test_a_forked_child_is_refused(root: str) -> None:
    """The threads of obstore are not in the child, where every request would wait for ever."""
    save(root, 1)
    child = os.fork()
    if child == 0:
        try:
            scan_steps(root)
        except UnsupportedError as error:
            os._exit(0 if "was forked" in str(error) else 1)
        except BaseException:
            os._exit(2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# bytecheckpoint.save and load.


def train(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    return model, optimizer


def test_a_training_state_becomes_files_of_torch(root: str, tmp_path: Path) -> None:
    model, optimizer = train(1)
    bytecheckpoint.save(root, {"model": model, "optimizer": optimizer}, "ddp", global_steps=1)
    url = bytecheckpoint.find_latest_ckpt_path(root)
    merged = bytecheckpoint_ckpt_to_pytorch_ckpt(url or "", tmp_path, return_dict=True)
    for name, value in model.state_dict().items():
        assert torch.equal(torch.load(tmp_path / "model.pt")[name], value)
        assert torch.equal(merged["model"][name], value)
    assert merged["optimizer"]["state"].keys() == dict(model.named_parameters()).keys()
    assert (tmp_path / "optimizer.pt").is_file()
    with pytest.raises(CheckpointNotFoundError, match="it has no model"):
        bytecheckpoint_ckpt_to_pytorch_ckpt(root, tmp_path)


@pytest.mark.parametrize("role", [None, "actor"])
def test_a_training_state(root: str, client: StoreClient, role: str | None) -> None:
    model, optimizer = train(1)
    for step in (1, 2):
        state = {"model": model, "optimizer": optimizer, "extra_state": {"step": step}}
        bytecheckpoint.save(root, state, "ddp", global_steps=step, role=role)
    path = bytecheckpoint.find_latest_ckpt_path(root, role or "")
    assert path is not None
    assert path.endswith("/global_step_2")
    assert latest(root, role or "") == path
    other, its_optimizer = train(2)
    target: dict[str, Any] = {"model": other, "optimizer": its_optimizer, "extra_state": {}}
    bytecheckpoint.load(path, target, "ddp", role=role)
    assert target["extra_state"] == {"step": 2}
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
    folder = scan_steps(path.rpartition("/")[0])[-1]
    assert (folder.state, folder.components) == ("complete", ("extra_state", "optimizer", "model"))
    with pytest.raises(CheckpointExistsError):
        bytecheckpoint.save(root, state, "ddp", global_steps=2, role=role, overwrite=False)
    report = Retention(path.rpartition("/")[0], keep_latest=1).prune()
    assert report.removed == [path.replace("_2", "_1")]
    left = [name for name in names(client) if "global_step_1/" in name]
    assert all(name.endswith(".metadata") for name in left)  # tombstones, for some minutes
    assert [folder.step for folder in scan_steps(path.rpartition("/")[0])] == [2]


def test_a_step_that_is_not_there_is_named(root: str) -> None:
    model, _ = train(1)
    bytecheckpoint.save(root, {"model": model}, "ddp", global_steps=5)
    with pytest.raises(CheckpointNotFoundError, match=r"has the steps 5: pass .*global_step_5"):
        bytecheckpoint.load(f"{root}/global_step_6", {"model": model}, "ddp")
    with pytest.raises(CheckpointNotFoundError, match="it holds the part model"):
        load_state_dict(f"{root}/global_step_5", {"w": torch.zeros(1)})


def test_a_tracker_that_names_a_step_that_is_gone(root: str, client: StoreClient) -> None:
    model, _ = train(1)
    for step in (1, 2):
        bytecheckpoint.save(root, {"model": model}, "ddp", global_steps=step)
    Retention(root, keep_latest=1).prune()
    client.put("latest_checkpointed_iteration.txt", b"1")
    with pytest.warns(RuntimeWarning, match="names step '1', which is not whole"):
        assert bytecheckpoint.find_latest_ckpt_path(root) == f"{root}/global_step_2"


# The command line.


def test_commands(root: str, client: StoreClient) -> None:
    save(root, 1, 2)
    url = f"{root}/step-2"
    assert [item["name"] for item in as_json("ls", url)["items"]] == ["step", "w"]
    assert as_json("verify", url)["is_whole"]
    assert [step["state"] for step in as_json("steps", root)["steps"]] == ["complete", "complete"]
    assert "mean 2" in run("show", url, "w").output
    difference = run("diff", f"{root}/step-1", url)
    assert difference.exit_code == 1
    assert "w" in difference.output
    assert "can be listed" in run("doctor", root).output
    name = next(name for name in names(client) if name.startswith("step-2/") and name.endswith(".distcp"))
    data = bytearray(client.get(name))
    data[4200] ^= 1
    client.put(name, bytes(data))
    damaged = run("verify", url)
    assert damaged.exit_code == 1
    assert name.rpartition("/")[2] in damaged.output


def test_commands_where_nothing_is(root: str) -> None:
    result = run("ls", root)
    assert result.exit_code == 2
    assert root in result.output
    half = run("ls", "s3:/bucket/run")
    assert half.exit_code == 2
    assert "the URL is incomplete" in half.output


def test_a_store_that_refuses(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(root, 1)

    def refuse(self: StoreClient, folder: str = "") -> Any:
        raise OSError(errno.EACCES, "Access Denied")

    monkeypatch.setattr(StoreClient, "_listed", refuse)
    with pytest.raises(StorageError, match=r"list\(memory://.*Access Denied") as raised:
        scan_steps(root)
    assert raised.value.errno == errno.EACCES
    assert "Access Denied" in Retention(root, keep_latest=1).prune().warnings[0]
