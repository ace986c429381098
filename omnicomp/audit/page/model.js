// The report as objects: what is linked by numbers in the data is linked by references here.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);

function hay(...values) {
  return values.flat(3).filter(Boolean).join(" ").toLowerCase();
}

function reasonText(reason) {
  return [
    reason.by,
    reason.sentence,
    reason.observed,
    reason.needed,
    reason.code,
    reason.node,
    reason.cause,
    reason.lever,
  ];
}

const REASONS = DATA.reasons;
const GRAPHS = DATA.graphs;
const ROWS = DATA.rows.map((row, index) => {
  const graph = GRAPHS[row.g];
  const found = {
    kind: "row",
    index,
    part: "",
    parent: "",
    planned: "",
    ran: "",
    lowering: "",
    state: "",
    difference: "",
    ops: [],
    modules: [],
    sources: [],
    shares: {},
    build: 0,
    timing: [],
    memory: [],
    graphs: [],
    attempts: [],
    retreats: [],
    runs: [],
    kernels: {},
    repeated: [],
    checks: [],
    refused: [],
    reasons: [],
    identity: "",
    at: "",
    io: [],
    flops: "0",
    flops_hint: 0,
    bytes: "0",
    bytes_hint: 0,
    left_out: {},
    ...row,
    graph: graph.id,
  };
  found.why = found.reasons.map((number) => REASONS[number]);
  found.what = [...found.repeated, counted(found.ops, 4)].filter(Boolean).join("; ");
  found.hay = hay(
    found.id,
    found.part,
    found.planned,
    found.lowering,
    found.state,
    found.difference,
    found.at,
    found.modules,
    found.sources,
    found.ops.map(([name]) => name),
    found.refused,
    Object.keys(found.kernels),
    found.repeated,
    found.why.map(reasonText),
    graph.function,
  );
  return found;
});
const ROW_BY_ID = new Map(ROWS.map((row) => [row.id, row]));

const NODES = DATA.nodes.map(([g, part, node, op, lowering, source, module, chain, subgraph], index) => {
  const why = chain.map((number) => REASONS[number]);
  return {
    kind: "node",
    index,
    id: `${GRAPHS[g].id}.${part}:${node}`,
    graph: GRAPHS[g].id,
    part,
    node,
    op,
    lowering,
    source,
    module,
    subgraph,
    why,
    hay: hay(node, op, lowering, source, module, part, subgraph, why.map(reasonText)),
  };
});

const WHOLE = DATA.retreats.map(([g, subgraph, from, to, why], index) => ({
  kind: "whole",
  index,
  id: `retreat:${index}`,
  graph: GRAPHS[g].id,
  subgraph,
  from,
  to,
  why: why < 0 ? [] : [REASONS[why]],
  lowering: to,
  hay: hay(subgraph, from, to, why < 0 ? [] : reasonText(REASONS[why])),
}));

const SITES = DATA.sites.map(([g, pass, kind, node, source, module, target, detail, why], index) => ({
  kind: "site",
  index,
  id: `site:${index}`,
  graph: GRAPHS[g].id,
  pass,
  what: kind,
  node,
  source,
  module,
  target,
  detail,
  why: why < 0 ? [] : [REASONS[why]],
  missed: !target && why >= 0,
  hay: hay(pass, kind, node, source, module, target, detail),
}));

const PLACES = SITES.filter((site) => !(site.missed && site.why[0].code === "graph_break"));

// One line for each cause of something that is not as it might be, as the text report has them.
const FINDINGS = DATA.findings.map(([cause, what, count, where, lowering, why, targets, graphs], index) => {
  const reasons = why.map((number) => REASONS[number]);
  return {
    kind: "finding",
    index,
    id: `finding:${index}`,
    cause,
    what,
    where,
    lowering,
    graph: graphs[0],
    graphs: new Set(graphs),
    why: reasons,
    count,
    targets,
    hay: hay(what, where, lowering, targets, reasons.map(reasonText)),
  };
});

const PASSES = DATA.passes.map(([g, name, result, rewrites, seconds, diff, note], index) => ({
  kind: "pass",
  index,
  id: `pass:${index}`,
  graph: GRAPHS[g].id,
  name,
  result,
  rewrites,
  seconds,
  diff,
  note,
  hay: hay(name, result, diff, note),
}));

const MERGES = DATA.merges.map(([g, part, left, between, right, lowering, sentence, tensors, size, why], index) => ({
  kind: "merge",
  index,
  id: `merge:${index}`,
  graph: GRAPHS[g].id,
  part,
  left,
  between,
  right,
  lowering,
  sentence,
  tensors,
  size,
  why: why.map((number) => REASONS[number]),
  hay: hay(left, between, right, sentence, lowering),
}));
const MERGE_BY_ROW = new Map(MERGES.map((merge) => [merge.between, merge]));

const BOUNDARIES = DATA.boundaries.map(([g, part, source, target, tensors, size, copies, casts], index) => ({
  kind: "boundary",
  index,
  id: `boundary:${index}`,
  graph: GRAPHS[g].id,
  part,
  source,
  target,
  tensors,
  size,
  copies,
  casts,
  why: [],
  hay: hay(part, source, target),
}));

const CANDIDATES = DATA.candidates.map(
  (
    [
      g,
      name,
      subgraph,
      lowerings,
      selected,
      from,
      clock,
      seconds,
      fastest,
      spread,
      speed,
      rounds,
      error,
      own,
      build,
      why,
    ],
    index,
  ) => ({
    kind: "candidate",
    index,
    id: `candidate:${index}`,
    graph: GRAPHS[g].id,
    name,
    subgraph,
    lowerings,
    selected,
    from,
    clock,
    seconds,
    fastest,
    spread,
    speed,
    rounds,
    error,
    own,
    build,
    why: why < 0 ? [] : [REASONS[why]],
    hay: hay(name, subgraph, lowerings, from),
  }),
);

const GUESSES = DATA.guesses.map(([g, sentence, state, variant, detail, source], index) => ({
  kind: "guess",
  index,
  id: `guess:${index}`,
  graph: GRAPHS[g].id,
  sentence,
  state,
  variant,
  detail,
  source,
  why: [],
  hay: hay(sentence, state, variant, detail, source),
}));

const CACHES = DATA.caches.map(([g, part, subgraph, cache, verdict, key, note], index) => ({
  kind: "cache",
  index,
  id: `cache:${index}`,
  graph: GRAPHS[g].id,
  part,
  subgraph,
  cache,
  verdict,
  key,
  note,
  why: [],
  hay: hay(part, subgraph, cache, verdict, key, note),
}));

const SETTINGS = GRAPHS.flatMap((graph) =>
  graph.settings.map(([key, requested, effective, origin, by, why], index) => ({
    kind: "setting",
    index,
    id: `option:${graph.id}:${key}`,
    graph: graph.id,
    key,
    requested,
    effective,
    origin,
    by,
    why: why < 0 ? [] : [REASONS[why]],
    hay: hay(key, requested, effective, origin, by),
  })),
);

const ITEMS = new Map(
  [ROWS, NODES, FINDINGS, WHOLE, SITES, PASSES, MERGES, BOUNDARIES, CANDIDATES, GUESSES, CACHES, SETTINGS].flatMap(
    (items) => items.map((item) => [item.id, item]),
  ),
);

const LOWERINGS = [...new Set(ROWS.map((row) => row.lowering))]
  .filter(Boolean)
  .sort((a, b) => (a === "eager") - (b === "eager") || natural(a, b));

// A module tree of the rows that a filter leaves; a row lies where all of its module paths meet.
function moduleTree(rows, basis) {
  const root = { name: "everything", path: "", children: new Map(), rows: [], work: {}, total: 0, count: 0, bad: 0 };
  for (const row of rows) {
    const weight = row.shares[basis] || 0;
    let node = root;
    const pieces = [row.graph, ...(row.at ? row.at.split(".").filter(Boolean) : [])];
    const visit = (each) => {
      each.work[row.lowering] = (each.work[row.lowering] || 0) + weight;
      each.total += weight;
      each.count += 1;
      if (row.why.length || row.difference) each.bad += 1;
    };
    visit(root);
    for (const piece of pieces) {
      let child = node.children.get(piece);
      if (!child) {
        const path = node.path ? `${node.path}.${piece}` : piece;
        child = { name: piece, path, children: new Map(), rows: [], work: {}, total: 0, count: 0, bad: 0 };
        node.children.set(piece, child);
      }
      node = child;
      visit(node);
    }
    node.rows.push(row);
  }
  return root;
}

function childrenOf(node) {
  return [...node.children.values()].sort((a, b) => natural(a.name, b.name));
}
