# SPDX-License-Identifier: Apache-2.0
"""What the adapters rely on in torchtitan.

It is not in the adapters, because importing those imports torchtitan.
"""

from __future__ import annotations

from bytecheckpoint.probes.probe import Feature, Probe

__all__ = ["TORCHFT", "TORCHTITAN", "TORCHTITAN_0_1", "TORCHTITAN_0_2", "TORCHTITAN_FEATURES", "TRAINER"]

_ADVICE = (
    "Install torchtitan 0.3.0, or call bytecheckpoint.register() before training, which needs nothing of torchtitan "
    "(docs/integrations.md)."
)
_NEW, _OLD = "torchtitan.components.checkpointer", "torchtitan.components.checkpoint"
_SAVE = ("self", "state_dict", "checkpoint_id", "async_mode", "enable_garbage_collection", "to_hf")
_LOAD = ("self", "state_dict", "checkpoint_id", "from_hf", "from_quantized")

_COLLECTION = Probe(
    "torchtitan.tools.utils:GarbageCollection",
    "We call it after a save, as torchtitan's own manager does.",
    has=("collect",),
)


def _methods(manager: str, load: str) -> tuple[Probe, ...]:
    return (
        Probe(f"{manager}.dcp_save", "Ours saves in its place.", takes=_SAVE, takes_no_more=True),
        Probe(f"{manager}.dcp_load", "Ours loads in its place.", takes=_LOAD, takes_no_more=True),
        Probe(
            f"{manager}.{load}",
            "It finds the newest step and loads with these methods. Ours first looks whether there is a step.",
            takes=("self", "step"),
            takes_no_more=True,
            uses=("_find_load_step", "dcp_load"),
        ),
        Probe(
            f"{manager}._find_load_step",
            "Our method finds the newest step that loads.",
            takes=("self", "folder"),
            takes_no_more=True,
        ),
    )


TRAINER = Probe(
    "torch.distributed.fsdp:DataParallelMeshDims",
    "torchtitan's trainer imports it.",
    fallback="the checkpoint manager works, but torchtitan's trainer cannot be imported: install a newer torch",
)
TORCHTITAN = Feature(
    "bytecheckpoint.torchtitan",
    _ADVICE,
    (
        Probe(
            "torchtitan.config.override:override",
            "We register our manager with it.",
            takes=("target", "exact", "description"),
        ),
        Probe("torchtitan.config.override:derive", "It gives our configuration every setting of theirs."),
        *_methods(f"{_NEW}:CheckpointManager", "_load"),
        Probe(f"{_NEW}:CheckpointManager._save", "It saves by this method.", uses=("dcp_save",)),
        Probe(
            f"{_NEW}:CheckpointManager",
            "Our manager derives from it, and removes old steps in a thread of its own.",
            has=(
                *("Config", "enable", "folder", "states", "async_mode", "pg", "stager", "save_future", "keep_latest_k"),
                *("purge_thread", "purge_queue", "_purge_stale_checkpoints", "_should_purge", "_close"),
            ),
        ),
        Probe(f"{_NEW}:AsyncMode", "Its values say how to save.", has=("ASYNC", "ASYNC_WITH_PINNED_MEM")),
        Probe(f"{_NEW}:MODEL", "The model has this key."),
        Probe(f"{_NEW}:TRAIN_STATE", "The trainer has this key."),
        Probe(
            "torchtitan.components.metrics:BaseLogger.log",
            "The trainer's metrics logger gets the numbers of saves and loads.",
            takes=("self", "metrics", "step"),
            fallback="the trainer's metrics have no numbers of checkpoints",
        ),
        _COLLECTION,
        Probe(
            "torch.distributed:set_timeout",
            "torchtitan's trainer calls it after the first step.",
            fallback="the checkpoint manager works, but torchtitan's trainer ends with an AttributeError after the "
            "first step: install a newer torch, or give torch.distributed a set_timeout(timeout, group)",
        ),
        TRAINER,
    ),
)
TORCHFT = Feature(
    "BcpTorchFTCheckpointManager",
    _ADVICE,
    (
        Probe(
            "torchtitan.experiments.torchft.checkpoint:TorchFTCheckpointManager",
            "Our TorchFT manager derives from it and from our plain manager.",
            has=("Config", "dcp_save", "dcp_load"),
        ),
    ),
)

TORCHTITAN_0_2 = Feature(
    "bytecheckpoint.torchtitan.custom_import",
    "Install torchtitan 0.2.2, or call bytecheckpoint.register() before training (docs/integrations.md).",
    (
        *_methods(f"{_OLD}:CheckpointManager", "load"),
        Probe(f"{_OLD}:CheckpointManager.save", "It saves by this method.", uses=("dcp_save",)),
        Probe(
            f"{_OLD}:CheckpointManager",
            "Our adapter replaces these methods of it.",
            has=("enable", "folder", "states", "async_mode", "stager", "save_future", "close"),
        ),
        Probe(f"{_OLD}:AsyncMode", "Its values say how to save.", has=("ASYNC", "ASYNC_WITH_PINNED_MEM")),
        Probe(f"{_OLD}:MODEL", "The model has this key."),
        _COLLECTION,
    ),
)
TORCHTITAN_0_1 = Feature(
    "bytecheckpoint.torchtitan.custom_import",
    "Install torchtitan 0.2.2, or call bytecheckpoint.register() before training (docs/integrations.md).",
    (
        Probe(f"{_OLD}:CheckpointManager.save", "It calls DCP, which register() changes.", uses=("dcp", "async_save")),
        Probe(f"{_OLD}:CheckpointManager.load", "It calls DCP, which register() changes.", uses=("dcp", "load")),
    ),
)

# Features for the newest torchtitan. TORCHTITAN_0_1 and TORCHTITAN_0_2 are for versions without overrides.
TORCHTITAN_FEATURES = (TORCHTITAN, TORCHFT)
