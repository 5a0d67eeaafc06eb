# SPDX-License-Identifier: Apache-2.0
"""Saves and loads of live objects send only plans between ranks, over a process group of our own, and no tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support.ranks import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import bytecheckpoint
from frameworks.wrapped import FRAMEWORK_OF, WRAPPINGS, full_state, optimizer_of, train, wrap

# The wrappings left out differ from these only in what they compute.
KINDS = [
    name
    for name in WRAPPINGS
    if name not in ("plain", "fsdp orig root", "fsdp flat leaves", "fsdp mixed", "fsdp checkpointed", "fsdp2 mixed")
]
# All collectives and sends that Python can call on a group, from any thread.
_METHODS = [
    name
    for name in vars(dist.ProcessGroup)
    if any(word in name for word in ("gather", "reduce", "broadcast", "scatter", "all", "send", "recv", "barrier"))
    and not name.startswith("__")
]


class _Functional(TorchDispatchMode):
    """Records the collectives of DTensors, which are not methods of a process group."""

    def __init__(self, seen: list[tuple[str, str]]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional":
            self._seen.append(("functional", str(func)))
        return func(*args, **(kwargs or {}))


@contextmanager
def collectives() -> Iterator[list[tuple[str, str]]]:
    """Yields a list that receives the group and name of each collective that starts inside the block."""
    seen: list[tuple[str, str]] = []
    originals = {name: vars(dist.ProcessGroup)[name] for name in _METHODS}

    def recorded(name: str) -> Any:
        def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            seen.append((group.group_name, name))
            return originals[name].__get__(group)(*args, **kwargs)

        return method

    for name in _METHODS:
        setattr(dist.ProcessGroup, name, recorded(name))
    try:
        with _Functional(seen):
            yield seen
    finally:
        for name, method in originals.items():
            setattr(dist.ProcessGroup, name, method)


def groups_of(model: nn.Module) -> set[str]:
    """Returns the names of the groups that training uses."""
    names = {dist.group.WORLD.group_name}
    for module in model.modules():
        group = getattr(module, "process_group", None)
        names |= {group.group_name} if isinstance(group, dist.ProcessGroup) else set()
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            names |= {mesh.get_group(axis).group_name for axis in range(mesh.ndim)}
    return names


def saved_in_background(save: Callable[..., Any]) -> None:
    save(fast_saving=True).committed.result()


def sent(folder: str) -> dict[str, dict[str, set[str]]]:
    """Returns, by wrapping and call, what was sent in groups of training or by DTensors."""
    found: dict[str, dict[str, set[str]]] = {}
    for name in KINDS:
        model = wrap(name)
        optimizer = optimizer_of(model)
        train(model, optimizer)
        parts = {"model": model, "optimizer": optimizer}
        framework, path = FRAMEWORK_OF[name], f"{folder}/{name}"
        bytecheckpoint.save(path, parts, framework)  # creates our own groups
        of_training = groups_of(model) | {"functional"}
        save = partial(bytecheckpoint.save, path, parts, framework)
        load = partial(bytecheckpoint.load, path, parts, framework)
        calls: dict[str, Callable[[], Any]] = {
            "save": save,
            "load": load,
            "save in the background": partial(saved_in_background, save),
            "full state": partial(full_state, model, optimizer),
        }
        if framework == "fsdp":
            calls["FSDP's own save"] = partial(save, save_decomposed_model_optimizer=False)
            calls["FSDP's own load"] = partial(load, load_decomposed_model_optimizer=False)
        found[name] = {}
        for call, run in calls.items():
            with collectives() as seen:
                run()
            assert call == "full state" or any(group not in of_training for group, _ in seen), (name, call)
            found[name][call] = {method for group, method in seen if group in of_training}
    bytecheckpoint.shutdown()
    return found


def test_no_tensor_is_sent(tmp_path: Path) -> None:
    """Saves and loads send nothing over training's groups.

    The same record does see FSDP gather for its own state dict, and DTensors gather for a full one.
    """
    for of_rank in run_ranks(4, sent, str(tmp_path), limit_s=200):
        for name, calls in of_rank.items():
            for call in ("save", "load", "save in the background"):
                assert not calls[call], (name, call)
            is_whole = name == "ddp"
            assert bool(calls["full state"]) != is_whole, name
            if name.startswith("fsdp ") and name != "fsdp no shard":
                for call in ("FSDP's own save", "FSDP's own load"):
                    assert any("gather" in method for method in calls[call]), (name, call)
