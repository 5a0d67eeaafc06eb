# SPDX-License-Identifier: Apache-2.0
"""What ``bytecheckpoint.integrations`` relies on in the frameworks that they are for.

It is not in the integrations, because importing those imports the frameworks.
"""

from __future__ import annotations

from bytecheckpoint.probes.probe import Feature, Probe

__all__ = [
    "ACCELERATE",
    "ACCELERATE_FUNCTIONS",
    "INTEGRATION_FEATURES",
    "LIGHTNING",
    "MEGATRON",
    "TORCH_CHECKPOINTING",
    "TRANSFORMERS",
]

_TRAINER = "transformers.trainer:Trainer"
_ACCELERATOR = "accelerate:Accelerator"
_FSDP = "accelerate.utils"
_MANAGER = "torch_checkpointing:CheckpointManager"
_MEGATRON = "megatron.core.dist_checkpointing"
_TORCH_DIST = f"{_MEGATRON}.strategies.torch"
_STRATEGY = "lightning.pytorch.strategies:ModelParallelStrategy"

TRANSFORMERS = Feature(
    "bytecheckpoint.integrations.transformers",
    "Install transformers 5 or later (pip install 'transformers>=5' accelerate).",
    (
        Probe(
            "transformers:TrainerCallback",
            "Our callback derives from it.",
            has=("on_init_end", "on_train_begin", "on_epoch_begin", "on_step_begin", "on_save", "on_train_end"),
        ),
        Probe(
            "transformers:TrainingArguments",
            "The callback takes these settings over, and reads where and when Trainer saves.",
            has=("save_only_model", "save_total_limit", "output_dir", "ignore_data_skip"),
        ),
        Probe(
            "transformers:TrainerState",
            "It says which step is saved or resumed, and which was the best.",
            has=("global_step", "epoch", "best_model_checkpoint", "is_hyper_param_search"),
        ),
        Probe(
            f"{_TRAINER}.train",
            "It restores the counters and skips data before on_train_begin.",
            takes=("resume_from_checkpoint",),
        ),
        Probe("accelerate.state:AcceleratorState", "It says whether FSDP or DeepSpeed shard the model."),
    ),
)
ACCELERATE = Feature(
    "bytecheckpoint.integrations.accelerate",
    "Install accelerate 1.10 or later (pip install 'accelerate>=1.10').",
    (
        Probe(
            f"{_ACCELERATOR}.save_state", "Ours takes its place.", takes=("self", "output_dir", "safe_serialization")
        ),
        Probe(f"{_ACCELERATOR}.load_state", "Ours takes its place.", takes=("self", "input_dir", "load_kwargs")),
        Probe(f"{_ACCELERATOR}.end_training", "Ours first waits for saves."),
        Probe(
            _ACCELERATOR,
            "It has what belongs to a checkpoint. Accelerate has no public names for most of it.",
            has=(
                *("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects", "scaler", "step"),
                *("_save_model_state_pre_hook", "_load_model_state_pre_hook"),
                *("project_configuration", "project_dir", "distributed_type"),
            ),
        ),
        Probe(
            "accelerate.utils:ProjectConfiguration",
            "It says how checkpoints are called, and how many are kept.",
            has=("automatic_checkpoint_naming", "total_limit", "iteration", "save_on_each_node"),
        ),
        Probe(
            "accelerate.optimizer:AcceleratedOptimizer",
            "It has the optimizer that it wraps.",
            has=("optimizer",),
        ),
    ),
)
ACCELERATE_FUNCTIONS = Feature(
    "bytecheckpoint.integrations.accelerate.install_in_functions",
    "Install accelerate 1.10 or later (pip install 'accelerate>=1.10').",
    tuple(
        Probe(f"{_FSDP}:{name}", "It must look the classes up where we put ours.", uses=uses)
        for name, uses in {
            "save_fsdp_model": ("FileSystemWriter", "DefaultSavePlanner"),
            "save_fsdp_optimizer": ("FileSystemWriter", "DefaultSavePlanner"),
            "load_fsdp_model": ("FileSystemReader", "DefaultLoadPlanner"),
            "load_fsdp_optimizer": ("FileSystemReader",),
        }.items()
    ),
)
LIGHTNING = Feature(
    "bytecheckpoint.integrations.lightning",
    "Install lightning 2.5 or later (pip install 'lightning>=2.5'; pytorch_lightning is another package).",
    (
        Probe(
            _STRATEGY,
            "Our strategy derives from it.",
            takes=("save_distributed_checkpoint",),
            has=("model", "optimizers", "lightning_module", "broadcast", "is_global_zero", "on_exception", "teardown"),
        ),
        Probe(f"{_STRATEGY}.save_checkpoint", "Ours saves in its place.", takes=("self", "checkpoint", "filepath")),
        Probe(f"{_STRATEGY}.load_checkpoint", "Ours loads in its place.", takes=("self", "checkpoint_path")),
        Probe(f"{_STRATEGY}.remove_checkpoint", "Ours removes in its place.", takes=("self", "filepath")),
        Probe(f"{_STRATEGY}.on_train_batch_start", "Ours sets the random numbers of a resumed run."),
        Probe(
            "lightning.pytorch.plugins.io:CheckpointIO",
            "Our plug-in for other strategies derives from it.",
            has=("save_checkpoint", "load_checkpoint", "remove_checkpoint", "teardown"),
        ),
    ),
)
MEGATRON = Feature(
    "bytecheckpoint.integrations.megatron",
    "Install megatron-core 0.16 or later (pip install 'megatron-core>=0.16').",
    (
        Probe(f"{_TORCH_DIST}:TorchDistSaveShardedStrategy.save", "Ours saves in its place."),
        Probe(
            f"{_TORCH_DIST}:TorchDistSaveShardedStrategy.async_save",
            "Ours saves in its place.",
            takes=("self", "sharded_state_dict", "checkpoint_dir"),
        ),
        Probe(
            f"{_TORCH_DIST}:TorchDistSaveShardedStrategy",
            "Our strategy derives from it.",
            takes=("backend", "version"),
            has=("separation_hint",),
        ),
        Probe(
            f"{_TORCH_DIST}:TorchDistLoadShardedStrategy.load",
            "Ours loads in its place.",
            takes=("self", "sharded_state_dict", "checkpoint_dir"),
        ),
        Probe(
            f"{_MEGATRON}.mapping:ShardedTensor",
            "It says which part of a tensor a rank has.",
            has=(
                *("key", "data", "dtype", "global_shape", "global_offset", "replica_id"),
                *("prepend_axis_num", "allow_shape_mismatch", "init_data"),
            ),
        ),
        Probe(
            f"{_MEGATRON}.mapping:ShardedObject",
            "It says under which key an object is stored.",
            has=("unique_key", "data", "replica_id"),
        ),
        Probe(f"{_MEGATRON}.mapping:is_main_replica", "It says whether a rank saves a part.", takes=("replica_id",)),
        Probe(f"{_MEGATRON}.utils:force_all_tensors_to_non_fp8", "It gives loads plain tensors to fill."),
        Probe(
            f"{_MEGATRON}.strategies.async_utils:AsyncRequest",
            "A save in the background is handed to Megatron as one.",
            has=("async_fn", "async_fn_args", "finalize_fns"),
        ),
    ),
)
TORCH_CHECKPOINTING = Feature(
    "bytecheckpoint.integrations.torch_checkpointing",
    "Install torch_checkpointing 0.1.1 (pip install torch_checkpointing==0.1.1), or another one that these hold for.",
    (
        Probe(
            f"{_MANAGER}.save",
            "Ours saves in its place.",
            takes=("self", "checkpoint_id", "checkpoint"),
            takes_no_more=True,
        ),
        Probe(
            f"{_MANAGER}.load",
            "Ours loads in its place.",
            takes=("self", "checkpoint_id", "into", "map_location", "strict", "metadata_format"),
            takes_no_more=True,
        ),
        Probe(f"{_MANAGER}.prewarm_staging", "Ours takes its place.", takes=("self", "checkpoint")),
        Probe(f"{_MANAGER}.lock", "Ours waits in its place.", takes=("self",)),
        Probe(f"{_MANAGER}.close", "Ours waits in its place.", takes=("self",)),
        Probe(
            f"{_MANAGER}.Config",
            "It says what belongs to a checkpoint. What our engine cannot use of it is refused.",
            has=(
                *("items", "default", "save", "storage_config", "subprocess_init_fn"),
                *("pre_finalize_callback", "finalize_callback"),
            ),
        ),
        Probe(
            "torch_checkpointing:ItemSpec",
            "It says how an item is saved.",
            has=("layout", "resharder", "required"),
        ),
        Probe(
            "torch_checkpointing.config:SyncCheckpointSaverConfig",
            "It says to save in the foreground, and how long to wait.",
            has=("wait_timeout_secs",),
        ),
        Probe("torch_checkpointing.config:AsyncCheckpointSaverConfig", "It says to save in the background."),
        Probe(
            "torch_checkpointing.checkpoint_writer:CheckpointWriterConfig",
            "A manager of theirs that only loads has no barrier.",
            takes=("barrier_config", "write_to_temp_dir"),
        ),
        Probe("torch_checkpointing.default_resharder:DefaultResharder", "It takes plain tensors for whole ones."),
        Probe("torch_checkpointing.storage.filesystem:LocalFileSystemStorageConfig", "It says nothing that we lack."),
    ),
)

INTEGRATION_FEATURES = (TRANSFORMERS, ACCELERATE, ACCELERATE_FUNCTIONS, LIGHTNING, MEGATRON, TORCH_CHECKPOINTING)
