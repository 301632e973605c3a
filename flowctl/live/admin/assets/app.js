// The dashboard: asks the server how it stands, shows it, and does what its reader wants done.

import { Refused, follow, get, post, token } from "./api.js";
import { ask, askToken, faultOf } from "./ask.js";
import { Lanes } from "./charts.js";
import { Detail } from "./detail.js";
import { Picture } from "./picture.js";
import { Recordings } from "./recordings.js";
import { Viewers } from "./viewers.js";
import { STATES, count, duration, foreign, make, percent, put, rate, tone } from "./words.js";

const LOOK_MS = 1000; // how often figures are asked for while the page is seen
const STALE_S = 4; // without news for so long the page says that it is old
const SPAN_S = 300;
const SOON_MS = 300; // least time from look to look, however much happens
const MOST_EVENTS = 100;
const MOST_STREAMS = 1000;
const MOST_BANS = 50;
const BANS_MS = 5000;
const BY_THEMSELVES = new Set(["peer closed", "peer reset", "finished", "shutdown"]); // ends that are nobody's doing

const element = (id) => document.getElementById(id);
const now = () => performance.now() / 1000;

let heardAt = null; // when the server last said something
let lost = null; // why not, if it does not
let server = {}; // figures of the server
let soon = 0; // timer of a look that was asked for
let due = null; // when, if one is
let looking = false;
let lookedAt = 0;
const before = new Map(); // octets and time of each stream at the last look

const proofs = new Map(); // what streams want of viewers, by stream: in memory alone

const picture = new Picture("picture", prove);
const beside = new Picture("beside", () => {}); // the same behind another port, such as a slow line: a demonstration
const ofSet = new Picture("chosen", () => {}); // another stream behind one more port: a set, of which the server chooses
const asked = new URLSearchParams(location.hash.slice(1)); // watch=STREAM, beside=PORT, line=WHAT IT IS; set, by, what
new Recordings(recordingsUrl, askProof); // all that it does is asked for in its own form
const detail = new Detail();
const lanes = new Lanes(element("states"), SPAN_S);
const viewers = new Viewers(open, () => look());

// -- looking

/** Look sooner than usual, for something happened; many things at once are one look. */
function lookSoon() {
  const wait = Math.max(0, lookedAt + SOON_MS - performance.now());
  if (due === null || performance.now() + wait < due) plan(wait);
}

function plan(waitMs) {
  clearTimeout(soon);
  due = performance.now() + waitMs;
  soon = setTimeout(look, waitMs);
}

/** Ask for all that is shown. One look at a time; who asks meanwhile gets another one afterwards. */
async function look() {
  if (looking) {
    plan(100);
    return;
  }
  clearTimeout(soon);
  due = null;
  looking = true;
  lookedAt = performance.now();
  try {
    const number = detail.number;
    const [figures, streams, listed, one] = await Promise.all([
      get("stats", { viewers: "none", limit: 1 }), get("streams", { limit: MOST_STREAMS }),
      get("connections", viewers.asked()), number === null ? null : chosen(number),
    ]);
    heard();
    const at = now();
    showServer(figures.server, streams, at);
    for (const row of listed.connections) detail.remember(row, at);
    showStreams(streams, at);
    viewers.show(listed);
    if (one && detail.number === number) detail.show(one, at);
  } catch (error) {
    missed(error);
  } finally {
    looking = false;
    if (!document.hidden && due === null) plan(LOOK_MS);
  }
}

async function chosen(number) {
  try {
    const said = await get(`connections/${number}`);
    return said.connection?.axes ? said.connection : said;
  } catch (error) {
    if (error.status !== 404) throw error;
    if (detail.number === number) detail.gone();
    return null;
  }
}

function heard() {
  heardAt = now();
  lost = null;
  element("notice").hidden = true;
  freshness();
}

function missed(error) {
  lost = error;
  if (error instanceof Refused) {
    put(element("notice"), faultOf(error));
    element("notice").hidden = false;
    if (error.status === 401 && !token.value) askToken();
  }
  freshness();
}

/** Say how old what is shown is. */
function freshness() {
  const age = heardAt === null ? null : now() - heardAt;
  const stale = age === null ? lost !== null : age > STALE_S;
  const box = element("freshness");
  box.className = `freshness ${stale ? "stale" : age === null ? "wait" : "live"}`;
  document.body.classList.toggle("stale", stale);
  const since = age === null ? "no answer yet" : `stale: last heard ${duration(Math.floor(age))} ago`;
  put(box.lastElementChild, stale ? `${since}, reconnecting` : age === null ? "connecting" : "live");
}

