# SPDX-License-Identifier: Apache-2.0
"""Models whose state dict needs more than copied tensors: hooks, and overridden methods."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bytecheckpoint import LoadResult, load, save
from bytecheckpoint.errors import KeyMismatchError
from frameworks.wrapped import Net, wrap

LIMIT_S = 90.0


class Derived(nn.Linear):
    """Has a buffer that is computed from its weight and not saved."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("doubled", torch.zeros(4), persistent=False)
        self.derive()

    def derive(self, *_: object) -> None:
        weight = self.weight.detach()
        weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        self.doubled.copy_(weight[0] * 2)


class PostHook(Derived):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(type(self).derive)


class PreHook(Derived):
    """Computes its buffer in a hook, from the loaded values, before they are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(type(self).see)

    def see(self, state: dict[str, Any], prefix: str, *_: object) -> None:
        weight = state[prefix + "weight"]
        self.doubled.copy_((weight.full_tensor() if hasattr(weight, "full_tensor") else weight)[0] * 2)


class OwnLoad(Derived):
    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.derive()


class OwnExtraState(Derived):
    """Its extra state is one of its own tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(2), persistent=False)

    def get_extra_state(self) -> torch.Tensor:
        return self.scale

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.derive()


class OwnRoot(nn.Sequential):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        result = super().load_state_dict(*args, **kwargs)
        self[0].derive()  # type: ignore[operator]
        return result


MODELS: dict[str, Callable[[], nn.Module]] = {
    "post-hook": lambda: nn.Sequential(PostHook()),
    "pre-hook": lambda: nn.Sequential(PreHook()),
    "_load_from_state_dict": lambda: nn.Sequential(OwnLoad()),
    "set_extra_state": lambda: nn.Sequential(OwnExtraState()),
    "load_state_dict": lambda: OwnRoot(Derived()),
}


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


WRAPS: dict[str, tuple[str, Callable[[nn.Module], nn.Module]]] = {
    "ddp": ("ddp", DistributedDataParallel),
    "compiled ddp": ("ddp", lambda model: torch.compile(DistributedDataParallel(model))),  # type: ignore[arg-type, return-value]
    "fsdp2": ("fsdp2", sharded),
}


def stale(folder: str, name: str, framework: str, wrap: Callable[[nn.Module], nn.Module]) -> bool:
    torch.manual_seed(1)
    model, other = wrap(MODELS[name]()), MODELS[name]()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other = wrap(other)
    save(folder, {"model": model}, framework)
    load(folder, {"model": other}, framework)
    of_model, of_other = (next(m for m in each.modules() if isinstance(m, Derived)) for each in (model, other))
    return not torch.equal(of_model.doubled, of_other.doubled)


def stale_of_all(folder: str) -> list[str]:
    return [
        f"{name} under {wrapping}"
        for name in MODELS
        for wrapping, (framework, wrap) in WRAPS.items()
        if stale(f"{folder}/{name}/{wrapping}", name, framework, wrap)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_what_a_load_derives_is_derived(tmp_path: Path, name: str) -> None:
    assert not stale(str(tmp_path), name, "ddp", lambda model: model)


def test_what_a_load_derives_is_derived_under_every_wrapper(tmp_path: Path) -> None:
    assert run_ranks(2, stale_of_all, str(tmp_path), limit_s=LIMIT_S) == [[], []]


def of_wrapper(folder: str) -> list[str]:
    calls = []
    model = DistributedDataParallel(nn.Linear(2, 2))
    model.register_load_state_dict_post_hook(lambda *_: calls.append("hook of DDP"))
    save(folder, {"model": model}, "ddp")
    load(folder, {"model": model}, "ddp")
    load(folder, {"model": nn.Linear(2, 2)}, "ddp")
    return calls


def test_hooks_of_a_wrapper_are_called(tmp_path: Path) -> None:
    assert run_ranks(1, of_wrapper, str(tmp_path)) == [["hook of DDP"]]


# Ordinary models: our load copies in place, and torch's load does not run.


def ordinary(name: str) -> nn.Module:
    if name == "weight_norm":
        return nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    if name == "spectral_norm":
        return nn.utils.spectral_norm(nn.Linear(3, 2))
    if name == "norms":
        return nn.Sequential(nn.BatchNorm1d(3), nn.InstanceNorm1d(3, affine=True), nn.MultiheadAttention(4, 2))
    model = nn.Sequential(Net(), nn.Linear(3, 2))
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    return model


def loads_of(folder: str, wrap: Callable[[], nn.Module], framework: str) -> int:
    """Returns how many modules torch's load copied once more."""
    calls = []
    torchs = nn.Module._load_from_state_dict
    nn.Module._load_from_state_dict = lambda *args: calls.append(torchs(*args))  # type: ignore[method-assign]
    nn.Module._load_from_state_dict.__module__ = torchs.__module__
    try:
        save(folder, {"model": wrap()}, framework)
        load(folder, {"model": wrap()}, framework)
    finally:
        nn.Module._load_from_state_dict = torchs  # type: ignore[method-assign]
    return len(calls)


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "norms", "checkpointed"])
def test_ordinary_models_are_loaded_in_place(tmp_path: Path, name: str) -> None:
    assert loads_of(str(tmp_path), partial(ordinary, name), "ddp") == 0


