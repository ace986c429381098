// The tabs. Each has a number, and a view that is built when it is first opened.
"use strict";

const VIEWS = [];

function tableView({ id, title, note, items, columns, tones, tally }) {
  VIEWS.push({
    id,
    title,
    tones,
    size: () => (tally ? tally() : items.length),
    present: () => items.length > 0,
    build() {
      const table = new VirtualTable({ label: title, columns, onSelect: (item) => App.select(item.id) });
      table.name = id;
      return {
        root: el("div", {}, note ? el("p", { class: "note" }, note) : "", table.root),
        update(filter) {
          table.selected = App.state.sel;
          table.set(items.filter((item) => filter(item, tones)));
        },
        selected(key) {
          table.select(key);
        },
        table,
      };
    },
  });
}

const ofShare = (row) => row.shares[App.state.by];

function meter(row) {
  const share = ofShare(row);
  if (share === undefined) return "";
  const fill = el("i", { class: tone(row.lowering) });
  fill.style.width = `${Math.max(1, 100 * share)}%`;
  return [el("span", { class: "of" }, percent(share)), el("span", { class: "meter", "aria-hidden": "true" }, fill)];
}

tableView({
  id: "subgraphs",
  title: "Subgraphs",
  items: ROWS,
  tones: true,
  tally: () => ROWS.filter((row) => !row.parent).length,
  columns: [
    {
      title: "subgraph",
      width: "minmax(150px, 1.2fr)",
      sort: (r) => r.index,
      cell: (r) => (r.parent ? ["↳ ", code(r.id.split("/").pop())] : code(r.id)),
    },
    {
      title: "planned",
      wide: true,
      width: "minmax(92px, .8fr)",
      sort: (r) => r.planned,
      cell: (r) => badge(r.planned),
    },
    {
      title: "ran",
      width: "minmax(92px, .8fr)",
      sort: (r) => r.ran,
      cell: (r) => [
        r.ran ? badge(r.ran) : el("span", { class: "dim" }, "not called"),
        r.state ? el("span", { class: r.difference ? "error" : "dim" }, ` ${r.state}`) : "",
      ],
    },
    { title: "share", width: "minmax(64px, 120px)", number: true, sort: (r) => ofShare(r) || 0, cell: meter },
    {
      title: "operators",
      wide: true,
      width: "84px",
      number: true,
      sort: (r) => r.nodes,
      cell: (r) => grouped(r.nodes),
    },
    { title: "module", wide: true, width: "minmax(120px, 1.3fr)", sort: (r) => r.at, cell: (r) => r.at },
    { title: "what", wide: true, width: "minmax(160px, 4fr)", cell: (r) => r.what },
    {
      title: "call",
      wide: true,
      width: "76px",
      number: true,
      sort: (r) => r.timing[1] || 0,
      cell: (r) => duration(r.timing[1]),
    },
    { title: "build", wide: true, width: "76px", number: true, sort: (r) => r.build, cell: (r) => duration(r.build) },
  ],
});

tableView({
  id: "reasons",
  title: "Findings",
  items: FINDINGS,
  tones: true,
  note: "What can be changed, the most urgent first; equal causes of several places are one line.",
  columns: [
    { title: "what", width: "minmax(220px, 2fr)", sort: (f) => f.what, cell: (f) => f.what },
    { title: "places", width: "70px", number: true, sort: (f) => f.count, cell: (f) => String(f.count) },
    {
      title: "where",
      wide: true,
      width: "minmax(110px, 1fr)",
      sort: (f) => f.where,
      cell: (f) => shortSource(f.where),
    },
    {
      title: "why",
      wide: true,
      width: "minmax(220px, 2.6fr)",
      cell: (f) => f.why.map((r) => `${r.by ? `${r.by}: ` : ""}${r.sentence}`).join("; ") || "no reason was recorded",
    },
    {
      title: "code",
      wide: true,
      width: "minmax(120px, .9fr)",
      sort: (f) => (f.why[f.why.length - 1] || {}).code || "",
      cell: (f) => [...new Set(f.why.map((r) => r.code))].join(", "),
    },
    {
      title: "to change this",
      wide: true,
      width: "minmax(160px, 2fr)",
      cell: (f) => [...new Set(f.why.map((r) => r.lever).filter(Boolean))].join("; "),
    },
  ],
});

VIEWS.push({
  id: "modules",
  title: "Modules",
  present: () => ROWS.length > 0,
  size: () => "",
  build: () => modulesView(),
});
VIEWS.push({ id: "flame", title: "Flame", present: () => ROWS.length > 0, size: () => "", build: () => flameView() });
VIEWS.push({ id: "graph", title: "Graph", present: () => ROWS.length > 0, size: () => "", build: () => graphView() });
VIEWS.push({
  id: "time",
  title: "Time line",
  present: () => DATA.lanes.length + DATA.moments.length > 0,
  size: () => "",
  build: () => timeView(),
});

