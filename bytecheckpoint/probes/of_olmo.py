# SPDX-License-Identifier: Apache-2.0
"""What ``bytecheckpoint.olmo`` relies on in OLMo-core."""

from __future__ import annotations

from bytecheckpoint.probes.probe import Feature, Probe

__all__ = ["OLMO", "OLMO_FEATURES", "OLMO_TIERS"]

_PACKAGE = "olmo_core.distributed.checkpoint"
_WRITES, _READS = ("DefaultSavePlanner", "RemoteFileSystemWriter", "dist_cp"), ("RemoteFileSystemReader",)
# Maps functions of OLMo-core to the names that they look up when they run.
_USES = {
    "save_state_dict": _WRITES,
    "async_save_state_dict": _WRITES,
    "save_model_and_optim_state": _WRITES,
    "async_save_model_and_optim_state": _WRITES,
    "load_state_dict": (*_READS, "dist_cp"),
    "load_model_and_optim_state": (*_READS, "dist_cp"),
    "get_checkpoint_metadata": _READS,
    "_load_unsharded_keys": _READS,
}

OLMO = Feature(
    "bytecheckpoint.olmo.install()",
    "Nothing was changed. Install OLMo-core with pip install ai2-olmo-core==3.0.0, or call bytecheckpoint.register(), "
    "and save and load with DCP itself.",
    (
        *(
            Probe(f"{_PACKAGE}:{user}", "It looks these up where ours are put when it runs.", uses=names)
            for user, names in _USES.items()
        ),
        Probe(
            _PACKAGE,
            "Our reader and writer replace these names.",
            has=("DefaultSavePlanner", "RemoteFileSystemWriter", "RemoteFileSystemReader", "dist_cp"),
        ),
        Probe(f"{_PACKAGE}:dist_cp.state_dict_loader.load", "Loads that name no planner get ours.", takes=("planner",)),
        Probe(
            f"{_PACKAGE}:RemoteFileSystemWriter",
            "Our class takes the same arguments.",
            takes=("path", "thread_count", "process_count", "process_group", "throttle_uploads"),
            takes_no_more=True,
        ),
        Probe(
            f"{_PACKAGE}:RemoteFileSystemReader",
            "Our class takes the same arguments.",
            takes=("path", "thread_count", "pre_download", "work_dir"),
            takes_no_more=True,
        ),
    ),
)

_CHECKPOINTER = "olmo_core.train.checkpoint:Checkpointer"

OLMO_TIERS = Feature(
    "bytecheckpoint.olmo.install(tiers=...)",
    "Nothing was changed. Leave tiers out.",
    (
        Probe(f"{_PACKAGE}:dist_cp.state_dict_saver.save", "Saves of steps in tiers are ours.", takes=("planner",)),
        Probe(f"{_PACKAGE}:dist_cp.state_dict_saver.async_save", "The same.", takes=("planner",)),
        Probe(
            f"{_CHECKPOINTER}.write_file",
            "A step is copied on when the last file was written.",
            takes=("self", "dir", "fname", "contents"),
            takes_no_more=True,
        ),
        Probe(f"{_CHECKPOINTER}._save_metadata", "It writes the last file of a step.", uses=("write_file",)),
        Probe(f"{_CHECKPOINTER}.METADATA_FNAME", "The name of that file.", text=".metadata.json"),
        Probe(f"{_CHECKPOINTER}.CHECKPOINT_DIR", "The names of steps.", text="step{step}"),
    ),
)

OLMO_FEATURES = (OLMO, OLMO_TIERS)
