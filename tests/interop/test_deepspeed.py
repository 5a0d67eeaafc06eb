# SPDX-License-Identifier: Apache-2.0
"""Reads what DeepSpeed writes of ZeRO 1 to 3: a step of it is one checkpoint with whole parameters."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.goldens import GOLDEN

import bytecheckpoint
from bytecheckpoint.convert import convert
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, UnsupportedError


@dataclass
class Fragment:
    """Stands for DeepSpeed's fragment_address, which has the same fields."""

    numel: int
    start: int


RUNS = sorted(GOLDEN.glob("deepspeed-0.19.8/zero*"))
KINDS = [path.name for path in RUNS]


def expected(kind: str) -> dict[str, torch.Tensor]:
    """What DeepSpeed's own tools give: weights as zero_to_fp32.py, moments as the optimizer has them."""
    values = torch.load(GOLDEN / "deepspeed-0.19.8" / kind / "expected.pt", weights_only=True)
    return {
        name.replace("model.", "module.", 1)
        if name.startswith("model.")
        else name.replace("optim.", "optimizer.", 1): it
        for name, it in values.items()
    }


def run_of(kind: str) -> Path:
    return GOLDEN / "deepspeed-0.19.8" / kind / "run"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", ["", "global_step3"])
def test_parameters_and_moments(kind: str, step: str) -> None:
    stored, wanted = bytecheckpoint.read(run_of(kind) / step), expected(kind)
    assert len(wanted) > 20
    for name, value in wanted.items():
        assert stored[name].dtype == value.dtype, name
        assert torch.equal(stored[name], value), name
    # zero_to_fp32.py leaves out what is frozen in ZeRO-1.
    more = {name for name in stored if name.startswith(("module.", "optimizer."))} - {*wanted}
    assert more == ({"module.frozen.weight"} if kind.startswith("zero1") else set())
    assert stored["global_steps"] == 3
    report = bytecheckpoint.verify(run_of(kind) / step)
    assert not report.problems
    assert report.bytes_checked > sum(value.nbytes for value in wanted.values() if value.dtype == torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_conversion_of_the_weights(kind: str, tmp_path: Path) -> None:
    spec = bytecheckpoint.LoadSpec(include=["module"], rename={"module": ""})
    convert(run_of(kind), tmp_path / "hf", to="safetensors", spec=spec)
    (written,) = (tmp_path / "hf").glob("*.safetensors")
    got = load_file(written)
    wanted = {name[len("module.") :]: value for name, value in expected(kind).items() if name.startswith("module.")}
    assert {*wanted} <= {*got}
    assert all(torch.equal(got[name], value) for name, value in wanted.items())


@pytest.fixture(params=["zero2-fp32", "zero3-bf16"])
def step(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    shutil.copytree(run_of(request.param) / "global_step3", tmp_path / "global_step3")
    return tmp_path / "global_step3"


def test_a_flipped_byte_is_found(step: Path) -> None:
    path = next(iter(step.glob("*zero_pp_rank_1_*optim_states.pt")))
    stored = bytecheckpoint.read(step)["optimizer.embed.weight.exp_avg"]
    at = path.read_bytes().index(bytes(stored[-1, -2:].view(torch.uint8)))
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    (problem,) = bytecheckpoint.verify(step).problems
    assert problem.file == path.name
    assert "optimizer.embed.weight.exp_avg" in problem.fqns


def test_missing_ranks(step: Path) -> None:
    (last,) = step.glob("*zero_pp_rank_1_*optim_states.pt")
    last.unlink()
    with pytest.raises(CheckpointError, match=r"of 2 ranks, (but there are files|and of optimizers) of 1"):
        bytecheckpoint.read(step)


def test_the_first_rank_is_missing(step: Path) -> None:
    (first,) = step.glob("*zero_pp_rank_0_*optim_states.pt")
    first.unlink()
    with pytest.raises(CorruptCheckpointError, match="the file of rank 0 is missing"):
        bytecheckpoint.read(step)


def test_other_ranks_of_a_model_are_refused(step: Path) -> None:
    (first,) = step.glob("*zero_pp_rank_0_*optim_states.pt")
    shutil.copy(first, step / first.name.replace("mp_rank_00", "mp_rank_01"))
    with pytest.raises(UnsupportedError, match="tensor or pipeline parallelism"):
        bytecheckpoint.read(step)


def test_a_placeholder_never_becomes_a_tensor(step: Path) -> None:
    """Of a shared parameter, ZeRO-3 may not say what it is shared with."""
    model = min(step.glob("*model_states.pt"))
    state = torch.load(model, weights_only=False)
    state["shared_params"] = {}
    torch.save(state, model)
    stored = bytecheckpoint.read(step)
    if state["module"]["head.weight"].numel():
        assert stored["module.head.weight"].shape == (11, 5)
        return
    with pytest.raises(CheckpointError, match=r"'module\.head\.weight' cannot be read: the module has a placeholder"):
        stored["module.head.weight"]


def test_two_files_of_a_rank_are_refused(step: Path) -> None:
    (path,) = step.glob("*zero_pp_rank_1_*optim_states.pt")
    other = path.name.removeprefix("bf16_") if path.name.startswith("bf16_") else f"bf16_{path.name}"
    shutil.copy(path, step / other)
    with pytest.raises(UnsupportedError, match="are of rank 1"):
        bytecheckpoint.read(step)


def test_a_link_called_latest_is_no_step_of_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "run" / "step-1").mkdir(parents=True)
    (tmp_path / "run" / "latest").symlink_to("step-1")
    with pytest.raises(CheckpointNotFoundError, match="it is a run folder with the step 1"):
        bytecheckpoint.read(tmp_path / "run")


def test_values_of_other_kinds(tmp_path: Path) -> None:
    """Tensors where texts and shapes should be."""
    shutil.copytree(run_of("zero2-fp32") / "global_step3", tmp_path / "global_step3")
    model = tmp_path / "global_step3" / "mp_rank_00_model_states.pt"
    state = torch.load(model, weights_only=False)
    torch.save(state | {"shared_params": {"head.weight": torch.ones(3)}}, model)
    stored = bytecheckpoint.read(tmp_path / "global_step3")
    assert stored["module.head.weight"].shape == (11, 5)  # the module has it, too
    torch.save(state | {"param_shapes": [{"embed.weight": torch.ones(3)}]}, model)
    with pytest.raises(CorruptCheckpointError, match=r"'param_shapes\.0\.embed\.weight' is no shape"):
        bytecheckpoint.read(tmp_path / "global_step3")


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        (
            "param_slice_mappings",
            [{"embed.weight": Fragment(99, 0)}, {}],
            "has 99 elements from 0 on of .*, which has .40.",
        ),
        (
            "param_slice_mappings",
            [{"embed.weight": Fragment(16, 24)}, {}],
            r"'module\.embed\.weight': elements \[40, 56\) are not all in",
        ),
        ("param_slice_mappings", [{"embed.weight": 5}, {}], "a part of 'embed.weight', which cannot be read"),
        ("param_slice_mappings", [{"nobody": 5}, {}], "a part of 'nobody', which cannot be read"),
        ("param_slice_mappings", [{}, {}], "the ranks have .* elements of .*: files of ranks are missing"),
    ],
)
def test_parts_that_do_not_fit(tmp_path: Path, key: str, value: list[object], why: str) -> None:
    shutil.copytree(run_of("zero2-fp32") / "global_step3", tmp_path / "global_step3")
    (path,) = (tmp_path / "global_step3").glob("*zero_pp_rank_1_*optim_states.pt")
    stored = bytecheckpoint.read(path)
    flat = [stored[f"optimizer_state_dict.single_partition_of_fp32_groups.{group}"] for group in (0, 1)]
    changed = {"optimizer_state_dict": {"single_partition_of_fp32_groups": flat, "param_slice_mappings": [{}, {}]}}
    changed["optimizer_state_dict"][key] = value
    torch.save(changed, path)
    with pytest.raises(CorruptCheckpointError, match=why):
        bytecheckpoint.read(tmp_path / "global_step3")


