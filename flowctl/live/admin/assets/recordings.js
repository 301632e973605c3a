// Recordings of a stream: listed by the HTTP listener, and played from it, so that this page asks as any viewer does.

import { library } from "./picture.js";
import { duration, foreign, make, put, size } from "./words.js";

const AT_ONCE = 20;
const PIECE_BYTES = 64e6; // a part is asked for at once: it has no ranges by which more could be asked for later
const LATE_MS = 400; // a slider that is being moved asks for nothing

const element = (id) => document.getElementById(`recordings-${id}`);

export class Recordings {
  /** `address(stream)` tells where its recordings are, a URL or null; `refused(stream)` resolves to whether there is a proof now. */
  constructor(address, refused) {
    this.address = address;
    this.refused = refused;
    this.stream = "";
    this.row = null; // that is played
    this.player = null;
    this.timer = 0;
    element("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.list(new FormData(element("form")));
    });
    element("more").addEventListener("click", () => this.look(this.query, this.next));
    element("at").addEventListener("input", () => {
      put(element("time"), this.time());
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.play(this.row, Number(element("at").value)), LATE_MS);
    });
  }

  list(asked) {
    const until = asked.get("to") ? new Date(`${asked.get("to")}Z`) : null;
    this.stream = asked.get("stream").trim();
    this.query = until ? { to: until.toISOString() } : {};
    this.stop();
    element("list").replaceChildren();
    element("more").hidden = true;
    return this.look(this.query, null);
  }

  async look(query, before) {
    const url = this.address(this.stream), turn = (this.turn = {}); // only the answer to the last question counts
    if (!url) return this.say("Nothing to list them from: start the server with --http 127.0.0.1:8080.");
    for (const [name, value] of Object.entries({ ...query, ...(before && { before }), limit: AT_ONCE })) url.searchParams.append(name, value);
    try {
      const answer = await fetch(url, { referrerPolicy: "no-referrer" });
      if (this.turn !== turn) return null;
      if ([401, 403].includes(answer.status)) {
        this.say("This stream asks its viewers for a key or a token.");
        return (await this.refused(this.stream)) ? this.look(query, before) : null;
      }
      if (answer.status === 404) return this.say("Its recordings are not given here: record_play says whose are.");
      if (!answer.ok) throw new Error(`${answer.status} ${await answer.text()}`);
      const { recordings, next } = await answer.json();
      if (this.turn !== turn) return null;
      element("list").append(...recordings.map((row) => this.line(row)));
      this.next = next;
      element("more").hidden = !next;
      return this.say(element("list").children.length ? "" : "Nothing was recorded of it then.");
    } catch (error) {
      return this.turn === turn && this.say(`They cannot be listed: ${foreign(error.message, 200)}`);
    }
  }

  line(row) {
    const start = foreign(row.start, 30).replace("T", " ").replace(/\.\d+Z$/, " UTC");
    const button = make("button", { type: "button", text: "Play", "aria-label": `Play ${start}`, "aria-pressed": "false" });
    const length = row.duration_s === null ? "of unknown length" : duration(row.duration_s);
    const words = [length, size(row.bytes), foreign(row.format, 8), row.being_written ? "being written" : ""];
    const line = make("li", {}, make("b", { text: start }), make("span", { text: words.filter(Boolean).join(" · ") }), button);
    button.addEventListener("click", () => {
      for (const other of element("list").querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
      this.play(row, 0);
    });
    return line;
  }

  /** Play a recording from so many seconds on, cut by the server: MP4 as browsers do, FLV by mpegts.js. */
  async play(row, from) {
    this.stop();
    this.row = row;
    const url = this.address(this.stream), video = element("video"), at = element("at");
    if (!url || !row) return;
    element("screen").hidden = false;
    element("place").hidden = !(row.duration_s > 0);
    at.max = Math.floor(row.duration_s ?? 0);
    at.value = from;
    put(element("time"), this.time());
    video.onerror = () => { // who pauses for long loses the connection
      if (video.currentTime > 1) this.play(row, from + video.currentTime);
      else this.note("This browser cannot play it.");
    };
    video.onplaying = () => this.note("");
    this.note("Loading…");
    const begin = Date.parse(row.start), end = begin + Math.ceil((row.duration_s ?? 0) * 1000) + 1;
    const next = from + Math.max((row.duration_s * PIECE_BYTES) / (row.bytes || 1), 10), until = Math.min(begin + next * 1000, end);
    video.onended = () => until < end && this.play(row, next);
    url.pathname += `.${row.format}`;
    url.searchParams.append("from", new Date(begin + from * 1000).toISOString());
    url.searchParams.append("to", new Date(Math.max(until, begin + from * 1000 + 1)).toISOString());
    if (row.format === "flv") {
      const mpegts = await library();
      if (this.row !== row || this.player) return;
      if (!mpegts.isSupported()) return this.note("This browser cannot play FLV.");
      const source = { type: "flv", isLive: false, url: url.href, cors: true, withCredentials: false };
      this.player = mpegts.createPlayer(source, { lazyLoad: false, autoCleanupSourceBuffer: true });
      this.player.on(mpegts.Events.ERROR, (kind, detail) => this.note(`It cannot be played: ${foreign(`${kind}: ${detail}`)}`));
      this.player.attachMediaElement(video);
      this.player.load();
    } else {
      video.src = url.href;
    }
    video.play()?.catch(() => this.note("Press play."));
  }

  stop() {
    clearTimeout(this.timer);
    const player = this.player, video = element("video");
    this.player = this.row = null;
    video.onerror = video.onended = null;
    if (player) player.destroy();
    video.removeAttribute("src");
    video.load();
  }

  time() {
    const begin = Date.parse(this.row?.start ?? "");
    return Number.isNaN(begin) ? "" : new Date(begin + element("at").value * 1000).toISOString().slice(11, 19);
  }

  note(text) {
    element("note").hidden = !text;
    put(element("note"), text);
  }

  say(text) {
    element("empty").hidden = !text;
    put(element("empty"), text);
    return null;
  }
}
