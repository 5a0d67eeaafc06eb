# SPDX-License-Identifier: Apache-2.0
"""A call that fails on only one rank leaves the others one call behind. No checkpoint mixes two calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from torch.distributed.checkpoint.api import CheckpointException

import bytecheckpoint
from bytecheckpoint import async_save_state_dict, load_state_dict, registered, save_state_dict
from bytecheckpoint.distributed.call_order import check_in_step, next_turn
from bytecheckpoint.errors import OutOfStepError
from distributed.worlds import LIMIT_S, Sharded, full, sharded


class FailsHere(RuntimeError):
    pass


class Step:
    """A Stateful: DCP asks for its state within the call."""

    def __init__(self, number: int, fails: bool) -> None:
        self._number, self._fails = number, fails

    def state_dict(self) -> dict[str, Any]:
        if self._fails:
            raise FailsHere
        return {"number": self._number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def now(path: Path, model: Sharded, number: int, fails: bool) -> None:
    save_state_dict(path, {"weight": model.weight}, user_metadata={"of": object()} if fails else {})


def background(path: Path, model: Sharded, number: int, fails: bool) -> None:
    metadata = {"of": object()} if fails else {}
    async_save_state_dict(path, {"weight": model.weight}, user_metadata=metadata).committed.result(LIMIT_S)


def as_registered(path: Path, model: Sharded, number: int, fails: bool) -> None:
    state = {"weight": model.weight, "step": Step(number, fails)}
    future: Any = dcp.async_save(state, checkpoint_id=path)
    future.result(LIMIT_S)


def parts(path: Path, model: Sharded, number: int, fails: bool) -> None:
    role: Any = 7 if fails else None
    bytecheckpoint.save(path, {"model": model}, "fsdp2", fast_saving=True, role=role).committed.result(LIMIT_S)


def fail_once_on_one_rank(path: Path, save: Callable[..., None], failing: int) -> list[str]:
    """Makes six calls at one path, and returns how each of them ended on this rank."""
    ended = []
    models = [Sharded(number) for number in range(6)]  # ranks make these together
    with registered():
        for number, model in enumerate(models):
            try:
                save(path, model, number, number == 1 and dist.get_rank() == failing)
                ended.append("saved")
            except (Exception, CheckpointException) as error:
                wrapped = getattr(error, "failures", {}).values()
                is_out = any(isinstance(one, OutOfStepError) for one in (error, *(failure for failure, _ in wrapped)))
                ended.append("out of step" if is_out else f"failed: {type(error).__name__}")
        dist.barrier()
    return ended


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("save", [now, background, as_registered, parts])
def test_calls_of_one_path_never_mix(tmp_path: Path, save: Any, failing: int) -> None:
    ended = run_ranks(2, fail_once_on_one_rank, tmp_path / "ckpt", save, failing)
    # The second call of the failing rank failed. The other rank's second call met the third of the failing one, and the
    # other rank's third call was skipped.
    assert ended[failing][1].startswith("failed"), ended
    assert [ended[failing][0], *ended[failing][2:]] == ["saved", "out of step", "saved", "saved", "saved"]
    assert ended[1 - failing] == ["saved", "out of step", "out of step", "saved", "saved", "saved"]
    got: dict[str, Any] = {"weight": torch.zeros(8, 4)}
    load_state_dict(tmp_path / "ckpt" / "model" if save is parts else tmp_path / "ckpt", got, no_dist=True)
    assert torch.equal(got["weight"], full(5))


def save_over_overlapping_groups(directory: Path) -> None:
    """Saves over several groups. Rank 1 is in more groups than the others."""
    rank = dist.get_rank()
    groups = {"a": dist.new_group([0, 1]), "b": dist.new_group([1, 2])}
    mine = {name: group for name, group in groups.items() if dist.get_rank(group) >= 0}
    for number in range(2):
        for name, group in mine.items():
            path, state = directory / name, {f"of {rank}": torch.full((4,), float(number))}
            save_state_dict(path, state, process_group=group)
            async_save_state_dict(path, state, process_group=group).committed.result(LIMIT_S)
            got = {f"of {rank}": torch.zeros(4)}
            load_state_dict(path, got, process_group=group)
            assert torch.equal(got[f"of {rank}"], state[f"of {rank}"])
            model = torch.nn.Linear(2, 2)
            bytecheckpoint.save(directory / f"{name}-parts", {"model": model}, "ddp", process_group=group)
    # torch names a group by the number of groups that a rank has made. Our own groups do not count.
    everybody = dist.new_group()
    dist.barrier(everybody)
    pair = dist.new_group([0, 2], use_local_synchronization=True) if rank != 1 else None
    if pair is not None:
        dist.barrier(pair)
    dist.barrier()


def test_ranks_of_different_numbers_of_groups(tmp_path: Path) -> None:
    run_ranks(3, save_over_overlapping_groups, tmp_path)


def save_over_a_group_made_anew(directory: Path) -> None:
    """Saves over a new group three times. torch gives it the name of the destroyed one."""
    for number in range(3):
        group = dist.new_group([0, 1])
        save_state_dict(directory, {"weight": sharded(number)}, process_group=group)
        dist.destroy_process_group(group)


def test_a_group_that_is_made_anew(tmp_path: Path) -> None:
    run_ranks(2, save_over_a_group_made_anew, tmp_path)


def test_who_calls_alone_is_not_counted() -> None:
    assert next_turn(None, True, "calls") is None
    assert next_turn(None, False, "calls") is None  # there is no group
    assert next_turn(-100, False, "calls") is None  # type: ignore[arg-type]  # torch's number of no member


def test_the_message_names_ranks_and_calls() -> None:
    check_in_step("save", "/there", {0: 3, 1: 3})
    with pytest.raises(
        OutOfStepError, match=r"save\(/there\): .*rank 0 is at its call 4, rank 1 is at its call 3"
    ) as caught:
        check_in_step("save", "/there", {0: 4, 1: 3})
    assert caught.value.calls == {0: 4, 1: 3}
