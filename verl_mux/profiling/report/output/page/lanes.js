// Requests over time: a row a worker, a replica or a node, as the reader chooses.
"use strict";
const NO_LANE = 0xffff;
const KINDS = { worker: workerLanes(), replica: replicaLanes(), node: nodeLanes() };
let kind = KINDS.replica.lanes.length ? "replica" : "worker", openLane = null, laneTops = [], highlight = null;
const lanes = () => KINDS[kind].lanes;

function workerLanes() {
  return { of: REQUESTS.worker, lanes: DATA.requests.lanes.worker.map(([job, unit]) => ({ job, unit, name: String(unit), title: `worker ${unit}` })) };
}

function replicaLanes() {
  const rows = DATA.requests.lanes.replica;
  return { of: REQUESTS.replica, lanes: rows.map(([job, unit, node]) => ({ job, unit, name: String(unit), title: `replica ${unit}${node ? " on " + node : ""}` })) };
}

function nodeLanes() {
  const found = new Map(), laneOfReplica = DATA.requests.lanes.replica.map(([job, , node]) => {
    if (node === null) return NO_LANE;
    const key = JSON.stringify([job, node]);
    if (!found.has(key)) found.set(key, { job, unit: node, name: node, title: `node ${node}` });
    return [...found.keys()].indexOf(key);
  });
  const of = REQUESTS.replica.map((lane) => (lane === NO_LANE ? NO_LANE : laneOfReplica[lane]));
  return { of, lanes: [...found.values()] };
}

// `order` holds the requests of each lane in order of their start, `first` and `past` a lane's part of it; `reach` bounds how far
// back an open request may have started.
function setKind(chosen) {
  kind = chosen;
  openLane = null;
  const it = KINDS[kind];
  if (!it.order) {
    const sizes = new Uint32Array(it.lanes.length + 1);
    for (const lane of it.of) if (lane !== NO_LANE) sizes[lane + 1]++;
    for (let i = 1; i < sizes.length; i++) sizes[i] += sizes[i - 1];
    it.lanes.forEach((lane, index) => Object.assign(lane, { index, first: sizes[index], past: sizes[index + 1], reach: 0 }));
    it.order = new Uint32Array(sizes[it.lanes.length]);
    const next = sizes.slice();
    for (let i = 0; i < DATA.requests.count; i++) if (it.of[i] !== NO_LANE) it.order[next[it.of[i]]++] = i;
    for (const lane of it.lanes) for (let k = lane.first; k < lane.past; k++) lane.reach = Math.max(lane.reach, REQUESTS.end[it.order[k]] - REQUESTS.start[it.order[k]]);
  }
  $("lane-kind").value = kind;
  $("lanes-note").textContent = kind === "worker" ? "" : `A request stands at the ${kind} where it was longest.`;
}

