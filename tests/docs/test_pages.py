# SPDX-License-Identifier: Apache-2.0
"""The pages name everything that they must, and their links lead somewhere."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from snippets import PAGES, ROOT, json_of, snippets_of

import bytecheckpoint
from bytecheckpoint import Config, errors

DOCS = ROOT / "docs"
WITH_LINKS = [*PAGES, *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))]
WITH_LINKS += [ROOT / name for name in ("benchmarks/README.md", "csrc/README.md", "tests/gpu/README.md")]


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub and Sphinx make from the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", WITH_LINKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name}: {target}"


def test_policies_and_rules_are_json() -> None:
    found = [json.loads(code) for page in PAGES for code in json_of(page)]
    assert len(found) >= 3


def test_the_readme_is_an_overview_that_links_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.count("\n") <= 200
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).with_suffix("").as_posix()
        assert name == "index" or re.search(rf"^{name}$", index, re.MULTILINE), page
        # For these the README links the file that they include, or a page that leads to them.
        if name not in (
            "index",
            "format",
            "security",
            "internals/measurements",
            "internals/decisions",
            "internals/evidence",
            "internals/digest_form",
            "internals/journal_fields",
        ):
            assert f"(docs/{name}.md" in readme, page


def test_the_api_has_every_public_name() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\.\. auto(?:class|function|data):: ([\w.]+)$", page, re.MULTILINE)
    assert len(documented) == len(set(documented))
    own = {name for name in documented if "." not in name}
    assert own == set(bytecheckpoint.__all__) - {"CheckpointError"}  # listed with the other errors
    assert "automodule:: bytecheckpoint.errors" in page


def test_some_page_has_an_example_of_every_public_name() -> None:
    code = "\n".join(snippet.code for page in PAGES for snippet in snippets_of(page) if snippet.language == "python")
    words = {*re.findall(r"\w+", code)}
    assert [name for name in bytecheckpoint.__all__ if name not in words] == []


def test_troubleshooting_has_every_error() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__ and not name.startswith("_")
    }
    assert {*re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)} == classes


def test_the_commit_protocol_has_every_failpoint() -> None:
    header = (ROOT / "csrc/base/failpoint.h").read_text(encoding="utf-8")
    names = re.findall(r'^    "(\w+)",$', header, re.MULTILINE)
    page = (DOCS / "internals/commit_protocol.md").read_text(encoding="utf-8")
    assert len(names) > 30
    assert [name for name in names if f"`{name}`" not in page] == []


def steps_of(text: str) -> dict[int, tuple[str, list[str]]]:
    """Returns the words and the failpoints of each numbered step of the commit protocol, of header or page."""
    text = re.sub(r"^/// ?", "", text, flags=re.MULTILINE)
    found = {}
    for number, step in re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |^$|\Z)", text, re.MULTILINE | re.DOTALL):
        words = re.sub(r"\s+", " ", step.replace("`", "").replace("*", "")).strip()
        listed = re.search(r" [\[(]((?:k[A-Z]|[a-z]+_)\w+(?:, \w+)*)[\])]$", words)
        names = [] if listed is None else listed[1].split(", ")
        words = words if listed is None else words[: listed.start()]
        failpoints = [re.sub(r"(?<!^)([A-Z])", r"_\1", name.removeprefix("k")).lower() for name in names]
        # The header has the code of an error, and the page its class.
        words = re.sub(r"\bk([A-Z]\w+)", r"\1", re.sub(r"\b(?:Checkpoint)?(\w+)Error\b", r"\1", words))
        found[int(number)] = (words, failpoints)
    return found


def test_the_commit_protocol_has_the_steps_of_the_header() -> None:
    header = (ROOT / "csrc/engine/commit/commit.h").read_text(encoding="utf-8")
    steps = steps_of(header)
    assert [*steps] == [*range(1, 13)]
    assert steps_of((DOCS / "internals/commit_protocol.md").read_text(encoding="utf-8")) == steps
    names = re.findall(r'^    "(\w+)",$', (ROOT / "csrc/base/failpoint.h").read_text(encoding="utf-8"), re.MULTILINE)
    in_steps = {name for _, failpoints in steps.values() for name in failpoints}
    assert in_steps == {name for name in names if not name.startswith("abort_")}


def test_the_table_of_figures_has_its_place() -> None:
    script = (ROOT / "benchmarks/figures_table.py").read_text(encoding="utf-8")
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    markers = re.findall(r'"(<!-- .*? -->)"', script)
    assert [page.count(marker) for marker in markers] == [1, 1]
    table = page.partition(markers[0])[2].partition(markers[1])[0]
    (header,) = re.findall(r'^HEADER = \("(.*?)"', script, re.MULTILINE)
    assert header in table


def test_the_readme_of_the_benchmarks_names_every_script() -> None:
    readme = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    assert [script.name for script in (ROOT / "benchmarks").glob("*.py") if f"`{script.name}" not in readme] == []


def versions(text: str) -> tuple[list[str], list[str]]:
    """Returns the versions of torch and of Python that ``make compat`` tries, as tests/compat.mk lists them."""
    (listed,) = re.findall(r"^VERSIONS := (.*)$", text, re.MULTILINE)
    pairs = [each.split("-python") for each in listed.split()]
    return [torch for torch, _ in pairs], [python for _, python in pairs]


def ranges(what: str, text: str) -> set[tuple[str, str]]:
    """Returns what a page says of versions of ``what``, as in ``torch 2.10 to 2.15``."""
    return set(re.findall(rf"\b{what} (\d+\.\d+)\s+to\s+(\d+\.\d+)", text))


def minor(version: str) -> tuple[int, int]:
    major, number, *_ = version.split(".")
    return int(major), int(number)


def test_pages_say_the_same_of_versions_as_what_is_tried() -> None:
    compat = (ROOT / "tests/compat.mk").read_text(encoding="utf-8")
    tried, pythons = versions(compat)
    oldest, newest = (".".join(map(str, minor(version))) for version in (tried[0], tried[-1]))
    with_olmo = re.findall(r"torch==(\d+\.\d+)\.%", compat)
    # What we are tested with; what OLMo-core can be installed with; whose checkpoints we read.
    of_torch = {(oldest, newest), (with_olmo[0], with_olmo[-1]), ("1.13", newest)}
    of_python = {(min(pythons, key=minor), max(pythons, key=minor))}
    said = set[tuple[str, str]]()
    for page in (*WITH_LINKS, ROOT / "pyproject.toml"):
        text = page.read_text(encoding="utf-8")
        said |= ranges("torch", text)
        assert ranges("torch", text) <= of_torch, page
        assert ranges("Python", text) <= of_python, page
    assert said == of_torch
    rows = (DOCS / "compatibility.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (\d+\.\d+\.\d+) \| (\d+\.\d+) \|", rows, re.MULTILINE) == list(
        zip(tried, pythons, strict=True)
    )
    (installed,) = re.findall(r"^NEWEST := torch==(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert installed == tried[-1]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"torch (\d+\.\d+\.\d+) \(about", readme) == [installed]


def test_a_range_of_versions_that_is_not_tried_is_noticed() -> None:
    assert ranges("torch", "With torch 2.9 to\n2.15, and torch 2.10 to 2.15.") == {("2.9", "2.15"), ("2.10", "2.15")}


# What no test has run on, as some page says.
NEVER_RUN = ("AWS", "gs://", "az://", "https://", "several devices", "several computers")
_NEVER = re.compile(r"\bnever\b(?: been)?(?: run| tried|\*\*| AWS)|not been run", re.IGNORECASE)
_FIGURE = re.compile(r"\d (?:ms|s|min|[MG]B/s|%|x)(?=[^\w]|$)")


def statements(text: str) -> list[str]:
    """Returns the rows of tables and the sentences of a page. Code and the targets of links are left out."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    found = []
    for block in re.split(r"\n(?=\||- |\d+\. )|\n\n", text):
        found += re.split(r"(?<=[.;])\s", " ".join(block.split()))
    return found


