// Charts of the ranks of one call.

const MOST_COLUMNS = 128;

function chunks(list, size) {
  const found = [];
  for (let at = 0; at < list.length; at += size) found.push(list.slice(at, at + size));
  return found;
}

function keyOf(call, order, unit) {
  if (order === "host") return call.ranks.host ? call.ranks.host[unit] : 0;
  if (order.startsWith("axis:")) return call.coordinate(unit, Number(order.slice(5)));
  return 0;
}

function keyName(call, order, unit) {
  if (order === "host") return call.hostOf(unit) ?? "";
  if (order.startsWith("axis:")) {
    const axis = Number(order.slice(5));
    return `${call.mesh.names[axis]} ${call.coordinate(unit, axis)}`;
  }
  return "";
}

// The columns of the heat map: single ranks if there are few, else groups of them, which a click opens.
function groupsOf(call, order, within) {
  const key = (unit) => keyOf(call, order, unit);
  const units = [...within].sort((a, b) => key(a) - key(b) || a - b);
  const atoms = [];
  for (const unit of units) {
    const last = atoms[atoms.length - 1];
    if (last && key(last[0]) === key(unit)) last.push(unit);
    else atoms.push([unit]);
  }
  const named = (atom) => keyName(call, order, atom[0]);
  if (units.length <= MOST_COLUMNS) {
    return units.map((unit) => ({ units: [unit], label: call.nameOf(unit), of: keyName(call, order, unit) || call.hostOf(unit) || "" }));
  }
  if (atoms.length === 1) {
    return chunks(units, Math.ceil(units.length / MOST_COLUMNS)).map((some) => ({
      units: some,
      label: `ranks ${call.rankOf(some[0])}–${call.rankOf(some[some.length - 1])}`,
      of: named(some),
    }));
  }
  return chunks(atoms, Math.ceil(atoms.length / MOST_COLUMNS)).map((some) => ({
    units: some.flat(),
    label: some.length === 1 ? named(some[0]) : `${named(some[0])} – ${named(some[some.length - 1])}`,
    of: "",
  }));
}

function heatRows(call, colour) {
  const isAlone = (name) => call.typicalOf("phases", name) === 0 && call.phase(name).filter((value) => value > 0).length <= 1;
  const phases = call.phases.filter((name) => colour === "seconds" || !isAlone(name));
  const rows = [
    ...phases.filter((name) => !WAITING.has(name)).map((name) => ({ kind: "phases", name, label: name })),
    ...phases.filter((name) => WAITING.has(name)).map((name) => ({ kind: "phases", name, label: `${name} (waits)` })),
  ];
  if (colour === "ratio") {
    if (call.column("num_bytes")) rows.unshift({ kind: "columns", name: "num_bytes", label: "bytes" });
    if (call.column("ended_s")) rows.push({ kind: "columns", name: "ended_s", label: "ended" });
  }
  return rows.reverse();  // plotly draws the first row at the bottom
}

// How many times the typical seconds. What is short beside the call is drawn towards 1, so that it does not glare.
function againstTypical(call, row, value) {
  const usual = call.typicalOf(row.kind, row.name);
  const damp = row.kind === "phases" ? 0.01 * (call.figure("total_s") ?? 0) + 1e-4 : 1e-9;
  return (value + damp) / (usual + damp);
}

const heatText = (row, value) => (row.name === "num_bytes" ? bytes(value) : seconds(value));

