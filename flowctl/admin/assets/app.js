// The dashboard: asks the server how it stands, shows it, and does what its reader wants done.

import { Refused, follow, get, post, token } from "./api.js";
import { ask, askToken, faultOf } from "./ask.js";
import { Lanes } from "./charts.js";
import { Detail } from "./detail.js";
import { Picture } from "./picture.js";
import { Viewers } from "./viewers.js";
import { STATES, count, duration, foreign, make, percent, put, rate } from "./words.js";

const LOOK_MS = 1000; // how often figures are asked for while the page is seen
const STALE_S = 4; // without news for so long the page says that it is old
const SPAN_S = 300;
const MOST_EVENTS = 100;

const element = (id) => document.getElementById(id);
const now = () => performance.now() / 1000;

let heardAt = null; // when the server last said something
let lost = null; // why not, if it does not
let server = {}; // figures of the server
let soon = 0; // timer of a look that was asked for
let looking = false;
const before = new Map(); // octets and time of each stream at the last look

const picture = new Picture();
const detail = new Detail();
const lanes = new Lanes(element("states"), SPAN_S);
const viewers = new Viewers(open, () => look());

// -- looking

/** Ask for all that is shown. One look at a time; who asks meanwhile gets another one afterwards. */
async function look() {
  clearTimeout(soon);
  if (looking) {
    soon = setTimeout(look, 100);
    return;
  }
  looking = true;
  try {
    const number = detail.number;
    const [streams, listed, one] = await Promise.all([
      get("streams", { limit: 100 }), get("connections", viewers.asked()), number === null ? null : chosen(number),
    ]);
    heard();
    const at = now();
    for (const row of listed.connections) detail.remember(row, at);
    showStreams(streams, at);
    viewers.show(listed);
    if (one && detail.number === number) detail.show(one, at);
  } catch (error) {
    missed(error);
  } finally {
    looking = false;
    if (!document.hidden) soon = setTimeout(look, LOOK_MS);
  }
}

async function chosen(number) {
  try {
    const said = await get(`connections/${number}`);
    return said.connection?.axes ? said.connection : said;
  } catch (error) {
    if (!(error instanceof Refused) || [401, 403].includes(error.status)) throw error;
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

function showServer(figures) {
  server = { ...server, ...figures };
  put(element("server").firstChild, foreign(server.url ?? ""));
  put(element("tile-viewers"), count(server.viewers));
  put(element("tile-slow"), count(server.slow));
  put(element("tile-streams"), count(server.streams));
  put(element("tile-dropped"), count(server.dropped));
  put(element("tile-busy"), percent(server.busy));
  put(element("tile-up"), duration(server.up_s));
  document.title = server.slow ? `(${server.slow}) flowctl` : "flowctl";
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
    put(media.firstChild, foreign(item.media));
    put(flow, last && at > last.at ? rate(Math.max(0, item.in_bytes - last.bytes) / (at - last.at)) : "–");
    put(watchers, count(item.viewers));
    row.media = item.media;
    before.set(item.stream, { at, bytes: item.in_bytes });
    row.button.setAttribute("aria-pressed", String(picture.stream === item.stream));
  });
  for (const name of before.keys()) if (!rows.some((item) => item.stream === name)) before.delete(name);
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
    if (again) picture.show("", "", "");
    else picture.show(name, mediaUrl(name), row.media ?? "");
  });
  return row;
}

/** Where a stream is watched over HTTP: the listener's port, on the host that this page came from. */
function mediaUrl(name) {
  const listener = server.http;
  if (!listener) return "";
  const url = new URL(location.href);
  url.port = String(listener.port);
  url.protocol = listener.tls ? "https:" : "http:";
  url.search = url.hash = "";
  url.pathname = `/${name.split("/").map(encodeURIComponent).join("/")}.flv`;
  return url.href;
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

element("do-ban").addEventListener("click", async () => {
  const done = await ask({
    title: "Ban an address or a network", danger: true, does: "Ban",
    text: "Its connections end now, and it is kept out. Others behind the same address are kept out with it.",
    fields: [
      { name: "network", label: "Address or network", value: hostOf(detail.row.peer), needed: true, hint: "Like 203.0.113.7 or 2001:db8::/64." },
      { name: "duration", label: "For how long", value: "1h", hint: "Like 10min or 7d. Empty: until it is lifted." },
      { name: "reason", label: "Why" },
    ],
    act: (said) => post("ban", said),
  });
  if (done) say(`Banned ${foreign(done.cidr ?? "it", 80)}; connections ended: ${count(done.ended)}.`);
});

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
}

// -- what happens

function happened(name, data) {
  heard();
  if (name === "figures") {
    showServer(data);
    lanes.add(now(), STATES.map((state) => data.states?.[state] ?? 0));
    return;
  }
  clearTimeout(soon);
  soon = setTimeout(look, 50);
  element("events-empty").hidden = true;
  const list = element("events");
  const what = make("b", { text: `${foreign(data.what ?? name, 60)} ` });
  const words = make("bdi", { text: foreign([data.peer, data.stream, data.why].filter(Boolean).join(" · "), 400) });
  list.prepend(make("li", {}, make("span", { text: new Date().toLocaleTimeString("en-GB") }), make("span", {}, what, words)));
  while (list.children.length > MOST_EVENTS) list.lastChild.remove();
}

follow(happened, (error) => error && missed(error));
setInterval(freshness, 1000);
element("token-open").addEventListener("click", askToken);
addEventListener("flowctl-token", () => { element("notice").hidden = true; look(); });
document.addEventListener("visibilitychange", () => document.hidden || look());
look();
