// One request: where its time went, and why it went where it went.

import { clock, list, made, ms, number, say, tag } from "./elements.js";

export const PARTS = ["gateway", "queue", "connect", "prefill", "decode"];

// What the prices of each `routing` are.
const PRICES = {
  price: ["Seconds of prefill", "its own, and what is left of those before it"],
  least_tokens: ["Tokens", "prompt tokens to compute there, and a token for each request"],
  least_requests: ["Requests", "what runs there"],
  prefix_affinity: ["Rank", "below zero by the tokens that are cached there, above by the requests if it runs too much"],
  round_robin: ["Turn", "when it was last chosen"],
};

// The parts of a request's time side by side, in place of what was there.
export function spent(cell, timeline) {
  const track = cell.firstElementChild ?? made("div", { class: "timeline", "aria-hidden": "true" }, ...PARTS.map((part) => made("span", { class: part })));
  const whole = PARTS.reduce((sum, part) => sum + timeline[part], 0) || 1;
  PARTS.forEach((part, i) => (track.children[i].style.flexGrow = (100 * timeline[part]) / whole)); // below 1 in all they would not fill it
  if (!track.isConnected) cell.append(track);
}

export function story(told) {
  const tries = told.attempts.flatMap((each, i) => attempt(each, i, told));
  const missed = told.cause && told.outcome === "ok" ? [" ", tag("warn", `missed by ${told.cause}`)] : [];
  const facts = [
    ["Outcome", made("span", {}, tag(told.outcome === "ok" ? "good" : "bad", told.outcome), ...missed, told.status ? ` status ${told.status}` : "")],
    ["Ended", clock(told.at)],
    ["Tenant", `${told.tenant || "unknown"}, class ${told.class}`],
    ["Model", told.model || "unknown"],
    ["Asked", `${told.path}${told.stream ? ", as a stream" : ""}`],
    ["Tokens", `${number(told.tokens_in)} in, ${number(told.tokens_out)} out`],
    ...(told.trace_id ? [["Trace", made("code", {}, told.trace_id)]] : []),
  ];
  return [waterfall(told), list(facts), ...(tries.length ? tries : [made("p", { class: "hint" }, "It was sent to no backend.")])];
}

// Each part on a line of its own, from where the one before ends.
function waterfall(told) {
  const lines = made("ul", { class: "legend" });
  let from = 0;
  for (const part of PARTS) {
    const piece = made("i", { class: part });
    const share = told.total_ms ? 100 / told.total_ms : 0;
    piece.style.marginLeft = `${Math.min(99.5, share * from)}%`;
    piece.style.width = `${share * told.timeline[part]}%`;
    piece.hidden = !told.timeline[part];
    from += told.timeline[part];
    lines.append(made("li", {}, made("span", { class: "label" }, part), made("span", { class: "lane", "aria-hidden": "true" }, piece), made("span", { class: "value" }, ms(told.timeline[part]))));
  }
  lines.append(made("li", { class: "total" }, made("span", { class: "label" }, "total"), made("span", { class: "lane", "aria-hidden": "true" }), made("span", { class: "value" }, ms(told.total_ms))));
  return lines;
}

function attempt(each, i, told) {
  const tries = told.attempts.length;
  const when = [["dispatched", each.dispatched_ms], ["connected", each.connected_ms], ["first token", each.first_token_ms], ["ended", each.ended_ms]];
  const cached = `${number(each.cached_tokens)} tokens expected in its cache, ${number(each.uncached_tokens)} to compute`;
  const facts = [
    ["Backend", made("code", {}, each.backend)],
    ["Came to", each.failure || (each.status ? `status ${each.status}` : "no answer")],
    ["After", when.filter(([, at]) => at !== null).map(([name, at]) => `${name} ${ms(at)}`).join(", ")],
    ["Prompt", each.missed_tokens ? `${cached}; another backend held ${number(each.missed_tokens)} more` : cached],
    ...(each.waited_for ? [["Waited for", made("code", {}, each.waited_for)]] : []),
  ];
  return [made("h3", {}, tries > 1 ? `Attempt ${i + 1} of ${tries}` : "Where it went"), list(facts), ...decision(each, told.routing)];
}

// What could have taken it, and at which price.
function decision(each, routing) {
  if (!each.considered.length) return [made("p", { class: "hint" }, "No other backend was open for it.")];
  const [unit, means] = PRICES[routing] ?? ["Price", "by the routing of its pool"];
  const table = made("table", {}, made("caption", {}, `Open for it when that was decided, with the price (${means}); the least wins, of equals any.`));
  const head = table.createTHead().insertRow();
  for (const [name, kind] of [["Backend", "name"], [unit, "n"]]) head.append(made("th", { scope: "col", class: kind }, name));
  const body = table.createTBody();
  for (const one of each.considered) {
    const [name, price] = [made("td", { class: "name" }), made("td", { class: "n" })];
    name.append(made("code", {}, one.backend), ...(one.backend === each.backend ? [" ", tag("good", "taken")] : []));
    say(price, String(one.price));
    body.append(made("tr", {}, name, price));
  }
  return [table];
}
