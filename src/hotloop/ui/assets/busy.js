/* What takes a while says so, and is asked for once; and a page that hears nothing of its server any more says that. */
(() => {
"use strict";

const said = document.getElementById("at-work"), notLive = document.getElementById("not-live");
const under_way = new Map();  // what is asked with, and the timer after which its words are shown

/* Words stand in `data-busy` of the button, or else of its form; quick answers show none. */
function begin(one) {
  const words = one?.dataset.busy;
  if (!words) return;
  end(one);
  one.setAttribute("aria-busy", "true");
  under_way.set(one, setTimeout(() => { said.textContent = words; }, Number(one.dataset.busyAfter || 300)));
}

function end(one) {
  if (!under_way.has(one)) return;
  clearTimeout(under_way.get(one));
  under_way.delete(one);
  one.removeAttribute("aria-busy");
  if (said.textContent === one.dataset.busy) said.textContent = "";
}

document.addEventListener("htmx:beforeRequest", (event) => begin(event.detail.elt));
document.addEventListener("htmx:afterRequest", (event) => end(event.detail.elt));

/* A button stays where the keyboard is while its form is sent: it is not disabled, but acts no second time. */
const sent = new WeakSet();
document.addEventListener("submit", (event) => {
  const form = event.target, button = event.submitter;
  if (sent.has(form)) { event.preventDefault(); return; }
  if (form.method === "post" && !form.hasAttribute("data-again")) sent.add(form);
  begin(button?.dataset.busy ? button : form);
  if (button) button.setAttribute("aria-busy", "true");
});
document.addEventListener("click", (event) => {
  if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  begin(event.target.closest("a[data-busy]"));
});
addEventListener("pageshow", () => {
  document.querySelectorAll("form").forEach((one) => sent.delete(one));
  document.querySelectorAll("[aria-busy]").forEach((one) => { end(one); one.removeAttribute("aria-busy"); });
});

/* A server that was stopped, another that took its port, and what was deleted meanwhile. */
let leaving = false, waiting = null;
addEventListener("pagehide", () => { leaving = true; });
addEventListener("pageshow", () => { leaving = false; });
const AWAY = "Not live: the server does not answer. Runs go on, and what you typed stays in this tab. Start hotloop ui again, and open the address that it prints.";
const tell = (words) => { if (!leaving && notLive.textContent !== words) notLive.textContent = words; };
const away = () => { waiting ??= setTimeout(() => tell(AWAY), 1000); };
const KEYLESS = "This browser may look, not act: its key for this server is gone. Open the last address that hotloop ui printed; what you typed stays in this tab.";
const keyless = () => !localStorage.getItem("hotloop-key");
const here = () => { clearTimeout(waiting); waiting = null; notLive.textContent = keyless() ? KEYLESS : ""; };
here();
document.addEventListener("htmx:sseError", away);
document.addEventListener("htmx:sendError", away);
document.addEventListener("htmx:sseOpen", here);
document.addEventListener("htmx:afterRequest", (event) => { if (event.detail.successful) here(); });
document.addEventListener("htmx:responseError", (event) => {
  const status = event.detail.xhr.status;
  if (status === 403 && keyless()) tell(KEYLESS);
  else if (status === 401 || status === 403) tell("Not live: this page is of an earlier server. Open the address that the new one printed; what you typed stays in this tab.");
  else if (status === 404) tell("This is not here any more: it was deleted or moved.");
  else tell(`The server could not answer (${status}). The terminal in which it runs says why.`);
});
})();
