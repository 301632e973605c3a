"""Ready-made servers built on flowctl: composition roots, each a `flowctl.core.server.program.ServerProgram`."""