UNIVERSAL = [kind for kind in KINDS if (run_of(kind) / "global_step3_universal").exists()]


@pytest.mark.parametrize("kind", UNIVERSAL)
def test_a_universal_checkpoint(kind: str) -> None:
    """It has what the step has that it was made of, and each value in a file of its own."""
    stored, step = (bytecheckpoint.read(run_of(kind) / name) for name in ("global_step3_universal", "global_step3"))
    names = {name for name in step if name.startswith(("module.", "optimizer."))}
    assert names == {name for name in stored if name.startswith(("module.", "optimizer.")) and name[-5:] != ".step"}
    for name in names:
        assert stored[name].dtype == step[name].dtype, name
        assert torch.equal(stored[name], step[name]), name
    report = bytecheckpoint.verify(run_of(kind) / "global_step3_universal")
    assert not report.problems
    assert report.bytes_unchecked == 0


@pytest.fixture(params=UNIVERSAL)
def universal(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    shutil.copytree(run_of(request.param) / "global_step3_universal", tmp_path / "universal")
    return tmp_path / "universal"


def test_damage_of_a_universal_checkpoint(universal: Path, tmp_path: Path) -> None:
    path = universal / "zero" / "embed.weight" / "exp_avg.pt"
    stored = bytecheckpoint.read(universal)["optimizer.embed.weight.exp_avg"]
    content = bytearray(path.read_bytes())
    content[content.index(bytes(stored[-1, -2:].view(torch.uint8)))] ^= 1
    path.write_bytes(content)
    (problem,) = bytecheckpoint.verify(universal).problems
    assert "optimizer.embed.weight.exp_avg" in problem.fqns
    with pytest.raises(CorruptCheckpointError, match=r"zero/embed\.weight/exp_avg\.pt"):
        convert(universal, tmp_path / "out", spec=bytecheckpoint.LoadSpec(include=["optimizer.embed.weight.exp_avg"]))
    torch.save({"param": torch.zeros(3, 3)}, path)
    with pytest.raises(CorruptCheckpointError, match=r"exp_avg\.pt has the shape \[3, 3\], wanted \[11, 5\]"):
        bytecheckpoint.read(universal)
    path.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"zero/embed\.weight/exp_avg\.pt is missing, which zero/"):
        bytecheckpoint.read(universal)
    torch.save({"param": torch.tensor(0.0)}, path)
    with pytest.raises(CorruptCheckpointError, match=r"zero/embed\.weight/exp_avg\.pt has one number, but zero/"):
        bytecheckpoint.read(universal)
    path.unlink()
    (universal / "zero" / "embed.weight" / "fp32.pt").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"zero/embed\.weight/fp32\.pt is missing"):
        bytecheckpoint.read(universal)


