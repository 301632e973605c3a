"""Charts and pages that stand alone: SVG, plots by uPlot, tables, for load tester, pipeline and benches.

Begin with `page.py`.
"""