// The part of the lane's requests that may be open between two times.
function laneRange(lane, from, to) {
  const order = KINDS[kind].order;
  const search = (t) => {
    let low = lane.first, high = lane.past;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (REQUESTS.start[order[middle]] < t) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  return [search(from - lane.reach), search(to)];
}

function drawLanes() {
  const many = lanes().length > 24, small = many ? 18 : 38, large = 320;
  laneTops = [];
  let y = 4;
  for (const lane of lanes()) {
    laneTops.push(y);
    y += (openLane === lane.index ? large : small) + 4;
  }
  laneTops.push(y);
  const { pen, width, height } = prepare($("lanes"), y + 22);
  drawAxis(pen, width, height);
  for (const lane of lanes()) {
    const top = laneTops[lane.index], h = laneTops[lane.index + 1] - top - 4;
    drawLaneName(pen, lane, top + Math.min(h, 38) / 2);
    if (openLane === lane.index) drawOpenLane(pen, lane, top, h, width);
    else drawArea(pen, lane, top, h, width);
  }
  drawHighlight(pen, width);
  drawCursor(pen, width, height);
}

// A long name of a job is cut, never the number behind it.
function drawLaneName(pen, lane, y) {
  pen.fillStyle = colours.ink;
  const unit = (lane.job ? " " : kind + " ") + lane.name;
  pen.fillText(fitText(pen, lane.job, LEFT - 10 - pen.measureText(unit).width) + unit, 0, y);
}

// How many requests were open in each column of pixels: one pass over those in view, however many.
function drawArea(pen, lane, top, h, width) {
  const columns = Math.max(1, Math.floor(width - LEFT)), change = new Float32Array(columns + 2), order = KINDS[kind].order;
  const [from, to] = laneRange(lane, view.from, view.to), scale = columns / (view.to - view.from);
  let open = 0, most = 1;
  for (let k = from; k < to; k++) {
    const i = order[k], a = (REQUESTS.start[i] - view.from) * scale, b = (REQUESTS.end[i] - view.from) * scale;
    if (b < 0) continue;
    if (a <= 0) open++;
    else change[Math.min(Math.floor(a), columns)]++;
    change[Math.min(Math.floor(b) + 1, columns + 1)]--;
  }
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
  const [from, to] = laneRange(lane, view.from, view.to), inView = [], order = KINDS[kind].order;
  for (let k = from; k < to; k++) if (REQUESTS.end[order[k]] >= view.from) inView.push(order[k]);
  inView.sort((a, b) => REQUESTS.end[a] - REQUESTS.end[b]);
  if (inView.length <= h) return inView;
  const picked = [], size = inView.length / h;
  for (let bucket = 0; bucket < h; bucket++) {
    const slice = inView.slice(Math.floor(bucket * size), Math.floor((bucket + 1) * size));
    picked.push(slice.reduce((best, i) => (REQUESTS.end[i] - REQUESTS.start[i] > REQUESTS.end[best] - REQUESTS.start[best] ? i : best), slice[0]));
  }
  return picked;
}

// What a finding is about: its replicas, its node or its worker; else all of its job; else all.
function setHighlight(f, start, end) {
  const units = f.evidence.replicas ?? (f.replica !== null ? [f.replica] : null);
  const [chosen, names] = units ? ["replica", units] : f.node !== null ? ["node", [f.node]] : f.worker !== null ? ["worker", [f.worker]] : [kind, []];
  if (names.length && KINDS[chosen].lanes.length) setKind(chosen);
  const ofJob = lanes().filter((lane) => lane.job === f.job), named = chosen === kind ? ofJob.filter((lane) => names.includes(lane.unit)) : [];
  const rows = [named, ofJob].find((found) => found.length) ?? lanes();
  highlight = { start, end, rows: rows.map((lane) => lane.index) };
}

function drawHighlight(pen, width) {
  if (!highlight) return;
  const x = Math.max(xOf(highlight.start, width), LEFT), end = xOf(highlight.end, width);
  if (end < LEFT) return;
  pen.strokeStyle = colours.warn;
  pen.lineWidth = 2;
  for (const index of highlight.rows) pen.strokeRect(x, laneTops[index], Math.max(end - x, 2), laneTops[index + 1] - 4 - laneTops[index]);
  pen.lineWidth = 1;
}

function laneAt(y) {
  return lanes().find((lane) => y >= laneTops[lane.index] && y < laneTops[lane.index + 1]);
}

function laneHover(x, y) {
  const lane = laneAt(y);
  if (!lane || x < LEFT) return "";
  const t = tOf(x, $("lanes").clientWidth);
  if (openLane === lane.index && lane.shown) {
    const i = lane.shown[Math.floor((y - laneTops[lane.index]) / lane.each)];
    if (i !== undefined) return requestText(i);
  }
  const [from, to] = laneRange(lane, t, t), order = KINDS[kind].order;
  let open = 0;
  for (let k = from; k < to; k++) if (REQUESTS.start[order[k]] <= t && t < REQUESTS.end[order[k]]) open++;
  const about = DATA.requests.each > 1 ? `about ${open * DATA.requests.each}` : open;
  return `${lane.job ? lane.job + ", " : ""}${lane.title}, ${clock(t)}: ${about} requests open`;
}

function laneClick(x, y) {
  const lane = laneAt(y);
  if (x >= LEFT && lane && lane.index === openLane && lane.shown) {
    const chosen = lane.shown[Math.floor((y - laneTops[lane.index]) / lane.each)];
    if (chosen !== undefined) showLife(chosen);
  }
  if (x < LEFT || openLane === null || (lane && lane.index !== openLane)) openLane = lane && lane.index !== openLane ? lane.index : null;
  setCursor(tOf(Math.max(x, LEFT), $("lanes").clientWidth), false);
}

function buildLanes() {
  for (const name of Object.keys(KINDS)) if (KINDS[name].lanes.length) $("lane-kind").append(el("option", { value: name }, name));
  $("lane-kind").addEventListener("change", () => {
    highlight = null;
    setKind($("lane-kind").value);
    redraw();
    drawCdf();
  });
  setKind(kind);
}