function drawHeat(call, state, open) {
  const within = state.within ?? [...Array(call.num).keys()];
  const groups = groupsOf(call, state.order, within);
  const rows = heatRows(call, state.colour);
  const isRatio = state.colour === "ratio";
  const z = [], text = [];
  for (const row of rows) {
    const values = call.unpacked(row.kind, row.name);
    const usual = call.typicalOf(row.kind, row.name);
    const ofRow = [], textOfRow = [];
    for (const group of groups) {
      let worst = group.units[0];
      for (const unit of group.units) if (values[unit] > values[worst]) worst = unit;
      const value = values[worst];
      ofRow.push(isRatio ? Math.log2(Math.max(againstTypical(call, row, value), 1 / 64)) : value);
      const who = group.units.length > 1 ? `<b>${plain(group.label)}</b>, ${count(group.units.length)} ranks<br>most: ${plain(call.nameOf(worst))}` : `<b>${plain(call.nameOf(worst))}</b>`;
      const host = call.hostOf(worst);
      const times = usual > 0 ? `, ${ratio(value / usual)} the typical ${heatText(row, usual)}` : "";
      textOfRow.push(`${who}${host === null ? "" : ` on ${plain(host)}`}<br>${plain(row.name)}: ${heatText(row, value)}${times}`);
    }
    z.push(ofRow);
    text.push(textOfRow);
  }
  const isDark = style("--back").startsWith("#0");
  const middle = isDark ? "#232a33" : "#f1f3f5";
  const scale = isRatio
    ? { zmin: -2, zmax: 2, colorscale: [[0, "#2f6fd0"], [0.5, middle], [0.62, middle], [0.8, "#f0883e"], [1, "#c11d1d"]] }
    : { zmin: 0, colorscale: [[0, middle], [0.5, "#f0883e"], [1, "#c11d1d"]] };
  const every = Math.max(1, Math.ceil(groups.length / (groups.some((group) => group.units.length > 1) ? 8 : 16)));
  const ticks = [...groups.keys()].filter((at) => at % every === 0);
  const short = (label) => plain(label.replace(/^ranks? /, "").slice(0, 18));
  const borders = [...groups.keys()].filter((at) => at && groups[at].units.length === 1 && state.order !== "rank" && groups[at].of !== groups[at - 1].of);
  const selected = groups.findIndex((group) => group.units.includes(state.unit));
  const shapes = borders.map((at) => ({ type: "line", x0: at - 0.5, x1: at - 0.5, yref: "paper", y0: 0, y1: 1, line: { color: style("--quiet"), width: 1 } }));
  if (selected >= 0 && groups.length <= 40) shapes.push({ type: "rect", x0: selected - 0.5, x1: selected + 0.5, yref: "paper", y0: 0, y1: 1, line: { color: style("--accent"), width: 2 } });
  const pointer = { x: selected, yref: "paper", y: 1, yanchor: "bottom", text: "▼", showarrow: false, font: { color: style("--accent"), size: 12 } };
  const trace = {
    type: "heatmap", z, text, hoverinfo: "text", x: [...groups.keys()], y: rows.map((row) => plain(row.label)), ...scale,
    xgap: groups.length <= 64 ? 1 : 0, ygap: 1,
    colorbar: isRatio
      ? { thickness: 10, tickvals: [-2, -1, 0, 1, 2], ticktext: ["¼×", "½×", "typical", "2×", "4×"] }
      : { thickness: 10, ticksuffix: " s" },
  };
  const what = call.isBlocks ? "blocks of ranks" : groups.some((group) => group.units.length > 1) ? "groups of ranks" : "ranks";
  const more = {
    height: 24 * rows.length + 90,
    margin: { l: 110, r: 10, t: 18, b: 50 },
    annotations: selected >= 0 ? [pointer] : [],
    xaxis: { tickvals: ticks, ticktext: ticks.map((at) => short(groups[at].label)), tickangle: 0, showgrid: false, title: { text: what }, range: [-0.5, groups.length - 0.5] },
    yaxis: { showgrid: false, fixedrange: true },
    shapes,
  };
  draw("heat-chart", rows.length ? [trace] : [], more, rows.length ? `Heat map of ${counted(rows.length, "row")} and ${count(groups.length)} ${groups.length === 1 ? "column" : what}` : "This record has no figures of ranks.",
    (point) => open(groups[point.x]));
}

function spansAsBars(rows, height) {
  // Each row is {label, spans: [[phase, begin_s, length_s, text]]}.
  const byPhase = new Map();
  rows.forEach((row) => {
    for (const [phase, begin, length, text] of row.spans) {
      if (!byPhase.has(phase)) byPhase.set(phase, { x: [], base: [], y: [], text: [] });
      const of = byPhase.get(phase);
      of.x.push(length); of.base.push(begin); of.y.push(row.label); of.text.push(text);
    }
  });
  return [...byPhase].map(([phase, of]) => ({
    type: "bar", orientation: "h", name: plain(phase), ...of, hoverinfo: "text", textposition: "none",
    marker: { color: colourOf(phase), line: { width: 0 } }, width: height,
  }));
}

