// The views that are drawn: modules as a tree, work as a flame, subgraphs as a graph, compilations in time.
"use strict";

function filteredRows(filter) {
  return ROWS.filter((row) => filter(row, true));
}

function stack(work, total) {
  const bar = el("span", { class: "bar", "aria-hidden": "true" });
  for (const [lowering, part] of Object.entries(work).sort(
    ([a], [b]) => (a === "eager") - (b === "eager") || natural(a, b),
  )) {
    const piece = el("span", { class: tone(lowering) });
    piece.style.flexGrow = String(total > 0 ? part / total : 0);
    if (part > 0) bar.append(piece);
  }
  return bar;
}

function said(work) {
  return Object.entries(work)
    .sort((a, b) => b[1] - a[1])
    .map(([name, part]) => `${name || "unplanned"} ${percent(part)}`)
    .join(", ");
}

function modulesView() {
  const open = new Set([""]);
  let touched = false;
  let tree = null;
  const items = () => {
    const found = [];
    const visit = (node, depth) => {
      for (const child of childrenOf(node)) {
        const expandable = child.children.size + child.rows.length > 0;
        found.push({
          kind: "module",
          id: `module:${child.path}`,
          node: child,
          depth,
          expandable,
          open: open.has(child.path),
          level: depth + 1,
        });
        if (!open.has(child.path)) continue;
        for (const row of child.rows)
          found.push({ kind: "leaf", id: row.id, row, depth: depth + 1, level: depth + 2, difference: row.difference });
        visit(child, depth + 1);
      }
    };
    visit(tree, 0);
    return found;
  };
  const indent = (item, content) => {
    const cell = el("span", { class: "indent" }, content);
    cell.style.paddingLeft = `${item.depth * 16}px`;
    return cell;
  };
  const toggle = (item, wanted) => {
    if (wanted === false || (wanted === undefined && item.open)) open.delete(item.node.path);
    else open.add(item.node.path);
    touched = true;
    table.set(items());
  };
  const table = new VirtualTable({
    label: "Modules",
    onToggle: toggle,
    onSelect: (item) => (item.kind === "leaf" ? App.select(item.row.id) : toggle(item)),
    columns: [
      {
        title: "module",
        width: "minmax(220px, 2.4fr)",
        cell: (item) =>
          indent(
            item,
            item.kind === "leaf"
              ? [badge(item.row.lowering), " ", code(item.row.id)]
              : [el("span", { class: "twist", "aria-hidden": "true" }, item.open ? "▾" : "▸"), item.node.name],
          ),
      },
      {
        title: "share",
        width: "84px",
        number: true,
        cell: (item) => percent(item.kind === "leaf" ? ofShare(item.row) : item.node.total),
      },
      {
        title: "by lowering",
        width: "minmax(100px, 1fr)",
        cell: (item) => (item.kind === "leaf" ? "" : stack(item.node.work, item.node.total)),
      },
      {
        title: "subgraphs",
        width: "90px",
        number: true,
        cell: (item) => (item.kind === "leaf" ? "" : grouped(item.node.count)),
      },
      {
        title: "what",
        width: "minmax(200px, 2.4fr)",
        cell: (item) => (item.kind === "leaf" ? item.row.what : said(item.node.work)),
      },
    ],
  });
  table.name = "modules";
  table.scroller.setAttribute("role", "treegrid");
  const all = (wanted) => {
    const visit = (node) => {
      for (const child of node.children.values()) {
        if (wanted) open.add(child.path);
        else open.delete(child.path);
        visit(child);
      }
    };
    visit(tree);
    touched = true;
    table.set(items());
  };
  return {
    root: el(
      "div",
      {},
      el(
        "p",
        { class: "note" },
        "A subgraph stands at the module where all of its modules meet. ",
        el("button", { type: "button", onclick: () => all(true) }, "open all"),
        " ",
        el("button", { type: "button", onclick: () => all(false) }, "close all"),
      ),
      table.root,
    ),
    update(filter) {
      tree = moduleTree(filteredRows(filter), App.state.by);
      if (!touched) {
        // Down to the first fork, so that there is something to see.
        for (const graph of tree.children.values()) {
          for (
            let node = graph;
            node;
            node = node.children.size === 1 && !node.rows.length ? [...node.children.values()][0] : null
          )
            open.add(node.path);
        }
      }
      table.selected = App.state.sel;
      table.set(items());
    },
    selected(id) {
      table.select(id);
    },
  };
}

function flameView() {
  const icicle = new Icicle({ label: "Work by module", onSelect: (id) => App.select(id) });
  const boxes = (node, start, path) => {
    let at = start;
    const children = [];
    for (const row of node.rows) {
      const share = ofShare(row) || 0;
      if (share <= 0) continue;
      children.push({
        name: row.id,
        id: row.id,
        tone: tone(row.lowering),
        bad: Boolean(row.difference),
        start: at,
        end: at + share,
        title: `${row.id} on ${row.lowering}: ${percent(share)} of ${DATA.bases[App.state.by]}; ${row.what}`,
      });
      at += share;
    }
    for (const child of childrenOf(node)) {
      if (child.total <= 0) continue;
      children.push(boxes(child, at, [...path, child.name]));
      at += child.total;
    }
    const main = Object.entries(node.work).sort((a, b) => b[1] - a[1])[0];
    const pure = main && main[1] >= node.total * 0.999;
    return {
      name: path[path.length - 1],
      start,
      end: start + node.total,
      tone: main ? `${tone(main[0])}${pure ? "" : " part"}` : "none",
      children,
      title: `${node.path || "everything"}: ${percent(node.total)} of ${DATA.bases[App.state.by]}; ${said(node.work)}`,
    };
  };
  return {
    root: el(
      "div",
      {},
      el(
        "p",
        { class: "note" },
        "Width is the share of the work, a colour the lowering that does most of it. " +
          "A click or Enter goes into a box; Escape goes back.",
      ),
      icicle.root,
    ),
    update(filter) {
      icicle.set(boxes(moduleTree(filteredRows(filter), App.state.by), 0, ["everything"]));
    },
    selected() {},
    shown() {
      icicle.draw();
    },
  };
}

