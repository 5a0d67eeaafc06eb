# SPDX-License-Identifier: Apache-2.0
"""OLMo-core's functions load what a ``LoadSpec`` describes."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch.distributed as dist
from support.equality import assert_equal
from support.ranks import run_ranks

pytest.importorskip("olmo_core", reason="OLMo-core is not installed: pip install ai2-olmo-core==3.0.0")

import olmo_core.distributed.checkpoint as olmo_checkpoint

import bytecheckpoint.olmo
from bytecheckpoint import LoadSpec
from bytecheckpoint.errors import ConfigError
from frameworks.olmo_states import change, states, train_module

LIMIT_S = 200.0


def load_by_spec(folder: Path) -> None:
    """Loads weights that have other names, and are safetensors."""
    module = train_module(seed=0, num_steps=2)
    saved = states(module)
    whole = {
        f"transformer.{name}": getattr(value, "full_tensor", lambda value=value: value)().contiguous()
        for name, value in module.model.state_dict().items()
    }
    if dist.get_rank() == 0:
        safetensors.torch.save_file(whole, folder / "model.safetensors")
    dist.barrier()
    change(module)
    with bytecheckpoint.olmo.installed(spec=LoadSpec(rename={"transformer": "model"})):
        olmo_checkpoint.load_model_and_optim_state(folder, module.model)
        with (
            pytest.raises(ConfigError, match="a spec has no effect"),
            bytecheckpoint.olmo.installed(spec=LoadSpec()),
        ):
            pass
    names = module.model.state_dict()
    assert_equal({name: states(module)[name] for name in names}, {name: saved[name] for name in names})


def test_weights_under_other_names(tmp_path: Path) -> None:
    run_ranks(2, load_by_spec, tmp_path, limit_s=LIMIT_S)
