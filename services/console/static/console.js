// Times in the reader's zone, tables that sort, and pages that update themselves. Every page works
// without this file, in UTC.
"use strict";

const main = document.getElementById("live");

// ---- times

const format = {
  year: "numeric", month: "2-digit", day: "2-digit",
  hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false,
};
const zoned = new Intl.DateTimeFormat(undefined, format);
const precise = new Intl.DateTimeFormat(undefined, { ...format, fractionalSecondDigits: 3 });

function localTimes(root) {
  for (const each of root.querySelectorAll("time")) {
    each.title = each.dateTime;
    const used = each.closest(".timeline") ? precise : zoned;
    each.textContent = used.format(new Date(each.dateTime));
  }
}

// A form's time is shown in the reader's zone, and sent in UTC.
for (const input of document.querySelectorAll("input[data-utc]")) {
  const shift = (text, toLocal) => {
    const at = new Date(toLocal && !/Z|[+-]\d\d:?\d\d$/.test(text) ? `${text}Z` : text);
    if (Number.isNaN(at.getTime())) return "";
    const offset = toLocal ? at.getTimezoneOffset() * 60_000 : 0;
    return new Date(at.getTime() - offset).toISOString().slice(0, 19);
  };
  const given = input.getAttribute("value");
  if (given) input.value = shift(given, true);
  input.form.addEventListener("formdata", ({ formData }) => {
    if (input.value) formData.set(input.name, shift(input.value, false));
  });
}

// Parameters without a value make no link longer.
for (const form of document.querySelectorAll("form[method=get]")) {
  form.addEventListener("formdata", ({ formData }) => {
    for (const [name, value] of [...formData]) if (value === "") formData.delete(name);
  });
}

// ---- tables: the order is a part of the address, #TABLE=COLUMN or #TABLE=-COLUMN

function orders() {
  return new URLSearchParams(location.hash.slice(1));
}

function valueOf(row, column) {
  const cell = row.cells[column];
  const time = cell.querySelector("time");
  const text = cell.dataset.sort ?? (time ? time.dateTime : cell.textContent.trim());
  const number = Number(text.replaceAll(",", "").replace(/ .*/, ""));
  return text !== "" && !Number.isNaN(number) ? number : text;
}

function compare(a, b) {
  const numbers = (typeof a === "number") - (typeof b === "number");
  if (numbers) return -numbers;
  return typeof a === "number" ? a - b : a.localeCompare(b);
}

function sortTables(root) {
  const wanted = orders();
  for (const table of root.querySelectorAll("table[id]")) {
    const order = wanted.get(table.id);
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const name = head.textContent.trim();
      if (!head.querySelector("button")) {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = name;
        head.replaceChildren(button);
      }
      const sign = order === name ? 1 : order === `-${name}` ? -1 : 0;
      if (!sign) return head.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const body = table.tBodies[0];
      const rows = [...body.rows].sort((a, b) => sign * compare(valueOf(a, column), valueOf(b, column)));
      body.append(...rows);
    });
  }
}

document.addEventListener("click", ({ target }) => {
  const button = target.closest("th button");
  if (!button) return;
  const { id } = button.closest("table");
  const name = button.textContent.trim();
  const wanted = orders();
  const now = wanted.get(id);
  const numeric = button.closest("th").classList.contains("n");
  const turns = numeric ? [`-${name}`, name] : [name, `-${name}`];
  if (now === turns[1]) wanted.delete(id);
  else wanted.set(id, now === turns[0] ? turns[1] : turns[0]);
  history.replaceState(null, "", `#${wanted}`);
  if (wanted.has(id)) sortTables(document);
  else location.reload();
});
addEventListener("hashchange", () => sortTables(document));

// ---- updates

const status = document.getElementById("status");
const live = document.getElementById("live-switch");
const refreshMs = Number(document.documentElement.dataset.refresh);

async function update() {
  const answer = await fetch(location.href, { headers: { Accept: "text/html" }, redirect: "manual" });
  if (answer.type === "opaqueredirect") return location.reload(); // signed out
  if (!answer.ok) throw new Error(answer.status);
  const found = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = found.getElementById("live");
  localTimes(fresh);
  sortTables(fresh);
  const open = [...main.querySelectorAll("details")].map((each) => each.open);
  const scrolled = [...main.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
  const focus = focusable().indexOf(document.activeElement);
  const label = document.activeElement.textContent;
  main.replaceChildren(...fresh.childNodes);
  main.querySelectorAll("details").forEach((each, at) => (each.open = open[at]));
  main.querySelectorAll(".scroll").forEach((each, at) => (each.scrollLeft = scrolled[at]));
  if (focus >= 0) {
    const now = focusable();
    const same = now[focus]?.textContent === label ? now[focus] : now.find((each) => each.textContent === label);
    same?.focus({ preventScroll: true });
  }
}

function focusable() {
  return [...main.querySelectorAll("a, button, summary, [tabindex]")];
}

function isIdle() {
  const selected = getSelection();
  return !document.hidden && live.getAttribute("aria-pressed") === "true"
    && (selected.isCollapsed || !main.contains(selected.anchorNode));
}

async function keepUpdating() {
  if (isIdle()) {
    try {
      await update();
      status.textContent = "";
      document.documentElement.dataset.updates = 1 + Number(document.documentElement.dataset.updates ?? 0);
    } catch {
      status.textContent = "Not updated: the console or a service does not answer.";
    }
  }
  setTimeout(keepUpdating, refreshMs);
}

if (live && refreshMs) {
  live.hidden = false;
  live.addEventListener("click", () => {
    live.setAttribute("aria-pressed", String(live.getAttribute("aria-pressed") !== "true"));
  });
  setTimeout(keepUpdating, refreshMs);
}

// ---- a link from another site comes without the cookie: once on our own page, it is sent

const again = document.querySelector("form[data-again]");
if (again) location.replace(again.dataset.again);

localTimes(document);
sortTables(document);
