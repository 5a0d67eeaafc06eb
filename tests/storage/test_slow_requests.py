# SPDX-License-Identifier: Apache-2.0
"""Tests that a request which takes far longer than others does not hold up a load."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from support.store_proxy import Fault, Request
from support.store_trials import Store

from bytecheckpoint import load_state_dict, save_state_dict


def test_it_is_made_a_second_time(store: Store) -> None:
    url = store.url()
    value = torch.arange(16_000_000, dtype=torch.float32)  # eight parts
    save_state_dict(url, {"w": value}, config=store.config)
    slow: list[str] = []

    def rule(request: Request) -> Fault | None:
        wanted = request.headers.get("range", "")
        if slow or not wanted.startswith("bytes=16777216-"):
            return None
        slow.append(wanted)
        return Fault(delay_s=5.0)

    with store.proxied(rule) as (proxy, config):
        found = {"w": torch.zeros(16_000_000)}
        load_state_dict(url, found, config=replace(config, io_timeout_s=30.0))
        asked = Counter(request.headers.get("range", "") for request in proxy.requests)
    assert torch.equal(found["w"], value)
    assert [wanted for wanted, times in asked.items() if times == 2 and wanted.startswith("bytes=1")] == slow
