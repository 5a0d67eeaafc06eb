# SPDX-License-Identifier: Apache-2.0
"""Saves of a part of a state: ``include`` and ``exclude`` of the planner, of our entry points and of ``register``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan

import bytecheckpoint
from bytecheckpoint import (
    BcpSavePlanner,
    BcpStager,
    BcpWriter,
    Config,
    LoadSpec,
    async_save_state_dict,
    load_state_dict,
    registered,
    save_state_dict,
)
from bytecheckpoint.errors import ConfigError, StagingFullError

SMALL = Config(staging_bytes=64 << 10)


def adapted() -> dict[str, Any]:
    layers = {
        f"{i}": {"base": torch.full((200, 200), float(i)), "lora_A": torch.arange(6.0) + i, "lora_B": torch.ones(3) * i}
        for i in range(3)
    }
    return {"layers": layers, "list": [torch.ones(2), torch.full((3,), 2.0)], "step": 7}


def keys_at(path: Path) -> set[str]:
    return {*dcp.FileSystemReader(path).read_metadata().state_dict_metadata}


ADAPTERS = {f"layers.{i}.lora_{which}" for i in range(3) for which in "AB"}
CHOICES: list[tuple[Any, Any, set[str]]] = [
    ("*.lora_?", (), ADAPTERS),
    ((), ["*.base", "list", "step"], ADAPTERS),
    (["layers.{i}", "list.1"], "*.base", ADAPTERS | {"list.1"}),
    (r"re:layers\.[12]\.lora_[AB]", "*.1.lora_A", {"layers.1.lora_B", "layers.2.lora_A", "layers.2.lora_B"}),
    ((), "list.0", ADAPTERS | {f"layers.{i}.base" for i in range(3)} | {"list.1", "step"}),
]


@pytest.mark.parametrize(("include", "exclude", "wanted"), CHOICES)
@pytest.mark.parametrize("call", ["save", "async", "dcp", "dcp.async"])
def test_only_chosen_keys_are_stored(tmp_path: Path, call: str, include: Any, exclude: Any, wanted: set[str]) -> None:
    """Keys keep their names and paths, however the state is saved."""
    state, chosen = adapted(), {"include": include, "exclude": exclude}
    if call == "save":
        save_state_dict(tmp_path, state, **chosen)
    elif call == "async":
        handle = async_save_state_dict(tmp_path, state, **chosen)
        state["layers"]["1"]["lora_B"].zero_()
        handle.committed.result()
    else:
        options: Any = {"planner": BcpSavePlanner(**chosen), "no_dist": True}
        if call == "dcp":
            dcp.save(state, storage_writer=BcpWriter(tmp_path), **options)
        else:
            writer = BcpWriter(tmp_path)
            dcp.async_save(state, storage_writer=writer, async_stager=BcpStager(), **options).result()  # type: ignore[union-attr]
    assert keys_at(tmp_path) == wanted
    whole = tmp_path / "whole"
    save_state_dict(whole, adapted())
    paths = dcp.FileSystemReader(whole).read_metadata().planner_data
    assert dcp.FileSystemReader(tmp_path).read_metadata().planner_data == {key: paths[key] for key in wanted}
    got = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0 for key, value in flat_of().items()}
    got = {key: value for key, value in got.items() if key in wanted}
    load_state_dict(tmp_path, got)
    for key, value in got.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(flat_of()[key])), key


def flat_of() -> dict[str, Any]:
    state = adapted()
    layers = {f"layers.{i}.{name}": value for i, layer in state["layers"].items() for name, value in layer.items()}
    return layers | {"list.0": state["list"][0], "list.1": state["list"][1], "step": 7}


def test_what_is_left_out_is_not_staged(tmp_path: Path) -> None:
    with pytest.raises(StagingFullError):
        async_save_state_dict(tmp_path, adapted(), config=SMALL)
    async_save_state_dict(tmp_path, adapted(), config=SMALL, exclude="*.base").committed.result()
    assert "layers.0.base" not in keys_at(tmp_path)
    planner = BcpSavePlanner(exclude="*.base")
    options: Any = {"storage_writer": BcpWriter(tmp_path / "dcp"), "no_dist": True}
    dcp.async_save(adapted(), planner=planner, async_stager=BcpStager(config=SMALL), **options).result()  # type: ignore[union-attr]
    assert keys_at(tmp_path / "dcp") == keys_at(tmp_path)


def test_one_container_at_two_places(tmp_path: Path) -> None:
    """The dict is left out at one of its places alone."""
    shared = {"w": torch.arange(5.0)}
    async_save_state_dict(tmp_path, {"a": shared, "b": shared}, exclude="a").committed.result()
    got = {"b": {"w": torch.zeros(5)}}
    load_state_dict(tmp_path, got)
    assert torch.equal(got["b"]["w"], shared["w"])
    assert keys_at(tmp_path) == {"b.w"}


def test_register_takes_them(tmp_path: Path) -> None:
    with registered(exclude=["*.base", "list"], config=SMALL):
        dcp.save(adapted(), checkpoint_id=tmp_path / "now", no_dist=True)
        dcp.async_save(adapted(), checkpoint_id=tmp_path / "later", no_dist=True).result()  # type: ignore[union-attr]
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "own", planner=BcpSavePlanner(), no_dist=True)
    assert keys_at(tmp_path / "now") == keys_at(tmp_path / "later") == ADAPTERS | {"step"}
    assert keys_at(tmp_path / "own") == {"w"}


@pytest.mark.parametrize(
    ("patterns", "wrong"),
    [
        ({"include": "lora"}, "'lora'"),
        ({"exclude": ["*.base", "*.bias", "norm"]}, r"'\*.bias', 'norm'$"),
        ({"include": "*", "exclude": "x"}, "'x'$"),
    ],
)
def test_a_pattern_without_a_key_is_refused_before_a_byte_is_written(tmp_path: Path, patterns: Any, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        save_state_dict(tmp_path / "new", adapted(), **patterns)
    with pytest.raises(ConfigError, match=wrong):
        async_save_state_dict(tmp_path / "new", adapted(), **patterns).committed.result()
    assert not (tmp_path / "new").exists()


def test_planner_and_patterns_are_too_much(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not both"):
        save_state_dict(tmp_path, adapted(), planner=BcpSavePlanner(), exclude="*.base")
    with pytest.raises(ConfigError, match="not both"):
        async_save_state_dict(tmp_path, adapted(), planner=BcpSavePlanner(), include="*.base")
    with pytest.raises(ConfigError, match="must be a name"):
        BcpSavePlanner(include="a.{1}")


def test_cached_plans_of_other_patterns_are_not_used(tmp_path: Path) -> None:
    for _ in range(2):
        for include, wanted in (("*.lora_A", "A"), ("*.lora_B", "B")):
            save_state_dict(tmp_path, adapted(), include=include)
            assert keys_at(tmp_path) == {f"layers.{i}.lora_{wanted}" for i in range(3)}


def test_states_that_are_not_nested(tmp_path: Path) -> None:
    planner = BcpSavePlanner(flatten_state_dict=False, exclude="step")
    state = {"layers": torch.ones(3), "step": {"a": 1}, "other": {"b": 2}}
    dcp.save(state, storage_writer=BcpWriter(tmp_path), planner=planner, no_dist=True)
    assert keys_at(tmp_path) == {"layers", "other"}


class _Looking(BcpSavePlanner):
    """Looks at all items, so that DCP's own planner plans."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        assert [item.index.fqn for item in plan.items]
        return plan


