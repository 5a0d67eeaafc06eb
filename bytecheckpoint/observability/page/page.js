// The page: what is chosen, the tables, the panel of a rank, and keys.

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const state = { call: -1, unit: null, within: null, order: "rank", colour: "ratio", timeline: "some", trend: "seconds", sort: "at", down: true };
let data = null, calls = [];

const when = (call) => new Date(call.at * 1000).toISOString().slice(0, 19).replace("T", " ");
const COLUMNS = [
  { key: "at", name: "UTC", left: true, of: (call) => call.at, text: when },
  { key: "kind", name: "what", left: true, of: (call) => call.kind, text: (call) => (call.is_async ? "async save" : call.kind) },
  { key: "step", name: "step", of: (call) => call.step, text: (call) => (call.step === null ? "" : count(call.step)) },
  { key: "path", name: "path", left: true, of: (call) => call.path, text: (call) => call.path ?? "", class: "name" },
  { key: "world_size", name: "ranks", of: (call) => call.world_size, text: (call) => (call.world_size === null ? "" : count(call.world_size)) },
  { key: "bytes", name: "size", of: (call) => call.totalBytes, text: (call) => bytes(call.totalBytes) },
  { key: "total_s", name: "took", of: (call) => call.figure("total_s"), text: (call) => seconds(call.figure("total_s")) },
  { key: "blocked_s", name: "blocked", of: (call) => call.figure("blocked_s"), text: (call) => seconds(call.figure("blocked_s")) },
  { key: "gb_per_s", name: "rate", of: (call) => call.figure("gb_per_s"), text: (call) => rate(call.figure("gb_per_s")) },
  { key: "balance", name: "balance", of: (call) => call.figure("balance"), text: (call) => call.figure("balance")?.toFixed(2) ?? "" },
  { key: "commit_s", name: "commit", of: (call) => call.figure("commit_s"), text: (call) => seconds(call.figure("commit_s")) },
  { key: "findings", name: "findings", left: true, of: (call) => call.findings.reduce((sum, each) => sum + each.seconds, 0), text: (call) => call.findings.map(shortly).join("; "), class: "mark" },
];

const kindText = (kind) => ({ more_bytes: "more bytes", slow_storage: "slow storage", slow_memory: "slow memory", slow_cpu: "slow processor", late_arrival: "late", shared_reading: "slow reader", unexplained: "late for no reason that is known", coordinator_phase: "coordinator", slower_than_before: "slower than before", rate_limit: "limit" })[kind] ?? String(kind).replace(/_/g, " ");
const shortly = (finding) => `${finding.rank === null || finding.kind === "coordinator_phase" ? (finding.host ?? "") : `rank ${finding.rank}`} ${kindText(finding.kind)}${finding.kind === "coordinator_phase" ? ` ${finding.phase}` : ""}`.trim();

function choice(id, options, chosen, pick) {
  document.getElementById(id).replaceChildren(...Object.entries(options).map(([key, name]) =>
    el("button", { type: "button", "aria-pressed": String(key === chosen), "data-key": key, onclick: () => {
      pick(key);
      document.getElementById(id).querySelector('[aria-pressed="true"]')?.focus();
    } }, name)));
}

function showHead() {
  document.title = `Checkpoints of ${data.run}`;
  document.getElementById("run").textContent = data.run;
  const span = calls.length ? `, ${when(calls[0])} to ${when(calls[calls.length - 1])} UTC` : "";
  const skipped = data.skipped ? `; ${counted(data.skipped, "line")} of the journal could not be read` : "";
  document.getElementById("about").textContent = `${data.path}: ${counted(data.num_saves, "save")}, ${counted(data.num_loads, "load")}${span}${skipped}`;
  const versions = Object.entries(data.versions ?? {}).map(([name, version]) => `${name} ${version}`).join(", ");
  document.getElementById("made").textContent = `Made by bcp report. ${versions}`;
}

function showTroubles() {
  const list = document.getElementById("troubles");
  const failed = data.failures.map((text) => el("li", { class: "failed" }, el("div", { class: "words" }, el("p", {}, text))));
  if (data.num_failures > failed.length) failed.push(el("li", {}, `and ${count(data.num_failures - failed.length)} more that failed; bcp why lists them all`));
  if (!data.troubles.length && !failed.length) {
    list.replaceChildren(el("li", { class: "fine" }, "Nothing stands out: no rank, no host and no phase cost these calls much time."));
    return;
  }
  const made = data.troubles.map((trouble) => el("li", {},
    el("div", { class: "cost" }, el("b", {}, trouble.all_s ? seconds(trouble.all_s) : "–"), el("span", { class: "quiet" }, trouble.how_often)),
    el("div", { class: "words" }, el("p", {}, trouble.text), trouble.advice ? el("p", { class: "quiet" }, trouble.advice) : null),
    el("button", { type: "button", "aria-label": `Show the call: ${trouble.text}`, onclick: () => {
      choose(trouble.worst, trouble.rank);
      document.getElementById("chosen").scrollIntoView();
      document.getElementById("chosen").focus({ preventScroll: true });
    } }, "Show")));
  if (data.num_troubles > made.length) made.push(el("li", {}, `and ${count(data.num_troubles - made.length)} more, which cost less`));
  list.replaceChildren(...failed, ...made);
}

