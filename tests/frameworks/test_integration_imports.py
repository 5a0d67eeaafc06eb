# SPDX-License-Identifier: Apache-2.0
"""A framework that is built otherwise than an integration needs it is an error at the import, which says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import importlib, sys
(name,) = sys.argv[1:]
import bytecheckpoint.integrations
assert not {"transformers", "accelerate", "lightning", "megatron", "torch_checkpointing"} & sys.modules.keys()
try:
    importlib.import_module(f"bytecheckpoint.integrations.{name}")
except ImportError as error:
    print(error)
"""


def said(name: str, *paths: Path) -> str:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT]))}
    command = [sys.executable, "-c", SCRIPT, name]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=100).stdout


@pytest.mark.parametrize("name", ["transformers", "accelerate", "lightning", "megatron", "torch_checkpointing"])
def test_another_build_is_refused(name: str, tmp_path: Path) -> None:
    """The message has the version that is there, what is missing in it, and which to install."""
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text("")
    project = {"megatron": "megatron-core"}.get(name, name)
    info = tmp_path / f"{project.replace('-', '_')}-0.5.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: 0.5.0\n")

    text = said(name, tmp_path)

    assert text.startswith(f"bytecheckpoint.integrations.{name} cannot work with {project} 0.5.0"), text
    assert f"probe {name}" in text
    assert f"Install {project} " in text
    assert "or later" in text or "==" in text
