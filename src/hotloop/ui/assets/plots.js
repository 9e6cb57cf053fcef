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
  found.colorway = [0, 1, 2, 3, 4, 5, 6, 7].map((one) => css(`--s${one}`));
  for (const axis of new Set(["xaxis", "yaxis", ...Object.keys(layout).filter((name) => /^[xy]axis\d*$/.test(name))]))
    found[axis] = {...layout[axis], ...lines};
  return found;
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
  return window.Plotly.newPlot(plot, one.data, dressed(one.layout), options);
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

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(([plot, one]) => window.Plotly.react(plot, one.data, dressed(one.layout), options)));
show();
})();
