# SPDX-License-Identifier: Apache-2.0
"""What the adapters rely on in torchtitan.

It is not in the adapters, because importing those imports torchtitan.
"""

from __future__ import annotations

from bytecheckpoint.probes.probe import Feature, Probe

__all__ = ["TORCHFT", "TORCHTITAN", "TORCHTITAN_FEATURES", "TRAINER"]

_ADVICE = (
    "Install torchtitan 0.3.0, or call bytecheckpoint.register() before training, which needs nothing of torchtitan "
    "(docs/integrations.md)."
)
_MODULE = "torchtitan.components.checkpointer"
_MANAGER = f"{_MODULE}:CheckpointManager"
_SAVE = ("self", "state_dict", "checkpoint_id", "async_mode", "enable_garbage_collection", "to_hf")
_LOAD = ("self", "state_dict", "checkpoint_id", "from_hf", "from_quantized")

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
        Probe(f"{_MANAGER}.dcp_save", "Ours saves in its place.", takes=_SAVE, takes_no_more=True),
        Probe(f"{_MANAGER}.dcp_load", "Ours loads in its place.", takes=_LOAD, takes_no_more=True),
        Probe(
            f"{_MANAGER}._load",
            "It finds the newest step and loads with these methods. Ours first looks whether there is a step.",
            takes=("self", "step"),
            takes_no_more=True,
            uses=("_find_load_step", "_create_checkpoint_id", "dcp_load"),
        ),
        Probe(
            f"{_MANAGER}._find_load_step",
            "Our method finds the newest step that loads.",
            takes=("self", "folder"),
            takes_no_more=True,
        ),
        Probe(
            f"{_MANAGER}._create_checkpoint_id",
            "Our method says where a step of tiers is.",
            takes=("self", "step", "folder"),
            takes_no_more=True,
        ),
        Probe(f"{_MANAGER}._save", "It saves by this method.", uses=("dcp_save",)),
        Probe(
            _MANAGER,
            "Our manager derives from it, and removes old steps in a thread of its own.",
            has=(
                *("Config", "enable", "folder", "states", "async_mode", "pg", "stager", "save_future", "keep_latest_k"),
                *("purge_thread", "purge_queue", "_purge_stale_checkpoints", "_should_purge", "_close"),
            ),
        ),
        Probe(
            f"{_MODULE}:BaseCheckpointManager", "The override is for the configurations of its kinds.", has=("Config",)
        ),
        Probe(f"{_MODULE}:AsyncMode", "Its values say how to save.", has=("ASYNC", "ASYNC_WITH_PINNED_MEM")),
        Probe(f"{_MODULE}:MODEL", "The model has this key."),
        Probe(f"{_MODULE}:TRAIN_STATE", "The trainer has this key."),
        Probe(
            "torchtitan.components.metrics:BaseLogger.log",
            "The trainer's metrics logger gets the numbers of saves and loads.",
            takes=("self", "metrics", "step"),
            fallback="the trainer's metrics have no numbers of checkpoints",
        ),
        Probe(
            "torchtitan.tools.utils:GarbageCollection",
            "We call it after a save, as torchtitan's own manager does.",
            has=("collect",),
        ),
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

TORCHTITAN_FEATURES = (TORCHTITAN, TORCHFT)
