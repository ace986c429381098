// Subgraphs in program order, under their modules, with what goes from one to another as arcs at the side.
"use strict";

const ARCS = 96;

function graphView() {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "arcs");
  svg.setAttribute("aria-hidden", "true");
  let items = [];
  let edges = [];
  const table = new VirtualTable({
    label: "Subgraphs in program order",
    onSelect: (item) => {
      if (item.row) App.select(item.row.id);
    },
    columns: [
      { title: "", width: `${ARCS}px`, cell: () => "" },
      {
        title: "subgraph",
        width: "minmax(220px, 1fr)",
        cell: (item) =>
          item.row
            ? el(
                "span",
                { class: `nodebox ${tone(item.row.lowering)}${item.row.difference ? " bad" : ""}` },
                `${item.row.id} · ${item.row.lowering}`,
              )
            : el("b", {}, item.title),
      },
      { title: "module", width: "minmax(120px, 1fr)", cell: (item) => (item.row ? item.row.at : "") },
      { title: "what", width: "minmax(160px, 2fr)", cell: (item) => (item.row ? item.row.what : "") },
      { title: "share", width: "84px", number: true, cell: (item) => (item.row ? percent(ofShare(item.row)) : "") },
    ],
  });
  table.name = "graph";
  table.body.append(svg);
  const arcs = () => {
    const top = table.scroller.scrollTop / LINE - BEYOND;
    const bottom = (table.scroller.scrollTop + (table.scroller.clientHeight || 480)) / LINE + BEYOND;
    svg.replaceChildren();
    svg.setAttribute("width", ARCS);
    svg.setAttribute("height", Math.max(1, items.length * LINE));
    let drawn = 0;
    for (const edge of edges) {
      if (edge.to < top || edge.from > bottom || drawn > 400) continue;
      drawn += 1;
      const y0 = edge.from * LINE + LINE / 2,
        y1 = edge.to * LINE + LINE / 2;
      const reach = Math.min(ARCS - 12, 10 + 9 * Math.log2(1 + edge.to - edge.from) * 1.6);
      const x = ARCS - 4;
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("d", `M ${x} ${y0} C ${x - reach} ${y0}, ${x - reach} ${y1}, ${x} ${y1}`);
      path.setAttribute("class", `${edge.chosen ? "chosen " : ""}${edge.merge ? "merge" : ""}`);
      path.setAttribute("stroke-width", String(Math.min(5, 1 + Math.log10(1 + Math.max(0, edge.size)) / 3)));
      svg.append(path);
    }
  };
  const mark = () => {
    for (const edge of edges) edge.chosen = edge.ids.includes(App.state.sel);
    arcs();
  };
  table.scroller.addEventListener("scroll", arcs);
  return {
    root: el(
      "div",
      {},
      el(
        "p",
        { class: "note" },
        "In program order; an arc is what goes from one subgraph to another, the thicker the more bytes. " +
          "Those of the chosen subgraph are marked.",
      ),
      table.root,
    ),
    update(filter) {
      items = [];
      const at = new Map();
      let last = "";
      for (const row of filteredRows(filter)) {
        const title = `${row.graph}${row.part ? `.${row.part}` : ""}`;
        if (title !== last) {
          items.push({ id: `title:${title}`, title });
          last = title;
        }
        at.set(row.id, items.length);
        items.push({ id: row.id, row, difference: row.difference });
      }
      edges = BOUNDARIES.filter((b) => at.has(b.source) && at.has(b.target)).map((b) => ({
        from: Math.min(at.get(b.source), at.get(b.target)),
        to: Math.max(at.get(b.source), at.get(b.target)),
        size: b.size,
        ids: [b.source, b.target],
        merge: MERGE_BY_ROW.has(b.source) || MERGE_BY_ROW.has(b.target),
      }));
      table.selected = App.state.sel;
      table.set(items);
      mark();
    },
    selected(id) {
      table.select(id);
      mark();
    },
    shown: () => arcs(),
  };
}
