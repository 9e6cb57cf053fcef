/* What acts needs a key: handed over once, for the printed address, and kept by the browser for this port alone. Cookies go to every port. */
(() => {
"use strict";

const name = "hotloop-key", given = document.documentElement.dataset.key;
if (given) localStorage.setItem(name, given);

document.addEventListener("htmx:configRequest", (event) => {
  if (event.detail.verb !== "get") event.detail.headers["x-hotloop-key"] = localStorage.getItem(name) || "";
});
document.addEventListener("submit", (event) => {
  if (event.target.method !== "post") return;
  const field = event.target.querySelector(`[name=${name}]`) || document.createElement("input");
  Object.assign(field, {type: "hidden", name, value: localStorage.getItem(name) || ""});
  event.target.append(field);
}, true);
})();
