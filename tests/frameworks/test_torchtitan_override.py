# SPDX-License-Identifier: Apache-2.0
"""Ways to install our manager in torchtitan: its override, a recipe, and the subclass for its TorchFT manager."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from support.ranks import run_ranks
from support.titan import Job, on_cpu, same

import bytecheckpoint
from bytecheckpoint.errors import ConfigError, UnsupportedError
from frameworks.titan_marks import needs_trainer

pytest.importorskip("torchtitan", reason="torchtitan is not installed: ITS ADAPTER IS NOT TESTED")

USE = "bytecheckpoint.torchtitan.use"


def _root(checkpoint: Any) -> Any:
    from torchtitan.trainer import Trainer

    return Trainer.Config(checkpoint=checkpoint)


def _override(checkpoint: Any, token: str = USE) -> Any:
    """Returns the trainer's checkpoint configuration after the override flag."""
    from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports

    root = _root(checkpoint)
    apply_overrides(OverrideConfig(imports=parse_cli_imports([token])), root)
    return root.checkpoint


def _flag_and_recipe() -> None:
    on_cpu()
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager

    from bytecheckpoint.torchtitan import BcpCheckpointManager, BcpTorchFTCheckpointManager, with_bytecheckpoint

    settings: dict[str, Any] = {
        "enable": True,
        "folder": "elsewhere",
        "interval": 7,
        "initial_load_path": "/from/here",
        "initial_load_model_only": False,
        "last_save_model_only": False,
        "export_dtype": "bfloat16",
        "keep_latest_k": 3,
        "load_step": 5,
        "exclude_from_loading": ["dataloader"],
        "enable_first_step_checkpoint": True,
        "async_mode": "async",
    }
    plain = CheckpointManager.Config(**settings)
    ours = _override(plain)
    assert type(ours) is BcpCheckpointManager.Config
    assert ours._owner is BcpCheckpointManager
    for field in dataclasses.fields(plain):
        assert getattr(ours, field.name) == getattr(plain, field.name), field.name
    assert ours.engine == bytecheckpoint.Config()
    assert _override(plain, USE + '={"io_threads": 5, "niceness": 3}').engine == bytecheckpoint.Config(
        io_threads=5, niceness=3
    )
    # It leaves managers that it does not know unchanged.
    theirs = TorchFTCheckpointManager.Config(enable=True)
    assert _override(theirs) is theirs
    for token, said in (
        (USE + '={"io_thread": 5}', "no such option: io_thread; known are ring_bytes, io_threads"),
        (USE + '={"io_threads": 500}', "io_threads=500"),
    ):
        with pytest.raises(ConfigError, match=said):
            _override(plain, token)
    with pytest.raises(ConfigError, match="no such option: theads"):
        BcpCheckpointManager.Config(engine={"theads": 1})
    # In a recipe.
    root = _root(plain)
    assert with_bytecheckpoint(root, io_threads=4) is root
    assert type(root.checkpoint) is BcpCheckpointManager.Config
    assert (root.checkpoint.interval, root.checkpoint.engine.io_threads) == (7, 4)
    assert root.checkpoint.to_dict()["engine"]["io_threads"] == 4  # torchtitan writes it to logs
    assert type(with_bytecheckpoint(_root(theirs)).checkpoint) is BcpTorchFTCheckpointManager.Config

    class Other(CheckpointManager):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(CheckpointManager.Config):
            pass

    with pytest.raises(UnsupportedError, match=r"class X\(BcpCheckpointing, .*Other\)"):
        with_bytecheckpoint(_root(Other.Config()))


