# SPDX-License-Identifier: Apache-2.0
"""A job in a control group with less memory than its states need: no process is killed, and the disk has each of them.

The holder is in the group, too. What it has of states that are committed stays.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

LIMIT_BYTES = 1_200 << 20
PLACES = {Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes", Path("/sys/fs/cgroup"): "memory.max"}

JOB = """
    import json, os, sys, warnings
    from pathlib import Path
    group, run = Path(sys.argv[1]), sys.argv[2]
    (group / "cgroup.procs").write_text(str(os.getpid()))
    import logging, torch, bytecheckpoint
    from bytecheckpoint import MemoryTier, Tiers
    tiers = Tiers(memory=MemoryTier(keep=1, linger_s=0.0), near=run)
    said = []
    logging.getLogger("bytecheckpoint").addFilter(lambda record: said.append(record.getMessage()) or True)
    for step, num_bytes in ((1, 100 << 20), (2, 100 << 20), (3, 450 << 20), (4, 100 << 20)):
        state = {"w": torch.full((num_bytes // 4,), float(step))}
        report = bytecheckpoint.save_state_dict(tiers / f"step-{step}", state, no_dist=True)
        said.append(f"{report.tier} {report.memory_s > 0}")
        del state
    into = {"w": torch.zeros((100 << 20) // 4)}
    said.append(bytecheckpoint.resume(tiers, into, no_dist=True).path)
    assert into["w"].eq(4).all()
    print(json.dumps(said))
    bytecheckpoint.shutdown()
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """Returns a control group with a limit."""
    for place, name in PLACES.items():
        made = place / f"bcp_test_{os.getpid()}"
        with suppress(OSError):
            made.mkdir()
            (made / name).write_text(str(LIMIT_BYTES))
            break
        with suppress(OSError):
            made.rmdir()
    else:
        pytest.skip("THE LIMIT OF A CONTROL GROUP IS NOT TESTED: none can be made")
    yield made
    end = time.monotonic() + 20
    while (made / "cgroup.procs").read_text().split() and time.monotonic() < end:
        time.sleep(0.05)
    made.rmdir()


def test_states_that_do_not_fit_are_on_the_disk(group: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(JOB), str(group), str(tmp_path / "run")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout.splitlines()[-1])
    assert [text for text in said if text.startswith("near ")] == ["near True"] * 2 + ["near False", "near True"]
    (warning,) = (text for text in said if "is not in memory" in text)
    assert "step-3" in warning
    assert "bytes are needed" in warning
    assert "are available" in warning
    path = said[-1]
    assert path.startswith("held://")
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == [f"step-{step}" for step in (1, 2, 3, 4)]
