# SPDX-License-Identifier: Apache-2.0
"""What ranks hold under one key although torch does not keep it equal is compared, and never mixed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from bytecheckpoint import (
    BcpReader,
    BcpSavePlanner,
    BcpWriter,
    Config,
    async_save_state_dict,
    registered,
    save_state_dict,
)

Save = Callable[[str, dict[str, Any]], None]
SIDE = 512  # a float32 of SIDE x SIDE has 1 MiB: it was split between ranks


def by_entry_point(path: str, state: dict[str, Any]) -> None:
    save_state_dict(path, state)


def in_background(path: str, state: dict[str, Any]) -> None:
    async_save_state_dict(path, state).committed.result(60)


def by_dcp(path: str, state: dict[str, Any]) -> None:
    dcp.save(state, storage_writer=BcpWriter(path), planner=BcpSavePlanner())


def by_registered(path: str, state: dict[str, Any]) -> None:
    with registered():
        dcp.save(state, checkpoint_id=path)


def by_registered_in_background(path: str, state: dict[str, Any]) -> None:
    with registered():
        dcp.async_save(state, checkpoint_id=path).result()  # type: ignore[union-attr]


def with_config(config: Config) -> Save:
    return lambda path, state: save_state_dict(path, state, config=config)


WAYS = (by_entry_point, in_background, by_dcp, by_registered, by_registered_in_background)


def said_by(save: Save, path: str, state: dict[str, Any]) -> tuple[list[str], str | None]:
    """Returns the warnings of a save about copies, and its error."""
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            save(path, state)
        except BaseException as raised:
            failures = getattr(raised, "failures", None)
            first = next(iter(failures.values()))[0] if failures else raised
            error = f"{type(first).__name__}: {first}"
    dist.barrier()
    return [str(warning.message) for warning in caught if "different copies" in str(warning.message)], error


def stored(path: str, like: dict[str, Any]) -> dict[str, Any]:
    """Loads a checkpoint into `like`, on this rank alone, by stock DCP."""
    dcp.load(like, checkpoint_id=path, no_dist=True)
    return like


def writers_of(path: str, key: str) -> list[str]:
    """Returns which ranks wrote the chunks of a key."""
    data: Mapping[Any, Any] = BcpReader(path).read_metadata().storage_data
    return sorted(info.relative_path.split("_")[2] for index, info in data.items() if index.fqn == key)


def plain_tensors_and_objects(base: str) -> list[Any]:
    rank = dist.get_rank()
    answers: list[Any] = []
    for way in WAYS:
        name = way.__name__
        state = {
            f"{name}.large": torch.full((SIDE, SIDE), float(rank)),
            f"{name}.small": torch.full((3,), rank),
            f"{name}.strided": torch.full((SIDE, 2 * SIDE), float(rank)).t(),
            f"{name}.float": 0.5 + rank,
            f"{name}.object": {"index": [rank, "a"]},
            f"{name}.pickled": complex(rank, 1),
            f"{name}.equal": torch.ones(SIDE, SIDE),
            f"{name}.step": 7,
        }
        path = f"{base}/{name}/step_1"
        said, error = said_by(way, path, dict(state))
        like = {
            key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for key, value in state.items()
        }
        like[f"{name}.object"] = {"index": None}
        got = {key.rpartition(".")[2]: value for key, value in stored(path, like).items()}
        answers.append((name, said, error, {key: _summary(value) for key, value in got.items()}))
        answers[-1][3]["chunks"] = len(writers_of(path, f"{name}.equal"))
    return answers


def _summary(value: Any) -> Any:
    return sorted(set(value.flatten().tolist())) if isinstance(value, torch.Tensor) else value


def test_the_lowest_ranks_copy_is_saved_whole_and_differing_keys_are_named_once(tmp_path: Path) -> None:
    of_rank_0, of_rank_1 = run_ranks(2, plain_tensors_and_objects, str(tmp_path))
    assert [name for name, *_ in of_rank_0] == [way.__name__ for way in WAYS]
    for (name, said, error, got), (_, said_by_other, error_of_other, _) in zip(of_rank_0, of_rank_1, strict=True):
        assert (error, error_of_other) == (None, None), name
        assert got["large"] == got["strided"] == [0.0], name
        assert got["small"] == [0]
        assert (got["float"], got["object"], got["pickled"]) == (0.5, {"index": [0, "a"]}, 1j)
        assert (got["equal"], got["step"], got["chunks"]) == ([1.0], 7, 1)
        assert (len(said), said_by_other) == (1, []), name
        for key in ("large", "small", "strided", "float", "object.index", "pickled"):
            assert f"'{name}.{key}'" in said[0]
        assert f"{name}.equal" not in said[0]
        assert f"{name}.step" not in said[0]
        assert "rank 0 against rank 1" in said[0]


def own_meshes(base: str) -> list[Any]:
    """Each rank is a mesh of its own, as with experts or pipeline stages that each rank counts from 0."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "fsdp"))["fsdp"]
    answers: list[Any] = []
    for way in WAYS:
        state = {"experts.w": DTensor.from_local(torch.full((SIDE, SIDE), float(rank)), mesh, [Shard(0)])}
        path = Path(base, way.__name__)
        _, error = said_by(way, str(path), state)
        answers.append((way.__name__, error, [entry.name for entry in path.glob("*")] if path.exists() else []))
    trusted = {"experts.w": DTensor.from_local(torch.full((SIDE, SIDE), float(rank)), mesh, [Shard(0)])}
    assert said_by(with_config(Config(differing_copies="trust")), f"{base}/trusted", trusted) == ([], None)
    values = _summary(stored(f"{base}/trusted", {"experts.w": torch.zeros(SIDE, SIDE)})["experts.w"])
    answers.append(("trusted", values, writers_of(f"{base}/trusted", "experts.w")))
    return answers


