// Requests by worker, replica or node, completion, shares, turns, slowest requests.
"use strict";
const VIEWS = ["replica", "worker", "node"].filter((by) => DATA.requests.lanes[by]);
// What the lanes are, which lane each request is in, and the requests by lane and start.
let laneView = null, LANES = [], laneOf = [], ORDER = [];
let openLane = null, laneTops = [], highlight = null;

function buildLanes(by) {
  laneView = by;
  LANES = DATA.requests.lanes[by].map(([job, name], index) => ({ job, name, index, first: 0, past: 0 }));
  laneOf = REQUESTS[by + "_lane"];
  ORDER = Uint32Array.from({ length: DATA.requests.count }, (_, i) => i).filter((i) => laneOf[i] < LANES.length);
  if (by !== "worker") ORDER.sort((a, b) => laneOf[a] - laneOf[b] || REQUESTS.start[a] - REQUESTS.start[b]);
  for (let k = ORDER.length - 1; k >= 0; k--) LANES[laneOf[ORDER[k]]].first = k;
  // `reach` bounds how far back an open request may have started.
  for (const lane of LANES) lane.reach = 0;
  for (let k = 0; k < ORDER.length; k++) {
    const i = ORDER[k], lane = LANES[laneOf[i]];
    lane.past = k + 1;
    lane.reach = Math.max(lane.reach, REQUESTS.end[i] - REQUESTS.start[i]);
  }
  openLane = null;
}

function showLanesBy(by) {
  if (!VIEWS.includes(by) || by === laneView) return;
  buildLanes(by);
  $("lanes-by").value = by;
  redraw();
  drawCdf();
}

const laneName = (lane) => `${laneView} ${lane.name}`;

