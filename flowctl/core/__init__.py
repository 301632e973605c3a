"""The framework's inside: what the flat files beside this folder (Sender to Server) are made of."""
