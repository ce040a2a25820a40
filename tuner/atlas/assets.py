"""Style sheet and scripts of the atlas."""

from __future__ import annotations

from tuner.report.style import COPY_SCRIPT, STYLE

ATLAS_STYLE = f"""{STYLE}
:root {{ --level: #0072b2; }}
a {{ color: var(--accent); }}
:focus-visible {{ outline: 2px solid var(--accent); outline-offset: 2px; }}
nav {{ display: flex; gap: 20px; margin-bottom: 12px; font-size: .9rem; }}
.filters {{ display: flex; flex-wrap: wrap; gap: 12px 18px; margin-bottom: 12px; }}
.filters label {{ display: flex; flex-direction: column; font-size: .8rem; color: var(--soft); }}
select, button {{
  font: inherit; font-size: .9rem; color: var(--text); background: var(--panel); border: 1px solid var(--line);
  border-radius: 6px; padding: 4px 10px;
}}
th button {{ border: 0; padding: 0; background: none; color: inherit; font-weight: 500; cursor: pointer; }}
th[aria-sort=ascending] button::after {{ content: " \\2191"; }}
th[aria-sort=descending] button::after {{ content: " \\2193"; }}
#rows td:nth-child(-n+2) {{ white-space: nowrap; }}
ul.links {{ columns: 4 12em; list-style: none; padding: 0; margin: 0; }}
details {{ border-top: 1px solid var(--line); padding: 6px 0; scroll-margin-top: 12px; }}
details > summary {{ font-size: .9rem; color: var(--text); }}
details[open] > summary {{ margin-bottom: 10px; }}
details > p {{ margin: 10px 0; color: var(--soft); max-width: 100ch; }}
details pre {{ max-width: none; }}
details td:first-child {{ min-width: 11em; }}
details:target > summary {{ color: var(--accent); }}
caption {{ caption-side: bottom; text-align: left; color: var(--soft); font-size: .8rem; padding-top: 8px; }}
.matrix {{ width: auto; }}
.matrix th[scope=row] {{ white-space: nowrap; }}
.matrix td {{ padding: 0; }}
.matrix td a {{ display: block; padding: 4px 10px; color: var(--text); text-decoration: none; }}
.matrix td a:hover {{ text-decoration: underline; }}
.matrix small {{ display: block; color: var(--soft); }}
.level0 {{ background: color-mix(in srgb, var(--level) 4%, transparent); }}
.level1 {{ background: color-mix(in srgb, var(--level) 10%, transparent); }}
.level2 {{ background: color-mix(in srgb, var(--level) 17%, transparent); }}
.level3 {{ background: color-mix(in srgb, var(--level) 25%, transparent); }}
.level4 {{ background: color-mix(in srgb, var(--level) 34%, transparent); }}
.chart {{ width: 340px; max-width: 100%; height: auto; }}
.chart text {{ font: 11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--soft); }}
.chart text.strong {{ font-weight: 600; fill: var(--text); }}
.chart .grid {{ stroke: var(--line); }}
.chart .band {{ fill: var(--accent); opacity: .18; }}
.chart .predicted {{ fill: none; stroke: var(--accent); stroke-width: 2; }}
.chart .measured {{ fill: var(--bad); fill-opacity: .55; stroke: var(--panel); stroke-width: .5; }}
"""

PLACE_SCRIPT = f"""{COPY_SCRIPT}
const showPlace = () => {{
  let name = location.hash.slice(1);
  try {{
    name = decodeURIComponent(name);
  }} catch {{}}  // a lone percent sign
  const place = document.getElementById(name);
  if (place instanceof HTMLDetailsElement) {{
    place.open = true;
    place.scrollIntoView();
  }}
}};
addEventListener("hashchange", showPlace);
showPlace();
for (const place of document.querySelectorAll("details[id]")) {{
  place.addEventListener("toggle", () => {{ if (place.open) history.replaceState(null, "", `#${{place.id}}`); }});
}}
"""
"""Opens the place that the address names, and writes the opened one into the address."""

FILTER_SCRIPT = """
const FIRST = 100;
const form = document.getElementById("filters"), body = document.getElementById("rows");
const count = document.getElementById("count"), more = document.getElementById("more");
const heads = [...document.querySelectorAll("th button[data-column]")];
let column = null, falls = false, whole = false;

for (const select of form.elements) {
  const values = [...new Set(PLACES.map(place => place[select.name]))];
  values.sort((a, b) => typeof a === "number" ? a - b : a.localeCompare(b));
  for (const value of values) select.add(new Option(value.toLocaleString("en"), value));
}

function compare(a, b) {
  const [one, other] = falls ? [b, a] : [a, b];
  return typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other));
}

function render() {
  const wanted = [...form.elements].filter(select => select.value);
  let found = PLACES.filter(place => wanted.every(select => String(place[select.name]) === select.value));
  if (column !== null) {
    const [known, unknown] = [[], []];
    for (const place of found) (place.order[column] == null ? unknown : known).push(place);
    known.sort((a, b) => compare(a.order[column], b.order[column]));
    found = [...known, ...unknown];
  }
  const shown = whole ? found : found.slice(0, FIRST);
  body.replaceChildren(...shown.map(rowOf));
  count.textContent = `${found.length.toLocaleString("en")} ${found.length === 1 ? "place" : "places"}` +
    (shown.length < found.length ? `, the first ${shown.length} are shown` : "");
  more.hidden = shown.length === found.length;
  const hash = new URLSearchParams(wanted.map(select => [select.name, select.value]));
  if (column !== null) hash.set("order", (falls ? "-" : "") + heads[column].textContent);
  history.replaceState(null, "", `#${hash}`);
}

function rowOf(place) {
  const row = document.createElement("tr");
  place.cells.forEach((text, at) => {
    const cell = row.insertCell();
    if (at === 2 || at > 3) cell.className = "number";
    if (at === 3) {
      const link = document.createElement("a");
      link.href = place.link;
      link.textContent = text;
      cell.append(link);
    } else {
      cell.textContent = text;
    }
  });
  return row;
}

function sortBy(at, descending) {
  [column, falls] = [at, descending];
  heads.forEach((head, place) => {
    const cell = head.closest("th");
    if (place === column) cell.setAttribute("aria-sort", falls ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  });
}

function readAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  for (const select of form.elements) {
    select.value = asked.get(select.name) ?? "";
    if (select.selectedIndex < 0) select.value = "";  // an address of another atlas
  }
  const order = asked.get("order") ?? "", name = order.replace(/^-/, "");
  const at = heads.findIndex(head => head.textContent === name);
  if (at >= 0) sortBy(at, order.startsWith("-"));
}

heads.forEach((head, at) => head.addEventListener("click", () => {
  sortBy(at, column === at && !falls);
  render();
}));
form.addEventListener("input", () => { whole = false; render(); });
form.addEventListener("submit", event => event.preventDefault());
body.addEventListener("focusin", event => event.target.scrollIntoView({ block: "nearest", inline: "nearest" }));
more.addEventListener("click", () => { whole = true; render(); });
addEventListener("hashchange", () => { readAddress(); render(); });
readAddress();
render();
"""
"""Filters and orders the places of places.js, and keeps both in the address."""
