// The picture: a stream from the HTTP listener, played by mpegts.js, so that this page is a viewer like any other.

import { duration, foreign, put, rate } from "./words.js";

const MOST_BEHIND_S = 3; // a page that was asleep does not show what was: it goes to the end
const AGAIN_MS = 3000;

export class Picture {
  /** `place`: what the ids begin with. `refused(stream)` is called where a stream asks viewers for more than its name. */
  constructor(place, refused) {
    this.refused = refused;
    [this.video, this.note, this.figures, this.title] =
      ["video", "note", "figures", "name"].map((part) => document.getElementById(`${place}-${part}`));
    this.stream = "";
    this.player = null;
    this.timer = 0;
    setInterval(() => this.look(), 1000);
  }

  /** Show a stream. `url`: of its FLV; `media`: its codecs, as the server names them. "" as name: show none. */
  async show(stream, url, media, title = stream) {
    this.stop();
    this.stream = stream;
    this.again = () => this.show(stream, url, media, title);
    put(this.title, foreign(title));
    if (!stream) return this.say("Choose “Watch” at a stream.");
    const option = location.protocol === "https:" ? "--https" : "--http"; // a page with TLS may not load without it
    if (!url) return this.say(`Nothing to watch it from: start the server with ${option} 127.0.0.1:8080.`);
    if (location.hostname.startsWith("[") && new URL(url).port !== location.port) { // what its policy cannot allow
      return this.say("A page at an address of IPv6 may load from its own port alone: open it by a name, like localhost.");
    }
    this.say("Connecting…");
    const mpegts = await library();
    if (this.stream !== stream || this.player) return null;
    if (!mpegts.isSupported()) return this.say("This browser cannot play live FLV; a phone plays HLS.");
    const known = /\b(audio|video)\b/.test(media);
    const source = {
      type: "flv", isLive: true, url, cors: true, withCredentials: false,
      // An FLV header may promise sound that never comes, and a player would wait for it.
      ...(known && { hasAudio: /\baudio\b/.test(media), hasVideo: /\bvideo\b/.test(media) }),
    };
    const settings = {
      enableStashBuffer: false, liveBufferLatencyChasing: true, liveBufferLatencyMaxLatency: MOST_BEHIND_S,
      liveBufferLatencyMinRemain: 0.5, autoCleanupSourceBuffer: true, lazyLoad: false,
    };
    this.player = mpegts.createPlayer(source, settings);
    this.player.on(mpegts.Events.ERROR, (kind, detail, info) => {
      if (![401, 403].includes(info?.code)) return this.failed(`${kind}: ${detail}`);
      this.stop();
      this.say("This stream asks its viewers for a key or a token.");
      return this.refused(stream);
    });
    this.player.on(mpegts.Events.LOADING_COMPLETE, () => this.failed("the stream has ended"));
    this.player.attachMediaElement(this.video);
    this.player.load();
    this.video.onplaying = () => { this.note.hidden = true; };
    this.video.muted = true; // without it browsers do not let a page begin by itself
    this.player.play()?.catch(() => this.say("Press play."));
    return null;
  }

  failed(why) {
    this.stop();
    this.say(`No picture: ${foreign(why)}. Trying again…`);
    this.timer = setTimeout(this.again, AGAIN_MS);
  }

  stop() {
    clearTimeout(this.timer);
    const player = this.player;
    this.player = null;
    if (player) player.destroy();
    put(this.figures, "\u00a0");
  }

  say(text) {
    this.note.hidden = false;
    put(this.note, text);
    return null;
  }

  look() {
    if (!this.player || this.note.hidden === false) return;
    const buffered = this.video.buffered;
    const ahead = buffered.length ? buffered.end(buffered.length - 1) - this.video.currentTime : 0;
    const quality = this.video.getVideoPlaybackQuality();
    const shown = `${this.video.videoWidth} × ${this.video.videoHeight}`;
    const speed = (this.player.statisticsInfo?.speed ?? NaN) * 1024;
    put(this.figures, `${shown} · ${rate(speed)} · ${duration(Math.max(ahead, 0))} in the browser's buffer · ` +
      `${quality.droppedVideoFrames} of ${quality.totalVideoFrames} pictures skipped`);
  }
}

let loaded = null;

/** Load mpegts.js once, when a picture is wanted: it is larger than all of this page. */
export function library() {
  loaded ??= new Promise((ready, failed) => {
    const script = document.createElement("script");
    script.src = "mpegts.js";
    script.onload = () => {
      window.mpegts.LoggingControl.enableAll = false;
      ready(window.mpegts);
    };
    script.onerror = () => failed(new Error("mpegts.js did not load"));
    document.head.append(script);
  });
  return loaded;
}
