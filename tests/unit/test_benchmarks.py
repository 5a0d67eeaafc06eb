# SPDX-License-Identifier: Apache-2.0
"""Tests that the benchmark scripts run and fit together, on states so small that their figures mean nothing.

`make test` runs the scripts whose figures others read, `make torture` runs all.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ending_ranks import EndingRanks, run_script

from bytecheckpoint.native import _C

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
AT_ONCE = ("--repetitions", "1", "--warm-gib", "0", "--idle-limit-s", "0")
TINY = ("--gigabytes", "0.016")


# What stands between `python SCRIPT` and the process that is forked for it.
AS_A_SCRIPT = """
import os, runpy, sys
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(ending_ranks: EndingRanks) -> Run:
    """Returns a function that runs a script with arguments, and returns what it prints."""

    def run(script: str, *arguments: str) -> str:
        (ended,) = ending_ranks.run(1, run_script, AS_A_SCRIPT, SCRIPTS / script, *arguments, limit_s=120.0)
        assert ended.code == 0, ended.said
        return ended.said

    return run


def module_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a module of ``measurement``, which is no package that tests can import."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", SCRIPTS / "measurement" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def skip_without_direct_io(directory: Path) -> None:
    try:
        os.close(os.open(directory / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"DISK BENCHMARK NOT RUN: O_DIRECT in {directory}: {error}")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, run: Run) -> Path:
    """Returns the JSON file of a comparison with small tensors, which includes the disk where that is possible."""
    folder = tmp_path_factory.mktemp("compare")
    file = folder / "small.json"
    only = ("--only", "dcp-2,bytecheckpoint,disk")
    run("compare.py", "small", *TINY, *AT_ONCE, *only, "--dir", str(folder), "--json", str(file))
    assert [path.name for path in folder.iterdir()] == ["small.json"]
    return file


def test_compare_keeps_what_figures_need(compared: Path) -> None:
    kept: dict[str, Any] = json.loads(compared.read_text())
    assert kept["num_tensors"] * 16384 == kept["num_bytes"]
    assert {"dcp-2", "bytecheckpoint"} <= kept["seconds"].keys()
    for seconds in kept["seconds"].values():
        assert seconds.keys() == {"save", "load"}
        assert all(len(all_s) == kept["repetitions"] == 1 for all_s in seconds.values())
    assert {"date", "cores", "memory_gib", "torch", "python", "kernel", "file_system"} <= kept["machine"].keys()
    # Figures are published: they name the command that repeats them, and not the folder in which they were taken.
    assert kept["command"].startswith("python benchmarks/compare.py small --gigabytes 0.016")
    assert str(compared.parent) not in compared.read_text()


def test_split_names_planner_and_engine(compared: Path) -> None:
    split = json.loads(compared.read_text())["split"]
    assert {"planner: create_local_plan", "planner: resolve_data", "writer", "dcp"} <= split["save"].keys()
    assert {"planner: create_local_plan", "planner: resolve_tensor", "reader", "dcp"} <= split["load"].keys()


