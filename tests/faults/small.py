# SPDX-License-Identifier: Apache-2.0
"""The smallest checkpoint that has everything, and checks that damage to each of its bytes is seen."""

from __future__ import annotations

import os
import random
import shutil
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from support.fork_server import meet, wait_for
from support.saves import BOTH_RANKS, SaveRequest, gloo, names_in
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from bytecheckpoint import BcpReader, BcpWriter, Config, verify
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError, FormatVersionError
from faults.crafting import DATA_TRAILER

__all__ = [
    "CONFIG",
    "Findings",
    "damage_every_byte",
    "load_small",
    "load_when_told",
    "save_small",
    "small_state",
]

# Reads are buffered, because the damage has just been written through the cache. The ring is kept between loads.
CONFIG = Config(ring_bytes=16 << 20, direct_io=False, io_threads=1)
SEED = 20240612
# One of so many loads goes through dcp.load itself.
_DCP_EVERY = 64
_MAX_FAULTS = 20


def small_state(rank: int, factor: int = 1) -> dict[str, Any]:
    """Returns the state of one of two ranks. Both have plain tensors; rank 1 also a quantized tensor and an object.

    ``factor`` 0 gives a state in which every value differs.
    """
    if rank == 0:
        beta = torch.tensor([[1, 2], [3, 4]], dtype=torch.int16)
        return {"alpha": torch.tensor([1.5, -2.5]) * factor, "beta": beta * factor}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to deprecate them
        odd = torch.quantize_per_tensor(torch.tensor([1.0, 2.0, 3.0]) * factor, 0.5, 3, torch.quint8)
    return {"gamma": torch.tensor([7.0], dtype=torch.float64) * factor, "odd": odd, "step": 11 * factor}


def small_states(factor: int = 1) -> dict[str, Any]:
    """Returns the state of both ranks together."""
    return {key: value for rank in BOTH_RANKS for key, value in small_state(rank, factor).items()}


def save_small(request: SaveRequest) -> None:
    with gloo(request):
        dcp.save(small_state(request.rank), storage_writer=BcpWriter(request.path, config=request.config))


def raw(value: Any) -> Any:
    """Returns ``value``, or its integers if it is a quantized tensor."""
    return value.int_repr() if isinstance(value, torch.Tensor) and value.is_quantized else value


class Target:
    """The state that a load of everything fills."""

    def __init__(self) -> None:
        self.state = small_states(0)
        self._wanted, self._blank = small_states(), small_states(0)

    def clear(self) -> None:
        for key, blank in self._blank.items():
            if isinstance(blank, torch.Tensor):
                self.state[key].copy_(blank)
            else:
                self.state[key] = blank

    def check(self, *, failed: bool) -> None:
        """Fails on any value that was not saved. A failed load may have left some values as they were."""
        for key, wanted in self._wanted.items():
            got, wanted, blank = raw(self.state[key]), raw(wanted), raw(self._blank[key])
            if isinstance(got, torch.Tensor):
                same = got == wanted
                right = bool((torch.logical_or(same, got == blank) if failed else same).all())
            else:
                right = got == wanted or (failed and got == blank)
            assert right, f"'{key}': wrong values: {got}"


def load_small(path: Path, config: Config = CONFIG, target: Target | None = None) -> CheckpointError | None:
    """Loads everything. Returns what that raises, or None; fails on any value that was not saved."""
    target = target or Target()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.load(target.state, storage_reader=BcpReader(path, config=config), no_dist=True)
        except CheckpointException as caught:
            target.check(failed=True)
            (error,) = (wrapped[0] for wrapped in caught.failures.values())
            assert isinstance(error, CheckpointError), repr(error)
            return error
    target.check(failed=False)
    return None


def load_when_told(address: bytes, path: Path) -> CheckpointError | None:
    """Returns ``load_small``, called once the test says that it watches."""
    test = meet(address)
    test.send("ready")
    wait_for(test)
    return load_small(path)


