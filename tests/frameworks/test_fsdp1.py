# SPDX-License-Identifier: Apache-2.0
"""Decomposes FSDP1's flat parameters in place into few boxes, in any state in which FSDP may leave them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import bytecheckpoint
from bytecheckpoint.errors import CheckpointExistsError, KeyMismatchError, UnsupportedError
from bytecheckpoint.training_state.flat_parameters import flat_units
from bytecheckpoint.training_state.module_state import ModuleState
from bytecheckpoint.training_state.stored import Stored
from frameworks.wrapped import VOCABULARY, WRAPPINGS, Net, differences, full_state, optimizer_of, train, wrap
from frameworks.zoo import KINDS, make

OF_FSDP1 = [name for name in WRAPPINGS if name.startswith("fsdp ")]
CPU = torch.device("cpu")


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# Boxes


def boxes() -> list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Returns name, shape, offsets and sizes of every entry's boxes, after checking the boxes' elements."""
    found = []
    for name in ("fsdp orig", "fsdp flat"):
        kind = KINDS[name]
        wanted = dict(make(kind, seed=3, is_wrapped=False).named_parameters())
        for unit in flat_units(make(kind, seed=3)):
            for entry in unit.entries:
                if entry.numel == 0:
                    continue
                chunks: Any = entry.chunks_of(unit.local_part(entry, unit.shard))
                assert len(chunks.tensors) <= 2 * len(entry.shape) - 1, entry
                for at, tensor in zip(chunks.offsets, chunks.tensors, strict=True):
                    assert torch.equal(tensor, wanted[entry.fqn].detach()[window(at, tensor.shape)])
                    found.append((f"{name} {entry.fqn}", tuple(entry.shape), at, tuple(tensor.shape)))
    return found


def window(at: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(at, sizes, strict=True))


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_few_boxes_that_are_all(num_ranks: int) -> None:
    """A shard of a parameter has at most 2 * ndim - 1 boxes. The boxes of all ranks cover each element exactly once."""
    times: dict[str, torch.Tensor] = {}
    for name, shape, at, sizes in [box for of_rank in run_ranks(num_ranks, boxes) for box in of_rank]:
        times.setdefault(name, torch.zeros(shape))[window(at, sizes)] += 1
    assert {name.rsplit(" ", 1)[1] for name in times} >= {f"cell.of_{ndim}" for ndim in (1, 2, 3, 4)}
    assert not [name for name, of_it in times.items() if not of_it.eq(1).all()]


# Parameters that FSDP keeps gathered


def loss_of(model: nn.Module) -> torch.Tensor:
    tokens = torch.arange(12).view(4, 3) % VOCABULARY
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def after_forwards(folder: str) -> list[str]:
    found = []
    bf16 = MixedPrecision(param_dtype=torch.bfloat16)
    no_shard = {"sharding_strategy": ShardingStrategy.NO_SHARD, "mixed_precision": bf16}
    wrappings: dict[str, Callable[[int], nn.Module]] = {
        f"fsdp {name}": partial(wrap, f"fsdp {name}") for name in ("orig", "flat", "grad op", "mixed", "no shard")
    }
    wrappings["no shard mixed"] = lambda seed: (torch.manual_seed(seed), fsdp(Net(), **no_shard))[1]
    for name, make_model in wrappings.items():
        for has_grad in (True, False):
            other = make_model(7)
            other_optimizer = optimizer_by_module(other)
            train(other, other_optimizer)
            parts = {"model": other, "optimizer": other_optimizer}
            bytecheckpoint.save(f"{folder}/{name} other", parts, "fsdp")
            wanted_state = copy.deepcopy(full_state(other, other_optimizer))
            with torch.set_grad_enabled(has_grad):
                wanted_loss = loss_of(other).item()
            wanted_next = train(other, other_optimizer, steps=2)  # what torch computes after such a forward
            model = make_model(1)
            optimizer = optimizer_by_module(model)
            train(model, optimizer)
            before = copy.deepcopy(full_state(model, optimizer))
            parts = {"model": model, "optimizer": optimizer}
            with torch.set_grad_enabled(has_grad):
                loss_of(model)
                bytecheckpoint.save(f"{folder}/{name}", parts, "fsdp")
                # The load happens after another forward, and replaces what FSDP has gathered.
                loss_of(model)
                bytecheckpoint.load(f"{folder}/{name} other", parts, "fsdp")
                loss = loss_of(model).item()
            where = f"{name}, {'with' if has_grad else 'without'} grad"
            found += [f"{where}: loss {loss} is not {wanted_loss}"] * (loss != wanted_loss)
            state = full_state(model, optimizer)
            found += [f"{where}: {key}" for key in differences(state, wanted_state) if dist.get_rank() == 0]
            found += [f"{where}: training"] * (train(model, optimizer, steps=2) != wanted_next)
            bytecheckpoint.load(f"{folder}/{name}", parts, "fsdp")
            state = full_state(model, optimizer)
            found += [f"{where}, saved: {key}" for key in differences(state, before) if dist.get_rank() == 0]
    return found


