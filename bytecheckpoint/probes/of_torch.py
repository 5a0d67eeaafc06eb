# SPDX-License-Identifier: Apache-2.0
"""What each feature of the package relies on in torch. Every private name of torch that we use is listed here."""

from __future__ import annotations

from bytecheckpoint.probes.probe import Feature, Probe

__all__ = [
    "DCP_ASYNC_SAVE",
    "ENTRY_POINTS",
    "EXCHANGE",
    "FRAMEWORKS",
    "FSDP1",
    "GROUPS",
    "LOADS_OF_GAPS",
    "META_TENSORS",
    "NAMES_OF_2_3",
    "PLAIN_CALLS",
    "PROCESS_MODE",
    "QUICK_CHECKS",
    "READING_TOGETHER",
    "REGISTER",
    "SAFE_FAILURES",
    "SAVE_AND_LOAD",
    "STAGING",
    "TORCH_FEATURES",
    "UNAWARE_RANKS",
    "WITHOUT_COLLECTIVES",
]

_DCP = "torch.distributed.checkpoint"
_SAVER, _LOADER, _PLANNERS = f"{_DCP}.state_dict_saver", f"{_DCP}.state_dict_loader", f"{_DCP}.planner_helpers"
_THREAD, _PROCESS = f"{_DCP}._async_thread_executor", f"{_DCP}._async_process_executor"
_C10D = "torch.distributed.distributed_c10d"
_GATHER_OF_DCP = "plans are exchanged by DCP's own gather, and each rank reads for itself"

SAVE_AND_LOAD = Feature(
    "saving and loading",
    "",
    (
        Probe(
            f"{_DCP}.filesystem:_StorageInfo",
            "DCP's own readers want objects of this class in Metadata.storage_data.",
            takes=("relative_path", "offset", "length"),
        ),
        Probe(f"{_PLANNERS}:_create_chunk_list", "It says which boxes of a tensor this rank holds.", takes=("tensor",)),
        Probe(f"{_PLANNERS}:_create_write_items", "It makes the WriteItems of a value.", takes=("fqn", "object")),
        Probe(
            f"{_DCP}.default_planner:DefaultSavePlanner",
            "If a planner overrides one of these methods, our planner uses its plan.",
            has=("_create_global_plan", "_dedup_save_plans"),
        ),
        Probe(
            "torch.distributed._shard.sharded_tensor:ShardedTensor",
            "We recognise it by its class, and copy one by these fields.",
            has=("_metadata", "_local_shards", "_process_group", "_init_rrefs"),
        ),
        Probe("torch:Tensor", "LocalChunks are tensors without memory.", has=("_make_wrapper_subclass",)),
        Probe("torch:Tensor", "A Subscriber sees that its tensors were written to.", has=("_version",)),
        Probe(
            "torch.distributed.tensor:DTensor",
            "Its specification says in which order the axes of its mesh shard a dim.",
            has=("_spec", "device_mesh", "placements", "to_local"),
        ),
        Probe("torch.ops:aten", "LocalChunks are copied to another dtype by this operator.", has=("_to_copy",)),
        Probe(
            "torch:_C", "Its reader returns the pickle of an archive as torch.load sees it.", has=("PyTorchFileReader",)
        ),
    ),
)

_GROUPS = (
    Probe(
        f"{_C10D}:ProcessGroup",
        "We make a gloo group from these without torch's registry, and ask it for its devices.",
        has=("_set_default_backend", "_register_backend", "_set_group_name", "_get_backend", "_device_types"),
    ),
    Probe(
        f"{_C10D}:_process_group_name",
        "It names a group by the number of groups on each rank; we pass a name of our own.",
        takes=("ranks", "use_hashed_name"),
    ),
    Probe(f"{_C10D}:ProcessGroupGloo", "Objects and shares of plans go over gloo, in host memory."),
    Probe(f"{_C10D}:_get_default_store", "Ranks of a group of our own find each other by the store of the job."),
    Probe(f"{_C10D}:_get_object_coll_device", "Ranks agree on a group of their own on the device that theirs serves."),
    Probe(f"{_C10D}:_world", "A group that is not in this map has been destroyed.", has=("pg_map",)),
)
GROUPS = Feature(
    "process groups of our own (entry points and register() with several ranks, new_group)",
    "Pass storage_writer, storage_reader and planner to dcp.save and dcp.load instead.",
    _GROUPS,
)

