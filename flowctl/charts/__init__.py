"""Charts and pages that stand alone: SVG and style sheets, for load tester, pipeline and benches.

Begin with `page.py`.
"""
