# SPDX-License-Identifier: Apache-2.0
"""What a user passes to ``save`` and ``load``: live objects, and the framework that wraps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.near_names import did_you_mean
from bytecheckpoint.training_state.flat_parameters import has_flat_parameters

__all__ = ["FRAMEWORKS", "CheckpointState"]

FRAMEWORKS = ("ddp", "fsdp", "fsdp2")
_KEYS = ("model", "optimizer", "extra_state")


@dataclass(frozen=True)
class CheckpointState:
    """The parts of a checkpoint state. It has been checked that ``framework`` wraps the model.

    Attributes:
        framework: ``ddp``, ``fsdp`` or ``fsdp2``.
        model: A live module.
        optimizers: Live optimizers of its parameters; may be empty.
        extra_state: The extra state; None if the user passed none.
    """

    framework: str
    model: nn.Module
    optimizers: Sequence[Optimizer]
    extra_state: Mapping[str, Any] | None

    @classmethod
    def of(cls, checkpoint_state: Mapping[str, Any], framework: str) -> CheckpointState:
        """Checks what the user passed, and returns its parts.

        Raises:
            ConfigError: The framework is unknown or did not wrap the model. There are keys other than ``model``,
                ``optimizer`` and ``extra_state``, or values that are not live objects.
        """
        if framework not in FRAMEWORKS:
            raise ConfigError(
                f"framework={framework!r}: must be one of {', '.join(map(repr, FRAMEWORKS))}; a model that is wrapped "
                f"in another way can be saved with save_state_dict{did_you_mean(framework, FRAMEWORKS)}"
            )
        if not isinstance(checkpoint_state, Mapping):
            raise ConfigError(
                f"checkpoint_state is a {type(checkpoint_state).__name__}: it must be a dict with 'model', and "
                "optionally 'optimizer' and 'extra_state'"
            )
        unknown = [key for key in checkpoint_state if key not in _KEYS]
        if unknown or "model" not in checkpoint_state:
            raise ConfigError(
                f"checkpoint_state has the keys {[*checkpoint_state]}: it must have 'model', and may have "
                "'optimizer' and 'extra_state'; put anything else into extra_state"
            )
        model = checkpoint_state["model"]
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"checkpoint_state['model'] is a {type(model).__name__}: it must be the live module; for a state dict "
                "there is save_state_dict"
            )
        _check_wrapping(model, framework)
        optimizer = checkpoint_state.get("optimizer")
        optimizers = [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        if not isinstance(optimizers, (list, tuple)) or not all(isinstance(each, Optimizer) for each in optimizers):
            raise ConfigError(
                f"checkpoint_state['optimizer'] is a {type(optimizer).__name__}: it must be a live "
                "torch.optim.Optimizer, or a list of them"
            )
        for each in optimizers:
            _check_optimizer(each)
        extra_state = checkpoint_state.get("extra_state")
        if extra_state is not None and not isinstance(extra_state, Mapping):
            raise ConfigError(
                f"checkpoint_state['extra_state'] is a {type(extra_state).__name__}: it must be a dict; put the value "
                "under a key of a dict"
            )
        return cls(framework, model, optimizers, extra_state)


def _check_optimizer(optimizer: Optimizer) -> None:
    """Refuses a wrapper of an optimizer that has no parameter groups of its own."""
    if isinstance(getattr(optimizer, "param_groups", None), list):
        return
    inner = [name for name, value in vars(optimizer).items() if isinstance(value, Optimizer)]
    raise ConfigError(
        f"checkpoint_state['optimizer'] is a {type(optimizer).__name__} without param_groups: pass "
        + (f"the optimizer in it, its .{inner[0]}" if inner else "the optimizer that steps the parameters")
    )


def _check_wrapping(model: nn.Module, framework: str) -> None:
    is_fsdp1 = has_flat_parameters(model)
    is_ddp = isinstance(model, DistributedDataParallel)
    is_dtensor = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    is_like = {
        "ddp": not is_fsdp1 and not is_dtensor,
        "fsdp": is_fsdp1,
        "fsdp2": not is_fsdp1 and not is_ddp,
    }
    if is_like[framework]:
        return
    found = "FullyShardedDataParallel" if is_fsdp1 else "DistributedDataParallel" if is_ddp else "DTensors"
    found = found if is_fsdp1 or is_ddp or is_dtensor else "nothing"
    fits = next(name for name in FRAMEWORKS if is_like[name])
    raise ConfigError(
        f"framework={framework!r}, but the model, a {type(model).__name__}, is wrapped by {found}: pass "
        f"framework={fits!r}"
    )
