// The list of viewers: a page of them at a time, asked of the server, however many thousands there are.

import { count, duration, foreign, make, percent, put, size, tone } from "./words.js";

const PAGE = 50;
const DROPS = { // what was left out, in words: reasons as the server names them
  late: "too late to show", "refused by policy": "left out of the queue", "thinned from the queue": "thinned",
  "waiting for a key frame": "before a key frame", "hard limit held": "refused at the hard limit",
  "skipped to return to live": "skipped to return to live",
};

export class Viewers {
  /** `choose(row)` is called when somebody picks a viewer; `changed()` when other viewers are to be listed. */
  constructor(choose, changed) {
    this.table = document.getElementById("viewers"); // each viewer has a body of two rows: figures, and words
    this.form = document.getElementById("filters");
    this.offset = 0;
    this.found = 0;
    this.lines = new Map(); // by connection
    this.chosen = null;
    this.choose = choose;
    let timer = 0;
    const again = (wait) => {
      clearTimeout(timer);
      timer = setTimeout(() => { this.offset = 0; this.settled = false; changed(); }, wait);
    };
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", (event) => again(event.target.type === "search" ? 300 : 0));
    this.form.addEventListener("keydown", (event) => event.key === "Enter" && again(0));
    this.before = document.getElementById("page-before");
    this.next = document.getElementById("page-next");
    this.before.addEventListener("click", () => { this.turn(-PAGE); changed(); });
    this.next.addEventListener("click", () => { this.turn(PAGE); changed(); });
    this.settled = false; // whether lines keep their places: not after other viewers were asked for
  }

  turn(by) {
    this.offset = Math.max(0, this.offset + by);
    this.settled = false;
    document.getElementById("viewers-section").scrollIntoView({ block: "nearest" });
  }

  /** What is asked of the server. */
  asked() {
    const form = new FormData(this.form);
    const stream = form.get("stream").trim();
    return {
      role: "viewer", state: form.get("state") || (form.get("which") === "slow" ? "slow" : ""),
      stream, peer: form.get("peer").trim(), sort: form.get("sort"), limit: PAGE, offset: this.offset,
    };
  }

  show({ connections: rows, found }) {
    this.found = found.connections;
    if (this.offset && this.offset >= this.found) this.offset = Math.max(0, Math.ceil(this.found / PAGE - 1) * PAGE);
    const ordered = this.ordered(rows);
    const there = new Set(ordered.map((row) => row.connection));
    for (const [number, line] of this.lines) {
      if (there.has(number)) continue;
      if (line.row.contains(document.activeElement)) document.getElementById("viewers-title").focus();
      line.row.remove();
      this.lines.delete(number);
    }
    this.sets = ordered.some((row) => row.rendition); // else there is no column of renditions
    this.table.classList.toggle("sets", this.sets);
    ordered.forEach((row, place) => {
      const line = this.lines.get(row.connection) ?? this.line(row.connection);
      if (this.table.tBodies[place] !== line.row) this.table.insertBefore(line.row, this.table.tBodies[place] ?? null);
      this.fill(line, row);
    });
    this.settled = true;
    this.words(rows.length);
  }

  /** While somebody points at the list, or is in it by keyboard, lines keep their places. */
  ordered(rows) {
    const held = this.settled && (this.table.matches(":hover") || this.table.contains(document.activeElement));
    if (!held) return rows;
    const by = new Map(rows.map((row) => [row.connection, row]));
    const kept = [...this.lines.keys()].filter((number) => by.has(number));
    const places = new Map([...this.table.tBodies].map((row, place) => [row.connection, place]));
    kept.sort((a, b) => places.get(a) - places.get(b));
    return [...kept.map((number) => by.get(number)), ...rows.filter((row) => !this.lines.has(row.connection))];
  }

