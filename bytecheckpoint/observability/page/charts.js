// Charts: what all have in common, and those of the run.

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function layout(more) {
  const axis = { gridcolor: style("--line"), zerolinecolor: style("--line"), linecolor: style("--line"), automargin: true, exponentformat: "none", separatethousands: true };
  const { xaxis = {}, yaxis = {}, ...rest } = more;
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: 'system-ui, "Segoe UI", Roboto, sans-serif', size: 12, color: style("--ink") },
    margin: { l: 60, r: 20, t: 10, b: 40 },
    height: 260,
    hoverlabel: { bgcolor: style("--card"), bordercolor: style("--line"), font: { color: style("--ink") }, align: "left" },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal" },
    dragmode: "zoom",
    ...rest,
    xaxis: { ...axis, ...xaxis },
    yaxis: { ...axis, ...yaxis },
  };
}

// The buttons of a chart, each by name: plotly's own choice has one that sends the chart to a server of its maker.
const BUTTONS = {
  displaylogo: false,
  modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
  plotlyServerURL: "",
};

// Draws, and says in words what is drawn to who cannot see it. A chart without data says so in its place.
function draw(id, traces, more, label, onClick) {
  const place = document.getElementById(id);
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", label);
  if (!traces.length) {
    window.Plotly.purge(place);
    place.replaceChildren(el("p", { class: "empty" }, label));
    return;
  }
  if (!place.classList.contains("js-plotly-plot")) place.replaceChildren();
  // Where a click opens what may be clicked next, two quick clicks are two clicks. Elsewhere they undo a zoom.
  const clicks = onClick ? { doubleClick: false, doubleClickDelay: 1 } : {};
  const options = { ...clicks, ...BUTTONS, responsive: true };
  window.Plotly.react(place, traces, layout(more), options);
  place.removeAllListeners("plotly_click");
  if (onClick) place.on("plotly_click", (event) => onClick(event.points[0]));
}

const placeOf = (call) => (call.step === null ? new Date(call.at * 1000).toISOString() : call.step);

function runAxis(calls) {
  const isByStep = calls.every((call) => call.step !== null);
  return { x: (call) => (isByStep ? call.step : new Date(call.at * 1000)), axis: { title: { text: isByStep ? "step" : "time" } } };
}

// A line through calls; those with findings are ringed.
function line(name, calls, x, y, colour, more = {}) {
  const shown = calls.filter((call) => y(call) !== null);
  return {
    type: "scatter",
    mode: "lines+markers",
    name,
    x: shown.map(x),
    y: shown.map(y),
    customdata: shown.map((call) => call.index),
    text: shown.map((call) => `${plain(call.title)}<br>${name}: ${more.format ? more.format(y(call)) : seconds(y(call))}`),
    hoverinfo: "text",
    line: { color: colour, width: 1.5, dash: more.dash },
    marker: {
      color: shown.map((call) => (call.findings.length && more.rings ? style("--card") : colour)),
      opacity: 1,
      size: shown.map((call) => (call.findings.length && more.rings ? 11 : 5)),
      line: { color: style("--warn"), width: shown.map((call) => (call.findings.length && more.rings ? 2.5 : 0)) },
    },
  };
}

const TRENDS = { seconds: "Seconds", throughput: "Throughput", size: "Size" };

function drawTrend(data, calls, what, choose) {
  const saves = calls.filter((call) => call.kind === "save");
  const loads = calls.filter((call) => call.kind === "load");
  const { x, axis } = runAxis(calls);
  const of = (name) => (call) => call.figure(name);
  let traces, title, note = "";
  if (what === "seconds") {
    title = "seconds";
    traces = [
      line("save", saves, x, of("total_s"), "#2f7fd0", { rings: true }),
      line("training stood still", saves.filter((call) => call.is_async), x, of("blocked_s"), "#d2423d"),
      line("commit", saves, x, of("commit_s"), "#3aa655"),
      line("load", loads, x, of("total_s"), "#ee8130", { rings: true, dash: "dot" }),
    ];
    note = "Ringed calls have findings. A click chooses a call.";
  } else if (what === "throughput") {
    const [unit, factor] = sizeUnit(calls.map((call) => (call.figure("gb_per_s") ?? 0) * 1e9));
    const speed = (call) => (call.figure("gb_per_s") === null ? null : (call.figure("gb_per_s") * 1e9) / factor);
    const format = (value) => `${bytes(value * factor)}/s`;
    title = `${unit}/s`;
    traces = [
      line("save", saves, x, speed, "#2f7fd0", { rings: true, format }),
      line("load", loads, x, speed, "#ee8130", { rings: true, format, dash: "dot" }),
    ];
    const ends = calls.length ? [x(calls[0]), x(calls[calls.length - 1])] : [];
    for (const [name, of, colour] of [["fastest save", saves, "#2f7fd0"], ["fastest load", loads, "#ee8130"]]) {
      const best = Math.max(...of.map((call) => speed(call) ?? 0));
      if (!(best > 0)) continue;
      const text = `${name} ${format(best)}`;
      traces.push({ type: "scatter", mode: "lines", name: text, x: ends, y: [best, best], hoverinfo: "name", line: { color: colour, dash: "dash", width: 1 } });
    }
    note = "Dashed: the fastest save and load of the run.";
  } else {
    const [unit, factor] = sizeUnit(saves.map((call) => call.totalBytes ?? 0));
    title = unit;
    traces = [
      {
        type: "bar", name: "bytes of a save", x: saves.map(x), y: saves.map((call) => (call.totalBytes ?? 0) / factor), marker: { color: "#2f7fd0" },
        customdata: saves.map((call) => call.index), text: saves.map((call) => `${plain(call.title)}<br>${bytes(call.totalBytes)}`), hoverinfo: "text", textposition: "none",
      },
    ];
  }
  traces = traces.filter((trace) => trace.x.length);
  draw("trend-chart", traces, { xaxis: axis, yaxis: { title: { text: title }, rangemode: "tozero" } },
    `${TRENDS[what]} of ${counted(data.num_saves, "save")} and ${counted(data.num_loads, "load")} over the run`,
    (point) => { if (typeof point.customdata === "number") choose(point.customdata); });
  document.getElementById("trend-note").textContent = note;
}