def loads_of_wrapped(folder: str) -> dict[str, int]:
    return {
        name: loads_of(f"{folder}/{name}", partial(wrap, name), "fsdp2" if "fsdp2" in name else "ddp")
        for name in ("ddp", "fsdp2", "fsdp2 mixed")
    }


def test_wrapped_models_are_loaded_in_place(tmp_path: Path) -> None:
    found = run_ranks(2, loads_of_wrapped, str(tmp_path), limit_s=LIMIT_S)
    assert found == [{"ddp": 0, "fsdp2": 0, "fsdp2 mixed": 0}] * 2


# Entries of a state dict besides parameters and buffers.


class Noted(nn.Linear):
    """Saves a tensor that is not a buffer, under a name that is not an attribute."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.kept = torch.zeros(2)
        self.register_state_dict_post_hook(_note)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        self.kept = state.pop(prefix + "note").clone()
        super()._load_from_state_dict(state, prefix, *args)


def _note(module: Any, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    state[prefix + "note"] = module.kept.clone()


def notes(folder: str) -> list[list[float]]:
    found = []
    for name in ("plain", "ddp", "compiled ddp"):
        model, other = Noted(), nn.Sequential(Noted())
        wrapping = WRAPS[name][1] if name in WRAPS else nn.Sequential
        model.kept += 3
        save(f"{folder}/{name}", {"model": wrapping(nn.Sequential(model))}, "ddp")
        load(f"{folder}/{name}", {"model": wrapping(other)}, "ddp")
        found.append(other[0].kept.tolist())
    return found


def test_what_a_hook_adds_comes_back(tmp_path: Path) -> None:
    assert run_ranks(1, notes, str(tmp_path), limit_s=LIMIT_S) == [[[3.0, 3.0]] * 3]


def test_what_a_model_does_not_take_is_told(tmp_path: Path) -> None:
    def model_of() -> nn.Module:
        model = nn.Linear(3, 2)
        model.register_state_dict_post_hook(lambda it, state, *_: state.update(note=torch.ones(2)))
        return model

    save(tmp_path, {"model": model_of()}, "ddp")
    with pytest.raises(KeyMismatchError, match=r"has model: note in its state_dict\(\), and its load"):
        load(tmp_path, {"model": model_of()}, "ddp")
    result: LoadResult = load(tmp_path, {"model": model_of()}, "ddp", strict=False)
    assert result.unexpected_keys == ("model: note",)


def test_hooks_see_the_version_of_the_modules_and_what_was_loaded(tmp_path: Path) -> None:
    seen = []

    class Versioned(nn.Linear):
        _version = 7

        def _load_from_state_dict(self, state: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
            seen.append((local_metadata.get("version"), sorted(state)))
            super()._load_from_state_dict(state, prefix, local_metadata, *args)

    save(tmp_path, {"model": nn.Linear(3, 2, bias=False)}, "ddp")
    result = load(tmp_path, {"model": Versioned(3, 2)}, "ddp", strict=False)
    assert seen == [(7, ["weight"])]
    assert result.missing_keys == ("model: bias",)