  line(number) {
    const name = make("button", { cls: "name", type: "button" });
    const nameText = make("bdi"), of = make("bdi", { cls: "of clip" }), why = make("bdi", { cls: "why clip" });
    const done = make("div", { cls: "done clip" }), chip = make("span", { cls: "chip" });
    name.append(nameText);
    const figure = (label) => make("td", { cls: "n", "data-label": label });
    const cells = { delay: figure("behind"), pictures: figure("pictures"), queued: figure("waiting"), dropped: figure("dropped"), rendition: figure("rendition") };
    cells.rendition.classList.add("rendition");
    const figures = make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, chip), ...Object.values(cells));
    const words = make("tr", { cls: "words" }, make("td", { colspan: "6" }, of, why, done));
    const row = make("tbody", {}, figures, words);
    row.connection = number;
    const line = { row, name: nameText, of, why, done, chip, ...cells, data: null };
    row.addEventListener("click", () => {
      if (!String(getSelection())) this.choose(line.data); // who marks text to copy it does not choose
    });
    this.lines.set(number, line);
    return line;
  }

  fill(line, row) {
    line.data = row;
    put(line.name, foreign(row.peer));
    const agent = row.agent ? ` · ${foreign(row.agent, 100)}` : "";
    put(line.of, `${foreign(row.stream ?? "no stream")} · ${(row.protocol || "rtmp").toUpperCase()} · no. ${row.connection}${agent}`);
    const done = whatWasDone(row);
    put(line.why, isSlow(row) ? foreign(row.why, 400) : "");
    put(line.done, done);
    line.done.hidden = !done;
    const shown = `chip ${tone(row.state)}`;
    if (line.chip.className !== shown) line.chip.className = shown;
    put(line.chip, row.state);
    put(line.delay, duration(row.delay_ms / 1000));
    put(line.pictures, percent(row.pictures));
    put(line.queued, size(row.queued_bytes));
    put(line.dropped, count(row.dropped));
    put(line.rendition, foreign(row.rendition ?? "–", 20));
    line.rendition.title = renditionWords(row);
    line.why.parentElement.colSpan = this.sets ? 7 : 6;
    line.row.classList.toggle("chosen", row.connection === this.chosen);
  }

  mark(number) {
    this.chosen = number;
    for (const [key, line] of this.lines) line.row.classList.toggle("chosen", key === number);
  }

  focus(number) {
    const line = this.lines.get(number);
    (line?.row.querySelector("button") ?? document.getElementById("viewers-title")).focus();
  }

  words(shown) {
    const slow = this.asked().state === "slow";
    put(document.getElementById("viewers-count"), `${count(this.found)} ${slow ? "not keeping up" : "listed"}`);
    const empty = document.getElementById("viewers-empty");
    empty.hidden = shown > 0;
    put(empty, slow && !this.asked().stream && !this.asked().peer ? "Everybody keeps up." : "No viewer fits.");
    this.before.disabled = this.offset === 0;
    this.next.disabled = this.offset + PAGE >= this.found;
    const last = Math.min(this.offset + PAGE, this.found);
    put(document.getElementById("page-where"), this.found ? `${this.offset + 1} to ${last} of ${count(this.found)}` : "");
  }
}

function isSlow(row) {
  return row.state !== "READY" || row.pictures < 1 || row.delay_ms > 0;
}

/** In which rendition of its set a viewer is, why, and what it had before; "" for one that never followed a set. */
export function renditionWords({ rendition, renditions: set }) {
  if (!set) return "";
  const now = rendition ? `${rendition} of ${set.of} for ${duration(set.for_s)}: ${set.why}` : "none now";
  const shares = Object.entries(set.shares).map(([name, share]) => `${percent(share)} of its time in ${name}`);
  const switches = set.ups + set.downs;
  const vain = set.failed ? `, ${count(set.failed)} up in vain` : "";
  return foreign([now, ...shares, `${count(switches)} ${switches === 1 ? "switch" : "switches"}${vain}`].join("; "), 500);
}

/** What was done about a slow viewer, in a line: from the counts that the server keeps. */
export function whatWasDone(row) {
  const reasons = Object.entries(row.drops ?? {}).map(([reason, classes]) => {
    const messages = Object.values(classes).reduce((sum, each) => sum + each, 0);
    return `${count(messages)} ${DROPS[reason] ?? foreign(reason.replaceAll("_", " "), 60)}`;
  });
  const parts = row.pictures < 1 ? [`gets ${percent(row.pictures)} of the pictures`] : [];
  if (reasons.length) parts.push(`messages dropped: ${reasons.join(", ")}`);
  return parts.join("; ");
}
