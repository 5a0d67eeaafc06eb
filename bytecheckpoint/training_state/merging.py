# SPDX-License-Identifier: Apache-2.0
"""Merges what ``bytecheckpoint.save`` saved into files that need neither this package nor DCP."""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bytecheckpoint.config import Config
from bytecheckpoint.contents.damaged_keys import naming_keys
from bytecheckpoint.convert.conversion import parsed_size
from bytecheckpoint.convert.file_piece import compare_checksums
from bytecheckpoint.convert.nesting import nested, paths_of
from bytecheckpoint.convert.outputs import Outputs, outputs_of
from bytecheckpoint.convert.safetensors_target import INDEX, SafetensorsTarget
from bytecheckpoint.convert.source import Opened, Source
from bytecheckpoint.convert.torch_target import export_state, read_objects, stand_ins
from bytecheckpoint.dcp.direct_calls import run_load
from bytecheckpoint.dcp.load_planner import BcpLoadPlanner
from bytecheckpoint.dcp.reader import BcpReader
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from bytecheckpoint.native import _core
from bytecheckpoint.near_names import did_you_mean
from bytecheckpoint.reference_variables import merge_threads
from bytecheckpoint.storage.folders import folder_at, known
from bytecheckpoint.storage.parts import description_in, parsed_user_metadata
from bytecheckpoint.storage.paths import Place, below, local_path, location_to_read, name_of, parent_of
from bytecheckpoint.storage.small_files import made_folder, refuse_irregular, replaced_by, storage_errors
from bytecheckpoint.training_state.checkpoint_state import FRAMEWORKS
from bytecheckpoint.training_state.merged_optimizer import of_one_optimizer
from bytecheckpoint.training_state.stored import Stored

__all__ = ["bytecheckpoint_ckpt_to_pytorch_ckpt"]

_MODEL, _OPTIMIZER, _SAFETENSORS = "model.pt", "optimizer.pt", "model.safetensors"
# Names that Hugging Face uses. A reader treats every file with such a name as part of the model.
_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


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
    progress: Callable[[int, int], object] | None = None,
) -> dict[str, Any]:
    """Merges the shards of a checkpoint into whole tensors: ``model.pt`` and ``optimizer.pt``, or safetensors.

    Local: it runs in one process. Files are streamed, so that memory does not grow with the checkpoint; only
    ``return_dict`` needs memory for everything that is merged. Every byte that is read is checked.

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
        safetensors_format: Whether to write the model as safetensors with an index, as Hugging Face reads it.
            Extra state of modules is left out, because safetensors cannot hold it. The optimizer is written as
            ``optimizer.pt`` in any case.
        untie_embeddings: What becomes of a parameter with several names, such as tied embeddings. True gives each name
            a tensor of its own. False gives all of them one shared tensor, which safetensors store once.
        dtype: Dtype to which floating-point tensors of the model are converted: ``torch.float32``, ``bfloat16``,
            ``float16`` or ``float64``; None converts nothing. Floats of 8 bits stay as they are.
        max_shard_size: Maximum size of one safetensors file, in bytes or as a text like ``5GB``.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables.
        progress: Called with the bytes that were written, and all bytes.

    Returns:
        ``{"model": {...}, "optimizer": {"state": ..., "param_groups": ...}}``, or the part of it that was asked for.
        The optimizer is as torch's ``get_optimizer_state_dict`` returns it: with names of parameters, not numbers.

    Raises:
        CheckpointChangedError: Another save took the place of the checkpoint meanwhile.
        CheckpointNotFoundError: The part that was asked for does not exist.
        ConfigError: The arguments do not fit together.
        StorageError: A file cannot be written, or something other than a regular file is in its place.
        UnsupportedError: A file of the wanted format cannot hold a tensor.
    """
    if framework not in FRAMEWORKS:
        raise ConfigError(
            f"framework={framework!r}: must be one of {', '.join(map(repr, FRAMEWORKS))}"
            f"{did_you_mean(framework, FRAMEWORKS)}"
        )
    if model_only and optimizer_only:
        raise ConfigError("model_only and optimizer_only cannot both be True")
    if output_path is None and not return_dict:
        raise ConfigError("output_path=None without return_dict=True: the result would be lost; pass one of them")
    if config is None:
        config, threads = Config.from_env(), merge_threads()
        config = config if threads is None else dataclasses.replace(config, load_io_threads=threads)
    folder = known(location_to_read(save_path), config)
    output = None if output_path is None else local_path(output_path)
    with_optimizer = not model_only and (optimizer_only or folder_at(below(folder, "optimizer")).is_there())
    model = None if optimizer_only else _opened(below(folder, "model"), config, dtype)
    optimizer = _opened(below(folder, "optimizer"), config, None) if with_optimizer else None
    fqns = () if optimizer is None else _names(folder, config)
    if output is not None:
        size = parsed_size(max_shard_size)
        parts = [part for part in (model, optimizer) if part is not None]
        writing = _Writing(progress, sum(part.num_bytes for part in parts))
        with _output_folder(output) as directory:
            if model is not None and safetensors_format:
                _write_safetensors(directory, model, {} if untie_embeddings else model.aliases, size, writing)
            elif model is not None:
                _write_model(directory, model, {} if untie_embeddings else model.aliases, writing)
            if optimizer is not None:
                _write_optimizer(directory, optimizer, fqns, writing)
    if not return_dict:
        return {}
    merged: dict[str, Any] = {}
    if model is not None:
        merged["model"] = _loaded(model, dtype)
        if not untie_embeddings:
            merged["model"] = {key: merged["model"][model.aliases.get(key, key)] for key in merged["model"]}
    if optimizer is not None:
        merged["optimizer"] = of_one_optimizer(_loaded(optimizer, None), fqns)
    return merged


