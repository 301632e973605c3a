"""Charts and pages that stand alone: SVG and style sheets, for load tester and pipeline.

Begin with `svg.py`.
"""
