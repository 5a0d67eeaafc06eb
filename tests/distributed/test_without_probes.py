# SPDX-License-Identifier: Apache-2.0
"""If a probe of torch fails, ranks use DCP's own gather, or all of them raise the same error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks

from bytecheckpoint.errors import UnsupportedError
from bytecheckpoint.probes import probe
from bytecheckpoint.probes.of_torch import EXCHANGE, GROUPS, READING_TOGETHER
from bytecheckpoint.probes.probe import Feature, Probe

FAULT = "it is gone in this test"


def _lose(feature: Feature) -> str:
    """Makes the first probe of ``feature`` fail, and returns its path. Call it before anything has been probed."""
    lost, fault = feature.probes[0].path, Probe.fault
    Probe.fault = lambda self: FAULT if self.path == lost else fault(self)  # type: ignore[method-assign]
    probe._known_faults.cache_clear()
    return lost


def _save_and_load(folder: str, feature: Feature) -> tuple[bool, bool]:
    _lose(feature)
    import bytecheckpoint
    from bytecheckpoint.distributed import channel as _peers
    from bytecheckpoint.sharing import exchange as _exchange

    channels: list[Any] = []
    connect = _peers.Peers.connect
    _peers.Peers.connect = lambda self: channels.append(self) or connect(self)  # type: ignore[assignment,func-returns-value,method-assign]
    agreed: list[Any] = []
    agree = _exchange.Exchange.agree
    _exchange.Exchange.agree = lambda self, *rest: agreed.append(self) or agree(self, *rest)  # type: ignore[assignment,func-returns-value,method-assign]

    rank = dist.get_rank()
    state = {"both": torch.arange(1000.0), f"of_{rank}": torch.full((10,), float(rank)), "step": 3}
    config = bytecheckpoint.Config(shared_reading="cooperative", tree_topo_threshold=2)
    planner = bytecheckpoint.BcpSavePlanner(config=config)
    dcp.save(state, storage_writer=bytecheckpoint.BcpWriter(folder, config=config), planner=planner)
    loaded: dict[str, Any] = {"both": torch.zeros(1000), f"of_{rank}": torch.zeros(10), "step": 0}
    reader = bytecheckpoint.BcpReader(folder, config=config)
    dcp.load(loaded, storage_reader=reader, planner=bytecheckpoint.BcpLoadPlanner())
    assert all(torch.equal(value, loaded[key]) for key, value in state.items() if isinstance(value, torch.Tensor))
    assert loaded["step"] == 3
    return bool(channels), bool(agreed)


NOTHING = Feature("nothing", "", (Probe("no_module:at_all", ""),))


@pytest.mark.parametrize(
    ("lost", "has_channels", "reads_together"),
    [
        (NOTHING, True, True),
        (EXCHANGE, False, False),
        (GROUPS, False, False),
        (READING_TOGETHER, False, False),
    ],
    ids=lambda value: value.name.partition(" ")[0] if isinstance(value, Feature) else None,
)
def test_dcp_goes_on_with_its_own_gather(
    tmp_path: Path, lost: Feature, has_channels: bool, reads_together: bool
) -> None:
    said = run_ranks(2, _by_name, str(tmp_path), lost.name, limit_s=100)
    assert said == [(has_channels, reads_together)] * 2


def _by_name(folder: str, name: str) -> tuple[bool, bool]:
    features = {feature.name: feature for feature in (NOTHING, EXCHANGE, GROUPS, READING_TOGETHER)}
    return _save_and_load(folder, features[name])


def _entry_point(folder: str) -> list[str]:
    lost = _lose(GROUPS)
    import bytecheckpoint

    found = []
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=f"probe {lost}: {FAULT}") as refused:
            bytecheckpoint.save_state_dict(folder, {"w": torch.ones(3)})
        found.append(str(refused.value))
    dist.barrier()
    return found


def test_an_entry_point_is_refused_on_all_ranks(tmp_path: Path) -> None:
    said = run_ranks(2, _entry_point, str(tmp_path / "ck"), limit_s=100)
    assert said[0] == said[1]
    assert not (tmp_path / "ck").exists()
