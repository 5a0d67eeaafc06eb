# SPDX-License-Identifier: Apache-2.0
"""Measures how long training stalls while its state leaves the GPU: BcpStager against DCP's DefaultStager, in turn.

Three states, seeded random bytes on one CUDA device:

  mixed  --gigabytes in --tensors bf16, float32 and strided tensors: a quarter of them 1 KiB, the others share the rest
  small  --small-gigabytes in --small-tensors float32 tensors of one size, like norms and biases
  large  --large-gigabytes in --large-tensors contiguous bf16 tensors of one size, like embeddings and flat parameters

and the contenders, timed from the call until the tensors may change:

  ceiling       one cudaMemcpy of as many contiguous bytes to pinned memory: the limit of the link
  ours          BcpStager(overlap=False): the call, including checksums of the staged bytes
  ours, future  BcpStager(overlap=True): the call and the wait for staging_completion; checksums follow later
  ours, call    only the call of that: the part that training cannot overlap with anything
  dcp           DefaultStager with pinned memory and non-blocking copies, in the calling thread
  dcp, future   the same with async staging: the call and the wait

One stager of DCP is used for all rounds where it can be. That of some versions of torch, 2.11 for example, forgets how
to copy after its first state, so each round has a new one, which pins its memory anew, as ``dcp.async_save`` does.

Kernel time is the device time of the gather kernel, from torch's profiler, in a separate run. The first round does not
count, because memory is pinned in it. Every byte is compared after the last round of each contender. The file of
``--json`` is written after each contender, so a run that is stopped leaves the figures of those before.

With ``--device cpu`` the same runs without a GPU: no memory is pinned, and the figures say nothing of one.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measurement import machine
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import bytecheckpoint
from bytecheckpoint import BcpStager, Config

KINDS = ("mixed", "small", "large")
KIB = 1 << 10
KERNEL = "move_tiles"
# Goals for our stager.
LEAST_OF_CEILING, LEAST_TIMES_DCP = 0.9, 10.0

State = dict[str, torch.Tensor]
Seconds = dict[str, list[float]]


def drawn(num_bytes: int, seed: int, device: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device, generator=generator)


def mixed_state(gigabytes: float, num_tensors: int, device: str) -> State:
    num_tiny = num_tensors // 4
    each = int(gigabytes * 1e9 - num_tiny * KIB) // max(1, num_tensors - num_tiny) // 4096 * 4096
    state = {}
    for number in range(num_tensors):
        name = f"layers.{number}.weight"
        if number % 4 == 0:
            state[name] = drawn(KIB, number, device).view(torch.float32)
        elif number % 4 == 1:
            state[name] = drawn(each, number, device).view(torch.bfloat16).view(-1, 64)
        elif number % 4 == 2:
            state[name] = drawn(each, number, device).view(torch.float32).view(-1, 64)
        else:
            state[name] = drawn(each, number, device).view(torch.bfloat16).view(32, -1).t()
    return state


def small_state(gigabytes: float, num_tensors: int, device: str) -> State:
    each = max(4, int(gigabytes * 1e9 / num_tensors) // 4 * 4)
    return {f"norms.{number}.weight": drawn(each, number, device).view(torch.float32) for number in range(num_tensors)}


def large_state(gigabytes: float, num_tensors: int, device: str) -> State:
    each = max(128, int(gigabytes * 1e9 / num_tensors) // 128 * 128)
    return {
        f"blocks.{number}.weight": drawn(each, number, device).view(torch.bfloat16).view(-1, 64)
        for number in range(num_tensors)
    }


def state_of(kind: str, arguments: argparse.Namespace) -> State:
    if kind == "mixed":
        return mixed_state(arguments.gigabytes, arguments.tensors, arguments.device)
    if kind == "small":
        return small_state(arguments.small_gigabytes, arguments.small_tensors, arguments.device)
    return large_state(arguments.large_gigabytes, arguments.large_tensors, arguments.device)


def bytes_of(state: State) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


class Ours:
    """Stages as ``async_save`` does. The arena stays between calls, the staged state does not."""

    def __init__(self, threads: int, overlap: bool) -> None:
        self._stager = BcpStager(overlap=overlap, config=Config(staging_threads=threads))
        self.call_s: list[float] = []

    def __call__(self, state: State) -> Any:
        begin = time.perf_counter()
        staged = self._stager.stage(state)
        self.call_s.append(time.perf_counter() - begin)
        return staged if isinstance(staged, dict) else staged.result()

    @staticmethod
    def settle(staged: Any) -> None:
        """Waits for the checksums, so that work behind the call does not slow the next contender."""
        staged.wait_for_checksums()

    def close(self) -> None:
        gc.collect()
        bytecheckpoint.shutdown()


class Dcp:
    def __init__(self, is_async: bool, device: str) -> None:
        self._is_async = is_async
        self._is_on_gpu = device != "cpu"
        self._stager = self._new_stager()

    def _new_stager(self) -> DefaultStager:
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=self._is_on_gpu,
                use_shared_memory=False,
                use_async_staging=self._is_async,
                use_non_blocking_copy=self._is_on_gpu,
            )
        )

    def __call__(self, state: State) -> Any:
        if not self._stager._state_dict_stager._deepcopy_dispatch:  # see above
            self._stager.close()
            self._stager = self._new_stager()
        staged = self._stager.stage(state)
        return staged if isinstance(staged, dict) else staged.result()

    @staticmethod
    def settle(staged: Any) -> None:
        pass

    def close(self) -> None:
        self._stager.close()


def ceiling_s(num_bytes: int, repetitions: int, device: str) -> list[float]:
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
    return [timed(lambda: target.copy_(source)) for _ in range(repetitions + 1)][1:]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(call: Callable[[], Any]) -> float:
    gc.collect()
    synchronize()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def compare(staged: Any, state: State, name: str) -> None:
    for key, tensor in state.items():
        got = staged[key].contiguous().view(torch.uint8)
        if got.device.type != "cpu" or not torch.equal(got, tensor.cpu().contiguous().view(torch.uint8)):
            raise RuntimeError(f"{name}: {key} is not what was staged")


def measure(name: str, contender: Any, state: State, repetitions: int) -> list[float]:
    seconds = []
    for round_ in range(repetitions + 1):
        staged: list[Any] = []
        seconds.append(timed(lambda staged=staged: staged.append(contender(state))))  # type: ignore[misc]
        contender.settle(staged[0])
        if round_ == repetitions:
            compare(staged[0], state, name)
        staged.clear()
    return seconds[1:]


def kernel_s(state: State, threads: int) -> float | None:
    """Returns the device seconds that our kernel takes for one state, or None if the profiler cannot see it."""
    ours = Ours(threads, overlap=False)
    ours(state)
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ours(state)
        torch.cuda.synchronize()
    ours.close()
    found = [event.device_time_total for event in profile.key_averages() if KERNEL in event.key]
    return sum(found) / 1e6 if found else None


def measure_state(
    state: State, arguments: argparse.Namespace, figures: dict[str, Any], keep: Callable[[], None]
) -> None:
    """Fills ``figures``, and calls ``keep`` whenever there are more."""
    seconds: Seconds = {"ceiling": ceiling_s(bytes_of(state), arguments.repetitions, arguments.device)}
    figures |= {"num_bytes": bytes_of(state), "num_tensors": len(state), "seconds": seconds, "kernel_s": None}
    keep()
    gc.collect()
    getattr(torch._C, "_host_emptyCache", lambda: None)()  # frees the ceiling's pinned memory
    made: dict[str, Callable[[], Any]] = {
        "ours": lambda: Ours(arguments.threads, overlap=False),
        "ours, future": lambda: Ours(arguments.threads, overlap=True),
        "dcp": lambda: Dcp(False, arguments.device),
        "dcp, future": lambda: Dcp(True, arguments.device),
    }
    for name, make in made.items():  # one after the other, because two pinned copies may not fit in memory
        contender = make()
        seconds[name] = measure(name, contender, state, arguments.repetitions)
        if name == "ours, future":
            seconds["ours, call"] = contender.call_s[1:]
        contender.close()
        keep()
    if arguments.device != "cpu":
        figures["kernel_s"] = kernel_s(state, arguments.threads)
        keep()


def table_of(name: str, figures: dict[str, Any]) -> Table:
    gigabytes = figures["num_bytes"] / 1e9
    table = Table(title=f"{name}: {gigabytes:.2f} GB in {figures['num_tensors']:,} tensors")
    for column in ("", "stall", "GB/s", "of the ceiling", "x DCP"):
        table.add_column(column, justify="right" if column else "left")
    medians = {who: statistics.median(all_s) for who, all_s in figures["seconds"].items()}
    for who, median in medians.items():
        if who == "ours, call":
            table.add_row(who, f"{median * 1e3:.1f} ms", "", "", "")
            continue
        ratio = medians["ceiling"] / median
        table.add_row(
            who, f"{median * 1e3:.1f} ms", f"{gigabytes / median:.1f}", f"{ratio:.0%}", f"{medians['dcp'] / median:.1f}"
        )
    kernel = figures["kernel_s"]
    table.add_row("kernel", "not seen" if kernel is None else f"{kernel * 1e3:.1f} ms", "", "", "")
    return table


def verdicts(figures: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    best = {
        name: min(statistics.median(figure["seconds"][who]) for who in ("ours", "ours, future"))
        for name, figure in figures.items()
    }
    if "mixed" in figures:
        ratio = statistics.median(figures["mixed"]["seconds"]["ceiling"]) / best["mixed"]
        lines.append(f"mixed: {ratio:.0%} of the ceiling, {LEAST_OF_CEILING:.0%} wanted")
    if "small" in figures:
        ratio = statistics.median(figures["small"]["seconds"]["dcp"]) / best["small"]
        lines.append(f"small: {ratio:.1f} times as fast as DCP, {LEAST_TIMES_DCP:.0f} wanted")
    return lines


def reason_not_to_measure(device: str) -> str | None:
    if device != "cpu" and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if device != "cpu" and not bytecheckpoint.build_info()["cuda"]:
        return "this build has no device code; build it where nvcc is"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help=f"kinds: {', '.join(KINDS)} (default: all)")
    parser.add_argument("--gigabytes", type=float, default=10.0, help="size of the mixed state (default 10)")
    parser.add_argument("--tensors", type=int, default=5000, help="tensors of the mixed state (default 5000)")
    parser.add_argument("--small-gigabytes", type=float, default=0.33, help="size of the small state (default 0.33)")
    parser.add_argument("--small-tensors", type=int, default=20000, help="tensors of the small state (default 20000)")
    parser.add_argument("--large-gigabytes", type=float, default=4.0, help="size of the large state (default 4)")
    parser.add_argument("--large-tensors", type=int, default=32, help="tensors of the large state (default 32)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="staging_threads of ours (default 2)")
    parser.add_argument("--repetitions", type=int, default=5, help="counted rounds, after one that is not (default 5)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    arguments = parser.parse_args()
    if unknown := set(arguments.kinds) - set(KINDS):
        parser.error(f"unknown kind: {', '.join(sorted(unknown))}")
    if why := reason_not_to_measure(arguments.device):
        print(f"NOTHING MEASURED: {why}")
        return

    console = Console(highlight=False, width=120)
    facts = {**machine.facts(Path.cwd()), "cuda": torch.version.cuda}
    figures: dict[str, dict[str, Any]] = {}
    report = {"command": machine.command("gpu_stall.py", arguments, parser), "machine": facts}
    report |= {"versions": machine.versions(), "figures": figures}

    def keep() -> None:
        if arguments.json:
            beside = arguments.json.with_suffix(".tmp")
            beside.write_text(json.dumps(report, indent=1) + "\n")
            beside.replace(arguments.json)

    for kind in arguments.kinds or KINDS:
        state = state_of(kind, arguments)
        measure_state(state, arguments, figures.setdefault(kind, {}), keep)
        del state
        torch.cuda.empty_cache()
        console.print(table_of(kind, figures[kind]))
    for line in verdicts(figures) if arguments.device != "cpu" else ():
        console.print(line)
    console.print(f"CUDA {facts['cuda']}; {machine.summary(facts)}")


if __name__ == "__main__":
    main()
