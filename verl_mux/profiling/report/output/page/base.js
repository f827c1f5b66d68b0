// Data, colours and small helpers that every part of the page uses.
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") node.style.cssText = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// A plain loop: with a callback for each byte a large page took seconds to open.
function unpack(text, Type) {
  const read = atob(text), bytes = new Uint8Array(read.length);
  for (let i = 0; i < read.length; i++) bytes[i] = read.charCodeAt(i);
  return new Type(bytes.buffer);
}

const COLUMN_TYPES = { worker: Uint16Array, replica: Uint16Array, step: Uint32Array, tokens: Uint32Array, turns: Uint8Array, done: Uint8Array };
const REQUESTS = Object.fromEntries(
  Object.entries(DATA.requests.columns).map(([name, text]) => [name, unpack(text, COLUMN_TYPES[name] || Float32Array)]));
const PART_NAMES = ["engine", "tool", "reward", "other"];

// Colours are read from the style sheet, so that one place decides on them for light and dark.
let colours = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["back", "card", "ink", "quiet", "line", "grid", "accent", "warn", "other", "cursor"])
    colours[name] = style.getPropertyValue("--" + name).trim();
  colours.jobs = Array.from({ length: 8 }, (_, i) => style.getPropertyValue("--job" + i).trim());
}
const jobIndex = new Map(DATA.jobs.map((job, index) => [job, index]));
const jobColour = (job) => colours.jobs[(jobIndex.get(job) ?? 7) % 8];
const partColour = (part) => colours.jobs[{ engine: 0, tool: 4, reward: 6 }[part]] ?? colours.other;

function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  const size = Math.abs(value);
  if (size < 0.0005 && size > 0) return (value * 1e6).toFixed(0) + " \u00b5s";
  if (size < 1) return (value * 1e3).toFixed(size < 0.01 ? 1 : 0) + " ms";
  if (size < 120) return value.toFixed(1) + " s";
  if (size < 7200) return Math.floor(value / 60) + " min " + Math.round(value % 60) + " s";
  return (value / 3600).toFixed(1) + " h";
}
const count = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
const percent = (part) => (100 * part).toFixed(part > 0 && part < 0.0995 ? 1 : 0) + " %";
const bytes = (n) => (n >= 1e9 ? (n / 1e9).toFixed(2) + " GB" : n >= 1e6 ? (n / 1e6).toFixed(1) + " MB" : (n / 1e3).toFixed(0) + " kB");

function clock(t) {
  const at = new Date((DATA.t0 + t) * 1000);
  return at.toISOString().slice(11, 21); // the log's local time travels as if it were UTC
}

// A canvas that is sharp on every screen: returns its context and its size in CSS pixels.
function prepare(canvas, height) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth || canvas.parentElement.clientWidth;
  canvas.style.height = height + "px";
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  return { pen, width, height };
}

function fitText(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  for (let n = text.length - 1; n > 0; n--)
    if (pen.measureText(text.slice(0, n) + "\u2026").width <= width) return text.slice(0, n) + "\u2026";
  return "";
}

function niceStep(span, count) {
  const raw = span / Math.max(count, 1), power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= raw);
}

function showTip(text, event) {
  const tip = $("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8) + "px";
}
