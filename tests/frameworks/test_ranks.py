# SPDX-License-Identifier: Apache-2.0
"""``bytecheckpoint.save`` and ``load`` on several ranks: all ranks raise one rank's failure, and nothing is changed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.equality import assert_equal
from support.ranks import run_ranks
from torch import nn

from bytecheckpoint import Config, find_latest_ckpt_path, load, save, shutdown
from bytecheckpoint.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    InvalidPlanError,
    KeyMismatchError,
    RankLostError,
    StorageError,
)
from bytecheckpoint.training_state import saving
from bytecheckpoint.training_state.tracker import TRACKER
from frameworks.holding import Gate
from frameworks.small_nets import fingerprint
from frameworks.wrapped import FRAMEWORK_OF, optimizer_of, train, wrap

LIMIT_S = 60.0
KINDS = ("ddp", "fsdp orig", "fsdp flat", "fsdp2", "tp")


def is_first() -> bool:
    return dist.get_rank() == 0


def state_of(kind: str = "fsdp2", steps: int = 1, seed: int = 0) -> dict[str, Any]:
    model = wrap(kind, seed)
    optimizer = optimizer_of(model)
    train(model, optimizer, steps)
    return {"model": model, "optimizer": optimizer, "extra_state": {"rank": dist.get_rank()}}


def locals_of(state: dict[str, Any]) -> dict[str, Any]:
    """Returns ``fingerprint`` with the local parts of DTensors."""

    def local(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: local(of_key) for key, of_key in value.items()}
        if isinstance(value, (list, tuple)):
            return [local(each) for each in value]
        return value.to_local() if hasattr(value, "to_local") else value

    found: dict[str, Any] = local(fingerprint(state))
    return found


def save_without_a_trace(path: Path) -> None:
    for kind in KINDS:
        for decompose in (True, False) if kind.startswith("fsdp ") else (True,):
            for steps in (0, 2):
                state = state_of(kind, steps)
                state["model"].eval()
                before = locals_of(state)
                assert before["states"] == [0] or steps
                for fast in (False, True):
                    save(
                        path / kind,
                        state,
                        FRAMEWORK_OF[kind],
                        fast,
                        save_decomposed_model_optimizer=decompose,
                    ).committed.result(LIMIT_S)
                    assert_equal(locals_of(state), before)
        # A load does not take an optimizer step to create state either, and training continues as it would have.
        again = state_of(kind, 0, seed=3)
        again["optimizer"].register_step_pre_hook(lambda *_: pytest.fail("it has made a step"))
        hook = again["optimizer"]._optimizer_step_pre_hooks
        load(path / kind, again, FRAMEWORK_OF[kind])
        hook.clear()
        for each in (state, again):
            each["model"].train()
        assert train(state["model"], state["optimizer"], 2, 7) == train(again["model"], again["optimizer"], 2, 7)
    shutdown(LIMIT_S)


def test_saving_changes_nothing_under_any_framework(tmp_path: Path) -> None:
    run_ranks(2, save_without_a_trace, tmp_path, limit_s=180)


def change_after_the_call(path: Path) -> None:
    monkeypatch = pytest.MonkeyPatch()
    for kind in ("ddp", "fsdp orig", "fsdp2"):
        state = state_of(kind)
        before = locals_of(state)
        gate = Gate(monkeypatch, "extra_state")
        handle = save(path / kind, state, FRAMEWORK_OF[kind], fast_saving=True, global_steps=1)
        assert gate.arrived.wait(LIMIT_S)
        assert not handle.committed.done()
        train(state["model"], state["optimizer"], 2)  # uses the same process group while the save is stopped
        gate.open(monkeypatch)
        path_of_step = handle.committed.result(LIMIT_S).path
        other = state_of(kind, 1, seed=5)
        load(path_of_step, other, FRAMEWORK_OF[kind])
        after = locals_of(other)
        for what in ("parameters", "optimizers"):
            assert_equal(after[what], before[what])
        assert other["extra_state"] == {"rank": dist.get_rank()}
    shutdown(LIMIT_S)


def test_a_background_save_is_of_the_state_at_the_call(tmp_path: Path) -> None:
    run_ranks(2, change_after_the_call, tmp_path, limit_s=180)


# Failures.


def expect(error: type[Exception], text: str, call: Callable[[], Any]) -> Exception:
    with pytest.raises(error) as raised:
        call()
    said = str(raised.value) + "".join(getattr(raised.value, "__notes__", []))
    assert text in said, said
    return raised.value


def fail_on_one_rank(path: Path) -> None:
    """Both ranks raise an error of rank 1 alone, for both kinds of saves. Saves work afterwards."""
    good = state_of()
    on_one: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"framework": "megatron"}, ConfigError, "megatron"),
        ({"checkpoint_state": {"model": {}}}, ConfigError, "the live module"),
        (
            {"checkpoint_state": {"model": good["model"], "extra_state": good["extra_state"]}},
            ConfigError,
            "same on all",
        ),
        ({"checkpoint_state": {"model": good["model"], "optimizer": good["optimizer"]}}, ConfigError, "same on all"),
        ({"checkpoint_state": {**good, "extra_state": {"rank_1.a": 1}}}, InvalidPlanError, "rank_1.a"),
        (
            {"checkpoint_state": {**good, "extra_state": {"queue": 1}}, "policy": 1},
            InvalidPlanError,
            "at least one dim",
        ),
        ({"global_steps": 2}, ConfigError, "global_steps is 1 on rank 0, and 2 on rank 1"),
        ({"global_steps": -2}, ConfigError, "must be an int >= 0"),
        ({"extra_state_policy": "replicated"}, ConfigError, "extra_state_policy"),
        ({"overwrite": False}, ConfigError, "overwrite"),
        ({"callback": 3}, ConfigError, "without arguments"),
        ({"ckpt_path": path / "other"}, ConfigError, "the path is"),
    ]
    for fast in (False, True):
        for given, error, text in on_one:
            given = dict(given)
            policy: Any = {"queue": "sharded"} if given.pop("policy", 0) else "own"
            arguments = {
                "ckpt_path": path,
                "checkpoint_state": good,
                "framework": "fsdp2",
                "global_steps": 1,
                "extra_state_policy": policy,
                **({} if is_first() else given),
            }
            expect(error, text, lambda: save(fast_saving=fast, **arguments).committed.result(LIMIT_S))  # noqa: B023
            dist.barrier()
            # The rank that failed in the call has told the others, so shutdown() need not report the error again.
            shutdown(LIMIT_S)
            assert not list(path.rglob(".metadata"))
            assert find_latest_ckpt_path(path) is None
            dist.barrier()
    save(path, good, "fsdp2", global_steps=1)
    dist.barrier()

    step = path / "global_step_1"
    for given, load_error, text in (
        ({"framework": "ddp"}, ConfigError, "pass framework='fsdp2'"),
        ({"ckpt_path": path / "nowhere"}, CheckpointNotFoundError, "nowhere"),
        ({"checkpoint_state": {"model": good["model"]}}, ConfigError, "the list of parts to load"),
        ({"strict": False}, ConfigError, "strict is True on rank 0"),
        ({"checkpoint_state": {**good, "model": nn.Linear(2, 2)}}, CheckpointError, "model"),
    ):
        arguments = {"ckpt_path": step, "checkpoint_state": good, "framework": "fsdp2", **({} if is_first() else given)}
        expect(load_error, text, lambda: load(**arguments))  # type: ignore[arg-type]  # noqa: B023
    load(step, good, "fsdp2")


def test_what_is_wrong_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    run_ranks(2, fail_on_one_rank, tmp_path, limit_s=180)


def fail_before_fsdp_gathers(path: Path) -> None:
    """All ranks together make FSDP's own state dict, so no rank may skip it."""
    state = state_of("fsdp orig")
    for fast in (False, True):
        framework = "fsdp" if is_first() else "fsdp2"
        expect(
            ConfigError,
            "pass framework='fsdp'",
            lambda: save(path, state, framework, fast, save_decomposed_model_optimizer=False).committed.result(LIMIT_S),  # noqa: B023
        )
        dist.barrier()
        shutdown(LIMIT_S)
    save("/proc/nowhere", state, "fsdp", True)
    # Rank 0 looks at its failed save and rank 1 does not, so the next save raises rank 1's failure on both.
    if is_first():
        saving._background.wait_for_saves(LIMIT_S)
        for noted in saving._background._saves.get().noted:
            noted.future.exception(LIMIT_S)
    expect(
        CheckpointError,
        "its result was not read",
        lambda: save(path, state, "fsdp", save_decomposed_model_optimizer=False),
    )
    dist.barrier()
    save(path, state, "fsdp", save_decomposed_model_optimizer=False)
    load(path, state, "fsdp", load_decomposed_model_optimizer=False)


