# SPDX-License-Identifier: Apache-2.0
"""What goes on around a save of CUDA tensors: graphs under capture, other allocators, faults, forks, and exits."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from seeded_state import check
from support.equality import assert_loads

import bytecheckpoint
from bytecheckpoint import BcpStager, Config, async_save_state_dict

pytestmark = pytest.mark.timeout(180)

LIMIT_S = 60.0
MIB = 1 << 20
ROOT = Path(__file__).parents[2]

PREAMBLE = """
import os, signal, sys, time
import torch
import bytecheckpoint
from bytecheckpoint import BcpStager, async_save_state_dict, load_state_dict, save_state_dict
from seeded_state import check, made

path = sys.argv[1]
"""


def run_script(path: Path, script: str, code: int = 0, **variables: str) -> str:
    """Runs a script in a new process, and returns what it wrote to stderr."""
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'gpu'}", **variables}
    command = [sys.executable, "-c", PREAMBLE + script, str(path)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stderr


@pytest.fixture
def state() -> Iterator[dict[str, torch.Tensor]]:
    made = {f"t{number}": torch.rand(1 + 1000 * number, device="cuda") for number in range(100)}
    made["large"] = torch.rand(100 * MIB, device="cuda")
    made["turned"] = torch.rand(2000, 3000, device="cuda").t()
    yield made
    gc.collect()


# --- CUDA graphs


@pytest.mark.parametrize("is_first", [False, True], ids=["later", "first use"])
def test_a_graph_may_be_captured_while_a_save_goes_on(
    tmp_path: Path, state: dict[str, torch.Tensor], is_first: bool
) -> None:
    if is_first:
        bytecheckpoint.shutdown()  # so that memory is locked and allocated meanwhile
    wanted = {key: tensor.cpu() for key, tensor in state.items()}
    weight, x = torch.rand(256, 256, device="cuda"), torch.rand(256, 256, device="cuda")
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        weight @ x
    torch.cuda.current_stream().wait_stream(warm)
    handle = async_save_state_dict(tmp_path, state, no_dist=True)
    for _ in range(50):  # while the device copies, and while checksums are made and files written
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = weight @ x
        graph.replay()
    handle.staged.result(LIMIT_S)
    handle.committed.result(LIMIT_S)
    assert torch.equal(y, weight @ x)
    assert_loads(tmp_path, wanted)


def test_staging_inside_a_capture_is_an_error_and_no_harm(state: dict[str, torch.Tensor]) -> None:
    stager = BcpStager(overlap=False, config=Config(on_staging_busy="raise"))
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(10, device="cuda")
    with torch.cuda.graph(graph):
        x += 1
        with pytest.raises(ValueError, match="inside the capture of a CUDA graph"):
            stager.stage(state)
        x += 1
    graph.replay()
    assert x.tolist() == [2.0] * 10
    staged: Any = stager.stage(state)
    assert torch.equal(staged["turned"], state["turned"].cpu())


# --- allocators of torch


@pytest.mark.parametrize("allocator", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_other_allocators_of_torch(tmp_path: Path, allocator: str) -> None:
    script = """
for round_ in range(3):
    handle = async_save_state_dict(path, made(round_), no_dist=True)
    handle.staged.result(60)
    torch.cuda.empty_cache()
    handle.committed.result(60)
    check(path, round_)
"""
    run_script(tmp_path, script, PYTORCH_CUDA_ALLOC_CONF=allocator, PYTORCH_ALLOC_CONF=allocator)


# --- faults of the device


def test_an_earlier_fault_of_the_device_is_an_error_and_no_checkpoint(tmp_path: Path) -> None:
    script = """
state = made(0)
save_state_dict(path, state, no_dist=True)
torch.cuda.synchronize()
state["large"][torch.tensor([1 << 40], device="cuda")] = 1.0  # a kernel that asserts
for seconds in (0.0, 0.5):
    time.sleep(seconds)
    try:
        handle = async_save_state_dict(path, state, no_dist=True)
        handle.committed.result(60)
    except bytecheckpoint.CheckpointError as error:
        text = f"{type(error).__name__}: {error} {error.__cause__}"
    except Exception as error:
        text = f"{type(error).__name__}: {error} {error.__cause__}"
    else:
        sys.exit("no error")
    print(text, file=sys.stderr)
    assert "CUDA" in text or "device" in text, text
del state
got = {"large": torch.zeros(16 << 20)}
load_state_dict(path, got, no_dist=True)  # the earlier checkpoint is as it was
assert float(got["large"].sum()) > 1.0
"""
    said = run_script(tmp_path, script)
    assert "DeviceError" in said


# --- forks and ends of the process


def test_forked_children_do_no_harm(tmp_path: Path) -> None:
    script = """
state = made(0, 256 << 20)
handle = async_save_state_dict(path, state, no_dist=True)
children = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        try:
            BcpStager().stage({"t": torch.zeros(10)})
        except bytecheckpoint.CheckpointError as error:  # the arena is the parent's
            assert "fork" in str(error), error
            bytecheckpoint.shutdown()
            os._exit(0)
        finally:
            os._exit(1)
    children.append(child)
for child in children:
    assert os.waitpid(child, 0)[1] == 0
handle.committed.result(60)
check(path, 0, 256 << 20)
"""
    run_script(tmp_path, script)


def test_children_that_save_themselves_have_a_ring_of_their_own(tmp_path: Path) -> None:
    script = """
save_state_dict(path, made(0), no_dist=True)  # page-locks the ring, which children then lack
child = os.fork()
if child == 0:
    try:
        save_state_dict(path + "/child", {"t": torch.arange(3 << 20)}, no_dist=True)
        got = {"t": torch.zeros(3 << 20, dtype=torch.int64)}
        load_state_dict(path + "/child", got, no_dist=True)
        os._exit(0 if torch.equal(got["t"], torch.arange(3 << 20)) else 1)
    finally:
        os._exit(2)
save_state_dict(path, made(1), no_dist=True)
assert os.waitpid(child, 0)[1] == 0
check(path, 1)
"""
    run_script(tmp_path, script)


ENDS = {
    "end of the script": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "exception": ("raise KeyError('no data left')", 1),
    "sys.exit with staged": ("handle.staged.result(60); sys.exit(3)", 3),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_save_behind_the_end_of_a_process_is_complete(tmp_path: Path, how: str) -> None:
    end, code = ENDS[how]
    script = f"""
state = made(5, 512 << 20)
handle = async_save_state_dict(path, state, no_dist=True)
{end}
"""
    said = run_script(tmp_path, script, code)
    assert "CUDA" not in said, said
    check(tmp_path, 5, 512 << 20)


def test_killed_while_the_device_copies_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    script = """
save_state_dict(path, made(1), no_dist=True)
handle = async_save_state_dict(path, made(2, 1 << 30), no_dist=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    run_script(tmp_path, script, -9)
    check(tmp_path, 1)
    assert bytecheckpoint.verify(tmp_path).is_whole


# --- memory


def test_memory_of_the_device_is_bounded_and_given_back() -> None:
    bytecheckpoint.shutdown()
    torch.cuda.empty_cache()
    state = {f"t{number}": torch.rand(1 + 100 * number, device="cuda") for number in range(2000)}
    stager = BcpStager(overlap=False)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(5):
        staged: Any = stager.stage(state)
        assert torch.equal(staged["t1999"], state["t1999"].cpu())
        del staged
        gc.collect()
    assert before - torch.cuda.mem_get_info()[0] < 100 * MIB
    bytecheckpoint.shutdown()
    assert before - torch.cuda.mem_get_info()[0] < 16 * MIB
