// Words for numbers, and elements for words. Text only ever becomes text, never markup.

export const $ = (id) => document.getElementById(id);

// -- words ------------------------------------------------------------------------------------------------------

const NONE = "–";
const told = (words) => (v) => (v === null || v === undefined ? NONE : words(v));

export const number = told((v) => v.toLocaleString("en", { maximumFractionDigits: v < 10 ? 2 : 0 }));
export const percent = told((v) => `${(100 * v).toFixed(v > 0.1 || v === 0 ? 0 : 1)} %`);
export const ms = told((v) => (v < 999.5 ? `${v.toPrecision(v < 1 ? 1 : 3) * 1} ms` : span(v / 1000)));
export const seconds = told((v) => (v ? ms(v * 1000) : "0 s"));
export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

export function span(seconds) {
  const [d, h, m] = [86400, 3600, 60].map((unit) => Math.floor(seconds / unit));
  if (d) return `${d} d ${h % 24} h`;
  if (h) return `${h} h ${m % 60} min`;
  if (m) return `${m} min ${Math.floor(seconds % 60)} s`;
  return `${Number.isInteger(seconds) || seconds >= 10 ? Math.round(seconds) : seconds.toFixed(2)} s`;
}

// -- elements ---------------------------------------------------------------------------------------------------

export function made(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function drawing(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const say = (element, text) => element.textContent === text || (element.textContent = text);

// Children become one per item, in order; those that stay are kept, with their focus.
export function sync(parent, items, key, make, update) {
  const focused = document.activeElement;
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    const child = before.get(name) ?? make(item);
    child.dataset.key = name;
    before.delete(name);
    update(child, item);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  before.forEach((child) => child.remove());
  if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
}

// A cell is text, or a function that fills it.
export function rows(body, items, key, cells, empty) {
  const heads = [...body.parentElement.tHead.rows[0].cells];
  const make = (item) =>
    item === null
      ? made("tr", { class: "none" }, made("td", { colspan: heads.length }, empty))
      : made("tr", {}, ...heads.map((head) => made("td", { class: head.className, "data-head": head.innerText })));
  const shown = items.length ? items : [null];
  sync(body, shown, (item) => (item === null ? "" : key(item)), make, (row, item) => {
    if (item !== null) cells(item).forEach((cell, i) => (typeof cell === "function" ? cell(row.cells[i]) : say(row.cells[i], cell)));
  });
}

export function makeBar() {
  const track = made("span", { class: "track", "aria-hidden": "true" }, made("span", { class: "fill" }));
  return made("div", { class: "bar" }, made("span", { class: "label" }), track, made("span", { class: "value" }));
}

export function fillBar(bar, label, share, value) {
  const [name, track, number] = bar.children;
  track.firstElementChild.style.width = `${100 * Math.min(1, Math.max(0, share || 0))}%`;
  track.firstElementChild.classList.toggle("high", share >= 0.9);
  say(name, label);
  say(number, value);
}

export const tag = (kind, word) => made("span", { class: `tag ${kind}` }, word);

export function list(pairs) {
  return made("dl", {}, ...pairs.flatMap(([name, text]) => [made("dt", {}, name), made("dd", {}, text)]));
}