def _of_torch_checkpointing(folder: str) -> None:
    # torchtitan 0.3.0 wants a module of torch_checkpointing 0.1.0 whose class has another name in 0.1.1.
    name = "torch_checkpointing.dtensor_resharder"
    if find_spec(name) is None:
        from torch_checkpointing.default_resharder import DefaultResharder

        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name])["DTensorResharder"] = DefaultResharder
    on_cpu()
    from torchtitan.components.checkpointer.torch_checkpointing import TorchCheckpointingManager

    from bytecheckpoint.torchtitan import BcpCheckpointManager, with_bytecheckpoint

    theirs = TorchCheckpointingManager.Config(enable=True, folder="run", interval=2, keep_latest_k=3)
    for ours in (
        _override(theirs, USE + '={"io_threads": 3}'),
        with_bytecheckpoint(_root(theirs), io_threads=3).checkpoint,
    ):
        assert type(ours) is BcpCheckpointManager.Config
        for field in dataclasses.fields(theirs):
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
        assert (ours.async_mode, ours.engine.io_threads) == ("async_with_pinned_mem", 3)

    class Other(TorchCheckpointingManager):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(TorchCheckpointingManager.Config):
            pass

    other = Other.Config()
    assert _override(other) is other
    job, saved = Job(), None
    manager = job.manager(ours, folder)
    for step in range(1, 4):
        job.step(manager)
        assert manager.save(step) == (step == 2)
        saved = job.state() if step == 2 else saved
    manager.close()
    other_job = Job(seed=1)
    manager = other_job.manager(ours, folder)
    assert manager.load()
    manager.close()
    same(other_job.state(), saved)


@needs_trainer
def test_the_manager_for_torch_checkpointing_is_replaced_and_works(tmp_path: Path) -> None:
    """That of torchtitan 0.3.0 itself neither saves nor loads yet."""
    pytest.importorskip("torch_checkpointing", reason="torch_checkpointing is not installed: ITS MANAGER IS NOT TESTED")
    run_ranks(2, _of_torch_checkpointing, str(tmp_path), limit_s=100)
    (step,) = bytecheckpoint.scan_steps(tmp_path / "run")
    assert (step.step, step.state, step.is_foreign) == (2, "complete", False)


def _command_line() -> None:
    from torchtitan.config import ConfigManager

    from bytecheckpoint.torchtitan import BcpCheckpointManager

    recipe = ["--module", "frameworks.titan_recipe", "--config", "ours_in_the_recipe"]
    config = ConfigManager().parse_args([*recipe, "--checkpoint.interval", "9", "--checkpoint.async_mode", "async"])
    assert type(config.checkpoint) is BcpCheckpointManager.Config
    assert (config.checkpoint.interval, config.checkpoint.async_mode) == (9, "async")
    assert config.checkpoint.engine.io_threads == 3
    with pytest.raises(SystemExit):
        ConfigManager().parse_args([*recipe, "--checkpoint.engine", "x"])  # the field is not on the command line


def _settings() -> None:
    _flag_and_recipe()
    _command_line()


@needs_trainer
def test_the_flag_and_the_recipe_keep_every_setting() -> None:
    run_ranks(1, _settings, limit_s=60)


def _torchft(folder: str) -> None:
    on_cpu()
    from bytecheckpoint.torchtitan import BcpTorchFTCheckpointManager

    functions: list[Any] = []

    def build(job: Job, replica: int, participating: int) -> Any:
        job.optimizers.init_cache_state_dict = lambda: None
        inner = SimpleNamespace(
            participating_rank=lambda: participating, set_state_dict_fns=lambda *given: functions.append(given)
        )
        config = BcpTorchFTCheckpointManager.Config(enable=True, folder="run", interval=2, keep_latest_k=2)
        return config.build(
            dataloader=job.dataloader,
            model_parts=job.model_parts,
            optimizers=job.optimizers,
            lr_schedulers=job.lr_schedulers,
            states={"train_state": job.train_state},
            sd_adapter=None,
            base_folder=folder,
            ft_manager=SimpleNamespace(enabled=True, manager=inner, replica_id=replica),
        )

    job = Job()
    saving, idle = build(job, 0, 0), build(job, 1, 1)
    for step in range(1, 4):
        job.step(saving)
        assert saving.save(step) == (step == 2)
        assert idle.save(step) is False
        if step == 2:
            full = job.state()
    newest = job.state()
    saving.close()
    idle.close()
    assert len(functions) == 2
    dist.barrier()
    for path, steps in (("run", [2]), ("run/ft-replicat-0", [1, 2, 3]), ("run/ft-replicat-1", [1, 2, 3])):
        found = bytecheckpoint.scan_steps(Path(folder, path))
        assert [step.step for step in found if step.is_complete] == steps, path
        assert not any(step.is_foreign for step in found)
    other = Job(seed=1)
    manager = build(other, 1, 1)
    assert manager.load()
    manager.close()
    loaded = other.state()
    same(loaded, full, without=("dataloader",))
    assert loaded["dataloader"] == newest["dataloader"], "the replica's own, of the last step"