def test_no_rank_is_left_in_a_gather_of_fsdp(tmp_path: Path) -> None:
    run_ranks(2, fail_before_fsdp_gathers, tmp_path, limit_s=120)


def fail_between_parts(path: Path) -> None:
    state = state_of("ddp")
    monkeypatch = pytest.MonkeyPatch()
    save(path, state, "ddp", global_steps=1)
    save(path, state, "ddp", global_steps=2)
    for victim in (0, 1):
        for fast in (False, True):
            with monkeypatch.context() as patch:
                if dist.get_rank() == victim:
                    Gate(patch, "model", OSError(5, "broken"))
                expect(CheckpointError, "broken", lambda: save(path, state, "ddp", fast, 2).committed.result(LIMIT_S))  # noqa: B023
            dist.barrier()
            expect(CheckpointChangedError, "different saves", lambda: load(path / "global_step_2", state, "ddp"))
            with pytest.warns(RuntimeWarning, match="names step '2'"):
                assert find_latest_ckpt_path(path) == str(path / "global_step_1")
            dist.barrier()
    # The write of the tracker fails after all parts.
    with monkeypatch.context() as patch:

        def refuse(root: Path, step: int) -> None:
            raise StorageError(f"write({root}): no space", str(root), 28)

        patch.setattr(saving, "write_tracker", refuse)
        expect(StorageError, "no space", lambda: save(path, state, "ddp", global_steps=3))
    assert (path / TRACKER).read_text() == "2"
    load(path / "global_step_3", state, "ddp")
    dist.barrier()
    save(path, state, "ddp", global_steps=2)
    load(find_latest_ckpt_path(path) or "", state, "ddp")
    expect(StorageError, "mkdir", lambda: save("/proc/nowhere", state, "ddp"))
    expect(KeyMismatchError, "strict=False", lambda: load(path / "global_step_2", {"model": nn.Linear(2, 2)}, "ddp"))