def optimizer_by_module(model: nn.Module) -> torch.optim.Optimizer:
    return optimizer_of(model, is_decayed=lambda name: "layers." in name)


def test_after_a_forward_without_backward(tmp_path: Path) -> None:
    """FSDP keeps gathered parameters. The local shard is saved, and the next forward uses what was loaded."""
    assert [text for of_rank in run_ranks(2, after_forwards, str(tmp_path), limit_s=200) for text in of_rank] == []


# FSDP's own state dict


def both_ways(folder: str) -> list[str]:
    found = []
    for name in OF_FSDP1:
        model = wrap(name, seed=1)
        optimizer = optimizer_by_module(model)
        train(model, optimizer)
        parts = {"model": model, "optimizer": optimizer}
        wanted = full_state(model, optimizer)
        for is_decomposed in (True, False):
            path = f"{folder}/{name} {is_decomposed}"
            bytecheckpoint.save(path, parts, "fsdp", save_decomposed_model_optimizer=is_decomposed)
        for part in ("model", "optimizer"):
            one, other = (dict(Stored(f"{folder}/{name} {is_decomposed}/{part}")) for is_decomposed in (True, False))
            found += [f"{name}: keys of {part}"] * (one != other)
        for saved in (True, False):
            blank = wrap(name, seed=2)
            blank_optimizer = optimizer_by_module(blank)
            loss_of(blank)
            blank_parts = {"model": blank, "optimizer": blank_optimizer}
            path = f"{folder}/{name} {saved}"
            bytecheckpoint.load(path, blank_parts, "fsdp", load_decomposed_model_optimizer=not saved)
            found += [f"{name}, loss"] * (loss_of(blank).item() != loss_of(model).item())
            state = full_state(blank, blank_optimizer)
            found += [f"{name} {saved}: {key}" for key in differences(state, wanted) if dist.get_rank() == 0]
    return found


def test_the_same_with_and_without_taking_apart(tmp_path: Path) -> None:
    """Keys, shapes, dtypes and bytes are equal, and each setting loads what the other saved."""
    assert [text for of_rank in run_ranks(2, both_ways, str(tmp_path), limit_s=200) for text in of_rank] == []


# Models that cannot be decomposed


class Doubled(nn.Linear):
    """Saves its bias doubled."""

    def __init__(self) -> None:
        super().__init__(3, 5)
        self._register_state_dict_hook(_double)
        self._register_load_state_dict_pre_hook(_halve)


