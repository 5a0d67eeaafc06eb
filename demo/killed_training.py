# SPDX-License-Identifier: Apache-2.0
"""Ranks train with FSDP2 on CPU, and save each step to memory. All of them are killed, and go on where they were.

The first job runs undisturbed. The second one is killed by SIGKILL, its launcher, too, and started again twice: once
with what is in memory, and once without, from the disk, to which every fifth save goes. All three compute the same
losses. The seconds count from the first line behind the imports to the end of the load.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import bytecheckpoint
from bytecheckpoint import MemoryTier, Tiers
from bytecheckpoint.storage.memory.connection import stop_holder

NUM_STEPS, KILLED_AT, NEAR_EVERY, WIDTH = 20, 13, 5, 512


def places(folder: Path) -> Tiers:
    return Tiers(memory=MemoryTier(), near=folder / "run", near_every=NEAR_EVERY)


def train(folder: Path, tiers: Tiers) -> None:
    """One rank. Rank 0 writes a line for each step."""
    begun = time.perf_counter()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    resumed = bytecheckpoint.resume(tiers, state)
    if resumed is not None:
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    first = 0 if resumed is None else resumed.step
    log = folder / "losses.jsonl"
    if dist.get_rank() == 0 and resumed is not None:
        print(f"  resumed from {resumed.path} in {time.perf_counter() - begun:.2f} s", flush=True)
    for step in range(first + 1, NUM_STEPS + 1):
        torch.manual_seed(step)  # each step has its own samples
        loss = model(torch.randn(16, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            with log.open("a") as file:
                file.write(json.dumps([step, loss.item()]) + "\n")
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "step": step}
        handle = bytecheckpoint.async_save_state_dict(tiers / f"step-{step}", state)
        handle.memory.result()
        if dist.get_rank() == 0:
            (folder / "in_memory").write_text(str(step))
        dist.barrier()
    bytecheckpoint.shutdown()
    dist.destroy_process_group()


def start(folder: Path, num_ranks: int) -> subprocess.Popen[bytes]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    environ = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen([*launch, __file__, str(folder)], env=environ, start_new_session=True)


def kill_at(job: subprocess.Popen[bytes], folder: Path, step: int) -> None:
    """Kills the launcher of a job and all ranks when a step is in memory."""
    reached = folder / "in_memory"
    while job.poll() is None and (not reached.exists() or int(reached.read_text() or 0) < step):
        time.sleep(0.01)
    assert job.poll() is None, "the job ended too soon"
    for rank in subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True).stdout.split():
        if int(rank) != os.getpid():
            os.kill(int(rank), signal.SIGKILL)
    job.wait()


def losses_of(folder: Path) -> dict[int, float]:
    return dict(map(json.loads, (folder / "losses.jsonl").read_text().splitlines()))


def main() -> None:
    if "RANK" in os.environ:
        train(Path(sys.argv[1]), places(Path(sys.argv[1])))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="(default 4)")
    ranks = parser.parse_args().ranks
    with tempfile.TemporaryDirectory() as name:
        undisturbed, killed = Path(name, "undisturbed"), Path(name, "killed")
        for folder in (undisturbed, killed):
            folder.mkdir()
        assert start(undisturbed, ranks).wait() == 0
        for is_in_memory in (True, False):
            print(f"killed behind step {KILLED_AT}{'' if is_in_memory else ', and the memory is lost'}:", flush=True)
            kill_at(start(killed, ranks), killed, KILLED_AT)
            if not is_in_memory:
                stop_holder(places(killed).in_memory.rpartition("/")[2])
            assert start(killed, ranks).wait() == 0
            same = losses_of(killed) == losses_of(undisturbed)
            print(f"  the losses of {NUM_STEPS} steps are {'the same' if same else 'DIFFERENT'}")
            assert same
            for path in ("losses.jsonl", "in_memory"):
                (killed / path).unlink()
            subprocess.run(["rm", "-r", killed / "run"], check=True)


if __name__ == "__main__":
    main()
