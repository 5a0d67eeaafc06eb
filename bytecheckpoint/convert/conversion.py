# SPDX-License-Identifier: Apache-2.0
"""Converts a checkpoint of any format to another one."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bytecheckpoint.config import Config
from bytecheckpoint.convert.adapter import Adapter
from bytecheckpoint.convert.average import Average
from bytecheckpoint.convert.change import Change
from bytecheckpoint.convert.dcp_target import DcpTarget
from bytecheckpoint.convert.destination import Conversion, Destination, bytes_of
from bytecheckpoint.convert.hf_config import HfConfig, hf_config_of, missing_config
from bytecheckpoint.convert.local_destination import LocalDestination
from bytecheckpoint.convert.outputs import Outputs, outputs_of
from bytecheckpoint.convert.placeholders import refuse_placeholders
from bytecheckpoint.convert.ranks import Ranks
from bytecheckpoint.convert.safetensors_target import SafetensorsTarget
from bytecheckpoint.convert.source import Opened, Source
from bytecheckpoint.convert.store_destination import StoreDestination
from bytecheckpoint.convert.target import Target
from bytecheckpoint.errors import CheckpointChangedError, ConfigError
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.near_names import did_you_mean
from bytecheckpoint.report.text import size_text
from bytecheckpoint.storage.paths import location, location_to_read

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["FORMATS", "ConvertReport", "Format", "convert"]

Format = Literal["safetensors", "bcp", "dcp", "torch"]
FORMATS: tuple[Format, ...] = ("safetensors", "bcp", "dcp", "torch")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True, kw_only=True)
class ConvertReport:
    """What a conversion did, or would do.

    Attributes:
        source: What was read.
        target: Folder that was written.
        format: Its format.
        num_tensors: Number of tensors.
        num_objects: Number of values that are not tensors.
        num_files: Number of data files.
        num_bytes: Bytes of these files, without checksums and padding.
        num_cast: Number of tensors whose dtype was changed.
        num_values_cast: Number of their elements.
        num_resumed: Number of files that an earlier, interrupted conversion had finished.
        config_files: Names of the files beside the weights: the config, and those of the tokenizer.
        notes: What users are to know, one sentence each, such as what ``from_pretrained`` would miss.
        is_verified: Whether all files were read back and compared.
        seconds: Seconds that it took.
    """

    source: str
    target: str
    format: str
    num_tensors: int
    num_objects: int
    num_files: int
    num_bytes: int
    num_cast: int = 0
    num_values_cast: int = 0
    num_resumed: int = 0
    config_files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_verified: bool = False
    seconds: float = 0.0

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """Returns one line for people."""
        rate = f" in {self.seconds:.2f} s" if self.seconds else ""
        notes = [f"{self.num_cast:,} cast: {self.num_values_cast:,} values"] if self.num_cast else []
        notes += [f"{self.num_resumed} files resumed"] if self.num_resumed else []
        notes += ["verified"] * self.is_verified
        files = f"{self.num_files} file{'s' if self.num_files > 1 else ''}"
        tensors = f"{self.num_tensors:,} tensor{'s' if self.num_tensors > 1 else ''}"
        if self.config_files:
            files += f", with {', '.join(self.config_files)}"
        if self.num_objects:
            tensors += f", {self.num_objects:,} object{'s' if self.num_objects > 1 else ''}"
        return (
            f"{self.target}: {tensors}, {size_text(self.num_bytes)} in {files}{rate}"
            f"{' (' + '; '.join(notes) + ')' if notes else ''}"
        )


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: Format = "safetensors",
    spec: LoadSpec | None = None,
    average: Sequence[str | os.PathLike[str]] = (),
    weights: Sequence[float] | None = None,
    adapter: str | os.PathLike[str] | None = None,
    lora_alpha: float | None = None,
    dtype: str | None = None,
    hf_config: str | os.PathLike[str] | None = None,
    shard_size: int | str = "5GB",
    workers: int = 1,
    resume: bool = False,
    verify: bool = False,
    dry_run: bool = False,
    process_group: dist.ProcessGroup | None = None,
    config: Config | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ConvertReport:
    """Converts a checkpoint to another format.

    Local, unless a group is passed. Memory does not grow with the checkpoint, nor with its largest tensor: each file is
    streamed from the boxes of the source. The target appears whole or not at all: files are written into a folder
    beside it, which gets its name at the end. Nothing is changed in place.

    Args:
        source: A checkpoint of ours or of stock DCP, or safetensors; a path, or the URL of a store.
        target: Folder to make, or file for ``torch``. It must not exist; a folder may be empty. For ``bcp`` it may be
            the URL of a store, where there must be no checkpoint.
        to: ``safetensors``: a folder that Hugging Face's ``from_pretrained`` reads, with ``hf_config``. ``bcp``: a
            checkpoint of ours. ``dcp``: a checkpoint as stock DCP writes it, without our checksums. ``torch``: one file
            that ``torch.load`` reads, with the state dict nested as it was saved.
        spec: What to take of the source, under which names, in which form. ``cast`` by patterns gives what matches
            another dtype than ``dtype``; ``cast="any"`` and the like, and ``strict``, say nothing where no state is.
        average: Other checkpoints of the same tensors, of each of which ``spec`` takes the same: what is written is the
            average of all. It is computed in float32 (of float64 in float64), and rounded once. Tensors of integers
            must be equal; objects are those of ``source``.
        weights: Weight of each, that of ``source`` first; they are taken as they are, and add up to 1 for a mean. None:
            all alike.
        adapter: Folder of a LoRA adapter of peft, which is added to ``source``, its base, as ``merge_and_unload`` does;
            or a checkpoint with the same names. Sums are computed in float32, and rounded once.
        lora_alpha: ``lora_alpha`` of the adapter; None takes that of its ``adapter_config.json``.
        dtype: Dtype to which floating-point tensors are converted: ``float32``, ``bfloat16``, ``float16`` or
            ``float64``. Floats of 8 bits and integers stay as they are.
        hf_config: Local folder of a model of Hugging Face, of which config and tokenizer are copied into a target of
            safetensors. The config gets the dtype of what is written, and loses ``quantization_config`` if no tensor is
            quantized. No weights and no code are copied. ``resume`` takes another one, too.
        shard_size: Most bytes of one file, as a number or a text like ``5GB``. A larger tensor gets a file of its own
            in safetensors, and is cut along its first dim in checkpoints. A file of torch is always one.
        workers: Number of processes that write files at the same time.
        resume: Whether to go on with a conversion to this target that was interrupted. Not for a URL.
        verify: Whether to read back what was written, past the page cache, and compare it. At a URL this comes after
            the commit.
        dry_run: Whether to look only at what would be done.
        process_group: Group whose ranks share the work, each with as many workers. The call is then collective, and all
            ranks must see the same directory. None: this process alone, also in a distributed job. Not for a URL.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables.
        progress: Called with the bytes that this rank has written, and all that it is to write.

    Raises:
        CheckpointError: The source cannot be read; see ``BcpReader``.
        CheckpointChangedError: Another save, or other files, took the place of the source meanwhile.
        CheckpointExistsError: There is something at ``target``.
        CheckpointBusyError: Another process converts to this target.
        ConfigError: Arguments do not fit the source: a pattern matches nothing, safetensors cannot hold an object.
        StorageError: There is no room, or the file system refused.
        UnsupportedError: The format cannot hold a tensor.
    """
    begin = time.monotonic()
    config = config or Config.from_env()
    place, folder = location_to_read(source), location(target)
    job = Source(str(place), spec, config, change=_change_of(average, weights, adapter, lora_alpha))
    destination = _destination(folder, config)
    ranks = Ranks(process_group, config, folder)

    def prepared() -> tuple[Opened, Target, ConvertReport]:
        if workers < 1:
            raise ConfigError(f"workers={workers}: must be at least 1")
        destination.check(to, resume=resume, is_shared=process_group is not None)
        opened = job.open()
        casts = spec.cast if spec is not None and not isinstance(spec.cast, str) else None
        outputs = outputs_of(opened.wanted, dtype, casts)
        refuse_placeholders(outputs, job, opened)
        beside = _beside_of(to, hf_config, outputs, job)
        made = _target_of(to, outputs, parsed_size(shard_size), workers * ranks.size, folder, beside)
        made.check(opened)
        return opened, made, _report_of(str(place), str(folder), to, outputs, made, beside)

    opened, made, report = ranks.together(prepared)
    if dry_run:
        return report
    job = job.planned_for(opened)
    first = ranks.shared(_what_is_read(job, opened))
    ranks.together(lambda: _check_same_save(_what_is_read(job, opened), first, str(place)))
    num_left = destination.write(Conversion(job, opened, made, ranks, workers, verify, progress), resume=resume)
    return dataclasses.replace(
        report, num_resumed=len(made.pieces) - num_left, is_verified=verify, seconds=time.monotonic() - begin
    )


def _destination(place: Path | str, config: Config) -> Destination:
    return LocalDestination(place) if isinstance(place, Path) else StoreDestination(place, config)


def _change_of(
    average: Sequence[str | os.PathLike[str]],
    weights: Sequence[float] | None,
    adapter: str | os.PathLike[str] | None,
    lora_alpha: float | None,
) -> Change | None:
    if isinstance(average, str | os.PathLike):
        raise ConfigError(f"average={average!r}: must be a list of checkpoints")
    if average and adapter is not None:
        raise ConfigError("average and adapter: pass one of them, and convert twice")
    if weights is not None and not average:
        raise ConfigError(f"weights={[*weights]}: only with average")
    if lora_alpha is not None and adapter is None:
        raise ConfigError(f"lora_alpha={lora_alpha}: only with adapter")
    if adapter is not None:
        return Adapter(os.fspath(adapter), lora_alpha)
    return Average([str(location_to_read(each)) for each in average], weights) if average else None


def _what_is_read(job: Source, opened: Opened) -> tuple[str, bytes]:
    return opened.stored.save_id, b"" if job.change is None else job.change.identity()


def _check_same_save(read: tuple[str, bytes], of_first: tuple[str, bytes], source: str) -> None:
    if read != of_first:
        raise CheckpointChangedError(
            f"convert({source}): ranks have opened different saves ({of_first[0]} and {read[0]}): a newer commit came "
            "in between; begin anew",
            source,
        )


def _beside_of(to: Format, folder: str | os.PathLike[str] | None, outputs: Outputs, source: Source) -> HfConfig:
    if folder is None:
        return HfConfig({}, (missing_config(source.place),) if to == "safetensors" else ())
    if to != "safetensors":
        raise ConfigError(f"hf_config={os.fspath(folder)!r}: only for safetensors, not for to={to!r}")
    return hf_config_of(folder, outputs)


def _report_of(source: str, target: str, to: Format, outputs: Outputs, made: Target, beside: HfConfig) -> ConvertReport:
    return ConvertReport(
        source=source,
        target=target,
        format=to,
        num_tensors=outputs.num_items,
        num_objects=len(outputs.objects),
        num_files=len(made.pieces),
        num_bytes=bytes_of(made.pieces),
        num_cast=outputs.num_cast,
        num_values_cast=outputs.num_values_cast,
        config_files=tuple(beside.files),
        notes=beside.notes,
    )


def parsed_size(size: int | str) -> int:
    """Returns a number of bytes, which may be given as a text like ``5GB``.

    Raises:
        ConfigError: It is no size, or not above 0.
    """
    if isinstance(size, int):
        number = float(size)
    else:
        text = size.strip().upper()
        unit = next((unit for unit in sorted(_UNITS, key=len, reverse=True) if text.endswith(unit)), "")
        try:
            number = float(text.removesuffix(unit)) * _UNITS.get(unit, 1)
        except ValueError:
            number = 0
    if not number >= 1:
        raise ConfigError(f"size {size!r}: must be a number of bytes above 0, such as 5GB or 512MiB")
    return int(number)


def _target_of(
    to: Format, outputs: Outputs, most_bytes: int, workers: int, place: Path | str, beside: HfConfig
) -> Target:
    if to == "safetensors":
        return SafetensorsTarget(outputs, most_bytes, beside=beside.files)
    if to in ("bcp", "dcp"):
        most_bytes = min(most_bytes, max(1, math.ceil(outputs.num_bytes / workers)))
        return DcpTarget(outputs, most_bytes, is_plain=to == "dcp", url=place if isinstance(place, str) else None)
    if to == "torch":
        from bytecheckpoint.convert.torch_target import TorchTarget  # imports torch, which the others need not

        return TorchTarget(outputs, Path(place).name)
    raise ConfigError(f"to={to!r}: must be one of {', '.join(FORMATS)}{did_you_mean(to, FORMATS)}")
