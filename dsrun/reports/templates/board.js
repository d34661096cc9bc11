"use strict";
// Asks for what #live shows every few seconds. What the reader chose, typed, sorted and opened stays as it is.
const live = document.getElementById("live");
const when = document.getElementById("when");
const filter = document.getElementById("filter");
let tag = "", order = null;

const kept = () => ({
  checked: new Set([...live.querySelectorAll("input:checked")].map(one => one.value)),
  open: [...live.querySelectorAll("details")].map(one => one.open),
  focus: live.contains(document.activeElement) ? document.activeElement : null,
});

function restore(before) {
  live.querySelectorAll("input[type=checkbox]").forEach(one => { one.checked = before.checked.has(one.value); });
  const details = live.querySelectorAll("details");
  if (details.length === before.open.length) details.forEach((one, place) => { one.open = before.open[place]; });
  const was = before.focus;
  if (was) {
    const same = was.value ? live.querySelector(`input[value="${was.value}"]`)
      : was.dataset && was.dataset.column ? live.querySelector(`button[data-column="${was.dataset.column}"]`)
      : was.href ? [...live.querySelectorAll("a")].find(one => one.href === was.href) : null;
    if (same) same.focus({preventScroll: true});
  }
}

function arrange() {
  const body = live.querySelector("#runs tbody");
  if (!body) return;
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of body.rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every(word => text.includes(word));
  }
  live.querySelectorAll("th button").forEach(one => {
    const on = order && one.dataset.column === order.column;
    one.parentElement.ariaSort = on ? (order.down ? "descending" : "ascending") : null;
  });
  if (!order) return;
  const value = row => row.cells[order.column].dataset.value;
  const sign = order.down ? -1 : 1;
  const rows = [...body.rows].sort((one, other) => {
    const [a, b] = [value(one), value(other)];
    const by = a !== "" && b !== "" && !isNaN(a) && !isNaN(b) ? a - b : a.localeCompare(b);
    return sign * by;
  });
  body.append(...rows);
}

async function look() {
  if (document.hidden) return;
  const address = new URL(location.href);
  address.searchParams.set("part", "1");
  try {
    const answer = await fetch(address, {headers: tag ? {"If-None-Match": tag} : {}, cache: "no-store"});
    if (answer.status === 200) {
      const before = kept();
      tag = answer.headers.get("ETag") || "";
      live.innerHTML = await answer.text();
      restore(before);
      if (filter) arrange();
    }
    when.textContent = answer.ok || answer.status === 304 ? `as of ${new Date().toLocaleTimeString()}` : await answer.text();
  } catch {
    when.textContent = "The board does not answer: has it ended?";
  }
}

if (filter) {
  filter.addEventListener("input", arrange);
  live.addEventListener("click", event => {
    const button = event.target.closest("button[data-column]");
    if (!button) return;
    const column = button.dataset.column;
    order = {column, down: order && order.column === column ? !order.down : column > 2};
    arrange();
  });
  document.getElementById("chosen").addEventListener("submit", event => {
    if (live.querySelectorAll("input:checked").length >= 2) return;
    event.preventDefault();
    when.textContent = "Choose two runs or more to compare.";
  });
  arrange();
}
const every = 1000 * Number(live.dataset.every);
if (every) setInterval(look, every);
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(one => { one.open = true; }));
