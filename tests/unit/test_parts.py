# SPDX-License-Identifier: Apache-2.0
"""Tests what the parts of a step say of their save. It may be anything, because checksums are no signatures."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_runs import run
from torch import nn

import bytecheckpoint
from bytecheckpoint import BcpReader, BcpWriter, find_latest_ckpt_path, latest, scan_steps
from bytecheckpoint.dcp.direct_calls import run_save
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, UnsupportedError


@contextmanager
def any_number() -> Iterator[None]:
    """Allows numbers of any length, so that a test can write what a save of ours would not."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


def save_with(root: Path, text: str, step: int = 5) -> Path:
    """Saves a step whose model has ``text`` as its user_metadata, and returns its folder."""
    folder = root / f"global_step_{step}"
    writer = BcpWriter(folder / "model")
    writer.user_metadata = text
    run_save({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, writer, None, None, None)
    return folder


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


HUGE = "9" * 5000
ODD: dict[str, tuple[type[CheckpointError], str]] = {
    "a number": (UnsupportedError, HUGE),
    "a number in the description": (UnsupportedError, f'{{"bytecheckpoint": {{"global_step": {HUGE}}}}}'),
    "brackets": (UnsupportedError, nested(100_000)),
    "no JSON": (CorruptCheckpointError, "{"),
    **{
        f"{name}={value!r}": (CorruptCheckpointError, json.dumps({"bytecheckpoint": {name: value}}))
        for name, value in {
            "save": ["a"],
            "parts": 5,
            "world_size": "2",
            "extra_state_policy": 7,
            "tied": [[1]],
            "global_step": "five",
        }.items()
    },
}


@pytest.mark.filterwarnings("ignore:find_latest_ckpt_path")
@pytest.mark.parametrize("case", ODD)
def test_odd_descriptions_are_typed_errors_or_passed_over(tmp_path: Path, case: str) -> None:
    error, text = ODD[case]
    model: dict[str, Any] = {"model": nn.Linear(3, 2)}
    bytecheckpoint.save(tmp_path, model, "ddp", global_steps=4)
    good = str(tmp_path / "global_step_4")
    step = save_with(tmp_path, text)
    with pytest.raises(error):
        bytecheckpoint.load(step, model, "ddp")
    with pytest.warns(RuntimeWarning, match=r"the tracker names it, but global_step_5 has a higher number"):
        assert latest(tmp_path) == good
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.warns(RuntimeWarning, match=r"names step '5', which is not whole"):
        assert find_latest_ckpt_path(tmp_path) == good
    assert [folder.state for folder in scan_steps(tmp_path)] == ["complete", "unknown"]
    assert bytecheckpoint.Retention(tmp_path, keep_latest=1, grace_s=0).prune().removed == []
    assert run("steps", str(tmp_path)).exit_code == 1
    with pytest.raises(CheckpointNotFoundError, match="has the steps 4, 5"):
        bytecheckpoint.load(tmp_path, model, "ddp")
    with pytest.raises(CheckpointNotFoundError, match="a run folder with the steps 4, 5"):
        bytecheckpoint.load_state_dict(tmp_path, {}, no_dist=True)
    if error is UnsupportedError or case == "no JSON":
        with pytest.raises(error, match="user_metadata"):
            _ = BcpReader(step / "model").user_metadata
    with pytest.raises(error):
        bytecheckpoint.bytecheckpoint_ckpt_to_pytorch_ckpt(step, return_dict=True)


ODD_SAVES = {
    "surrogates in names of parts": {"parts": ["model", "\ud800"]},
    "long names of parts": {"parts": ["model", "x" * 1_000_000]},
    "surrogates in the id": {"save": "\ud800", "parts": ["model", "optimizer"]},
    "deep": {"parts": ["model", "optimizer"], "save": "a", "more": json.loads(nested(900))},
}


@pytest.mark.parametrize("case", ODD_SAVES)
def test_reasons_are_text_of_some_length(tmp_path: Path, case: str) -> None:
    """Reasons go into logs, and are printed."""
    step = save_with(tmp_path, json.dumps({"bytecheckpoint": ODD_SAVES[case]}))
    writer = BcpWriter(step / "optimizer", user_metadata={"bytecheckpoint": {"save": "b", "global_step": 10**4000}})
    run_save({"weight": torch.ones(1)}, writer, None, None, None)
    (folder,) = scan_steps(tmp_path)
    assert folder.state == "half"
    assert len(folder.reason.encode()) < 500


def test_descriptions_that_are_none_are_those_of_others(tmp_path: Path) -> None:
    """Whatever JSON the user_metadata is, nothing raises."""
    odd: list[Any] = [5, True, None, [], {}, "x", "\ud800", 1.5, [1], [["a"]], {"a": 1}, [None]]
    texts = ["NaN", "-Infinity", '{"a": 1, "a": 2}', *(json.dumps(value) for value in odd)]
    texts += [json.dumps({"bytecheckpoint": value}) for value in odd if not isinstance(value, dict)]
    for number, text in enumerate(texts):
        save_with(tmp_path, text, number)
    assert {folder.state for folder in scan_steps(tmp_path)} == {"complete"}
    assert latest(tmp_path) == str(tmp_path / f"global_step_{len(texts) - 1}")


def test_a_tracker_with_a_number_of_any_length(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path, {"model": nn.Linear(3, 2)}, "ddp", global_steps=4)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    for text in ("9" * 30, "9" * 4000):
        tracker.write_text(text)
        with pytest.warns(RuntimeWarning, match="which is not whole"):
            assert find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_4")
    tracker.write_text("9" * 5000)
    for find in (find_latest_ckpt_path, latest):
        with pytest.warns(RuntimeWarning, match="the tracker cannot be read.* more than 4096 bytes"):
            assert find(tmp_path) == str(tmp_path / "global_step_4")


def test_steps_and_paths_of_any_length(tmp_path: Path) -> None:
    model = {"model": nn.Linear(3, 2)}
    with any_number():
        for step in (10**18, 10**5000):
            with pytest.raises(CheckpointError, match="at most 18 digits"):
                bytecheckpoint.save(tmp_path, model, "ddp", global_steps=step)
    for digits in (300, 5000):
        path = tmp_path / f"global_step_{'9' * digits}"
        for call in (lambda path: bytecheckpoint.load(path, model, "ddp"), latest, find_latest_ckpt_path, scan_steps):
            with pytest.raises(CheckpointError):
                call(path)
        for command in ("ls", "verify", "steps"):
            assert run(command, str(path)).exit_code == 2
    assert list(tmp_path.iterdir()) == []