function showTable() {
  const table = document.getElementById("calls-table");
  table.tHead.replaceChildren(el("tr", {}, ...COLUMNS.map((column) => el("th", {
    class: column.left ? "left" : null, scope: "col", "aria-sort": column.key === state.sort ? (state.down ? "descending" : "ascending") : null,
  }, el("button", { type: "button", "data-key": column.key, onclick: () => {
    state.down = state.sort === column.key ? !state.down : true;
    state.sort = column.key;
    showTable();
    table.tHead.querySelector(`[data-key="${column.key}"]`).focus();
  } }, column.name, column.key === state.sort ? (state.down ? " ▾" : " ▴") : "")))));
  const value = COLUMNS.find((column) => column.key === state.sort).of;
  const order = (a, b) => {
    const [first, second] = [value(a), value(b)];
    if (first === second) return a.index - b.index;
    if (first === null || second === null) return first === null ? -1 : 1;
    return first < second ? -1 : 1;
  };
  const sorted = [...calls].sort(order);
  if (state.down) sorted.reverse();
  table.tBodies[0].replaceChildren(...sorted.map((call) => el("tr", {
    "data-index": call.index, class: call.findings.length ? "marked" : null, "aria-selected": String(call.index === state.call),
    tabindex: call.index === state.call ? 0 : -1, onclick: () => choose(call.index), title: call.findings.map((each) => each.text).join("\n") || null,
  }, ...COLUMNS.map((column) => el("td", { class: [column.left ? "left" : "", column.class ?? ""].join(" ").trim() || null }, column.text(call))))));
}

function tableKeys(event) {
  const row = event.target.closest("tr[data-index]");
  if (!row) return;
  const rows = [...row.parentNode.children], at = rows.indexOf(row);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1, PageDown: at + 10, PageUp: at - 10 }[event.key];
  if (to !== undefined) {
    const next = rows[Math.min(Math.max(to, 0), rows.length - 1)];
    row.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  } else if (event.key === "Enter" || event.key === " ") choose(Number(row.dataset.index));
  else return;
  event.preventDefault();
}

function showTiles(call) {
  const report = (name) => call.figure(name);
  const ended = call.column("ended_s");
  const tiles = [
    ["took", seconds(report("total_s"))],
    ["training stood still", call.is_async ? seconds(report("blocked_s")) : null],
    ["size", bytes(call.totalBytes)],
    ["rate", rate(report("gb_per_s"))],
    ["ranks", call.world_size === null ? null : count(call.world_size)],
    ["balance", report("balance")?.toFixed(2)],
    ["plan cache", call.report.plan?.cache],
    ["reading", call.report.reading],
    ["commit", seconds(report("commit_s"))],
    ["sweep", report("sweep_s") ? seconds(report("sweep_s")) : null],
    ["last rank ended", ended ? seconds(Math.max(...ended)) : null],
  ].filter(([, text]) => text);
  document.getElementById("tiles").replaceChildren(...tiles.map(([name, text]) => el("div", { class: "tile" }, el("span", { class: "quiet" }, name), el("b", {}, text))));
  document.getElementById("findings").replaceChildren(...call.findings.map((finding) => el("li", {}, finding.text, finding.advice ? el("span", { class: "quiet" }, ` ${finding.advice}`) : null)));
}

