"""An edge: serves viewers streams that come by diffusion from origins and other edges, and frame by frame from one.

Begin with `edge.py`.
"""