function laneRows(call, ranks) {
  const rows = [];
  for (const rank of ranks) {
    for (const [lane, spans] of call.timelines[rank]) {
      const label = plain(`rank ${rank} · ${lane}`);
      rows.push({
        label,
        spans: spans.map(([phase, begin, length, busy, num, size]) => [
          phase, begin / 1e6, length / 1e6,
          `<b>${label}</b><br>${plain(phase)}: ${seconds(length / 1e6)} from ${seconds(begin / 1e6)}<br>busy ${seconds(busy / 1e6)}, ${counted(num, "time")}${size ? `, ${bytes(size)}` : ""}`,
        ]),
      });
    }
  }
  return rows;
}

// Busy seconds of each phase end to end, where no lanes were recorded: how much, not when.
function phaseRows(call, units) {
  return units.map((unit) => {
    const label = plain(call.nameOf(unit));
    let begin = 0;
    const spans = [];
    for (const phase of call.phases) {
      const length = call.phase(phase)[unit];
      if (length > 0) spans.push([phase, begin, length, `<b>${label}</b><br>${plain(phase)}: ${seconds(length)}`]);
      begin += length;
    }
    return { label, spans };
  });
}

function timelineRanks(call, which, unit) {
  const recorded = Object.keys(call.timelines).map(Number).sort((a, b) => a - b);
  const ended = call.column("ended_s");
  if (which === "all" || recorded.length <= 3 || !ended) return recorded;
  const end = (rank) => ended[call.unitOf(rank)] ?? 0;
  const byEnd = [...recorded].sort((a, b) => end(a) - end(b));
  const own = unit === null ? [] : recorded.filter((rank) => call.unitOf(rank) === unit);
  const chosen = [...own, byEnd[byEnd.length - 1], byEnd[byEnd.length >> 1], byEnd[0]];
  return [...new Set(chosen)];
}

function drawTimeline(call, state) {
  const numRecorded = Object.keys(call.timelines).length, hasLanes = numRecorded > 0;
  let rows, note;
  if (hasLanes && state.timeline !== "phases") {
    const ranks = timelineRanks(call, state.timeline, state.unit);
    rows = laneRows(call, ranks);
    note = `Seconds since the coordinator began. Lanes are threads; ${numRecorded === 1 ? "1 rank was" : `${numRecorded} ranks were`} recorded, ${ranks.length} ${ranks.length === 1 ? "is" : "are"} shown.`;
  } else {
    const ended = call.column("ended_s");
    const units = [...Array(call.num).keys()].sort((a, b) => (ended ? ended[b] - ended[a] : a - b)).slice(0, 24);
    if (state.unit !== null && !units.includes(state.unit)) units.push(state.unit);
    rows = phaseRows(call, units);
    note = `Busy seconds of each phase, end to end and summed over threads: how much, not when. ${call.num > 24 ? "The 24 that ended last." : ""}`;
  }
  rows.reverse();
  const traces = spansAsBars(rows, 0.82);
  document.getElementById("timeline-note").textContent = traces.length ? note : "";
  draw("timeline-chart", traces, {
    height: 19 * rows.length + 90, barmode: "overlay", showlegend: true, margin: { l: 120, r: 20, t: 30, b: 40 }, bargap: 0.1,
    xaxis: { title: { text: "seconds" }, rangemode: "tozero" },
    yaxis: { categoryorder: "array", categoryarray: rows.map((row) => row.label), showgrid: false, fixedrange: true, dtick: 1 },
  }, traces.length ? `Timeline of ${counted(rows.length, "row")}` : "This record has no timelines and no phases of ranks.");
}

