/* Joins the parts: charts that follow a run, what a person opened or typed stays, and copying. */
(() => {
"use strict";

/* Charts: numbers come as JSON; where a chart has become another, its frame is asked for anew. */
const frames = document.getElementById("frames");
let drawn = false, asking = false, again = false;

async function follow() {
  if (!frames || !window.hotloopCharts) return;
  if (asking) { again = true; return; }
  asking = true;
  try {
    const answer = await fetch(frames.dataset.charts);
    if (answer.ok) await show(await answer.json());
  } catch (error) { console.warn("The charts could not be loaded:", error); }
  asking = false;
  if (again) { again = false; follow(); }
}

async function show(charts) {
  const fits = frames.querySelectorAll("[data-chart]").length === charts.length;  // frames may be older than the numbers
  if (drawn && fits && window.hotloopCharts.update(charts)) return;
  if (frames.dataset.frames && (drawn || !fits)) {
    const answer = await fetch(frames.dataset.frames);
    if (!answer.ok) return;
    frames.innerHTML = await answer.text();  // escaped by the server, and scripts in it do not run
  }
  if (!charts.length) return;
  window.hotloopCharts.start(charts);
  drawn = true;
}

document.addEventListener("htmx:sseMessage", (event) => { if (event.detail.type === "changed" && event.target.hasAttribute("data-follow")) follow(); });
follow();

/* A part that is replaced keeps what a person opened, searched for and chose in it. */
const kept = new WeakMap();
function keep(event) {
  const part = event.detail.target, same = event.type === "htmx:oobBeforeSwap" && event.detail.fragment.innerHTML === part.innerHTML;
  if (same) { event.detail.shouldSwap = false; return; }  // a link that a person presses at this moment stays
  const ids = (found) => [...part.querySelectorAll(found)];
  kept.set(part, {
    open: new Map(ids("details[id]").map((one) => [one.id, one.open])),
    typed: new Map(ids("[data-filter]").map((one) => [one.dataset.filter, one.value])),
    chosen: new Map(ids("select[id][data-keep]").map((one) => [one.id, one.value])),
    checked: new Set(ids("input[type=checkbox]:checked").map((one) => one.value)),
    scrolled: new Map(ids("details[id] .log").map((one) => [one.parentElement.id, one.scrollTop + one.clientHeight < one.scrollHeight - 4 ? one.scrollTop : null])),
    focus: part.contains(document.activeElement) && document.activeElement.id,
  });
}
function bringBack(event) {
  const part = event.detail.target, was = kept.get(part);
  if (!was) return;  // it is told once for each thing in a part
  settle(part);
  kept.delete(part);
  part.querySelectorAll("details[id]").forEach((one) => { if (was.open.has(one.id)) one.open = was.open.get(one.id); });
  part.querySelectorAll("[data-filter]").forEach((one) => { if (was.typed.get(one.dataset.filter)) { one.value = was.typed.get(one.dataset.filter); one.dispatchEvent(new Event("input")); } });
  part.querySelectorAll("select[id][data-keep]").forEach((one) => { if (was.chosen.has(one.id)) one.value = was.chosen.get(one.id); });
  part.querySelectorAll("input[type=checkbox]").forEach((one) => { if (was.checked.has(one.value)) one.checked = true; });
  part.querySelectorAll("details[id] .log").forEach((one) => { const at = was.scrolled.get(one.parentElement.id); one.scrollTop = at ?? one.scrollHeight; });
  if (was.focus) document.getElementById(was.focus)?.focus();
}
for (const name of ["htmx:beforeSwap", "htmx:oobBeforeSwap"]) document.addEventListener(name, keep);
for (const name of ["htmx:afterSwap", "htmx:oobAfterSwap"]) document.addEventListener(name, bringBack);

function settle(part) {
  if (window.hotloopCharts) part.querySelectorAll("[data-filter]").forEach(window.hotloopCharts.filter);
}
document.querySelectorAll(".log").forEach((one) => { one.scrollTop = one.scrollHeight; });

const pressed = location.hash;  // a link to a field may have been pressed before this script was there
/* What was typed into the form of settings stays in this tab, whatever becomes of the server or of the page. */
const form = document.getElementById("setup");
if (form) {
  const key = "hotloop:" + form.dataset.draft, fields = () => [...form.elements].filter((one) => one.name && one.type !== "hidden");
  const value = (one) => one.type === "checkbox" ? (one.checked ? "on" : "") : one.value;
  const save = () => {
    const typed = {};
    for (const one of fields())
      if ((one.type !== "radio" || one.checked) && value(one) !== one.dataset.default) typed[one.name] = value(one);
    sessionStorage.setItem(key, JSON.stringify(typed));
  };
  const put = (one, text) => {
    if (one.type === "radio") one.checked = one.value === text;
    else if (one.type === "checkbox") one.checked = text === "on";
    else one.value = text;
  };
  /* What was typed before the scripts were there is judged as well. */
  const judge = () => {
    if (fields().some((one) => one.type === "radio" || one.type === "checkbox" ? one.checked !== one.defaultChecked : one.value !== one.dataset.default))
      form.dispatchEvent(new Event("change", {bubbles: true}));
  };
  const restore = () => {
    const typed = JSON.parse(sessionStorage.getItem(key) || "{}");
    for (const one of fields()) if (one.name in typed) put(one, typed[one.name]);
    judge();
    if (typed.mode) document.getElementById("advanced").open = true;
  };
  if (matchMedia("(max-width: 720px)").matches)
    form.querySelectorAll("[data-fold]").forEach((one) => { one.open = Boolean(one.querySelector(".wrong")); });
  form.addEventListener("input", () => document.getElementById("checked").replaceChildren());  // it was about other settings
  form.addEventListener("input", save);
  form.addEventListener("change", save);
  /* A run that began has its name; a form that is refused comes back with what was typed. */
  form.addEventListener("submit", () => {
    const [, stem, number] = /^(.*?)(?:-([0-9]{1,6}))?$/.exec(form.elements.name.value.trim());
    if (!stem) return;
    const typed = JSON.parse(sessionStorage.getItem(key) || "{}");
    sessionStorage.setItem(key, JSON.stringify({...typed, name: stem.slice(0, 72) + "-" + (Number(number || 1) + 1)}));
  });
  document.getElementById("forget").addEventListener("click", () => { sessionStorage.removeItem(key); location.href = show(); });
  /* Where settings were loaded over what a person had typed, that can be brought back. */
  const before = sessionStorage.getItem(key), what = document.getElementById("what");
  const show = () => "/training?" + new URLSearchParams([...new FormData(what)].filter(([name]) => name !== "hotloop-key"));
  const keep = () => {
    save();
    history.replaceState(null, "", show());  // a reload shows what was typed since
    if (form.dataset.sent !== "loaded") return;
    if (!before || before === "{}" || before === sessionStorage.getItem(key)) return;
    document.getElementById("brought").hidden = false;
    document.getElementById("bring-back").addEventListener("click", () => { sessionStorage.setItem(key, before); location.href = show(); });
  };
  if (form.hasAttribute("data-sent")) { keep(); addEventListener("pageshow", judge); }
  else addEventListener("pageshow", restore);
}
document.querySelectorAll("[data-submit]").forEach((one) => {
  const show = () => {
    if (one.id === "recipe") one.form.elements.program.value = "";
    one.form.requestSubmit();
  };
  one.addEventListener("change", show);
  const given = [...one.options].find((option) => option.defaultSelected) || one.options[0];
  if (!given.selected) show();  // it was chosen before this script was there
});
addEventListener("pageshow", (event) => { if (event.persisted) document.getElementById("what")?.reset(); });  // a person went back to it

/* A link to what is to be mended opens the groups that its field is in. */
document.addEventListener("click", (event) => {
  const link = event.target.closest("[data-mend]");
  if (!link) return;
  event.preventDefault();
  mend(link.hash);
});
function mend(hash) {
  const note = document.getElementById(decodeURIComponent(hash.slice(1)));
  for (let one = note.closest("details"); one; one = one.parentElement.closest("details")) one.open = true;
  note.closest(".field, tr, fieldset").querySelector("input:not([hidden]), select").focus();
}
if (document.getElementById(decodeURIComponent(pressed.slice(1)))?.id.startsWith("note-")) mend(pressed);

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const from = document.getElementById(button.dataset.copy);
  navigator.clipboard.writeText(from.textContent).then(() => { button.textContent = "Copied"; setTimeout(() => { button.textContent = "Copy"; }, 1500); });
});
})();
