"""Who may connect, publish and play: requests and refusals, keys, tokens, networks, and HTTP hooks.

Begin with `request.py`.
"""
