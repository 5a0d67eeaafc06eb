# SPDX-License-Identifier: Apache-2.0
"""Quantized tensors that are dequantized while they are read: every value as torch computes it, to the bit."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from bytecheckpoint import LoadReport, LoadSpec, load_state_dict, save_state_dict
from bytecheckpoint.convert.safetensors import convert
from bytecheckpoint.transforms import (
    Dequantize,
    DequantizeMXFP4,
    Permute,
    Reshape,
    Slice,
    Transform,
)

CODES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
SCALES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8]
VALUES = [torch.bfloat16, torch.float16, torch.float32]
FP4 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of all elements; all NaNs count as one, because torch has several by the way it takes."""
    tensor = torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor)
    return tensor.contiguous().view(torch.int16 if tensor.itemsize == 2 else torch.int32)


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    assert torch.equal(bits(got), bits(wanted))


def as_scales(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales of all dtypes from random bytes or floats."""
    return codes if dtype == torch.uint8 else codes.view(dtype) if dtype.itemsize == 1 else codes.to(dtype)


def floats_of(scales: torch.Tensor) -> torch.Tensor:
    """The scales as float32; uint8 holds exponents, as transformers reads them."""
    return (scales.float() - 127.0).exp2() if scales.dtype == torch.uint8 else scales.float()


def dequantized(
    codes: torch.Tensor, scales: torch.Tensor, block: Sequence[int], dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The reference: scales are repeated for each element of their block."""
    spread = floats_of(scales)
    for dim, size in enumerate(block):
        spread = spread.repeat_interleave(size, dim).narrow(dim, 0, codes.shape[dim])
    return (codes.float() * spread).to(dtype)


def draw_codes(generator: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 256, tuple(shape), dtype=torch.uint8, generator=generator).view(dtype)


def draw_scales(generator: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize == 1:
        return torch.randint(100, 150, tuple(shape), dtype=torch.uint8, generator=generator).view(dtype)
    return (torch.rand(tuple(shape), generator=generator) + 0.01).to(dtype)


def load(path: Path, state: dict[str, Any], *transforms: Transform, **spec: Any) -> LoadReport:
    return load_state_dict(path, state, no_dist=True, spec=LoadSpec(transforms=transforms, **spec))


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("scale_dtype", SCALES)
@pytest.mark.parametrize("dtype", VALUES)
def test_every_code_with_many_scales(
    tmp_path: Path, codes: torch.dtype, scale_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    if scale_dtype.itemsize == 1:
        scales = torch.arange(256, dtype=torch.uint8).view(scale_dtype)
    else:
        special = [0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, 1e-38, 1e-42, 3e38, 65504.0, 6e-8, 2.0**-133]
        scales = torch.cat([torch.tensor(special), torch.randn(243, generator=torch.Generator().manual_seed(1))])
        scales = scales.to(scale_dtype)
    weight = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(codes)
    save_file({"w": weight, "s": scales}, tmp_path / "model.safetensors")
    state = {"w": torch.zeros(256, 256, dtype=dtype)}
    load(tmp_path, state, Dequantize("w", "s", dtype=str(dtype)))
    assert_same(state["w"], dequantized(weight, scales[:, None], [1, 256], dtype))


@pytest.mark.parametrize("dtype", VALUES)
def test_every_pair_of_fp4_with_every_scale(tmp_path: Path, dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).repeat(1, 256, 1)[..., None].reshape(1, 256, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)[None]
    save_file({"x_blocks": blocks, "x_scales": scales}, tmp_path / "model.safetensors")
    wanted = torch.stack([FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]], -1).to(dtype).reshape(1, 256, 16, 32)
    wanted = torch.ldexp(wanted, scales[..., None].int() - 127).to(dtype).reshape(1, 256, 512)
    state = {"x": torch.zeros(1, 512, 256, dtype=dtype)}
    load(tmp_path, state, DequantizeMXFP4("{p}_blocks", "{p}_scales", "{p}", dtype=str(dtype)))
    assert_same(state["x"], wanted.transpose(1, 2).contiguous())
    state = {"x": torch.zeros(1, 256, 512, dtype=dtype)}
    load(tmp_path, state, DequantizeMXFP4("*_blocks", "*_scales", "*", dtype=str(dtype), transpose=False))
    assert_same(state["x"], wanted)


Case = tuple[dict[str, torch.Tensor], Transform, torch.Tensor]


def draw_fp8(draw: random.Random, generator: torch.Generator) -> Case:
    """Draws a tensor of 8-bit floats with scales, how to dequantize it, and its values."""
    shape = [draw.choice([0, 1, *[*range(2, 40)] * 3]) for _ in range(draw.randint(0, 3))]
    codes = draw_codes(generator, shape, draw.choice(CODES))
    dtype, scale_dtype = draw.choice(VALUES), draw.choice(SCALES)
    given: list[int] | None = [draw.choice([1, 2, 3, 5, 8, 16, 64]) for _ in shape]
    kind = draw.choice(["blocks", "tensor", "rows", "column", "grid"])
    if kind == "tensor":
        scales, block, given = draw_scales(generator, [1] * draw.randint(0, 1), scale_dtype), shape, None
        scales_of = scales.reshape([1] * len(shape))
        block = [max(size, 1) for size in shape]
    elif kind in ("rows", "column") and len(shape) > 1 and 0 not in shape:
        outer = shape[:-1] + [1] * (kind == "column")
        scales, block, given = draw_scales(generator, outer, scale_dtype), [1] * (len(shape) - 1) + [shape[-1]], None
        scales_of = scales.reshape([*shape[:-1], 1])
    elif kind == "grid" and shape and 0 not in shape:
        counts = [draw.choice([n for n in range(1, size + 1) if size % n == 0]) for size in shape]
        scales, block, given = draw_scales(generator, counts, scale_dtype), [], None
        block, scales_of = [size // n for size, n in zip(shape, counts, strict=True)], scales
        if len(shape) > 1 and counts == [*shape[:-1]]:
            given = block
    else:
        assert given is not None
        block = given
        counts = [math.ceil(size / each) for size, each in zip(shape, block, strict=True)]
        scales = scales_of = draw_scales(generator, counts, scale_dtype)
    wanted = dequantized(codes, scales_of, block, dtype)
    return {"w": codes, "w_s": scales}, Dequantize("w", "w_s", block=given, dtype=str(dtype)), wanted


def draw_fp4(draw: random.Random, generator: torch.Generator) -> Case:
    *outer, groups = [draw.randint(1, 9) for _ in range(draw.randint(1, 4))]
    size = draw.choice([1, 2, 8, 16])
    blocks = draw_codes(generator, [*outer, groups, size], torch.uint8)
    scales = draw_scales(generator, [*outer, groups], torch.uint8)
    dtype, turns = draw.choice(VALUES), draw.random() < 0.5
    codes = torch.stack([FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]], -1).reshape(*outer, groups, 2 * size)
    wanted = (codes * floats_of(scales)[..., None]).to(dtype).reshape(*outer, 2 * groups * size)
    wanted = wanted.transpose(-1, -2) if turns and len(outer) > 0 else wanted
    transform = DequantizeMXFP4("w", "w_s", "w", dtype=str(dtype), transpose=turns)
    return {"w": blocks, "w_s": scales}, transform, wanted


def draw_step(draw: random.Random, shape: list[int], keeps_pairs: bool) -> Transform:
    """Draws a transform of ``w``, which has ``shape``."""
    kind = draw.choice(["permute", "slice", "reshape"])
    if kind == "slice" and shape:
        dim = draw.randrange(len(shape))
        begin = draw.randint(0, shape[dim])
        return Slice("w", dim=dim, begin=begin, end=draw.randint(begin, shape[dim]))
    if kind == "reshape" and not keeps_pairs:
        left, new = math.prod(shape), []
        while left > 1 and len(new) < 3:
            new.append(draw.choice([d for d in range(1, left + 1) if left % d == 0]))
            left //= new[-1]
        return Reshape("w", shape=[*new, left])
    return Permute("w", dims=draw.sample(range(len(shape)), len(shape)))


def in_torch(step: Transform, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(step, Slice):
        assert step.end is not None
        return tensor.narrow(step.dim, step.begin, step.end - step.begin)
    if isinstance(step, Reshape):
        return tensor.reshape([*step.shape])
    assert isinstance(step, Permute)
    return tensor.permute([*step.dims])


@pytest.mark.parametrize("seed", range(150))
def test_any_shape_block_dtype_and_transforms(tmp_path: Path, seed: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    stored, transform, wanted = (draw_fp4 if seed % 3 == 0 else draw_fp8)(draw, generator)
    steps: list[Transform] = []
    for _ in range(draw.randint(0, 3)):
        steps.append(draw_step(draw, [*wanted.shape], isinstance(transform, DequantizeMXFP4)))
        wanted = in_torch(steps[-1], wanted)
    save_file({key: value.contiguous() for key, value in stored.items()}, tmp_path / "model.safetensors")
    save_state_dict(tmp_path / "ours", stored, no_dist=True)
    dcp.save(stored, storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), no_dist=True)
    # Into memory with gaps, in another order of dims.
    for source in (tmp_path, tmp_path / "ours", tmp_path / "stock"):
        target = torch.zeros([size + 1 for size in reversed(wanted.shape)], dtype=wanted.dtype)
        target = target.permute([*reversed(range(wanted.dim()))]) if draw.random() < 0.5 else torch.zeros_like(wanted)
        target = target[tuple(slice(0, size) for size in wanted.shape)]
        report = load(source, {"w": target}, transform, *steps)
        assert_same(target, wanted)
        assert not report.casts
    if wanted.numel() > 0:
        convert(tmp_path, tmp_path / "hf", spec=LoadSpec(transforms=[transform, *steps]))
        target = torch.zeros_like(wanted, memory_format=torch.contiguous_format)
        load_state_dict(tmp_path / "hf", {"w": target}, no_dist=True)
        assert_same(target, wanted)
