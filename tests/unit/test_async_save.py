# SPDX-License-Identifier: Apache-2.0
"""Tests ``dcp.async_save`` with a writer that stages: two saves in flight, and states that change after staging."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from bytecheckpoint import BcpReader, BcpWriter


def test_two_saves_in_flight_on_one_writer(tmp_path: Path) -> None:
    writer = BcpWriter(tmp_path / "unused")
    states = [{"t": torch.full((200_000,), float(step))} for step in range(3)]
    futures = [
        dcp.async_save(state, storage_writer=writer, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
        for step, state in enumerate(states)
    ]
    for future in futures:
        future.result()
    for step, wanted in enumerate(states):
        got = {"t": torch.zeros(200_000)}
        dcp.load(got, storage_reader=BcpReader(tmp_path / f"step-{step}"))
        assert torch.equal(got["t"], wanted["t"])
    assert not (tmp_path / "unused").exists()


def test_state_may_change_once_it_is_staged(tmp_path: Path) -> None:
    state = {"t": torch.ones(1_000_000)}
    future = dcp.async_save(state, storage_writer=BcpWriter(tmp_path), no_dist=True)
    state["t"].zero_()
    future.result()
    got = {"t": torch.zeros(1_000_000)}
    dcp.load(got, storage_reader=BcpReader(tmp_path))
    assert torch.equal(got["t"], torch.ones(1_000_000))
