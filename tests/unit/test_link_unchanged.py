# SPDX-License-Identifier: Apache-2.0
"""Saves that link the files of the step before, where their tensors have not changed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from support.equality import assert_loads
from torch.distributed.checkpoint.api import CheckpointException

import bytecheckpoint
from bytecheckpoint import BcpReader, BcpStager, BcpWriter, Config, SaveReport, _core
from bytecheckpoint.checkpoint.disk_usage import disk_usage
from bytecheckpoint.dcp import _save_steps
from bytecheckpoint.errors import ConfigError, CorruptCheckpointError
from bytecheckpoint.storage.stored_hashes import hashes_in

LINKS = Config(link_unchanged=True)
State = dict[str, Any]
Save = Callable[[Path, State], SaveReport]


def adapters(step: int) -> State:
    """A frozen base of ten tensors, and what trains: its values say the step."""
    generator = torch.Generator().manual_seed(0)
    base = {f"base.{n}": torch.randn(300, 300, generator=generator) for n in range(10)}
    return base | {"lora": torch.full((300, 8), float(step)), "step": step}


def by_call(path: Path, state: State) -> SaveReport:
    return bytecheckpoint.save_state_dict(path, state, no_dist=True, config=LINKS)


def in_background(path: Path, state: State) -> SaveReport:
    return bytecheckpoint.async_save_state_dict(path, state, no_dist=True, config=LINKS).committed.result()


def by_dcp(path: Path, state: State) -> SaveReport:
    writer = BcpWriter(path, config=LINKS)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert writer.last_report is not None
    return writer.last_report


def data_files(step: Path) -> dict[str, os.stat_result]:
    return {file.name: file.stat() for file in step.glob("*.distcp")}


def mark_of(step: Path) -> Any:
    return _core.Checkpoint.open(str(step))


@pytest.mark.parametrize("save", [by_call, in_background, by_dcp])
def test_what_is_frozen_is_linked(save: Save, tmp_path: Path) -> None:
    reports = [save(tmp_path / f"step-{step}", adapters(step)) for step in range(1, 5)]
    frozen = 10 * 300 * 300 * 4
    assert [report.bytes_linked > frozen for report in reports] == [False, True, True, True]
    assert all(report.bytes_written < 1.05 * 300 * 8 * 4 + 40_000 for report in reports[1:])
    # What is staged has its hashes, and is not read again.
    assert [report.bytes_compared for report in reports[1:]] == [0 if save is in_background else frozen] * 3
    for step in range(1, 5):
        assert bytecheckpoint.verify(tmp_path / f"step-{step}").is_whole
        assert_loads(tmp_path / f"step-{step}", adapters(step))
    usage = disk_usage(tmp_path)
    assert usage.shared_bytes > 3 * frozen
    assert usage.num_findings == 0
    assert "unchanged and linked" in str(reports[1])
    assert "unchanged" not in str(reports[0])


def test_stock_dcp_reads_each_step(tmp_path: Path) -> None:
    for step in range(1, 4):
        by_call(tmp_path / f"step-{step}", adapters(step))
    shutil.rmtree(tmp_path / "step-2")
    for step in (1, 3):
        into = {name: torch.zeros_like(value) for name, value in adapters(0).items() if name != "step"}
        dcp.load(into, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
        assert all(torch.equal(value, adapters(step)[name]) for name, value in into.items())


def test_all_that_changes_is_written(tmp_path: Path) -> None:
    state = {f"w{n}": torch.zeros(100_000) for n in range(4)}
    for step in range(1, 4):
        for tensor in state.values():
            tensor += 1
        report = by_call(tmp_path / f"step-{step}", state)
        assert report.bytes_linked == 0
        assert report.bytes_compared == 0  # a sample says it
        assert len(data_files(tmp_path / f"step-{step}")) == 1
        assert_loads(tmp_path / f"step-{step}", state)


def test_a_change_of_one_bit_anywhere_is_seen(tmp_path: Path) -> None:
    tensors = {"nan": torch.full((70_000,), float("nan")), "zero": torch.zeros(70_000), "small": torch.zeros(3)}
    by_call(tmp_path / "step-1", tensors)
    payload = tensors["nan"].view(torch.int32)
    payload[-1] ^= 1
    tensors["zero"][-1] = -0.0
    report = by_call(tmp_path / "step-2", tensors)
    into = {name: torch.ones_like(value) for name, value in tensors.items()}
    bytecheckpoint.load_state_dict(tmp_path / "step-2", into, no_dist=True)
    for name, value in tensors.items():
        assert torch.equal(into[name].view(torch.int32), value.view(torch.int32))
    assert report.bytes_compared == 2 * 70_000 * 4 + 3 * 4


def test_layouts_that_are_no_row_of_memory(tmp_path: Path) -> None:
    state = {
        "transposed": torch.arange(600_000.0).reshape(600, 1000).t(),
        "strided": torch.arange(400_000)[::2],
        "expanded": torch.ones(1, 1000).expand(500, 1000),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 5),
        "view": torch.arange(300_000.0)[100_000:],
    }
    by_call(tmp_path / "step-1", state)
    assert by_call(tmp_path / "step-2", state).bytes_written < 10_000
    state["transposed"][-1, -1] += 1
    assert by_call(tmp_path / "step-3", state).bytes_written > 600_000 * 4
    assert_loads(tmp_path / "step-3", state)


def test_a_restarted_process_goes_on(tmp_path: Path) -> None:
    program = (
        "import sys, torch, bytecheckpoint as b; n = int(sys.argv[2])\n"
        "state = {'base': torch.arange(500_000.0), 'lora': torch.full((10,), float(n))}\n"
        "report = b.save_state_dict(sys.argv[1] + f'/step-{n}', state, no_dist=True,"
        " config=b.Config(link_unchanged=True, link_rewrite_every=3))\n"
        "print(report.bytes_linked)"
    )
    linked = []
    for step in range(1, 6):
        command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path), str(step)]
        linked.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) > 0)
    # The third link would be one too many: how often a file was linked is stored, too.
    assert linked == [False, True, True, False, True]


def test_user_metadata_and_digest_stay_what_they_are(tmp_path: Path) -> None:
    for step in (1, 2):
        report = bytecheckpoint.save_state_dict(
            tmp_path / f"step-{step}",
            adapters(step),
            no_dist=True,
            user_metadata={"loss": step},
            config=LINKS,
            digest=True,
        )
    assert report.bytes_linked > 0
    assert BcpReader(tmp_path / "step-2").user_metadata == {"loss": 2}
    assert bytecheckpoint.digest(tmp_path / "step-2").total == report.digest


def test_a_save_that_failed_costs_a_save_in_full_at_most(tmp_path: Path) -> None:
    by_call(tmp_path / "step-1", adapters(1))
    (tmp_path / "step-2").mkdir()
    with pytest.raises(Exception, match="cannot be pickled"):
        by_call(tmp_path / "step-2", adapters(2) | {"object": lambda: None})
    assert [*(tmp_path / "step-2").glob("*.distcp")] == []
    report = by_call(tmp_path / "step-3", adapters(3))
    assert report.bytes_linked > 0
    assert bytecheckpoint.verify(tmp_path / "step-1").is_whole
    assert_loads(tmp_path / "step-3", adapters(3))


def test_a_save_that_failed_behind_its_ranks_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_call(tmp_path / "step-1", adapters(1))

    def fail(*_: object, **__: object) -> None:
        raise ValueError("the coordinator fails")

    with monkeypatch.context() as patched:
        patched.setattr(_save_steps, "assemble", fail)
        with pytest.raises(Exception, match="the coordinator fails"):
            by_call(tmp_path / "step-2", adapters(2))
    assert not (tmp_path / "step-2").exists()  # its links are removed, too
    assert by_call(tmp_path / "step-3", adapters(3)).bytes_linked > 0
    assert bytecheckpoint.verify(tmp_path / "step-1").is_whole


def test_staged_memory_that_changes_later_is_refused_where_it_is_written_and_not_read_where_it_is_linked(
    tmp_path: Path,
) -> None:
    in_background(tmp_path / "step-1", adapters(1))

    def stage(step: int) -> Any:
        staged = BcpStager(config=LINKS).stage(adapters(step))
        return staged.result() if isinstance(staged, Future) else staged

    staged = stage(2)
    staged["base.0"][5] = 77.0
    dcp.save(staged, storage_writer=BcpWriter(tmp_path / "step-2", config=LINKS), no_dist=True)
    assert_loads(tmp_path / "step-2", adapters(2))
    del staged
    staged = stage(3)
    staged["lora"][5] = 77.0
    with pytest.raises(CheckpointException, match="memory has changed since it was staged"):
        dcp.save(staged, storage_writer=BcpWriter(tmp_path / "step-3", config=LINKS), no_dist=True)
    assert not (tmp_path / "step-3" / ".metadata").exists()


def test_hashes_are_those_of_what_is_stored(tmp_path: Path) -> None:
    """Also if the state changes while it is staged: the next save must not take the mixture for what it is not."""
    tensor, is_over = torch.zeros(3_000_001), threading.Event()

    def change() -> None:
        while not is_over.is_set():
            tensor.add_(1)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for step in range(8):
            in_background(tmp_path / f"step-{step}", {"w": tensor})
    finally:
        is_over.set()
        changing.join()
    for step in range(8):
        stored = bytecheckpoint.read(tmp_path / f"step-{step}")["w"].numpy().tobytes()
        stretches = [stored[at : at + (1 << 20)] for at in range(0, len(stored), 1 << 20)]
        joined = b"".join(xxhash.xxh3_128_digest(stretch)[::-1] for stretch in stretches)
        ((links, hashes),) = hashes_in(json.loads(mark_of(tmp_path / f"step-{step}").user_metadata)).values()
        assert links == 0
        assert hashes == xxhash.xxh3_128_digest(joined)[::-1]


@pytest.mark.parametrize("odd", [[1 << 40, ""], [1e400, ""], ["x", "y"], [0, 5], 7, None, [-1, ""], [True, "!"]])
def test_hashes_that_no_save_writes_are_passed_over(odd: object, tmp_path: Path) -> None:
    stored = {"bytecheckpoint.hashes": {"f": odd}}
    bytecheckpoint.save_state_dict(tmp_path / "step-1", adapters(1), no_dist=True, user_metadata=stored)
    assert by_call(tmp_path / "step-2", adapters(2)).bytes_linked == 0


def test_a_prune_says_what_it_frees(tmp_path: Path) -> None:
    for step in range(1, 5):
        by_call(tmp_path / f"step-{step}", adapters(step))
    retention = bytecheckpoint.Retention(tmp_path, keep_latest=2)
    dry, report = retention.prune(dry_run=True), retention.prune()
    assert len(report.removed) == 2
    assert dry.bytes_freed == report.bytes_freed < 200_000  # what is linked stays
    both = {str(tmp_path / f"step-{step}"): ["step-3", "step-4"] for step in (1, 2)}
    assert dry.shared == report.shared == both
    assert bytecheckpoint.Retention(tmp_path, keep_latest=1).prune().shared == {str(tmp_path / "step-3"): ["step-4"]}


def test_the_error_of_a_load_names_the_steps_that_have_the_damaged_file(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        by_call(tmp_path / f"step-{step}", adapters(step))
    names = {*data_files(tmp_path / "step-1")} & {*data_files(tmp_path / "step-3")}
    for name in names:
        path = tmp_path / "step-1" / name
        path.write_bytes(bytes(byte ^ 1 if at == 200_000 else byte for at, byte in enumerate(path.read_bytes())))
    with pytest.raises(CorruptCheckpointError, match="it is the same file in step-1, step-3"):
        bytecheckpoint.load_state_dict(tmp_path / "step-2", adapters(0), no_dist=True)


def test_a_step_that_was_pruned_is_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2, 3):
        report = by_call(tmp_path / f"step-{step}", adapters(step))
        for name in data_files(tmp_path / f"step-{step}"):  # as if a prune were under way
            (tmp_path / f"step-{step}" / name).unlink()
    assert report.bytes_linked == 0
    shutil.rmtree(tmp_path / "step-3")
    assert by_call(tmp_path / "step-4", adapters(4)).bytes_linked == 0
    assert_loads(tmp_path / "step-4", adapters(4))
    said = [record.message for record in caplog.records if "unchanged" in record.message]
    assert len(said) == 1  # once a run
    assert "link(" in said[0]


def test_a_step_on_another_file_system_is_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    by_call(tmp_path / "step-1", adapters(1))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        if Path(elsewhere).stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("one file system")
        shutil.move(tmp_path / "step-1", elsewhere)
        (tmp_path / "step-1").symlink_to(Path(elsewhere, "step-1"))
        assert by_call(tmp_path / "step-2", adapters(2)).bytes_linked == 0
        assert "(errno 18)" in caplog.text
        assert by_call(tmp_path / "step-3", adapters(3)).bytes_linked > 0
    assert_loads(tmp_path / "step-2", adapters(2))


def test_damage_is_found_in_each_step_that_has_the_file(tmp_path: Path) -> None:
    for step in (1, 2):
        by_call(tmp_path / f"step-{step}", adapters(step))
    shared = set(data_files(tmp_path / "step-1")) & set(data_files(tmp_path / "step-2"))
    (name,) = shared
    with (tmp_path / "step-1" / name).open("r+b") as file:
        file.seek(100_000)
        file.write(b"damage")
    for step in (1, 2):
        report = bytecheckpoint.verify(tmp_path / f"step-{step}")
        assert not report.is_whole
        assert report.notes == [f"{name} is the same file in step-{3 - step}: its damage is there, too"]


def test_without_the_library_it_is_refused_by_name(tmp_path: Path) -> None:
    program = (
        "import importlib.util, sys; find = importlib.util.find_spec\n"
        "import bytecheckpoint.staging.content_hash as hashes\n"
        "hashes.find_spec, hashes._LIBRARY = lambda name: None, 'no_such_library.so'\n"
        "import bytecheckpoint as b, torch; config = b.Config(link_unchanged=True)\n"
        "try: b.save_state_dict(sys.argv[1], {'a': torch.ones(2)}, no_dist=True, config=config)\n"
        "except b.errors.ConfigError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", program, str(tmp_path / "s")], capture_output=True, text=True).stdout
    assert "needs the package xxhash: pip install xxhash" in said
    assert not (tmp_path / "s").exists()


def test_other_user_metadata_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a dict with Config"):
        BcpWriter(tmp_path, config=LINKS, user_metadata=["a list"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="link_rewrite_every=0"):
        Config(link_rewrite_every=0)


def test_what_is_stored(tmp_path: Path) -> None:
    by_call(tmp_path / "step-1", adapters(1))
    stored = json.loads(mark_of(tmp_path / "step-1").user_metadata)["bytecheckpoint.hashes"]
    ((name, (links, hashes)),) = stored.items()
    assert name in data_files(tmp_path / "step-1")
    assert links == 0
    assert len(hashes) == (11 * 16 + 2) // 3 * 4
    with (tmp_path / "step-1" / ".metadata").open("rb") as file:
        assert pickle.load(file).state_dict_metadata.keys() == adapters(1).keys()