function timeView() {
  const icicle = new Icicle({ label: "Compilations", onSelect: (id) => App.select(id) });
  const starts = DATA.lanes.flatMap((lane) => lane.slices.map((s) => s[2])).concat(DATA.moments.map((m) => m[2]));
  const zero = starts.length ? starts.reduce((a, b) => Math.min(a, b)) : 0;
  const toneOf = (kind, lowering, ok) => (ok ? (lowering ? tone(lowering) : `kind-${kind}`) : "failed");
  const box = ([name, kind, start, end, graph, subgraph, lowering, ok, told, inside]) => {
    const more = Object.entries(told)
      .filter(([, value]) => value !== "" && value !== null)
      .map(([key, value]) => `${key}: ${value}`)
      .join("; ");
    return {
      name,
      start,
      end,
      id: ITEMS.has(subgraph) ? subgraph : "",
      tone: toneOf(kind, lowering, ok),
      bad: !ok,
      title: `${name}: ${duration(end - start) || "< 1 µs"}, ${(start - zero).toFixed(3)} s after the first event${more ? `; ${more}` : ""}`,
      children: inside.map(box),
    };
  };
  // Time in which nothing is compiled would be most of a run: each compilation is laid beside the one before it.
  const squeezed = (slices) => {
    let at = 0;
    const moved = (node, by) => ({
      ...node,
      start: node.start + by,
      end: node.end + by,
      children: node.children.map((child) => moved(child, by)),
    });
    const laid = slices.map((slice) => {
      const node = box(slice);
      const found = moved(node, at - node.start);
      at += node.end - node.start;
      return found;
    });
    return { laid, total: at };
  };
  const events = DATA.moments.map(([name, kind, time, pid, rank, graph, subgraph, state, told], index) => ({
    kind: "moment",
    id: `moment:${index}`,
    name,
    type: kind,
    time,
    pid,
    rank,
    graph,
    subgraph,
    state,
    text: Object.entries(told)
      .map(([key, value]) => `${key}: ${value}`)
      .join("; "),
    hay: hay(name, kind, subgraph, Object.values(told).map(String)),
  }));
  const table = new VirtualTable({
    label: "Events",
    onSelect: (item) => {
      if (ITEMS.has(item.subgraph)) App.select(item.subgraph);
    },
    columns: [
      {
        title: "after",
        width: "90px",
        number: true,
        sort: (m) => m.time,
        cell: (m) => `${(m.time - zero).toFixed(3)} s`,
      },
      { title: "event", width: "110px", sort: (m) => m.type, cell: (m) => m.type },
      {
        title: "what",
        width: "minmax(200px, 2fr)",
        sort: (m) => m.name,
        cell: (m) => (m.state ? el("b", { class: m.state }, m.name) : m.name),
      },
      { title: "more", width: "minmax(200px, 3fr)", cell: (m) => m.text },
      {
        title: "process",
        width: "110px",
        sort: (m) => m.rank * 1e7 + m.pid,
        cell: (m) => `${m.pid || ""} (rank ${m.rank})`,
      },
    ],
  });
  table.name = "moments";
  return {
    root: el(
      "div",
      {},
      el(
        "p",
        { class: "note" },
        "Compilations one after the other, with their stages, passes and attempts; time between them " +
          "is left out. Attempts are in their order, and only their lengths were measured.",
      ),
      icicle.root,
      el("h3", {}, "Events"),
      table.root,
    ),
    update(filter) {
      let at = 0;
      const lanes = [];
      for (const lane of DATA.lanes) {
        const kept = lane.slices.filter((slice) => !App.state.graph || slice[4] === App.state.graph);
        const { laid, total } = squeezed(kept);
        const shift = at;
        const moved = (node) => ({
          ...node,
          start: node.start + shift,
          end: node.end + shift,
          children: node.children.map(moved),
        });
        const name = `rank ${lane.rank}, process ${lane.pid}${lane.number > 1 ? `, thread ${lane.number}` : ""}`;
        lanes.push({
          name,
          start: at,
          end: at + total,
          tone: "kind-lane",
          children: laid.map(moved),
          title: `${name}: ${duration(total) || "0 s"} of compiling`,
        });
        at += total;
      }
      const top =
        lanes.length === 1
          ? lanes[0]
          : {
              name: "all processes",
              start: 0,
              end: at,
              tone: "kind-lane",
              children: lanes,
              title: `${duration(at) || "0 s"} of compiling`,
            };
      icicle.set(top);
      table.set(events.filter((event) => filter(event, false)));
    },
    selected() {},
    shown() {
      icicle.draw();
    },
  };
}