// -- showing

function showServer(figures, { streams, found }, at) {
  server = figures;
  const states = STATES.map((state) => sum(streams, (row) => row.states[state] ?? 0));
  const slow = sum(streams, (row) => row.slow);
  const cut = sum(Object.entries(figures.closed), ([reason, number]) => (BY_THEMSELVES.has(reason) ? 0 : number));
  put(element("server").firstChild, foreign(figures.url));
  put(element("tile-viewers"), count(sum(states, (each) => each)));
  put(element("tile-slow"), count(slow));
  put(element("tile-streams"), count(found.streams));
  put(element("tile-cut"), count(cut));
  element("tile-cut").title = Object.entries(figures.closed).map(([reason, each]) => `${reason}: ${each}`).join(", ");
  put(element("tile-busy"), percent(figures.busy));
  put(element("tile-up"), duration(figures.up_s));
  lanes.add(at, states);
  document.title = slow ? `(${slow}) flowctl` : "flowctl";
}

function sum(items, figure) {
  return items.reduce((total, item) => total + figure(item), 0);
}

function showStreams({ streams: rows }, at) {
  element("streams-empty").hidden = rows.length > 0;
  const body = element("streams");
  const there = new Map([...body.children].map((row) => [row.stream, row]));
  for (const [name, row] of there) if (!rows.some((item) => item.stream === name)) row.remove();
  rows.forEach((item, place) => {
    const row = there.get(item.stream) ?? streamRow(item.stream);
    if (body.children[place] !== row) body.insertBefore(row, body.children[place] ?? null);
    const last = before.get(item.stream);
    const [publisher, media, flow, watchers] = row.cells;
    put(publisher.firstChild, foreign(item.publisher ?? "nobody"));
    const set = item.renditions ?? [];
    const commands = item.commands ?? [];
    const failing = commands.some((one) => one.state === "waits");
    const lacks = Object.entries(item.unwritten ?? {}).map(([kind, why]) => [kind === "hls" ? "no HLS" : "not recorded", why]);
    put(media.firstChild, foreign([...lacks.map(([what]) => what), item.media, ...set.map((one) => `${one.rendition}: ${count(one.viewers)}`), ...commands.map((one) => `${one.command} ${one.state}`)].join(" · ")));
    media.title = foreign([...lacks.map((line) => line.join(": ")), ...set.map(renditionLine), ...commands.map((one) => [one.command, one.state, one.why].filter(Boolean).join(": "))].join("; "), 600);
    media.classList.toggle("bad", lacks.length > 0 || failing);
    put(flow, last && at > last.at ? rate(Math.max(0, item.in_bytes - last.bytes) / (at - last.at)) : "–");
    put(watchers, count(item.viewers));
    row.media = item.media;
    before.set(item.stream, { at, bytes: item.in_bytes });
    row.button.setAttribute("aria-pressed", String(picture.stream === item.stream));
  });
  for (const name of before.keys()) if (!rows.some((item) => item.stream === name)) before.delete(name);
}

/** What is told of a rendition of a set: its rate, codec and size, its viewers, and what is odd about it. */
function renditionLine({ rendition, bit_rate: bits, codec, size, viewers: watching, remark }) {
  const parts = [bits && rate(bits / 8), codec, size, `${count(watching)} viewers`, remark];
  return `${rendition}: ${parts.filter(Boolean).join(", ")}`;
}

function streamRow(name) {
  const button = make("button", { type: "button", text: "Watch", "aria-label": `Watch ${foreign(name)}`, "aria-pressed": "false" });
  const cells = [make("td", {}, make("bdi", { cls: "clip" })), make("td", {}, make("bdi", { cls: "clip" })), make("td", { cls: "n" }), make("td", { cls: "n" })];
  const row = make("tr", {}, make("th", { scope: "row" }, make("bdi", { cls: "clip", text: foreign(name) })), ...cells, make("td", {}, button));
  Object.assign(row, { stream: name, button });
  Object.defineProperty(row, "cells", { value: cells });
  button.addEventListener("click", () => {
    const again = picture.stream === name;
    for (const other of element("streams").children) other.button.setAttribute("aria-pressed", "false");
    button.setAttribute("aria-pressed", String(!again));
    if (again) watch("", "", "");
    else watch(name, mediaUrl(name), row.media ?? "");
  });
  if (name === asked.get("watch")) {
    asked.delete("watch"); // once: what is chosen later is the reader's choice
    setTimeout(() => button.click());
  }
  return row;
}