def test_planners_that_look_at_items(tmp_path: Path) -> None:
    dcp.save(adapted(), storage_writer=BcpWriter(tmp_path), planner=_Looking(include="*.lora_A"), no_dist=True)
    assert keys_at(tmp_path) == {f"layers.{i}.lora_A" for i in range(3)}
    planner = _Looking(include=["*.lora_A", "*.lora_C"])
    with pytest.raises(CheckpointException) as caught:
        dcp.save(adapted(), storage_writer=BcpWriter(tmp_path), planner=planner, no_dist=True)
    assert "lora_C" in str(caught.value)


def test_bytecheckpoint_save_leaves_out_keys_of_the_model(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"base": torch.nn.Linear(4, 4), "lora": torch.nn.Linear(4, 4)})
    model["base"].requires_grad_(False)
    optimizer = torch.optim.AdamW(model["lora"].parameters())
    model["lora"](torch.ones(2, 4)).sum().backward()
    optimizer.step()
    wanted = {key: value.clone() for key, value in model.state_dict().items()}
    live = {"model": model, "optimizer": optimizer}
    with pytest.raises(ConfigError, match=r"'\*\.adapter'"):
        bytecheckpoint.save(tmp_path, live, "ddp", include=["lora", "*.adapter"])
    assert not [*tmp_path.iterdir()]
    for fast in (False, True):
        bytecheckpoint.save(tmp_path, live, "ddp", fast_saving=fast, include="lora").committed.result()
        assert keys_at(tmp_path / "model") == {"lora.weight", "lora.bias"}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    bytecheckpoint.load(tmp_path, live, "ddp", spec=LoadSpec(strict="checkpoint"))
    assert torch.equal(model["lora"].weight, wanted["lora.weight"])
    assert model["base"].weight.eq(0).all()
