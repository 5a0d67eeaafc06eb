# SPDX-License-Identifier: Apache-2.0
"""What ``bytecheckpoint.save`` saved, as files that need neither this package nor DCP."""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from bytecheckpoint import _core
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._direct import run_load
from bytecheckpoint.dcp.load_planner import BcpLoadPlanner
from bytecheckpoint.dcp.reader import BcpReader
from bytecheckpoint.equality import are_equal
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, ConfigError, StorageError, UnsupportedError
from bytecheckpoint.frameworks.checkpoint_state import FRAMEWORKS
from bytecheckpoint.frameworks.stored import Stored
from bytecheckpoint.local_path import local_path, path_to_read
from bytecheckpoint.parts import description_in
from bytecheckpoint.reference_variables import merge_threads
from bytecheckpoint.small_files import made_folder, refuse_irregular, replacing, storage_errors

__all__ = ["bytecheckpoint_ckpt_to_pytorch_ckpt"]

_MODEL, _OPTIMIZER, _SAFETENSORS = "model.pt", "optimizer.pt", "model.safetensors"
# Names that Hugging Face gives; a reader takes what it finds under them for the model.
_INDEX, _SHARD = f"{_SAFETENSORS}.index.json", re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


def bytecheckpoint_ckpt_to_pytorch_ckpt(
    save_path: str | os.PathLike[str],
    output_path: str | os.PathLike[str] | None = None,
    framework: str = "fsdp",
    model_only: bool = False,
    optimizer_only: bool = False,
    return_dict: bool = False,
    fsdp_save_decomposed_model: bool = False,
    safetensors_format: bool = False,
    untie_embeddings: bool = False,
    dtype: torch.dtype | None = None,
    *,
    max_shard_size: int | str = "5GB",
    config: Config | None = None,
) -> dict[str, Any]:
    """Merges the shards of a checkpoint into whole tensors: ``model.pt`` and ``optimizer.pt``, or safetensors.

    Local, in one process, which needs memory for all of what is merged. Every byte is checked.

    Args:
        save_path: Folder of one step, as for ``bytecheckpoint.load``.
        output_path: Folder for the files, created if absent; None, with ``return_dict``, writes nothing. Symbolic links
            in this path are followed once, when the folder is opened; a link that takes the place of the folder, or of
            anything in it, after that is not followed.
        framework: Checked, and without meaning: keys and files are the same for all.
        model_only: Leave the optimizer out.
        optimizer_only: Leave the model out.
        return_dict: Give back what was merged; else an empty dict.
        fsdp_save_decomposed_model: Without meaning: decomposed or not, checkpoints are the same.
        safetensors_format: The model as safetensors with an index, as Hugging Face reads it; needs ``huggingface_hub``.
            Extra state of modules, which they cannot have, is left out. The optimizer is ``optimizer.pt`` in any case.
        untie_embeddings: A parameter that has several names, such as tied embeddings, becomes a tensor under each of
            them; else one that they share, which safetensors have once.
        dtype: Convert floating-point tensors of the model.
        max_shard_size: Of one file of safetensors, in bytes or as ``5GB``.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables.

    Returns:
        ``{"model": {...}, "optimizer": {"state": ..., "param_groups": ...}}``, the latter as torch's
        ``get_optimizer_state_dict`` gives it, with names in the place of numbers; or as much of it as was asked for.

    Raises:
        CheckpointNotFoundError: There is no such part.
        ConfigError: Arguments that do not fit.
        StorageError: A file cannot be written, or what is in its place is no regular file.
        UnsupportedError: ``huggingface_hub`` is not there.
    """
    if framework not in FRAMEWORKS:
        raise ConfigError(f"framework={framework!r}: one of {', '.join(map(repr, FRAMEWORKS))} wanted")
    if model_only and optimizer_only:
        raise ConfigError("model_only and optimizer_only: one of them at most")
    if output_path is None and not return_dict:
        raise ConfigError("output_path=None without return_dict=True: nothing would become of it")
    if config is None:
        config, threads = Config.from_env(), merge_threads()
        config = config if threads is None else dataclasses.replace(config, load_io_threads=threads)
    folder = path_to_read(save_path)
    output = None if output_path is None else local_path(output_path)
    merged: dict[str, Any] = {}
    if not optimizer_only:
        model, description = _load_whole(folder / "model", config)
        merged["model"] = _converted(model, dtype)
        if not untie_embeddings:
            merged["model"] = _tied(merged["model"], description.get("tied", []))
    if not model_only and (optimizer_only or (folder / "optimizer").is_dir()):
        merged["optimizer"] = _of_one_optimizer(_load_whole(folder / "optimizer", config)[0], _names(folder, config))
    if output is not None:
        _write(output, merged, safetensors_format, max_shard_size)
    return merged if return_dict else {}


