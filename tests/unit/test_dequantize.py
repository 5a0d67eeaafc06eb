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
from bytecheckpoint.convert import convert
from bytecheckpoint.errors import CheckpointError, ConfigError, KeyMismatchError, UnsupportedError
from bytecheckpoint.transforms import (
    Concat,
    Dequantize,
    DequantizeMXFP4,
    Permute,
    Reshape,
    Slice,
    Split,
    Stack,
    Transform,
    Transpose,
    Unstack,
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


def quantized(seed: int, rows: int, columns: int, block: int = 128) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(math.ceil(rows / block), math.ceil(columns / block), generator=generator)
    return {"weight": draw_codes(generator, (rows, columns), torch.float8_e4m3fn), "weight_scale_inv": scales}


def test_a_model_is_dequantized_whole_with_what_is_not_quantized(tmp_path: Path) -> None:
    layers = {f"l.{i}.{p}.{k}": v for i in range(2) for p in "ab" for k, v in quantized(i, 200, 300).items()}
    others = {"l.0.norm.weight": torch.ones(9, dtype=torch.bfloat16), "l.0.bias": torch.ones(3)}
    save_file(layers | others, tmp_path / "model.safetensors")
    wanted = {
        key: dequantized(value, layers[f"{key}_scale_inv"], [128, 128])
        for key, value in layers.items()
        if key.endswith(".weight")
    }
    wanted |= others
    way = Dequantize("*.weight", scale="*.weight_scale_inv", block=[128, 128])
    state = {key: torch.zeros_like(value) for key, value in wanted.items()}
    load(tmp_path, state, way)
    for key, value in wanted.items():
        assert_same(state[key], value)
    # What is not to be dequantized stays as it is stored, scales and all.
    stay = {key: torch.zeros_like(value) for key, value in (layers | others).items()}
    load_state_dict(tmp_path, stay, no_dist=True)
    assert all(torch.equal(stay[key].view(torch.uint8), value.view(torch.uint8)) for key, value in layers.items())
    # Into another dtype, by a cast of the values.
    wide = {key: torch.zeros_like(value, dtype=torch.float64) for key, value in wanted.items()}
    load(tmp_path, wide, way, cast="widen")
    assert all(torch.equal(value, wanted[key].double()) or wanted[key].isnan().any() for key, value in wide.items())
    file = tmp_path / "spec.toml"
    file.write_text("""
exclude = "l.0.bias"
rename = {l = "layers"}
[[transforms]]
kind = "dequantize"
from = "l.{l}.{p}.weight"
scale = "l.{l}.{p}.weight_scale_inv"
block = [128, 128]
""")
    report = convert(tmp_path, tmp_path / "hf", spec=LoadSpec.from_file(file), dtype="float32")
    assert report.num_tensors == 5
    got = {f"layers.{i}.{p}.weight": torch.zeros(200, 300) for i in range(2) for p in "ab"}
    load_state_dict(tmp_path / "hf", got, no_dist=True, spec=LoadSpec(strict="model"))
    for key, tensor in got.items():
        assert_same(tensor, wanted[key.replace("layers", "l")].float())


def test_transforms_before_and_after(tmp_path: Path) -> None:
    experts = {f"e.{i}.{k}": v for i in range(3) for k, v in quantized(i, 70, 96, 32).items()}
    plain = torch.randn(70, 96).to(torch.bfloat16)
    save_file(experts | {"p": plain}, tmp_path / "model.safetensors")
    values = [dequantized(experts[f"e.{i}.weight"], experts[f"e.{i}.weight_scale_inv"], [32, 32]) for i in range(3)]
    way = Dequantize("e.{i}.weight", "e.{i}.weight_scale_inv", block=[32, 32])
    scales_in = Stack("e.{i}.weight_scale_inv", "s")
    turned_in = [Transpose("e.0.weight"), Transpose("e.0.weight_scale_inv")]
    cases: list[tuple[list[Transform], torch.Tensor]] = [
        ([way, Stack("e.{i}.weight", "x", dim=1), Transpose("x", dim1=2)], torch.stack(values, 1).transpose(0, 2)),
        ([way, Concat(["e.0.weight", "p"], "x", dim=1)], torch.cat([values[0], plain], 1)),
        ([way, Split("e.2.weight", ["y", "x"], sizes=[41, 29])], values[2][41:]),
        ([way, Unstack("e.1.weight", "x{r}"), Concat(["x69", "x1"], "x")], torch.cat([values[1][69], values[1][1]])),
        # Codes and scales are stacked before: the block has no part of the new dim.
        ([Stack("e.{i}.weight", "x"), scales_in, Dequantize("x", "s", block=[32, 32])], torch.stack(values)),
        ([*turned_in, Dequantize("e.0.weight", "e.0.weight_scale_inv", "x", [32, 32])], values[0].T),
        # A part that begins in the middle of a block, of a part.
        ([way, Slice("e.1.weight", "x", begin=33), Slice("x", dim=1, begin=5, end=70)], values[1][33:, 5:70]),
    ]
    for transforms, wanted in cases:
        state = {"x": torch.zeros_like(wanted, memory_format=torch.contiguous_format)}
        load(tmp_path, state, *transforms, strict="model")
        assert_same(state["x"], wanted.contiguous())


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    stored = {
        "a.weight": torch.zeros(8, 8, dtype=torch.float8_e4m3fn), "a.s": torch.ones(2, 3), "a.t": torch.ones(2, 2),
        "b.weight": torch.zeros(8, 8), "b.s": torch.ones(1), "c": torch.ones(1, dtype=torch.float64),
        "m_blocks": torch.zeros(4, 2, 16, dtype=torch.uint8), "m_scales": torch.zeros(4, 3, dtype=torch.uint8),
        "n_blocks": torch.zeros(4, 2, 16, dtype=torch.uint8), "n_scales": torch.zeros(4, 2, dtype=torch.uint8),
    }  # fmt: skip
    save_state_dict(tmp_path, stored | {"o": [1]}, no_dist=True)
    cases: list[tuple[list[Transform], type[CheckpointError], str]] = [
        ([Dequantize("a.weight", "a.scale")], KeyMismatchError, r"'a\.weight': .*lacks its scales 'a\.scale'"),
        ([Dequantize("b.weight", "b.scale")], KeyMismatchError, "no key that fits 'b.weight' has scales"),
        ([Dequantize("x.weight", "a.s")], KeyMismatchError, "no key of the checkpoint fits"),
        ([Dequantize("b.weight", "b.s")], ConfigError, "float32 is no dtype of quantized elements"),
        ([Dequantize("a.weight", "c")], ConfigError, "float64 is no dtype of scales"),
        ([Dequantize("a.weight", "a.t", dtype="int8")], ConfigError, "int8 is no dtype to dequantize to"),
        ([Dequantize("a.weight", "a.t", dtype="half")], ConfigError, "no dtype to dequantize to"),
        ([Dequantize("a.weight", "a.t", block=[3, 4])], ConfigError, r"scales of shape \[2, 2\] are not one for each"),
        ([Dequantize("a.weight", "a.t", block=[0, 4])], ConfigError, "are not one for each block"),
        ([Dequantize("a.weight", "a.t", block=[1, 4, 4])], ConfigError, r"block \[1, 4, 4\]"),
        ([Dequantize("a.weight", "a.s")], ConfigError, r"\[2, 3\] do not divide \[8, 8\]"),
        ([Dequantize("a.weight", "o")], ConfigError, "'o': it is an object"),
        ([Dequantize("a.weight", "a.t"), Dequantize("a.weight", "a.s")], ConfigError, "bfloat16"),
        ([Dequantize("a.weight", "a.t", to="b.weight")], KeyMismatchError, "two sources"),
        ([Dequantize("a.weight", "a.t"), Concat(["a.weight", "b.weight"], "x")], ConfigError, "bfloat16 and float32"),
        ([DequantizeMXFP4("m_blocks", "s", "m")], KeyMismatchError, "'m_blocks': .*lacks its scales 's'"),
        ([DequantizeMXFP4("*_blocks", "*_scales", "*")], ConfigError, r"'m_blocks': .*2, 16\] do not fit .*\[4, 3\]"),
    ]  # fmt: skip
    for transforms, kind, text in cases:
        with pytest.raises(kind, match=text):
            load(tmp_path, {}, *transforms, strict=False)
    pairs = {"x_blocks": torch.zeros(1, 1, 3, dtype=torch.uint8), "x_scales": torch.zeros(1, 1, dtype=torch.uint8)}
    save_state_dict(tmp_path / "odd", pairs, no_dist=True)
    with pytest.raises(ConfigError, match="parts of an odd size"):
        load(
            tmp_path / "odd", {}, DequantizeMXFP4("x_blocks", "x_scales", "x"), Reshape("x", shape=[2, 3]), strict=False
        )
    for one in (Dequantize("a", "b"), DequantizeMXFP4("a", "b", "c")):
        with pytest.raises(ConfigError, match="cannot be inverted"):
            LoadSpec(transforms=[one]).inverted()


def test_scales_that_fill_several_phases(tmp_path: Path) -> None:
    """There are more scales than are held at a time, of one tensor and of several."""
    generator = torch.Generator().manual_seed(2)
    sizes = [(3000, 2000), (700, 1999), (2500, 1000)]
    stored = {f"{i}.w": draw_codes(generator, size, torch.float8_e4m3fn) for i, size in enumerate(sizes)}
    stored |= {f"{i}.s": draw_scales(generator, size, torch.float32) for i, size in enumerate(sizes)}
    save_file(stored | {"p": torch.arange(9)}, tmp_path / "model.safetensors")
    state = {f"{i}.w": torch.zeros(size, dtype=torch.bfloat16) for i, size in enumerate(sizes)}
    state["p"] = torch.zeros(9, dtype=torch.int64)
    report = load(tmp_path, state, Dequantize("{i}.w", "{i}.s", block=[1, 1]))
    for i in range(3):
        assert_same(state[f"{i}.w"], dequantized(stored[f"{i}.w"], stored[f"{i}.s"], [1, 1]))
    assert torch.equal(state["p"], torch.arange(9))
    assert report.bytes_wanted == sum(value.nbytes for value in stored.values()) + 72


def test_only_the_blocks_that_a_box_needs_are_read(tmp_path: Path) -> None:
    block = 256 << 10  # what is read at a time
    stored = quantized(1, 4096, 4096)
    save_file(stored, tmp_path / "model.safetensors")
    state = {"x": torch.zeros(300, 4096, dtype=torch.bfloat16)}
    way = Dequantize("weight", "weight_scale_inv", block=[128, 128])
    report = load(tmp_path, state, way, Slice("weight", "x", begin=1000, end=1300))
    assert_same(state["x"], dequantized(stored["weight"], stored["weight_scale_inv"], [128, 128])[1000:1300])
    assert report.bytes_wanted == 300 * 4096 + 4 * 32 * 4  # rows 1000 to 1299 are in 4 rows of blocks
    assert report.bytes_read <= 300 * 4096 + 2 * block + block


def test_column_major_records_of_stock_dcp(tmp_path: Path) -> None:
    stored = quantized(4, 60, 50, 16)
    turned = {key: value.t().contiguous().t() for key, value in stored.items()}
    generator = torch.Generator().manual_seed(1)
    blocks = draw_codes(generator, (2, 5, 3, 16), torch.uint8)
    turned["b"] = blocks.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    turned["s"] = draw_scales(generator, (3, 5, 2), torch.uint8).permute(2, 1, 0)
    dcp.save(turned, storage_writer=dcp.FileSystemWriter(tmp_path / "a"), no_dist=True)
    state = {"weight": torch.zeros(60, 50, dtype=torch.bfloat16)}
    load(tmp_path / "a", state, Dequantize("weight", "weight_scale_inv", block=[16, 16]), exclude=["b", "s"])
    assert_same(state["weight"], dequantized(stored["weight"], stored["weight_scale_inv"], [16, 16]))
    # Pairs of codes that are not neighbours in the record cannot be joined with others to one dim.
    with pytest.raises(UnsupportedError, match="not stored in row-major order"):
        load(
            tmp_path / "a",
            {"b": torch.zeros(2, 96, 5, dtype=torch.bfloat16)},
            DequantizeMXFP4("b", "s", "b"),
            exclude="weight*",
        )