def said_never_and_measured(pages: dict[str, str]) -> dict[str, tuple[list[str], list[str]]]:
    """Returns, by thing, the pages that say that it never ran, and those that give figures of it."""
    found: dict[str, tuple[list[str], list[str]]] = {thing: ([], []) for thing in NEVER_RUN}
    for name, text in pages.items():
        for statement in statements(text):
            for thing, (never, measured) in found.items():
                if thing.lower() in statement.lower():
                    if _NEVER.search(statement):
                        never.append(name)
                    elif _FIGURE.search(statement):
                        measured.append(name)
    return found


def test_no_page_has_figures_of_what_another_says_never_ran() -> None:
    found = said_never_and_measured({str(page.relative_to(ROOT)): page.read_text("utf-8") for page in WITH_LINKS})
    assert [thing for thing, (never, _) in found.items() if not never] == []
    assert {thing: measured for thing, (_, measured) in found.items() if measured} == {}


def test_figures_of_what_never_ran_are_noticed() -> None:
    pages = {
        "a": "`gs://`: **never run**. AWS has\nnever been run.\n\n| `az://b` | x | **never** |\n",
        "b": "Measured:\n\n| `gs://` | 1.25 s |\n- on AWS a save takes 3 GB/s\n\nNot `az://`. It takes 3 s.",
    }
    found = said_never_and_measured(pages)
    assert (found["gs://"], found["AWS"], found["az://"]) == ((["a"], ["b"]), (["a"], ["b"]), (["a"], []))


