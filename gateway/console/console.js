// The console: what /admin/live says, once a second, as a page. Text only ever becomes text, never markup.

const TOKEN = "headrace-admin-token"; // in sessionStorage: gone with the tab, unseen by other sites
const RETRY_MS = [1000, 2000, 5000, 10000];
const PARTS = ["gateway", "queue", "connect", "prefill", "decode"];
const GOOD = new Set(["up", "open"]);
const BAD = new Set(["down", "ejected", "removed", "wrong_model"]);
const FIGURES = [
  ["requests_s", "Requests a second", (v) => number(v)],
  ["goodput", "Goodput", (v) => percent(v)],
  ["ttft_p95_ms", "First token, p95", (v) => ms(v)],
  ["itl_p95_ms", "Between tokens, p95", (v) => ms(v)],
  ["queued", "Waiting", (v) => number(v)],
  ["running", "On backends", (v) => number(v)],
  ["refused_s", "Refused a second", (v) => number(v)],
  ["loop_lag_p99_ms", "Event loop late, p99", (v) => ms(v)],
];

const $ = (id) => document.getElementById(id);
let stop = new AbortController(); // of the stream that is read now
let asked; // the change that waits for its confirmation

// -- words ------------------------------------------------------------------------------------------------------

const number = (v) => (v === null ? "–" : v.toLocaleString("en", { maximumFractionDigits: v < 10 ? 2 : 0 }));
const percent = (v) => (v === null ? "–" : `${(100 * v).toFixed(v > 0.1 ? 0 : 1)} %`);
const ms = (v) => (v === null ? "–" : v < 1000 ? `${v.toPrecision(v < 1 ? 1 : 3) * 1} ms` : `${(v / 1000).toFixed(2)} s`);
const seconds = (v) => (v === null ? "–" : ms(v * 1000));
const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

// -- elements ---------------------------------------------------------------------------------------------------

function made(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const say = (element, text) => element.textContent === text || (element.textContent = text);

// Children become one per item, in order; those that stay are kept, with their focus.
function sync(parent, items, key, make, update) {
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

function rows(id, items, key, cells, empty) {
  const body = $(id);
  const heads = [...body.parentElement.tHead.rows[0].cells].map((head) => head.className);
  const shown = items.length ? items : [null];
  const make = (item) =>
    item === null
      ? made("tr", { class: "none" }, made("td", { colspan: heads.length }, empty))
      : made("tr", {}, ...heads.map((name) => made("td", name ? { class: name } : {})));
  sync(body, shown, (item) => (item === null ? "" : key(item)), make, (row, item) => {
    if (item !== null) cells(item).forEach((cell, i) => (typeof cell === "function" ? cell(row.cells[i]) : say(row.cells[i], cell)));
  });
}

function bar(label, share, value) {
  const fill = made("span", { class: "fill" });
  fill.style.width = `${100 * Math.min(1, Math.max(0, share ?? 0))}%`;
  fill.classList.toggle("high", share >= 0.9);
  const track = made("span", { class: "track", "aria-hidden": "true" }, fill);
  return made("div", { class: "bar" }, made("span", { class: "label" }, label), track, made("span", { class: "value" }, value));
}

function tag(word) {
  const kind = GOOD.has(word) ? "good" : BAD.has(word) ? "bad" : "warn";
  return made("span", { class: `tag ${kind}` }, word.replaceAll("_", " "));
}

function list(pairs) {
  return made("dl", {}, ...pairs.flatMap(([name, text]) => [made("dt", {}, name), made("dd", {}, String(text))]));
}

// -- the board --------------------------------------------------------------------------------------------------

function show(now) {
  say($("about"), `${now.version} · configuration ${now.generation} · up ${span(now.uptime_s)} · limits: ${now.limiter}${now.draining ? " · draining" : ""}`);
  sync($("figures"), FIGURES, ([name]) => name, makeFigure, (element, figure) => fillFigure(element, figure, now));
  const pools = [...new Set(now.backends.map((each) => each.pool))];
  const inside = (pool) => now.backends.filter((each) => each.pool === pool);
  sync($("pools"), pools, (name) => name, makePool, (element, name) => sync(element.lastElementChild, inside(name), (each) => each.backend, makeBackend, fillBackend));
  rows("queues", now.queues, (q) => `${q.pool}/${q.class}`, (q) => [q.pool, q.class, number(q.waiting), number(q.tokens), seconds(q.oldest_s), seconds(q.wait_s)], "There are no pools.");
  rows("waiting", now.waiting, (w) => `${w.tenant}/${w.pool}/${w.class}`, (w) => [w.tenant, w.pool, w.class, number(w.waiting), seconds(w.oldest_s)], "Nobody waits.");
  rows("refusals", now.refusals, (r) => r.reason, (r) => [r.reason, number(r.lately), number(r.total)], "None so far.");
  rows("tenants", now.tenants, (t) => t.tenant, (t) => [t.tenant, number(t.running), number(t.waiting), (cell) => limits(cell, t.limits)], "There are none.");
  rows("recent", now.recent, (r) => String(r.number), recentCells, "Nothing so far.");
}

function span(seconds) {
  const [d, h, m] = [86400, 3600, 60].map((unit) => Math.floor(seconds / unit));
  return d ? `${d} d ${h % 24} h` : h ? `${h} h ${m % 60} min` : m ? `${m} min` : `${seconds} s`;
}

function makeFigure([, label]) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [name, value] of [["viewBox", "0 0 120 30"], ["preserveAspectRatio", "none"], ["aria-hidden", "true"]]) svg.setAttribute(name, value);
  svg.append(document.createElementNS("http://www.w3.org/2000/svg", "polyline"));
  return made("li", { class: "figure" }, made("span", {}, label), made("strong", {}), svg);
}

