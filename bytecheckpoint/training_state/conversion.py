# SPDX-License-Identifier: Apache-2.0
"""Converts what ``bytecheckpoint.save`` saved to files that need neither this package nor DCP."""

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
from bytecheckpoint.checkpoint.folders import Place, below, is_folder, known, name_of, parent_of
from bytecheckpoint.checkpoint.local_path import local_path, location_to_read
from bytecheckpoint.checkpoint.parts import description_in
from bytecheckpoint.checkpoint.small_files import made_folder, refuse_irregular, replacing, storage_errors
from bytecheckpoint.config import Config
from bytecheckpoint.dcp.direct_calls import run_load
from bytecheckpoint.dcp.load_planner import BcpLoadPlanner
from bytecheckpoint.dcp.reader import BcpReader
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, ConfigError, StorageError, UnsupportedError
from bytecheckpoint.reference_variables import merge_threads
from bytecheckpoint.tensors.equality import are_equal
from bytecheckpoint.training_state.checkpoint_state import FRAMEWORKS
from bytecheckpoint.training_state.stored import Stored

__all__ = ["bytecheckpoint_ckpt_to_pytorch_ckpt"]

_MODEL, _OPTIMIZER, _SAFETENSORS = "model.pt", "optimizer.pt", "model.safetensors"
# Names that Hugging Face uses. A reader treats every file with such a name as part of the model.
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

    Local: it runs in one process, which needs memory for everything that is merged. Every byte is checked.

    Args:
        save_path: Folder of one step, or its URL, as for ``bytecheckpoint.load``.
        output_path: Folder for the files, created if absent. None, which needs ``return_dict``, writes nothing.
            Symbolic links in this path are followed once, when the folder is opened. A link that later replaces the
            folder, or anything in it, is not followed.
        framework: Checked, but otherwise ignored: keys and files are the same for all frameworks.
        model_only: Whether to leave the optimizer out.
        optimizer_only: Whether to leave the model out.
        return_dict: Whether to return what was merged; otherwise an empty dict is returned.
        fsdp_save_decomposed_model: Ignored: decomposed or not, checkpoints are the same.
        safetensors_format: Whether to write the model as safetensors with an index, as Hugging Face reads it. This
            needs ``huggingface_hub``. Extra state of modules is left out, because safetensors cannot hold it. The
            optimizer is written as ``optimizer.pt`` in any case.
        untie_embeddings: What becomes of a parameter with several names, such as tied embeddings. True gives each name
            a tensor of its own. False gives all of them one shared tensor, which safetensors store once.
        dtype: Dtype to which floating-point tensors of the model are converted; None converts nothing.
        max_shard_size: Maximum size of one safetensors file, in bytes or as a text like ``5GB``.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables.

    Returns:
        ``{"model": {...}, "optimizer": {"state": ..., "param_groups": ...}}``, or the part of it that was asked for.
        The optimizer is as torch's ``get_optimizer_state_dict`` returns it: with names of parameters, not numbers.

    Raises:
        CheckpointNotFoundError: The part that was asked for does not exist.
        ConfigError: The arguments do not fit together.
        StorageError: A file cannot be written, or something other than a regular file is in its place.
        UnsupportedError: ``huggingface_hub`` or ``safetensors`` is not installed.
    """
    if framework not in FRAMEWORKS:
        raise ConfigError(f"framework={framework!r}: must be one of {', '.join(map(repr, FRAMEWORKS))}")
    if model_only and optimizer_only:
        raise ConfigError("model_only and optimizer_only cannot both be True")
    if output_path is None and not return_dict:
        raise ConfigError("output_path=None without return_dict=True: the result would be lost; pass one of them")
    if config is None:
        config, threads = Config.from_env(), merge_threads()
        config = config if threads is None else dataclasses.replace(config, load_io_threads=threads)
    folder = known(location_to_read(save_path), config)
    output = None if output_path is None else local_path(output_path)
    merged: dict[str, Any] = {}
    if not optimizer_only:
        model, description = _load_whole(below(folder, "model"), config)
        merged["model"] = _converted(model, dtype)
        if not untie_embeddings:
            merged["model"] = _tied(merged["model"], description.get("tied", []))
    if not model_only and (optimizer_only or is_folder(below(folder, "optimizer"))):
        of_optimizer, _ = _load_whole(below(folder, "optimizer"), config)
        merged["optimizer"] = _of_one_optimizer(of_optimizer, _names(folder, config))
    if output is not None:
        _write(output, merged, safetensors_format, max_shard_size)
    return merged if return_dict else {}


def _load_whole(path: Place, config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Loads all values of a part, and returns them with the description that ``save`` stored in it."""
    if not is_folder(path):
        raise CheckpointNotFoundError(
            f"merge({parent_of(path)}): it has no {name_of(path)}: pass the folder of a step, as "
            "find_latest_ckpt_path gives it; if a part is missing there, pass model_only=True or optimizer_only=True",
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
    """Makes the state dict of one optimizer of ``state.{fqn}.{name}`` and ``param_groups.{fqn}.{option}``.

    Parameters are put into one group if their options are equal. If the checkpoint holds what torch's
    ``get_optimizer_state_dict`` returned unflattened, that has the right form already and is returned as it is.
    """
    if isinstance(flat.get("param_groups"), list):
        return flat
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        fqn, name = _split(rest, fqns)
        (state if kind == "state" else options).setdefault(fqn, {})[name] = value
    groups: dict[str, list[tuple[dict[str, Any], list[str]]]] = {}  # by the options as text, which is not exact
    for fqn, of_parameter in options.items():
        alike = groups.setdefault(repr(sorted(of_parameter.items())), [])
        members = next((members for of_group, members in alike if are_equal(of_group, of_parameter)), None)
        if members is None:
            alike.append((of_parameter, members := []))
        members.append(fqn)
    of_groups = [{**of_group, "params": members} for alike in groups.values() for of_group, members in alike]
    return {"state": state, "param_groups": of_groups}


def _names(folder: Place, config: Config) -> Collection[str]:
    """Returns the names of parameters; none if there is no model, since an optimizer can be merged without it."""
    try:
        return Stored(below(folder, "model"), config).keys()
    except CheckpointError:
        return ()


def _split(text: str, fqns: Collection[str]) -> tuple[str, str]:
    """Splits ``text`` into the name of a parameter and what follows it; both may contain dots."""
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
        except RuntimeError as error:  # torch raises it when a write fails; the OSError is its context
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


def _write_safetensors(directory: _core.Directory, model: dict[str, Any], max_shard_size: int | str) -> None:
    """Writes all files into a temporary folder, then renames them one by one, the index last.

    Files without their index are not a model, so a crash does not leave a mix of old and new files that looks like one.

    Raises:
        StorageError: The file system refused.
        UnsupportedError: huggingface_hub or safetensors is not installed.
    """
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
                # The function needs a path. This one leads to the open folder, even if another has its name by then.
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
    """Makes a folder in ``directory`` that no other user may enter, and removes it at the end of the ``with`` block."""
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
        with suppress(CheckpointError):  # another folder has its name now
            directory.remove_empty(name)


def _sync_file(directory: _core.Directory, name: str) -> None:
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory.fileno())
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _tied(tensors: dict[str, torch.Tensor], names: list[list[str]]) -> dict[str, torch.Tensor]:
    """Lets all names of a tied parameter share one tensor again, by which ``save_torch_state_dict`` recognizes it."""
    present = [[name for name in group if name in tensors] for group in names]
    primary = {name: group[0] for group in present for name in group}
    return {key: tensors[primary.get(key, key)] for key in tensors}
