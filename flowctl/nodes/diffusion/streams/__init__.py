"""What diffusion runs over: any stream of octets.

Begin with `stream.py`.
"""