@dataclass(frozen=True)
class _Part:
    """The model or the optimizer, opened.

    Attributes:
        source: Where it is.
        opened: What is there.
        outputs: The same, and the dtypes that are written.
        aliases: Names of tied parameters, each with the first name of the same tensor.
    """

    source: Source
    opened: Opened
    outputs: Outputs
    aliases: dict[str, str]

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.outputs.tensors)

    def objects(self) -> dict[str, Any]:
        return read_objects([*self.outputs.objects], self.source, self.opened)

    def nested(self, values: dict[str, Any]) -> dict[Any, Any]:
        """Returns values by name in the containers that they were saved in, in the order in which they were saved."""
        order = self.opened.stored.planner_data
        first = {name: values[name] for name in order if name in values} if isinstance(order, dict) else {}
        ordered = {**first, **values}
        paths = paths_of(self.opened, [*ordered])
        return nested({paths[name]: value for name, value in ordered.items()})


def _opened(path: Place, config: Config, dtype: torch.dtype | None) -> _Part:
    if not folder_at(path).is_there():
        raise CheckpointNotFoundError(
            f"merge({parent_of(path)}): it has no {name_of(path)}: pass the folder of a step, as "
            "find_latest_ckpt_path gives it; if a part is missing there, pass model_only=True or optimizer_only=True",
            str(path),
        )
    source = Source(str(path), None, config)
    opened = source.open()
    outputs = outputs_of(opened.wanted, None if dtype is None else str(dtype).removeprefix("torch."))
    tied = description_in(parsed_user_metadata(opened.stored.user_metadata, str(path))).get("tied", [])
    names = {each.name for each in outputs.tensors}
    groups = [[name for name in group if name in names] for group in tied]
    aliases = {name: group[0] for group in groups for name in group[1:]}
    return _Part(source.planned_for(opened), opened, outputs, aliases)


