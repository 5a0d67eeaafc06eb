# SPDX-License-Identifier: Apache-2.0
"""Reads the files that ranks wrote with torch.save, one each, and what is in them of DTensors, as verl writes them."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.cli_runs import run
from support.goldens import GOLDEN

import bytecheckpoint
from bytecheckpoint.convert import convert
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidPlanError,
    UnsupportedError,
)

# FSDP1 and FSDP2 on two ranks; two replicas of two shards; FSDP over tensor parallelism, with strided shards.
KINDS = sorted(path.relative_to(GOLDEN).as_posix() for path in GOLDEN.glob("verl-*/*"))
FSDP2 = "verl-0.9.1-torch2.13.0/fsdp2"


def expected(kind: str, of: str) -> dict[str, torch.Tensor]:
    values = torch.load(GOLDEN / kind / "expected.pt", weights_only=True)
    return {name.removeprefix(f"{of}."): value for name, value in values.items() if name.startswith(f"{of}.")}


def num_ranks(kind: str) -> int:
    return len([*(GOLDEN / kind).glob("model_world_size_*.pt")])


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_of_all_ranks_are_one_model(kind: str) -> None:
    stored = bytecheckpoint.read(GOLDEN / kind)
    wanted = expected(kind, "model")
    assert {*stored} == {*wanted}
    assert all(torch.equal(stored[name], wanted[name]) for name in wanted)
    target = {name: torch.full_like(value, 9) for name, value in wanted.items()}
    bytecheckpoint.load_state_dict(GOLDEN / kind, target, no_dist=True)
    assert all(torch.equal(target[name], wanted[name]) for name in wanted)
    assert not bytecheckpoint.verify(GOLDEN / kind).problems


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.endswith("fsdp1")])
def test_other_kinds_of_files(kind: str) -> None:
    stored = bytecheckpoint.read(f"{GOLDEN}/{kind}/optim_world_size_{num_ranks(kind)}_rank_*.pt")
    wanted = expected(kind, "optim")
    assert len(wanted) > 20
    assert all(torch.equal(stored[f"state.{name}"], value) for name, value in wanted.items())
    assert stored["param_groups.0.lr"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_conversion(kind: str, tmp_path: Path) -> None:
    convert(GOLDEN / kind, tmp_path / "hf", to="safetensors", hf_config=GOLDEN / kind / "huggingface")
    (written,) = (tmp_path / "hf").glob("*.safetensors")
    got, wanted = load_file(written), expected(kind, "model")
    assert {*got} == {*wanted}
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert (tmp_path / "hf" / "config.json").exists()


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / FSDP2, tmp_path / "there")
    return tmp_path / "there"


def test_a_missing_rank_is_named(copied: Path) -> None:
    (copied / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(
        CorruptCheckpointError, match=r"model_world_size_2_rank_1\.pt\): the file of rank 1 is missing: 1 of 2"
    ):
        bytecheckpoint.read(copied)


def test_files_of_two_jobs_are_not_joined(copied: Path) -> None:
    shutil.copy(copied / "model_world_size_2_rank_0.pt", copied / "model_world_size_1_rank_0.pt")
    with pytest.raises(UnsupportedError, match=r"of 1 ranks and of 2: pass those of one job") as raised:
        bytecheckpoint.read(copied)
    assert "model_world_size_1_rank_*.pt" in str(raised.value)
    stored = bytecheckpoint.read(copied / "model_world_size_2_rank_*.pt")
    assert {*stored} == {*expected(FSDP2, "model")}


def test_a_flipped_byte_is_found(copied: Path) -> None:
    path = copied / "model_world_size_2_rank_1.pt"
    at = path.read_bytes().index(bytes(expected(FSDP2, "model")["lm_head.weight"].view(torch.uint8).flatten()[-16:]))
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    (problem,) = bytecheckpoint.verify(copied).problems
    assert problem.file == path.name
    assert "lm_head.weight" in problem.fqns
    with pytest.raises(CorruptCheckpointError, match="lm_head"):
        dict(bytecheckpoint.read(copied))


def test_ranks_that_disagree(copied: Path) -> None:
    torch.save({"lm_head.weight": torch.ones(3)}, copied / "model_world_size_2_rank_1.pt")
    with pytest.raises(
        CorruptCheckpointError, match=r"'lm_head.weight': model_world_size_2_rank_0.pt has .*, and model_"
    ):
        bytecheckpoint.read(copied)


def test_one_file_has_a_part(copied: Path) -> None:
    said = run("ls", str(copied / "model_world_size_2_rank_0.pt"))
    assert "lm_head.weight" in said.stdout
    with pytest.raises(InvalidPlanError, match="some of its elements are in no chunk"):
        dict(bytecheckpoint.read(copied / "model_world_size_2_rank_0.pt"))


def _change_pickle(path: Path, old: bytes, new: bytes) -> None:
    """Replaces the first ``old`` in the pickle of a file of torch.save, and computes its CRC anew."""
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            is_pickle = name.endswith("/data.pkl")
            assert not is_pickle or old in content
            archive.writestr(name, content.replace(old, new, 1) if is_pickle else content)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b"_coordinate_on_dim", b"_coordinate_of_dim", "its mesh cannot be read"),
        (b"placement_types\nShard", b"placement_types\nSharp", "its placement Sharp cannot be read"),
        (b"placements", b"placementz", "it has no placement for each dim"),
        (b"_local_tensor", b"_local_tenzor", "its local part is no plain tensor"),
        (b"\x03\0\0\0dim", b"\x03\0\0\0din", "the numbers of a placement cannot be read"),
    ],
)
def test_what_is_odd_is_refused_by_name(copied: Path, old: bytes, new: bytes, why: str) -> None:
    path = copied / "model_world_size_2_rank_0.pt"
    _change_pickle(path, old, new)
    stored = bytecheckpoint.read(path)
    with pytest.raises(CheckpointError, match=f"it is a DTensor, and {why}"):
        dict(stored)


@pytest.mark.parametrize("kind", ["plain", "reshard", "mesh"])
def test_items_of_torch_checkpointing(kind: str) -> None:
    folder = GOLDEN / "torch_checkpointing-0.1.1" / kind
    values = torch.load(folder / "expected.pt", weights_only=True)
    items = {name.partition(".")[0] for name in values} & {"model", "optim"}
    assert "model" in items
    for item in items:
        stored = bytecheckpoint.read(folder / "checkpoint" / f"{item}_*.pt")
        wanted = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{item}.")}
        assert all(torch.equal(stored[name], value) for name, value in wanted.items()), item
    said = run("ls", str(folder / "checkpoint"))
    assert said.exit_code == (2 if kind == "plain" else 0)
    assert ("model_*.pt" in said.stderr) is (kind == "plain")


def test_a_step_with_several_models_names_one(copied: Path) -> None:
    step = copied.parent / "global_step_10"
    step.mkdir()
    copied.rename(step / "actor")
    said = run("ls", str(step))
    assert said.stderr == (
        f"bcp: open({step}): no checkpoint there: the folder holds actor; pass '{step}/actor', which is one\n"
    )


def test_a_folder_without_a_model(copied: Path) -> None:
    for path in copied.glob("model_*"):
        path.unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"FOLDER/optim_world_size_8_rank_\*\.pt"):
        bytecheckpoint.read(copied)
