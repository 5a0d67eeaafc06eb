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
    """

    names: tuple[str, ...]
    what: str
    advice: str = ""


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
_ONE_FILE = "read it by the library, and save its tensors with safetensors"

# In this order: the first that matches counts.
_FOLDERS = (
    _FolderFormat((r"\.metadata", r"metadata\.json"), "a checkpoint of Megatron-Core"),
    _FolderFormat(
        (r"zero", r"mp_rank_\d+_model_states\.pt"),
        "a universal checkpoint of DeepSpeed",
        "each zero/NAME/fp32.pt in it is a file of torch.save, which can be read by itself",
    ),
    _FolderFormat(
        (rf"mp_rank_\d+_model_states\.pt|{_ZERO_FILES}",),
        "a step of DeepSpeed",
    ),
    _FolderFormat(
        (r"mp_rank_\d+(_\d+)*",),
        "a step of Megatron-LM in its format 'torch', a file for each rank of tensor and pipeline parallelism",
        "have Megatron-LM write it as torch_dist, by --ckpt-convert-format torch_dist --ckpt-convert-save OUT; each "
        "model_optim_rng.pt in it is a file of torch.save",
    ),
    _FolderFormat(
        (r"optim_world_size_\d+_rank_\d+\.pt",),
        "files of the ranks of a job, as verl writes, without a model",
        "pass those of one kind, as 'FOLDER/optim_world_size_8_rank_*.pt'",
    ),
    _FolderFormat(
        (r"metadata\.pkl", r".*_\d+\.pt"),
        "a checkpoint of torch_checkpointing, a file for each rank",
        "pass those of one item, as 'FOLDER/model_*.pt'",
    ),
    _FolderFormat(
        (r"manifest\.ocdbt|ocdbt\.process_\d+",),
        "arrays of Orbax in an OCDBT database",
        "read them by Orbax, and save them with safetensors.flax.save_file",
    ),
    _FolderFormat(
        (r"_CHECKPOINT_METADATA|_METADATA|commit_success\.txt",),
        "a checkpoint of Orbax",
        "read it by Orbax, and save its arrays with safetensors.flax.save_file",
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
    """Returns what a folder is if it is of a format that is not read here, and what helps; "" if it is of none."""
    found = _format_of(place)
    return "" if found is None or not found.advice else f"it is {found.what}, which is not read here: {found.advice}"


def what_it_is(place: Place) -> str:
    """Does what ``folder_format`` does, also of formats that are read."""
    found = _format_of(place)
    if found is None or found.advice:
        return folder_format(place)
    return f"it is {found.what}, which ls, verify, load and convert take, but no step of a run of DCP"


def other_writer(place: Place) -> str:
    """Returns what a folder is if another library's format has it, whether that is read here or not; else ""."""
    found = _format_of(place)
    return "" if found is None else found.what


def _format_of(place: Place) -> _FolderFormat | None:
    with suppress(CheckpointError):  # it is not there, or cannot be looked at
        names = folder_at(place).names()
        for each in _FOLDERS:
            if all(any(re.fullmatch(expression, name) for name in names) for expression in each.names):
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
            return f"it is {each.what}, which is not read here: {each.advice}"
    return ""
