# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of ours in other frameworks: one module for each, which imports its framework.

- ``bytecheckpoint.integrations.transformers``: a callback for transformers' ``Trainer``.
- ``bytecheckpoint.integrations.accelerate``: ``save_state`` and ``load_state`` of an ``Accelerator``.
- ``bytecheckpoint.integrations.lightning``: a strategy, and a plug-in for checkpoints.
- ``bytecheckpoint.integrations.torch_checkpointing``: a ``CheckpointManager``.
- ``bytecheckpoint.integrations.megatron``: strategies for Megatron-Core's ``dist_checkpointing``.

Importing a module whose framework is missing, or is built otherwise than the module needs it, is an ``ImportError``
that says what is there, what is wanted and what to do. The adapters for torchtitan and OLMo-core are
``bytecheckpoint.torchtitan`` and ``bytecheckpoint.olmo``.
"""

from __future__ import annotations

__all__: list[str] = []