def _double(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    state[f"{prefix}bias"] = state[f"{prefix}bias"] * 2


def _halve(state: dict[str, Any], prefix: str, *args: Any) -> None:
    state[f"{prefix}bias"] = state[f"{prefix}bias"] / 2


class Renamed(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix + "renamed.", keep_vars)


class OwnNorm(nn.BatchNorm1d):
    """Differs from its base class only in name."""


def fsdp(*modules: nn.Module, **kwargs: Any) -> nn.Module:
    return FullyShardedDataParallel(nn.Sequential(*modules), use_orig_params=True, device_id=CPU, **kwargs)


def refused(folder: str) -> dict[str, str]:
    found = {}
    for name, module in (("hook", Doubled), ("method", partial(Renamed, 3, 5))):
        path, model = f"{folder}/{name}", fsdp(nn.Linear(3, 3), module())
        found[name] = raised(lambda path=path, model=model: bytecheckpoint.save(path, {"model": model}, "fsdp"))
    # FSDP's own state dict runs the hooks.
    model, other = fsdp(nn.Linear(3, 3), Doubled()), fsdp(nn.Linear(3, 3), Doubled())
    path = f"{folder}/hook"
    bytecheckpoint.save(path, {"model": model}, "fsdp", save_decomposed_model_optimizer=False)
    bytecheckpoint.load(path, {"model": other}, "fsdp", load_decomposed_model_optimizer=False)
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5))
    bytecheckpoint.load(path, {"model": plain}, "ddp")
    with FullyShardedDataParallel.summon_full_params(model), FullyShardedDataParallel.summon_full_params(other):
        assert torch.equal(other.module[1].bias, model.module[1].bias)
        assert torch.equal(plain[1].bias, model.module[1].bias * 2)
        found["summoned"] = raised(lambda: bytecheckpoint.save(f"{folder}/summoned", {"model": model}, "fsdp"))
    bytecheckpoint.save(f"{folder}/own norm", {"model": fsdp(nn.Linear(3, 3), OwnNorm(3))}, "fsdp")

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    parallel = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh["tensor"], {"0": ColwiseParallel()})
    over = FullyShardedDataParallel(parallel, device_mesh=mesh["data"], use_orig_params=True, device_id=CPU)
    over_parts = {"model": over, "optimizer": torch.optim.SGD(over.parameters())}
    found["tensor parallel"] = raised(lambda: bytecheckpoint.save(f"{folder}/tp", over_parts, "fsdp"))
    found["tensor parallel, too"] = raised(
        lambda: bytecheckpoint.save(f"{folder}/tp", over_parts, "fsdp", save_decomposed_model_optimizer=False)
    )
    bytecheckpoint.save(f"{folder}/tp", {"model": over}, "fsdp", save_decomposed_model_optimizer=False)
    bytecheckpoint.load(f"{folder}/tp", {"model": over}, "fsdp", load_decomposed_model_optimizer=False)

    by_name, of_units = wrap("fsdp orig", 1), wrap("fsdp flat", 1)
    two_groups, one_group = optimizer_of(by_name), optimizer_of(of_units)
    bytecheckpoint.save(f"{folder}/groups", {"model": by_name, "optimizer": two_groups}, "fsdp")
    parts = {"model": of_units, "optimizer": one_group}
    found["groups"] = raised(lambda: bytecheckpoint.load(f"{folder}/groups", parts, "fsdp"))

    odd = torch.optim.SGD(by_name.parameters(), lr=0.1)
    for parameter in by_name.parameters():
        odd.state[parameter]["rows"] = torch.zeros(2, 2)
    odd_parts = {"model": by_name, "optimizer": odd}
    found["shapes"] = raised(lambda: bytecheckpoint.save(f"{folder}/shapes", odd_parts, "fsdp"))

    for group in two_groups.param_groups:
        for parameter in group["params"]:
            two_groups.state[parameter] = {"odd": {"a": torch.ones(1)}}
    parts = {"model": by_name, "optimizer": two_groups}
    found["nested"] = raised(lambda: bytecheckpoint.save(f"{folder}/nested", parts, "fsdp"))

    plain_one, plain_other = nn.Linear(3, 3), nn.Linear(3, 3)
    lbfgs, other_lbfgs = (torch.optim.LBFGS(each.parameters()) for each in (plain_one, plain_other))
    lbfgs.step(lambda: lbfgs_loss(plain_one))
    bytecheckpoint.save(f"{folder}/lbfgs", {"model": plain_one, "optimizer": lbfgs}, "ddp")
    bytecheckpoint.load(f"{folder}/lbfgs", {"model": plain_other, "optimizer": other_lbfgs}, "ddp")
    for each, of_each in ((plain_one, lbfgs), (plain_other, other_lbfgs)):
        each.zero_grad()
        of_each.step(partial(lbfgs_loss, each))
    assert torch.equal(plain_one.weight, plain_other.weight)
    return found


def lbfgs_loss(model: nn.Module) -> float:
    model.zero_grad()
    loss = model(torch.ones(2, 3)).pow(2).sum()
    loss.backward()
    return float(loss)


