# SPDX-License-Identifier: Apache-2.0
"""The checkpoint manager of torchtitan's TorchFT experiment, on our engine."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager

from bytecheckpoint.torchtitan._dcp_manager import BcpCheckpointing, EngineOptions
from bytecheckpoint.torchtitan._options import config_of

__all__ = ["BcpTorchFTCheckpointManager"]


class BcpTorchFTCheckpointManager(BcpCheckpointing, TorchFTCheckpointManager):
    """``TorchFTCheckpointManager`` on our engine; see ``BcpCheckpointing``.

    Checkpoints of single replicas (their data loaders, at every step) go through it, too, in the background whatever
    ``async_mode`` says, as theirs do.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TorchFTCheckpointManager.Config):
        """Every field of ``TorchFTCheckpointManager.Config``, and ``engine`` as of ``BcpCheckpointManager.Config``."""

        engine: EngineOptions = None

        def __post_init__(self) -> None:
            TorchFTCheckpointManager.Config.__post_init__(self)
            config_of(self.engine)
