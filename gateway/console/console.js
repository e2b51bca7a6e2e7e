// The console: /admin/live once a second, details and changes when somebody asks. What it draws is in board.js.

import { key, show } from "./board.js";
import { $, clock, number, say, span } from "./elements.js";
import { story } from "./request.js";

const TOKEN = "headrace-admin-token"; // in sessionStorage: gone with the tab, unseen by other sites
const RETRY_MS = [1000, 2000, 5000, 10000];
const SILENT_MS = 3500; // an event a second is due
const DEAF_MS = 15000; // and after so long another connection is worth a try

let stop = new AbortController(); // of the stream that is read now
let asked; // the change that waits for its confirmation
let heard = null; // the last event: when it came by this clock, and `at` by the gateway's
let fault = ""; // why nothing comes

// -- one request ------------------------------------------------------------------------------------------------

async function details(number) {
  let [title, told] = ["Not connected", ["Nothing is known of it here."]];
  try {
    const answer = await call(`/admin/recent/${number}`);
    const body = await answer.json();
    [title, told] = answer.ok ? [`Request ${body.request_id}`, story(body)] : ["Not kept any more", [body.error.message]];
  } catch (error) {
    told = [`The gateway does not answer: ${error.message}`];
  }
  say($("request-title"), title);
  $("request-body").replaceChildren(...told);
  if (!$("request").open) $("request").showModal();
}

// -- changes ----------------------------------------------------------------------------------------------------

function ask({ each, action }) {
  asked = { url: each.backend, pool: each.pool, action };
  const drain = action === "drain";
  say($("confirm-title"), `${drain ? "Drain" : "Undrain"} ${each.backend}?`);
  const running = each.running ? `The ${number(each.running)} that run there may end.` : "Nothing runs there.";
  const others = document.querySelectorAll(".pool").length > 1 ? ` It is in the pool ${each.pool}.` : "";
  say($("confirm-text"), (drain ? `It gets no new work from this gateway until it is undrained. ${running}` : "It gets new work from this gateway again.") + others);
  say($("confirm-yes"), drain ? "Drain it" : "Undrain it");
  say($("confirm-fault"), "");
  $("confirm").showModal();
}

async function change() {
  const { action, ...named } = asked;
  const wrong = (message) => say($("confirm-fault"), `It was not done: ${message}`);
  $("confirm-yes").disabled = true;
  try {
    const answer = await call(`/admin/backends/${action}`, { method: "POST", body: JSON.stringify(named) });
    answer.ok ? $("confirm").close() : wrong((await answer.json()).error.message);
  } catch (error) {
    wrong(error.message);
  } finally {
    $("confirm-yes").disabled = false;
  }
}

// -- the stream -------------------------------------------------------------------------------------------------

const call = (path, more = {}) => fetch(path, { ...more, cache: "no-store", headers: { authorization: `Bearer ${sessionStorage.getItem(TOKEN)}` } });

// Whether what is shown is what is: said once a second, since no event says that there are none.
function tell() {
  const inside = sessionStorage.getItem(TOKEN) && $("login").hidden;
  if (!inside || document.hidden) return;
  const age_ms = heard === null ? Infinity : performance.now() - heard.here;
  const lost = fault !== "" || age_ms > SILENT_MS;
  $("link").className = lost ? "lost" : "live";
  say($("link"), lost ? "Not connected" : "Live");
  $("board").classList.toggle("stale", lost);
  const draining = heard?.draining ? "This gateway is draining: it refuses new requests and ends when the running ones have." : "";
  const seen = heard === null ? "" : ` You see ${clock(heard.at)}, ${span(Math.round(age_ms / 1000))} ago; it is tried again.`;
  const notice = lost ? `${fault || "The gateway says nothing"}.${seen}` : draining;
  $("notice").className = lost ? "bad" : "warn";
  $("notice").hidden = !notice;
  say($("notice"), notice);
  if (lost && fault === "" && age_ms > DEAF_MS && heard !== null) watch();
}

function login(why) {
  sessionStorage.removeItem(TOKEN);
  stop.abort();
  [heard, fault] = [null, ""];
  for (const id of ["board", "forget", "notice"]) $(id).hidden = true;
  for (const id of ["confirm", "request"]) $(id).close();
  for (const id of ["link", "refused"]) say($(id), "");
  $("about").replaceChildren();
  $("login").hidden = false;
  say($("refused"), why);
  $("token").focus();
}

function take(event) {
  for (const [id, hidden] of [["login", true], ["board", false], ["forget", false]]) $(id).hidden = hidden;
  show(event);
  [heard, fault] = [{ here: performance.now(), at: event.at, draining: event.draining }, ""];
  tell();
}

// Shows events as they come, and fails when the stream ends.
async function read(signal, live) {
  const answer = await call("/admin/live", { signal });
  if (answer.status === 401 || answer.status === 403) return login((await answer.json()).error.message);
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The gateway has ended, or is being restarted");
    const events = (text + value).split("\n\n");
    text = events.pop();
    if (!events.length) continue;
    take(JSON.parse(events.at(-1).slice("data: ".length)));
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
      fault = error instanceof TypeError ? "The gateway cannot be reached" : error.message.replace(/\.$/, "");
      if ($("login").hidden) tell();
      else say($("refused"), `${fault}; it is tried again.`);
      await new Promise((done) => setTimeout(done, RETRY_MS[Math.min(tries, RETRY_MS.length - 1)]));
    }
  }
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  const token = $("token").value.trim();
  if (!/^[\x21-\x7e]+$/.test(token)) return login("No header can carry this: an admin token is of ASCII letters, digits and signs.");
  sessionStorage.setItem(TOKEN, token);
  $("token").value = "";
  say($("refused"), "");
  watch();
});
$("forget").addEventListener("click", () => login(""));
$("confirm-no").addEventListener("click", () => $("confirm").close());
$("confirm-yes").addEventListener("click", change);
$("request-close").addEventListener("click", () => $("request").close());
document.addEventListener("change-asked", (event) => ask(event.detail));
document.addEventListener("details-asked", (event) => details(event.detail));
// Nobody looks at a page in the background: the gateway need not draw it.
document.addEventListener("visibilitychange", () => (document.hidden ? stop.abort() : watch()));
setInterval(tell, 1000);
key();
document.title = `Headrace ${location.host}`;
sessionStorage.getItem(TOKEN) ? watch() : login("");