function fillFigure(element, [name, , words], now) {
  const values = now.history[name];
  say(element.querySelector("strong"), words(values.at(-1) ?? null));
  const top = Math.max(...values, name === "goodput" ? 1 : 1e-9);
  const points = values.flatMap((v, i) => (v === null ? [] : [`${120 - values.length + i},${(28 - (26 * v) / top).toFixed(1)}`]));
  element.querySelector("polyline").setAttribute("points", points.join(" "));
}

const makePool = (name) => made("div", {}, made("h3", {}, name), made("ul", { class: "backends" }));

function makeBackend() {
  const button = made("button", { type: "button" });
  const top = made("div", { class: "top" }, made("strong", { class: "name" }), made("span", { class: "tags" }), button);
  return made("li", { class: "backend" }, top, made("p", { class: "why" }), made("div", { class: "bars" }));
}

function fillBackend(element, each) {
  const [name, tags, button] = element.querySelector(".top").children;
  const drained = each.state === "draining";
  say(name, each.backend);
  if (tags.dataset.words !== `${each.state} ${each.gate}`) {
    tags.dataset.words = `${each.state} ${each.gate}`;
    tags.replaceChildren(tag(each.state), ...(each.state === "up" && each.gate !== "open" ? [" ", tag(`held by ${each.gate}`)] : []));
  }
  say(button, drained ? "Undrain" : "Drain");
  button.setAttribute("aria-label", `${drained ? "Undrain" : "Drain"} ${each.backend} of ${each.pool}`);
  button.onclick = () => ask(each, drained ? "undrain" : "drain");
  say(element.querySelector(".why"), each.why);
  const kv = each.kv_share ?? (each.kv_tokens ? each.held_tokens / each.kv_tokens : null);
  element.querySelector(".bars").replaceChildren(
    bar("in flight", each.running / each.concurrency, `${number(each.running)} of ${number(each.concurrency)}`),
    bar("uncached", each.uncached_tokens / each.uncached_budget, `${number(each.uncached_tokens)} tokens`),
    bar("KV memory", kv, kv === null ? `${number(each.held_tokens)} tokens` : percent(kv)),
  );
}

function limits(cell, told) {
  sync(cell, told.length ? told : [null], (l) => (l === null ? "" : `${l.kind}/${l.model}`), () => made("div", { class: "limit" }), (element, limit) => {
    if (limit === null) return say(element, "none");
    const label = `${limit.kind}${limit.model ? ` (${limit.model})` : ""}${limit.kind === "concurrent" ? "" : " a minute"}`;
    const one = bar(label, limit.used / limit.limit, `${number(limit.used)} of ${number(limit.limit)}`);
    element.replaceChildren(one.children[0], one.children[2], one.children[1]);
  });
}

function recentCells(r) {
  const outcome = r.outcome === "ok" ? `slow: ${r.cause}` : r.outcome;
  const open = (cell) => {
    if (!cell.firstChild) cell.append(made("button", { type: "button", "aria-label": `Details of request ${r.number}: ${outcome}` }, "Open"));
    cell.firstChild.onclick = () => details(r.number);
  };
  return [clock(r.at), outcome, r.tenant || "–", r.model || "–", r.backend || "–", ms(r.ttft_ms), ms(r.total_ms), open];
}

// -- one request ------------------------------------------------------------------------------------------------

async function details(number) {
  const answer = await call(`/admin/recent/${number}`);
  const told = await answer.json();
  const body = $("request-body");
  say($("request-title"), answer.ok ? `Request ${told.request_id}` : "Not kept any more");
  body.replaceChildren(...(answer.ok ? story(told) : [told.error.message]));
  $("request").showModal();
}