function drawDistribution(id, call, name, title, format, pick) {
  const values = call.column(name);
  if (!values || !values.length) return draw(id, [], {}, `This record does not have ${title}.`);
  const usual = call.typicalOf("columns", name);
  const most = Math.max(...values), least = Math.min(...values);
  const scale = name === "num_bytes" ? sizeUnit([most]) : ["seconds", 1];
  const mark = { type: "line", line: { color: style("--ink"), width: 1, dash: "dot" } };
  const label = `${title}: typical ${format(usual)}, largest ${format(most)}, smallest ${format(least)}`;
  const heading = { text: label, font: { size: 12 }, x: 0, xanchor: "left", pad: { l: 8 } };
  if (values.length <= 64) {
    const trace = {
      type: "bar", x: [...values.keys()], y: Array.from(values, (value) => value / scale[1]), hoverinfo: "text", textposition: "none",
      marker: { color: Array.from(values, (value) => (usual > 0 && value >= 1.5 * usual ? "#d2423d" : "#2f7fd0")) },
      text: Array.from(values, (value, unit) => `${plain(call.nameOf(unit))}: ${format(value)}`),
    };
    const every = Math.ceil(values.length / 12), ticks = [...values.keys()].filter((at) => at % every === 0);
    return draw(id, [trace], {
      title: heading, margin: { l: 60, r: 10, t: 34, b: 44 }, height: 240,
      xaxis: { title: { text: "rank" }, tickvals: ticks, ticktext: ticks.map((at) => plain(call.nameOf(at).replace(/^ranks? /, ""))) },
      yaxis: { title: { text: scale[0] } }, shapes: [{ ...mark, xref: "paper", x0: 0, x1: 1, y0: usual / scale[1], y1: usual / scale[1] }],
    }, label, (point) => pick([point.x]));
  }
  const width = (most - least) / 40 || 1;
  const bins = Array.from({ length: 40 }, () => []);
  values.forEach((value, unit) => bins[Math.min(39, Math.floor((value - least) / width))].push(unit));
  const middle = (at) => least + (at + 0.5) * width;
  const trace = {
    type: "bar", x: bins.map((_, at) => middle(at) / scale[1]), y: bins.map((bin) => bin.length), width: (width / scale[1]) * 0.94, hoverinfo: "text", textposition: "none",
    marker: { color: bins.map((_, at) => (usual > 0 && middle(at) >= 1.5 * usual ? "#d2423d" : "#2f7fd0")) },
    text: bins.map((bin, at) => `${counted(bin.length, "rank")} with ${format(middle(at) - width / 2)} to ${format(middle(at) + width / 2)}${bin.length && bin.length <= 6 ? `<br>${bin.map((unit) => plain(call.nameOf(unit))).join(", ")}` : ""}`),
  };
  draw(id, [trace], {
    title: heading, margin: { l: 60, r: 10, t: 34, b: 44 }, height: 240, xaxis: { title: { text: scale[0] } }, yaxis: { title: { text: "ranks (log)" }, type: "log", dtick: 1 },
    shapes: [{ ...mark, yref: "paper", y0: 0, y1: 1, x0: usual / scale[1], x1: usual / scale[1] }],
  }, label, (point) => { if (bins[point.pointIndex].length) pick(bins[point.pointIndex]); });
}

function drawSizes(call) {
  const traces = [];
  const sizes = call.sizes && typeof call.sizes === "object" ? call.sizes : {};
  for (const [phase, classes] of Object.entries(sizes).sort(([a], [b]) => byPlace(a, b))) {
    const rows = (Array.isArray(classes) ? classes : []).filter((row) => Array.isArray(row) && row.length >= 4 && row.every((each) => typeof each === "number") && row[2] > 0 && row[3] > 0);
    const all = rows.reduce((sum, row) => sum + row[2], 0);
    if (!rows.length) continue;
    rows.sort((a, b) => a[0] - b[0]);
    traces.push({
      type: "bar", name: plain(phase), x: rows.map((row) => row[0]), y: rows.map((row) => row[3] / row[2]), marker: { color: colourOf(phase) }, hoverinfo: "text",
      hovertext: rows.map(([log2, num, s, size]) => `<b>${plain(phase)}</b>, pieces from ${bytes(2 ** log2)}<br>${counted(num, "piece")}, ${bytes(size)} in ${seconds(s)}: ${bytes(size / s)}/s`),
      text: rows.map((row) => percent(row[2] / all)), textposition: "outside", cliponaxis: false,
    });
  }
  const [unit, factor] = sizeUnit(traces.flatMap((trace) => trace.y));
  for (const trace of traces) trace.y = trace.y.map((perS) => perS / factor);
  const names = [...new Set(traces.flatMap((trace) => trace.x))].sort((a, b) => a - b);
  const binary = (log2) => `${2 ** (log2 % 10)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][Math.floor(log2 / 10)] ?? ""}`;
  draw("sizes-chart", traces, { height: 240, margin: { l: 60, r: 10, t: 30, b: 44 }, xaxis: { tickvals: names, ticktext: names.map((log2) => `from ${binary(log2)}`), type: "category", categoryorder: "array", categoryarray: names }, yaxis: { title: { text: `${unit}/s of busy time` } } },
    traces.length ? `Throughput by size of the pieces, of ${traces.map((trace) => trace.name).join(", ")}` : "This record does not have sizes of pieces.");
}
