// The board: what one event of /admin/live says, as a page.

import { $, clock, drawing, fillBar, made, makeBar, ms, number, percent, rows, say, seconds, span, sync, tag } from "./elements.js";
import { PARTS, spent } from "./request.js";

const GOOD = new Set(["up"]);
const BAD = new Set(["down", "ejected", "removed", "wrong_model"]);
const PASSING = new Set(["prefill", "debt"]); // a gate that is shut by these opens by itself, many times a second
const KINDS = { requests: "requests / min", tokens: "tokens / min" };
const MODES = { memory: "counted here", shared: "shared" };
const SPARK = 120; // points
const ABREAST = 4; // backends of a pool; small pools stand side by side
const FIGURES = [
  ["requests_s", "Requests", (v) => with_unit(number(v), "/s")],
  ["goodput", "Goodput", percent, (v) => (v < 0.95 ? "bad" : v < 0.99 ? "warn" : "")],
  ["ttft_p95_ms", "First token p95", ms],
  ["itl_p95_ms", "Token gap p95", ms],
  ["queued", "Waiting", number],
  ["running", "On backends", number],
  ["refused_s", "Refused", (v) => with_unit(number(v), "/s"), (v) => (v > 0 ? "warn" : "")],
  ["loop_lag_p99_ms", "Loop late p99", ms, (v) => (v >= 50 ? "warn" : "")],
];
// As many as are looked at without being asked for.
const MOST = { backends: 12, queues: 8, waiting: 10, refusals: 10, tenants: 10, recent: 15 };

const whole = new Set(); // lists that somebody wants to see all of
let last;

const with_unit = (text, unit) => (text === "–" ? text : `${text} ${unit}`);

export function show(now) {
  last = now;
  const limiter = MODES[now.limiter] ?? now.limiter.replaceAll("_", " ");
  const about = [location.host, now.version, `configuration ${now.generation}`, `up ${span(now.uptime_s)}`, `limits ${limiter}`];
  sync($("about"), about, (text) => text.split(" ")[0], () => made("li"), say);
  sync($("figures"), FIGURES, ([name]) => name, makeFigure, (element, figure) => fillFigure(element, figure, now));
  const pools = [...new Set(now.backends.map((each) => each.pool))];
  sync($("pools"), pools, (name) => name, makePool, (element, name) => fillPool(element, name, now));
  const queues = some("queues", now.queues, (q) => q.waiting > 0);
  rows($("queues"), queues, (q) => `${q.pool}/${q.class}`, (q) => [q.pool, q.class, number(q.waiting), number(q.tokens), q.waiting ? seconds(q.oldest_s) : "–", seconds(q.wait_s)], "There are no pools.");
  rows($("waiting"), some("waiting", now.waiting, null, now.more_waiting), (w) => `${w.tenant}/${w.pool}/${w.class}`, (w) => [w.tenant, w.pool, w.class, number(w.waiting), seconds(w.oldest_s)], "Nobody waits.");
  rows($("refusals"), some("refusals", now.refusals), (r) => r.reason, (r) => [r.reason, number(r.lately), number(r.total)], "None so far.");
  const together = now.limiter === "shared" ? ", those of all gateways together and what they hold ahead" : "";
  say($("tenants-caption"), `Against their limits${together}; the nearest to one first.`);
  rows($("tenants"), some("tenants", now.tenants, null, now.more_tenants), (t) => t.tenant, (t) => [t.tenant, number(t.running), number(t.waiting), (cell) => limits(cell, t.limits)], "There are none.");
  rows($("recent"), some("recent", now.recent), (r) => String(r.number), recentCells, "Nothing so far.");
  $("key").hidden = !now.recent.length;
}