EXCHANGE = Feature(
    "the exchange of plans between ranks by C++ (with dcp.save and dcp.load without register())",
    "",
    tuple(
        Probe(
            flow,
            "Its local variables name the ranks of the call that runs our hooks.",
            variables=("process_group", "no_dist", "coordinator_rank"),
            fallback=_GATHER_OF_DCP,
        )
        for flow in (f"{_SAVER}:_save_state_dict", f"{_LOADER}:_load_state_dict")
    ),
)
READING_TOGETHER = Feature(
    "reading together: each byte is read by one rank",
    "",
    (
        Probe(
            f"{_LOADER}:_load_state_dict",
            "Its local variables name the reader and the planner of a load. It runs nothing but finish_plan between "
            "planning and read_data.",
            variables=("storage_reader", "planner"),
            calls=("finish_plan", "read_data"),
            fallback="each rank reads for itself",
        ),
    ),
)
PLAIN_CALLS = Feature(
    "dcp.save and dcp.load without a planner, planned by ours",
    "",
    tuple(
        Probe(
            flow,
            "Its local function local_step asks our writer or reader first, and shares the variable of the planner.",
            variables=("local_step", "planner"),
            calls=calls,
            fallback="DCP's own planner plans, which takes longer",
        )
        for flow, calls in (
            (f"{_SAVER}:_save_state_dict", ("storage_meta", "set_up_planner", "create_local_plan")),
            (f"{_LOADER}:_load_state_dict", ("read_metadata", "set_up_planner", "create_local_plan")),
        )
    ),
)
LOADS_OF_GAPS = Feature(
    "loads of checkpoints that lack elements of a tensor",
    "Load the tensors that are whole.",
    (
        Probe(
            f"{_LOADER}:_load_state_dict",
            "Its local variable tells whether DCP's own planner plans. It leaves out absent keys in silence.",
            variables=("planner",),
        ),
    ),
)
SAFE_FAILURES = Feature(
    "failures of hooks that cannot be pickled (with dcp.save and dcp.load without register())",
    "",
    tuple(
        Probe(
            flow,
            "Its local variable exchanges what hooks return or raise between ranks.",
            variables=("distW",),
            fallback="if a hook raises what cannot be pickled, the other ranks wait for that rank",
        )
        for flow in (f"{_SAVER}:_save_state_dict", f"{_LOADER}:_load_state_dict")
    ),
)
UNAWARE_RANKS = Feature(
    "the error of dcp.save on ranks without a process group",
    "",
    (
        Probe(
            f"{_SAVER}:save.__wrapped__",
            "The arguments of this wrapper tell whether the caller of dcp.save passed no_dist.",
            takes=("no_dist",),
            fallback="such ranks save as if each were alone, with a warning of DCP",
        ),
    ),
)
WITHOUT_COLLECTIVES = Feature(
    "checks of a plan before a byte is written",
    "",
    (
        Probe(
            f"{_SAVER}:_save_state_dict",
            "Its local variables tell whether each rank saves on its own, and what another planner has planned.",
            variables=("use_collectives", "global_metadata"),
            fallback="the same is checked after the writing, and partial tensors need "
            "Config(allow_partial_tensors=True) also with use_collectives=False",
        ),
    ),
)

_WRAPPER = f"{_DCP}.utils:_DistWrapper"
_SAVE_ARGUMENTS = ("state_dict", "storage_writer", "process_group", "no_dist", "planner", "use_collectives")
_LOAD_ARGUMENTS = ("state_dict", "storage_reader", "process_group", "no_dist", "planner")
ENTRY_POINTS = Feature(
    "save_state_dict, load_state_dict, bytecheckpoint.save and load",
    "Pass storage_writer, storage_reader and planner to dcp.save and dcp.load instead.",
    (
        Probe(
            f"{_SAVER}:_save_state_dict",
            "It runs the hooks of a save; we call it with a group wrapper of our own.",
            takes=_SAVE_ARGUMENTS,
            uses=("_DistWrapper", "_dcp_method_logger"),
        ),
        Probe(
            f"{_LOADER}:_load_state_dict",
            "It runs the hooks of a load; we call it with a group wrapper of our own.",
            takes=_LOAD_ARGUMENTS,
            uses=("_DistWrapper", "_dcp_method_logger"),
        ),
        Probe(
            _WRAPPER,
            "Our group wrapper derives from it, and sends objects in another way.",
            takes=("group", "use_dist", "coordinator_rank"),
            has=(
                *(
                    "rank",
                    "get_world_size",
                    "is_coordinator",
                    "global_coordinator_rank",
                    "gather_object",
                    "all_gather_object",
                ),
                *("scatter_object", "broadcast_object", "barrier"),
            ),
        ),
    ),
)