def test_differing_dtensors_of_meshes_that_share_no_rank_are_refused(tmp_path: Path) -> None:
    for *answers, (_, values, writers) in run_ranks(2, own_meshes, str(tmp_path)):
        for name, error, files in answers:
            assert str(error).startswith("InvalidPlanError"), (name, error)
            assert "'experts.w' (rank 0 against rank 1)" in str(error), name
            assert files == [], name
        assert (values, len(writers)) == ([0.0], 1)


def replicas_by_hand(base: str) -> dict[str, Any]:
    """Two groups of FSDP with DDP around them by hand: replicas on meshes that share no rank."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))["fsdp"]

    def state(value: float) -> dict[str, Any]:
        rows = torch.arange(SIDE * SIDE // 2).view(SIDE // 2, SIDE) + rank % 2 * SIDE * SIDE // 2
        return {f"w{i}": DTensor.from_local(rows + value + i, mesh, [Shard(0)], run_check=False) for i in range(4)}

    answers: dict[str, Any] = {"equal": said_by(by_entry_point, f"{base}/equal", state(0))}
    got = stored(f"{base}/equal", {f"w{i}": torch.zeros(SIDE, SIDE) for i in range(4)})
    wanted = torch.arange(SIDE * SIDE).view(SIDE, SIDE)
    answers["is_right"] = all(torch.equal(got[f"w{i}"], wanted + i) for i in range(4))
    answers["writers"] = [writers_of(f"{base}/equal", f"w{i}") for i in range(4)]
    answers["differ"] = said_by(by_entry_point, f"{base}/differ", state(float(rank // 2)))
    tree = with_config(Config(tree_topo_threshold=1, tree_topo_fan_out=2))
    answers["differ in a tree"] = said_by(tree, f"{base}/tree", state(float(rank // 2)))
    return answers


def test_replicas_on_several_meshes_are_written_by_one_mesh_each(tmp_path: Path) -> None:
    for answers in run_ranks(4, replicas_by_hand, str(tmp_path)):
        assert answers["equal"] == ([], None)
        assert answers["is_right"]
        assert answers["writers"] == [["0", "1"], ["2", "3"], ["0", "1"], ["2", "3"]]
        for case in ("differ", "differ in a tree"):
            said, error = answers[case]
            assert said == []
            assert str(error).startswith("InvalidPlanError"), error
            assert "'w0' (ranks 0 to 1 against ranks 2 to 3)" in error or "'w0' (rank 0 against rank 2)" in error


def modes(base: str) -> dict[str, Any]:
    rank = dist.get_rank()
    answers = {}
    for name, value in {"tensor": torch.full((4,), rank), "object": [rank], "float": 0.1 * rank}.items():
        for mode in ("check", "trust"):
            save = with_config(Config(differing_copies=mode))
            path = f"{base}/{mode}-{name}"
            answers[mode, name] = *said_by(save, path, {"model": {name: value}}), Path(path, ".metadata").exists()
    return answers


def test_check_refuses_differing_copies_and_trust_compares_nothing(tmp_path: Path) -> None:
    for answers in run_ranks(2, modes, str(tmp_path)):
        for (mode, name), (said, error, is_saved) in answers.items():
            assert said == []
            assert is_saved == (mode == "trust")
            if mode == "check":
                assert error is not None
                assert error.startswith("InvalidPlanError")
                assert f"'model.{name}'" in error
                assert "rank 0 against rank 1" in error
            else:
                assert error is None


def ordinary_jobs(base: str) -> dict[str, Any]:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    answers: dict[str, Any] = {}
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    ddp(torch.randn(16, 8)).sum().backward()
    state = {"model": model.state_dict(), "rng": torch.get_rng_state()}
    answers["ddp"] = said_by(by_entry_point, f"{base}/ddp/step_1", state)
    got = stored(f"{base}/ddp/step_1", {"rng": torch.zeros_like(torch.get_rng_state())})
    answers["rng is that of rank 0"] = torch.equal(got["rng"], torch.get_rng_state()) == (rank == 0)
    ddp(torch.randn(16, 8))
    answers["ddp again"] = said_by(by_entry_point, f"{base}/ddp/step_2", {**state, "rng": torch.get_rng_state()})

    torch.manual_seed(0)
    sharded = torch.nn.Linear(8, 8)
    fully_shard(sharded)
    optimizer = torch.optim.AdamW(sharded.parameters())
    sharded(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    groups = [{**group, "params": [], "d": 1.0 + rank} for group in optimizer.state_dict()["param_groups"]]
    state = {"weight": sharded.weight, "state": optimizer.state_dict()["state"], "groups": groups}
    flat = {"weight": state["weight"], "groups": groups, **{f"state.{k}": v for k, v in state["state"].items()}}
    answers["fsdp"] = said_by(by_entry_point, f"{base}/fsdp/step_1", flat)
    return answers


def test_batch_norm_statistics_rng_states_and_floats_of_groups_are_named(tmp_path: Path) -> None:
    of_rank_0, of_rank_1 = run_ranks(2, ordinary_jobs, str(tmp_path))
    for answers in (of_rank_0, of_rank_1):
        assert {answers[name][1] for name in ("ddp", "ddp again", "fsdp")} == {None}
        assert answers["rng is that of rank 0"]
        assert answers["ddp again"][0] == []
    (said,) = of_rank_0["ddp"][0]
    for key in ("model.1.running_mean", "model.1.running_var", "rng"):
        assert f"'{key}'" in said
    for key in ("model.0.weight", "model.1.weight", "num_batches_tracked"):
        assert key not in said
    (said,) = of_rank_0["fsdp"][0]
    assert ".d'" in said or "groups" in said
    assert "weight" not in said
    assert "state" not in said


def saves_again(base: str, tree: bool) -> list[Any]:
    rank = dist.get_rank()
    config = Config(tree_topo_threshold=1, tree_topo_fan_out=2) if tree else Config()
    writer = BcpWriter(base, config=config)
    state = {f"t{i}": torch.full((SIDE, SIDE), float(i)) for i in range(6)} | {"step": 0}
    answers: list[Any] = []

    def save(number: int) -> None:
        path = f"{base}/step_{number}"
        planner = BcpSavePlanner(config=config)
        said = said_by(lambda *_: dcp.save(state, storage_writer=writer, planner=planner, checkpoint_id=path), path, {})
        got = stored(path, {f"t{i}": torch.zeros(SIDE, SIDE) for i in range(6)})
        answers.append(
            (planner.last_plan.cache, planner.last_plan.bytes_sent, *said, [_summary(got[f"t{i}"]) for i in range(6)])
        )

    save(1)
    state["step"] = 1
    state["t0"] += 1  # on all ranks alike
    save(2)
    for i in (1, 3, 5):  # they were divided among the ranks
        state[f"t{i}"] += rank * 10
    save(3)
    state["t1"] += 1
    save(4)
    state["t2"] += rank
    save(5)
    return answers


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_copies_that_begin_to_differ_are_seen_though_plans_are_kept(tmp_path: Path, num_ranks: int, tree: bool) -> None:
    of_rank_0, *others = run_ranks(num_ranks, saves_again, str(tmp_path), tree)
    base = [float(i) for i in range(6)]
    wanted = [base, [1.0, *base[1:]], [1.0, *base[1:]], [1.0, 2.0, *base[2:]], [1.0, 2.0, *base[2:]]]
    for answers in (of_rank_0, *others):
        assert [cache for cache, *_ in answers] == ["miss", "hit", "miss", "hit", "miss"]
        assert [error for *_, error, _ in answers] == [None] * 5
        assert [[value for (value,) in got] for *_, got in answers] == wanted
    assert [len(said) for _, _, said, *_ in of_rank_0] == [0, 0, 1, 0, 1]
    third, fifth = of_rank_0[2][2][0], of_rank_0[4][2][0]
    assert all(f"'t{i}'" in third for i in (1, 3, 5))
    assert "'t2'" not in third
    assert "'t2'" in fifth
    assert "'t1'" not in fifth
    assert of_rank_0[1][1] == 16 + 20 + 12  # digest, name of the plan, hash of the one group of copies


def outside_the_sample(base: str) -> list[Any]:
    rank = dist.get_rank()
    large = torch.zeros(16 * SIDE, SIDE)  # 64 blocks of 256 KiB
    large[3] = rank
    answers = []
    for number in range(40):
        path = f"{base}/step_{number}"
        said, _ = said_by(by_dcp, path, {"large": large})
        got = stored(path, {"large": torch.zeros_like(large)})["large"]
        answers.append((bool(said), got[3].unique().tolist(), got.sum().item()))
    return answers


def test_what_a_sample_does_not_see_is_still_one_ranks_copy(tmp_path: Path) -> None:
    for answers in run_ranks(2, outside_the_sample, str(tmp_path)):
        for _, values, total in answers:
            assert values in ([0.0], [1.0])
            assert total == values[0] * SIDE


def two_groups(base: str) -> tuple[list[str], str | None]:
    rank = dist.get_rank()
    return said_by(
        by_entry_point, f"{base}/step_1", {"w": torch.full((8,), rank // 2), "v": torch.full((8,), rank == 2)}
    )


def test_groups_of_equal_copies_are_named(tmp_path: Path) -> None:
    (said,), error = run_ranks(4, two_groups, str(tmp_path))[0]
    assert error is None
    assert "'w' (a plain tensor, int64 [8]: ranks 0+1 against ranks 2+3)" in said
    assert "'v' (a plain tensor, bool [8]: ranks 0+1+3 against rank 2)" in said