def test_pages_say_the_same_of_each_kind_of_url() -> None:
    """The README says what never ran, and docs/object_stores.md has a row for each kind."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = (DOCS / "object_stores.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)://[^|]*\|[^|]*\| (.*) \|$", page, re.MULTILINE))
    assert {*rows} == {"s3", "gs", "az", "http", "https", "memory"}
    (line,) = re.findall(r"^\| object storage: (`.*) \| \*\*Never run\*\*", readme, re.MULTILINE)
    assert {scheme for scheme, run in rows.items() if run == "**never**"} == {*re.findall(r"`(\w+)://`", line)}


def config_rows() -> list[tuple[str, str, str]]:
    """Returns the rows of the table in docs/configuration.md."""
    rows: list[tuple[str, str, str]] = extension("config_rows").config_rows()
    return rows


def extension(name: str) -> Any:
    """Returns a module of docs/extensions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS / "extensions")
        return importlib.import_module(name)


@pytest.mark.parametrize("page", ["configuration.md", "api.md"])
def test_what_is_made_of_the_code_is_up_to_date(page: str) -> None:
    made = extension("made_tables")
    assert page in made.PAGES
    text = (DOCS / page).read_text(encoding="utf-8")
    assert made.with_tables(page, text) == text, "run python docs/extensions/made_tables.py"


def test_the_tables_have_every_field_and_every_name() -> None:
    """They are in the files, where people read them without Sphinx."""
    fields = re.findall(r"^\| `([a-z_]+)` \| `", (DOCS / "configuration.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert fields == [*Config.__dataclass_fields__]
    api = (DOCS / "api.md").read_text(encoding="utf-8")
    names = {*re.findall(r"^\| `([\w.]+)[(`]", api, re.MULTILINE)}
    assert {*re.findall(r"^\.\. auto(?:class|function|data):: (\S+)$", api, re.MULTILINE)} | {*errors.__all__} == names


def test_a_table_that_is_out_of_date_is_written_anew() -> None:
    made = extension("made_tables")
    for page in made.PAGES:
        text = (DOCS / page).read_text(encoding="utf-8")
        old = re.sub(r"^\| `(niceness|read\()[^\n]*\n", "", text, flags=re.MULTILINE)
        assert old != text
        assert made.with_tables(page, old) == text


def test_the_docs_tell_all_fields_and_their_defaults() -> None:
    rows = {name: (default, description) for name, default, description in config_rows()}
    assert rows.keys() == Config.__dataclass_fields__.keys()
    for name, field in Config.__dataclass_fields__.items():
        text, description = rows[name]
        default = field.default >> 20 if "MiB" in text else field.default
        default = int(default) if isinstance(default, float) else default
        assert text.replace(" MiB", "") == str(default), name
        assert re.match(r"[A-Z0-9`].*\.$", description), name


def test_a_field_that_is_not_described_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Config.__doc__ is not None
    monkeypatch.setattr(Config, "__doc__", Config.__doc__.replace("niceness:", "nicety:"))
    with pytest.raises(ValueError, match=r"\['niceness', 'nicety'\]"):
        config_rows()


def test_the_files_that_tell_a_save_are_there() -> None:
    page = (ROOT / "docs" / "internals" / "architecture.md").read_text()
    told = re.findall(r"^\d+\. `([^`]+)`:", page.partition("## A save")[2].partition("###")[0], re.MULTILINE)
    assert len(told) == 10
    assert [name for name in told if not (ROOT / name).is_file()] == []
