# SPDX-License-Identifier: Apache-2.0
"""The transforms of a ``LoadSpec``: tensors that are put together from stored ones while they are read."""

from __future__ import annotations

from bytecheckpoint.load_spec.dequantize import Dequantize, DequantizeMXFP4
from bytecheckpoint.load_spec.quantized_model import dequantizing
from bytecheckpoint.load_spec.rename import Rename
from bytecheckpoint.load_spec.transform import Transform
from bytecheckpoint.load_spec.transforms import (
    Concat,
    Pad,
    Permute,
    Reshape,
    Slice,
    Split,
    Stack,
    Transpose,
    Unstack,
)

__all__ = [
    "Concat",
    "Dequantize",
    "DequantizeMXFP4",
    "Pad",
    "Permute",
    "Rename",
    "Reshape",
    "Slice",
    "Split",
    "Stack",
    "Transform",
    "Transpose",
    "Unstack",
    "dequantizing",
]
