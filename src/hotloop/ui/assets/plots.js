/* Draws Optuna's figures with Plotly, in the colours of the page, light and dark. */
(() => {
"use strict";

const place = document.getElementById("plots");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/* Axes have a name and a number each: xaxis, xaxis2, yaxis, ... */
function dressed(layout) {
  const lines = {gridcolor: css("--grid"), linecolor: css("--rule"), zerolinecolor: css("--rule"), automargin: true};
  const found = {...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true, margin: {l: 60, r: 24, t: 24, b: 56}};
  found.font = {...layout.font, color: css("--ink"), family: "system-ui, sans-serif", size: 12};
  found.annotations = (layout.annotations || []).map((one) => ({...one, font: {...one.font, color: css("--quiet")}}));
  found.colorway = [0, 1, 2, 3, 4, 5, 6, 7].map((one) => css(`--s${one}`));
  for (const axis of new Set(["xaxis", "yaxis", ...Object.keys(layout).filter((name) => /^[xy]axis\d*$/.test(name))]))
    found[axis] = {...layout[axis], ...lines};
  return found;
}

/* Optuna's scale goes from white to a dark blue, which a dark page hides: here from the page's pale to its strong. */
const numbers = (color) => color.startsWith("#") ? [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16)) : color.match(/[\d.]+/g).map(Number);

function shade(color) {
  const light = numbers(color).slice(0, 3).reduce((sum, one) => sum + one, 0) / 765, share = Math.min(1, (1 - light) / .8);
  const [pale, strong] = [numbers(css("--rule")), numbers(css("--s0"))];
  return `rgb(${pale.map((one, at) => Math.round(one + share * (strong[at] - one))).join(",")})`;
}

function painted(traces) {
  const scale = [[0, css("--rule")], [1, css("--s0")]];
  return traces.map((trace) => {
    const found = {...trace};
    for (const part of ["line", "marker"]) if (found[part]?.colorscale) found[part] = {...found[part], colorscale: scale};
    if (found.colorscale) found.colorscale = scale;
    if (found.mode === "lines" && /^rgb/.test(found.line?.color)) found.line = {...found.line, color: shade(found.line.color)};
    return found;
  });
}

const options = {responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"]};
const drawn = [];

function figure(one) {
  const box = document.createElement("figure"), caption = document.createElement("figcaption"), title = document.createElement("h2"), plot = document.createElement("div");
  box.className = "panel chart wide optuna";
  title.textContent = one.title;
  plot.className = "plotly";
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", `${one.title}: its numbers are in the table of trials`);
  caption.append(title);
  box.append(caption, plot);
  place.append(box);
  drawn.push([plot, one]);
  return window.Plotly.newPlot(plot, painted(one.data), dressed(one.layout), options);
}

function said(words, tone) {
  const p = document.createElement("p");
  p.className = tone;
  p.setAttribute("role", tone === "callout bad" ? "alert" : "status");
  p.textContent = words;
  place.replaceChildren(p);
}

async function show() {
  try {
    const answer = await fetch(place.dataset.figures);
    if (!answer.ok) {
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      said(page.querySelector(".callout")?.textContent || `The server could not answer (${answer.status}).`, "callout bad");
      return;
    }
    const figures = await answer.json();
    if (!figures.length) { said("No trial is complete.", "panel nothing"); return; }
    place.replaceChildren();
    for (const one of figures) await figure(one);
  } catch (error) {
    said(`The plots cannot be drawn: ${error.message}`, "callout bad");
  } finally {
    place.removeAttribute("aria-busy");
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(([plot, one]) => window.Plotly.react(plot, painted(one.data), dressed(one.layout), options)));
show();
})();