function showRank(call) {
  const panel = document.getElementById("rank");
  if (!call.num) return panel.replaceChildren(el("p", { class: "quiet" }, "No figures of ranks."));
  const unit = state.unit ?? call.slowest;
  const input = el("input", { id: "rank-number", type: "number", min: 0, value: call.rankOf(unit), "aria-label": "Rank to show", onchange: () => {
    const found = call.unitOf(Number(input.value));
    if (found >= 0) select(found, "rank-number");
  } });
  const step = (by) => select((unit + by + call.num) % call.num, by < 0 ? "rank-before" : "rank-after");
  const value = (name) => call.column(name)?.[unit];
  const facts = [
    ["host", call.hostOf(unit)],
    ["mesh", call.axes.map((axis) => `${axis.name} ${call.coordinate(unit, axis.axis)}`).join(", ")],
    ["bytes", bytes(value("num_bytes"))],
    ["received", bytes(value("bytes_received"))],
    ["records", value("num_records") === undefined ? "" : count(Math.round(value("num_records")))],
    ["arrived", value("arrived_s") === undefined ? "" : `${seconds(value("arrived_s"))}${value("clock_error_s") > 0 ? ` ± ${seconds(value("clock_error_s"))}` : value("clock_error_s") < 0 ? ", by a clock that was not compared" : ""}`],
    ["ended", seconds(value("ended_s"))],
  ].filter(([, text]) => text);
  const longest = Math.max(...call.phases.map((phase) => call.phase(phase)[unit]), 1e-9);
  const rows = call.phases.filter((phase) => call.phase(phase)[unit] > 0).map((phase) => {
    const own = call.phase(phase)[unit], usual = call.typicalOf("phases", phase);
    const isMuch = usual > 0 && own >= 1.5 * usual && own - usual >= 0.02 * (call.figure("total_s") ?? 0);
    const meter = el("span", { class: isMuch && !WAITING.has(phase) ? "much" : null });
    meter.style.width = `${Math.max(1, (own / longest) * 100)}%`;
    return el("tr", {}, el("td", { class: "left", title: known(phase)?.[1] }, phase), el("td", {}, seconds(own)), el("td", {}, usual > 0 ? ratio(own / usual) : ""), el("td", { class: "meter" }, meter));
  });
  panel.replaceChildren(
    el("div", { class: "go" }, el("h3", { id: "rank-title" }, call.nameOf(unit)), el("button", { type: "button", id: "rank-before", "aria-label": "The rank before", onclick: () => step(-1) }, "‹"), input,
      el("button", { type: "button", id: "rank-after", "aria-label": "The next rank", onclick: () => step(1) }, "›"), el("button", { type: "button", id: "rank-slowest", onclick: () => select(call.slowest, "rank-slowest") }, "last to end")),
    el("p", { class: "quiet" }, facts.map(([name, text]) => `${name} ${text}`).join(" · ")),
    el("table", {}, el("thead", {}, el("tr", {}, el("th", { class: "left" }, "phase"), el("th", {}, "busy"), el("th", {}, "of typical"), el("th", {}, ""))), el("tbody", {}, ...rows)),
    call.isBlocks ? el("p", { class: "quiet" }, "This page has single ranks of the newest calls and of those with findings. Of this call it has the largest figures of each block of ranks; bcp report --last or --since makes a page with fewer calls.") : "");
}

function showHeatPath(call) {
  const place = document.getElementById("heat-path");
  if (!state.within) {
    const isGrouped = call.num > MOST_COLUMNS;
    return place.replaceChildren(isGrouped ? "Each column is a group of ranks with its largest figures. A click opens it." : "A click shows a rank.");
  }
  place.replaceChildren(el("button", { type: "button", id: "heat-back", onclick: () => { state.within = null; showRanks(); document.getElementById("heat-chart").focus(); } }, "‹ all ranks"), ` ${count(state.within.length)} of ${count(call.num)} ranks`);
}

function showRanks() {
  const call = calls[state.call];
  const orders = { rank: "by rank", ...(call.ranks.host && call.ranks.hosts.length > 1 ? { host: "by host" } : {}) };
  for (const axis of call.axes) if (axis.size > 1) orders[`axis:${axis.axis}`] = `by ${axis.name}`;
  if (!Object.hasOwn(orders, state.order)) state.order = "rank";
  choice("heat-order", orders, state.order, (order) => { state.order = order; state.within = null; showRanks(); });
  choice("heat-colour", { ratio: "against typical", seconds: "seconds" }, state.colour, (colour) => { state.colour = colour; showRanks(); });
  showHeatPath(call);
  drawHeat(call, state, (group) => {
    if (group.units.length > 1) { state.within = group.units; showRanks(); }
    else select(group.units[0]);
  });
  showRank(call);
}

function showTimeline() {
  const call = calls[state.call];
  const num = Object.keys(call.timelines).length;
  const options = num > 3 ? { some: "slowest, median, fastest", all: `all ${num} recorded`, phases: "phases" } : num ? { some: "lanes", phases: "phases" } : {};
  choice("timeline-choice", options, Object.hasOwn(options, state.timeline) ? state.timeline : "some", (which) => { state.timeline = which; showTimeline(); });
  drawTimeline(call, state);
}

// A group of ranks is opened, a rank is selected, a call is chosen.
function select(unit, focus) {
  state.unit = unit;
  if (state.within && !state.within.includes(unit)) state.within = null;
  remember();
  showRanks();
  showTimeline();
  if (focus) document.getElementById(focus)?.focus();
}