def _load_whole(path: Path, config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """All values of a part, and what ``save`` noted about it."""
    if not path.is_dir():
        raise CheckpointNotFoundError(
            f"merge({path.parent}): it has no {path.name}: pass the folder of a step, as find_latest_ckpt_path gives "
            "it, and what is there (model_only, optimizer_only)",
            str(path),
        )
    stored = Stored(path, config)
    values: dict[str, Any] = {key: stored.empty(key) for key in stored}
    planner = BcpLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    run_load(values, BcpReader(path, config=config), planner, None, None)
    return stored.nested(values), description_in(stored.user_metadata)


def _converted(model: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    if dtype is None:
        return model
    is_float = {key: isinstance(value, torch.Tensor) and value.is_floating_point() for key, value in model.items()}
    return {key: value.to(dtype) if is_float[key] else value for key, value in model.items()}


def _of_one_optimizer(flat: dict[str, Any], fqns: Collection[str]) -> dict[str, Any]:
    """``state.{fqn}.{name}`` and ``param_groups.{fqn}.{option}`` as the state dict of one optimizer.

    Parameters are in one group if their options are equal. What torch's ``get_optimizer_state_dict`` gave unflattened
    is that already.
    """
    if isinstance(flat.get("param_groups"), list):
        return flat
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        fqn, name = _split(rest, fqns)
        (state if kind == "state" else options).setdefault(fqn, {})[name] = value
    groups: dict[str, list[tuple[dict[str, Any], list[str]]]] = {}  # by how the options print, which is not exact
    for fqn, of_parameter in options.items():
        alike = groups.setdefault(repr(sorted(of_parameter.items())), [])
        members = next((members for of_group, members in alike if are_equal(of_group, of_parameter)), None)
        if members is None:
            alike.append((of_parameter, members := []))
        members.append(fqn)
    of_groups = [{**of_group, "params": members} for alike in groups.values() for of_group, members in alike]
    return {"state": state, "param_groups": of_groups}


def _names(folder: Path, config: Config) -> Collection[str]:
    """Of parameters, as far as the model is there: an optimizer can be merged without."""
    try:
        return Stored(folder / "model", config).keys()
    except CheckpointError:
        return ()


def _split(text: str, fqns: Collection[str]) -> tuple[str, str]:
    """Name of a parameter, and what follows it: either may have dots in it."""
    end = text.rfind(".")
    while end > 0 and text[:end] not in fqns:
        end = text.rfind(".", 0, end)
    fqn, _, name = text.rpartition(".") if end <= 0 else (text[:end], ".", text[end + 1 :])
    return fqn, name


def _write(folder: Path, merged: dict[str, Any], safetensors_format: bool, max_shard_size: int | str) -> None:
    directory = made_folder(folder)
    if "model" in merged and safetensors_format:
        _write_safetensors(directory, merged["model"], max_shard_size)
    elif "model" in merged:
        _write_durably(directory, _MODEL, merged["model"])
    if "optimizer" in merged:
        _write_durably(directory, _OPTIMIZER, merged["optimizer"])
    directory.sync()


def _write_durably(directory: _core.Directory, name: str, value: Any) -> None:
    with replacing(directory, name, f".{name}.{os.getpid()}.tmp") as file:
        try:
            torch.save(value, file)
        except RuntimeError as error:  # torch's own, when a write has failed; that one stands behind it
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


def _write_safetensors(directory: _core.Directory, model: dict[str, Any], max_shard_size: int | str) -> None:
    """In a folder aside, then all at once but for renames: files without their index are no model."""
    try:
        from huggingface_hub import save_torch_state_dict
        from safetensors import SafetensorError
    except ImportError as error:
        raise UnsupportedError(
            "safetensors_format=True needs huggingface_hub and safetensors: pip install huggingface_hub safetensors"
        ) from error
    tensors = {key: value for key, value in model.items() if isinstance(value, torch.Tensor)}
    folder, at = directory.path, directory.fileno()
    with storage_errors("write", folder):
        before = [name for name in os.listdir(at) if name == _INDEX or _SHARD.fullmatch(name)]  # noqa: PTH208
        for old in before:
            refuse_irregular(directory, old)
        with _folder_aside(directory) as aside:
            try:
                # It takes a path; this one leads to the folder that is open, whatever has its name by then.
                save_torch_state_dict(tensors, f"/proc/self/fd/{aside.fileno()}", max_shard_size=max_shard_size)
            except SafetensorError as error:
                raise StorageError(f"write({folder}): {error}", str(folder)) from error
            names = sorted(os.listdir(aside.fileno()), key=lambda name: name == _INDEX)  # noqa: PTH208
            for name in names:
                _sync_file(aside, name)
            for old in sorted(before, key=lambda old: old != _INDEX):
                with suppress(FileNotFoundError):
                    os.unlink(old, dir_fd=at)
            for name in names:
                os.rename(name, name, src_dir_fd=aside.fileno(), dst_dir_fd=at)


@contextmanager
def _folder_aside(directory: _core.Directory) -> Iterator[_core.Directory]:
    """A new folder in ``directory``, which nobody else may enter and which goes with the ``with`` block."""
    name = f".{_SAFETENSORS}.{secrets.token_hex(4)}.tmp"
    os.mkdir(name, 0o700, dir_fd=directory.fileno())
    try:
        aside = directory.below(name)
        try:
            yield aside
        finally:
            for left in os.listdir(aside.fileno()):  # noqa: PTH208
                aside.remove(left)
    finally:
        with suppress(CheckpointError):  # another has its name
            directory.remove_empty(name)


def _sync_file(directory: _core.Directory, name: str) -> None:
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory.fileno())
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _tied(tensors: dict[str, torch.Tensor], names: list[list[str]]) -> dict[str, torch.Tensor]:
    """What was one parameter shares its memory again, which says so to ``save_torch_state_dict``."""
    present = [[name for name in group if name in tensors] for group in names]
    primary = {name: group[0] for group in present for name in group}
    return {key: tensors[primary.get(key, key)] for key in tensors}
