# SPDX-License-Identifier: Apache-2.0
"""Initial loads of torchtitan's manager that a ``LoadSpec`` describes: weights of Hugging Face, other names, dtypes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import save_file
from support.ranks import run_ranks
from support.titan import Job, Layout, on_cpu, same

import bytecheckpoint
from bytecheckpoint import LoadSpec, model_specs
from bytecheckpoint.errors import ConfigError, KeyMismatchError, ShapeMismatchError
from frameworks.titan_marks import needs_trainer

pytest.importorskip("torchtitan", reason="torchtitan is not installed: ITS ADAPTER IS NOT TESTED")
pytestmark = [needs_trainer, pytest.mark.usefixtures("ranks_with_torchtitan")]

OF_RUN = ("optimizer", "lr_scheduler", "train_state", "dataloader", "rates")


def _ours(**fields: Any) -> Any:
    from bytecheckpoint.torchtitan import BcpCheckpointManager

    return BcpCheckpointManager.Config(**{"enable": True, "folder": "run", "interval": 1, **fields})


def _load(job: Job, folder: str, **fields: Any) -> bool:
    manager = job.manager(_ours(**fields), folder)
    try:
        return bool(manager.load())
    finally:
        manager.close()


def _whole_model(job: Job) -> dict[str, Any]:
    return {
        name: value.full_tensor().contiguous()
        for part in job.model_parts
        for name, value in part.state_dict().items()
        if not name.endswith("freqs_cis")
    }


def _hugging_face(folder: str) -> None:
    """torchtitan's adapter writes the weights, our reader fills the model with them."""
    job = Job()
    job.step()
    adapter = job.spec.state_dict_adapter(job.spec.model, None)
    whole = {name: value.contiguous() for name, value in adapter.to_hf(_whole_model(job)).items()}
    attention = job.spec.model.layers[0].attention
    config = {"model_type": "llama", "hidden_size": job.spec.model.dim, "num_attention_heads": attention.n_heads}
    rules = model_specs.llama({**config, "num_key_value_heads": attention.n_kv_heads})
    if dist.get_rank() == 0:
        Path(folder, "hf").mkdir()
        save_file(whole, Path(folder, "hf", "model.safetensors"))
    dist.barrier()
    for layout, in_hf in ((Layout(), True), (Layout(tensor=2), False)):
        given = {"initial_load_path": f"{folder}/hf", "initial_load_in_hf": in_hf, "initial_load_spec": rules}
        other = Job(layout, seed=1)
        before = other.state()
        here = f"{folder}/{in_hf}"
        manager = other.manager(_ours(**given), here)
        assert manager.load()
        same(other.state(), job.state(), without=OF_RUN)
        same(other.state(), before, without=("model",))
        # The same job begins again with the same arguments: it goes on with its own checkpoint, which has other names.
        other.step()
        assert manager.save(1)
        manager.close()
        again = Job(layout, seed=2)
        assert _load(again, here, **given)
        again.resume()
        same(again.state(), other.state())


def test_weights_of_hugging_face(tmp_path: Path) -> None:
    run_ranks(2, _hugging_face, str(tmp_path), limit_s=150)


def _other_names(folder: str) -> None:
    job = Job()
    job.step()
    manager = job.manager(_ours(), folder)
    # A training state of another program, in which the names of the model have a prefix.
    state = manager._flattened_model_states_sd()
    manager.close()
    renamed = {name if name in manager.states else f"net.{name}": value for name, value in state.items()}
    bytecheckpoint.save_state_dict(f"{folder}/theirs", renamed)
    given: dict[str, Any] = {"initial_load_path": f"{folder}/theirs", "initial_load_model_only": False}
    with pytest.raises(KeyMismatchError, match=r"another model"):
        _load(Job(seed=1), f"{folder}/a", **given)
    other = Job(seed=1)
    assert _load(other, f"{folder}/a", **given, initial_load_spec=LoadSpec(rename={"net": ""}))
    other.resume()
    same(other.state(), job.state())
    # The model alone: what else is there is left out by the spec, or refused.
    given["initial_load_model_only"] = True
    with pytest.raises(KeyMismatchError, match=r"not asked for: .*'lr_scheduler"):
        _load(Job(seed=1), f"{folder}/a", **given, initial_load_spec=LoadSpec(rename={"net": ""}))
    of_model = LoadSpec(include="net", rename={"net": ""})
    half = Job(seed=1, dtype="bfloat16")
    with pytest.raises(ShapeMismatchError, match=r"is float32, to be loaded into bfloat16"):
        _load(half, f"{folder}/b", **given, initial_load_spec=of_model)
    of_model = LoadSpec(include="net", rename={"net": ""}, cast="any")
    assert _load(half, f"{folder}/b", **given, initial_load_spec=of_model)
    same(_whole_model(half), {name: value.bfloat16() for name, value in _whole_model(job).items()})


def test_training_states_under_other_names(tmp_path: Path) -> None:
    run_ranks(2, _other_names, str(tmp_path), limit_s=150)


def _settings(folder: str) -> None:
    on_cpu()
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.config import ConfigManager
    from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports
    from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager
    from torchtitan.trainer import Trainer

    from bytecheckpoint.torchtitan import with_bytecheckpoint

    path = Path(folder, "rules.toml")
    path.write_text('cast = "any"\n')

    def overridden(option: str) -> Any:
        root = Trainer.Config(checkpoint=CheckpointManager.Config(enable=True))
        imports = parse_cli_imports([f'bytecheckpoint.torchtitan.use={{"initial_load_spec": "{option}"}}'])
        apply_overrides(OverrideConfig(imports=imports), root)
        return root.checkpoint

    assert overridden(str(path)).initial_load_spec == str(path)
    with pytest.raises(ConfigError, match=r"nothing\.toml: .*No such file"):
        overridden(f"{folder}/nothing.toml")
    path.with_name("wrong.toml").write_text("casts = 'any'\n")
    with pytest.raises(ConfigError, match=r"wrong\.toml, line 1, column 1: unknown key 'casts'"):
        _ours(initial_load_spec=str(path.with_name("wrong.toml")))
    with pytest.raises(ConfigError, match="must be a LoadSpec, or the path"):
        _ours(initial_load_spec=3)
    spec = LoadSpec(rename={"net": ""}, transforms=[bytecheckpoint.transforms.Transpose("net.a")])
    for theirs in (CheckpointManager.Config(), TorchFTCheckpointManager.Config()):
        made = with_bytecheckpoint(Trainer.Config(checkpoint=theirs), initial_load_spec=spec).checkpoint
        assert made.initial_load_spec == spec
        assert made.to_dict()["initial_load_spec"]["rename"] == {"net": ""}  # torchtitan writes it to logs
    recipe = ["--module", "frameworks.titan_recipe", "--config", "ours_in_the_recipe"]
    flags = ["--checkpoint.initial_load_spec", str(path)]
    assert ConfigManager().parse_args([*recipe, *flags]).checkpoint.initial_load_spec == str(path)
    recipe[-1] = "ours_with_a_spec"
    assert ConfigManager().parse_args(recipe).checkpoint.initial_load_spec == LoadSpec(rename={"net": ""})
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bytecheckpoint").addHandler(handler)
    assert not _load(Job(), folder, initial_load_spec=spec)
    assert any("initial_load_spec has no effect" in line for line in said)


def test_ways_to_pass_a_spec(tmp_path: Path) -> None:
    run_ranks(1, _settings, str(tmp_path), limit_s=60)
