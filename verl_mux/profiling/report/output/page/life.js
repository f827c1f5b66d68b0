// A request's whole life: queues, stays in engines, tools, reward, and its text where the log holds it.
"use strict";
const LIVES = Object.fromEntries(Object.entries(DATA.requests.lives).map(([name, text]) =>
  [name, name === "names" ? text : unpack(text, { kept: Uint8Array, what: Uint8Array, turn: Uint8Array, counts: Uint16Array, stay: Uint16Array, replica: Uint16Array }[name] || Float32Array)]));
const WHAT = ["queue", "engine", "engine", "tool", "reward"];
const CUT_OFF = 2; // in `what`: a stay that was no end of its turn
const LIFE_COLOURS = { engine: () => partColour("engine"), tool: () => partColour("tool"), reward: () => partColour("reward"), queue: () => colours.warn };
// By request: the first of its stretches, and the place of its name.
const FIRST = new Uint32Array(DATA.requests.count), NAME = new Uint32Array(DATA.requests.count);
for (let i = 1; i < DATA.requests.count; i++) {
  FIRST[i] = FIRST[i - 1] + LIVES.counts[i - 1];
  NAME[i] = NAME[i - 1] + LIVES.kept[i - 1];
}

const requestName = (i) => (LIVES.kept[i] ? LIVES.names[NAME[i]] : undefined);

let byName = null;
function requestNamed(f) {
  if (!f.request_id) return undefined;
  if (!byName) {
    byName = new Map();
    for (let i = 0; i < DATA.requests.count; i++) if (LIVES.kept[i]) byName.set(LIVES.names[NAME[i]], [...(byName.get(LIVES.names[NAME[i]]) ?? []), i]);
  }
  return byName.get(f.request_id)?.find((i) => KINDS.worker.lanes[REQUESTS.worker[i]].job === f.job && (f.step === null || REQUESTS.step[i] === f.step));
}

function requestText(i) {
  const parts = PART_NAMES.filter((part) => REQUESTS[part][i] > 0).map((part) => `\n  ${part} ${seconds(REQUESTS[part][i])}`).join("");
  const tokens = REQUESTS.tokens[i] ? `, ${REQUESTS.tokens[i]} tokens` : "";
  const turns = REQUESTS.turns[i] ? `, ${count(REQUESTS.turns[i], "turn")}` : "";
  const ended = REQUESTS.done[i] ? "" : " (did not complete)";
  return `${requestName(i) ?? "request"}${ended}\nstep ${REQUESTS.step[i]}, ${seconds(REQUESTS.end[i] - REQUESTS.start[i])}${turns}${tokens}${parts}`;
}

// [what, start, end, text] of each stretch, in order of its start.
function lifeOf(i) {
  const found = [];
  for (let k = FIRST[i]; k < FIRST[i] + LIVES.counts[i]; k++) {
    const start = REQUESTS.start[i] + LIVES.at[k];
    found.push([WHAT[LIVES.what[k]], start, start + LIVES.took[k], stretchText(k)]);
  }
  return found;
}

function stretchText(k) {
  const what = WHAT[LIVES.what[k]], value = LIVES.value[k];
  if (what === "reward") return Number.isNaN(value) ? "reward" : `reward, score ${Number(value.toPrecision(4))}`;
  if (what === "tool") return `tools of turn ${LIVES.turn[k]}`;
  const lane = KINDS.replica.lanes[LIVES.replica[k]], where = lane ? lane.title : "an engine";
  if (what === "queue") return `queue of ${where}`;
  const stay = LIVES.stay[k] ? `, stay ${LIVES.stay[k]}` : "";
  const cut = LIVES.what[k] === CUT_OFF ? ", cut off" : "";
  return `turn ${LIVES.turn[k] || 1}${stay}: ${where}${Number.isNaN(value) ? "" : `, ${value} tokens`}${cut}`;
}

function showLife(i) {
  const stretches = lifeOf(i);
  const from = Math.min(REQUESTS.start[i], ...stretches.map((s) => s[1])), to = Math.max(REQUESTS.end[i], ...stretches.map((s) => s[2]));
  const whole = Math.max(to - from, 1e-9), rows = [];
  let last = from;
  const row = (what, start, end, text) => el("tr", {}, el("td", {}, what), el("td", {}, seconds(start - from)), el("td", {}, seconds(end - start)),
    el("td", { class: "track" }, el("i", { style: `margin-left:${(100 * (start - from)) / whole}%;width:${Math.max((100 * (end - start)) / whole, 0.3)}%;background:${(LIFE_COLOURS[what] ?? (() => colours.other))()}` })), el("td", {}, text));
  for (const [what, start, end, text] of stretches) {
    if (start - last > 0.005 * whole) rows.push(row("between", last, start, "parked, prepared, or nothing logged"));
    rows.push(row(what, start, end, text));
    last = Math.max(last, end);
  }
  const note = LIVES.kept[i] ? [] : [el("p", { class: "quiet" }, "Of a run as large as this the page keeps the lives of the longest requests and of those that findings name.")];
  $("life").replaceChildren(el("h3", {}, requestText(i).split("\n")[0]), el("p", { class: "quiet" }, requestText(i).split("\n")[1]),
    el("table", {}, el("tr", {}, ...["", "at", "took", "", ""].map((h) => el("th", {}, h))), ...rows), ...note, ...textOf(i));
  $("life").hidden = false;
}

function textOf(i) {
  const [prompt, response, leftOut] = DATA.requests.texts[i] ?? [];
  if (prompt === undefined) return [];
  const part = (name, text) => el("details", { open: "" }, el("summary", {}, name), el("pre", {}, text));
  return [part("prompt", prompt), part("response", response), ...(leftOut ? [el("p", { class: "quiet" }, `${leftOut} characters were left out when it was logged.`)] : [])];
}