def test_what_file_managers_leave_is_no_parameter(universal: Path) -> None:
    whole = bytecheckpoint.read(universal)
    stored = {name: whole[name] for name in whole if name.startswith("module.")}
    parameter = universal / "zero" / "embed.weight"
    for name in (".DS_Store", "notes.txt", "._fp32.pt"):
        (universal / "zero" / name).write_bytes(b"no checkpoint")
        (parameter / name).write_bytes(b"no checkpoint")
    shutil.copytree(parameter, universal / "zero" / ".ipynb_checkpoints")
    again = bytecheckpoint.read(universal)
    assert {name for name in again if name.startswith("module.")} == {*stored}
    assert all(torch.equal(again[name], value) for name, value in stored.items())


@pytest.mark.parametrize("pair", [("fp32.pt", "exp_avg.pt"), ("exp_avg.pt", "exp_avg_sq.pt")])
def test_values_of_a_parameter_that_have_changed_places(universal: Path, pair: tuple[str, str]) -> None:
    swap(*(universal / "zero" / "embed.weight" / name for name in pair))
    with pytest.raises(CorruptCheckpointError, match="it was written as"):
        bytecheckpoint.read(universal)


def test_files_of_ranks_that_have_changed_places(step: Path) -> None:
    first, second = sorted(step.glob("*optim_states.pt"))[:2]
    swap(first, second)
    with pytest.raises(CorruptCheckpointError, match=rf"{first.name}\): it was written as {second.name}"):
        bytecheckpoint.read(step)


def swap(first: Path, second: Path) -> None:
    first.rename(first.with_name("aside"))
    second.rename(first)
    first.with_name("aside").rename(second)
