// Boxes in boxes: modules by work, and compilations by time. What is too narrow to see is drawn as one box with its like.
"use strict";

const DEPTH = 24;
const NARROW = 3;
const MOST = 48;

// Hundreds of boxes beside each other are none that can be seen: they are put into boxes of their own, by ranges.
function bundled(node) {
  const children = (node.children || []).map(bundled);
  if (children.length <= MOST) return { ...node, children };
  const size = Math.ceil(Math.sqrt(children.length));
  const found = [];
  for (let at = 0; at < children.length; at += size) {
    const inside = children.slice(at, at + size);
    if (inside.length === 1) {
      found.push(inside[0]);
      continue;
    }
    const first = inside[0],
      last = inside[inside.length - 1];
    const tones = {};
    for (const each of inside) tones[each.tone] = (tones[each.tone] || 0) + each.end - each.start;
    const main = Object.entries(tones).sort((a, b) => b[1] - a[1])[0][0];
    found.push({
      name: `${first.name} … ${last.name}`,
      start: first.start,
      end: last.end,
      children: inside,
      bad: inside.some((each) => each.bad),
      tone: Object.keys(tones).length === 1 ? main : `${main.split(" ")[0]} part`,
      title: `${inside.length} together: ${first.name} to ${last.name}`,
    });
  }
  return { ...node, children: found };
}

class Icicle {
  // nodes: {name, start, end, children, tone, title, id}
  constructor({ label, onSelect, caption }) {
    this.onSelect = onSelect;
    this.caption = caption;
    this.path = el("nav", { class: "crumbs", "aria-label": `${label}: what is shown` });
    this.stage = el("div", {
      class: "icicle",
      role: "tree",
      "aria-label": label,
      onkeydown: (event) => this.key(event),
    });
    this.says = el("p", { class: "says", "aria-live": "polite" }, "");
    this.root = el("div", {}, this.path, this.stage, this.says);
    this.boxes = [];
    // Drawing changes the height, and must not draw anew: the box that has the focus would be lost.
    new ResizeObserver(() => {
      if (this.stage.clientWidth !== this.width) this.draw();
    }).observe(this.stage);
  }

  set(top) {
    const zoomed = this.zoom ? this.zoom.map((node) => node.name) : [];
    top = bundled(top);
    this.top = top;
    this.zoom = [top];
    for (const name of zoomed.slice(1)) {
      const next = (this.zoom[this.zoom.length - 1].children || []).find((child) => child.name === name);
      if (!next) break;
      this.zoom.push(next);
    }
    this.draw();
  }

  zoomTo(path) {
    this.zoom = path;
    this.draw();
    const first = this.stage.querySelector("[tabindex='0']");
    if (first) first.focus();
  }

  draw() {
    if (!this.top) return;
    const width = this.stage.clientWidth;
    if (!width) return;
    this.width = width;
    const now = this.zoom[this.zoom.length - 1];
    const span = now.end - now.start;
    this.path.replaceChildren(
      ...this.zoom.map((node, index) =>
        el(
          "button",
          {
            type: "button",
            disabled: index === this.zoom.length - 1,
            onclick: () => this.zoomTo(this.zoom.slice(0, index + 1)),
          },
          node.name,
        ),
      ),
    );
    this.stage.replaceChildren();
    this.boxes = [];
    if (!(span > 0)) {
      this.stage.style.height = "auto";
      this.stage.append(
        el("p", { class: "empty" }, "Nothing to draw: nothing was measured, or the filter leaves nothing."),
      );
      return;
    }
    let deepest = 0;
    const pieces = document.createDocumentFragment();
    const place = (node, depth, path, parent) => {
      const left = ((node.start - now.start) / span) * width;
      const wide = ((node.end - node.start) / span) * width;
      const box = this.box(node, left, wide, depth, path);
      const record = { node, box, parent, children: [], path };
      if (parent) parent.children.push(record);
      this.boxes.push(record);
      box.record = record;
      pieces.append(box);
      deepest = Math.max(deepest, depth);
      let narrow = null;
      const flush = () => {
        if (narrow) {
          pieces.append(this.rest(narrow, now, span, width, depth + 1));
          narrow = null;
        }
      };
      for (const child of node.children || []) {
        if (((child.end - child.start) / span) * width >= NARROW) {
          flush();
          place(child, depth + 1, [...path, child], record);
        } else if (child.end > child.start) {
          deepest = Math.max(deepest, depth + 1);
          if (narrow) {
            narrow.end = child.end;
            narrow.count += 1;
            if (narrow.tone !== child.tone) narrow.tone = "mixed";
          } else narrow = { start: child.start, end: child.end, count: 1, tone: child.tone };
        }
      }
      flush();
    };
    place(now, 0, this.zoom, null);
    this.stage.append(pieces);
    this.stage.style.height = `${(deepest + 1) * DEPTH}px`;
    if (this.boxes.length) this.boxes[0].box.tabIndex = 0;
  }

  box(node, left, wide, depth, path) {
    const box = el(
      "div",
      {
        class: `box ${node.tone}${node.bad ? " bad" : ""}`,
        role: "treeitem",
        tabindex: -1,
        "aria-label": node.title,
        title: node.title,
        "aria-level": depth + 1,
        onclick: () => this.open(node, path),
        onfocus: () => {
          this.says.textContent = node.title;
        },
        onmouseenter: () => {
          this.says.textContent = node.title;
        },
      },
      wide > 28 ? node.name : "",
    );
    box.style.left = `${left}px`;
    box.style.width = `${Math.max(1, wide - 1)}px`;
    box.style.top = `${depth * DEPTH}px`;
    return box;
  }

  rest(narrow, now, span, width, depth) {
    const title = `${narrow.count} more, too narrow to show: open what they are in`;
    const wide = ((narrow.end - narrow.start) / span) * width;
    const box = el(
      "div",
      { class: `box rest ${narrow.tone}`, title, "aria-hidden": "true" },
      wide > 60 ? `${narrow.count} more` : "",
    );
    box.style.left = `${((narrow.start - now.start) / span) * width}px`;
    box.style.width = `${Math.max(1, wide - 0.5)}px`;
    box.style.top = `${depth * DEPTH}px`;
    return box;
  }

  open(node, path) {
    this.says.textContent = node.title;
    const now = this.zoom[this.zoom.length - 1];
    if (node.children && node.children.length) this.zoomTo(node === now && path.length > 1 ? path.slice(0, -1) : path);
    if (node.id) this.onSelect(node.id);
  }

  key(event) {
    const record = event.target.record;
    if (!record) return;
    const same = record.parent ? record.parent.children : [record];
    const at = same.indexOf(record);
    const next = {
      ArrowRight: same[at + 1],
      ArrowLeft: same[at - 1],
      ArrowDown: record.children[0],
      ArrowUp: record.parent,
    }[event.key];
    if (event.key === "Enter" || event.key === " ") this.open(record.node, record.path);
    else if (event.key === "Escape" && this.zoom.length > 1) this.zoomTo(this.zoom.slice(0, -1));
    else if (next) {
      event.target.tabIndex = -1;
      next.box.tabIndex = 0;
      next.box.focus();
    } else return;
    event.preventDefault();
  }
}
