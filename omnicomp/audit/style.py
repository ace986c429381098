"""The style sheet of the HTML view."""

from typing import Final

__all__ = ["STYLE"]

STYLE: Final = """\
:root {
  color-scheme: light dark;
  --bg: #f6f7f9; --card: #fff; --ink: #1c2330; --dim: #667085; --line: #e3e6eb; --head: #f0f2f5;
  --inductor: #2f7d4f; --override: #2667b8; --eager: #b7791f; --other: #7a5aa8; --bad: #c0392b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #12151b; --card: #1a1f28; --ink: #e4e8ef; --dim: #98a2b3; --line: #2c3340; --head: #222834;
    --inductor: #5cc389; --override: #6aa8f0; --eager: #e0aa4e; --other: #b698e0; --bad: #f0776a;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 14px/1.5 system-ui, sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 24px; }
header, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 20px;
  margin-bottom: 16px; }
h1 { font-size: 20px; margin: 0 0 6px; display: flex; flex-wrap: wrap; gap: 12px; align-items: center; }
h2 { font-size: 15px; margin: 0; display: inline; }
.summary { margin: 0 0 14px; overflow-wrap: anywhere; }
.pill { font-size: 12px; font-weight: 600; padding: 2px 10px; border-radius: 99px; border: 1px solid currentColor; }
.good { color: var(--inductor); } .warn { color: var(--eager); } .bad { color: var(--bad); }
.muted, .dim, .note { color: var(--dim); } .error { color: var(--bad); font-weight: 600; }
.bar { display: flex; height: 12px; border-radius: 6px; overflow: hidden; background: var(--line); gap: 1px; }
.bar span { flex-basis: 2px; }
.bar .inductor, .dot.inductor, .meter .inductor { background: var(--inductor); }
.bar .override, .dot.override, .meter .override { background: var(--override); }
.bar .eager, .dot.eager, .meter .eager { background: var(--eager); }
.bar .other, .dot.other, .meter .other { background: var(--other); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 16px; padding: 0; margin: 8px 0 14px; }
.legend .of { color: var(--dim); }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 10px; }
.tile { background: var(--head); border-radius: 8px; padding: 8px 12px; font-size: 12px; color: var(--dim); }
.tile b { display: block; font-size: 20px; color: var(--ink); }
.tile.warn b { color: var(--eager); } .tile.bad b { color: var(--bad); }
section > details > summary { cursor: pointer; }
section > details[open] > summary { margin-bottom: 10px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-size: 12px; font-weight: 600; color: var(--dim); background: var(--head);
  white-space: nowrap; }
th, td { padding: 6px 10px; border-bottom: 1px solid var(--line); vertical-align: top; }
td { overflow-wrap: anywhere; }
tbody tr:last-child td { border-bottom: 0; }
tr.mismatch td { background: color-mix(in srgb, var(--bad) 12%, transparent); }
tr.child td:first-child { padding-left: 28px; }
code { overflow-wrap: break-word; font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
.badge { font-size: 12px; padding: 1px 8px; border-radius: 99px; border: 1px solid currentColor; white-space: nowrap;
  color: var(--dim); }
.badge.inductor { color: var(--inductor); } .badge.override { color: var(--override); }
.badge.eager { color: var(--eager); }
.meter { display: block; width: 80px; height: 4px; border-radius: 2px; background: var(--line); margin-top: 4px; }
.meter i { display: block; height: 100%; border-radius: 2px; min-width: 1px; }
.more summary { color: var(--dim); cursor: pointer; font-size: 12px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 12px; margin: 6px 0 0; font-size: 12.5px; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
@media print { body { background: none; } section, header { break-inside: avoid; } }
"""
