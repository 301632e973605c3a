// What is asked of the server: figures, operations, and its events. The token goes into a header, never into an address.

const BASE = "api/v1/";
const SILENCE_MS = 40_000; // the server says something every 15 s: this long without a word, and we ask anew
const TRY_AGAIN_MS = [500, 1000, 2000, 4000, 8000];

export class Refused extends Error {
  constructor(status, message, hint) {
    super(message);
    this.status = status;
    this.hint = hint;
  }
}

export const token = {
  get value() {
    return sessionStorage.getItem("flowctl.token") ?? "";
  },
  set value(text) {
    if (text) sessionStorage.setItem("flowctl.token", text);
    else sessionStorage.removeItem("flowctl.token");
  },
};

function headers(more = {}) {
  return token.value ? { ...more, Authorization: `Bearer ${token.value}` } : more;
}

async function answer(response) {
  let said = null;
  try {
    said = await response.json();
  } catch {
    said = null; // a proxy's page, perhaps
  }
  if (response.ok) return said;
  const detail = said?.error ?? said?.detail ?? said ?? {};
  const message = typeof detail === "string" ? detail : detail.message ?? `the server answered ${response.status}`;
  throw new Refused(response.status, message, detail.hint ?? "");
}

function options(more = {}) {
  return { cache: "no-store", credentials: "omit", redirect: "error", signal: AbortSignal.timeout(10_000), ...more };
}

/** Look at something: `get("connections", {state: "SOFT_LIMIT"})`. */
export async function get(what, asked = {}) {
  const query = new URLSearchParams(Object.entries(asked).filter(([, value]) => value !== "" && value != null));
  const tail = query.size ? `?${query}` : "";
  return answer(await fetch(BASE + what + tail, options({ headers: headers() })));
}

/** Change something. */
export async function post(what, said = {}) {
  const body = JSON.stringify(Object.fromEntries(Object.entries(said).filter(([, value]) => value !== "")));
  return answer(await fetch(BASE + what, options({
    method: "POST", headers: headers({ "Content-Type": "application/json" }), body,
  })));
}

/**
 * Follow the server's events for ever: reconnects, and says when it is cut off.
 *
 * EventSource cannot send a header, so the lines are read here (HTML standard, 9.2.6).
 */
export async function follow(onEvent, onLost) {
  for (let failures = 0; ; failures += 1) {
    const ended = new AbortController();
    let watchdog = 0;
    const heard = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => ended.abort(), SILENCE_MS);
    };
    try {
      heard();
      const response = await fetch(`${BASE}events`, options({
        headers: headers({ Accept: "text/event-stream" }), signal: ended.signal,
      }));
      if (!response.ok) await answer(response);
      for await (const event of eventsOf(response.body, heard)) {
        failures = 0;
        onEvent(event.name, event.data);
      }
      onLost(null);
    } catch (error) {
      onLost(error);
    } finally {
      clearTimeout(watchdog);
      ended.abort();
    }
    await new Promise((resume) => {
      const timer = setTimeout(resume, TRY_AGAIN_MS[Math.min(failures, TRY_AGAIN_MS.length - 1)]);
      addEventListener("flowctl-token", () => { clearTimeout(timer); resume(); }, { once: true });
    });
  }
}

async function* eventsOf(body, heard) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "", name = "message", data = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    heard();
    const lines = (left + value).split(/\r\n|\n|\r/);
    left = lines.pop();
    if (left.length > 1 << 20) throw new Error("the server sends a line without end");
    for (const line of lines) {
      if (line === "") {
        if (data.length) {
          const event = parsed(name, data.join("\n"));
          if (event) yield event;
        }
        name = "message";
        data = [];
      } else if (line.startsWith("event:")) name = line.slice(6).trim();
      else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
    }
  }
}

function parsed(name, text) {
  try {
    return { name, data: JSON.parse(text) };
  } catch {
    return null; // one event that is none does not end the others
  }
}
