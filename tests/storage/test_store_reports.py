# SPDX-License-Identifier: Apache-2.0
"""Tests what a save and a load cost: requests, as a proxy before a real server counts them, and memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.peak_memory import with_peak
from support.ranks import run_ranks
from support.store_trials import Store

from bytecheckpoint import (
    BcpLoadPlanner,
    BcpReader,
    BcpSavePlanner,
    BcpWriter,
    Config,
    load_state_dict,
    save_state_dict,
)

NUMEL = 5_000_000  # 20 MB: three parts


@pytest.mark.parametrize("numel", [100, NUMEL])
def test_as_many_as_arrive(store: Store, numel: int) -> None:
    url = store.url()
    with store.proxied() as (proxy, config):
        save_state_dict(url, {"w": torch.zeros(1)}, config=config)  # asks whether the bucket obeys conditions
        for is_first in (True, False):
            before = len(proxy.requests)
            path = f"{url}/step"
            saved = save_state_dict(path, {"w": torch.ones(numel)}, config=config)
            assert saved.total_requests == saved.num_requests == len(proxy.requests) - before
            assert saved.trace is not None
            assert 0 < saved.trace.summary["phases"]["request"][0] <= saved.num_requests
            assert f"{saved.total_requests} requests" in saved.summary()
            assert (saved.files_swept == 0) == is_first
        before = len(proxy.requests)
        reader = BcpReader(path, config=config)
        found = {"w": torch.zeros(numel)}
        dcp.load(found, storage_reader=reader, planner=BcpLoadPlanner(), no_dist=True)
        assert reader.last_report is not None
        assert reader.last_report.total_requests == len(proxy.requests) - before
        assert f"{reader.last_report.total_requests} requests" in reader.last_report.summary()
        assert found["w"].sum() == numel


def requests_of_all(url: str, options: dict[str, Any]) -> tuple[int, int]:
    config = Config(storage_options=options)
    state = {f"w{i}": torch.full((3_000_000,), float(i)) for i in range(4)}
    writer = BcpWriter(url, config=config)
    dcp.save(state, storage_writer=writer, planner=BcpSavePlanner())
    reader = BcpReader(url, config=config)
    dcp.load(state, storage_reader=reader, planner=BcpLoadPlanner())
    assert writer.last_report is not None
    assert reader.last_report is not None
    return writer.last_report.total_requests, reader.last_report.total_requests


def test_of_all_ranks(store: Store) -> None:
    url = store.url()
    with store.proxied() as (proxy, config):
        of_save, of_load = run_ranks(2, requests_of_all, url, dict(config.storage_options or {}))[0]
        assert of_save + of_load == len(proxy.requests)


def test_memory_does_not_grow_with_the_checkpoint(store: Store) -> None:
    """It is the ring, and what obstore has received and the engine has not copied yet."""
    config = replace(store.config, store_concurrency=4)
    ring_bytes = (4 + 2) * (8 << 20)
    values = {f"w{i}": torch.full((2_500_000,), float(i)) for i in range(24)}  # 240 MB
    save_state_dict(store.url(), {"w": values["w1"]}, config=config)  # what the first save of a process needs
    url = store.url()
    _, bytes_of_save = with_peak(lambda: save_state_dict(url, values, config=config))
    assert bytes_of_save < ring_bytes + (32 << 20)
    found = {name: torch.zeros(2_500_000).fill_(-1.0) for name in values}
    _, bytes_of_load = with_peak(lambda: load_state_dict(url, found, config=config))
    assert bytes_of_load < 2 * ring_bytes + (32 << 20)
    assert all(torch.equal(found[name], values[name]) for name in values)


def test_a_directory_has_none(tmp_path_factory: pytest.TempPathFactory) -> None:
    saved = save_state_dict(tmp_path_factory.mktemp("step"), {"w": torch.zeros(3)})
    assert saved.total_requests == 0
    assert "requests" not in saved.summary()
