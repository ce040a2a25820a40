"""Style sheet of the page, and its one script of our own."""

from __future__ import annotations

from tuner.report.markup import Html

STYLE = Html("""
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --panel: #ffffff; --line: #e3e6ea; --text: #1b1e23; --soft: #626973; --accent: #0072b2;
  --good: #0b6e4f; --bad: #b34700; --chip: #e8f1f8; --code: #f1f3f5; --banner: #b34700;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14161a; --panel: #1d2026; --line: #30353d; --text: #e8eaed; --soft: #9aa1ab; --accent: #6cb8e6;
    --good: #5fc9a3; --bad: #f09a5b; --chip: #22364a; --code: #14161a; --banner: #9c3d00;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
main, header, footer { max-width: 1280px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 36px; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
header p, footer { color: var(--soft); }
header p { margin: 0 0 20px; overflow-wrap: anywhere; }
section {
  background: var(--panel); border: 1px solid var(--line); border-radius: 12px; padding: 20px 24px 24px;
  margin-bottom: 20px;
}
h2 { font-size: 1.15rem; margin: 0 0 12px; }
h2.part { margin-top: 36px; color: var(--soft); font-weight: 500; }
section > p { margin: 0 0 12px; color: var(--soft); max-width: 100ch; }
section > p.banner {
  background: var(--banner); color: #fff; padding: 12px 16px; border-radius: 8px; max-width: none; font-weight: 500;
}
.banner strong { letter-spacing: .08em; margin-right: .5em; }
.empty { font-style: italic; }
.chips { display: flex; flex-wrap: wrap; gap: 8px; margin-bottom: 18px; }
.chip {
  background: var(--chip); border-radius: 8px; padding: 5px 12px; font-size: 1.15rem;
  font-variant-numeric: tabular-nums;
}
.chip b { font-weight: 500; color: var(--soft); font-size: .85rem; margin-right: .5em; }
.chip.quiet { background: none; box-shadow: inset 0 0 0 1px var(--line); color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(250px, 1fr)); gap: 12px; margin-bottom: 16px; }
.card { border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px; }
section > h3 { margin: 20px 0 8px; font-size: .95rem; font-weight: 600; }
.card h3 { margin: 0; font-size: .82rem; font-weight: 500; color: var(--soft); }
.figure { margin: 2px 0; font-size: 1.55rem; font-weight: 600; line-height: 1.25; font-variant-numeric: tabular-nums; }
.note { margin: 0; font-size: .8rem; line-height: 1.35; color: var(--soft); overflow-wrap: anywhere; }
.funnel { display: flex; flex-wrap: wrap; list-style: none; margin: 0; padding: 0; color: var(--soft); }
.funnel li:not(:last-child)::after { content: "\\2192"; margin: 0 .7em; }
.funnel + .scroll { margin-top: 14px; } .funnel + .scroll table, #population table, #calibration table { width: auto; }
#pruning td:nth-child(2) { min-width: 14em; }
.funnel b { color: var(--text); font-variant-numeric: tabular-nums; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; font-size: .85rem; color: var(--soft); }
.legend i { font-style: normal; margin-right: .45em; }
.legend i.line { display: inline-block; width: 22px; vertical-align: middle; }
.facets { display: flex; flex-wrap: wrap; gap: 12px 14px; } .facets .shared { position: absolute; }
.map { max-width: 100%; }
.map text { font: 11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--soft); }
.map text.strong { font-weight: 600; fill: var(--text); }
.map .none { fill: var(--line); } .map .hatch { stroke: var(--soft); stroke-width: 1; opacity: .45; }
.map .tried { fill: #ffffff; stroke: #000000; stroke-width: 1.5; }
.map .best { fill: #000000; stroke: #ffffff; stroke-width: 1.5; }
.map .failed { stroke: #000000; stroke-width: 2; } .map .failed-edge { stroke: #ffffff; stroke-width: 5; }
.map circle, .map path { pointer-events: none; }
.map rect:hover { stroke: var(--text); stroke-width: 2; }
.map-legend { margin-bottom: 12px; }
.swatch { display: inline-block; width: 14px; height: 14px; border-radius: 3px; vertical-align: -2px; }
.swatch.removed { background: repeating-linear-gradient(135deg, var(--line) 0 4px, var(--soft) 4px 5px); }
.swatch.blank { box-shadow: inset 0 0 0 1px var(--line); }
.s0 { fill: #fde725; background: #fde725; } .s1 { fill: #addc30; background: #addc30; }
.s2 { fill: #5ec962; background: #5ec962; } .s3 { fill: #28ae80; background: #28ae80; }
.s4 { fill: #21918c; background: #21918c; } .s5 { fill: #2c728e; background: #2c728e; }
.s6 { fill: #3b528b; background: #3b528b; } .s7 { fill: #472d7b; background: #472d7b; }
.s8 { fill: #440154; background: #440154; } /* viridis: light is fast, and lightness alone tells the order */
.square { max-width: 560px; }
.js-plotly-plot :is(.xtick, .ytick, .y2tick, .g-xtitle, .g-ytitle, .g-y2title) text {
  fill: var(--soft) !important; /* plotly writes its colours inline, and they cannot follow the colour scheme */
}
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; }
th, td { text-align: left; padding: 6px 9px; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 500; white-space: nowrap; }
th.number, td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
tbody tr:last-child td { border-bottom: 0; }
.badge { display: inline-block; border-radius: 6px; padding: 0 6px; margin-right: 6px; font-size: .75rem; color: #fff; }
.badge.best { background: #0072b2; } .badge.current { background: #8a5a00; }
.status { white-space: nowrap; } .status.good { color: var(--good); } .status.bad { color: var(--bad); }
td .note { min-width: 14em; }
section > details { margin-top: 12px; } section > .scroll { margin-top: 14px; }
details summary { cursor: pointer; font-size: .8rem; color: var(--accent); }
code, pre { font: .85rem ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre { background: var(--code); border-radius: 8px; padding: 14px 16px; margin: 0; overflow-x: auto; line-height: 1.5; }
details pre { max-width: 70vw; max-height: 20em; overflow: auto; font-size: .75rem; }
.copyable { position: relative; }
.copy {
  position: absolute; top: 10px; right: 10px; border: 1px solid var(--line); background: var(--panel);
  color: var(--text); border-radius: 6px; padding: 3px 12px; font: inherit; font-size: .8rem; cursor: pointer;
}
.copyable + ul { margin-bottom: 0; }
ul { margin: 12px 0 0; padding-left: 1.3em; }
ul.changes { margin: 0 0 12px; }
#warnings ul { margin-top: 0; }
#warnings li { overflow-wrap: anywhere; }
footer { font-size: .85rem; padding-bottom: 40px; }
@media (max-width: 600px) {
  main, header, footer { padding-left: 12px; padding-right: 12px; }
  section { padding: 16px 14px 18px; }
  .cards { grid-template-columns: repeat(2, 1fr); }
  .figure { font-size: 1.3rem; }
  .copy { position: static; margin-bottom: 8px; }
}
@media print { body { background: #fff; } section { break-inside: avoid; } .copy { display: none; } }
""")
"""Style sheet of all pages, with a light and a dark colour scheme."""

WITHOUT_SCRIPTS = Html(".drawn, button.copy { display: none; }")
"""Additional style for browsers that block scripts."""

COPY_SCRIPT = Html("""
for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", async () => {
    const source = document.getElementById(button.dataset.copies);
    try {
      await navigator.clipboard.writeText(source.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(source);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}
""")
"""Script behind the buttons that copy text to the clipboard."""