class Loads:
    """Loads one checkpoint into one target, and reads the files anew each time.

    ``dcp.load`` spends most of its time on plans, which are the same every time, so this class makes them once.
    """

    def __init__(self, path: Path, config: Config) -> None:
        self._path = path
        self._config = config
        self._target = Target()
        self._planner = DefaultLoadPlanner()
        metadata = BcpReader(path, config=config).read_metadata()
        self._planner.set_up_planner(self._target.state, metadata, is_coordinator=True)
        self._plan = self._planner.create_local_plan()

    def failure(self, *, through_dcp: bool = False) -> CheckpointError | None:
        """Returns what ``load_small`` returns."""
        self._target.clear()
        if through_dcp:
            return load_small(self._path, self._config, self._target)
        reader = BcpReader(self._path, config=self._config)
        try:
            metadata = reader.read_metadata()
            reader.set_up_storage_reader(metadata, True)
            (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(self._plan)])
            reader.read_data(plan, self._planner).wait()
        except CheckpointError as error:
            self._target.check(failed=True)
            return error
        self._target.check(failed=False)
        return None


@dataclass
class Findings:
    """The findings of one process.

    Attributes:
        faults: The first few cases of damage that was missed or reported wrongly.
        num_faults: How many such cases there were.
    """

    num_flips: int = 0
    num_cuts: int = 0
    num_faults: int = 0
    faults: list[str] = field(default_factory=list)

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            self.num_faults += 1
            if len(self.faults) < _MAX_FAULTS:
                self.faults.append(f"{what}: {error}")


class Examination:
    """Damages the files of a checkpoint, and checks that ``verify`` and a load see it.

    Both must see all damage: each file is one block, which a load of everything needs.
    """

    def __init__(self, path: Path) -> None:
        self.findings = Findings()
        self._path = path
        self._load = Loads(path, CONFIG)
        self._load_rewritten = Loads(path, replace(CONFIG, accept_rewritten_metadata=True))
        self._num_looks = 0
        assert self._load.failure() is None
        assert self._load.failure(through_dcp=True) is None
        assert verify(path, config=CONFIG).is_whole

    def flip(self, name: str, positions: range, *, all_bits: bool) -> None:
        rng = random.Random(SEED + positions.start)
        content = (self._path / name).read_bytes()
        file = os.open(self._path / name, os.O_RDWR)
        for position in positions:
            for bit in range(8) if all_bits else [rng.randrange(8)]:
                os.pwrite(file, bytes([content[position] ^ 1 << bit]), position)
                with self.findings.of(f"{name}: bit {bit} of byte {position} of {len(content)}"):
                    self._look(name, position, content)
                self.findings.num_flips += 1
            os.pwrite(file, content[position : position + 1], position)
        os.close(file)

    def cut(self, name: str, lengths: range) -> None:
        content = (self._path / name).read_bytes()
        for length in reversed(lengths):
            os.truncate(self._path / name, length)
            with self.findings.of(f"{name}: cut to {length} of {len(content)}"):
                self._look(name, len(content), content)
            self.findings.num_cuts += 1
        (self._path / name).write_bytes(content)

    def _look(self, name: str, position: int, content: bytes) -> None:
        self._check_report(name, position, content)
        self._num_looks += 1
        error = self._load.failure(through_dcp=self._num_looks % _DCP_EVERY == 0)
        assert error is not None, "the load does not see it"
        assert type(error) in (CorruptCheckpointError, FormatVersionError), repr(error)
        assert error.path == str(self._path / name), repr(error)
        assert name in str(error), repr(error)
        if name == ".metadata":
            self._load_rewritten.failure()  # it may fail or not, but must give no wrong values

    def _check_report(self, name: str, position: int, content: bytes) -> None:
        report = verify(self._path, config=CONFIG)
        assert not report.is_whole, "verify does not see it"
        (problem,) = report.problems
        assert problem.file == name, problem
        assert name in problem.message, problem
        if name == ".metadata":
            assert (problem.section, problem.fqns) == ("metadata", []), problem
            return
        (end_of_records,) = struct.unpack_from("<q", content, len(content) - DATA_TRAILER + 24)
        if position >= end_of_records:
            assert (problem.section, problem.fqns) == ("block table or trailer", []), problem
            return
        # The header and the records are in one block.
        assert (problem.section, problem.offset, problem.num_bytes) == ("records", 0, end_of_records), problem
        assert problem.fqns == list(small_state(int(name[2]))), problem


def damage_every_byte(original: Path, copy: Path, part: int, num_parts: int, all_bits: bool) -> Findings:
    """Flips one bit, or all bits, of each ``num_parts``-th byte, and cuts at each ``num_parts``-th length."""
    examination = Examination(Path(shutil.copytree(original, copy)))
    for name in names_in(copy):
        positions = range(part, (copy / name).stat().st_size, num_parts)
        examination.flip(name, positions, all_bits=all_bits)
        examination.cut(name, positions)
    return examination.findings
