"""The comparison of flowctl with other RTMP servers and a bare loop; run by ``bench/compare.py``.

`rivals` starts the servers, `reader` is the process that measures delay, `measure` makes one measurement, `plan` says
which are made in which order and keeps them, `render` makes the chart and the table of them.
"""
