/* Draws the charts of the page from its JSON, and filters its tables. Text from the record is only ever set as text. */
(() => {
"use strict";

let charts = [];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const narrow = () => window.innerWidth < 720;

/* One glyph and one colour a kind, so that neither alone has to tell them apart. */
const GLYPHS = {
  compiled: ["triangle", "--s0"], recompiled: ["diamond", "--s1"], graph_break: ["square", "--s3"],
  fallback: ["down", "--bad"], recompile_limit: ["cross", "--bad"], frame_eager: ["circle", "--s7"],
  unavailable: ["cross", "--s4"], no_effect: ["circle", "--s4"], run_failed: ["cross", "--s1"], not_finite: ["cross", "--bad"],
  captured: ["triangle", "--s2"], capture_dropped: ["diamond", "--s2"], tier_changed: ["square", "--s0"],
  tier_proven: ["circle", "--s0"], tier_declined: ["down", "--s1"], step_undone: ["cross", "--s3"],
};
const glyphOf = (kind) => GLYPHS[kind] || ["circle", "--s6"];
const SHAPES = {
  triangle: [[0, -1], [1, .8], [-1, .8]], down: [[0, 1], [1, -.8], [-1, -.8]],
  diamond: [[0, -1.1], [1.1, 0], [0, 1.1], [-1.1, 0]], square: [[-.85, -.85], [.85, -.85], [.85, .85], [-.85, .85]],
  cross: [[-1, -.6], [-.6, -1], [0, -.4], [.6, -1], [1, -.6], [.4, 0], [1, .6], [.6, 1], [0, .4], [-.6, 1], [-1, .6], [-.4, 0]],
};

function glyph(ctx, kind, x, y, r) {
  const [shape, color] = glyphOf(kind);
  ctx.fillStyle = css(color);
  ctx.beginPath();
  if (shape === "circle") ctx.arc(x, y, r, 0, 2 * Math.PI);
  else SHAPES[shape].forEach(([dx, dy], i) => (i ? ctx.lineTo : ctx.moveTo).call(ctx, x + dx * r, y + dy * r));
  ctx.closePath();
  ctx.fill();
}

const trim = (number, digits) => String(Number(number.toPrecision(digits)));

function duration(s, digits = 3) {
  if (s === 0) return "0 s";
  const size = Math.abs(s);
  if (size < 1e-3) return trim(s * 1e6, digits) + " µs";
  if (size < 1) return trim(s * 1e3, digits) + " ms";
  if (size < 60) return trim(s, digits) + " s";
  return size < 3600 ? `${trim(s / 60, digits)} min` : `${trim(s / 3600, digits)} h`;
}

function plain(value) {
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(1).replace("e+", "e");
  return size >= 1e4 ? value.toLocaleString("en", {maximumFractionDigits: 1}) : trim(value, 4);
}

/* Charts of one run reach from the first step of any to the last, so that what is under one another happened together. */
function widen() {
  const together = charts.filter((chart) => !chart.apart);
  const first = Math.min(...together.map((chart) => chart.steps[0]));
  const last = Math.max(...together.map((chart) => chart.steps[chart.steps.length - 1]));
  for (const chart of together) {
    if (chart.steps[0] > first) { chart.steps.unshift(first); chart.columns.forEach((column) => column.unshift(null)); }
    if (chart.steps[chart.steps.length - 1] < last) { chart.steps.push(last); chart.columns.forEach((column) => column.push(null)); }
  }
}

const onAxis = (chart, value) => chart.axis === "time" ? duration(value) : Number.isInteger(value) ? value.toLocaleString("en") : plain(value);
const COUNTS = new Set(["step", "trial", "report"]);
const SPANS = [1e-3, 1e-2, .1, .5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 18000, 36000, 86400, 432000];
const format = (chart, value) => chart.unit === "s" ? duration(value) : plain(value);

/* Marks: each kind has a lane of its own above the plot, and a thin line down to the steps. */
const LANE = 15, NEAR = 12;
const lanesOf = (chart) => [...new Set(chart.marks.map((mark) => mark.kind))];

function drawMarks(u, chart, state) {
  const {ctx, bbox} = u, dpr = devicePixelRatio;
  const lanes = lanesOf(chart);
  ctx.save();
  for (const mark of chart.marks) {
    if (state.off.has(mark.kind)) continue;
    const x = u.valToPos(mark.step, "x", true);
    if (x < bbox.left - 1 || x > bbox.left + bbox.width + 1) continue;
    const y = bbox.top - (lanes.length - lanes.indexOf(mark.kind) - .5) * LANE * dpr;
    ctx.globalAlpha = .28;
    ctx.fillStyle = css(glyphOf(mark.kind)[1]);
    ctx.fillRect(x - dpr / 2, y, dpr, bbox.top + bbox.height - y);
    ctx.globalAlpha = 1;
    glyph(ctx, mark.kind, x, y, 4.6 * dpr);
  }
  ctx.restore();
}

/* What ran: a strip on the floor of the plot. */
function drawBands(u, chart) {
  const {ctx, bbox} = u, height = 5 * devicePixelRatio;
  const labels = [...new Set(chart.bands.map((band) => band.label))];
  ctx.save();
  ctx.globalAlpha = .75;
  chart.bands.forEach((band, i) => {
    const next = chart.bands[i + 1];
    const left = Math.max(bbox.left, u.valToPos(band.start, "x", true));
    const right = Math.min(bbox.left + bbox.width, u.valToPos(next ? next.start : band.end, "x", true));
    ctx.fillStyle = css(`--s${Math.min(6, labels.indexOf(band.label))}`);
    if (right > left) ctx.fillRect(left, bbox.top + bbox.height - height, Math.max(right - left, 1), height);
  });
  ctx.restore();
}

function paragraph(tip, text, name, value) {
  const p = document.createElement("p");
  if (value !== undefined) {
    const b = document.createElement("b");
    b.textContent = value;
    p.append(text + " ", b);
  } else p.textContent = text;
  if (name) p.className = name;
  tip.append(p);
}

/* Charts share an axis whose points not every line has: a line answers with its nearest. */
function nearest(u, line, idx) {
  const column = u.data[line];
  if (line === 0 || idx === null) return idx;
  for (let away = 0; away < column.length; away++) {
    if (idx - away >= 0 && column[idx - away] !== null) return idx - away;
    if (idx + away < column.length && column[idx + away] !== null) return idx + away;
  }
  return null;
}

const nearMarks = (u, chart, state, left) => chart.marks.filter(
  (mark) => !state.off.has(mark.kind) && Math.abs(u.valToPos(mark.step, "x") - left) <= 7);

function showTip(u, chart, state) {
  const {left, top, idx} = u.cursor, tip = state.tip;
  if (left === undefined || left < 0 || idx === null || idx === undefined || !state.hovered) { tip.hidden = true; return; }
  tip.replaceChildren();
  paragraph(tip, chart.axis, "", onAxis(chart, chart.steps[idx]));
  chart.names.forEach((name, i) => {
    const at = u.cursor.idxs[i + 1];
    if (at === null || at === undefined || Math.abs(u.valToPos(chart.steps[at], "x") - left) > NEAR) return;
    const elsewhere = chart.steps[at] === chart.steps[idx] ? "" : ` (${chart.axis} ${onAxis(chart, chart.steps[at])})`;
    paragraph(tip, name, "", format(chart, chart.columns[i][at]) + elsewhere);
  });
  const band = chart.bands.find((each) => chart.steps[idx] >= each.start && chart.steps[idx] <= each.end);
  if (band) paragraph(tip, "ran", "", band.label);
  for (const mark of nearMarks(u, chart, state, left).slice(0, 4)) {
    paragraph(tip, `${mark.label}${mark.count > 1 ? ` ×${mark.count}` : ""} in step`, "", mark.step.toLocaleString("en"));
    mark.reasons.forEach((reason) => paragraph(tip, reason, "reason"));
  }
  tip.hidden = false;
  const box = u.over, x = box.offsetLeft + left, room = u.root.clientWidth;
  const beside = x + 14 + tip.offsetWidth > room ? x - tip.offsetWidth - 14 : x + 14;
  const right = Math.max(0, Math.min(beside, room - tip.offsetWidth));
  const down = Math.max(0, Math.min(box.offsetTop + top, u.root.clientHeight - tip.offsetHeight));
  tip.style.transform = `translate(${right}px, ${down}px)`;
}

function series(chart) {
  return chart.names.map((name, i) => {
    const style = chart.styles[i], color = css(`--s${colorOf(chart, i)}`);
    const alone = chart.columns[i].filter((value) => value !== null).length < 2;
    return {
      label: name, spanGaps: true, stroke: style === "faint" ? color + "55" : color,
      width: style === "points" ? 0 : style === "faint" ? 1 : chart.key === "step-time" ? 1.4 : 2,
      points: {show: style === "dots" || style === "points" || alone, size: 7, width: 2, stroke: color, fill: css("--panel")},
    };
  });
}

/* Raw values and their smoothed line share a colour. */
const colorOf = (chart, i) => chart.styles[0] === "faint" && i > 0 ? i - 1 : i;

function axis(values, size) {
  return {
    stroke: css("--quiet"), font: "12px system-ui, sans-serif", size, values, gap: 6,
    grid: {stroke: css("--grid"), width: 1}, ticks: {show: false}, border: {show: false},
  };
}

function yRange(log) {
  return (u, low, high) => {
    if (low === null || low === undefined) return [0, 1];
    if (log) {
      const room = Math.max(1.12, (high / low) ** .07);
      return [low / room, high * room];
    }
    const room = (high - low || Math.abs(high) || 1) * .08;
    return [low >= 0 && low - room < (high - low) * .35 ? 0 : low - room, high + room];
  };
}

function options(chart, state, width) {
  const lanes = lanesOf(chart).length;
  const wide = chart.wide && !narrow();
  const x = axis((u, splits) => splits.map((v) => v !== null && (Number.isInteger(v) || !COUNTS.has(chart.axis)) ? onAxis(chart, v) : ""), 30);
  x.grid = {show: false};
  if (chart.axis === "time") x.incs = SPANS;
  const y = axis((u, splits) => splits.map((v) => v === null ? "" : format(chart, v)), 62);

  if (state.log) Object.assign(y, {splits: logSplits, filter: (u, splits) => splits});  // uPlot would label powers of ten alone
  return {
    width, height: (wide ? 270 : 220) + lanes * LANE, padding: [8 + lanes * LANE, 22, 0, 0], legend: {show: false},
    scales: {
      x: {
        time: false, distr: 1,
        range: (u, low, high) => low !== high ? [low, high] : [low - 1, high + 1],
      },
      y: {distr: state.log ? 3 : 1, range: yRange(state.log)},
    },
    series: [{}, ...series(chart)],
    axes: [x, y],
    cursor: {y: false, points: {size: 7, fill: (u, i) => u.series[i].stroke(u, i)}, dataIdx: nearest, sync: {key: chart.apart ? chart.key : "steps", scales: ["x", null]}},
    hooks: {
      draw: [(u) => drawBands(u, chart), (u) => drawMarks(u, chart, state)],
      setCursor: [(u) => showTip(u, chart, state)],
    },
  };
}

/* Powers of ten, and 2 and 5 between them where few would fit. */
function logSplits(u, index, low, high) {
  const found = [];
  const steps = Math.log10(high / low) > 3 ? [1] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const step of steps) {
      const value = step * 10 ** power;
      if (value >= low && value <= high) found.push(value);
    }
  return found.length > 1 ? found : [low, high];
}

function draw(figure, chart, state) {
  const plot = figure.querySelector(".plot");
  if (state.plot) state.plot.destroy();
  state.tip.remove();
  state.plot = new uPlot(options(chart, state, plot.clientWidth), [chart.steps, ...chart.columns], plot);
  plot.append(state.tip);
  state.tip.hidden = true;
}

function setUp(figure) {
  const chart = charts[Number(figure.dataset.chart)];
  const state = {log: chart.log_first, off: new Set(), hovered: false, tip: document.createElement("div")};
  state.tip.className = "tip";
  figure.querySelectorAll("[data-log]").forEach((button) => button.addEventListener("click", () => {
    state.log = !state.log;
    button.setAttribute("aria-pressed", String(state.log));
    draw(figure, chart, state);
  }));
  figure.querySelectorAll("[data-kind]").forEach((button) => button.addEventListener("click", () => {
    const kind = button.dataset.kind, shown = state.off.delete(kind);
    if (!shown) state.off.add(kind);
    button.setAttribute("aria-pressed", String(shown));
    state.plot.redraw(false);
  }));
  const plot = figure.querySelector(".plot");
  /* Cursors move together over all charts; only the chart under the pointer says its numbers. */
  plot.addEventListener("mousemove", () => { state.hovered = true; }, true);
  plot.addEventListener("mouseleave", () => { state.hovered = false; state.tip.hidden = true; });
  new ResizeObserver(() => {
    if (state.plot && plot.clientWidth && plot.clientWidth !== state.plot.width) draw(figure, chart, state);
  }).observe(plot);
  draw(figure, chart, state);
  return {redraw: () => draw(figure, chart, state), fresh: () => { refresh(chart, state); say(figure, chart); }};
}

/* What stands beside the plot of its numbers. */
function say(figure, chart) {
  const plot = figure.querySelector(".plot"), words = plot.getAttribute("aria-label").split(". ", 1)[0];
  plot.setAttribute("aria-label", `${words}. ${chart.summary}`);
  figure.querySelectorAll(".kind[data-kind]").forEach((button) => {
    const found = chart.marks.filter((mark) => mark.kind === button.dataset.kind);
    button.querySelector(".quiet").textContent = found.reduce((sum, mark) => sum + mark.count, 0);
  });
}

/* New numbers of the same lines: a stretch that somebody zoomed into stays. */
function refresh(chart, state) {
  const {min, max} = state.plot.scales.x, old = state.plot.data[0];
  const whole = min <= old[0] && max >= old[old.length - 1];
  state.plot.setData([chart.steps, ...chart.columns], whole);
  if (!whole) state.plot.redraw();
}

function paintGlyphs() {
  document.querySelectorAll("[data-glyph]").forEach((place) => {
    const canvas = document.createElement("canvas"), dpr = devicePixelRatio;
    canvas.width = canvas.height = 11 * dpr;
    canvas.style.width = canvas.style.height = "11px";
    glyph(canvas.getContext("2d"), place.dataset.glyph, 5.5 * dpr, 5.5 * dpr, 4.6 * dpr);
    place.replaceChildren(canvas);
  });
}

function filter(input) {
  const scope = document.getElementById(input.dataset.filter);
  const rows = [...scope.querySelectorAll("tbody tr")].map((row) => [row, row.textContent.toLowerCase()]);
  const nothing = scope.querySelector(".nothing");
  input.addEventListener("input", () => {
    const wanted = input.value.trim().toLowerCase();
    let shown = 0;
    for (const [row, text] of rows) {
      row.hidden = !text.includes(wanted);
      shown += !row.hidden;
    }
    nothing.hidden = shown > 0;
  });
}

let figures = [];

function start(found) {
  charts = found;
  widen();
  figures = [...document.querySelectorAll("[data-chart]")].map(setUp);
  paintGlyphs();
}

/* What the legend and the lanes of a chart are made of; with another, its figure has to be made anew. */
const shape = (chart) => JSON.stringify([chart.key, chart.names, chart.styles, lanesOf(chart), [...new Set(chart.bands.map((band) => band.label))]]);

/* Takes newer numbers of the same charts; says whether it could. */
function update(found) {
  if (found.length !== charts.length || found.some((chart, i) => shape(chart) !== shape(charts[i]))) return false;
  found.forEach((chart, i) => Object.assign(charts[i], chart));
  widen();
  figures.forEach((one) => one.fresh());
  return true;
}

const data = document.getElementById("data");
if (data) start(JSON.parse(data.textContent));
document.querySelectorAll("[data-filter]").forEach(filter);
window.hotloopCharts = {start, update, filter};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  figures.forEach((one) => one.redraw());
  paintGlyphs();
});
})();
