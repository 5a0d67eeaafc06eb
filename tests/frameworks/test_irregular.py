# SPDX-License-Identifier: Apache-2.0
"""Saves flat shards that are cut within a row: decomposed in place, or merged into blocks of whole rows."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import RanksFailed, run_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import bytecheckpoint
from bytecheckpoint import Config, new_group
from bytecheckpoint.errors import ConfigError, InvalidPlanError, RankLostError
from bytecheckpoint.native import _core
from bytecheckpoint.training_state import regular_blocks
from frameworks.wrapped import FRAMEWORK_OF, full_state, optimizer_of, train, wrap

LIMIT_S = 120.0
STALL_S = 3.0
FSDP1 = ("fsdp orig", "fsdp orig root", "fsdp flat", "fsdp grad op", "fsdp hybrid")


def chunks_by_key(path: Path) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Returns offsets and sizes of the chunks of each tensor."""
    checkpoint = _core.Checkpoint.open(str(path))
    names = [fqn for fqn, *_ in checkpoint.contents()]
    return {
        fqn: [(offsets, sizes) for offsets, sizes, *_ in chunks]
        for fqn, chunks in zip(names, checkpoint.chunks(), strict=True)
    }


def is_of_whole_rows(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: torch.Size) -> bool:
    return all(at == 0 for at in offsets[1:]) and sizes[1:] == tuple(shape[1:])


def save_both_ways(folder: Path, wrapping: str, fast_saving: bool) -> bool:
    """Saves one state decomposed and merged, and loads both into a plain model. Merges blocks of any size."""
    warnings.simplefilter("ignore")
    regular_blocks._MIN_BLOCK_BYTES = 1
    model = wrap(wrapping)
    optimizer = optimizer_of(model)
    train(model, optimizer)
    wanted = full_state(model, optimizer)
    for irregular in ("decompose", "exchange"):
        state = {"model": model, "optimizer": optimizer}
        path = folder / irregular
        handle = bytecheckpoint.save(path, state, "fsdp", fast_saving, irregular=irregular)
        handle.committed.result()
        plain = wrap("plain", seed=9)
        of_plain = optimizer_of(plain)
        bytecheckpoint.load(path, {"model": plain, "optimizer": of_plain}, "ddp")
        got = full_state(plain, of_plain)
        tensors = [key for key, value in wanted.items() if isinstance(value, torch.Tensor)]
        assert dist.get_rank() != 0 or all(torch.equal(got[key], wanted[key]) for key in tensors)
    bytecheckpoint.shutdown()
    return dist.get_rank() == 0


@pytest.mark.parametrize("fast_saving", [False, True])
@pytest.mark.parametrize("wrapping", FSDP1)
def test_merged_blocks_hold_the_same_and_are_regular(tmp_path: Path, wrapping: str, fast_saving: bool) -> None:
    """Both saves hold the same bytes. With "exchange" each rank writes whole rows, and there are fewer chunks."""
    assert any(run_ranks(4, save_both_ways, tmp_path, wrapping, fast_saving, limit_s=LIMIT_S))
    shapes = {name: parameter.shape for name, parameter in wrap("plain").named_parameters()}
    num_chunks = {}
    for irregular in ("decompose", "exchange"):
        of_model = chunks_by_key(tmp_path / irregular / "model")
        of_optimizer = chunks_by_key(tmp_path / irregular / "optimizer")
        num_chunks[irregular] = sum(map(len, (*of_model.values(), *of_optimizer.values())))
        of_parameters = [
            (shape, chunk)
            for fqn, shape in shapes.items()
            for chunk in (*of_model[fqn], *of_optimizer.get(f"state.{fqn}.exp_avg", []))
        ]
        is_regular = [is_of_whole_rows(*chunk, shape) for shape, chunk in of_parameters]
        assert all(is_regular) == (irregular == "exchange")
    assert num_chunks["exchange"] < num_chunks["decompose"]


