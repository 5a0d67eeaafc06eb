# SPDX-License-Identifier: Apache-2.0
"""Transforms that dequantize: tensors that are computed from codes and scales while they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bytecheckpoint.errors import ConfigError, KeyMismatchError
from bytecheckpoint.load_spec.patterns import filled
from bytecheckpoint.load_spec.transform import Naming, Tensors, Transform, matching

if TYPE_CHECKING:
    from bytecheckpoint.native import _core

__all__ = ["Dequantize", "DequantizeMXFP4"]

_QUANTIZED = ("float8_", "float4_")
_BYTES, _EXPONENTS = ("int8", "uint8"), ("float8_e8m0fnu", "uint8")


@dataclass(frozen=True)
class Dequantize(Transform):
    """Dequantizes floats of 8 bits: ``Dequantize("*.weight", scale="*.weight_scale_inv", block=[128, 128])``.

    A value is its code times the scale of its block: both as float32, and the product rounded to ``dtype``, to nearest,
    ties to even. This is what transformers computes when it loads such a model with ``dequantize=True``, to the bit.
    The scales are taken from the checkpoint: they are no keys of what is loaded.

    Codes are of a ``float8`` dtype, or ``float4_e2m1fn_x2``, which has two in a byte. So have int8 and uint8, in which
    some writers pack them (DeepSeek V4), if their scales are exponents. Scales are of float32, bfloat16, float16,
    ``float8_e8m0fnu``, or uint8, which is an exponent plus 127. A tensor that ``source`` matches and that has neither a
    quantized dtype nor scales stays as it is.

    Args:
        source: Names of the quantized tensors; may also have one ``*``.
        scale: Names of their scales, in which ``*`` stands for the same text.
        to: Names of the new tensors; None keeps the names.
        block: Size of the blocks that have one scale each, in the last dims; a block at the end may be cut. Dims before
            these have a scale for each index. None: there is one scale for all of a tensor, one for each row, or as
            many as divide each dim evenly. Codes of 4 bits always have as many as divide each dim evenly.
        dtype: ``bfloat16``, ``float16`` or ``float32``.
    """

    source: str
    scale: str
    to: str | None = None
    block: Sequence[int] | None = None
    dtype: str = "bfloat16"

    def apply(self, tensors: Tensors) -> None:
        """See ``Transform``."""
        there = set(tensors.names())
        found = matching(self, tensors, self.source)
        scale_of = {name: _filled(self.scale, values) for name, values in found.items()}
        scales: dict[str, _core.ViewTensor] = {}
        num_left = 0
        for name, scale in scale_of.items():
            if name in scale_of.values():
                continue
            with Naming(self, name):
                if scale not in there:
                    if tensors.look(name).dtype.startswith(_QUANTIZED):
                        raise KeyMismatchError(f"the checkpoint lacks its scales '{scale}'")
                    num_left += 1
                    continue
                if scale not in scales:
                    scales[scale] = tensors.take(scale)
                codes = tensors.take(name)
                to = name if self.to is None else _filled(self.to, found[name])
                tensors.give(to, self._values(tensors, codes, scales[scale]))
        if num_left == len(found):
            raise KeyMismatchError(f"{self}: no key that fits '{self.source}' has scales in the checkpoint")

    def inverted(self) -> Transform:
        """See ``Transform``."""
        raise ConfigError(f"{self}: it cannot be inverted: nothing here quantizes '{self.source}'")

    def _values(self, tensors: Tensors, codes: _core.ViewTensor, scales: _core.ViewTensor) -> _core.ViewTensor:
        shape, num_dims = codes.shape, len(codes.shape)
        is_packed = codes.dtype in _BYTES and scales.dtype in _EXPONENTS
        is_of_4_bits = is_packed or codes.dtype.startswith("float4_")
        if is_of_4_bits and shape:
            shape = [*shape[:-1], 2 * shape[-1]]
        if self.block is not None and not is_of_4_bits:
            if len(self.block) > num_dims:
                raise ConfigError(f"block {[*self.block]} for a tensor of shape {shape}")
            block = [1] * (num_dims - len(self.block)) + [*self.block]
        elif _numel(scales.shape) == 1:
            block = [max(size, 1) for size in shape]
            scales = scales.reshape([1] * num_dims)
            for dim in (d for d, size in enumerate(shape) if size == 0):
                scales = scales.narrow(dim, 0, 0)
        elif num_dims > 1 and [*scales.shape] == shape[:-1]:
            block = [1] * (num_dims - 1) + [max(shape[-1], 1)]
            scales = scales.reshape([*scales.shape, 1])
        else:
            counts = [*scales.shape]
            if len(counts) != num_dims or any(n < 1 or size % n for size, n in zip(shape, counts, strict=True)):
                raise ConfigError(f"scales of shape {counts} do not divide {shape} evenly: say the size of a block")
            block = [max(size // n, 1) for size, n in zip(shape, counts, strict=True)]
        return tensors.dequantize(codes, scales, block, _dtype_name(self.dtype), is_packed)


@dataclass(frozen=True)
class DequantizeMXFP4(Transform):
    """Dequantizes MXFP4 as GPT-OSS stores it: ``DequantizeMXFP4("*_blocks", scales="*_scales", to="*")``.

    The blocks are uint8 of shape ``[..., G, B]``, two codes of ``float4_e2m1fn`` in each byte, the one in the low bits
    first. The scales are uint8 of shape ``[..., G]``, exponents plus 127. The new tensor has shape
    ``[..., G * B * 2]``, and then its last two dims are exchanged, as transformers does in
    ``convert_moe_packed_tensors``; the values are the same to the bit. The scales are taken from the checkpoint: they
    are no keys of what is loaded.

    Args:
        blocks: Names of the blocks; may also have one ``*``.
        scales: Names of their scales, in which ``*`` stands for the same text.
        to: Names of the new tensors.
        dtype: ``bfloat16``, ``float16`` or ``float32``.
        transpose: Whether to exchange the last two dims.
    """

    blocks: str
    scales: str
    to: str
    dtype: str = "bfloat16"
    transpose: bool = True

    def apply(self, tensors: Tensors) -> None:
        """See ``Transform``."""
        there = set(tensors.names())
        for name, values in matching(self, tensors, self.blocks).items():
            with Naming(self, name):
                of_scales = _filled(self.scales, values)
                if of_scales not in there:
                    raise KeyMismatchError(f"the checkpoint lacks its scales '{of_scales}'")
                blocks, scales = tensors.take(name), tensors.take(of_scales)
                *outer, size = blocks.shape or [0]
                if blocks.dtype != "uint8" or scales.dtype != "uint8" or not outer or [*scales.shape] != outer:
                    raise ConfigError(
                        f"blocks of {blocks.dtype} and shape {[*blocks.shape]} do not fit scales of {scales.dtype} and "
                        f"shape {[*scales.shape]}"
                    )
                bytes_of_codes = blocks.reshape([*outer[:-1], outer[-1] * size])
                block = [1] * (len(outer) - 1) + [max(2 * size, 1)]
                made = tensors.dequantize(bytes_of_codes, scales, block, _dtype_name(self.dtype), True)
                if self.transpose and len(outer) > 1:
                    dims = [*range(len(outer))]
                    made = made.permute([*dims[:-2], dims[-1], dims[-2]])
                tensors.give(_filled(self.to, values), made)

    def inverted(self) -> Transform:
        """See ``Transform``."""
        raise ConfigError(f"{self}: it cannot be inverted: nothing here quantizes '{self.blocks}'")


def _filled(template: str, values: dict[str, str]) -> str:
    return filled(template.replace("*", "{any}"), values)


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel
