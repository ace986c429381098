// Small helpers. Text from the report only ever becomes a text node: there is no markup made from it.
"use strict";

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

function tone(lowering) {
  return Object.hasOwn(DATA.tones, lowering) ? DATA.tones[lowering] : "none";
}

function badge(lowering) {
  return lowering ? el("span", { class: `badge ${tone(lowering)}` }, lowering) : el("span", { class: "dim" }, "–");
}

function code(text) {
  return text ? el("code", {}, text) : "";
}

function percent(share) {
  if (share === undefined || share === null) return "";
  if (share > 0 && share < 0.0005) return "< 0.1 %";
  if (share >= 0.9995 && share < 1 - 1e-12) return "> 99.9 %";
  return `${(100 * share).toFixed(1)} %`;
}

function duration(seconds) {
  if (!(seconds > 0)) return "";
  if (seconds >= 1) return `${seconds.toFixed(1)} s`;
  if (seconds >= 0.001) return `${Math.round(seconds * 1e3)} ms`;
  return `${(seconds * 1e6).toFixed(seconds < 1e-5 ? 1 : 0)} µs`;
}

function bytes(count) {
  if (count === undefined || count < 0) return "";
  if (count < 1024) return `${count} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let value = count / 1024,
    unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value.toFixed(1)} ${units[unit]}`;
}

function grouped(number) {
  return Number(number).toLocaleString("en");
}

function shortSource(source) {
  return source ? source.replace(/\\/g, "/").split("/").pop() : "";
}

function counted(pairs, limit) {
  const shown = pairs.slice(0, limit).map(([name, count]) => (count === 1 ? name : `${name} ×${count}`));
  if (pairs.length > limit) shown.push(`${pairs.length - limit} more`);
  return shown.join(", ");
}

function natural(a, b) {
  return String(a).localeCompare(String(b), "en", { numeric: true });
}
