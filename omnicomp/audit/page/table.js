// A table of which only the lines in sight are in the document: thousands of rows open and scroll at once.
"use strict";

const LINE = 34;
const BEYOND = 8;

class VirtualTable {
  // columns: {title, width, cell(item) -> node or text, sort(item) -> value, number, wide: left out on a narrow screen}
  constructor({ label, columns: all, onSelect, onToggle }) {
    const narrow = window.matchMedia("(max-width: 700px)").matches;
    const columns = all.filter((column) => !narrow || !column.wide);
    this.columns = columns;
    this.onSelect = onSelect;
    this.onToggle = onToggle;
    this.items = [];
    this.order = null;
    this.selected = "";
    this.focused = 0;
    this.drawn = new Map();
    this.template = columns.map((column) => column.width).join(" ");
    this.head = el(
      "div",
      { class: "vhead", role: "row", "aria-rowindex": 1 },
      columns.map((column, index) => {
        const name = column.sort
          ? el(
              "button",
              { type: "button", onclick: () => this.sortBy(index) },
              column.title,
              el("span", { class: "arrow" }),
            )
          : column.title;
        return el("div", { role: "columnheader", class: column.number ? "number" : "" }, name);
      }),
    );
    this.body = el("div", { class: "vbody", role: "rowgroup" });
    this.empty = el("p", { class: "empty" }, "Nothing matches the filter.");
    this.scroller = el(
      "div",
      {
        class: columns.length < all.length ? "vtable few" : "vtable",
        role: "grid",
        tabindex: 0,
        "aria-label": label,
        "aria-colcount": columns.length,
        onscroll: () => this.draw(),
        onkeydown: (event) => this.key(event),
      },
      this.head,
      this.body,
    );
    this.head.style.gridTemplateColumns = this.template;
    this.root = el("div", { class: "vwrap" }, this.scroller, this.empty);
    new ResizeObserver(() => this.draw()).observe(this.scroller);
  }

  sortBy(index) {
    const down = this.order && this.order.index === index && !this.order.down;
    this.order = { index, down: Boolean(down) };
    this.set(this.all);
  }

  set(items) {
    this.all = items;
    this.items = items;
    if (this.order) {
      const { index, down } = this.order;
      const of = this.columns[index].sort;
      const sign = down ? -1 : 1;
      this.items = items
        .map((item) => [of(item), item])
        .sort(
          (a, b) => sign * (typeof a[0] === "number" && typeof b[0] === "number" ? a[0] - b[0] : natural(a[0], b[0])),
        )
        .map(([, item]) => item);
    }
    [...this.head.children].forEach((cell, index) => {
      const on = this.order && this.order.index === index;
      cell.setAttribute("aria-sort", on ? (this.order.down ? "descending" : "ascending") : "none");
    });
    this.scroller.setAttribute("aria-rowcount", this.items.length + 1);
    this.body.style.height = `${this.items.length * LINE}px`;
    this.empty.hidden = this.items.length > 0;
    this.scroller.hidden = this.items.length === 0;
    this.focused = Math.max(0, Math.min(this.focused, this.items.length - 1));
    this.clear();
    this.draw();
  }

  clear() {
    for (const node of this.drawn.values()) node.remove();
    this.drawn.clear();
  }

  select(id) {
    this.selected = id;
    const at = this.items.findIndex((item) => item.id === id);
    if (at >= 0) this.focused = at;
    this.clear();
    this.draw();
  }

  draw() {
    const height = this.scroller.clientHeight || 480;
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / LINE) - BEYOND);
    const last = Math.min(this.items.length, Math.ceil((this.scroller.scrollTop + height) / LINE) + BEYOND);
    for (const [index, node] of this.drawn) {
      if (index < first || index >= last) {
        node.remove();
        this.drawn.delete(index);
      }
    }
    for (let index = first; index < last; index += 1) {
      if (!this.drawn.has(index)) {
        const node = this.line(this.items[index], index);
        this.drawn.set(index, node);
        this.body.append(node);
      }
    }
    const active = this.drawn.get(this.focused);
    if (active) this.scroller.setAttribute("aria-activedescendant", active.id);
    else this.scroller.removeAttribute("aria-activedescendant");
  }

  line(item, index) {
    const names = [
      "vrow",
      item.difference ? "mismatch" : "",
      index === this.focused ? "focus" : "",
      item.id === this.selected ? "selected" : "",
    ];
    const node = el(
      "div",
      {
        class: names.filter(Boolean).join(" "),
        role: "row",
        id: `${this.name || "t"}-${index}`,
        "aria-rowindex": index + 2,
        "aria-selected": item.id === this.selected ? "true" : "false",
        "aria-level": item.level,
        "aria-expanded": item.expandable ? String(item.open) : undefined,
        onclick: () => {
          this.focused = index;
          this.choose(item);
        },
      },
      this.columns.map((column) => {
        const content = column.cell(item);
        const whole = typeof content === "string" && content ? content : undefined; // the end may be cut off
        return el("div", { role: "gridcell", class: column.number ? "number" : "", title: whole }, content);
      }),
    );
    node.style.gridTemplateColumns = this.template;
    node.style.transform = `translateY(${index * LINE}px)`;
    return node;
  }

  choose(item) {
    this.selected = item.id;
    this.clear();
    this.draw();
    this.onSelect(item);
  }

  key(event) {
    if (event.target !== this.scroller) return;
    const page = Math.max(1, Math.floor(this.scroller.clientHeight / LINE) - 2);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    const item = this.items[this.focused];
    if (event.key in moves) {
      this.focused = Math.max(0, Math.min(this.items.length - 1, this.focused + moves[event.key]));
      this.show(this.focused);
      this.clear();
      this.draw();
    } else if (event.key === "Enter" || event.key === " ") {
      if (item) this.choose(item);
    } else if ((event.key === "ArrowRight" || event.key === "ArrowLeft") && this.onToggle && item && item.expandable) {
      this.onToggle(item, event.key === "ArrowRight");
    } else {
      return;
    }
    event.preventDefault();
  }

  show(index) {
    const top = index * LINE;
    const head = this.head.offsetHeight;
    const height = this.scroller.clientHeight - head;
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    else if (top + LINE > this.scroller.scrollTop + height) this.scroller.scrollTop = top + LINE - height;
  }
}
