"""Operations on a running server: each defined once, and served, called and described from that definition.

Begin with `operations.py`.
"""