// Those of a long list that come first, and a button for the others. `first` marks what must not be left out;
// `unsent` is how many more there are that the gateway did not tell of.
function some(name, items, first = null, unsent = 0, place = $(name).parentElement) {
  const most = MOST[name.split(" ")[0]];
  const long = items.length > most;
  let button = place.nextElementSibling?.matches(".more") ? place.nextElementSibling : null;
  if (!long && !unsent) button?.remove();
  else {
    button ??= made("button", { type: "button", class: "more" });
    if (!button.isConnected) place.after(button);
    const rest = unsent ? `; ${number(unsent)} more are not sent` : "";
    say(button, long && !whole.has(name) ? `Show all ${number(items.length)}${first ? ", these first" : ""}${rest}` : `Show fewer${rest}`);
    button.disabled = !long;
    button.setAttribute("aria-expanded", String(whole.has(name)));
    button.onclick = () => {
      whole.has(name) ? whole.delete(name) : whole.add(name);
      show(last);
    };
  }
  if (!long) return items;
  const ordered = first ? [...items.filter(first), ...items.filter((each) => !first(each))] : items;
  return whole.has(name) ? ordered : ordered.slice(0, most);
}

// -- figures ----------------------------------------------------------------------------------------------------

function makeFigure([, label]) {
  const lines = drawing("svg", { viewBox: `0 0 ${SPARK} 30`, preserveAspectRatio: "none", "aria-hidden": "true" }, drawing("path", { class: "area" }), drawing("path", { class: "line" }));
  return made("li", { class: "figure" }, made("span", { class: "label" }, label), made("strong", {}, made("b"), made("small")), lines, made("span", { class: "peak" }));
}

function fillFigure(element, [name, , words, judge], now) {
  const values = now.history[name];
  const value = values.at(-1) ?? null;
  const [, strong, svg, peak] = element.children;
  const [amount, ...unit] = words(value).split(" ");
  say(strong.firstElementChild, amount);
  say(strong.lastElementChild, unit.length ? ` ${unit.join(" ")}` : "");
  strong.className = value === null ? "" : (judge?.(value) ?? "");
  const told = values.filter((v) => v !== null);
  const worst = name === "goodput" ? Math.min(...told) : Math.max(...told);
  say(peak, told.length ? `${name === "goodput" ? "least" : "most"} ${words(worst)}` : "nothing yet");
  const top = name === "goodput" ? 1 : Math.max(...told, 1e-9);
  const [area, line] = traced(values, top);
  svg.firstElementChild.setAttribute("d", area);
  svg.lastElementChild.setAttribute("d", line);
}

// A curve from the right, with gaps where there is nothing to tell.
function traced(values, top) {
  let [area, line, open] = ["", "", null];
  const shut = (x) => (area += open === null ? "" : `L${x} 30L${open} 30Z`);
  values.forEach((v, i) => {
    const x = SPARK - values.length + i + 1;
    if (v === null) {
      shut(x - 1);
      open = null;
      return;
    }
    const point = `${open === null ? "M" : "L"}${x} ${(28 - (25 * v) / top).toFixed(1)}`;
    open ??= x;
    area += point;
    line += point;
  });
  shut(SPARK);
  return [area, line];
}

// -- backends ---------------------------------------------------------------------------------------------------

function makePool() {
  return made("div", { class: "pool" }, made("div", { class: "head" }, made("h3"), made("p", { class: "hint" })), made("ul", { class: "backends" }));
}

function fillPool(element, name, now) {
  const inside = now.backends.filter((each) => each.pool === name);
  const add = (told, field) => told.reduce((sum, each) => sum + each[field], 0);
  const [head, backends] = element.children;
  element.style.flex = `${Math.min(inside.length, ABREAST)} 1 ${19.5 * Math.min(inside.length, ABREAST)}rem`;
  say(head.firstElementChild, name);
  const up = inside.filter((each) => each.state === "up").length;
  const waiting = add(now.queues.filter((each) => each.pool === name), "waiting");
  say(head.lastElementChild, `${up} of ${inside.length} up · ${number(add(inside, "running"))} in flight · ${number(waiting)} waiting`);
  const shown = some(`backends ${name}`, inside, (each) => !GOOD.has(each.state), 0, backends);
  sync(backends, shown, (each) => each.backend, makeBackend, fillBackend);
}

