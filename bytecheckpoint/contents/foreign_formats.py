# SPDX-License-Identifier: Apache-2.0
"""Recognises checkpoints of other formats that are not read here, and says what helps. Needs no torch.

One table for folders, by the names in them, and one for files, by their first bytes. It is asked only where no
checkpoint was found.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.storage.checkpointing_steps import FIRST_FILE_OF_A_MODEL
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.paths import Place, name_of

__all__ = ["HEAD_BYTES", "folder_format", "foreign_file", "other_writer", "what_it_is"]

HEAD_BYTES = 4096  # of a file, which show what it is


@dataclass(frozen=True)
class _FolderFormat:
    """A format whose checkpoints are folders.

    Attributes:
        names: Regular expressions: for each, a name in the folder must match.
        what: What the folder is, behind "it is".
        advice: What to do with it; "" if it is read here.
        without: A name that is not in the folder.
        whole: What a whole one has, if it is read here; it is not read while some of that is missing.
    """

    names: tuple[str, ...]
    what: str
    advice: str = ""
    without: str = ""
    whole: str = ""


@dataclass(frozen=True)
class _FileFormat:
    """A format whose checkpoints are files.

    Attributes:
        head: Regular expression for the first bytes, from the first on.
        name: Regular expression for the name of the file.
        what: What the file is, behind "it is".
        advice: What to do with it.
    """

    head: bytes
    name: str
    what: str
    advice: str


_ZERO_FILES = r"(bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_(optim|model)_states\.pt"
_OF_UNIVERSAL = "the file mp_rank_00_model_states.pt and the folder zero"
_ONE_FILE = "read it by the library, and save its tensors with safetensors"

# In this order: the first that matches counts.
_FOLDERS = (
    _FolderFormat((r"\.metadata", r"metadata\.json"), "a checkpoint of Megatron-Core"),
    _FolderFormat(
        (r"zero", r".*mp_rank_\d+_model_states\.pt"),
        "a universal checkpoint of DeepSpeed",
        whole=_OF_UNIVERSAL,
    ),
    _FolderFormat(
        (rf"mp_rank_\d+_model_states\.pt|{_ZERO_FILES}",),
        "a step of DeepSpeed",
        whole="a file of optimizer states for each rank (zero_pp_rank_0_mp_rank_00_optim_states.pt), and model states: "
        "mp_rank_00_model_states.pt, or as many files as ranks for ZeRO-3; a universal one has "
        f"{_OF_UNIVERSAL}",
    ),
    _FolderFormat((r"zero",), "a universal checkpoint of DeepSpeed", without=".metadata", whole=_OF_UNIVERSAL),
    _FolderFormat(
        (r"mp_rank_\d+(_\d+)*",),
        "a step of Megatron-LM in its format 'torch', a file for each rank of tensor and pipeline parallelism",
        "have Megatron-LM write it as torch_dist, by --ckpt-convert-format torch_dist --ckpt-convert-save OUT; each "
        "model_optim_rng.pt in it is a file of torch.save",
    ),
    _FolderFormat((r"model_world_size_\d+_rank_\d+\.pt",), "files of the ranks of a job, as verl writes"),
    _FolderFormat(
        (r"optim_world_size_\d+_rank_\d+\.pt",),
        "files of the ranks of a job, as verl writes, without a model",
        "pass those of one kind, as 'FOLDER/optim_world_size_8_rank_*.pt'",
    ),
    _FolderFormat(
        (r"metadata\.pkl", r".*_\d+\.pt"),
        "a checkpoint of torch_checkpointing, a file for each item and rank",
    ),
    _FolderFormat(
        (FIRST_FILE_OF_A_MODEL,),
        "files of ranks, as torch_checkpointing writes where no item has a resharder",
        "pass those of one item, as 'FOLDER/model_*.pt'",
        without=".metadata",
    ),
    _FolderFormat(
        (r"manifest\.ocdbt|ocdbt\.process_\d+",),
        "a folder of Orbax whose arrays are in an OCDBT database",
        "restore it by Orbax and save it with use_ocdbt=False, or save its arrays with safetensors.flax.save_file",
    ),
    _FolderFormat((r"_METADATA",), "a checkpoint of Orbax"),
    _FolderFormat(
        (r"_CHECKPOINT_METADATA|commit_success\.txt",),
        "a step of Orbax",
        "pass a folder in it that has a file _METADATA; those in an OCDBT database are not read",
    ),
    _FolderFormat((r"\.zarray|zarr\.json|\.zgroup",), "an array or a group of zarr", _ONE_FILE),
    _FolderFormat(
        (r"checkpoint_metadata\.json", r"model_config\.json"),
        "a step of nanotron",
        "convert it by nanotron's examples/llama/convert_nanotron_to_hf.py",
    ),
    _FolderFormat(
        (r".*\.pdparams|\d+\.metadata",),
        "a checkpoint of PaddlePaddle",
        "load it by paddle, and save it with safetensors.paddle.save_file",
    ),
    _FolderFormat(
        (r".*\.safetensors(\.index\.json)?|pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?",),
        "a folder of weights, as Hugging Face writes",
    ),
    _FolderFormat(
        (r"trainer_state\.json",),
        "a step of transformers' Trainer without whole weights",
        "save the model by save_pretrained, and take that folder",
    ),
    _FolderFormat(
        (r"(.*-)?ep\d+-ba\d+(-rank\d+)?\.pt|ep\d+-ba\d+",),
        "a run of Composer",
        "a file epN-baM-rank0.pt in it is one of torch.save, which can be read by itself",
    ),
)

_PICKLE = rb"\x80[\x02-\x05]"
_FILES = (
    _FileFormat(
        rb"GGUF",
        r".*",
        "a GGUF file of llama.cpp",
        "transformers reads it by from_pretrained(FOLDER, gguf_file=NAME); take what save_pretrained then writes",
    ),
    _FileFormat(
        rb"\|TZR\|",
        r".*",
        "a file of tensorizer",
        "read it by tensorizer.TensorDeserializer, and save its tensors with safetensors",
    ),
    _FileFormat(rb"", r".*\.flashpack", "a file of flashpack", _ONE_FILE),
    _FileFormat(
        rb"\x89HDF\r\n\x1a\n", r".*", "an HDF5 file, as Keras writes", _ONE_FILE.replace("the library", "h5py")
    ),
    _FileFormat(rb"\x93NUMPY", r".*", "an array of numpy", _ONE_FILE.replace("the library", "numpy.load")),
    _FileFormat(
        rb"\x1f\x8b|\xfd7zXZ\0|BZh|\x28\xb5\x2f\xfd", r".*", "a compressed file", "unpack it, and take what is in it"
    ),
    _FileFormat(
        rb"(?s:.{257})ustar", r".*", "a tar archive, as NeMo writes (.nemo)", "unpack it, and take what is in it"
    ),
    _FileFormat(
        _PICKLE,
        r".*\.(pdparams|pdopt)",
        "a file of PaddlePaddle",
        "load it by paddle.load, and save it with safetensors.paddle.save_file",
    ),
    _FileFormat(
        rb"(?s:" + _PICKLE + rb".*joblib\.numpy_pickle)",
        r".*",
        "a file of joblib",
        "if you trust it, load it by joblib.load, and save its arrays with safetensors",
    ),
    _FileFormat(
        _PICKLE,
        r".*",
        "a bare pickle, and not one of torch.save",
        "if you trust it, load it by pickle.load, and save it with torch.save",
    ),
    _FileFormat(rb"", r".*\.onnx", "a program of ONNX", "take the checkpoint that it was exported from"),
)


def folder_format(place: Place) -> str:
    """Returns what a folder is in which no checkpoint was found, and what helps; "" if it is of no known format."""
    found = _format_of(place)
    if found is not None and found.whole:
        return f"it is {found.what}, but not whole: a whole one has {found.whole}"
    return "" if found is None or not found.advice else _not_read(found)


def what_it_is(place: Place) -> str:
    """Returns what a step folder of another library is, and what reads it or helps; "" if it is of no known format."""
    found = _format_of(place)
    if found is None:
        return ""
    if found.advice:
        return _not_read(found)
    if_whole = " if it is whole" if found.whole else ""
    return f"it is {found.what}, which ls, verify, load and convert take{if_whole}, but no step of a run of DCP"


def other_writer(place: Place) -> str:
    """Returns what a folder is if another library's format has it, whether that is read here or not; else ""."""
    found = _format_of(place)
    return "" if found is None else found.what


def _format_of(place: Place) -> _FolderFormat | None:
    with suppress(CheckpointError):  # it is not there, or cannot be looked at
        names = folder_at(place).names()
        for each in _FOLDERS:
            has_names = all(any(re.fullmatch(expression, name) for name in names) for expression in each.names)
            if has_names and each.without not in names:
                return each
    return None


def foreign_file(path: Place, head: bytes) -> str:
    """Does what ``folder_format`` does, for a file.

    Args:
        path: Its path or URL.
        head: Its first ``HEAD_BYTES``.
    """
    name = name_of(path)
    for each in _FILES:
        if re.match(each.head, head) and re.fullmatch(each.name, name):
            return _not_read(each)
    return ""


def _not_read(found: _FolderFormat | _FileFormat) -> str:
    return f"it is {found.what}, which is not read here: {found.advice}"
