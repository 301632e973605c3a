"""The style sheet of the report: two sets of colours, one layout.

The series colours were chosen to be told apart by people with any kind of colour vision in their fixed order, and to
stand out from the paper in light and dark; text never wears them. Tables scroll in their own box, the page never does.
"""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root{color-scheme:light dark;--paper:#fcfcfb;--card:#fff;--ink:#0b0b0b;--soft:#52514e;--muted:#75736e;--grid:#e6e5e0;
--base:#bdbbb3;--edge:#e3e2dd;--good:#0a7a2f;--bad:#c3302f;--doubt:#8a5a00;--quiet:#a3a19a;
--s1:#2a78d6;--s2:#eb6834;--s3:#1baf7a;--s4:#eda100;--s5:#e87ba4;--s6:#4a3aa7;--s7:#7b7a75;--s8:#e34948}
@media(prefers-color-scheme:dark){:root{--paper:#131312;--card:#1c1c1a;--ink:#f7f6f2;--soft:#c5c3ba;--muted:#98968e;
--grid:#2f2f2c;--base:#4a4944;--edge:#32322f;--good:#4cc274;--bad:#f07c78;--doubt:#e0a93b;--quiet:#6d6c66;
--s1:#3987e5;--s2:#d95926;--s3:#199e70;--s4:#c98500;--s5:#d55181;--s6:#9085e9;--s7:#98968e;--s8:#e66767}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1180px;margin:0 auto;padding:24px 20px 40px}
h1{font-size:22px;margin:0 0 4px;overflow-wrap:anywhere}h2{font-size:15px;margin:0 0 8px}
p{margin:0 0 8px;color:var(--soft)}code{font:13px ui-monospace,SFMono-Regular,Menlo,monospace;overflow-wrap:anywhere}
.command code{display:block;background:var(--card);border:1px solid var(--edge);border-radius:6px;padding:8px 10px}
section{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:14px 16px;margin:0 0 16px;
min-width:0}
.good{border-left:4px solid var(--good)}.bad{border-left:4px solid var(--bad)}.doubt{border-left:4px solid var(--doubt)}
ul{margin:0;padding-left:20px}.verdicts,.legend{list-style:none;padding:0}.verdicts li{padding:2px 0}
.verdicts span{color:var(--soft)}
b.no{color:var(--bad)}b.yes{color:var(--good)}.verdicts b{display:inline-block;min-width:84px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(215px,1fr));gap:12px;margin:0 0 16px}
.tiles div{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:10px 14px;display:flex;
flex-direction:column-reverse;justify-content:flex-end}
.tiles dt{color:var(--soft);font-size:13px;line-height:1.35}
.tiles dd{margin:0;font-size:24px;font-weight:600;white-space:nowrap}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:16px;margin-bottom:16px}
.plots section{margin:0}
svg{display:block;width:100%;height:auto}svg text{font-size:12px;fill:var(--muted);font-family:inherit;
font-variant-numeric:tabular-nums}
svg .grid{stroke:var(--grid);fill:none}svg .base{stroke:var(--base);fill:none}
svg .line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
svg .hit{fill:transparent}svg .hit:hover{fill:var(--ink);fill-opacity:.07}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;margin:0 0 6px;color:var(--soft);font-size:13px}
.legend i{display:inline-block;width:14px;height:3px;border-radius:2px;margin-right:6px;vertical-align:middle}
details{margin-top:6px;font-size:13px}summary{cursor:pointer;color:var(--soft)}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:5px 7px;border-bottom:1px solid var(--edge);text-align:right;vertical-align:top}
thead th{color:var(--soft);font-weight:500;vertical-align:bottom}
.figures td{white-space:nowrap}
th:first-child,td:first-child,.words th,.words td{text-align:left}tbody th{font-weight:600;white-space:nowrap}
.words td{white-space:nowrap}.words td:last-child,.words td.long{white-space:normal;overflow-wrap:anywhere;
min-width:220px}
tbody tr:last-child th,tbody tr:last-child td{border-bottom:0}
footer p{font-size:13px;color:var(--muted)}
@media print{section,.tiles div{break-inside:avoid}details{display:none}}
""".strip()
