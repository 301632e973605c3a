"""Who fetches which object from whom: decisions, the mini-protocol, pools of objects.

Begin with `diffusion.py`.
"""
