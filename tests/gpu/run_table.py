# SPDX-License-Identifier: Apache-2.0
"""Makes Markdown for docs/internals/measurements.md of a report of ``run.py``, also of one that was cut off."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

Report = dict[str, Any]
LABELS_OF_STALL = {
    "ceiling": "one copy of as many bytes, the limit of the link",
    "ours": "`BcpStager(overlap=False)`, with checksums",
    "ours, future": "`BcpStager(overlap=True)`, until `staging_completion`",
    "ours, call": "the same, the call alone",
    "dcp": "DCP's `DefaultStager`, page-locked memory",
    "dcp, future": "the same with async staging",
}


def tables_of(report: Report) -> str:
    parts = [_summary(report), _steps(report["steps"])]
    figures = {step["name"]: step["figures"] for step in report["steps"] if step.get("figures")}
    stalls = {name: content for name, content in figures.items() if name.startswith("stall, ")}
    if stalls:
        parts.append(_stalls(stalls))
    if "save and load" in figures:
        parts.append(_save_and_load(figures["save and load"]))
    if "load of safetensors" in figures:
        parts.append(_load(figures["load of safetensors"]))
    return "\n\n".join(parts)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines)


def _summary(report: Report) -> str:
    found = [step.get("figures") for step in report["steps"] if step["name"] == "machine"]
    machine: dict[str, Any] = (found and found[0]) or {}
    rehearsed = "A rehearsal without a GPU, whose figures mean nothing: " if report["mode"] == "rehearsal" else ""
    where = machine.get("device") or report["gpu"] or "no GPU"
    torch = machine.get("torch") or report["versions"]["torch"]
    return (
        f"{rehearsed}{where}, {report['cores']} cores, torch {torch}, CUDA {machine.get('cuda')}, "
        f"Python {report['python']}, commit {report['commit']}, {report['date'][:10]}."
    )


def _steps(steps: list[dict[str, Any]]) -> str:
    rows = []
    for step in steps:
        counts = (step.get("figures") or {}).get("counts") if step["name"].startswith("tests/") else None
        said = ", ".join(f"{number} {word}" for word, number in counts.items()) if counts else step["status"]
        why = f": {step['why']}" if step.get("why") else ""
        seconds = f"{step['seconds']:.0f} s" if "seconds" in step else ""
        rows.append((step["name"], f"{said}{why}".replace("|", "/"), seconds))
    return _table(("step", "result", "took"), rows)


def _stalls(stalls: dict[str, Any]) -> str:
    """One row a contender, one column a state, with how many times as fast as DCP it is."""
    header, medians = ["from the call until the tensors may change"], []
    for content in stalls.values():
        for kind, figures in content["figures"].items():
            header.append(f"{kind}: {_size(figures['num_bytes'])} in {figures['num_tensors']:,} tensors")
            medians.append({who: statistics.median(all_s) for who, all_s in figures["seconds"].items() if all_s})
    rows = [[label, *(_stall(who, of_state) for of_state in medians)] for who, label in LABELS_OF_STALL.items()]
    return "\n\n".join(["\n".join(f"`{content['command']}`" for content in stalls.values()), _table(header, rows)])


def _stall(who: str, medians: dict[str, float]) -> str:
    if who not in medians:
        return ""
    ratio = f" ({medians['dcp'] / medians[who]:.1f} x)" if "dcp" in medians and who != "ours, call" else ""
    return f"{medians[who] * 1e3:,.1f} ms{ratio}"


def _save_and_load(content: dict[str, Any]) -> str:
    baseline = content["seconds"].get("dcp-2", {})
    rows = []
    for name, by_action in content["seconds"].items():
        row = [content["labels"][name]]
        for action in ("save", "load"):
            if not by_action[action]:
                row += ["", ""]
                continue
            median = statistics.median(by_action[action])
            row.append(f"{median:.3f} s")
            row.append(f"{statistics.median(baseline[action]) / median:.2f}" if baseline.get(action) else "")
        rows.append(row)
    title = f"{_size(content['num_bytes'])} in {content['num_tensors']:,} tensors"
    return f"`{content['command']}`\n\n{_table((title, 'save', 'x DCP', 'load', 'x DCP'), rows)}"


def _load(content: dict[str, Any]) -> str:
    medians = {name: statistics.median(all_s) for name, all_s in content["seconds"].items() if all_s}
    baseline = medians.get("safetensors.load_file")
    rows = [
        (
            name,
            f"{median:.3f} s",
            f"{content['bytes'] / median / 1e9:.2f} GB/s",
            "" if baseline is None else f"{baseline / median:.2f}",
        )
        for name, median in medians.items()
    ]
    rows += [(name, f"left out: {reason}", "", "") for name, reason in content["left_out"].items()]
    title = f"{_size(content['bytes'])} of safetensors, whole, to {content['device']}"
    return f"`{content['command']}`\n\n{_table((title, 'load', '', 'x safetensors'), rows)}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.1f} MB"
