// The page's state: what is shown, filtered and chosen. It is in the address, so that a view can be linked to.
"use strict";

const App = {
  state: { tab: "", q: "", low: [], only: "", graph: "", by: "", sel: "" },
  built: new Map(),

  start() {
    this.tabs = VIEWS.filter((view) => view.present());
    this.defaults = { tab: this.tabs[0].id, by: DATA.basis };
    const app = document.getElementById("app");
    this.panel = el("div", { id: "panel", role: "tabpanel", tabindex: -1 });
    this.aside = el("aside", { id: "detail", "aria-label": "Details", hidden: true });
    app.append(this.toolbar(), this.tablist(), el("div", { id: "split" }, this.panel, this.aside));
    window.addEventListener("hashchange", () => this.read());
    window.addEventListener("popstate", () => this.read());
    document.addEventListener("keydown", (event) => this.key(event));
    this.theme(localTheme());
    this.read();
  },

  toolbar() {
    this.search = el("input", {
      type: "search",
      id: "search",
      placeholder: "Search operators, modules, lines, reasons",
      "aria-label": "Search",
      "aria-keyshortcuts": "/",
      oninput: () => {
        this.state.q = this.search.value;
        this.write(false);
        this.show();
      },
    });
    this.chips = LOWERINGS.map((name) =>
      el(
        "button",
        { type: "button", class: `toggle ${tone(name)}`, "aria-pressed": "false", onclick: () => this.toggle(name) },
        el("span", { class: `dot ${tone(name)}` }),
        name,
      ),
    );
    const select = (key, label, options) =>
      el(
        "label",
        {},
        el("span", { class: "dim" }, label),
        el(
          "select",
          {
            onchange: (event) => {
              this.state[key] = event.target.value;
              this.write(true);
              this.show();
            },
            "data-key": key,
          },
          options.map(([value, title]) => el("option", { value }, title)),
        ),
      );
    this.selects = [
      select("only", "show", [
        ["", "everything"],
        ["why", "what has a reason"],
        ["retreat", "retreats"],
        ["mismatch", "not as planned"],
        ["idle", "not called"],
      ]),
      GRAPHS.length > 1
        ? select("graph", "graph", [
            ["", "all"],
            ...GRAPHS.map((graph) => [graph.id, `${graph.id} ${graph.function.split(" ")[0]}`]),
          ])
        : "",
      select("by", "count", Object.entries(DATA.bases)),
    ].filter(Boolean);
    this.themes = el("button", { type: "button", class: "theme", onclick: () => this.theme(nextTheme(), true) }, "");
    document.querySelector("h1").append(this.themes);
    this.count = el("span", { class: "dim", role: "status" });
    return el(
      "div",
      { class: "toolbar", role: "search" },
      this.search,
      el("span", { class: "chips", role: "group", "aria-label": "Lowerings" }, this.chips),
      this.selects,
      el("button", { type: "button", class: "clear", onclick: () => this.clear() }, "clear"),
      this.count,
    );
  },

  tablist() {
    this.buttons = this.tabs.map((view) =>
      el(
        "button",
        {
          type: "button",
          role: "tab",
          id: `tab-${view.id}`,
          "aria-controls": "panel",
          tabindex: -1,
          onclick: () => this.open(view.id),
        },
        view.title,
        view.size() === "" ? "" : el("span", { class: "size" }, String(view.size())),
      ),
    );
    return el(
      "div",
      { class: "tabs", role: "tablist", "aria-label": "Views", onkeydown: (event) => this.move(event) },
      this.buttons,
    );
  },

  move(event) {
    const at = this.tabs.findIndex((view) => view.id === this.state.tab);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: this.tabs.length - 1 }[event.key];
    if (next === undefined) return;
    const index = (next + this.tabs.length) % this.tabs.length;
    this.open(this.tabs[index].id);
    this.buttons[index].focus();
    event.preventDefault();
  },

  key(event) {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
      this.search.focus();
      this.search.select();
      event.preventDefault();
    } else if (event.key === "Escape" && typing) event.target.blur();
    else if (event.key === "Escape" && this.state.sel && !event.defaultPrevented) this.select("");
  },

  read() {
    const given = new URLSearchParams(location.hash.slice(1));
    const text = (key) => given.get(key) || "";
    const tab = this.tabs.some((view) => view.id === text("tab")) ? text("tab") : this.defaults.tab;
    this.state = {
      tab,
      q: text("q"),
      low: text("low")
        .split(",")
        .filter((name) => LOWERINGS.includes(name)),
      only: text("only"),
      graph: GRAPHS.some((graph) => graph.id === text("graph")) ? text("graph") : "",
      by: Object.hasOwn(DATA.bases, text("by")) ? text("by") : this.defaults.by,
      sel: ITEMS.has(text("sel")) ? text("sel") : "",
    };
    this.search.value = this.state.q;
    this.show();
    this.details(false);
  },

  write(push) {
    const found = new URLSearchParams();
    for (const [key, value] of Object.entries(this.state)) {
      const said = Array.isArray(value) ? value.join(",") : value;
      if (said && said !== this.defaults[key]) found.set(key, said);
    }
    const hash = `#${found.toString()}`;
    if (hash === (location.hash || "#")) return;
    history[push ? "pushState" : "replaceState"](null, "", hash);
  },

  toggle(name) {
    this.state.low = this.state.low.includes(name)
      ? this.state.low.filter((each) => each !== name)
      : [...this.state.low, name];
    this.write(true);
    this.show();
  },

  clear() {
    Object.assign(this.state, { q: "", low: [], only: "", graph: "" });
    this.search.value = "";
    this.write(true);
    this.show();
  },

  filter() {
    const { low, only, graph } = this.state;
    const words = this.state.q.toLowerCase().split(/\s+/).filter(Boolean);
    return (item, tones) => {
      if (graph && item.graph !== graph && !(item.graphs && item.graphs.has(graph))) return false;
      if (tones && low.length && !low.includes(item.lowering)) return false;
      if (only && item.kind === "row") {
        if (only === "why" && !item.why.length && !item.difference) return false;
        if (only === "retreat" && !item.retreats.length && !item.superseded) return false;
        if (only === "mismatch" && !item.difference) return false;
        if (only === "idle" && item.ran) return false;
      }
      return words.every((word) => item.hay.includes(word));
    };
  },

  open(tab) {
    this.state.tab = tab;
    this.write(true);
    this.show();
  },

  show() {
    const { state } = this;
    let view = this.built.get(state.tab);
    if (!view) {
      view = this.tabs.find((each) => each.id === state.tab).build();
      this.built.set(state.tab, view);
    }
    if (this.panel.firstChild !== view.root) this.panel.replaceChildren(view.root);
    this.panel.setAttribute("aria-labelledby", `tab-${state.tab}`);
    this.tabs.forEach((each, index) => {
      const on = each.id === state.tab;
      this.buttons[index].setAttribute("aria-selected", String(on));
      this.buttons[index].tabIndex = on ? 0 : -1;
    });
    this.chips.forEach((chip, index) =>
      chip.setAttribute("aria-pressed", String(state.low.includes(LOWERINGS[index]))),
    );
    for (const label of this.selects) {
      const box = label.querySelector("select");
      box.value = state[box.dataset.key];
    }
    const filter = this.filter();
    view.update(filter);
    if (view.shown) view.shown();
    const left = ROWS.filter((row) => filter(row, true)).length;
    this.count.textContent =
      left === ROWS.length
        ? `${grouped(left)} row${left === 1 ? "" : "s"}`
        : `${grouped(left)} of ${grouped(ROWS.length)} rows`;
  },

  select(id) {
    this.state.sel = id;
    this.write(true);
    this.details(true);
    const view = this.built.get(this.state.tab);
    if (view) view.selected(id);
  },

  details(focus) {
    const item = ITEMS.get(this.state.sel);
    this.aside.hidden = !item;
    document.body.classList.toggle("detailed", Boolean(item));
    this.aside.replaceChildren(...(item ? [detail(item)] : []));
    this.aside.scrollTop = 0;
    // Where the details cover the list, reading goes on in them; beside it, the list keeps the focus.
    if (item && focus && window.matchMedia("(max-width: 900px)").matches) this.aside.querySelector("h2").focus();
    if (!item && focus) {
      const table = this.panel.querySelector(".vtable");
      if (table) table.focus({ preventScroll: true });
    }
  },

  theme(name, keep) {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    this.themes.textContent = { auto: "◐ system", light: "☀ light", dark: "☾ dark" }[name];
    this.themes.setAttribute("aria-label", `Colours: ${name}`);
    this.themed = name;
    if (keep) storeTheme(name);
  },
};

const THEMES = ["auto", "light", "dark"];

function nextTheme() {
  return THEMES[(THEMES.indexOf(App.themed) + 1) % THEMES.length];
}

// A browser may keep a page that was opened from a file from storing anything: the choice then lasts as long as the page.
function localTheme() {
  try {
    const name = localStorage.getItem("omnicomp-theme");
    return THEMES.includes(name) ? name : "auto";
  } catch (error) {
    return "auto";
  }
}

function storeTheme(name) {
  try {
    localStorage.setItem("omnicomp-theme", name);
  } catch (error) {
    App.themes.title = "this browser does not keep the choice";
  }
}

App.start();
document.documentElement.dataset.ready = "true";