function laneRange(lane, from, to) {
  const search = (t) => {
    let low = lane.first, high = lane.past;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (REQUESTS.start[ORDER[middle]] < t) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  return [search(from - lane.reach), search(to)];
}

function drawLanes() {
  const many = LANES.length > 24, small = many ? 18 : 38, large = 320;
  laneTops = [];
  let y = 4;
  for (const lane of LANES) {
    laneTops.push(y);
    y += (openLane === lane.index ? large : small) + 4;
  }
  laneTops.push(y);
  const { pen, width, height } = prepare($("lanes"), y + 22);
  drawAxis(pen, width, height);
  for (const lane of LANES) {
    const top = laneTops[lane.index], h = laneTops[lane.index + 1] - top - 4;
    pen.fillStyle = colours.ink;
    const text = lane.job ? `${lane.job} ${laneView === "replica" ? "replica " : ""}${lane.name}` : laneName(lane);
    pen.fillText(fitText(pen, text, LEFT - 10), 0, top + Math.min(h, 38) / 2);
    if (openLane === lane.index) drawOpenLane(pen, lane, top, h, width);
    else drawArea(pen, lane, top, h, width);
  }
  drawHighlight(pen, width);
  drawCursor(pen, width, height);
}

// How many requests were open in each column of pixels: one pass over those in view, however many.
function drawArea(pen, lane, top, h, width) {
  const columns = Math.max(1, Math.floor(width - LEFT)), change = new Float32Array(columns + 2);
  const [from, to] = laneRange(lane, view.from, view.to), scale = columns / (view.to - view.from);
  let first = 0;
  for (let k = from; k < to; k++) {
    const i = ORDER[k], a = (REQUESTS.start[i] - view.from) * scale, b = (REQUESTS.end[i] - view.from) * scale;
    if (b < 0) continue;
    if (a <= 0) first++;
    else change[Math.min(Math.floor(a), columns)]++;
    change[Math.min(Math.floor(b) + 1, columns + 1)]--;
  }
  lane.most = Math.max(lane.most ?? 1, 1);
  let open = first, most = 1;
  const counts = new Float32Array(columns);
  for (let c = 0; c < columns; c++) {
    open += change[c];
    counts[c] = open;
    if (open > most) most = open;
  }
  pen.fillStyle = jobColour(lane.job);
  pen.globalAlpha = 0.75;
  pen.beginPath();
  pen.moveTo(LEFT, top + h);
  for (let c = 0; c < columns; c++) pen.lineTo(LEFT + c, top + h - (counts[c] / most) * h);
  pen.lineTo(LEFT + columns, top + h);
  pen.fill();
  pen.globalAlpha = 1;
  pen.strokeStyle = colours.line;
  pen.strokeRect(LEFT - 0.5, top + h + 0.5, columns, 0);
}

// One line a request, in order of its end, coloured by its parts; where there are more requests than pixels, the longest.
function drawOpenLane(pen, lane, top, h, width) {
  const shown = openRequests(lane, h);
  const each = Math.min(h / Math.max(shown.length, 1), 14);
  lane.shown = shown;
  lane.each = each;
  shown.forEach((i, row) => {
    const y = top + row * each, total = Math.max(REQUESTS.end[i] - REQUESTS.start[i], 1e-9);
    let t = REQUESTS.start[i];
    for (const part of ["other", "engine", "tool", "reward"]) {
      const share = Math.min(REQUESTS[part][i], total);
      if (share <= 0) continue;
      const x = Math.max(xOf(t, width), LEFT), end = Math.min(xOf(t + share, width), width);
      pen.fillStyle = REQUESTS.done[i] ? partColour(part) : colours.grid;
      if (end > x) pen.fillRect(x, y, Math.max(end - x, 0.7), Math.max(each - (each > 3 ? 1 : 0), 0.7));
      t += share;
    }
  });
}

function openRequests(lane, h) {
  const [from, to] = laneRange(lane, view.from, view.to), inView = [];
  for (let k = from; k < to; k++) if (REQUESTS.end[ORDER[k]] >= view.from) inView.push(ORDER[k]);
  inView.sort((a, b) => REQUESTS.end[a] - REQUESTS.end[b]);
  if (inView.length <= h) return inView;
  const picked = [], size = inView.length / h;
  for (let bucket = 0; bucket < h; bucket++) {
    const slice = inView.slice(Math.floor(bucket * size), Math.floor((bucket + 1) * size));
    picked.push(slice.reduce((best, i) => (REQUESTS.end[i] - REQUESTS.start[i] > REQUESTS.end[best] - REQUESTS.start[best] ? i : best), slice[0]));
  }
  return picked;
}

function drawHighlight(pen, width) {
  if (!highlight) return;
  const lane = LANES.find((l) => l.job === highlight.job && l.name === highlight[laneView]);
  const x = Math.max(xOf(highlight.start, width), LEFT), end = xOf(highlight.end, width);
  if (end < LEFT) return;
  const top = lane ? laneTops[lane.index] : 0, bottom = lane ? laneTops[lane.index + 1] - 4 : laneTops[LANES.length];
  pen.strokeStyle = colours.warn;
  pen.lineWidth = 2;
  pen.strokeRect(x, top, Math.max(end - x, 2), bottom - top);
  pen.lineWidth = 1;
}

function laneAt(y) {
  return LANES.find((lane) => y >= laneTops[lane.index] && y < laneTops[lane.index + 1]);
}

function laneHover(x, y) {
  const lane = laneAt(y);
  if (!lane || x < LEFT) return "";
  const t = tOf(x, $("lanes").clientWidth);
  if (openLane === lane.index && lane.shown) {
    const i = lane.shown[Math.floor((y - laneTops[lane.index]) / lane.each)];
    if (i !== undefined) return requestText(i);
  }
  const [from, to] = laneRange(lane, t, t);
  let open = 0;
  for (let k = from; k < to; k++) if (REQUESTS.start[ORDER[k]] <= t && t < REQUESTS.end[ORDER[k]]) open++;
  return `${lane.job ? lane.job + ", " : ""}${laneName(lane)}, ${clock(t)}: ${open} requests open`;
}

function requestText(i) {
  const parts = PART_NAMES.filter((part) => REQUESTS[part][i] > 0).map((part) => `\n  ${part} ${seconds(REQUESTS[part][i])}`).join("");
  const name = DATA.requests.names[i] ?? "request";
  const tokens = REQUESTS.tokens[i] ? `, ${REQUESTS.tokens[i]} tokens` : "";
  const turns = REQUESTS.turns[i] ? `, ${REQUESTS.turns[i]} turns` : "";
  const ended = REQUESTS.done[i] ? "" : " (did not complete)";
  return `${name}${ended}\nstep ${REQUESTS.step[i]}, ${seconds(REQUESTS.end[i] - REQUESTS.start[i])}${turns}${tokens}${parts}`;
}

// ---- a request's whole life

const jobOf = (i) => DATA.requests.lanes.worker[REQUESTS.worker_lane[i]][0];
const LIFE_COLOURS = { engine: () => partColour("engine"), tool: () => partColour("tool"), reward: () => partColour("reward"), queue: () => colours.warn };
function requestNamed(f) {
  if (!f.request_id) return undefined;
  return Object.keys(DATA.requests.names).map(Number).find((i) => DATA.requests.names[i] === f.request_id &&
    jobOf(i) === f.job && (f.step === null || REQUESTS.step[i] === f.step));
}

function showLife(i) {
  const stretches = DATA.requests.lives[i] ?? [];
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
  const note = stretches.length ? [] : [el("p", { class: "quiet" }, "The page keeps the lives of the slowest requests and of those that findings name.")];
  $("life").replaceChildren(el("h3", {}, requestText(i).split("\n")[0]), el("p", { class: "quiet" }, requestText(i).split("\n")[1]),
    el("table", {}, el("tr", {}, ...["", "at", "took", "", ""].map((h) => el("th", {}, h))), ...rows), ...note);
  const said = DATA.requests.texts[i];
  if (said) $("life").append(...[["prompt", said[0]], ["response", said[1]]].map(([what, text]) => el("details", {}, el("summary", {}, what), el("pre", {}, text))));
  $("life").hidden = false;
}

// ---- completion

function cdfGroups(job, step) {
  const groups = new Map();
  let start = Infinity;
  for (let i = 0; i < DATA.requests.count; i++) {
    if (REQUESTS.step[i] !== step || !REQUESTS.done[i] || jobOf(i) !== job) continue;
    if (!groups.has(laneOf[i])) groups.set(laneOf[i], []);
    groups.get(laneOf[i]).push(REQUESTS.end[i]);
    start = Math.min(start, REQUESTS.start[i]);
  }
  for (const [lane, ends] of groups) groups.set(lane, ends.map((end) => end - start).sort((a, b) => a - b));
  return groups;
}

function drawCdf() {
  const chosen = DATA.steps[Number($("cdf-step").value)];
  if (!chosen) return;
  const groups = cdfGroups(chosen[0], chosen[1]), every = [...groups.values()].flat().sort((a, b) => a - b);
  const total = every[every.length - 1] || 1e-9, at80 = every[Math.ceil(0.8 * every.length) - 1];
  const { pen, width, height } = prepare($("cdf"), 280);
  const x = (t) => 40 + (t / total) * (width - 56), y = (q) => height - 24 - q * (height - 36);
  pen.fillStyle = colours.quiet;
  pen.strokeStyle = colours.grid;
  for (const q of [0, 0.5, 0.8, 1]) {
    pen.fillText(percent(q), 0, y(q));
    line(pen, 40, y(q), width - 16, y(q));
  }
  const tick = niceStep(total, 6);
  for (let t = 0; t <= total; t += tick) pen.fillText(t.toFixed(tick < 1 ? 1 : 0) + " s", x(t) - 8, height - 8);
  const curve = (ends, colour, thick) => {
    pen.strokeStyle = colour;
    pen.lineWidth = thick;
    pen.beginPath();
    pen.moveTo(x(0), y(0));
    ends.forEach((t, i) => pen.lineTo(x(t), y((i + 1) / ends.length)));
    pen.stroke();
    pen.lineWidth = 1;
  };
  if (groups.size > 1) for (const ends of groups.values()) curve(ends, colours.other, 1);
  curve(every, colours.accent, 2.5);
  pen.strokeStyle = colours.cursor;
  line(pen, x(at80), y(0), x(at80), y(0.8));
  $("cdf-text").textContent = `80 % of ${every.length} requests were done after ${seconds(at80)}, the last after ${seconds(total)} ` +
    `(${percent(at80 / total)})` + (groups.size > 1 ? `; thin lines are ${laneView}s` : "");
}

function line(pen, x1, y1, x2, y2) {
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.lineTo(x2, y2);
  pen.stroke();
}

// ---- shares

function drawShares() {
  const { pen, width, height } = prepare($("shares"), 280);
  const roles = [...new Set(DATA.shares.map((row) => row[1]))], role = roles.includes("trainer") ? "trainer" : roles[0];
  const rows = DATA.shares.filter((row) => row[1] === role), means = new Map(), bars = new Map();
  for (const [job, , step, event, share] of rows) {
    means.set(event, (means.get(event) ?? 0) + share);
    const key = job + " " + step;
    if (!bars.has(key)) bars.set(key, { job, step, parts: new Map() });
    bars.get(key).parts.set(event, share);
  }
  const top = [...means.entries()].sort((a, b) => b[1] - a[1]).slice(0, 7).map(([event]) => event);
  const list = [...bars.values()], w = (width - 40) / Math.max(list.length, 1), most = Math.max(1, ...list.map((bar) =>
    [...bar.parts.values()].reduce((a, b) => a + b, 0)));
  const y = (q) => height - 24 - (q / most) * (height - 36);
  pen.fillStyle = colours.quiet;
  for (const q of [0, 0.5, 1]) pen.fillText(percent(q), 0, y(q));
  list.forEach((bar, index) => {
    let sum = 0;
    for (const event of [...top, ...[...bar.parts.keys()].filter((e) => !top.includes(e))]) {
      const share = bar.parts.get(event) ?? 0;
      pen.fillStyle = top.includes(event) ? colours.jobs[top.indexOf(event)] : colours.other;
      pen.fillRect(40 + index * w, y(sum + share), Math.max(w - (w > 4 ? 1.5 : 0), 0.6), y(sum) - y(sum + share));
      sum += share;
    }
    pen.fillStyle = colours.quiet;
    if (index % Math.ceil(list.length / 8) === 0) pen.fillText(fitText(pen, `${bar.job ? bar.job[0] + " " : ""}${bar.step}`, 60), 40 + index * w, height - 8);
  });
  $("shares-legend").replaceChildren(...top.map((event, i) => el("span", {},
    el("i", { style: `background:${colours.jobs[i]}` }), `${event} ${percent(means.get(event) / Math.max(list.length, 1))}`)));
}