function watch(name, url, media) {
  picture.show(name, url, media);
  behind("beside", beside, asked.get("beside"), name, url, media, asked.get("line"));
  const set = asked.get("set");
  if (set) behind("chosen", ofSet, asked.get("by"), name && set, url && mediaUrl(set), media, asked.get("what"));
}

/** Show a stream as it comes through another port, where there is one. */
function behind(place, shown, text, name, url, media, title) {
  const port = Number(text);
  if (!Number.isInteger(port) || port < 1 || port > 65535) return;
  element(place).hidden = false;
  const other = url && new URL(url);
  if (other) other.port = port;
  shown.show(name, String(other), media, title ?? "");
}

/** Ask for what a stream wants of its viewers, and watch it with that. */
async function prove(name) {
  if ((await askProof(name)) && picture.stream === name) watch(name, mediaUrl(name), "");
}

async function askProof(name) {
  const proof = await ask({
    title: `Watch ${foreign(name, 80)}`, does: "Watch", act: async (said) => said.proof.replace(/^\?/, ""),
    text: "This stream asks its viewers for a key or a token. What you give is forgotten when this page is left.",
    fields: [{ name: "proof", label: "What stands behind its address", needed: true, hint: "Like key=… or expires=…&token=…" }],
  });
  if (proof) proofs.set(name, proof);
  return Boolean(proof);
}

/** Where a stream is watched over HTTP: at the listener's port, by the host of this page, which may load from no other. */
function mediaUrl(name) {
  const wanted = location.protocol === "https:" ? "https" : "http";
  const listeners = server.listeners ?? [];
  const listener = listeners.find((item) => item.name === wanted) ?? listeners.find((item) => item.name === "https");
  if (!listener) return "";
  const [, port] = /:(\d+)$/.exec(listener.address);
  const path = name.split("/").map(encodeURIComponent).join("/");
  const proof = proofs.has(name) ? `?${proofs.get(name)}` : "";
  return `${listener.name}://${location.hostname}:${port}/${path}.flv${proof}`;
}

/** Where recordings of a stream are, as `mediaUrl`. */
function recordingsUrl(name) {
  const where = mediaUrl(name), url = where ? new URL(where) : null;
  if (url) url.pathname = `/recordings${url.pathname.replace(/\.flv$/, "")}`;
  return url;
}

// -- who is kept out

async function lookAtBans() {
  try {
    const { bans, found } = await get("bans", { limit: MOST_BANS });
    showBans(bans, found.bans);
  } catch (error) {
    if (!(error instanceof Refused)) return; // the next look says it
    put(element("bans-empty"), faultOf(error));
    element("bans-empty").hidden = false;
    element("bans").replaceChildren();
  }
}

function showBans(bans, all) {
  const list = element("bans"), empty = element("bans-empty");
  const there = new Map([...list.children].map((line) => [line.cidr, line]));
  const lines = bans.map((item) => {
    const line = there.get(item.cidr) ?? banLine(item.cidr);
    const until = item.expires ? `until ${new Date(item.expires).toLocaleString("en-GB")}` : "until it is lifted";
    put(line.children[1], [item.action === "limit" ? "limited" : "", until, foreign(item.reason, 200)].filter(Boolean).join(" · "));
    return line;
  });
  if (lines.some((line, place) => list.children[place] !== line) || list.children.length !== lines.length) list.replaceChildren(...lines);
  empty.hidden = lines.length > 0 && all <= lines.length;
  put(empty, lines.length ? `and ${count(all - lines.length)} more: flowctl bans` : "Nobody is kept out.");
}

function banLine(cidr) {
  const lift = make("button", { type: "button", text: "Lift", "aria-label": `Lift the ban of ${foreign(cidr, 80)}` });
  const line = make("li", {}, make("b", {}, make("bdi", { text: foreign(cidr, 80) })), make("span"), lift);
  line.cidr = cidr;
  lift.addEventListener("click", async () => {
    lift.disabled = true;
    try {
      await post("unban", { network: cidr });
      element("bans-title").focus();
      say(`${foreign(cidr, 80)} may come again.`);
    } catch (error) {
      say(faultOf(error));
    } finally {
      lift.disabled = false;
    }
  });
  return line;
}

