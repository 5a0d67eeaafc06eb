# SPDX-License-Identifier: Apache-2.0
"""``save`` and ``load`` of one framework each, under the names that ByteCheckpoint gives them."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any, ClassVar

from bytecheckpoint.frameworks.loading import LoadResult, load
from bytecheckpoint.frameworks.saving import CheckpointReport, save
from bytecheckpoint.save_handle import SaveHandle

__all__ = ["DDPCheckpointer", "FSDP2Checkpointer", "FSDPCheckpointer"]


class _Checkpointer:
    framework: ClassVar[str]

    @classmethod
    def save(
        cls, ckpt_path: str | os.PathLike[str], checkpoint_state: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> SaveHandle[CheckpointReport]:
        """As ``bytecheckpoint.save``, whose further arguments it takes."""
        return save(ckpt_path, checkpoint_state, cls.framework, *args, **kwargs)

    @classmethod
    def load(
        cls, ckpt_path: str | os.PathLike[str], checkpoint_state: MutableMapping[str, Any], *args: Any, **kwargs: Any
    ) -> LoadResult:
        """As ``bytecheckpoint.load``, whose further arguments it takes."""
        return load(ckpt_path, checkpoint_state, cls.framework, *args, **kwargs)


class DDPCheckpointer(_Checkpointer):
    """Of models wrapped by DistributedDataParallel, or not at all."""

    framework = "ddp"


class FSDPCheckpointer(_Checkpointer):
    """Of models wrapped by FullyShardedDataParallel."""

    framework = "fsdp"


class FSDP2Checkpointer(_Checkpointer):
    """Of models with DTensors: ``fully_shard``, tensor parallelism."""

    framework = "fsdp2"
