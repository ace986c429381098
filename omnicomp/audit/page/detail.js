// What is known of one thing: facts, the chain of reasons, lines of source, neighbours.
"use strict";

function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== "" && value !== undefined && value !== null && value !== 0);
  return shown.length
    ? el(
        "dl",
        {},
        shown.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
      )
    : "";
}

function reasonBlock(reason, lead) {
  return el(
    "div",
    { class: "reason" },
    el(
      "p",
      {},
      el("b", {}, lead || reason.by || ""),
      lead || reason.by ? ": " : "",
      reason.sentence,
      " ",
      el("span", { class: "chip" }, reason.code),
    ),
    facts([
      ["observed", code(reason.observed)],
      ["needed", code(reason.needed)],
      ["at", code(reason.node)],
      ["caused by", code(reason.cause)],
      ["source", code(reason.source)],
    ]),
    reason.lever ? el("p", { class: "lever" }, el("b", {}, "To change this: "), reason.lever) : "",
  );
}

function excerpt(source) {
  const found = source && Object.hasOwn(DATA.excerpts, source) ? DATA.excerpts[source] : null;
  if (!found) return source ? el("p", { class: "place" }, code(source)) : "";
  const [line, first, all, changed] = found;
  const indents = all.filter((text) => text.trim()).map((text) => text.length - text.trimStart().length);
  const lines = all.map((text) => text.slice(Math.min(...indents, 200)));
  return el(
    "figure",
    { class: "excerpt" },
    el("figcaption", {}, code(source), changed ? " (the file was changed after the run)" : ""),
    el(
      "pre",
      { tabindex: 0, "aria-label": `source around ${source}` },
      lines.map((text, index) =>
        el(
          "span",
          {
            class: first + index === line ? "line here" : "line",
          },
          el("i", {}, String(first + index)),
          `${text}\n`,
        ),
      ),
    ),
  );
}

function goto(id, label) {
  return ITEMS.has(id)
    ? el("button", { type: "button", class: "link", onclick: () => App.select(id) }, label || id)
    : code(label || id);
}

// An expression in symbolic sizes with its value for those that were seen; a plain number is shown once.
function sized(expression, hint, show) {
  if (/^-?\d*$/.test(expression)) return hint > 0 ? show(hint) : "";
  return hint > 0 ? `${expression} = ${show(hint)}` : expression;
}

const REFUSALS = new Set([
  "no_override",
  "override_refused",
  "lowering_excluded",
  "unsupported_op",
  "engine_missing",
  "cluster_refused",
  "unsafe_in_eager",
]);

function steps(row) {
  const found = [];
  if (row.planned) found.push(el("li", {}, "planned for ", badge(row.planned)));
  for (const [lowering, ok, selected, why, skipped, seconds, artefact] of row.attempts) {
    const took = duration(seconds);
    if (ok) {
      found.push(
        el(
          "li",
          {},
          badge(lowering),
          ` built it${took ? ` in ${took}` : ""}${selected ? "" : ", not selected"} `,
          artefact ? code(artefact) : "",
        ),
      );
    } else if (why >= 0) {
      found.push(
        el(
          "li",
          {},
          badge(lowering),
          REFUSALS.has(REASONS[why].code) ? " refused it" : ` failed${took ? ` after ${took}` : ""}`,
          reasonBlock(REASONS[why], lowering),
        ),
      );
    } else {
      found.push(el("li", { class: "dim" }, badge(lowering), ` passed over: ${skipped.replace(/^skipped: /, "")}`));
    }
  }
  for (const [from, to, why] of row.retreats) {
    found.push(
      el(
        "li",
        {},
        badge(from),
        " retreated to ",
        badge(to),
        row.attempts.some((attempt) => attempt[3] === why) ? "" : reasonBlock(REASONS[why]),
      ),
    );
  }
  for (const [name, state, direction, detail] of row.checks) {
    found.push(
      el(
        "li",
        { class: state === "wrong" ? "error" : "" },
        `${name} compared with its reference (${direction}): ${state} `,
        detail,
      ),
    );
  }
  for (const [lowering, evidence] of row.runs)
    found.push(el("li", {}, "ran on ", badge(lowering), " ", code(evidence)));
  if (!row.runs.length)
    found.push(el("li", { class: "dim" }, row.superseded ? "given up: its graph retreated" : "not called yet"));
  if (row.difference) found.push(el("li", { class: "error" }, `not as planned: it was ${row.difference}`));
  return el("ol", { class: "chain" }, found);
}

