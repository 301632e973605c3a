// One viewer: its queue on three axes against its marks, its ledger, and what can be done to it.

import { AxisChart } from "./charts.js";
import { renditionWords } from "./viewers.js";
import { count, duration, foreign, make, percent, put, rate, size, tone } from "./words.js";

const SPAN_S = 120;
const MOST_KEPT = 400; // viewers whose queues are remembered while they are listed, so that a chart does not begin empty

const element = (id) => document.getElementById(id);

export class Detail {
  constructor() {
    this.number = null;
    this.row = null;
    this.kept = new Map(); // points by connection, those heard of last at the end
    const box = element("axes");
    this.charts = {
      bytes: new AxisChart(box, "bytes waiting", size, SPAN_S),
      messages: new AxisChart(box, "messages waiting", count, SPAN_S),
      age_ms: new AxisChart(box, "age of the oldest", (value) => duration(value / 1000), SPAN_S),
    };
    this.facts = new Map();
  }

  /** Remember how a viewer stands now, at `at` seconds. */
  remember(row, at) {
    const points = this.kept.get(row.connection) ?? [];
    this.kept.delete(row.connection);
    this.kept.set(row.connection, points);
    if (!points.length || points.at(-1).at < at) points.push({ at, axes: row.axes });
    while (points.length > 2 && points[1].at < at - SPAN_S) points.shift();
    if (this.kept.size > MOST_KEPT) this.kept.delete(this.kept.keys().next().value);
  }

  open(row) {
    this.number = row.connection;
    element("detail-empty").hidden = true;
    element("detail-body").hidden = false;
    element("detail-close").hidden = false;
    put(element("detail-title"), `Viewer no. ${row.connection}`);
    element("ledger").replaceChildren();
    this.act(true);
    this.show(row, performance.now() / 1000);
  }

  close() {
    this.number = this.row = null;
    element("detail-empty").hidden = false;
    element("detail-body").hidden = true;
    element("detail-close").hidden = true;
    put(element("detail-title"), "One viewer");
  }

  /** It has gone, and `why`, if that is known: what else is known stays on the page. */
  gone(why = "") {
    if (why) put(element("detail-why"), foreign(`closed: ${why}`, 600));
    const state = element("detail-state");
    state.className = "chip";
    put(state, "GONE");
    this.act(false);
  }

  act(there) {
    for (const id of ["do-kick", "do-limits"]) element(id).disabled = !there; // an address may be banned later, too
  }

  show(row, at) {
    this.row = row;
    this.remember(row, at);
    const state = element("detail-state");
    state.className = `chip ${tone(row.state)}`;
    put(state, row.state);
    put(element("detail-peer"), foreign(row.peer));
    put(element("detail-why"), foreign(row.why, 600));
    this.fact("stream", foreign(row.stream ?? "none"));
    this.fact("player", foreign(row.agent || "says nothing", 120));
    this.fact("behind", `${duration(row.delay_ms / 1000)}, gets ${percent(row.pictures)} of the pictures`);
    this.fact("rendition", renditionWords(row));
    this.fact("takes", row.rate_bytes_per_s == null ? "all there is" : rate(row.rate_bytes_per_s));
    this.fact("sent", `${size(row.sent_bytes)} in ${duration(row.open_s)}, ${count(row.dropped)} messages dropped`);
    const spent = Object.entries(row.time_in_states_s ?? {}).filter(([, seconds]) => seconds > 0);
    if (spent.length) this.fact("was", spent.map(([name, seconds]) => `${name} ${duration(seconds)}`.replaceAll(" ", "\u00a0")).join(", "));
    const points = this.kept.get(row.connection);
    for (const [axis, chart] of Object.entries(this.charts)) {
      const { soft, hard } = row.axes[axis];
      chart.draw(points.map((point) => ({ at: point.at, value: point.axes[axis].value })), soft, hard, at);
    }
    if (row.ledger) this.ledger(row.ledger);
  }

  /** Show a fact under its name; without a text it is not shown. */
  fact(name, text) {
    let value = this.facts.get(name);
    if (!value) {
      value = make("bdi");
      this.facts.set(name, value);
      element("detail-facts").append(make("dt", { text: name }), make("dd", {}, value));
    }
    put(value, text);
    value.parentElement.hidden = value.parentElement.previousElementSibling.hidden = !text;
  }

  ledger(entries) {
    element("ledger-empty").hidden = entries.length > 0;
    const list = element("ledger");
    const lines = entries.toReversed();
    while (list.children.length > lines.length) list.lastChild.remove();
    lines.forEach((entry, place) => {
      const line = list.children[place] ?? list.appendChild(make("li", {}, make("span"), make("span", {}, make("b"), make("bdi"))));
      put(line.firstChild, `${duration(entry.ago_s)} ago`);
      put(line.lastChild.firstChild, `${entry.state ?? entry.what} `);
      put(line.lastChild.lastChild, foreign(entry.why, 400));
    });
  }
}