def test_results_are_read_back(compared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = module_of("results", monkeypatch)
    comparison = results.Comparison.read(compared)
    for action in results.ACTIONS:
        assert comparison.ratio("dcp-2", "dcp-2", action) == 1.0
        for name in comparison.names():
            assert comparison.gb_per_s(name, action) > 0.0


def test_plot(compared: Path, tmp_path: Path, run: Run) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("PLOT NOT DRAWN: matplotlib is missing; `make bench` installs it")
    figure = tmp_path / "figure.png"
    run("plot.py", str(compared), str(compared), "--output", str(figure))
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_disk(tmp_path: Path, run: Run) -> None:
    skip_without_direct_io(tmp_path)
    file = tmp_path / "disk.json"
    run("disk.py", *TINY, *AT_ONCE, "--dir", str(tmp_path), "--json", str(file))
    seconds = json.loads(file.read_text())["seconds"]
    assert len(seconds) == 4
    assert all(all_s[0] > 0.0 for by_action in seconds.values() for all_s in by_action.values())


@pytest.mark.long
def test_memory(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "memory.json"
    run("memory.py", *TINY, "--only", "bytecheckpoint", "--dir", str(tmp_path), "--json", str(file))
    figures = json.loads(file.read_text())["bytes"]["bytecheckpoint"]
    for of_action in figures.values():
        assert of_action["added_bytes"] == of_action["peak_bytes"] - of_action["before_bytes"]
        assert of_action["before_bytes"] > of_action["state_bytes"]


@pytest.mark.long
def test_checks(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "checks.json"
    run("checks.py", *TINY, *AT_ONCE, "--dir", str(tmp_path), "--json", str(file))
    assert json.loads(file.read_text())["seconds"].keys() == {"load", "load without"}


@pytest.mark.long
def test_verify(tmp_path: Path, run: Run) -> None:
    skip_without_direct_io(tmp_path)
    file = tmp_path / "verify.json"
    run("verify.py", *TINY, *AT_ONCE, "--dir", str(tmp_path), "--json", str(file))
    assert {"disk, 1 threads", "verify, 4 threads", "bcp verify"} <= json.loads(file.read_text())["seconds"].keys()


@pytest.mark.long
def test_threads(tmp_path: Path, run: Run) -> None:
    if not _C.is_in_memory("/dev/shm", 0.0):
        pytest.skip("BENCHMARK OF THREADS NOT RUN: /dev/shm is no tmpfs")
    file = tmp_path / "threads.json"
    run("threads.py", *TINY, *AT_ONCE, "--threads", "1", "2", "--json", str(file))
    kept = json.loads(file.read_text())
    for action in ("save", "load", "pread"):
        assert kept[action].keys() == {"1", "2"}
        assert all(call["cpu_s"] > 0.0 and call["waits"] >= 0 for calls in kept[action].values() for call in calls)


@pytest.mark.long
def test_objects(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "objects.json"
    run("objects.py", "--repetitions", "2", "--turn-ms", "1", "--idle-limit-s", "0", "--json", str(file))
    for by_contender in json.loads(file.read_text())["microseconds"].values():
        assert {len(turns) for turns in by_contender.values()} == {2}


def test_gpu_stall_without_a_gpu(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "stall.json"
    mixed = ("--gigabytes", "0.002", "--tensors", "12")
    small = ("--small-gigabytes", "0.0001", "--small-tensors", "10")
    large = ("--large-gigabytes", "0.002", "--large-tensors", "2")
    run("gpu_stall.py", "--device", "cpu", "--repetitions", "1", *mixed, *small, *large, "--json", str(file))
    figures = json.loads(file.read_text())["figures"]
    assert [(kind, of_kind["num_tensors"]) for kind, of_kind in figures.items()] == [
        *(("mixed", 12), ("small", 10), ("large", 2))
    ]
    for of_kind in figures.values():
        assert of_kind["seconds"].keys() == {"ceiling", "ours", "ours, future", "ours, call", "dcp", "dcp, future"}
        assert all(len(all_s) == 1 for all_s in of_kind["seconds"].values())


@pytest.mark.long
def test_gpu_stall_says_that_there_is_no_gpu(tmp_path: Path, run: Run) -> None:
    if torch.cuda.is_available():
        pytest.skip("THE ANSWER OF A MACHINE WITHOUT A GPU IS NOT TESTED: this one has one")
    file = tmp_path / "stall.json"
    assert "NOTHING MEASURED: torch sees no CUDA device" in run("gpu_stall.py", "--json", str(file))
    assert not file.exists()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_load_hf(tmp_path: Path, ranks: int) -> None:
    if importlib.util.find_spec("safetensors") is None:
        pytest.skip("LOADS OF SAFETENSORS NOT MEASURED: safetensors is missing; `make bench` installs it")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "fastsafetensors.py").write_text("import os\n\nos.abort()\n")
    file = tmp_path / "loads.json"
    command = [sys.executable, str(SCRIPTS / "load_hf.py"), "--ranks", str(ranks), *TINY, *AT_ONCE]
    command += ["--dir", str(tmp_path), "--json", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "broken")}  # which a new process alone looks at
    subprocess.run(command, check=True, timeout=120, env=environment)
    kept = json.loads(file.read_text())
    assert kept["command"].startswith(f"python benchmarks/load_hf.py --ranks {ranks} --gigabytes 0.016")
    assert {"bytecheckpoint", "DCP's HuggingFaceStorageReader"} <= kept["seconds"].keys()
    assert ("safetensors.load_file" in kept["seconds"]) == (ranks == 1)
    assert all(len(all_s) == 1 for all_s in kept["seconds"].values())
    if ranks == 1:
        assert kept["left_out"]["fastsafetensors"] == "signal 6"  # and it did not end ours
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "loads.json"]


@pytest.mark.long
def test_sharing(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "sharing.json"
    sizes = ("--ranks", "2", "--gigabytes", "0.05", "--repetitions", "1", "--idle-limit-s", "0")
    run("sharing.py", *sizes, "--dir", str(tmp_path), "--json", str(file))
    assert [path.name for path in tmp_path.iterdir()] == ["sharing.json"]
    kept = json.loads(file.read_text())
    assert str(tmp_path) not in file.read_text()
    assert [f["layout"] for f in kept["figures"]] == ["ddp", "hsdp", "fsdp"]
    for figures in kept["figures"]:
        modes = figures["modes"]
        assert modes["cooperative"]["bytes_read"] <= 1.05 * figures["stored_bytes"]
        assert modes["independent"]["bytes_received"] == 0
        assert all(len(mode["seconds"]) == 1 for mode in modes.values())


@pytest.mark.long
def test_ranks(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "ranks.json"
    run("ranks.py", "--ranks", "2", "--tensors", "20", *AT_ONCE, "--dir", str(tmp_path), "--json", str(file))
    kept = json.loads(file.read_text())
    assert [set(by_action) for by_action in kept["seconds"].values()] == [{"save", "load"}] * 2
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.long
def test_copies(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "copies.json"
    tiny = ("--gigabytes", "0.001", "--tensors", "3")
    run("copies.py", *tiny, *AT_ONCE, "--dir", str(tmp_path), "--json", str(file))
    seconds = json.loads(file.read_text())["seconds"]
    assert [len(figures) for figures in seconds.values()] == [1, 1]
    assert [file.name for file in tmp_path.iterdir()] == ["copies.json"]


@pytest.mark.long
def test_fsdp1(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "fsdp1.json"
    tiny = ("embedding", "--ranks", "2", "--gigabytes", "0.001", "--only", "decompose; merge")
    run("fsdp1.py", *tiny, *AT_ONCE, "--dir", str(tmp_path), "--json", str(file))
    rounds = json.loads(file.read_text())["rounds"]
    chunks = {name: of_contender[0]["chunks"] for name, of_contender in rounds.items()}
    assert chunks["exchange"] < chunks["decompose"]
    assert list(tmp_path.iterdir()) == [file]


def test_planning(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "planning.json"
    sizes = ("--ranks", "20", "40", "--stock-ranks", "20", "--repetitions", "1", "--idle-limit-s", "0")
    run("planning.py", *sizes, "--json", str(file))
    kept = json.loads(file.read_text())
    figures = kept["figures"]
    assert [f["ranks"] for f in kept["kept"]] == [20, 40]
    assert [(f["who"], f["ranks"]) for f in figures] == [("ours", 20), ("ours", 40)] * 4 + [("stock DCP", 20)] * 4
    by_name = {(f["kind"], f["who"], f["ranks"]): f for f in figures}
    for kind in ("ddp", "fsdp", "hsdp", "3-d"):
        ours, stock = by_name[kind, "ours", 20], by_name[kind, "stock DCP", 20]
        assert ours["blob_bytes"] * 5 < stock["blob_bytes"]
        assert ours["max_over_mean"] <= stock["max_over_mean"] + 0.01
        assert ours["chunks"] >= stock["chunks"]  # ours splits tensors between ranks


def test_plan_tree(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "plan_tree.json"
    slow = ("--latency-us", "5000", "--gb-per-s", "1")
    out = run("plan_tree.py", "fsdp", "--ranks", "2", "30", "--fan-out", "2", *slow, "--json", str(file))
    assert "5000 us + bytes / 1.00 GB/s, as given" in out
    kept = json.loads(file.read_text())
    assert kept["command"].startswith("python benchmarks/plan_tree.py fsdp --ranks 2 30 --fan-out 2")
    assert all(seconds > 0 for seconds in kept["message_s"].values())
    pair, many = (row["tree"] for row in kept["figures"])
    assert (pair["depth"], many["depth"]) == (1, 4)
    assert many["up_s"] >= 4 * 0.005  # one message after another
    assert many["down_s"] >= 4 * 0.005
    assert all(row["flat"]["sum_s"] >= 2 * (row["ranks"] - 1) * 0.005 for row in kept["figures"])


def test_observability(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "observability.json"
    sizes = ("--ranks", "4", "16", "--saves", "3", "4", "--repetitions", "1", "--idle-limit-s", "0")
    run("observability.py", *sizes, "--json", str(file))
    figures = json.loads(file.read_text())["figures"]
    assert [(f["section"], f["ranks"]) for f in figures] == [(s, n) for s in ("findings", "page") for n in (4, 16)]
    assert all(0 < f["page_bytes"] < 5e6 for f in figures if f["section"] == "page")


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_disk_reads_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    """All of the file is written, and a shorter file is an error."""
    skip_without_direct_io(tmp_path)
    disk, file = module_of("raw_disk", monkeypatch).Disk(num_threads), tmp_path / "file"
    disk.write(file, (20 << 20) + 1)
    content = file.read_bytes()
    assert len(content) == (20 << 20) + 4096
    assert content[20 << 20 :] != bytes(4096)
    disk.read(file, 20 << 20)
    os.truncate(file, 10 << 20)
    # Whichever thread meets the end first.
    with pytest.raises(OSError, match=r"request at (8388608|16777216): wanted \d+ bytes, got (2097152|0)"):
        disk.read(file, 20 << 20)


def run_of(ours: list[float], disk: list[float]) -> dict[str, Any]:
    """Returns what bench_all.py keeps, of one benchmark with three contenders, and one that failed."""
    seconds = {"bytecheckpoint": {"save": ours}, "dcp-2": {"save": [9.0, 1.0, 5.0]}, "disk-2": {"save": disk}}
    figures = {"seconds": seconds, "machine": {"cores": 2}, "added_bytes": 5 << 20}
    return {"runs": {"large": {"took_s": 1.0, "figures": figures}, "other": {"took_s": 1.0, "figures": None}}}


STEADY = [0.50, 0.51, 0.49, 0.50, 0.50]


@pytest.mark.parametrize(
    ("ours", "disk", "code", "said"),
    [
        (STEADY, STEADY, 0, "0 worse, 0 better, 1 same"),
        ([1.5 * each for each in STEADY], STEADY, 1, "1 worse, 0 better, 0 same"),
        ([0.5 * each for each in STEADY], STEADY, 0, "0 worse, 1 better, 0 same"),
        ([3.0 * each for each in STEADY], [3.0 * each for each in STEADY], 0, "0 worse, 0 better, 1 same"),
        ([0.2, 0.9, 0.6, 1.1, 0.3], STEADY, 0, "0 worse, 0 better, 1 same"),
    ],
    ids=["nothing", "slower", "faster", "a slower machine", "noise"],
)
def test_runs_are_compared_beyond_their_noise(
    ours: list[float], disk: list[float], code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "old.json").write_text(json.dumps(run_of(STEADY, STEADY)))
    (tmp_path / "new.json").write_text(json.dumps(run_of(ours, disk)))
    command = [sys.executable, str(SCRIPTS / "compare_runs.py"), "old.json", "new.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert f"{said}; 1 single figures" in " ".join(done.stdout.split())
    assert ("seconds, bytecheckpoint, save" in done.stdout) == ("1 same" not in said)


def test_tables_of_what_was_measured_are_compared_and_settings_are_not(tmp_path: Path, run: Run) -> None:
    """Of memory.py and stall.py, which have `bytes` as a table and as a setting. Doing nothing is no yardstick."""
    for name, nothing in (("old.json", 1e-6), ("new.json", 9e-6)):
        beside = {"no save": {"return_s": [nothing] * 5}, "bytecheckpoint": {"return_s": STEADY}}
        by_script = {
            "memory": {"bytes": {"bytecheckpoint": {"save": {"added_bytes": 5 << 20}}}},
            "stall": {"states": {"small": {"bytes": 327_680_000, "figures": beside}}},
        }
        runs = {script: {"took_s": 1.0, "figures": figures} for script, figures in by_script.items()}
        (tmp_path / name).write_text(json.dumps({"runs": runs}))
    out = run("compare_runs.py", str(tmp_path / "old.json"), str(tmp_path / "new.json"))
    assert out.startswith("0 worse, 0 better, 1 same; 1 single figures")


@pytest.mark.long
def test_all_benchmarks_are_kept_in_one_file(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "all.json"
    run("bench_all.py", "--only", "observability", "--output", str(file))
    kept = json.loads(file.read_text())["runs"]["observability"]
    assert kept["said"] is None
    assert kept["figures"]["figures"]
    assert run("compare_runs.py", str(file), str(file)).startswith("0 worse, 0 better, ")


TINY_RUN = """
import bench_all, sys
tiny = ("--repetitions", "1", "--warm-gib", "0", "--idle-limit-s", "0", "--gigabytes", "0.002")
only = ("--only", "dcp-2,bytecheckpoint,disk", "--dir", sys.argv.pop(1))
bench_all.COMMANDS = {"small": ("compare.py", "small", *tiny, *only), "large": ("no_such_script.py",)}
sys.exit(bench_all.main())
"""


def test_the_table_of_figures_is_made_of_what_bench_all_keeps(tmp_path: Path, run: Run) -> None:
    file, page = tmp_path / "all.json", tmp_path / "page.md"
    command = [sys.executable, "-c", TINY_RUN, str(tmp_path), "--output", str(file)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr  # one of the two scripts is missing
    begin, end = "<!-- benchmarks/figures_table.py makes what follows -->", "<!-- to here -->"
    page.write_text(f"before\n\n{begin}\n{end}\n\nafter\n")
    run("figures_table.py", str(file), "--page", str(page))
    text = page.read_text()
    seconds = json.loads(file.read_text())["runs"]["small"]["figures"]["seconds"]
    for action in ("save", "load"):
        (ours,), (stock,) = seconds["bytecheckpoint"][action], seconds["dcp-2"][action]
        assert f"| small | bytecheckpoint, {action} | {ours:.3f} s | {stock / ours:.2f} |" in text
        assert ("%" in text) == ("disk-1" in seconds)
    assert "| large | failed |" in text
    assert "python benchmarks/compare.py small --only dcp-2,bytecheckpoint,disk" in text
    assert text.startswith(f"before\n\n{begin}\n`make bench-all`, ")
    assert text.endswith(f"\n{end}\n\nafter\n")
    run("figures_table.py", str(file), "--page", str(page))
    assert page.read_text() == text


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_phases(tmp_path: Path, ranks: int, run: Run) -> None:
    file = tmp_path / "phases.json"
    out = run("phases.py", *TINY, *AT_ONCE, "--ranks", str(ranks), "--dir", str(tmp_path), "--json", str(file))
    assert "planning, metadata and commit" in out
    kept = json.loads(file.read_text())
    assert [len(report["ranks"]) for report in kept["reports"]] == [ranks]
    assert str(tmp_path) not in file.read_text()


@pytest.mark.long
def test_stall(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "stall.json"
    tiny = ("small", "--gigabytes", "0.001", "--window-s", "0.05", "--only", "dcp-thread,bytecheckpoint,no save")
    run("stall.py", *tiny, *AT_ONCE, "--dir", str(tmp_path), "--json", str(file))
    figures = json.loads(file.read_text())["states"]["small"]["figures"]
    assert figures.keys() == {"no save", "dcp-thread", "bytecheckpoint"}
    assert all(of["gap_ms"] and len(of["return_s"]) == 1 for of in figures.values())
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.long
def test_the_demo_of_asynchronous_saves(tmp_path: Path, run: Run) -> None:
    png = tmp_path / "steps.png"
    tiny = ("--steps", "4", "--every", "2", "--dim", "64", "--layers", "1", "--batch", "1")
    out = run("../demo/async_training.py", *tiny, "--dir", str(tmp_path), "--png", str(png))
    assert "The demo has passed." in out
    assert out.count("loaded with stock dcp.load") == 3
    assert png.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [png]


@pytest.mark.long
def test_publish(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "publish.json"
    run("publish.py", *TINY, *AT_ONCE, "--dir", str(tmp_path), "--json", str(file))
    kept = json.loads(file.read_text())
    assert {"find changes", "publish", "update", "torch.load"} <= kept["seconds"]["500 MB/s"].keys()
    assert len(kept["adamw"]) == 6
