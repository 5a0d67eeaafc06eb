# SPDX-License-Identifier: Apache-2.0
"""How the model in a folder of Hugging Face is quantized, as its ``config.json`` says."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.listing import listed
from bytecheckpoint.load_spec.dequantize import Dequantize, DequantizeMXFP4
from bytecheckpoint.load_spec.patterns import matches
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.load_spec.transform import Transform
from bytecheckpoint.native import _core

__all__ = ["dequantizing"]

# Scales of what goes through a layer, which a layer that is not quantized does not have.
_OF_ACTIVATIONS = ("*activation_scale", "*input_scale", "*input_scale_ub", "*output_scale")


def dequantizing(folder: str | os.PathLike[str], dtype: str = "bfloat16") -> LoadSpec:
    """Returns the spec that loads or converts a quantized model of Hugging Face as one that is not quantized.

    It reads ``quantization_config`` of ``config.json`` and the names of the tensors. It knows ``fp8`` (DeepSeek, Qwen;
    DeepSeek V4 with experts of 4 bits), ``fbgemm_fp8``, ``compressed-tensors`` with weights that are floats of 8 bits,
    and ``mxfp4`` (GPT-OSS). Scales of activations are left out.

    Args:
        folder: The local folder, with safetensors and ``config.json``.
        dtype: ``bfloat16``, ``float16`` or ``float32``.

    Raises:
        ConfigError: ``config.json`` cannot be read, or says nothing of this kind.
        CheckpointError: The safetensors cannot be opened.
    """
    file = Path(folder) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"dequantizing({os.fspath(folder)!r}): {file}: {error}") from None
    quantization = config.get("quantization_config") if isinstance(config, Mapping) else None
    if not isinstance(quantization, Mapping):
        raise ConfigError(f"dequantizing({os.fspath(folder)!r}): {file} has no quantization_config")
    names = _core.Checkpoint.open(os.fspath(folder)).names()
    try:
        transform = _transform_of(quantization, names, dtype)
    except (TypeError, AttributeError, ConfigError) as error:
        raise ConfigError(f"dequantizing({os.fspath(folder)!r}): {file}: {error}") from None
    exclude = [pattern for pattern in _OF_ACTIVATIONS if any(matches(pattern, name) for name in names)]
    return LoadSpec(exclude=exclude, transforms=[transform])


def _transform_of(quantization: Mapping[str, Any], names: Sequence[str], dtype: str) -> Transform:
    method = quantization.get("quant_method")
    if method == "mxfp4":
        return DequantizeMXFP4("*_blocks", "*_scales", "*", dtype)
    if method == "fp8" and not any(name.endswith("scale_inv") for name in names):  # as DeepSeek itself names V4
        block = _block(quantization.get("weight_block_size"))
        return Dequantize("*.weight", "*.scale", block=block, dtype=dtype)
    if method == "fp8":
        return Dequantize("*", "*_scale_inv", block=_block(quantization.get("weight_block_size")), dtype=dtype)
    if method == "fbgemm_fp8":
        return Dequantize("*", "*_scale", dtype=dtype)
    if method != "compressed-tensors":
        algorithm = quantization.get("quant_algo")
        raise ConfigError(f"quant_method {method!r}{f' with {algorithm}' if algorithm else ''} is not supported")
    weights = [group.get("weights") or {} for group in quantization.get("config_groups", {}).values()]
    blocks = {tuple(each["block_structure"]) for each in weights if each.get("strategy") == "block"}
    if not weights or any((each.get("type"), each.get("num_bits")) != ("float", 8) for each in weights):
        kinds = _kinds_text(quantization, weights)
        raise ConfigError(f"compressed-tensors: {kinds} are not supported: only weights that are floats of 8 bits are")
    if len(blocks) > 1 or (blocks and any(each.get("strategy") != "block" for each in weights)):
        raise ConfigError("compressed-tensors: groups of layers differ in their blocks, which is not supported")
    return Dequantize("*", "*_scale", block=_block([*blocks.pop()] if blocks else None), dtype=dtype)


def _kinds_text(quantization: Mapping[str, Any], weights: Sequence[Mapping[str, Any]]) -> str:
    """Returns how the weights are quantized, in words, such as ``weights of 4-bit int (pack-quantized)``."""
    kinds = {f"{each.get('num_bits')}-bit {each.get('type')}" for each in weights} or {"no group"}
    return f"weights of {listed(sorted(kinds))} ({quantization.get('format', 'no format')})"


def _block(block: Any) -> Sequence[int] | None:
    if block is None:
        return None
    if not isinstance(block, list) or not block or not all(isinstance(size, int) and size > 0 for size in block):
        raise ConfigError(f"the size of a block is {block!r}")
    return block