const DETAILS = {
  row(row) {
    const about = [
      ["part", row.part],
      ["module", code(row.at)],
      [
        "share",
        Object.entries(DATA.bases)
          .filter(([name]) => row.shares[name] !== undefined)
          .map(([name, title]) => `${percent(row.shares[name])} of ${title}`)
          .join(", "),
      ],
      ["operators", `${row.nodes}${row.ops.length ? `: ${counted(row.ops, 40)}` : ""}`],
      ["regions", row.repeated.join("; ")],
      ["FLOPs", sized(row.flops, row.flops_hint, grouped)],
      ["bytes", sized(row.bytes, row.bytes_hint, bytes)],
      ["inputs, outputs", row.io.join(", ")],
      [
        "time of a call",
        row.timing.length
          ? `${duration(row.timing[1])} on average of ${row.timing[0]}, fastest ${duration(row.timing[2])} (${row.timing[3]}): ${row.timing[4]}`
          : "",
      ],
      [
        "memory",
        row.memory.length
          ? `peak ${bytes(row.memory[2])}, before ${bytes(row.memory[1])} (${row.memory[0]} calls, ${row.memory[3]})`
          : "",
      ],
      ["CUDA graphs", row.graphs.join("; ")],
      [
        "kernels",
        Object.entries(row.kernels)
          .map(([name, count]) => (count === 1 ? name : `${name} ×${count}`))
          .join(", "),
      ],
      ["modules", row.modules.length > 1 ? row.modules.join(", ") : ""],
      ["identity", code(row.identity)],
      ["inside of", row.parent ? goto(row.parent) : ""],
    ];
    const near = BOUNDARIES.filter((b) => b.source === row.id || b.target === row.id);
    const merge = MERGE_BY_ROW.get(row.id);
    const nodes = NODES.filter((node) => node.subgraph === row.id);
    return [
      el("p", {}, badge(row.lowering), " ", el("span", { class: row.difference ? "error" : "dim" }, row.state)),
      facts(about),
      merge ? el("p", { class: "lever" }, el("b", {}, "Advice: "), `${merge.sentence}.`) : "",
      el("h3", {}, "What happened"),
      steps(row),
      nodes.length ? el("h3", {}, "Refused operators") : "",
      nodes.map((node) =>
        el(
          "div",
          {},
          el("p", {}, goto(node.id, `${node.node} (${node.op})`)),
          node.why.map((r) => reasonBlock(r)),
        ),
      ),
      el("h3", {}, "Source"),
      [...new Set([...nodes.map((n) => n.source), ...row.sources])].slice(0, 4).map((s) => excerpt(s)),
      near.length ? el("h3", {}, "Boundaries") : "",
      near.length
        ? el(
            "ul",
            {},
            near
              .slice(0, 12)
              .map((b) =>
                el(
                  "li",
                  {},
                  b.source === row.id ? "to " : "from ",
                  goto(b.source === row.id ? b.target : b.source),
                  `: ${b.tensors} tensor${b.tensors === 1 ? "" : "s"}, ${bytes(b.size)}${b.copies ? `, ${b.copies} copies` : ""}${b.casts ? `, ${b.casts} casts` : ""}`,
                ),
              ),
          )
        : "",
      near.length > 12 ? el("p", { class: "dim" }, `and ${near.length - 12} more`) : "",
    ];
  },
  node(node) {
    const row = ROW_BY_ID.get(node.subgraph);
    return [
      el("p", {}, code(node.op), " is on ", badge(node.lowering)),
      facts([
        ["part", `${node.graph}.${node.part}`],
        ["module", code(node.module)],
        ["subgraph", node.subgraph ? goto(node.subgraph) : ""],
      ]),
      excerpt(node.source),
      el("h3", {}, "Why"),
      node.why.map((r) => reasonBlock(r)),
      row ? [el("h3", {}, "What happened to its subgraph"), steps(row)] : "",
    ];
  },
  finding(item) {
    return [
      el("p", {}, item.lowering ? badge(item.lowering) : "", item.count > 1 ? ` ${item.count} places` : ""),
      excerpt(item.where),
      el("h3", {}, "Why"),
      item.why.length ? item.why.map((r) => reasonBlock(r)) : el("p", {}, "No reason was recorded."),
      el("h3", {}, "Where"),
      el(
        "ul",
        {},
        item.targets.slice(0, 40).map((id) => el("li", {}, goto(id))),
      ),
      item.targets.length > 40 ? el("p", { class: "dim" }, `and ${item.targets.length - 40} more`) : "",
    ];
  },
  whole(item) {
    return [
      el("p", {}, badge(item.from), item.to ? [" retreated to ", badge(item.to)] : " failed"),
      item.why.map((r) => reasonBlock(r)),
      item.why.map((r) => excerpt(r.source)),
    ];
  },
  site(site) {
    return [
      el("p", {}, site.missed ? "near miss of " : "rewritten by ", code(site.pass)),
      facts([
        ["kind", site.what],
        ["module", code(site.module)],
        ["node", code(site.node)],
        ["became", code(site.target)],
      ]),
      site.missed ? "" : el("p", {}, site.detail),
      excerpt(site.source),
      site.why.length ? el("h3", {}, "Why") : "",
      site.why.map((r) => [reasonBlock(r), r.source !== site.source ? excerpt(r.source) : ""]),
    ];
  },
  pass: (run) => [
    facts([
      ["result", run.result],
      ["places", run.rewrites],
      ["time", duration(run.seconds)],
      ["operators", run.diff],
    ]),
    el("p", {}, run.note),
  ],
  merge: (merge) => [
    el("p", { class: "lever" }, `${merge.sentence}.`),
    facts([
      ["left", goto(merge.left)],
      ["between", goto(merge.between)],
      ["right", goto(merge.right)],
      ["tensors", merge.tensors],
      ["bytes", bytes(merge.size)],
    ]),
    merge.why.map((r) => [reasonBlock(r), excerpt(r.source)]),
  ],
  boundary: (b) => [
    facts([
      ["from", goto(b.source)],
      ["to", goto(b.target)],
      ["tensors", b.tensors],
      ["bytes", bytes(b.size)],
      ["copies", b.copies],
      ["casts", b.casts],
    ]),
  ],
  candidate: (c) => [
    el("p", {}, c.selected ? "chosen" : "not chosen"),
    facts([
      ["subgraph", c.subgraph ? goto(c.subgraph) : "the whole graph"],
      ["lowerings", c.lowerings.join(", ")],
      ["call", duration(c.seconds)],
      ["fastest call", duration(c.fastest)],
      ["speed", c.speed ? `${c.speed.toFixed(2)} × the first candidate's, ± ${percent(c.spread)}` : ""],
      ["rounds", c.rounds],
      ["clock", c.clock],
      ["from", c.from],
      ["build", duration(c.build)],
      [
        "error",
        c.error >= 0
          ? `${c.error.toExponential(1)}; eager's own ${c.own >= 0 ? c.own.toExponential(1) : "is not known"}`
          : "",
      ],
    ]),
    c.why.map((r) => reasonBlock(r)),
  ],
  guess: (g) => [
    el("p", {}, g.sentence),
    facts([
      ["state", g.state],
      ["variant", g.variant],
    ]),
    el("p", {}, g.detail),
    excerpt(g.source),
  ],
  cache: (c) => [
    facts([
      ["cache", c.cache],
      ["verdict", c.verdict],
      ["part", c.part],
      ["subgraph", c.subgraph ? goto(c.subgraph) : ""],
      ["key", code(c.key)],
    ]),
    el("p", {}, c.note),
  ],
  setting: (s) => [
    facts([
      ["requested", code(s.requested) || "nothing"],
      ["effective", code(s.effective)],
      ["from", s.origin],
      ["changed by", s.by],
    ]),
    s.why.map((r) => reasonBlock(r)),
  ],
};

const TITLES = {
  row: (item) => item.id,
  node: (item) => item.node,
  finding: (item) => item.what,
  whole: (item) => item.subgraph,
  site: (item) => `${item.what} at ${item.node}`,
  pass: (item) => item.name,
  merge: (item) => `around ${item.between}`,
  boundary: (item) => `${item.source} → ${item.target}`,
  candidate: (item) => item.name,
  guess: () => "assumption",
  cache: (item) => item.cache,
  setting: (item) => item.key,
};

function detail(item) {
  return el(
    "div",
    {},
    el(
      "header",
      {},
      el("h2", { tabindex: -1 }, TITLES[item.kind](item)),
      el("button", { type: "button", class: "close", "aria-label": "Close", onclick: () => App.select("") }, "×"),
    ),
    el("p", { class: "dim" }, (GRAPHS.find((graph) => graph.id === item.graph) || { line: "" }).line),
    DETAILS[item.kind](item),
  );
}