function makeBackend() {
  const top = made("div", { class: "top" }, made("strong", { class: "address" }), made("button", { type: "button" }), made("span", { class: "tags" }));
  return made("li", { class: "backend" }, top, made("p", { class: "why" }), made("div", { class: "bars" }, makeBar(), makeBar(), makeBar()));
}

function fillBackend(element, each) {
  const [top, why, bars] = element.children;
  const [name, button, tags] = top.children;
  const drained = each.state === "draining";
  say(name, each.backend);
  if (tags.dataset.words !== `${each.state} ${each.gate}`) {
    tags.dataset.words = `${each.state} ${each.gate}`;
    const kind = GOOD.has(each.state) ? "good" : BAD.has(each.state) ? "bad" : "warn";
    const held = each.state === "up" && each.gate !== "open";
    tags.replaceChildren(tag(kind, each.state.replaceAll("_", " ")), ...(held ? [tag(PASSING.has(each.gate) ? "" : "warn", `held by ${each.gate}`)] : []));
  }
  say(button, drained ? "Undrain" : "Drain");
  button.setAttribute("aria-label", `${drained ? "Undrain" : "Drain"} ${each.backend} of ${each.pool}`);
  button.onclick = () => element.dispatchEvent(new CustomEvent("change-asked", { bubbles: true, detail: { each, action: drained ? "undrain" : "drain" } }));
  say(why, each.why);
  bars.hidden = BAD.has(each.state) && !each.running;
  const kv = each.kv_share ?? (each.kv_tokens ? each.held_tokens / each.kv_tokens : null);
  fillBar(bars.children[0], "in flight", each.running / each.concurrency, `${number(each.running)} of ${number(each.concurrency)}`);
  fillBar(bars.children[1], "uncached", each.uncached_tokens / each.uncached_budget, `${number(each.uncached_tokens)} tokens`);
  fillBar(bars.children[2], "KV memory", kv, kv === null ? `${number(each.held_tokens)} tokens` : percent(kv));
}

// -- tenants and requests ---------------------------------------------------------------------------------------

function limits(cell, told) {
  if (!told.length) return say(cell, "none");
  const all = cell.firstElementChild ?? made("div", { class: "limits" });
  if (!all.isConnected) cell.replaceChildren(all);
  sync(all, told, (l) => `${l.kind}/${l.model}`, () => made("div", { class: "limit" }, makeBar()), (element, limit) => {
    const label = `${KINDS[limit.kind] ?? limit.kind}${limit.model ? ` · ${limit.model}` : ""}`;
    fillBar(element.firstElementChild, label, limit.used / limit.limit, `${number(limit.used)} of ${number(limit.limit)}`);
  });
}

function recentCells(r) {
  const outcome = r.outcome === "ok" ? `slow: ${r.cause}` : r.outcome;
  const told = (cell) => cell.firstChild?.textContent === outcome || cell.replaceChildren(tag(r.outcome === "ok" ? "warn" : "bad", outcome));
  const open = (cell) => {
    if (!cell.firstChild) cell.append(made("button", { type: "button" }, "Open"));
    cell.firstChild.setAttribute("aria-label", `Details of request ${r.number}: ${outcome}`);
    cell.firstChild.onclick = () => cell.dispatchEvent(new CustomEvent("details-asked", { bubbles: true, detail: r.number }));
  };
  const time = (cell) => spent(cell, r.timeline);
  return [clock(r.at), told, r.tenant || "–", r.model || "–", r.backend || "–", time, ms(r.ttft_ms), ms(r.total_ms), open];
}

export function key() {
  $("key").replaceChildren(...PARTS.map((part) => made("li", {}, made("i", { class: part, "aria-hidden": "true" }), part)));
}