// -- one viewer

function open(row) {
  detail.open(row);
  viewers.mark(row.connection);
  element("detail-title").focus({ preventScroll: matchMedia("(min-width: 980px)").matches });
  look();
}

function close() {
  const number = detail.number;
  detail.close();
  viewers.mark(null);
  viewers.focus(number);
}

element("detail-close").addEventListener("click", close);
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && detail.number !== null && !document.querySelector("dialog[open]")) close();
});

element("do-kick").addEventListener("click", async () => {
  const { connection, peer } = detail.row;
  const done = await ask({
    title: `Kick ${foreign(peer, 80)}?`, text: "Its connection ends now; it may come again.", does: "Kick", danger: true,
    fields: [{ name: "reason", label: "Why, for the log and the records" }],
    act: ({ reason }) => post("kick", { connection, reason }),
  });
  if (done) say(`Kicked ${foreign(peer, 80)}.`);
});

element("do-ban").addEventListener("click", () => ban(hostOf(detail.row.peer)));
element("ban-add").addEventListener("click", () => ban(""));

async function ban(network) {
  const done = await ask({
    title: "Ban an address or a network", danger: true, does: "Ban",
    text: "Its connections end now, and it is kept out. Others behind the same address are kept out with it.",
    fields: [
      { name: "network", label: "Address or network", value: network, needed: true, hint: "Like 203.0.113.7 or 2001:db8::/64." },
      { name: "duration", label: "For how long", value: "1h", hint: "Like 10min or 7d. Empty: until it is lifted." },
      { name: "reason", label: "Why" },
    ],
    act: (said) => post("ban", said),
  });
  if (done) say(`Banned ${foreign(done.cidr ?? "it", 80)}; connections ended: ${count(done.ended)}.`);
}

element("do-limits").addEventListener("click", async () => {
  const { connection, peer, axes } = detail.row;
  const marks = (mark) => `${axes.bytes[mark]}B,${axes.messages[mark]},${axes.age_ms[mark]}ms`;
  const done = await ask({
    title: `Limits of ${foreign(peer, 80)}`, text: "They are in force at once, for this connection alone.", does: "Set them",
    fields: [
      { name: "soft", label: "Soft: bytes, messages, age", value: marks("soft"), hint: "Like 2MiB,2048,4s. 0 is off." },
      { name: "hard", label: "Hard: bytes, messages, age", value: marks("hard"), hint: "Empty: twice the soft ones." },
    ],
    act: (said) => post("limits", { connection, ...said }),
  });
  if (done) say(`Limits of ${foreign(peer, 80)} are ${foreign(done.limits ?? "set")}.`);
});

function hostOf(peer) {
  return peer.startsWith("[") ? peer.slice(1, peer.indexOf("]")) : peer.slice(0, peer.lastIndexOf(":"));
}

let saying = 0;

function say(text) {
  put(element("said"), text);
  clearTimeout(saying);
  saying = setTimeout(() => put(element("said"), ""), 6000);
  look();
  lookAtBans();
}

// -- what happens

function happened(name, event) {
  heard();
  lookSoon();
  if (name === "close" && event.connection === detail.number) detail.gone([event.reason, event.why].filter(Boolean).join(", "));
  element("events-empty").hidden = true;
  const list = element("events");
  const at = event.at ? new Date(event.at * 1000) : new Date();
  const what = make("b", { cls: tone(event.state), text: `${foreign(event.state ?? event.reason ?? event.what ?? name, 60)} ` });
  const who = [event.peer, event.stream, event.why || event.limit].filter(Boolean).map((part) => foreign(part, 250));
  const words = make("bdi", { text: who.join(" · ") });
  list.prepend(make("li", {}, make("time", { text: at.toLocaleTimeString("en-GB"), datetime: at.toISOString() }), make("span", {}, what, words)));
  while (list.children.length > MOST_EVENTS) list.lastChild.remove();
}

follow(happened, (error) => error && missed(error));
setInterval(freshness, 1000);
setInterval(() => document.hidden || lookAtBans(), BANS_MS);
element("token-open").addEventListener("click", askToken);
addEventListener("flowctl-token", () => { element("notice").hidden = true; tokenGiven(); look(); lookAtBans(); });
document.addEventListener("visibilitychange", () => document.hidden || look());
look();
lookAtBans();
tokenGiven();

function tokenGiven() {
  put(element("token-open"), token.value ? "Token given" : "Token");
}