REGISTER = Feature(
    "register()",
    "Nothing was changed. Pass storage_writer, storage_reader and planner to each call instead.",
    (
        Probe(
            f"{_SAVER}:save",
            "It asks _storage_setup for a writer, and runs the hooks of a save.",
            uses=("_storage_setup", "_stateful_to_state_dict", "_save_state_dict"),
        ),
        Probe(
            f"{_SAVER}:_storage_setup",
            "We replace it, and call the original for URLs.",
            takes=("storage", "checkpoint_id", "reader"),
            takes_no_more=True,
        ),
        Probe(
            f"{_SAVER}:_save_state_dict",
            "It makes the planner of a save. We replace it, and call the original.",
            takes=("storage_writer", "planner"),
            uses=("DefaultSavePlanner", "_DistWrapper"),
        ),
        Probe(f"{_SAVER}:_stateful_to_state_dict", "Its first step may fail; calls of async_save are counted there."),
        Probe(
            f"{_SAVER}:async_save",
            "It makes the stager and the executor. Its local variables tell our stager what the caller asked for.",
            uses=("DefaultStager", "_ThreadBasedAsyncCheckpointExecutor", "_stateful_to_state_dict"),
            variables=("process_group", "no_dist", "checkpoint_id", "storage_writer", "async_checkpointer_type"),
        ),
        Probe(
            f"{_SAVER}:_ThreadBasedAsyncCheckpointExecutor.execute_save",
            "Our executor chooses writer and planner before it hands the save to a thread of our own.",
            takes=("checkpoint_id", "storage_writer", "planner", "process_group", "no_dist"),
            uses=("_executor",),
        ),
        Probe(f"{_LOADER}:load", "It asks this for a reader.", uses=("_storage_setup", "_load_state_dict", "Stateful")),
        Probe(
            f"{_LOADER}:_load_state_dict",
            "It makes the planner of a load. We run it again if a newer save was committed meanwhile.",
            takes=("storage_reader", "planner"),
            uses=("DefaultLoadPlanner", "_DistWrapper"),
        ),
    ),
)

QUICK_CHECKS = Feature(
    "quick checks which values are Stateful, in calls of DCP with our classes",
    "",
    tuple(
        Probe(flow, why, uses=(name,), fallback="a call takes 30 microseconds for each key of the top dict")
        for flow, why, name in (
            (f"{_SAVER}:save", "Its first step copies the state.", "_stateful_to_state_dict"),
            (f"{_LOADER}:load", "It asks which values are Stateful.", "Stateful"),
        )
    ),
)

STAGING = Feature(
    "background saves",
    "",
    (
        Probe("torch.distributed.tensor:DTensor", "A copy of a DTensor is made of its specification.", has=("_spec",)),
        Probe(
            f"{_DCP}._state_dict_stager:StateDictStager",
            "It copies objects with tensors that autograd made, which copy.deepcopy refuses.",
            has=("stage", "close"),
            fallback="objects with tensors that autograd made cannot be staged; the error names the key",
        ),
    ),
)
DCP_ASYNC_SAVE = Feature(
    "dcp.async_save with BcpStager",
    "Use async_save_state_dict instead.",
    (
        Probe(
            f"{_SAVER}:async_save",
            "Its local variables name the ranks, the path, the kind of executor and the stager of the save.",
            variables=(
                *("process_group", "no_dist", "checkpoint_id", "storage_writer", "async_checkpointer_type"),
                "async_stager",
            ),
        ),
        Probe(
            f"{_SAVER}:async_save",
            "Its local variables are the staged state and the future of the save.",
            variables=("staging_future_or_state_dict", "upload_future"),
            fallback="the end of a save is noticed by polling, at most some seconds late",
        ),
        Probe(
            f"{_SAVER}:save",
            "Its local variables name the ranks and the state of the save that begins.",
            variables=("process_group", "no_dist", "state_dict"),
        ),
        Probe(
            f"{_THREAD}:save_wrapper",
            "A background save runs as long as a function of this module does.",
            uses=("save",),
        ),
    ),
)
PROCESS_MODE = Feature(
    "saves in a process of their own (AsyncCheckpointerType.PROCESS)",
    "Save in a thread instead: async_checkpointer_type=AsyncCheckpointerType.THREAD.",
    (
        Probe(f"{_PROCESS}:_CHECKPOINT_PROCESS", "DCP keeps its process there, and would use it with other ranks."),
        Probe(
            f"{_SAVER}:async_save",
            "It makes the executor. Its local variable tells that the caller asked for a process.",
            uses=("_ProcessBasedAsyncCheckpointExecutor",),
            variables=("async_checkpointer_type",),
        ),
        Probe(
            f"{_SAVER}:_ProcessBasedAsyncCheckpointExecutor.execute_save",
            "Our executor chooses writer and planner before it hands the save to the process.",
            takes=("checkpoint_id", "storage_writer", "planner", "process_group", "no_dist"),
            uses=("_executor",),
        ),
    ),
)

