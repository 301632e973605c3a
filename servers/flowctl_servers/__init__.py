"""Ready-made servers built on flowctl: composition roots, each a `flowctl.server.program.ServerProgram`."""
