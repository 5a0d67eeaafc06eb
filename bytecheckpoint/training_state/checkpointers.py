# SPDX-License-Identifier: Apache-2.0
"""``save`` and ``load`` for one framework each, under the names that ByteCheckpoint gives them."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any, ClassVar

from bytecheckpoint.staging.save_handle import SaveHandle
from bytecheckpoint.training_state.loading import LoadResult, load
from bytecheckpoint.training_state.saving import CheckpointReport, save

__all__ = ["DDPCheckpointer", "FSDP2Checkpointer", "FSDPCheckpointer"]


class _Checkpointer:
    framework: ClassVar[str]

    @classmethod
    def save(
        cls, ckpt_path: str | os.PathLike[str], checkpoint_state: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> SaveHandle[CheckpointReport]:
        """Calls ``bytecheckpoint.save`` for this framework, and takes its further arguments."""
        return save(ckpt_path, checkpoint_state, cls.framework, *args, **kwargs)

    @classmethod
    def load(
        cls, ckpt_path: str | os.PathLike[str], checkpoint_state: MutableMapping[str, Any], *args: Any, **kwargs: Any
    ) -> LoadResult:
        """Calls ``bytecheckpoint.load`` for this framework, and takes its further arguments."""
        return load(ckpt_path, checkpoint_state, cls.framework, *args, **kwargs)


class DDPCheckpointer(_Checkpointer):
    """Saves and loads models wrapped by DistributedDataParallel, or not wrapped at all."""

    framework = "ddp"


class FSDPCheckpointer(_Checkpointer):
    """Saves and loads models wrapped by FullyShardedDataParallel."""

    framework = "fsdp"


class FSDP2Checkpointer(_Checkpointer):
    """Saves and loads models with DTensors: ``fully_shard``, tensor parallelism."""

    framework = "fsdp2"
