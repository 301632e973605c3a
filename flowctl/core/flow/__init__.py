"""May this peer be sent more? The rules of one peer, pure: state, limits, drop policy, lateness, meters, ledger.

Begin with `state.py`.
"""
