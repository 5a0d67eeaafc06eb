# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint with stock DCP alone, in a process where bytecheckpoint cannot be imported.

Run it as a script: ``no_bytecheckpoint.py CHECKPOINT REFERENCE SCRATCH``. On failure its exit status is not 0.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Refusing(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname.partition(".")[0] == "bytecheckpoint":
            raise ImportError(f"{fullname} is not installed here")


def main(checkpoint: str, reference: str, scratch: str) -> None:
    sys.meta_path.insert(0, _Refusing())
    try:
        importlib.import_module("bytecheckpoint")
    except ImportError:
        pass
    else:
        raise AssertionError("bytecheckpoint can be imported")

    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    wanted = torch.load(reference, weights_only=False)

    got = _blank(wanted)
    dcp.load(got, checkpoint_id=checkpoint)
    _check(got, wanted)

    dcp_to_torch_save(checkpoint, scratch)
    _check(torch.load(scratch, weights_only=False), wanted)

    _check(_load_state_dict_from_keys(checkpoint_id=checkpoint), wanted)
    for key in wanted:
        _check(_load_state_dict_from_keys({key}, checkpoint_id=checkpoint), {key: wanted[key]})

    assert not [name for name in sys.modules if name.startswith("bytecheckpoint")]


def _blank(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: _blank(item) for key, item in value.items()}
    return [_blank(item) for item in value] if isinstance(value, list) else None


def _check(got: Any, wanted: Any, key: str = "") -> None:
    import torch

    if isinstance(wanted, torch.Tensor):
        assert got.dtype == wanted.dtype, key
        assert torch.equal(got, wanted), key
    elif isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), f"{key}: {got.keys()}"
        for name in wanted:
            _check(got[name], wanted[name], f"{key}.{name}")
    elif isinstance(wanted, list):
        assert len(got) == len(wanted), key
        for position, item in enumerate(wanted):
            _check(got[position], item, f"{key}.{position}")
    else:
        assert type(got) is type(wanted), f"{key}: {got!r}"
        assert got == wanted, f"{key}: {got!r}"


if __name__ == "__main__":
    main(*sys.argv[1:])