class Uneven(nn.Module):
    """Has a parameter of four dims that is larger than a shard, and so is cut over all ranks, and a small uncut one."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.arange(5 * 7 * 3 * 3, dtype=torch.float32).view(5, 7, 3, 3))
        self.small = nn.Parameter(torch.arange(11.0))


def save_uneven(folder: Path, min_block_bytes: int) -> int:
    warnings.simplefilter("ignore")
    regular_blocks._MIN_BLOCK_BYTES = min_block_bytes
    model = FullyShardedDataParallel(
        Uneven(), auto_wrap_policy=ModuleWrapPolicy(set()), device_id=torch.device("cpu"), use_orig_params=True
    )
    bytecheckpoint.save(folder, {"model": model}, "fsdp", irregular="exchange")
    plain = Uneven()
    for parameter in plain.parameters():
        parameter.data.zero_()
    bytecheckpoint.load(folder, {"model": plain}, "ddp")
    assert torch.equal(plain.large, Uneven().large)
    assert torch.equal(plain.small, Uneven().small)
    return dist.get_rank()


@pytest.mark.parametrize(
    ("num_ranks", "min_block_bytes", "num_chunks"), [(2, 1, 2), (3, 1, 3), (5, 1, 5), (5, 1 << 20, 1)]
)
def test_one_block_a_rank(tmp_path: Path, num_ranks: int, min_block_bytes: int, num_chunks: int) -> None:
    """Each rank writes one block of a tensor that is cut over all ranks. One rank writes a small tensor whole."""
    run_ranks(num_ranks, save_uneven, tmp_path, min_block_bytes, limit_s=LIMIT_S)
    assert len(chunks_by_key(tmp_path / "model")["large"]) == num_chunks


def fail_on_one_rank(folder: Path, what: str) -> None:
    """Saves although rank 1 fails before any piece is sent."""
    warnings.simplefilter("ignore")
    model = wrap("fsdp orig")
    optimizer = optimizer_of(model)
    train(model, optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if dist.get_rank() == 1 and what == "states differ":
        for of_parameter in optimizer.state.values():
            of_parameter["exp_avg_sq"] = of_parameter["exp_avg_sq"].double()
    if dist.get_rank() == 1 and what == "no model":
        state["model"] = None
    bytecheckpoint.save(folder, state, "fsdp", irregular="exchange")


@pytest.mark.parametrize(("what", "error"), [("states differ", InvalidPlanError), ("no model", ConfigError)])
def test_a_rank_that_cannot_take_part_is_heard(tmp_path: Path, what: str, error: type[Exception]) -> None:
    """No rank waits for pieces that never come. All ranks raise the reason, and nothing is written."""
    with pytest.raises(RanksFailed) as raised:
        run_ranks(2, fail_on_one_rank, tmp_path / "run", what, limit_s=LIMIT_S)
    message = str(raised.value)
    assert message.count(f"errors.{error.__name__}") >= 2, message
    assert ("irregular='decompose'" if what == "states differ" else "checkpoint_state['model']") in message
    assert not (tmp_path / "run").exists()


def want_memory_on_one_rank(folder: Path, fast_saving: bool, lacking: str) -> str:
    """Saves although rank 1 has no memory to merge pieces.

    The earlier checkpoint stays whole, and the next save works.
    """
    warnings.simplefilter("ignore")
    regular_blocks._MIN_BLOCK_BYTES = 1
    model = wrap("fsdp orig root")
    optimizer = optimizer_of(model)
    train(model, optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    bytecheckpoint.save(folder, state, "fsdp", irregular="exchange")

    def refuse(*arguments: object) -> None:
        raise MemoryError(f"no memory for {lacking}")

    kept = getattr(regular_blocks, lacking)
    if dist.get_rank() == 1:
        setattr(regular_blocks, lacking, refuse)
    try:
        bytecheckpoint.save(folder, state, "fsdp", fast_saving, irregular="exchange").committed.result()
        message = ""
    except MemoryError as error:
        message = str(error)
    setattr(regular_blocks, lacking, kept)
    for again in (False, True):
        plain = wrap("plain", seed=9)
        bytecheckpoint.load(folder, {"model": plain, "optimizer": optimizer_of(plain)}, "ddp")
        if not again:
            bytecheckpoint.save(folder, state, "fsdp", fast_saving, irregular="exchange").committed.result()
    bytecheckpoint.shutdown()
    return message


@pytest.mark.parametrize(("fast_saving", "lacking"), [(True, "merge"), (False, "_block_of")])
def test_a_rank_without_memory_is_heard(tmp_path: Path, fast_saving: bool, lacking: str) -> None:
    """No rank waits for the pieces or the block of a rank that had no memory for them."""
    messages = run_ranks(3, want_memory_on_one_rank, tmp_path, fast_saving, lacking, limit_s=LIMIT_S)
    assert messages == [f"no memory for {lacking}"] * 3


def save_without_others(folder: Path, wrapping: str, irregular: str) -> str:
    """Each rank saves alone a model that is sharded over both."""
    warnings.simplefilter("ignore")
    model = wrap(wrapping)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    path = folder / str(dist.get_rank())
    with pytest.raises(ConfigError) as raised:
        bytecheckpoint.save(path, {"model": model}, FRAMEWORK_OF[wrapping], irregular=irregular, process_group=alone)
    assert not path.exists()
    return str(raised.value)


@pytest.mark.parametrize(
    ("wrapping", "irregular"), [("fsdp orig", "decompose"), ("fsdp orig", "exchange"), ("fsdp2", "decompose")]
)
def test_shards_of_ranks_that_do_not_save_are_missed(tmp_path: Path, wrapping: str, irregular: str) -> None:
    """Without this check, the checkpoint would lack the other rank's shards, and only a load would report it."""
    messages = run_ranks(2, save_without_others, tmp_path, wrapping, irregular, limit_s=LIMIT_S)
    assert all(
        f"has the ranks [{rank}], and" in text and f"[{1 - rank}] too" in text for rank, text in enumerate(messages)
    )


