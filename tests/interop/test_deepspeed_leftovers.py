# SPDX-License-Identifier: Apache-2.0
"""What lies in or beside a step of DeepSpeed and is no part of its parameters: see test_deepspeed.py."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.goldens import GOLDEN

import bytecheckpoint
from bytecheckpoint import Config
from bytecheckpoint.convert.model_keys import model_of
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError, UnsupportedError

ZERO_2 = "zero2-fp32"


def _write_zero_3(folder: Path, values: torch.Tensor, *, ranks: int, says_count: bool) -> None:
    """Writes the parameter ``w`` in equal parts."""
    folder.mkdir(exist_ok=True)
    parts = values.flatten().chunk(ranks)
    for rank, part in enumerate(parts):
        module = {"module": {"w": torch.empty(0)}, "param_shapes": [{"w": values.shape}], "shared_params": {}}
        torch.save(module, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        state = {"fp32_flat_groups": [part.clone()], "optimizer_state_dict": {"state": {}}}
        state |= {"partition_count": ranks} if says_count else {}
        torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


@pytest.mark.parametrize("says_count", [True, False])
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 1)])
def test_files_that_an_earlier_save_of_more_ranks_left(
    tmp_path: Path, says_count: bool, before: int, after: int
) -> None:
    """The parts of the new save would be taken for shorter ones, and their rows put in wrong places."""
    step, values = tmp_path / "step", torch.arange(12.0).reshape(4, 3)
    _write_zero_3(step, -values, ranks=before, says_count=says_count)
    assert torch.equal(bytecheckpoint.read(step)["module.w"], -values)
    _write_zero_3(step, values, ranks=after, says_count=says_count)
    with pytest.raises(CorruptCheckpointError, match=r"zero_pp_rank_0_mp_rank_00_optim_states\.pt (is of|has more)"):
        bytecheckpoint.read(step)
    for left in step.glob(f"zero_pp_rank_{before - 1}_*"):
        left.unlink()
    assert torch.equal(bytecheckpoint.read(step)["module.w"], values)


def test_files_of_models_that_an_earlier_save_left(tmp_path: Path) -> None:
    """Parts of frozen parameters are in them, whose number they must tell."""
    _write_zero_3(tmp_path, torch.arange(12.0).reshape(4, 3), ranks=3, says_count=True)
    for left in tmp_path.glob("zero_pp_rank_2_*_optim_states.pt"):
        left.unlink()
    _write_zero_3(tmp_path, torch.arange(12.0).reshape(4, 3), ranks=2, says_count=True)
    with pytest.raises(CorruptCheckpointError, match="of models of 3 ranks, and of optimizers of 2: files are missing"):
        bytecheckpoint.read(tmp_path)


def _changed(kind: str, tmp_path: Path, name: str, change: Callable[[dict[str, object]], None]) -> Path:
    """Copies a step, and changes in place what is in one of its files."""
    step = tmp_path / "global_step3"
    shutil.copytree(GOLDEN / "deepspeed-0.19.8" / kind / "run" / "global_step3", step)
    state = torch.load(step / name, weights_only=False)
    change(state)
    torch.save(state, step / name)
    return step


def test_tensors_that_users_save_beside_the_model(tmp_path: Path) -> None:
    """They are entries of the dict ``client_state`` of save_checkpoint."""
    rng, nested = torch.arange(9, dtype=torch.uint8), {"mean": torch.ones(2, 3), "list": [torch.zeros(4)]}
    step = _changed(ZERO_2, tmp_path, "mp_rank_00_model_states.pt", lambda state: state.update(rng=rng, ours=nested))
    stored = bytecheckpoint.read(step)
    assert torch.equal(stored["rng"], rng)
    assert torch.equal(stored["ours.mean"], nested["mean"])
    assert torch.equal(stored["ours.list.0"], nested["list"][0])
    source, spec = model_of(str(step), Config.from_env())
    assert (source, spec) == (str(step), bytecheckpoint.LoadSpec(include="module", rename={"module": ""}))


def test_states_that_have_no_value_for_each_element(tmp_path: Path) -> None:
    """Optimizers of 8 bits have a table, and a maximum for each block of elements."""
    step, values = tmp_path / "step", torch.arange(12.0).reshape(4, 3)
    _write_zero_3(step, values, ranks=2, says_count=True)
    for path in step.glob("*optim_states.pt"):
        file = torch.load(path, weights_only=True)
        state = {"exp_avg": torch.ones(6), "table": torch.ones(256), "absmax": torch.ones(1), "step": torch.tensor(3.0)}
        file["optimizer_state_dict"]["optimizer_state_dict"]["state"] = {0: state}
        torch.save(file, path)
    stored = bytecheckpoint.read(step)
    assert torch.equal(stored["optimizer.w.exp_avg"], torch.ones(4, 3))
    assert not {"optimizer.w.table", "optimizer.w.absmax", "optimizer.w.step"} & {*stored}
    assert stored["optimizer_state_dict.optimizer_state_dict.state.0.step"] == 3
    for name in ("table", "absmax"):
        with pytest.raises(CheckpointError, match=f"0.{name}' cannot be read: the optimizer of each rank has its own"):
            stored[f"optimizer_state_dict.optimizer_state_dict.state.0.{name}"]


@pytest.mark.parametrize(
    "name",
    [
        "layer_00-model_00-model_states.pt",
        "layer_0_expert_0_mp_rank_00_model_states.pt",
        "expp_rank_0_mp_rank_00_optim_states.pt",
    ],
)
def test_layers_and_experts_in_files_of_their_own_are_refused(tmp_path: Path, name: str) -> None:
    step = _changed(ZERO_2, tmp_path, "mp_rank_00_model_states.pt", lambda state: None)
    torch.save({"w": torch.ones(3)}, step / name)
    with pytest.raises(UnsupportedError, match=f"{name} is of tensor or pipeline parallelism, or of experts"):
        bytecheckpoint.read(step)