class _Writing:
    """Tells how much of all files is written.

    Args:
        progress: Called with the bytes that were written, and all bytes; or None.
        total: Bytes of all files.
    """

    def __init__(self, progress: Callable[[int, int], object] | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._before = 0

    def tell(self, now: int) -> None:
        if self._progress is not None:
            self._progress(min(self._before + now, self._total), self._total)

    def end(self, num_bytes: int) -> None:
        self._before += num_bytes


def _loaded(part: _Part, dtype: torch.dtype | None) -> dict[str, Any]:
    """Loads all values of a part into memory."""
    values = _values_of(part, part.opened.stored.names())
    if dtype is not None:
        cast = {each.name: getattr(torch, each.dtype) for each in part.outputs.tensors}
        values = {key: value.to(cast[key]) if key in cast else value for key, value in values.items()}
    return part.nested(values)


def _names(folder: Place, config: Config) -> Collection[str]:
    """Returns the names of parameters; none if there is no model, since an optimizer can be merged without it."""
    try:
        return Stored(below(folder, "model"), config).keys()
    except CheckpointError:
        return ()


@contextmanager
def _output_folder(path: Path) -> Iterator[_core.Directory]:
    """Opens the folder for the files, and syncs it at the end. One that was made for them goes again if they fail."""
    was_there = path.exists()
    directory = made_folder(path)
    try:
        yield directory
    except BaseException:
        if not was_there:
            with suppress(CheckpointError):
                _core.Directory(str(path.parent)).remove_empty(path.name)
        raise
    directory.sync()


def _write_model(directory: _core.Directory, part: _Part, aliases: dict[str, str], writing: _Writing) -> None:
    tensors = [each for each in part.outputs.tensors if each.name not in aliases]
    values = stand_ins(tensors)
    values |= {alias: values[name] for alias, name in aliases.items()} | part.objects()
    _write_state(directory, _MODEL, part, part.nested(values), tensors, writing)


def _write_optimizer(directory: _core.Directory, part: _Part, fqns: Collection[str], writing: _Writing) -> None:
    """Options are compared to find the groups. So those that are tensors are loaded; they are small."""
    tensors = part.outputs.tensors
    values = stand_ins(tensors)
    options = {name: values[name] for name in values if name.startswith("param_groups.")}
    loaded = _values_of(part, [*options])
    merged = of_one_optimizer(part.nested(values | loaded | part.objects()), fqns)
    stored = {id(loaded[name]): options[name] for name in options}
    _write_state(directory, _OPTIMIZER, part, _exchanged(merged, stored), tensors, writing)


def _values_of(part: _Part, names: list[str]) -> dict[str, Any]:
    """Loads values of a part, by name."""
    stored = Stored(part.source.place, part.source.config)
    values: dict[str, Any] = {name: stored.empty(name) for name in names}
    if values:
        planner = BcpLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        run_load(values, BcpReader(part.source.place, config=part.source.config), planner, None, None)
        part.source.open()  # refuses another save than the one that is merged
    return values


def _exchanged(value: Any, by_id: dict[int, Any]) -> Any:
    """Returns a nested value in which tensors have given place to what is written of them."""
    if isinstance(value, torch.Tensor):
        return by_id[id(value)]
    if isinstance(value, dict):
        return {key: _exchanged(each, by_id) for key, each in value.items()}
    return [_exchanged(each, by_id) for each in value] if isinstance(value, list) else value


def _write_state(
    directory: _core.Directory, name: str, part: _Part, state: Any, tensors: Any, writing: _Writing
) -> None:
    with replaced_by(directory, name, f".{name}.{os.getpid()}.tmp") as path, naming_keys(part.opened.stored):
        export_state(str(path), state, tensors, part.source, part.opened, writing.tell)
        _core.compare_checksums(part.opened.wanted, [], directory=part.source.place, progress=None)
    writing.end(part.num_bytes)


def _write_safetensors(
    directory: _core.Directory, part: _Part, aliases: dict[str, str], most_bytes: int, writing: _Writing
) -> None:
    """Writes all files into a temporary folder, then renames them one by one, the index last.

    Files without their index are not a model, so a crash does not leave a mix of old and new files that looks like one.
    """
    outputs = dataclasses.replace(part.outputs, objects={})
    target = SafetensorsTarget(outputs, most_bytes, aliases)
    folder, at = directory.path, directory.fileno()
    with storage_errors("write", folder):
        before = [name for name in os.listdir(at) if name == INDEX or _SHARD.fullmatch(name)]  # noqa: PTH208
        for old in before:
            refuse_irregular(directory, old)
        with _folder_aside(directory) as aside:
            # This path leads to the open folder, even if another has its name by then.
            inside = Path(f"/proc/self/fd/{aside.fileno()}")
            for piece in target.pieces:
                with naming_keys(part.opened.stored):
                    piece.write(part.source, part.opened, inside, False, writing.tell)
                writing.end(piece.num_bytes)
            compare_checksums(part.source, part.opened, inside)
            target.finish(part.opened, inside, folder, False)
            names = sorted(os.listdir(aside.fileno()), key=lambda name: name == INDEX)  # noqa: PTH208
            for old in sorted(before, key=lambda old: old != INDEX):
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
