# SPDX-License-Identifier: Apache-2.0
"""Imports of scripts that were written for ByteCheckpoint: they work, or say what replaces them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint._reference_names import REPLACED, WORKING
from bytecheckpoint.errors import ConfigError


@pytest.mark.parametrize("module", sorted(WORKING))
def test_modules_of_the_reference_have_its_public_names(module: str) -> None:
    found = import_module(module)
    for name in WORKING[module]:
        with pytest.warns(DeprecationWarning, match=rf"{name} is bytecheckpoint\.{name} here"):
            assert getattr(found, name) is getattr(bytecheckpoint, name)
    with pytest.raises(ImportError, match=r"no_such_name.*Migration from ByteCheckpoint"):
        found.no_such_name  # noqa: B018
    assert not hasattr(found, "__wrapped__")


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("from bytecheckpoint import merge_bcp", "bcp convert STEP/model TARGET"),
        ("import bytecheckpoint.merge_bcp", "bcp convert STEP/model TARGET"),
        ("from bytecheckpoint.scripts import merge_bcp", "bcp convert STEP/model TARGET"),
        ("from bytecheckpoint.scripts.merge_bcp import main", "bcp convert STEP/model TARGET"),
        ("from bytecheckpoint.utilities.ckpt_format.hf_to_bcp import convert", "folder of Hugging Face itself"),
        ("from bytecheckpoint.tools.modify_key import modify_key", r"LoadSpec\(rename=.*--rename OLD=NEW"),
        ("from bytecheckpoint.utilities.ckpt_format.ckpt_loader import CKPTLoader", "BcpReader"),
        ("from bytecheckpoint.utilities.ckpt_format.common_utils import model_optimizer_completeness", "scan_steps"),
        ("from bytecheckpoint.engine import _store_engine", r"bytecheckpoint\.shutdown\(\)"),
        ("from bytecheckpoint.storage import CKPTCounter", "Migration from ByteCheckpoint"),
        ("import bytecheckpoint.storage.ckpt_counter", "Migration from ByteCheckpoint"),
        ("import bytecheckpoint.checkpointer.meta_type", "Migration from ByteCheckpoint"),
        ("import bytecheckpoint.no_such_module", "No module named 'bytecheckpoint.no_such_module'"),
    ],
)
def test_imports_that_fail_say_what_to_use(statement: str, message: str) -> None:
    with pytest.raises(ImportError, match=message):
        exec(statement, {})


def test_what_replaces_a_name_is_there() -> None:
    for name in ("shutdown", "scan_steps", "load_state_dict", "BcpReader", "verify", "LoadSpec"):
        assert any(name in text for text in REPLACED.values())
        assert getattr(bytecheckpoint, name)


def test_path_of_the_checkpointers(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    state: dict[str, Any] = {"model": model}
    bytecheckpoint.DDPCheckpointer.save(path=tmp_path / "a", checkpoint_state=state).committed.result()
    other = nn.Linear(3, 2)
    bytecheckpoint.DDPCheckpointer.load(path=tmp_path / "a", checkpoint_state={"model": other})
    assert torch.equal(other.weight, model.weight)
    bytecheckpoint.DDPCheckpointer.save(tmp_path / "b", state).committed.result()
    bytecheckpoint.DDPCheckpointer.load(tmp_path / "b", checkpoint_state={"model": other})
    with pytest.raises(TypeError, match="both path and ckpt_path"):
        bytecheckpoint.DDPCheckpointer.save(tmp_path / "a", state, path=tmp_path)
    with pytest.raises(TypeError, match="needs checkpoint_state"):
        bytecheckpoint.DDPCheckpointer.load(path=tmp_path / "a")
    with pytest.raises(TypeError, match="needs ckpt_path"):
        bytecheckpoint.FSDPCheckpointer.save(checkpoint_state=state)


def test_a_name_that_went_names_the_new_one() -> None:
    with pytest.raises(ImportError, match=r"bytecheckpoint.prune is not here any more: use bytecheckpoint.Retention"):
        exec("from bytecheckpoint import prune")
    with pytest.raises(ConfigError, match="'exchange' is what 'merge' was"):
        bytecheckpoint.save("run", {"model": nn.Linear(1, 1)}, "fsdp", irregular="merge")
