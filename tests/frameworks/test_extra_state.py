# SPDX-License-Identifier: Apache-2.0
"""Tests extra state: per rank, replicated, or sharded over ranks, also when another number of ranks loads it."""

from __future__ import annotations

import io
import pickle
import random
import shutil
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal, sorted_keys
from support.peak_memory import REFUSAL_BYTES, with_peak
from support.ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from bytecheckpoint import bytecheckpoint_ckpt_to_pytorch_ckpt, get_rng_state, load, save, set_rng_state
from bytecheckpoint.errors import ConfigError, InvalidPlanError, KeyMismatchError, UnsupportedError
from bytecheckpoint.tensors.equality import are_equal

POLICY = {"step": "replicated", "table": "replicated", "late": "replicated", "queue": "sharded", "rows": "sharded"}
QUEUE = [f"document {number}" for number in range(11)]
ROWS = torch.arange(22, dtype=torch.float64).view(11, 2)


def dealt(sequence: Any, rank: int, size: int) -> Any:
    return sequence[len(sequence) * rank // size : len(sequence) * (rank + 1) // size]


def extra_state_of(rank: int, size: int) -> dict[str, Any]:
    state = {
        "step": 17,
        "table": torch.arange(5),
        "queue": dealt(QUEUE, rank, size),
        "rows": dealt(ROWS, rank, size).clone(),
        "position": {"file": f"part {rank}", "offset": rank * 100},
        "own tensor": torch.full((rank + 1,), rank),
        "nothing": None,
    }
    if rank % 2 == 1:
        state["odd"] = (rank, [rank])  # some ranks have keys that others lack
        state["late"] = "from rank 1 on"
    return state


def save_on_all(path: Path) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    state = {"model": nn.Linear(2, 2), "extra_state": extra_state_of(rank, size)}
    handle = save(path, state, "ddp", True, extra_state_policy=POLICY)
    state["extra_state"]["rows"].fill_(-1)  # type: ignore[index]
    handle.committed.result(60)
    state["extra_state"] = {"junk": 1}
    load(path, state, "ddp")
    wanted = extra_state_of(rank, size)
    assert_equal(sorted_keys(state["extra_state"]), sorted_keys({**wanted, "late": "from rank 1 on"}))


def load_on_others(path: Path, again: Path, saved: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    state = {"model": nn.Linear(2, 2), "extra_state": {"position": "mine", "own tensor": 5, "other": 3}}
    before = state["extra_state"]
    with pytest.raises(
        KeyMismatchError, match=rf"'nothing', 'odd', .*each of {saved} ranks.*{size} ranks load.*strict=False"
    ):
        load(path, state, "ddp")
    assert state["extra_state"] is before
    result = load(path, state, "ddp", strict=False)
    assert {"extra_state: position", "extra_state: odd"} <= {*result.missing_keys}
    got = state["extra_state"]
    wanted = extra_state_of(rank, size)
    shared = {key: wanted[key] for key in ("step", "table", "queue", "rows")}
    assert_equal(
        sorted_keys(got), sorted_keys({**shared, "late": "from rank 1 on", "position": "mine", "own tensor": 5})
    )
    save(again, {"model": state["model"], "extra_state": got}, "ddp", extra_state_policy=POLICY)


def test_other_numbers_of_ranks(tmp_path: Path) -> None:
    on_four, on_two, on_three = (tmp_path / name for name in ("four", "two", "three"))
    run_ranks(4, save_on_all, on_four, limit_s=120)
    run_ranks(2, load_on_others, on_four, on_two, 4, limit_s=120)
    run_ranks(3, load_without_own, on_two, on_three, limit_s=120)


def load_without_own(path: Path, again: Path) -> None:
    """Loads what two ranks saved. It holds keys of single ranks, which three ranks cannot load."""
    with pytest.raises(KeyMismatchError, match="'own tensor', 'position'"):
        load(path, {"model": nn.Linear(2, 2), "extra_state": {}}, "ddp")
    state: dict[str, Any] = {"model": nn.Linear(2, 2), "extra_state": {}}
    load(path, state, "ddp", strict=False)
    wanted = extra_state_of(dist.get_rank(), dist.get_world_size())
    shared = {key: wanted[key] for key in ("step", "table", "queue", "rows")}
    assert_equal(sorted_keys(state["extra_state"]), sorted_keys({**shared, "late": "from rank 1 on"}))
    # "replicated" for the whole state makes it loadable on any number of ranks.
    save(again, state, "ddp", extra_state_policy="replicated")
    load(again, state, "ddp")


def draw() -> list[Any]:
    return [random.random(), torch.rand(3), np.random.rand(3), random.gauss(0, 1), torch.randn(5), np.random.randn()]


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    random.seed(1)
    torch.manual_seed(2)
    np.random.seed(3)
    draw()
    state: dict[str, Any] = {"model": nn.Linear(2, 2), "extra_state": {"rng": get_rng_state()}}
    before = get_rng_state()
    save(tmp_path, state, "ddp")
    assert before["python"] == get_rng_state()["python"], "saving draws nothing"
    assert torch.equal(before["torch"], get_rng_state()["torch"])
    wanted = draw()
    draw()
    state["extra_state"] = {}
    load(tmp_path, state, "ddp")
    set_rng_state(state["extra_state"]["rng"])
    for got, number in zip(draw(), wanted, strict=True):
        assert torch.equal(torch.as_tensor(got), torch.as_tensor(number))


@pytest.mark.parametrize(
    "state", [{}, {"python": 1, "torch": 2}, {"python": (3, (1, 2), None), "torch": torch.zeros(1)}]
)
def test_what_is_no_state_of_generators(state: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="not one that get_rng_state gave"):
        set_rng_state(state)


@pytest.mark.parametrize(
    ("extra_state", "policy", "error", "what_to_do"),
    [
        ({"rank_3.step": 1}, "own", InvalidPlanError, "does not begin like 'rank_0.'"),
        ({3: 1}, "own", InvalidPlanError, "the key must be a str"),
        ({"step": 3}, "sharded", InvalidPlanError, "is a int: it must be a list, a tuple, or a tensor"),
        ({"step": torch.tensor(3)}, {"step": "sharded"}, InvalidPlanError, "a tensor with at least one dim"),
        ({"step": 3}, {"step": "mine"}, ConfigError, "must be one of own, replicated, sharded"),
        ({"step": 3}, 3, ConfigError, "must be one of own, replicated, sharded"),
    ],
)
def test_what_cannot_be_saved(
    tmp_path: Path, extra_state: dict[Any, Any], policy: Any, error: type[Exception], what_to_do: str
) -> None:
    state = {"model": nn.Linear(2, 2), "extra_state": extra_state}
    with pytest.raises(error, match=what_to_do):
        save(tmp_path, state, "ddp", extra_state_policy=policy)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_one(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": nn.Linear(2, 2), "extra_state": {}}
    save(tmp_path, state, "ddp")
    state["extra_state"] = {"other": 1}
    load(tmp_path, state, "ddp")
    assert state["extra_state"] == {}


def write_expanded(path: Path, key: str, numel: int) -> int:
    """Writes a checkpoint as stock DCP does, whose one tensor stores one element expanded to ``numel``.

    Returns its bytes on disk.
    """
    dcp.save({key: torch.zeros(1)}, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    record = io.BytesIO()
    torch.save(torch.full((1,), 7.0).expand(numel), record)
    (path / "__0_0.distcp").write_bytes(record.getvalue())
    metadata = pickle.loads((path / ".metadata").read_bytes())
    size = torch.Size([numel])
    chunk = ChunkStorageMetadata(torch.Size([0]), size)
    metadata.state_dict_metadata[key].size = size
    metadata.state_dict_metadata[key].chunks = [chunk]
    (info,) = metadata.storage_data.values()
    info.offset, info.length = 0, len(record.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())


@pytest.mark.parametrize("part", ["extra_state", "optimizer", "merge"])
def test_nobody_gives_memory_for_more_than_the_records_hold(tmp_path: Path, part: str) -> None:
    numel = 1 << 29
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    state = {"model": model, "optimizer": optimizer, "extra_state": {}}
    save(tmp_path, state, "ddp")
    folder = "extra_state" if part == "extra_state" else "optimizer"
    key = {"extra_state": "big", "optimizer": "param_groups.weight.big", "merge": "state.weight.big"}[part]
    shutil.rmtree(tmp_path / folder)
    assert write_expanded(tmp_path / folder, key, numel) < 20_000

    def fill() -> None:
        if part == "merge":
            bytecheckpoint_ckpt_to_pytorch_ckpt(tmp_path, return_dict=True, optimizer_only=True)
        else:
            load(tmp_path, state, "ddp", strict=False)

    def refusal() -> str:
        with pytest.raises(UnsupportedError) as refused:
            fill()
        return str(refused.value)

    message, grown = with_peak(refusal)
    assert f"'{key}'" in message
    assert f"{4 * numel:,} bytes" in message
    assert grown < REFUSAL_BYTES


def test_views_that_are_small_are_loaded(tmp_path: Path) -> None:
    state = {"model": nn.Linear(2, 2), "extra_state": {}}
    save(tmp_path, state, "ddp")
    shutil.rmtree(tmp_path / "extra_state")
    write_expanded(tmp_path / "extra_state", "big", 50)
    load(tmp_path, state, "ddp")
    assert torch.equal(state["extra_state"]["big"], torch.full((50,), 7.0))


class Settings(dict[str, Any]):
    """A mapping that is not a plain dict."""


@pytest.mark.parametrize("fast", [False, True])
def test_containers_come_back_with_their_keys(tmp_path: Path, fast: bool) -> None:
    model, optimizer = training()
    shared = [{"same": torch.ones(1)}]
    value = {
        "optimizer": optimizer.state_dict(),  # its states are keyed by number
        "both": {0: torch.ones(2), "0": "text", (1, 2): None, None: {}},
        "empty": {"a": [], "b": {}, "c": ()},
        "listed": [{3: torch.zeros(1)}, [], ({5: 6},)],
        "ordered": OrderedDict(b=1, a=2),
        "counted": Counter("aab"),
        "twice": [shared, shared],
        "tensor": torch.arange(3),
    }
    save(tmp_path, {"model": model, "extra_state": value}, "ddp", fast_saving=fast).committed.result(60)
    loaded: dict[str, Any] = {"model": model, "extra_state": {}}
    load(tmp_path, loaded, "ddp")
    assert loaded["extra_state"].keys() == value.keys()
    assert [key for key in value if not are_equal(loaded["extra_state"][key], value[key])] == []
    _, other = training()
    other.load_state_dict(loaded["extra_state"]["optimizer"])
    assert are_equal(other.state_dict(), optimizer.state_dict())


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_mappings_of_other_types_are_saved_as_dicts(tmp_path: Path) -> None:
    odd = {"counts": defaultdict(int, a=1), "nested": [Settings(a={"b": Settings(c=1)})]}
    save(tmp_path, {"model": nn.Linear(1, 1), "extra_state": odd}, "ddp")
    loaded: dict[str, Any] = {"model": nn.Linear(1, 1), "extra_state": {}}
    load(tmp_path, loaded, "ddp")
    assert are_equal(loaded["extra_state"], {"counts": {"a": 1}, "nested": [{"a": {"b": {"c": 1}}}]})