const places = (id, title, items, tally) =>
  tableView({
    id,
    title,
    items,
    tally,
    note: "Places that a pass rewrote, and near misses: candidates that it left as they were.",
    columns: [
      {
        title: "verdict",
        width: "100px",
        sort: (s) => (s.missed ? 0 : 1),
        cell: (s) => el("b", { class: s.missed ? "warn" : "good" }, s.missed ? "near miss" : "rewritten"),
      },
      { title: "pass", wide: true, width: "minmax(110px, 1fr)", sort: (s) => s.pass, cell: (s) => code(s.pass) },
      { title: "node", wide: true, width: "minmax(90px, .8fr)", sort: (s) => s.node, cell: (s) => code(s.node) },
      { title: "module", wide: true, width: "minmax(110px, 1.2fr)", sort: (s) => s.module, cell: (s) => s.module },
      { title: "where", width: "minmax(100px, .9fr)", sort: (s) => s.source, cell: (s) => shortSource(s.source) },
      {
        title: "detail",
        wide: true,
        width: "minmax(220px, 3fr)",
        cell: (s) => (s.target ? `${s.target}: ${s.detail}` : s.detail),
      },
    ],
  });

places(
  "sites",
  "Attention",
  PLACES.filter((site) => site.what === "attention"),
  () => DATA.attention,
);
places(
  "rewrites",
  "Rewrites",
  PLACES.filter((site) => site.what !== "attention"),
);

tableView({
  id: "passes",
  title: "Passes",
  items: PASSES,
  columns: [
    { title: "graph", width: "80px", sort: (p) => p.graph, cell: (p) => code(p.graph) },
    { title: "pass", width: "minmax(120px, 1fr)", sort: (p) => p.name, cell: (p) => code(p.name) },
    { title: "result", width: "minmax(110px, .8fr)", sort: (p) => p.result, cell: (p) => p.result },
    { title: "places", width: "70px", number: true, sort: (p) => p.rewrites, cell: (p) => String(p.rewrites || "") },
    { title: "time", width: "76px", number: true, sort: (p) => p.seconds, cell: (p) => duration(p.seconds) },
    { title: "operators", width: "minmax(140px, 1.6fr)", cell: (p) => p.diff },
    { title: "note", width: "minmax(160px, 2fr)", cell: (p) => p.note },
  ],
});

tableView({
  id: "merges",
  title: "Merge advice",
  items: MERGES,
  note: "Neighbours on one lowering that an operator between them keeps apart, and what crosses the boundaries because of it.",
  columns: [
    { title: "advice", width: "minmax(260px, 4fr)", sort: (m) => m.sentence, cell: (m) => m.sentence },
    { title: "between", width: "minmax(110px, 1fr)", sort: (m) => m.between, cell: (m) => code(m.between) },
    { title: "tensors", width: "80px", number: true, sort: (m) => m.tensors, cell: (m) => String(m.tensors) },
    { title: "bytes", width: "96px", number: true, sort: (m) => m.size, cell: (m) => bytes(m.size) },
  ],
});

tableView({
  id: "boundaries",
  title: "Boundaries",
  items: BOUNDARIES,
  columns: [
    { title: "from", width: "minmax(120px, 1fr)", sort: (b) => b.source, cell: (b) => code(b.source) },
    { title: "to", width: "minmax(120px, 1fr)", sort: (b) => b.target, cell: (b) => code(b.target) },
    { title: "tensors", width: "80px", number: true, sort: (b) => b.tensors, cell: (b) => String(b.tensors) },
    { title: "bytes", width: "96px", number: true, sort: (b) => b.size, cell: (b) => bytes(b.size) },
    { title: "copies", width: "80px", number: true, sort: (b) => b.copies, cell: (b) => String(b.copies || "") },
    { title: "casts", width: "80px", number: true, sort: (b) => b.casts, cell: (b) => String(b.casts || "") },
  ],
});