// Steps on disk by what they take, and the checkpoints that these saves made and that are gone by what they had.
function drawSpace(data, calls) {
  const steps = data.space?.steps ?? [];
  const there = new Set(steps.map((step) => step.path));
  const saves = calls.filter((call) => call.kind === "save" && call.is_there !== null && call.totalBytes !== null);
  const newest = [...new Map(saves.map((call) => [call.path, call])).values()];
  const whole = (call) => (call.part ? call.path.slice(0, -call.part.length - 1) : call.path);
  const number = (calls) => new Set(calls.map(whole)).size;
  const gone = newest.filter((call) => !call.is_there && !there.has(call.path.split("/")[0]));  // a part is in its step
  document.getElementById("space").hidden = !steps.length && !gone.length;
  if (!steps.length && !gone.length) return;
  const { allocated_bytes: all = 0, shared_bytes: shared = 0 } = data.space ?? {};
  const unnamed = steps.reduce((sum, step) => sum + step.unnamed_bytes, 0);
  const unread = steps.filter((step) => !step.is_readable).length;
  document.getElementById("space-note").textContent = [
    steps.length ? `${count(steps.length)} ${steps.length === 1 ? "step takes" : "steps take"} ${bytes(all)} on disk${shared ? `; hard links between steps save ${bytes(shared)}` : ""}.` : "",
    gone.length ? `${count(number(gone))} of the ${counted(number(newest), "checkpoint")} that these saves made ${number(gone) === 1 ? "is" : "are"} no longer there.` : "",
    unnamed ? `${bytes(unnamed)} ${unnamed === 1 ? "is" : "are"} in files that no commit mark names: of a save under way, or of one that died.` : "",
    unread ? `${counted(unread, "step")} could not be read.` : "",
    "bcp du RUN says what for; with --keep-latest N, also what a prune would free.",
  ].filter(Boolean).join(" ");
  const isByStep = steps.every((step) => step.step !== null) && gone.every((call) => call.step !== null);
  const x = (each) => (isByStep ? each.step : plain(each.path));
  const sizes = [...steps.map((step) => step.own_bytes + step.linked_bytes), ...gone.map((call) => call.totalBytes)];
  const [unit, factor] = sizeUnit(sizes);
  const bar = (name, colour, all, size) => {
    const some = all.filter((each) => size(each) > 0);
    return {
      type: "bar", name, x: some.map(x), y: some.map((each) => size(each) / factor), marker: { color: colour },
      text: some.map((each) => `${plain(each.path)}<br>${bytes(size(each))} ${name}`), hoverinfo: "text", textposition: "none",
    };
  };
  const traces = [
    bar("of its own", "#3aa655", steps, (step) => step.own_bytes - step.unnamed_bytes),
    bar("shared by hard links", "#2f7fd0", steps, (step) => step.linked_bytes),
    bar("in files that no commit mark names", "#d2423d", steps, (step) => step.unnamed_bytes),
    bar("removed", "#b9c1cc", gone, (call) => call.totalBytes),
  ].filter((trace) => trace.x.length);
  draw("space-chart", traces, { height: 220, barmode: "stack", xaxis: { title: { text: isByStep ? "step" : "checkpoint" } }, yaxis: { title: { text: unit } } },
    `What ${counted(steps.length, "step")} ${steps.length === 1 ? "takes" : "take"} on disk, and ${counted(number(gone), "checkpoint")} that ${number(gone) === 1 ? "was" : "were"} removed`);
}
