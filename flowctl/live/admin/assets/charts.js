// Charts, drawn as SVG: viewers by state in lanes of their own, and one viewer's queue on three axes against its marks.
//
// Lanes, not a stack: of a thousand viewers one that is slow would be a hair at the edge of a stack.

import { STATES, make, put } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 1000; // of the paper; it is stretched to the box, lines keep their width
const HEIGHT = 100;
const LEAST_SPAN_S = 60;

function draw(tag, cls, attributes = {}) {
  const element = document.createElementNS(SVG, tag);
  element.setAttribute("class", cls);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function paper(label) {
  const svg = draw("svg", "", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  svg.setAttribute("aria-label", label);
  const area = draw("path", "area"), stroke = draw("path", "stroke");
  svg.append(draw("path", "floor", { d: `M0 ${HEIGHT}H${WIDTH}` }), area, stroke);
  return { svg, area, stroke };
}

/** Draw points (seconds, value) as steps or lines; where nothing was heard for long, there is a gap. */
function trace(parts, points, from, until, top, { steps, gapS }) {
  const x = (at) => ((at - from) / (until - from)) * WIDTH;
  const y = (value) => HEIGHT - (Math.min(value, top) / top) * (HEIGHT - 6);
  let line = "", filled = "", begin = null, before = null;
  const close = () => {
    if (before) filled += `V${HEIGHT}H${begin.toFixed(1)}Z`;
  };
  for (const point of points) {
    if (point.at < from - gapS) continue;
    const at = Math.max(0, x(point.at)).toFixed(1), value = y(point.value).toFixed(1);
    if (!before || point.at - before.at > gapS) {
      close();
      begin = Number(at);
      line += `M${at} ${value}`;
      filled += `M${at} ${HEIGHT}V${value}`;
    } else {
      const move = steps ? `H${at}V${value}` : `L${at} ${value}`;
      line += move;
      filled += move;
    }
    before = point;
  }
  close();
  parts.stroke.setAttribute("d", line);
  parts.area.setAttribute("d", filled);
}

/** Viewers by state over time. */
export class Lanes {
  constructor(box, spanS) {
    this.spanS = spanS;
    this.points = []; // {at, states: [4]}
    this.lanes = STATES.map((state) => {
      const parts = paper(`Viewers that are ${state} over time`);
      const number = make("b", { text: "–" }), most = make("span", { cls: "most" });
      const plot = make("div", { cls: `plot ${state}` }, parts.svg, most);
      const label = make("div", { cls: `label ${state}` }, number, make("span", { text: state }));
      box.append(make("div", { cls: "lane" }, label, plot));
      return { ...parts, number, most, state };
    });
    this.begin = make("span");
    box.append(make("div", { cls: "clock", "aria-hidden": "true" }, this.begin, make("span", { text: "now" })));
  }

  add(at, states) {
    const last = this.points.at(-1);
    if (last && at <= last.at) return;
    this.points.push({ at, states });
    while (this.points.length > 2 && this.points[1].at < at - this.spanS) this.points.shift();
    this.draw(at);
  }

  draw(now) {
    // A page that was just opened has little to show: it begins with a minute of paper, and gets more.
    const spanS = Math.min(this.spanS, Math.max(LEAST_SPAN_S, now - this.points[0].at));
    put(this.begin, `${spanS > 90 ? `${Math.round(spanS / 60)} min` : `${Math.round(spanS)} s`} ago`);
    this.lanes.forEach((lane, place) => {
      const points = this.points.map(({ at, states }) => ({ at, value: states[place] }));
      const most = Math.max(0, ...points.map((point) => point.value));
      const value = points.at(-1)?.value ?? 0;
      trace(lane, points, now - spanS, now, Math.max(most, 1), { steps: true, gapS: 6 });
      put(lane.number, value.toLocaleString("en"));
      put(lane.most, most ? `most ${most.toLocaleString("en")}` : "");
      lane.svg.setAttribute("aria-label", `${lane.state}: ${value} viewers now, at most ${most} in this time`);
    });
  }
}

/** One measure of one viewer's queue, with its soft and hard mark. */
export class AxisChart {
  constructor(box, name, write, spanS) {
    Object.assign(this, { name, write, spanS, ...paper(name) });
    this.now = make("b", { text: "–" });
    this.limits = make("span");
    this.softLine = draw("path", "mark soft");
    this.hardLine = draw("path", "mark hard");
    this.svg.append(this.softLine, this.hardLine);
    this.softWord = make("span", { cls: "marks", text: "soft", "aria-hidden": "true" });
    this.hardWord = make("span", { cls: "marks", text: "hard", "aria-hidden": "true" });
    const title = make("span", { text: `${name} ` }, this.now);
    box.append(make("div", { cls: "axis" }, make("div", { cls: "label" }, title, this.limits),
      make("div", { cls: "plot" }, this.svg, this.softWord, this.hardWord)));
  }

  /** Draw points (at, value); a mark of 0 is off. The scale shows the soft mark always, the hard one when near. */
  draw(points, soft, hard, now) {
    const most = Math.max(0, ...points.map((point) => point.value));
    const first = soft || hard || 0;
    const top = Math.max(most * 1.1, first * 1.15, 1);
    const reached = hard && most > first ? Math.max(top, hard * 1.1) : top;
    trace(this, points, now - this.spanS, now, reached, { steps: false, gapS: 6 });
    this.mark(this.softLine, this.softWord, soft, reached);
    this.mark(this.hardLine, this.hardWord, hard, reached);
    const value = points.at(-1)?.value ?? 0;
    put(this.now, this.write(value));
    put(this.limits, `soft ${soft ? this.write(soft) : "off"} · hard ${hard ? this.write(hard) : "off"}`);
    this.svg.setAttribute("aria-label",
      `${this.name}: ${this.write(value)} now, at most ${this.write(most)}; ${this.limits.textContent}`);
  }

  mark(line, word, value, top) {
    const shown = Boolean(value) && value <= top;
    line.setAttribute("d", shown ? `M0 ${HEIGHT - (value / top) * (HEIGHT - 6)}H${WIDTH}` : "");
    word.hidden = !shown;
    if (shown) word.style.bottom = `${((value / top) * (HEIGHT - 6))}%`;
  }
}