def test_failures_between_parts(tmp_path: Path) -> None:
    run_ranks(2, fail_between_parts, tmp_path, limit_s=120)


def die(path: Path, where: str, victim: int) -> None:
    """Kills a rank at a point where ranks wait for one another, also outside of DCP."""
    state = state_of("ddp")
    config = Config(stall_timeout_s=5)
    save(path, state, "ddp", global_steps=1, config=config)
    load(path / "global_step_1", state, "ddp", config=config)
    dist.barrier()

    def dying(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == victim:
        monkeypatch = pytest.MonkeyPatch()
        if where == "tracker":
            monkeypatch.setattr(saving, "write_tracker", dying)
        elif where == "model":
            monkeypatch.setattr(saving._Saving, "commit", dying_at_model(saving._Saving.commit, dying))
        elif where == "begin":
            monkeypatch.setattr(saving, "agree", dying)
    with pytest.raises(RankLostError):
        save(path, state, "ddp", global_steps=2, config=config)
    assert (path / TRACKER).read_text() == "1"
    assert find_latest_ckpt_path(path) == str(path / "global_step_1")


def dying_at_model(commit: Callable[..., Any], dying: Callable[[], Any]) -> Callable[..., Any]:
    def commit_until_model(self: Any, values: Any) -> Any:
        self._writers["model"].prepare_local_plan = dying
        return commit(self, values)

    return commit_until_model


@pytest.mark.parametrize(("where", "victim"), [("begin", 1), ("model", 0), ("tracker", 0)])
def test_a_rank_that_dies(tmp_path: Path, where: str, victim: int) -> None:
    run_ranks(2, die, tmp_path, where, victim, limit_s=90, may_die=victim)


def call_back(path: Path) -> list[str]:
    called: list[str] = []
    state = state_of("fsdp2")
    for step, fast in ((1, False), (2, True)):
        save(
            path, state, "fsdp2", fast, step, lambda: called.append(find_latest_ckpt_path(path) or "")
        ).committed.result(60)
        dist.barrier()
    shutdown(LIMIT_S)
    return called


def test_the_callback_is_called_once_on_rank_0(tmp_path: Path) -> None:
    assert run_ranks(3, call_back, tmp_path, limit_s=90) == [
        [str(tmp_path / "global_step_1"), str(tmp_path / "global_step_2")],
        [],
        [],
    ]


def save_under_each_and_load_under_all(path: Path) -> None:
    """Saves steps 100 and 200 in the background, finds the newest, and loads it under every framework."""
    for kind in ("ddp", "fsdp orig", "fsdp2"):
        state = state_of(kind)
        root = path / kind
        first = save(root, state, FRAMEWORK_OF[kind], fast_saving=True, global_steps=100)
        train(state["model"], state["optimizer"], 1)
        second = save(root, state, FRAMEWORK_OF[kind], fast_saving=True, global_steps=200)
        first.committed.result(LIMIT_S)
        second.committed.result(LIMIT_S)
        dist.barrier()
        latest = find_latest_ckpt_path(root)
        assert latest == str(root / "global_step_200")
        losses = train(state["model"], state["optimizer"], 2, seed=4)
        for other_kind in ("ddp", "fsdp orig", "fsdp2", "tp"):
            other = state_of(other_kind, 1, seed=2)
            load(latest, other, FRAMEWORK_OF[other_kind])
            assert torch.allclose(
                torch.tensor(train(other["model"], other["optimizer"], 2, seed=4)), torch.tensor(losses)
            ), "sums of other orders; what is loaded is compared bit by bit in test_matrix.py"
        caches = []
        for _ in range(3):
            report = save(root, state, FRAMEWORK_OF[kind], global_steps=300).report
            assert report is not None
            caches.append({part.plan.cache for part in report.parts.values()})
        assert caches[2] == {"hit"}
        dist.barrier()
    shutdown(LIMIT_S)


def test_steps_in_the_background_then_the_newest_under_every_framework(tmp_path: Path) -> None:
    run_ranks(2, save_under_each_and_load_under_all, tmp_path, limit_s=180)
