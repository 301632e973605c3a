"""The control plane: what operators and other programs may ask of a server that runs."""
