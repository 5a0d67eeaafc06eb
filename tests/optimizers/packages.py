# SPDX-License-Identifier: Apache-2.0
"""The packages of optimizers that are known, the optimizers in them, and how each is made and steps."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

__all__ = ["MODULES", "NO_FOREACH", "SHORT", "Make", "makes", "optimizers_of", "short_names", "versions"]

Make = Callable[[Any, nn.Module], Any]

# Module that has the optimizers: the distribution that brings it.
MODULES = {
    "torch.optim": "torch",
    "torchao.optim": "torchao",
    "schedulefree": "schedulefree",
    "prodigyopt": "prodigyopt",
    "adam_mini": "adam-mini",
    "bitsandbytes.optim": "bitsandbytes",
    "flashoptim": "flashoptim",
    "dadaptation": "dadaptation",
    "galore_torch": "galore-torch",
    "apollo_torch": "apollo-torch",
    "lion_pytorch": "lion-pytorch",
    "transformers.optimization": "transformers",
    "timm.optim": "timm",
    "pytorch_optimizer": "pytorch_optimizer",
}

# What the short form tries: all of a module, or these.
SHORT: dict[str, tuple[str, ...]] = {
    "torch.optim": (),
    "torchao.optim": (),
    "schedulefree": (),
    "prodigyopt": (),
    "adam_mini": (),
    "bitsandbytes.optim": (
        "Adam", "Adam8bit", "AdamW", "AdamW8bit", "PagedAdamW8bit", "AdEMAMix8bit", "LAMB8bit", "Lion8bit", "SGD8bit"
    ),
    "pytorch_optimizer": (
        "ADOPT", "AdEMAMix", "AdaBelief", "AdaFactor", "Adan", "AggMo", "CAME", "FlashAdamW", "Kron", "Lamb", "Lion",
        "Muon", "Ranger21", "SAM", "SOAP", "SPAM", "ScalableShampoo", "SophiaH", "StableAdamW", "StableSPAM",
    ),
}  # fmt: skip


def versions(modules: Collection[str]) -> dict[str, str]:
    """Returns the versions of the distributions that bring these modules."""
    return {
        distribution: importlib.metadata.version(distribution)
        for module, distribution in MODULES.items()
        if module in modules
    }


def optimizers_of(module: str) -> dict[str, Any]:
    """Returns the classes of optimizers that a module lists and its package defines, by name.

    Raises:
        ImportError: It is not installed, or lacks something here.
    """
    found = importlib.import_module(module)
    package = module.split(".")[0]
    return {
        name: kind
        for name, kind in sorted(vars(found).items())
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
        and kind.__module__.split(".")[0] == package
        and not name.startswith("_")
    }


def short_names(module: str) -> list[str]:
    """Returns the optimizers of a module that the short form tries, as ``module:class``.

    Raises:
        ImportError: The module is not installed.
    """
    return [f"{module}:{name}" for name in SHORT[module] or optimizers_of(module)]


# How they are made. An optimizer is made in the first of these ways with which it takes a step.


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def _others(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim != 2]


def _by_use(kind: Any, model: nn.Module) -> Any:
    return kind([{"params": _matrices(model), "use_muon": True}, {"params": _others(model), "use_muon": False}])


def _low_rank(kind: Any, model: nn.Module, **options: Any) -> Any:
    of_matrices = {"params": _matrices(model), "rank": 4, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}
    return kind([{"params": _others(model)}, {**of_matrices, **options}])


NO_FOREACH = "foreach=False"
_USUAL: dict[str, Make] = {
    "parameters": lambda kind, model: kind(model.parameters()),
    "lr": lambda kind, model: kind(model.parameters(), lr=1e-3),
    "momentum": lambda kind, model: kind(model.parameters(), lr=1e-3, momentum=0.9),
    "matrices": lambda kind, model: kind(_matrices(model)),
    "use_muon": _by_use,
    "base class": lambda kind, model: kind(model.parameters(), base_optimizer=torch.optim.AdamW),
    "around AdamW": lambda kind, model: kind(torch.optim.AdamW(model.parameters())),
    "with the model": lambda kind, model: kind(model, model.parameters(), base_optimizer=torch.optim.AdamW),
    NO_FOREACH: lambda kind, model: kind(model.parameters(), foreach=False),
    "num_data": lambda kind, model: kind(model.parameters(), num_data=16),
}
# These could be made in a usual way, too, but would not do what they are for, or not on a CPU.
_SPECIAL: dict[str, Make] = {
    "adam_mini:Adam_mini": lambda kind, model: kind(model.named_parameters(), dim=64, n_heads=4, verbose=False),
    "torch.optim:LBFGS": lambda kind, model: kind(model.parameters(), max_iter=4),
    "schedulefree:RAdamScheduleFree": lambda kind, model: kind(model.parameters(), silent_sgd_phase=False),
    "schedulefree:RAdamScheduleFreeClosure": lambda kind, model: kind(model.parameters(), silent_sgd_phase=False),
    # With larger triangles a step takes seconds.
    "pytorch_optimizer:Kron": lambda kind, model: kind(model.parameters(), max_size_triangular=8),
    "pytorch_optimizer:RAdam": lambda kind, model: kind(model.parameters(), degenerated_to_sgd=True),
    "pytorch_optimizer:Ranger21": lambda kind, model: kind(model.parameters(), num_iterations=100),
    "torch.optim:SGD": lambda kind, model: kind(model.parameters(), lr=0.1, momentum=0.9),
    **{f"galore_torch:{name}": _low_rank for name in ("GaLoreAdafactor", "GaLoreAdamW", "GaLoreAdamW8bit")},
    **{f"apollo_torch:{name}": _low_rank for name in ("GaLoreAdafactor", "GaLoreAdamW", "GaLoreAdamW8bit")},
    **{
        f"apollo_torch:{name}": lambda kind, model: _low_rank(kind, model, proj="random", scale_type="channel")
        for name in ("APOLLOAdamW", "QAPOLLOAdamW")
    },
    **{
        f"flashoptim:{name}": lambda kind, model: kind(
            model.parameters(), lr=1e-3, quantize=False, fused=False, master_weight_bits=None
        )
        for name in ("FlashAdam", "FlashAdamW", "FlashLion", "FlashSGD", "FlashSGDW")
    },
}


def makes(name: str) -> dict[str, Make]:
    """Returns the ways in which the optimizer may be made, those that come first are tried first."""
    return {"special": _SPECIAL[name]} if name in _SPECIAL else _USUAL
