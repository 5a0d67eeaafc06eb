# SPDX-License-Identifier: Apache-2.0
"""Tests the page of ``bcp report`` in a browser: it draws, answers the mouse and the keyboard, and asks for nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.simulated_journal import Job, Straggler, factors_of, simulate_load, simulate_save, write_run

from bytecheckpoint.observability.page import page_of
from bytecheckpoint.observability.page.contents import LargestTensors, Space, StepSpace, page_contents
from bytecheckpoint.observability.run_folder import read_run
from bytecheckpoint.observability.summary import findings_of_all, troubles

SLOW = 3
CHARTS = ("trend-chart", "heat-chart", "timeline-chart", "bytes-chart", "ended-chart", "sizes-chart")


def page_for(run: Path, output: Path, **options: Any) -> Path:
    read = read_run(run)
    found = findings_of_all(read.records)
    output.write_text(page_of(page_contents(read, found, troubles(read.records, found), **options)), encoding="utf-8")
    return output


def job_of(world_size: int) -> Job:
    first, second = factors_of(world_size)
    return Job(world_size, mesh=(("dp", first), ("tp", second)), ranks_per_host=2 if world_size < 8 else 8)


@pytest.fixture(scope="module", params=[4, 1024, 4096])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Returns ``report_of`` at each number of ranks, and that number."""
    return report_of(request.param, tmp_path_factory.mktemp("run")), request.param


@pytest.fixture(scope="module")
def one_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns ``report_of`` 256 ranks, for what does not depend on their number."""
    return report_of(256, tmp_path_factory.mktemp("run"))


def report_of(world_size: int, folder: Path) -> Path:
    """Returns the page of a run of five saves, in the last of which a rank is slow, and one load."""
    job = job_of(world_size)
    straggler = Straggler("slow_storage", (SLOW,), 4.0)
    records = [
        simulate_save(job, seed, step=10 * seed, at=1e9 + 60 * seed, straggler=straggler if seed == 5 else None)
        for seed in range(1, 6)
    ]
    records.insert(2, simulate_load(job, 9, step=20, at=1e9 + 150, reading="cooperative"))
    tensors = LargestTensors("step_50", 2, 3000, [("model.embed", "float32", "[20, 30]", 2400, 4)])
    return page_for(write_run(folder, records), folder / "report.html", tensors=tensors)


def marks_in(page: Any, chart: str) -> int:
    """Returns how many points, bars and pictures a chart has."""
    return int(page.locator(f"#{chart} :is(.point, .heatmaplayer image)").count())


def place_of(page: Any, selector: str) -> dict[str, float]:
    """Returns where an element is in the window, after it has been scrolled into it."""
    found = page.locator(selector).first
    found.scroll_into_view_if_needed()
    box: dict[str, float] = found.bounding_box()
    return box


def wait_for_text(page: Any, place: str, text: str) -> None:
    """Waits without a script in the page, which the page's own policy would refuse."""
    page.locator(place).filter(has_text=text).wait_for()


def click(page: Any, chart: str, mark: str, column: float = 0, of: int = 1) -> None:
    """Clicks the first such mark of a chart as a person does: when its numbers are shown beside the mouse.

    Of a picture of ``of`` columns it clicks the one with the number ``column``.
    """
    box = place_of(page, f"#{chart} {mark}")
    label = page.locator(f"#{chart} .hoverlayer .hovertext")
    page.mouse.move(2, 2)
    label.wait_for(state="detached")
    page.mouse.move(box["x"] + box["width"] * (column + 0.5) / of, box["y"] + box["height"] / 2)
    label.wait_for()
    page.mouse.down()
    page.mouse.up()


def test_every_chart_draws(report: tuple[Path, int], open_page: Callable[..., Any]) -> None:
    path, world_size = report
    page = open_page(path)
    for chart in CHARTS:
        assert marks_in(page, chart) > 0, chart
    assert page.locator("#troubles li").count() == 1
    assert f"rank {SLOW} on node" in page.locator("#troubles").inner_text()
    assert page.locator("#calls-table tbody tr").count() == 6
    assert page.locator("#calls-table tr.marked").count() == 1
    assert f"{world_size:,}" in page.locator("#tiles").inner_text()
    assert page.locator("#tensors-table tbody tr").inner_text().split("\t")[0] == "model.embed"


