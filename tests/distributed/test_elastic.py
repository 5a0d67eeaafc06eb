# SPDX-License-Identifier: Apache-2.0
"""A job under ``torchrun --max-restarts`` resumes each time a rank has died in the middle of a background save."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bytecheckpoint import latest, load_state_dict

LIMIT_S = 150

SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import bytecheckpoint
from bytecheckpoint.dcp.writer import BcpWriter

run, last = Path(sys.argv[1]), int(sys.argv[2])
rank, size, attempt = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
# Over the store of torchrun, gloo would meet the addresses of the attempt before.
dist.init_process_group("gloo", init_method=f"file://{run}.{attempt}", rank=rank, world_size=size)
mesh = init_device_mesh("cpu", (size,))
weight = distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)])
state = {"weight": weight, "step": 0}
newest = bytecheckpoint.latest(run)
if newest is not None:
    bytecheckpoint.load_state_dict(newest, state)
    assert torch.equal(state["weight"].full_tensor(), torch.full((8, 4), float(state["step"])))
if rank == 0:
    print(f"attempt {attempt} begins behind step {state['step']}", flush=True)

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

handle = None
while state["step"] < last:
    state["step"] += 1
    weight.to_local().fill_(state["step"])
    if handle is not None:
        handle.committed.result()
    if attempt < 2 and rank == 1 and state["step"] == 2 * attempt + 2:
        BcpWriter.write_data = die  # in the middle of this save, on one rank
    handle = bytecheckpoint.async_save_state_dict(run / f"step-{state['step']}", state)
dist.destroy_process_group()
"""


@pytest.mark.timeout(2 * LIMIT_S)
def test_a_job_that_is_restarted_goes_on_behind_its_last_whole_step(tmp_path: Path) -> None:
    script, run, last = tmp_path / "job.py", tmp_path / "run", 6
    script.write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    job = subprocess.run(
        [*launch, str(script), str(run), str(last)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert job.returncode == 0, job.stdout + job.stderr
    said = [line for line in job.stdout.splitlines() if line.startswith("attempt")]
    # The save before the one in which the rank died was waited for. The one in which it died was not committed.
    wanted = [f"attempt {attempt} begins behind step {step}" for attempt, step in enumerate((0, 1, 3))]
    assert said == wanted, job.stdout + job.stderr
    assert latest(run) == str(run / f"step-{last}")
    got = {"weight": torch.zeros(8, 4), "step": 0}
    load_state_dict(run / f"step-{last}", got, no_dist=True)
    assert got["step"] == last
    assert torch.equal(got["weight"], torch.full((8, 4), float(last)))