NAMES_OF_2_3 = Feature(
    "lists in checkpoints of torch before 2.4",
    "",
    (
        Probe(
            f"{_DCP}._nested_dict:flatten_state_dict",
            "It can flatten as torch 2.3 did.",
            fallback="lists in such checkpoints are missing keys",
        ),
        Probe(
            f"{_DCP}._version:_derived_version",
            "It switches flatten_state_dict to the names of torch 2.3.",
            fallback="lists in such checkpoints are missing keys",
        ),
    ),
)
META_TENSORS = Feature(
    "loads into tensors on the meta device, with a process group",
    "Make the tensors with to_empty before.",
    (Probe(f"{_PLANNERS}:_init_state_dict", "It makes tensors on the device of the default group."),),
)

FRAMEWORKS = Feature(
    "bytecheckpoint.save and load",
    "Use save_state_dict and load_state_dict instead.",
    (
        Probe(
            "torch.nn:Module",
            "We save parameters and buffers from their own memory, unless hooks or methods of the user change them.",
            has=(
                *("_buffers", "_parameters", "_non_persistent_buffers_set", "_state_dict_hooks"),
                *("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
                *("_load_from_state_dict", "_save_to_state_dict"),
            ),
        ),
        Probe(
            "torch.optim:Optimizer",
            "We save an optimizer that has state dict hooks through its state_dict().",
            has=(
                *("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
                *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
            ),
        ),
        Probe(
            "torch.nn.modules.module:_EXTRA_STATE_KEY_SUFFIX",
            "We recognise the extra state of a module by the end of its key.",
            text="_extra_state",
        ),
        Probe(
            "torch.nn:Module.state_dict",
            "This attribute of a state dict holds the versions of modules, which their load hooks may need.",
            uses=("_metadata",),
        ),
        Probe(
            "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:_CHECKPOINT_WRAPPED_MODULE",
            "The module that activation checkpointing wraps has this name.",
            text="_checkpoint_wrapped_module",
        ),
        Probe(
            "torch._dynamo.eval_frame:OptimizedModule",
            "The module that torch.compile wraps has this name.",
            has=("_orig_mod",),
            is_lazy=True,
        ),
    ),
)
FSDP1 = Feature(
    "FullyShardedDataParallel (FSDP1)",
    "Use fully_shard (FSDP2).",
    (
        Probe(
            "torch.distributed.fsdp._flat_param:FlatParameter",
            "It tells which elements of which parameters this rank holds.",
            has=(
                *("_param_extensions", "_param_infos", "_shared_param_infos", "_numels_with_padding"),
                *("_is_padding_mask", "_shapes", "_strides", "_fqns", "_params", "_sharded_size", "_local_shard"),
            ),
        ),
        Probe(
            "torch.distributed.fsdp._flat_param:FlatParamHandle",
            "It tells the state of a flat parameter, and frees gathered elements.",
            has=(
                *("flat_param", "uses_sharded_strategy", "process_group", "rank", "_training_state", "reshard"),
                *("post_reshard", "_prefetched"),
            ),
        ),
        Probe(
            "torch.distributed.fsdp._common_utils:HandleTrainingState",
            "A unit may be changed only while its state is IDLE.",
            has=("IDLE",),
        ),
        Probe(
            "torch.distributed.fsdp._common_utils:FSDP_WRAPPED_MODULE",
            "The module that FSDP1 wraps has this name.",
            text="_fsdp_wrapped_module",
        ),
        Probe("torch.distributed.fsdp:FullyShardedDataParallel", "It has the handle of its unit.", has=("_handle",)),
    ),
)

TORCH_FEATURES = (
    *(SAVE_AND_LOAD, ENTRY_POINTS, REGISTER, QUICK_CHECKS, PLAIN_CALLS, GROUPS, EXCHANGE, READING_TOGETHER),
    *(LOADS_OF_GAPS, SAFE_FAILURES, UNAWARE_RANKS, WITHOUT_COLLECTIVES, STAGING, DCP_ASYNC_SAVE, PROCESS_MODE),
    *(NAMES_OF_2_3, META_TENSORS),
    *(FRAMEWORKS, FSDP1),
)