def test_a_click_on_a_rank_shows_its_numbers(report: tuple[Path, int], open_page: Callable[..., Any]) -> None:
    path, world_size = report
    page = open_page(path)
    assert page.locator("#rank-title").inner_text() == f"rank {SLOW}"  # the one that stands out is there at first
    groups = min(128, world_size)
    click(page, "heat-chart", ".heatmaplayer image", 1, groups)
    if world_size > 128:  # the column is a group, which opens
        in_group = world_size // 128
        assert page.locator("#heat-path").inner_text().endswith(f"{in_group} of {world_size:,} ranks")
        click(page, "heat-chart", ".heatmaplayer image", 1, in_group)
        wait_for_text(page, "#rank-title", f"rank {in_group + 1}")
        page.locator("#heat-back").click()
        assert "group of ranks" in page.locator("#heat-path").inner_text()
    else:
        wait_for_text(page, "#rank-title", "rank 1")
    assert {"plan", "copy", "write", "sync"} <= {*page.locator("#rank td.left").all_inner_texts()}


def test_orders_of_ranks(report: tuple[Path, int], open_page: Callable[..., Any]) -> None:
    path, world_size = report
    page = open_page(path)
    first, second = factors_of(world_size)
    for order, groups in (("host", max(world_size // 8, 2)), ("axis:0", first), ("axis:1", second)):
        button = page.locator(f'#heat-order [data-key="{order}"]')
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        shown = world_size if world_size <= 128 else min(groups, 128)
        assert f"and {shown} " in page.locator("#heat-chart").get_attribute("aria-label")


def test_the_slow_rank_is_what_glares(report: tuple[Path, int], open_page: Callable[..., Any]) -> None:
    path, world_size = report
    page = open_page(path)
    z = page.evaluate("document.getElementById('heat-chart').data[0]")
    row = z["z"][z["y"].index("write")]
    assert row.index(max(row)) == SLOW * min(128, world_size) // world_size
    assert max(row) > 1.5  # more than 2 ** 1.5 times the typical
    assert sorted(row)[-2] < 0.6


def test_keys(one_report: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(one_report)
    chosen = page.locator('#calls-table tr[aria-selected="true"]')
    chosen.focus()
    assert chosen.get_attribute("data-index") == "5"
    for key, index in (("ArrowDown", "4"), ("ArrowUp", "5"), ("End", "0"), ("Home", "5"), ("PageDown", "0")):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.dataset.index") == index, key
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.locator('#calls-table tr[aria-selected="true"]').get_attribute("data-index") == "4"
    assert page.locator("#chosen-title").inner_text().startswith("Save of step 40")
    assert page.evaluate("document.activeElement.dataset.index") == "4"
    # The panel of a rank goes to the next one, and keeps the focus.
    page.locator("#rank-after").focus()
    before = page.locator("#rank-title").inner_text()
    page.keyboard.press("Enter")
    assert page.locator("#rank-title").inner_text() != before
    assert page.evaluate("document.activeElement.id") == "rank-after"


def test_tab_reaches_everything_in_order(one_report: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(one_report)
    page.evaluate("document.body.focus()")
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate(
                "document.activeElement.closest('#theme, #troubles, #trend-choice, #heat-order, #heat-colour, #rank')"
                "?.id ?? document.activeElement.closest('thead, tbody')?.tagName ?? document.activeElement.className"
            )
        )
    order = list(dict.fromkeys(each for each in seen if each))
    wanted = ["skip", "theme", "troubles", "trend-choice", "THEAD", "TBODY", "heat-order", "heat-colour", "rank"]
    assert [each for each in order if each in wanted] == wanted
    assert seen.count("TBODY") == 1  # one row, from which arrow keys go on


def test_no_button_of_a_chart_sends_it_anywhere(one_report: Path, open_page: Callable[..., Any]) -> None:
    """plotly has a button that shares a chart with a server of its maker; and may get others like it."""
    page = open_page(one_report)
    opened: list[Any] = []
    page.context.on("page", lambda other: opened.append(other))
    for chart in CHARTS:
        buttons = page.locator(f"#{chart} .modebar-btn")
        titles = [buttons.nth(at).get_attribute("data-title") for at in range(buttons.count())]
        assert titles == ["Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"]
        for title in titles:
            page.locator(f'#{chart} [data-title="{title}"]').dispatch_event("click")
        assert page.evaluate(f"document.getElementById('{chart}')._context.plotlyServerURL") == ""
    assert opened == []


def test_sorting(one_report: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(one_report)

    def order() -> list[int]:
        rows = page.locator("#calls-table tbody tr")
        return [int(rows.nth(at).get_attribute("data-index")) for at in range(rows.count())]

    assert order() == [5, 4, 3, 2, 1, 0]
    page.locator('[data-key="total_s"]').click()
    assert order()[0] == 5
    took = page.evaluate("calls.map((call) => call.report.total_s)")
    assert order() == sorted(range(6), key=lambda index: -took[index])
    page.locator('[data-key="total_s"]').click()
    assert order() == sorted(range(6), key=lambda index: took[index])
    assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"


def test_dark_and_light(one_report: Path, open_page: Callable[..., Any]) -> None:
    ink = "getComputedStyle(document.body).color"
    drawn = "document.querySelector('#heat-chart .xtitle').style.fill"
    light, dark = open_page(one_report, color_scheme="light"), open_page(one_report, color_scheme="dark")
    assert light.evaluate(ink) != dark.evaluate(ink)
    assert light.evaluate(drawn) != dark.evaluate(drawn)
    light.locator("#theme").click()
    assert light.evaluate(ink) == dark.evaluate(ink)
    assert light.evaluate(drawn) == dark.evaluate(drawn)
    dark.locator("#theme").click()
    assert light.evaluate(ink) != dark.evaluate(ink)


def test_a_reload_shows_the_same(one_report: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(one_report)
    page.locator('#calls-table tr[data-index="1"]').click()
    page.locator("#rank-number").fill("2")
    page.locator("#rank-number").press("Enter")
    again = open_page(one_report, fragment=page.evaluate("location.hash"))
    for place in ("#chosen-title", "#rank-title"):
        assert again.locator(place).inner_text() == page.locator(place).inner_text()
    assert again.locator("#rank-title").inner_text() == "rank 2"


def test_trends(one_report: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(one_report)
    page.locator('#trend-choice [data-key="throughput"]').click()
    assert re.search(r"fastest save \d[\d.]* GB/s", page.locator("#trend-chart .legend").text_content())
    assert page.locator("#trend-note").inner_text() == "Dashed: the fastest save and load of the run."
    page.locator('#trend-choice [data-key="size"]').click()
    assert marks_in(page, "trend-chart") == 5
    page.locator('#trend-choice [data-key="seconds"]').click()
    click(page, "trend-chart", ".scatterlayer .point")
    wait_for_text(page, "#chosen-title", "Save of step 10,")


def test_the_buttons_of_a_chart_leave_its_legend_free(one_report: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(one_report)
    for chart in ("trend-chart", "timeline-chart", "sizes-chart"):
        legend = place_of(page, f"#{chart} .legend .bg")
        buttons = page.locator(f"#{chart} .modebar").bounding_box()
        assert legend["width"] > 0
        assert buttons["height"] > 0
        assert buttons["y"] + buttons["height"] <= legend["y"], chart


def test_small_sizes_have_small_units_and_one_is_one(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    """Two parts of one save, of some kB, and one load."""
    job = Job(1, bytes_per_rank=200e3, disk_bytes_per_s=1e6)
    record = simulate_save(job, 1, step=10)
    records = [{**record, "path": f"step_10/{part}", "save_id": part} for part in ("optimizer", "model")]
    records.append(simulate_load(job, 2, at=2e9, step=10))
    page = open_page(page_for(write_run(tmp_path / "run", records), tmp_path / "report.html"))
    assert ": 1 save, 1 load, " in page.locator("#about").inner_text()
    assert page.locator('#calls-table tr[data-index="1"]').inner_text().split("\t")[5].endswith(" kB")
    page.locator('#calls-table tr[data-index="1"]').click()
    wait_for_text(page, "#chosen-title", "Save of step 10 (model),")
    page.locator('#trend-choice [data-key="size"]').click()
    assert page.locator("#trend-chart .ytitle").text_content() == "kB"
    page.locator('#trend-choice [data-key="throughput"]').click()
    assert page.locator("#trend-chart .ytitle").text_content() in ("kB/s", "MB/s")
    assert re.search(r"fastest save \d[\d.]* [kM]B/s", page.locator("#trend-chart .legend").text_content())
    assert page.locator("#bytes-chart .ytitle").text_content() == "kB"
    for chart in CHARTS:
        assert "\N{MICRO SIGN}" not in "".join(page.locator(f"#{chart} .ytick").all_text_contents()), chart


def test_a_browser_that_cannot_unpack_says_so(one_report: Path, browser: Any) -> None:
    page = browser.new_page()
    page.add_init_script("delete window.DecompressionStream")
    page.goto(f"file://{one_report}")
    assert "too old" in page.locator("#problem").inner_text()
    page.close()


HOSTILE = "</script><img src=x onerror=alert(1)><a href='javascript:alert(1)'>x</a>\x1b[31m\u202e%{x}\"'&lt;b&gt;"


def test_hostile_text_stays_text(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    """Every text of the journal is markup. It is shown letter by letter, and nothing of it runs."""
    record = simulate_save(job_of(4), 1, straggler=Straggler("slow_storage", (SLOW,), 4.0))
    record["path"] = record["save_id"] = HOSTILE
    record["step"] = None
    record["hosts"] = [HOSTILE] * len(record["hosts"])
    record["report"]["warnings"] = [HOSTILE]
    record["report"]["plan"]["cache"] = HOSTILE
    record["report"][HOSTILE] = HOSTILE
    record["ranks"]["phases"][HOSTILE] = [0.1, 0.2, 3.0, 0.1]
    record["sizes"][HOSTILE] = record["sizes"]["copy"]
    record["mesh"]["names"] = [HOSTILE, "__proto__"]
    record["versions"] = {HOSTILE: HOSTILE}
    for of_rank in record["timelines"].values():
        of_rank["lanes"][0]["name"] = HOSTILE
        of_rank["lanes"][0]["spans"][0][0] = HOSTILE
    run = write_run(tmp_path / "<b>run", [record])
    tensors = LargestTensors(HOSTILE, 1, 1, [(HOSTILE, HOSTILE, "[1]", 1, 1)])
    page = open_page(page_for(run, tmp_path / "report.html", tensors=tensors))
    assert page.locator("img, a:not(.skip), a[href^='javascript']").count() == 0
    assert page.locator("#chart a, .chart svg a").count() == 0
    text = page.locator("body").inner_text()
    shown = HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert text.count(shown) >= 6
    assert "\u202e" not in text
    assert "\x1b" not in text
    assert shown[:18] in "".join(page.locator("#heat-chart .ytick").all_text_contents())
    page.locator('#heat-order [data-key="axis:0"]').click()
    page.locator('#heat-order [data-key="host"]').click()
    for chart in ("heat-chart", "timeline-chart", "sizes-chart", "trend-chart"):
        box = place_of(page, f"#{chart} .nsewdrag")
        for part in (0.2, 0.5, 0.8):
            page.mouse.move(box["x"] + box["width"] * part, box["y"] + box["height"] * 0.5)
    assert page.locator("img, .chart svg a").count() == 0


def test_what_is_on_disk(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    """Steps 30 and 40 are there, and share 2 GB; that of step 10 is gone; step 5 is of no save in the journal."""
    records = [simulate_save(job_of(4), 1, step=step, at=1e9 + step) for step in (10, 30, 40)]
    run = write_run(tmp_path / "run", records)
    for step in (30, 40):
        (run / f"step_{step}").mkdir()
        (run / f"step_{step}" / ".metadata").touch()
    steps = [
        StepSpace("step_5", 5, 1_000_000_000, 0, 0, is_readable=False),
        StepSpace("step_30", 30, 3_000_000_000, 2_000_000_000, 1_500_000_000, is_readable=True),
        StepSpace("step_40", 40, 3_000_000_000, 2_000_000_000, 0, is_readable=True),
    ]
    space = Space(9_000_000_000, 2_000_000_000, steps)
    page = open_page(page_for(run, tmp_path / "report.html", space=space))
    note = page.locator("#space-note").inner_text()
    assert note.startswith("3 steps take 9.00 GB on disk; hard links between steps save 2.00 GB.")
    for words in (
        "1 of the 3 checkpoints that these saves made is no longer",
        "1.50 GB are in files",
        "1 step could not",
    ):
        assert words in note
    legend = page.locator("#space-chart .legendtext").all_text_contents()
    assert legend == ["of its own", "shared by hard links", "in files that no commit mark names", "removed"]
    assert marks_in(page, "space-chart") == 3 + 2 + 1 + 1
    page = open_page(page_for(run, tmp_path / "without.html", space=None))
    assert page.locator("#space-note").inner_text().startswith("1 of the 3 checkpoints")


def test_records_without_something(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    records = []
    for at, missing in enumerate(("ranks", "timelines", "sizes", "report", "mesh", "hosts", "config", "phases")):
        record = simulate_save(job_of(4), 1, step=at, at=1e9 + at)
        del (record["ranks"] if missing == "phases" else record)[missing]
        records.append(record)
    page = open_page(page_for(write_run(tmp_path / "run", records), tmp_path / "report.html"))
    for step in range(len(records)):
        page.locator(f'#calls-table tr[data-index="{step}"]').click()
        assert page.locator("#chosen-title").inner_text().startswith(f"Save of step {step},")
        assert marks_in(page, "heat-chart") == (0 if step == 0 else 1)
    assert page.locator("#problem").is_hidden()
