"""What RPC peers send each other, and where they are: frames, tags, addresses (pure).

Begin with `addresses.py`.
"""
