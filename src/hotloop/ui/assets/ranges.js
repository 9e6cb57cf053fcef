/* Rows of the ranges of a search: added, taken out, and brought back as they were in this tab. */
(() => {
"use strict";
const list = document.getElementById("range-list");
if (!list) return;
const form = list.closest("form"), rows = document.getElementById("range-rows"), add = document.getElementById("range-add");
const made = document.getElementById("range-new");
const numbers = () => [...list.children].map((one) => one.dataset.range);

function put(number) {
  list.insertAdjacentHTML("beforeend", made.innerHTML.replaceAll("NUMBER", number));  // written and escaped by the server
}
function tell() {
  rows.value = numbers().join(",");
  rows.dispatchEvent(new Event("change", {bubbles: true}));
}

add.addEventListener("click", () => {
  if (add.getAttribute("aria-disabled") === "true") return;
  const number = Math.max(-1, ...numbers().map(Number)) + 1;
  put(number);
  tell();
  document.getElementById(`range-${number}-setting`).focus();
});
list.addEventListener("click", (event) => {
  const button = event.target.closest("[data-drop]");
  if (!button || add.getAttribute("aria-disabled") === "true") return;
  const row = button.closest("[data-range]"), next = row.nextElementSibling || row.previousElementSibling;
  row.remove();
  tell();
  (next?.querySelector("[data-drop]") || add).focus();
});

/* What was typed comes back into rows that are there: the others are made, and those that were taken out go. */
form.addEventListener("hotloop:restore", (event) => {
  const typed = event.detail["range.rows"];
  if (typed === undefined) return;
  const wanted = typed.split(",").filter((one) => /^[0-9]{1,4}$/.test(one));
  for (const one of [...list.children]) if (!wanted.includes(one.dataset.range)) one.remove();
  const there = numbers();
  wanted.filter((one) => !there.includes(one)).forEach(put);
});
})();
