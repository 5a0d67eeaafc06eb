# SPDX-License-Identifier: Apache-2.0
"""``save`` and ``load`` for one framework each, under the names that ByteCheckpoint gives them."""

from __future__ import annotations

from typing import Any, ClassVar

from bytecheckpoint.staging.save_handle import SaveHandle
from bytecheckpoint.training_state.checkpoint_report import CheckpointReport
from bytecheckpoint.training_state.loading import LoadResult, load
from bytecheckpoint.training_state.saving import save

__all__ = ["DDPCheckpointer", "FSDP2Checkpointer", "FSDPCheckpointer"]


def _path_and_state(call: str, args: tuple[Any, ...], arguments: dict[str, Any]) -> tuple[Any, Any, tuple[Any, ...]]:
    """Returns the path, the state and the other positional arguments of a call; ``path`` is what others call it.

    Raises:
        TypeError: One of them is missing, or the path is passed under both names.
    """
    if "path" in arguments:
        if args or "ckpt_path" in arguments:
            raise TypeError(f"{call}() got both path and ckpt_path, which mean the same: pass ckpt_path alone")
        arguments["ckpt_path"] = arguments.pop("path")
    found = list(args)
    for position, name in enumerate(("ckpt_path", "checkpoint_state")):
        if len(found) > position:
            continue
        if name not in arguments:
            raise TypeError(f"{call}() needs {name}: {call}(ckpt_path, checkpoint_state, ...)")
        found.insert(position, arguments.pop(name))
    return found[0], found[1], tuple(found[2:])


class _Checkpointer:
    framework: ClassVar[str]

    @classmethod
    def save(cls, *args: Any, **kwargs: Any) -> SaveHandle[CheckpointReport]:
        """Calls ``bytecheckpoint.save`` for this framework: ``save(ckpt_path, checkpoint_state, ...)``.

        Takes its further arguments, and ``path`` as another name of ``ckpt_path``.
        """
        path, state, more = _path_and_state("save", args, kwargs)
        return save(path, state, cls.framework, *more, **kwargs)

    @classmethod
    def load(cls, *args: Any, **kwargs: Any) -> LoadResult:
        """Calls ``bytecheckpoint.load`` for this framework: ``load(ckpt_path, checkpoint_state, ...)``.

        Takes its further arguments, and ``path`` as another name of ``ckpt_path``.
        """
        path, state, more = _path_and_state("load", args, kwargs)
        return load(path, state, cls.framework, *more, **kwargs)


class DDPCheckpointer(_Checkpointer):
    """Saves and loads models wrapped by DistributedDataParallel, or not wrapped at all."""

    framework = "ddp"


class FSDPCheckpointer(_Checkpointer):
    """Saves and loads models wrapped by FullyShardedDataParallel."""

    framework = "fsdp"


class FSDP2Checkpointer(_Checkpointer):
    """Saves and loads models with DTensors: ``fully_shard``, tensor parallelism."""

    framework = "fsdp2"