@needs_trainer
def test_checkpoints_of_replicas_go_through_ours(tmp_path: Path) -> None:
    """Runs our subclass of torchtitan's TorchFT manager. The test supplies what torchft would tell it."""
    run_ranks(2, _torchft, str(tmp_path), limit_s=100)


# Runs in a new process, with whatever torch is installed.
_ANOTHER_TORCHTITAN = """
import sys, warnings
import torch.distributed.fsdp, torchtitan.components.checkpointer as theirs
from importlib import metadata
change, version = sys.argv[1:]
installed = metadata.version
metadata.version = lambda name: version if name == "torchtitan" else installed(name)
for module, name in ((torch.distributed, "set_timeout"), (torch.distributed.fsdp, "DataParallelMeshDims")):
    if change == f"without {name}":
        vars(module).pop(name, None)
    else:
        vars(module).setdefault(name, None)
if change == "other arguments":
    theirs.CheckpointManager.dcp_save = lambda self, state: None
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    from bytecheckpoint import torchtitan as ours
    for _ in range(2):
        made = ours.use(theirs.CheckpointManager.Config())
print(type(made).__qualname__)
for warning in warned:
    if "bytecheckpoint" in str(warning.message):
        print(warning.message)
"""


def _with_another_torchtitan(change: str, version: str = "0.3.0") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _ANOTHER_TORCHTITAN, change, version]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_torchtitan_that_is_built_otherwise_is_refused_by_the_name_of_the_probe() -> None:
    done = _with_another_torchtitan("other arguments")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: bytecheckpoint.torchtitan cannot work with torchtitan 0.3.0: probe ")
    assert "torchtitan.components.checkpointer:CheckpointManager.dcp_save: it takes self, state instead of" in last


@pytest.mark.parametrize("probe", ["torch.distributed:set_timeout", "torch.distributed.fsdp:DataParallelMeshDims"])
def test_a_torch_without_what_the_trainer_needs_is_one_warning(probe: str) -> None:
    name = probe.partition(":")[2]
    done = _with_another_torchtitan(f"without {name}")
    assert done.returncode == 0, done.stderr
    made, *warned = done.stdout.splitlines()
    assert made == "BcpCheckpointManager.Config"
    assert len(warned) == 1
    assert f"probe {probe}: there is no {name}" in warned[0]


def test_a_newer_torchtitan_in_which_all_holds_is_one_warning() -> None:
    done = _with_another_torchtitan("nothing", "0.3.7")
    assert done.returncode == 0, done.stderr
    made, *warned = done.stdout.splitlines()
    assert made == "BcpCheckpointManager.Config"
    assert len(warned) == 1
    assert "torchtitan 0.3.7 is newer than 0.3.0" in warned[0]


def test_torchtitan_passes_the_refusal_on() -> None:
    code = (
        "from torchtitan.components.checkpointer import CheckpointManager as theirs\n"
        "theirs.dcp_save = lambda self, state: None\n"
        "from torchtitan.config.override import OverrideConfig, apply_overrides\n"
        f"apply_overrides(OverrideConfig(imports=['{USE}']), None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: Failed to import override target")
    assert "CheckpointManager.dcp_save: it takes self, state instead of" in last
