# SPDX-License-Identifier: Apache-2.0
"""``bcp doctor``."""

from __future__ import annotations

import dataclasses
import platform
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

import bytecheckpoint
from bytecheckpoint.cli.options import checked_path, json_option
from bytecheckpoint.cli.text import columns, counted, one_line, print_json
from bytecheckpoint.native import REBUILD, extension, other_package, torch_mismatch
from bytecheckpoint.probes.of_olmo import OLMO_FEATURES
from bytecheckpoint.probes.of_torch import TORCH_FEATURES
from bytecheckpoint.probes.of_torchtitan import TORCHTITAN_FEATURES
from bytecheckpoint.probes.probe import TESTED, Feature, installed, is_newer_than_tested, release
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.object_store.folder import StoreFolder

__all__ = ["command"]

_BROKEN = "broken"


@click.command("doctor")
@click.argument("path", required=False, callback=checked_path)
@json_option
@click.pass_context
def command(ctx: click.Context, path: str | None, as_json: bool) -> None:
    """Says what works here, what does not, and what to do about it.

    It shows versions; what each feature relies on in torch, torchtitan and OLMo-core, and whether that holds; what
    matters of the machine: checksums, memory, huge pages, GPU; and what matters of PATH, where checkpoints are to go:
    the file system, O_DIRECT, locks; or of a URL: the server, which conditions of requests it obeys, and whether it
    notices a body that was damaged on its way. It writes only a file without a name in PATH, which disappears at once;
    or small objects below a URL, which it removes. Ends with 1 if something that is asked for cannot work; it is marked
    "broken".

    \b
    Example:
      bcp doctor /mnt/checkpoints
      bcp doctor s3://bucket/run
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of imported packages; newer versions are reported below
        versions = [*_versions()]
        features = [*_features()]
    findings = [*_extensions()]
    if not findings:  # machine.py needs the extension modules
        from bytecheckpoint.cli import machine

        of_path = () if path is None else _findings_of_place(path)
        findings = [dataclasses.asdict(finding) for finding in (*machine.findings_of_machine(), *of_path)]
    broken = sum(item["state"] == _BROKEN for item in (*versions, *features, *findings))
    private = len({name for feature in TORCH_FEATURES for probe in feature.probes for name in probe.private_names()})
    if as_json:
        print_json(
            {
                "broken": broken,
                "versions": versions,
                "features": features,
                "machine": findings,
                "private_names_of_torch": private,
            }
        )
    else:
        for line in _lines(versions, features, findings):
            click.echo(line)
        verdict = f"{counted(broken, 'thing')} broken" if broken else "nothing is broken"
        click.echo(f"{private} private names of torch in use; {verdict}")
    ctx.exit(1 if broken else 0)


def _versions() -> Iterator[dict[str, str]]:
    other = other_package()
    yield _version("bytecheckpoint", bytecheckpoint.__version__, _BROKEN if other else "ok", _format(), other)
    yield _version("Python", platform.python_version())
    for package, (name, oldest, newest) in TESTED.items():
        found = installed(package)
        if not found and package == "torch" and find_spec(package) is not None:
            advice = "nothing says which version it is, so whether it fits this build is not known; install it by pip"
            yield _version(name, "(unknown version)", "note", f"tested: {oldest} to {newest}", advice)
            continue
        if not found:
            state, advice = (_BROKEN, "install it") if package == "torch" else ("ok", "")
            yield _version(name, "(not installed)", state, "", advice)
            continue
        is_newer = is_newer_than_tested(package)
        advice = "it should work if all its probes hold; please report problems" if is_newer else ""
        state = "note" if is_newer else "ok"
        if package == "torch":
            state, advice = _fault_of_torch(found, oldest) or (state, advice)
        yield _version(name, found, state, f"tested: {oldest} to {newest}", advice)


def _fault_of_torch(found: str, oldest: str) -> tuple[str, str] | None:
    """Returns state and advice for a torch with which nothing can work, or of which that is not known; None else.

    The package can be imported with any torch. What needs the extension, such as the first save, is what fails.
    """
    if not release(found):
        return "note", f"'{found}' is no version that is known, so whether it fits this build is not known"
    if release(found) < release(oldest):
        return _BROKEN, f"it is too old: install torch {oldest} or newer, and {REBUILD}"
    mismatch = torch_mismatch()
    return (_BROKEN, f"{mismatch}; {REBUILD}") if mismatch else None


def _version(name: str, found: str, state: str = "ok", text: str = "", advice: str = "") -> dict[str, str]:
    return {"name": name, "version": found, "state": state, "text": text, "advice": advice}


def _format() -> str:
    try:
        info = extension("_core").build_info()
    except ImportError:
        return ""
    return f"format {info['format_version']}, built for torch {info.get('torch', '(unknown version)')}"


def _extensions() -> list[dict[str, str]]:
    """Returns the extension modules that cannot be imported."""
    found = []
    for name in ("_core", "_C"):
        if name == "_C" and not installed("torch"):
            continue  # _versions reports it already
        try:
            extension(name)
        except ImportError as error:
            found.append({"name": name, "state": _BROKEN, "text": str(error), "advice": ""})
    return found


def _findings_of_place(place: str) -> Iterator[Any]:
    from bytecheckpoint.cli import machine, stores

    is_store = isinstance(folder_at(place), StoreFolder)
    return stores.findings_of_store(place) if is_store else machine.findings_of_path(Path(place))


def _features() -> Iterator[dict[str, Any]]:
    """Returns what works of each feature whose packages are installed."""
    features: list[Feature] = [*TORCH_FEATURES] if installed("torch") else []
    if features and find_spec("torchtitan") is not None:
        features += TORCHTITAN_FEATURES
    if features and find_spec("olmo_core") is not None:
        features += OLMO_FEATURES
    for feature in features:
        faults = dict(feature.faults())
        probes = [
            {
                "path": probe.path,
                "purpose": probe.purpose,
                "holds": probe not in faults,
                "fault": faults.get(probe, ""),
                "fallback": probe.fallback,
            }
            for probe in feature.probes
        ]
        refused = [probe for probe in faults if not probe.fallback]
        state = _BROKEN if refused else "note" if faults else "ok"
        yield {"name": feature.name, "state": state, "advice": feature.advice if refused else "", "probes": probes}


def _lines(
    versions: list[dict[str, str]], features: list[dict[str, Any]], findings: list[dict[str, str]]
) -> Iterator[str]:
    rows = [(item["state"], item["name"], item["version"], item["text"]) for item in versions]
    yield from columns([tuple(map(one_line, row)) for row in rows])
    yield from (f"    {item['name']}: {item['advice']}" for item in versions if item["advice"])
    yield ""
    for item in features:
        held = sum(probe["holds"] for probe in item["probes"])
        yield f"{item['state']:6}  {item['name']}: {held} of {len(item['probes'])} probes hold"
        for probe in item["probes"]:
            if not probe["holds"]:
                result = probe["fallback"] or "the feature is refused"
                yield f"    {probe['path']}: {one_line(probe['fault'])} ({probe['purpose'].rstrip('.')}): {result}"
        if item["advice"]:
            yield f"    {item['advice']}"
    yield ""
    for item in findings:
        yield f"{item['state']:6}  {item['name']}: {one_line(item['text'])}"
        if item["advice"]:
            yield f"    {item['advice']}"
