// Figures as people read them, and text of peers made safe to show. Every text reaches the page as text, never as HTML.

const MOST_CHARS = 300;

/** Text of a peer: cut, and without what would turn the line round or hide in it. */
export function foreign(value, most = MOST_CHARS) {
  const text = String(value ?? "").replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cs}]/gu, "\u00b7");
  return text.length > most ? `${text.slice(0, most)}…` : text;
}

export function size(bytes) {
  if (!Number.isFinite(bytes)) return "–";
  for (const [unit, least] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (bytes >= least) return `${digits(bytes / least)} ${unit}`;
  }
  return `${Math.round(bytes)} B`;
}

export function rate(bytesPerS) {
  if (!Number.isFinite(bytesPerS)) return "–";
  const bits = bytesPerS * 8;
  for (const [unit, least] of [["Gbit/s", 1e9], ["Mbit/s", 1e6], ["kbit/s", 1e3]]) {
    if (bits >= least) return `${digits(bits / least)} ${unit}`;
  }
  return `${Math.round(bits)} bit/s`;
}

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export function count(value) {
  if (!Number.isFinite(value)) return "–";
  return value < 100000 ? value.toLocaleString("en") : `${digits(value / 1000)}k`;
}

export function percent(share) {
  if (!Number.isFinite(share)) return "–";
  const shown = share * 100;
  return shown > 99 && shown < 100 ? "99 %" : `${Math.round(shown)} %`; // 100 % is for those who miss nothing
}

function digits(value) {
  return value >= 100 ? Math.round(value).toLocaleString("en") : value.toPrecision(value >= 10 ? 3 : 2);
}

/** Make an element with text and children; nothing is ever parsed. */
export function make(tag, { cls = "", text = null, ...attributes } = {}, ...children) {
  const element = document.createElement(tag);
  if (cls) element.className = cls;
  if (text !== null) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Set text only where it changed: what is the same is neither laid out again nor read out again. */
export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const STATES = ["READY", "OVERLOADED", "SOFT_LIMIT", "HARD_LIMIT"];

/** A class by state: only of those that there are, whatever was said. */
export function tone(state) {
  return STATES.includes(state) ? state : "";
}