def test_what_cannot_be_taken_apart(tmp_path: Path) -> None:
    """All ranks raise an error that says what to do, and that advice works."""
    for found in run_ranks(2, refused, str(tmp_path)):
        assert "'1', a Doubled, has a state dict hook of" in found["hook"]
        assert "'1', a Renamed, has its own _save_to_state_dict" in found["method"]
        assert all("pass save_decomposed_model_optimizer=False" in found[name] for name in ("hook", "method"))
        assert "in SUMMON_FULL_PARAMS: save and load outside of forward" in found["summoned"]
        for name in ("tensor parallel", "tensor parallel, too"):
            assert found[name].startswith(f"{UnsupportedError.__name__}: FSDP over tensor parallelism (the root)")
            assert "use fully_shard (FSDP2), or save and load the model alone" in found[name]
        assert found["groups"].startswith(f"{KeyMismatchError.__name__}: load of an optimizer: parameters of one group")
        assert "use fully_shard (FSDP2) with this optimizer" in found["shapes"]
        assert (
            "tensors and plain values can be saved, and lists and dicts of them, but not for FSDP1" in found["nested"]
        )


# Parts of a flat parameter


class Eighths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3).to(torch.float8_e4m3fn), requires_grad=False)


def parts_of_units(folder: str) -> None:
    # Frozen 8-bit weights: torch makes such units only without `use_orig_params`.
    torch.manual_seed(1)
    plain = nn.Sequential(Eighths(), nn.Linear(3, 3))
    wanted = plain[0].weight.detach().clone()
    plain[0] = FullyShardedDataParallel(plain[0], device_id=CPU)
    bytecheckpoint.save(f"{folder}/fp8", {"model": FullyShardedDataParallel(plain, device_id=CPU)}, "fsdp")
    other = nn.Sequential(Eighths(), nn.Linear(3, 3))
    bytecheckpoint.load(f"{folder}/fp8", {"model": other}, "ddp")
    assert not differences({"weight": other[0].weight.detach()}, {"weight": wanted})

    # A parameter that had no gradient has no state, so a load clears what a flat parameter held for it before.
    single = wrap("plain", 1)
    single.layers["0"].up.bias.requires_grad_(False)  # type: ignore[index,union-attr]
    optimizer = torch.optim.AdamW(single.parameters())
    train(single, optimizer)
    bytecheckpoint.save(f"{folder}/no grad", {"model": single, "optimizer": optimizer}, "ddp")
    model = wrap("fsdp flat", 1)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    bytecheckpoint.load(f"{folder}/no grad", {"model": model, "optimizer": optimizer}, "fsdp")
    state = full_state(model, optimizer)
    if dist.get_rank() == 0:
        for name in ("exp_avg", "exp_avg_sq"):
            assert not state[f"optimizer.state.layers.0.up.bias.{name}"].any()
            assert state[f"optimizer.state.layers.0.up.weight.{name}"].any()


def test_parts_of_units(tmp_path: Path) -> None:
    run_ranks(2, parts_of_units, str(tmp_path))


def one_shared_unit() -> list[str]:
    """Returns the keys of a model that contains one FSDP unit twice."""
    unit = FullyShardedDataParallel(nn.Linear(3, 3), use_orig_params=True, device_id=CPU)
    model = fsdp(unit, nn.Linear(3, 3), unit)
    return sorted(ModuleState(model).values)


def test_a_unit_under_two_names() -> None:
    names = [f"{number}.{name}" for number in range(3) for name in ("bias", "weight")]
    assert run_ranks(2, one_shared_unit) == [names] * 2


def save_twice(folder: Path) -> str:
    """Saves with FSDP's own state dict, twice.

    FSDP gathers on all ranks before rank 0 checks whether a checkpoint exists.
    """
    model = wrap("fsdp orig")
    kwargs: dict[str, Any] = {"save_decomposed_model_optimizer": False, "overwrite": False}
    bytecheckpoint.save(folder, {"model": model}, "fsdp", **kwargs)
    with pytest.raises(CheckpointExistsError) as raised:
        bytecheckpoint.save(folder, {"model": model}, "fsdp", **kwargs)
    return str(raised.value)


def test_what_is_there_is_refused_where_fsdp_gathers(tmp_path: Path) -> None:
    """All ranks raise the error, and no rank waits for the one that found the checkpoint."""
    assert all("overwrite=False" in text for text in run_ranks(2, save_twice, tmp_path, limit_s=30.0))
