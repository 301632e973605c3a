"""What a live server does about many viewers at once: memory, shadow policies, signals, episodes.

Begin with `oversight.py`.
"""