def lose_while_pieces_travel(folder: Path, victim: int, by: int, fast_saving: bool) -> None:
    """Loses a rank while pieces are sent.

    The earlier checkpoint stays whole, and the other ranks save and load again in a group of their own.
    """
    warnings.simplefilter("ignore")
    regular_blocks._MIN_BLOCK_BYTES = 1
    config = Config(stall_timeout_s=STALL_S)
    model = wrap("fsdp orig root")
    optimizer = optimizer_of(model)
    train(model, optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    bytecheckpoint.save(folder, state, "fsdp", fast_saving, irregular="exchange", config=config).committed.result()
    wanted = full_state(model, optimizer)
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    store, kept = dist.distributed_c10d._get_default_store(), regular_blocks._send_and_receive

    def lose(*arguments: Any) -> None:
        if dist.get_rank() == victim:
            store.set("lost", "")
            os.kill(os.getpid(), by)
        kept(*arguments)

    regular_blocks._send_and_receive = lose
    with pytest.raises(RankLostError) as raised:
        bytecheckpoint.save(folder, state, "fsdp", fast_saving, irregular="exchange", config=config).committed.result()
    store.wait(["lost"])
    if dist.get_rank() == victim:  # it was stopped and then continued
        store.set("went on", "")
        return
    assert list(raised.value.ranks) == [victim], raised.value
    left = [rank for rank in range(len(pids)) if rank != victim]
    group = new_group(left, stall_timeout=LIMIT_S)
    plain = wrap("plain", seed=9)
    of_plain = optimizer_of(plain)
    for path in (folder, folder / "again"):
        bytecheckpoint.load(path, {"model": plain, "optimizer": of_plain}, "ddp", process_group=group)
        got = {f"model.{name}": value for name, value in plain.state_dict().items()}
        assert dist.get_rank() != 0 or all(torch.equal(value, wanted[name]) for name, value in got.items())
        saved = {"model": plain, "optimizer": of_plain}
        again = folder / "again"
        bytecheckpoint.save(
            again, saved, "ddp", fast_saving, irregular="exchange", process_group=group
        ).committed.result()
    if by == signal.SIGSTOP:
        if dist.get_rank() == left[0]:
            os.kill(pids[victim], signal.SIGCONT)
        store.wait(["went on"])
    dist.barrier(group)


@pytest.mark.parametrize(
    ("victim", "by", "fast_saving"), [(1, signal.SIGKILL, True), (0, signal.SIGKILL, False), (1, signal.SIGSTOP, True)]
)
def test_a_rank_is_lost_while_pieces_travel(tmp_path: Path, victim: int, by: int, fast_saving: bool) -> None:
    """All other ranks raise RankLostError, and no rank waits for the lost rank's pieces."""
    may_die = victim if by == signal.SIGKILL else None
    run_ranks(3, lose_while_pieces_travel, tmp_path, victim, int(by), fast_saving, limit_s=LIMIT_S, may_die=may_die)


def save_a_replica(folder: Path) -> bool:
    """Ranks 0 and 1 hold one of two replicas, and save it without the other ranks."""
    warnings.simplefilter("ignore")
    model = wrap("fsdp2 hybrid")
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        bytecheckpoint.save(folder, {"model": model}, "fsdp2", process_group=group)
    dist.barrier()
    plain = wrap("plain", seed=3)
    bytecheckpoint.load(folder, {"model": plain}, "ddp")
    return all(map(torch.equal, plain.state_dict().values(), wrap("plain").state_dict().values()))


def test_a_replica_may_be_saved_without_the_others(tmp_path: Path) -> None:
    """One replica holds the whole model."""
    assert all(run_ranks(4, save_a_replica, tmp_path, limit_s=LIMIT_S))


def test_an_unknown_way_is_refused(tmp_path: Path) -> None:
    """The message names the accepted values."""
    with pytest.raises(ConfigError, match=r"irregular='split': must be 'decompose' or 'exchange'"):
        bytecheckpoint.save(tmp_path, {"model": wrap("plain")}, "ddp", irregular="split")
