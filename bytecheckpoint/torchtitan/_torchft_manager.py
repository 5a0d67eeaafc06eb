# SPDX-License-Identifier: Apache-2.0
"""The checkpoint manager of torchtitan's TorchFT experiment, through our engine."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager

from bytecheckpoint.torchtitan._dcp_manager import BcpCheckpointing, EngineOptions, InitialLoadSpec
from bytecheckpoint.torchtitan._options import config_of, spec_of

__all__ = ["BcpTorchFTCheckpointManager"]


class BcpTorchFTCheckpointManager(BcpCheckpointing, TorchFTCheckpointManager):
    """``TorchFTCheckpointManager`` through our engine; see ``BcpCheckpointing``.

    The checkpoints of single replicas (their data loaders, at every step) go through our engine, too. As in theirs,
    these are saved in the background whatever ``async_mode`` says.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TorchFTCheckpointManager.Config):
        """Every field of ``TorchFTCheckpointManager.Config``, and two; see ``BcpCheckpointManager.Config``."""

        engine: EngineOptions = None
        initial_load_spec: InitialLoadSpec = None

        def __post_init__(self) -> None:
            TorchFTCheckpointManager.Config.__post_init__(self)
            config_of(self.engine)
            spec_of(self.initial_load_spec)