tableView({
  id: "choice",
  title: "Choice",
  items: CANDIDATES,
  tally: () => CANDIDATES.length,
  note: "Ways of compiling that were measured in turn, and which was chosen.",
  columns: [
    { title: "graph", width: "80px", sort: (c) => c.graph, cell: (c) => code(c.subgraph || c.graph) },
    { title: "candidate", width: "minmax(110px, 1fr)", sort: (c) => c.name, cell: (c) => code(c.name) },
    {
      title: "verdict",
      width: "96px",
      sort: (c) => (c.selected ? 0 : 1),
      cell: (c) =>
        c.selected ? el("span", { class: "badge inductor" }, "chosen") : el("span", { class: "dim" }, "not chosen"),
    },
    { title: "call", width: "84px", number: true, sort: (c) => c.seconds, cell: (c) => duration(c.seconds) },
    {
      title: "speed",
      width: "110px",
      number: true,
      sort: (c) => c.speed,
      cell: (c) => (c.speed ? `${c.speed.toFixed(2)} ± ${(100 * c.spread).toFixed(1)} %` : ""),
    },
    {
      title: "error",
      width: "84px",
      number: true,
      sort: (c) => c.error,
      cell: (c) => (c.error >= 0 ? c.error.toExponential(1) : ""),
    },
    { title: "build", width: "76px", number: true, sort: (c) => c.build, cell: (c) => duration(c.build) },
    { title: "why not", width: "minmax(180px, 2fr)", cell: (c) => c.why.map((r) => r.sentence).join("; ") },
  ],
});

tableView({
  id: "guesses",
  title: "Assumptions",
  items: GUESSES,
  columns: [
    { title: "graph", width: "80px", sort: (g) => g.graph, cell: (g) => code(g.graph) },
    { title: "assumed", width: "minmax(200px, 2fr)", cell: (g) => g.sentence },
    { title: "state", width: "minmax(120px, 1fr)", sort: (g) => g.state, cell: (g) => g.state },
    { title: "variant", width: "90px", sort: (g) => g.variant, cell: (g) => g.variant },
    { title: "detail", width: "minmax(180px, 2fr)", cell: (g) => g.detail },
  ],
});

tableView({
  id: "options",
  title: "Options",
  items: SETTINGS,
  tally: () => new Set(SETTINGS.map((setting) => setting.key)).size,
  columns: [
    { title: "graph", width: "80px", sort: (s) => s.graph, cell: (s) => code(s.graph) },
    { title: "option", width: "minmax(120px, 1fr)", sort: (s) => s.key, cell: (s) => code(s.key) },
    { title: "requested", width: "minmax(120px, 1.2fr)", sort: (s) => s.requested, cell: (s) => s.requested },
    {
      title: "effective",
      width: "minmax(120px, 1.2fr)",
      sort: (s) => s.effective,
      cell: (s) => (s.by ? el("b", { class: "warn" }, s.effective) : s.effective),
    },
    { title: "from", width: "minmax(100px, .8fr)", sort: (s) => s.origin, cell: (s) => s.origin },
    {
      title: "changed by",
      width: "minmax(140px, 1.6fr)",
      sort: (s) => s.by,
      cell: (s) => (s.by ? `${s.by}: ${(s.why[0] || {}).sentence || ""}` : ""),
    },
  ],
});

tableView({
  id: "caches",
  title: "Caches",
  items: CACHES,
  columns: [
    {
      title: "graph",
      width: "minmax(90px, .8fr)",
      sort: (c) => c.subgraph || c.graph,
      cell: (c) => code(c.subgraph || `${c.graph} ${c.part}`),
    },
    { title: "cache", width: "110px", sort: (c) => c.cache, cell: (c) => c.cache },
    { title: "verdict", width: "84px", sort: (c) => c.verdict, cell: (c) => c.verdict },
    { title: "note", width: "minmax(200px, 3fr)", sort: (c) => c.note, cell: (c) => c.note },
    { title: "key", width: "minmax(110px, 1fr)", cell: (c) => code(c.key) },
  ],
});

VIEWS.push({
  id: "about",
  title: "About",
  present: () => true,
  size: () => "",
  build() {
    const told = { ...DATA.facts.versions };
    const devices = Object.entries(DATA.facts.devices)
      .map(([type, name]) => (name ? `${type} (${name})` : type))
      .join(", ");
    const root = el(
      "div",
      { class: "about" },
      facts([
        ...Object.entries(told),
        ["devices", devices],
        ["platforms", DATA.facts.platforms.join(", ")],
        ["processes", DATA.facts.processes],
        ["ranks", DATA.facts.ranks.join(", ")],
        ["events", grouped(DATA.facts.events)],
        ["torn lines left out", DATA.facts["torn lines"]],
        ["missing", DATA.facts.missing.join("; ")],
      ]),
      GRAPHS.map((graph) =>
        el(
          "section",
          {},
          el("h3", {}, graph.line),
          facts([
            ["device", graph.device],
            ["identity", code(graph.identity)],
            ...graph.parts.map((part) => [
              part.name || "whole graph",
              [counted(Object.entries(part.placement), 8), part.note ? el("div", { class: "dim" }, part.note) : ""],
            ]),
            ...Object.entries(graph.compile_seconds).map(([name, seconds]) => [`compiled: ${name}`, duration(seconds)]),
            ...Object.entries(graph.left_out).map(([name, count]) => [`left out: ${name}`, grouped(count)]),
          ]),
        ),
      ),
    );
    return { root, update() {}, selected() {} };
  },
});