function story(told) {
  const track = made("div", { class: "timeline", "aria-hidden": "true" });
  const legend = made("ul", { class: "legend" });
  for (const part of PARTS) {
    const piece = made("span", { class: part });
    piece.style.flexGrow = told.timeline[part];
    track.append(piece);
    legend.append(made("li", {}, made("i", { class: part, "aria-hidden": "true" }), `${part} ${ms(told.timeline[part])}`));
  }
  const facts = [
    ["Outcome", told.outcome + (told.cause ? `, missed by ${told.cause}` : "") + (told.status ? ` (${told.status})` : "")],
    ["Ended", clock(told.at)], ["Tenant, class", `${told.tenant || "unknown"}, ${told.class}`],
    ["Model, path", `${told.model || "unknown"}, ${told.path}`],
    ["Tokens", `${told.tokens_in ?? "?"} in, ${told.tokens_out ?? "?"} out`], ["Trace", told.trace_id || "none"],
  ];
  const tries = told.attempts.flatMap((each, i) => [made("h3", {}, `Attempt ${i + 1}`), attempt(each)]);
  return [track, legend, list(facts), ...(tries.length ? tries : [made("p", {}, "It was sent to no backend.")])];
}

function attempt(each) {
  const when = [["dispatched", each.dispatched_ms], ["connected", each.connected_ms], ["first token", each.first_token_ms], ["ended", each.ended_ms]];
  const choice = each.considered.map((c) => `${c.backend} at ${number(c.price)}`).join(", ");
  return list([
    ["Backend", each.backend], ["Came to", each.failure || (each.status ? `status ${each.status}` : "no answer")],
    ["After", when.filter(([, at]) => at !== null).map(([name, at]) => `${name} ${ms(at)}`).join(", ")],
    ["Waited for", each.waited_for || "nothing"],
    ["Prompt", `${number(each.cached_tokens)} tokens expected in its cache, ${number(each.uncached_tokens)} not; another held ${number(each.missed_tokens)} more`],
    ["Could go to", choice ? `${choice} (price in tokens, the least wins)` : "no other was open"],
  ]);
}

// -- changes ----------------------------------------------------------------------------------------------------

function ask(each, action) {
  asked = { url: each.backend, pool: each.pool, action };
  const drain = action === "drain";
  say($("confirm-title"), `${drain ? "Drain" : "Undrain"} ${each.backend}?`);
  const running = each.running ? `What runs there (${number(each.running)}) may end.` : "Nothing runs there.";
  say($("confirm-text"), drain ? `It gets no new work until it is undrained. ${running}` : "It gets new work again.");
  say($("confirm-yes"), drain ? "Drain it" : "Undrain it");
  $("confirm").showModal();
}

async function change() {
  $("confirm").close();
  const { action, ...named } = asked;
  const answer = await call(`/admin/backends/${action}`, { method: "POST", body: JSON.stringify(named) });
  if (!answer.ok) status("lost", (await answer.json()).error.message);
}

// -- the stream -------------------------------------------------------------------------------------------------

const call = (path, more = {}) => fetch(path, { ...more, cache: "no-store", headers: { authorization: `Bearer ${sessionStorage.getItem(TOKEN)}` } });

function status(kind, text) {
  $("link").className = kind;
  say($("link"), text);
  $("board").classList.toggle("stale", kind === "lost");
}

function login(why) {
  sessionStorage.removeItem(TOKEN);
  stop.abort();
  for (const id of ["board", "forget"]) $(id).hidden = true;
  for (const id of ["confirm", "request"]) $(id).close();
  $("login").hidden = false;
  status("", "");
  say($("refused"), why);
  $("token").focus();
}

// Shows events as they come, and fails when the stream ends.
async function read(signal, live) {
  const answer = await call("/admin/live", { signal });
  if (answer.status === 401 || answer.status === 403) return login((await answer.json()).error.message);
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the gateway closed the stream");
    const events = (text + value).split("\n\n");
    text = events.pop();
    if (!events.length) continue;
    for (const [id, hidden] of [["login", true], ["board", false], ["forget", false]]) $(id).hidden = hidden;
    show(JSON.parse(events.at(-1).slice("data: ".length)));
    status("live", "Live");
    live();
  }
}

async function watch() {
  stop.abort();
  const { signal } = (stop = new AbortController());
  for (let tries = 0; !signal.aborted && sessionStorage.getItem(TOKEN); tries++) {
    try {
      await read(signal, () => (tries = 0));
    } catch (error) {
      if (signal.aborted) return;
      status("lost", `Not connected: ${error.message}`);
      await new Promise((done) => setTimeout(done, RETRY_MS[Math.min(tries, RETRY_MS.length - 1)]));
    }
  }
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, $("token").value.trim());
  $("token").value = "";
  watch();
});
$("forget").addEventListener("click", () => login(""));
$("confirm-no").addEventListener("click", () => $("confirm").close());
$("confirm-yes").addEventListener("click", change);
$("request-close").addEventListener("click", () => $("request").close());
// Nobody looks at a page in the background: the gateway need not draw it.
document.addEventListener("visibilitychange", () => (document.hidden ? stop.abort() : watch()));
sessionStorage.getItem(TOKEN) ? watch() : login("");
