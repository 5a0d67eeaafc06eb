# SPDX-License-Identifier: Apache-2.0
"""What a folder of Hugging Face has beside the weights: the config, and the files of the tokenizer."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytecheckpoint.convert.outputs import Outputs
from bytecheckpoint.errors import ConfigError, StorageError
from bytecheckpoint.storage.small_files import read_small_file

__all__ = ["CONFIG", "FILE_NAMES", "HfConfig", "hf_config_of", "missing_config"]

CONFIG = "config.json"
_TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tekken.json", "spiece.model"),
    *("sentencepiece.bpe.model", "vocab.json", "vocab.txt", "merges.txt"),
)
_OTHERS = (
    *("generation_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("chat_template.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
# All that is taken from a folder. No weights, and no code.
FILE_NAMES = (CONFIG, *_TOKENIZERS, *_OTHERS)

# The largest tokenizers have about 35 MB.
_MOST_BYTES = 128 << 20
_FLOATS = ("float64", "float32", "bfloat16", "float16")
# A model with tensors of other dtypes than these is quantized.
_PLAIN = (*_FLOATS, "int64", "bool", "complex64", "complex128")
# The names of the dtype in a config: transformers 5 writes the second, and both read the first.
_DTYPE_KEYS = ("torch_dtype", "dtype")
_QUANTIZATION = "quantization_config"


@dataclass(frozen=True)
class HfConfig:
    """The files that stand beside the weights.

    Attributes:
        files: Their contents, by name.
        notes: What users are to know of them, one sentence each.
    """

    files: Mapping[str, bytes]
    notes: tuple[str, ...]


def hf_config_of(folder: str | os.PathLike[str], outputs: Outputs) -> HfConfig:
    """Reads config and tokenizer from a folder of Hugging Face, and makes the config that of what is written.

    ``torch_dtype`` and ``dtype`` become the dtype that most elements have, also in the configs within it. A quantized
    model keeps them. ``quantization_config`` is left out if no tensor is quantized (any more).

    Args:
        folder: Local folder, such as a snapshot in Hugging Face's cache. Links of files are followed.
        outputs: What is written.

    Raises:
        ConfigError: ``config.json`` is not there, or is none; or one of the files is too large, or no regular file.
    """
    files = {}
    for name in FILE_NAMES:
        content = _content(Path(folder, name))
        if content is not None:
            files[name] = content
    if CONFIG not in files:
        raise ConfigError(
            f"hf_config={os.fspath(folder)!r}: there is no {CONFIG}; pass a local folder of the model that these "
            "weights are of"
        )
    try:
        config = json.loads(files[CONFIG])
    except ValueError as error:
        raise ConfigError(f"hf_config={os.fspath(folder)!r}: {CONFIG}: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"hf_config={os.fspath(folder)!r}: {CONFIG} is no JSON object")
    notes = _adapt(config, outputs)
    files[CONFIG] = json.dumps(config, indent=2, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
    if not any(name in files for name in _TOKENIZERS):
        notes.append(f"{os.fspath(folder)} has no tokenizer: AutoTokenizer.from_pretrained will not read the target")
    if "auto_map" in config:
        notes.append(f"{CONFIG} names code of the model's own (auto_map), which was not copied")
    return HfConfig(files, tuple(notes))


def missing_config(source: str) -> str:
    """Returns the note that the target has no config, and where it may come from."""
    folder = source if Path(source, CONFIG).is_file() else "DIR"
    return (
        f"from_pretrained also needs {CONFIG}, and a tokenizer, which are not written: pass hf_config "
        f"(--hf-config {folder}), a folder of the model that these weights are of"
    )


def _content(path: Path) -> bytes | None:
    try:
        return read_small_file(Path(os.path.realpath(path)), _MOST_BYTES)  # in Hugging Face's cache, files are links
    except StorageError as error:
        raise ConfigError(f"hf_config: {error}") from error


def _adapt(config: dict[str, Any], outputs: Outputs) -> list[str]:
    """Makes a config that of what is written. Returns notes."""
    notes = []
    is_quantized = any(each.dtype not in _PLAIN for each in outputs.tensors)
    if not is_quantized and config.pop(_QUANTIZATION, None) is not None:
        notes.append(f"{_QUANTIZATION} was left out of {CONFIG}: no tensor is quantized")
    numels: Counter[str] = Counter()
    for each in outputs.tensors:
        if each.dtype in _FLOATS:
            numels[each.dtype] += each.num_bytes // each.itemsize
    if not numels or is_quantized:
        return notes
    (dtype, _), *others = numels.most_common()
    _set_dtype(config, dtype)
    if not any(key in config for key in _DTYPE_KEYS):
        config[_DTYPE_KEYS[0]] = dtype
    if others:
        rest = ", ".join(f"{numel:,} of {name}" for name, numel in others)
        notes.append(
            f"{CONFIG} says {dtype}, which most elements have ({numels[dtype]:,}; {rest}): from_pretrained casts to it "
            "by default"
        )
    return notes


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Sets the dtype wherever a config has one, also in those of the parts of a model, such as ``text_config``."""
    for key, value in config.items():
        if key in _DTYPE_KEYS:
            config[key] = dtype
        elif isinstance(value, dict) and key.endswith("_config") and key != _QUANTIZATION:
            _set_dtype(value, dtype)