function choose(index, rank = null) {
  const call = calls[index];
  state.call = index;
  state.within = null;
  const unit = rank === null ? -1 : call.unitOf(rank);
  state.unit = unit >= 0 ? unit : null;
  const named = call.findings.find((finding) => finding.rank !== null);
  if (state.unit === null && named && call.unitOf(named.rank) >= 0) state.unit = call.unitOf(named.rank);
  remember();
  for (const row of document.querySelectorAll("#calls-table tbody tr")) {
    const isChosen = Number(row.dataset.index) === index;
    row.setAttribute("aria-selected", String(isChosen));
    row.tabIndex = isChosen ? 0 : -1;
  }
  document.getElementById("chosen-title").textContent = `${call.title}, ${when(call)} UTC`;
  showTiles(call);
  if (!window.Plotly) return showRank(call);
  const pick = (units) => { if (units.length > 1) { state.within = units; showRanks(); } else select(units[0]); };
  showRanks();
  showTimeline();
  drawDistribution("bytes-chart", call, "num_bytes", call.kind === "save" ? "Bytes written by a rank" : "Bytes read by a rank", bytes, pick);
  drawDistribution("ended-chart", call, "ended_s", "When a rank had done its part", seconds, pick);
  drawSizes(call);
}

function showTrend() {
  choice("trend-choice", TRENDS, state.trend, (what) => { state.trend = what; showTrend(); });
  drawTrend(data, calls, state.trend, choose);
}

function showTensors() {
  document.getElementById("tensors").hidden = !data.tensors;
  if (!data.tensors) return;
  const { path, num_tensors: num, num_bytes: size, rows } = data.tensors;
  document.getElementById("tensors-note").textContent = `${path}: ${counted(num, "tensor")}, ${bytes(size)}; the ${rows.length === 1 ? "" : `${count(rows.length)} `}largest:`;
  const cell = (text, left) => el("td", { class: left ? "left name" : null }, text);
  document.getElementById("tensors-table").replaceChildren(
    el("thead", {}, el("tr", {}, ...["name", "dtype", "shape", "size", "shards", "of all"].map((name, at) => el("th", { class: at < 3 ? "left" : null, scope: "col" }, name)))),
    el("tbody", {}, ...rows.map(([name, dtype, shape, own, shards]) => el("tr", {}, cell(name, true), cell(dtype, true), cell(shape, true), cell(bytes(own)), cell(count(shards)), cell(size ? percent(own / size) : "")))));
}

// The choice is kept in the address, so that a reload shows the same.
function remember() {
  const call = calls[state.call];
  const rank = state.unit === null ? "" : `&rank=${call.rankOf(state.unit)}`;
  history.replaceState(null, "", `#at=${call.at}${rank}`);
}

function recalled() {
  const given = new URLSearchParams(location.hash.slice(1));
  const index = calls.findIndex((call) => String(call.at) === given.get("at"));
  const rank = given.get("rank");
  return index < 0 ? [calls.length - 1] : [index, rank === null || rank === "" ? null : Number(rank)];
}

function drawAll() {
  showTrend();
  drawSpace(data, calls);
  if (state.call >= 0) choose(state.call, state.unit === null ? null : calls[state.call].rankOf(state.unit));
}

function themeSwitch() {
  const button = document.getElementById("theme"), dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
  const show = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
    if (window.Plotly) drawAll();
  };
  button.addEventListener("click", () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; show(); });
  dark.addEventListener("change", show);
  show();
}

function fail(text) {
  const place = document.getElementById("problem");
  place.textContent = text;
  place.hidden = false;
}

async function begin() {
  if (typeof DecompressionStream === "undefined") {
    return fail("This browser is too old for this page: it cannot unpack compressed data (DecompressionStream). Any browser from 2023 on can. bcp report RUN --json prints the same figures.");
  }
  data = JSON.parse(await unpack("data"));
  calls = data.calls.map((call, index) => new Call(call, index));
  showHead();
  showTroubles();
  showTensors();
  document.getElementById("calls-table").tBodies[0].addEventListener("keydown", tableKeys);
  if (calls.length) {
    [state.call] = recalled();
    showTable();
    choose(...recalled());
  } else document.getElementById("chosen").hidden = true;
  themeSwitch();
  const script = el("script");
  script.textContent = await unpack("plotly");
  document.head.append(script);
  if (!window.Plotly) return fail("The charts could not be loaded: the script of plotly did not run.");
  drawAll();
  document.documentElement.dataset.ready = "yes";
  if (data.reload_s > 0) setTimeout(() => location.reload(), data.reload_s * 1000);
}

begin().catch((error) => fail(`This page could not be shown: ${error.message}`));
