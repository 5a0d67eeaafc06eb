# SPDX-License-Identifier: Apache-2.0
"""What ``bytecheckpoint.olmo`` relies on in OLMo-core."""

from __future__ import annotations

from bytecheckpoint.probes.probe import Feature, Probe

__all__ = ["OLMO", "OLMO_FEATURES"]

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

OLMO_FEATURES = (OLMO,)
