# SPDX-License-Identifier: Apache-2.0
"""Tests ``merge`` and ``scatter`` against copies that are made byte by byte."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.equality import raw

from bytecheckpoint import _testing, merge, scatter
from bytecheckpoint.compat.private_names import PLAIN_DTYPES
from bytecheckpoint.errors import InvalidPlanError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:Sparse CSR", "ignore:torch.quantize_per_tensor")

DTYPES = sorted(PLAIN_DTYPES, key=str)
ALIGNMENTS = st.sampled_from([1, 2, 4, 8, 16, 32, 64])
THREADS = st.integers(1, 4)


class Laid:
    """A tensor somewhere in a buffer of bytes, and where each of its elements lies there."""

    def __init__(self, tensor: torch.Tensor, buffer: bytearray, shift: int) -> None:
        self.tensor = tensor
        self.buffer = buffer
        self.shift = shift

    def places(self) -> Iterator[slice]:
        tensor, itemsize = self.tensor, self.tensor.itemsize
        for index in itertools.product(*map(range, tensor.shape)):
            element = tensor.storage_offset() + sum(i * s for i, s in zip(index, tensor.stride(), strict=True))
            yield slice(self.shift + element * itemsize, self.shift + (element + 1) * itemsize)

    def elements(self) -> bytes:
        return b"".join(self.buffer[place] for place in self.places())

    def fill(self, elements: bytes) -> None:
        itemsize = self.tensor.itemsize
        for number, place in enumerate(self.places()):
            self.buffer[place] = elements[number * itemsize : (number + 1) * itemsize]


def some_bytes(number: int, dtype: torch.dtype, seed: int) -> bytearray:
    drawn = random.Random(seed).randbytes(number)
    return bytearray(byte & 1 for byte in drawn) if dtype == torch.bool else bytearray(drawn)


@st.composite
def laid(draw: st.DrawFn, can_expand: bool = True) -> Laid:
    """Draws a tensor of up to 5 dims, each whole, with gaps, or expanded, in any order, at any address."""
    dtype = draw(st.sampled_from(DTYPES))
    sizes = draw(st.lists(st.integers(0, 4), max_size=5))
    gaps = [draw(st.tuples(st.integers(0, 1), st.integers(1, 2))) for _ in sizes]
    expanded = [can_expand and draw(st.booleans()) and draw(st.booleans()) for _ in sizes]
    whole = [
        1 if is_expanded else begin + size * step
        for size, (begin, step), is_expanded in zip(sizes, gaps, expanded, strict=True)
    ]
    lead, tail, shift = draw(st.integers(0, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 7))
    count = lead + torch.Size(whole).numel() + tail
    itemsize = torch.empty((), dtype=dtype).itemsize
    buffer = some_bytes(shift + count * itemsize, dtype, draw(st.integers(0, 1 << 30)))
    flat = torch.frombuffer(buffer, dtype=dtype, offset=shift, count=count)
    tensor = flat[lead : count - tail].view(whole)
    for dim, (size, (begin, step)) in enumerate(zip(sizes, gaps, strict=True)):
        if expanded[dim]:
            tensor = tensor.expand([size if d == dim else -1 for d in range(tensor.dim())])
        else:
            tensor = tensor[(slice(None),) * dim + (slice(begin, None, step),)]
    assert tensor.shape == torch.Size(sizes)
    return Laid(tensor.permute(draw(st.permutations(range(len(sizes))))), buffer, shift)


def offsets(tensors: Sequence[torch.Tensor], alignment: int) -> tuple[list[int], int]:
    """Returns where each tensor begins in the merged bytes, and where the last one ends."""
    begins, end = [], 0
    for tensor in tensors:
        bytes_of_tensor = tensor.numel() * tensor.itemsize
        begins.append(-(-end // alignment) * alignment)
        end = begins[-1] + bytes_of_tensor
    return begins, end


def merged_by_hand(parts: Sequence[Laid], alignment: int, background: bytes) -> bytes:
    out = bytearray(background)
    for part, begin in zip(parts, offsets([part.tensor for part in parts], alignment)[0], strict=True):
        elements = part.elements()
        out[begin : begin + len(elements)] = elements
    return bytes(out)


def in_memory(tensor: torch.Tensor) -> _testing.TensorInMemory:
    return tensor.data_ptr(), str(tensor.dtype).removeprefix("torch."), tensor.shape, tensor.stride()


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.tolist())


@settings(max_examples=150, deadline=None)
@given(st.lists(laid(), max_size=5), ALIGNMENTS, THREADS, st.integers(0, 9))
def test_merge_is_as_by_hand(parts: list[Laid], alignment: int, num_threads: int, spare: int) -> None:
    tensors = [part.tensor for part in parts]
    _, num_bytes = offsets(tensors, alignment)
    out = torch.full((num_bytes + spare,), 0xA5, dtype=torch.uint8)
    wanted = merged_by_hand(parts, alignment, as_bytes(out))
    before = [bytes(part.buffer) for part in parts]
    assert merge(tensors, out, alignment=alignment, num_threads=num_threads) is out
    assert as_bytes(out) == wanted
    assert [bytes(part.buffer) for part in parts] == before


@settings(max_examples=150, deadline=None)
@given(st.lists(laid(), max_size=5), ALIGNMENTS, st.integers(1, 40), st.integers(1, 9))
def test_a_kernel_gathers_as_by_hand(parts: list[Laid], alignment: int, units_a_tile: int, num_threads: int) -> None:
    tensors = [part.tensor for part in parts]
    out = torch.full((offsets(tensors, alignment)[1] + 1,), 0xA5, dtype=torch.uint8)
    wanted = merged_by_hand(parts, alignment, as_bytes(out))
    _testing.merge_by_tiles(
        [in_memory(tensor) for tensor in tensors], out.data_ptr(), alignment, units_a_tile, num_threads
    )
    assert as_bytes(out) == wanted


@settings(max_examples=60, deadline=None)
@given(st.lists(laid(), max_size=5), THREADS)
def test_merge_makes_one_as_large_as_needed(parts: list[Laid], num_threads: int) -> None:
    merged = merge([part.tensor for part in parts], num_threads=num_threads)
    assert (merged.dtype, merged.dim(), merged.is_contiguous()) == (torch.uint8, 1, True)
    assert as_bytes(merged) == b"".join(part.elements() for part in parts)


@settings(max_examples=150, deadline=None)
@given(st.lists(laid(can_expand=False), max_size=5), ALIGNMENTS, THREADS, st.integers(0, 9), st.integers(0, 1 << 30))
def test_scatter_changes_the_elements_alone(
    parts: list[Laid], alignment: int, num_threads: int, spare: int, seed: int
) -> None:
    tensors = [part.tensor for part in parts]
    begins, num_bytes = offsets(tensors, alignment)
    source = some_bytes(num_bytes + spare, torch.bool, seed)  # 0 and 1 are right for every dtype
    wanted = [Laid(part.tensor, bytearray(part.buffer), part.shift) for part in parts]
    for part, begin in zip(wanted, begins, strict=True):
        part.fill(bytes(source[begin:]))
    merged = torch.tensor(list(source), dtype=torch.uint8)
    scatter(merged, tensors, alignment=alignment, num_threads=num_threads)
    assert [part.buffer for part in parts] == [part.buffer for part in wanted]
    assert as_bytes(merged) == source


@settings(max_examples=100, deadline=None)
@given(st.data(), ALIGNMENTS, THREADS)
def test_round_trip_into_other_strides(data: st.DataObject, alignment: int, num_threads: int) -> None:
    parts = data.draw(st.lists(laid(), max_size=4))
    targets = []
    for part in parts:
        order = data.draw(st.permutations(range(part.tensor.dim())))
        blank = torch.zeros([part.tensor.shape[dim] for dim in order], dtype=torch.uint8)
        blank = blank.new_empty(blank.shape, dtype=part.tensor.dtype)
        targets.append(blank.permute([order.index(dim) for dim in range(len(order))]))
        assert targets[-1].shape == part.tensor.shape
    merged = merge([part.tensor for part in parts], alignment=alignment, num_threads=num_threads)
    scatter(merged, targets, alignment=alignment, num_threads=num_threads)
    for part, target in zip(parts, targets, strict=True):
        assert as_bytes(merge([target])) == part.elements()


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_tensors_of_many_megabytes(num_threads: int) -> None:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(1500, 1001, generator=generator)
    tensors = [numbers, numbers.t(), numbers[::3, 1:], numbers[:, 7].expand(100, 1500), numbers.to(torch.bfloat16).t()]
    merged = merge(tensors, alignment=64, num_threads=num_threads)
    for tensor, begin in zip(tensors, offsets(tensors, 64)[0], strict=True):
        wanted = raw(tensor.contiguous())
        assert torch.equal(merged[begin : begin + len(wanted)], wanted)
    blanks = [torch.zeros(2 * t.shape[1], t.shape[0], dtype=t.dtype).t()[:, ::2] for t in tensors]
    scatter(merged, blanks, alignment=64, num_threads=num_threads)
    for blank, tensor in zip(blanks, tensors, strict=True):
        assert torch.equal(blank, tensor)
        base = blank._base
        assert base is not None
        assert not base[1::2].any()


def test_nothing_to_merge() -> None:
    assert merge([]).shape == (0,)
    assert merge([torch.empty(0, 4), torch.empty(3, 0, dtype=torch.int64)], alignment=64).shape == (0,)
    scatter(torch.empty(0, dtype=torch.uint8), [])
    scatter(torch.empty(0, dtype=torch.uint8), [torch.empty(0)])


def test_any_iterable_of_tensors() -> None:
    assert torch.equal(merge(torch.full((2,), n, dtype=torch.uint8) for n in (1, 2)), torch.tensor([1, 1, 2, 2]))  # type: ignore[arg-type]


UNFIT = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "must be a strided tensor"),
    "sparse csr": (lambda: torch.eye(3).to_sparse_csr(), "must be a strided tensor"),
    "meta": (lambda: torch.ones(2, device="meta"), "must be a CPU tensor, got one on meta"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.quint8), "quantized"),
    "conjugate": (lambda: torch.ones(2, dtype=torch.complex64).conj(), "conjugation"),
    "negative": (lambda: torch._neg_view(torch.ones(2)), "negation"),
    "no tensor": (lambda: 3, "must be a tensor, got a int"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_what_is_not_plain_is_refused_by_its_position(kind: str) -> None:
    make, message = UNFIT[kind]
    tensors: list[Any] = [torch.ones(2), make()]
    with pytest.raises(InvalidPlanError, match=rf"tensors\[1\].*{message}"):
        merge(tensors)
    with pytest.raises(InvalidPlanError, match=rf"tensors\[1\].*{message}"):
        scatter(torch.zeros(64, dtype=torch.uint8), tensors)
    assert torch.equal(tensors[0], torch.ones(2)), "nothing was scattered"


@pytest.mark.parametrize(
    ("memory", "found"),
    [
        (torch.zeros(8), "float32 [8]"),
        (torch.zeros(8, dtype=torch.int8), "int8 [8]"),
        (torch.zeros(7, dtype=torch.uint8), "uint8 [7]"),
        (torch.zeros(2, 8, dtype=torch.uint8), "uint8 [2, 8]"),
        (torch.zeros(32, dtype=torch.uint8)[::2], "uint8 [16]"),
    ],
)
def test_merged_memory_that_does_not_fit(memory: torch.Tensor, found: str) -> None:
    message = "must be a contiguous uint8 tensor of one dim and at least 8 bytes, got " + found
    tensor = torch.ones(2)
    with pytest.raises(InvalidPlanError, match=re.escape(message)):
        merge([tensor], memory)
    with pytest.raises(InvalidPlanError, match=re.escape(message)):
        scatter(memory, [tensor])
    assert not memory.any()
    assert torch.equal(tensor, torch.ones(2))


def test_merged_memory_elsewhere() -> None:
    for memory in (torch.zeros(8, dtype=torch.uint8, device="meta"), torch.zeros(8).to_sparse()):
        with pytest.raises(InvalidPlanError, match=r"merged: must be a (CPU|strided) tensor"):
            merge([torch.ones(2)], memory)


@pytest.mark.parametrize("alignment", [0, -1, 3, 24, 1 << 31])
def test_alignment_is_a_power_of_two(alignment: int) -> None:
    with pytest.raises(ValueError, match=f"alignment={alignment}: must be a power of two"):
        merge([torch.ones(2)], alignment=alignment)
    with pytest.raises(ValueError, match=f"alignment={alignment}: must be a power of two"):
        scatter(torch.zeros(8, dtype=torch.uint8), [torch.ones(2)], alignment=alignment)


@pytest.mark.parametrize("num_threads", [0, -2])
def test_at_least_one_thread(num_threads: int) -> None:
    with pytest.raises(ValueError, match=f"num_threads={num_threads}: must be >= 1"):
        merge([torch.ones(2)], num_threads=num_threads)
    with pytest.raises(ValueError, match=f"num_threads={num_threads}: must be >= 1"):
        scatter(torch.zeros(8, dtype=torch.uint8), [torch.ones(2)], num_threads=num_threads)


def test_an_expanded_destination_is_refused() -> None:
    value = torch.zeros(1)
    with pytest.raises(InvalidPlanError, match=r"tensors\[1\]: the tensor is expanded"):
        scatter(torch.ones(64, dtype=torch.uint8), [torch.zeros(1), value.expand(3)])
    assert not value.any()
    scatter(torch.zeros(4, dtype=torch.uint8), [torch.zeros(1).expand(1)])  # of size 1: nothing is shared


def test_scatter_counts_as_a_change() -> None:
    whole = torch.zeros(4)
    part, other = whole[1:3], torch.zeros(2)
    scatter(merge([torch.ones(2)]), [part])
    assert (whole._version, part._version, other._version) == (1, 1, 0)
    assert torch.equal(whole, torch.tensor([0.0, 1.0, 1.0, 0.0]))
    merge([whole, other])
    assert (whole._version, other._version) == (1, 0)


def test_autograd_sees_that_what_it_kept_is_gone() -> None:
    weight, kept = torch.ones(2, requires_grad=True), torch.ones(2)
    product = (weight * kept).sum()
    scatter(merge([torch.zeros(2)]), [kept])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()  # type: ignore[no-untyped-call]


def test_parameters_are_filled_and_stay_leaves() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    scatter(merge([torch.ones(2, requires_grad=True)]), [parameter])
    assert torch.equal(parameter.detach(), torch.ones(2))
    assert (parameter.is_leaf, parameter.requires_grad, parameter.grad_fn, parameter._version) == (True, True, None, 1)
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    assert parameter.grad is not None


def test_inference_tensors_have_no_version() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(2)
    scatter(merge([torch.ones(2)]), [tensor])
    assert torch.equal(tensor, torch.ones(2))


def test_memory_shared_until_it_is_written_to() -> None:
    source = torch.zeros(4)
    clone = torch._lazy_clone(source)
    scatter(merge([torch.ones(4)]), [clone])
    assert (source.sum(), clone.sum()) == (0, 4)


@settings(max_examples=150, deadline=None)
@given(st.lists(laid(can_expand=False), max_size=5), ALIGNMENTS, st.integers(1, 40), st.integers(1, 9), st.integers(0))
def test_a_kernel_scatters_as_by_hand(
    parts: list[Laid], alignment: int, units_a_tile: int, num_threads: int, seed: int
) -> None:
    tensors = [part.tensor for part in parts]
    begins, num_bytes = offsets(tensors, alignment)
    source = some_bytes(num_bytes, torch.bool, seed)
    wanted = [Laid(part.tensor, bytearray(part.buffer), part.shift) for part in parts]
    for part, begin in zip(wanted, begins, strict=True):
        part.fill(bytes(source[begin:]))
    merged = torch.tensor(list(source), dtype=torch.uint8)
    _testing.scatter_by_tiles(
        [in_memory(tensor) for tensor in tensors], merged.data_ptr(), alignment, units_a_tile, num_threads
    )
    assert [part.buffer for part in parts] == [part.buffer for part in wanted]
