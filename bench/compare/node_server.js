// Node-Media-Server with RTMP only, on one port of loopback: node node_server.js PORT.
//
// The package listens on all addresses and cannot be told otherwise; but it hands its port to net.Server.listen as it
// is, which also takes an object with an address. Its log is off: it writes several lines per session.
"use strict";

const NodeMediaServer = require("node-media-server");

const server = new NodeMediaServer({
  logType: 0,
  rtmp: {
    port: { port: Number(process.argv[2]), host: "127.0.0.1" },
    chunk_size: 60000,
    gop_cache: true,
    ping: 30,
    ping_timeout: 60,
  },
});
server.run();
process.on("SIGTERM", () => process.exit(0));
