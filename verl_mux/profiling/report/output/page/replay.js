// The replay: nodes, jobs, and the same jobs alone; a cursor that steps through every lease, sync, sleep and wake.
"use strict";
const ROW = 30, GAP = 14, TITLE = 20;
let replayRows = [];
let replayEvents = [];

function makeRow(name, kind, blocks, note) {
  blocks.sort((a, b) => a.start - b.start);
  return { name, kind, blocks, note, reach: blocks.reduce((most, b) => Math.max(most, b.end - b.start), 0) };
}

function holder(wait) {
  const behind = Object.entries(wait.behind).sort((a, b) => b[1] - a[1]);
  return behind.length ? behind[0][0] : null;
}

// Lane events that lie inside phases; drawn as thin marks on the job's row.
const inside = (job) => DATA.moves.filter((move) => move.job === job)
  .map((move) => ({ ...move, kind: "move" }));

function buildReplay() {
  const nodes = Object.entries(DATA.pools).flatMap(([pool, names]) => names.map((node) => [pool, node]));
  const nodeRows = nodes.map(([pool, node]) => makeRow(node, "node",
    DATA.holds.filter((hold) => hold.nodes.includes(node)).map((hold) => ({ ...hold, kind: "hold" })), pool));
  const jobRows = DATA.jobs.map((job) => makeRow(job, "job", [
    ...DATA.holds.filter((hold) => hold.job === job).map((hold) => ({ ...hold, kind: "hold" })),
    ...DATA.waits.filter((wait) => wait.job === job && wait.end - wait.start > 1e-3).map((wait) => ({ ...wait, kind: "wait" })),
    ...inside(job),
  ]));
  const aloneRows = DATA.jobs.map((job) => makeRow(job, "alone",
    DATA.alone.filter((hold) => hold.job === job).map((hold) => ({ ...hold, kind: "hold" }))));
  replayRows = [{ title: "nodes" }, ...nodeRows, { title: "jobs, together: striped is waiting, in the colour of the job that held the nodes" },
    ...jobRows, { title: "the same jobs alone" }, ...aloneRows.filter((row) => row.blocks.length)];
  replayEvents = [
    ...DATA.holds.flatMap((hold) => [
      { t: hold.start, text: `${hold.job} gets the ${hold.phase} lease (step ${hold.step})` },
      { t: hold.end, text: `${hold.job} gives the ${hold.phase} lease back (step ${hold.step})` }]),
    ...DATA.moves.map((move) => ({ t: move.start, text: moveText(move) })),
    ...DATA.segments.map((segment) => ({ t: segment.start, text: `from here: ${segment.mode}` })),
  ].sort((a, b) => a.t - b.t);
}

function moveText(move) {
  const what = [move.tag, move.side && !move.tag ? move.side : null, move.node ? "on " + move.node : null].filter(Boolean).join(" ");
  const size = move.bytes ? ", " + bytes(move.bytes) : "";
  return `${move.job}: ${move.event} ${what} (${seconds(move.end - move.start)}${size})`;
}

function replayHeight() {
  return replayRows.reduce((sum, row) => sum + (row.title ? TITLE + GAP / 2 : ROW), 0) + 26;
}

function drawReplay() {
  const { pen, width, height } = prepare($("replay"), replayHeight());
  drawAxis(pen, width, height);
  let y = 0;
  for (const row of replayRows) {
    if (row.title) {
      y += GAP / 2;
      pen.fillStyle = colours.quiet;
      pen.fillText(row.title, 0, y + TITLE / 2);
      y += TITLE;
      continue;
    }
    row.y = y;
    pen.fillStyle = colours.ink;
    pen.fillText(fitText(pen, row.name + (row.note ? "  (" + row.note + ")" : ""), LEFT - 10), 0, y + ROW / 2);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, y, width - LEFT, ROW);
    pen.clip();
    for (const block of visible(row)) drawBlock(pen, block, row, y, width);
    pen.restore();
    y += ROW;
  }
  drawCursor(pen, width, height);
  drawOverview();
  describeNow();
}

const phaseAlpha = { rollout: 1, sync: 1, train: 0.55, validate: 0.8, init: 0.25 };

function drawBlock(pen, block, row, y, width) {
  const x = xOf(block.start, width), w = Math.max(xOf(block.end, width) - x, 0.7), top = y + 3, h = ROW - 6;
  if (block.kind === "move") {
    if (w < 1.2) return;
    pen.fillStyle = colours.ink;
    pen.globalAlpha = { sync: 0.85, sleep: 0.5, wake: 0.5 }[block.event] ?? 0.2;
    pen.fillRect(x, top + h - 4, w, 4);
    pen.globalAlpha = 1;
    return;
  }
  if (block.kind === "wait") return drawWait(pen, block, x, w, top, h);
  pen.globalAlpha = phaseAlpha[block.phase] ?? 0.8;
  pen.fillStyle = jobColour(block.job);
  pen.fillRect(x, top, w, h);
  pen.globalAlpha = 1;
  pen.fillStyle = block.phase === "train" || block.phase === "init" ? colours.ink : "#fff";
  const labels = [`${block.phase} ${block.step}`, String(block.step)];
  if (row.kind === "node") labels.unshift(`${block.job} ${block.phase} ${block.step}`);
  const shown = x + w - Math.max(x, LEFT), label = labels.find((text) => pen.measureText(text).width <= shown - 8);
  if (label) pen.fillText(label, Math.max(x, LEFT) + 4, y + ROW / 2);
}

function drawWait(pen, block, x, w, top, h) {
  const who = holder(block);
  pen.save();
  pen.beginPath();
  pen.rect(x, top + 5, w, h - 10);
  pen.clip();
  pen.fillStyle = who ? jobColour(who) : colours.other;
  pen.globalAlpha = 0.28;
  pen.fillRect(x, top, w, h);
  pen.globalAlpha = 0.9;
  pen.strokeStyle = who ? jobColour(who) : colours.other;
  const from = Math.max(x, LEFT - 20), to = Math.min(x + w, pen.canvas.width);
  for (let s = from - h; s < to; s += 6) {
    pen.beginPath();
    pen.moveTo(s, top + h);
    pen.lineTo(s + h, top);
    pen.stroke();
  }
  pen.restore();
  const at = Math.max(x, LEFT) + 5, room = x + w - at - 5;
  if (room < 50) return;
  const text = fitText(pen, "waits for " + (who ?? block.nodes.join(", ")), room);
  pen.fillStyle = colours.card;
  pen.fillRect(at - 2, top + h / 2 - 8, pen.measureText(text).width + 4, 16);
  pen.fillStyle = colours.ink;
  pen.fillText(text, at, top + h / 2);
}

// Where in the run the view is: every node's holds in one strip, the view as a frame.
function drawOverview() {
  const { pen, width, height } = prepare($("overview"), 50);
  const rows = replayRows.filter((row) => row.kind === "node"), h = (height - 16) / Math.max(rows.length, 1);
  const x = (t) => LEFT + (t / DATA.length) * (width - LEFT);
  rows.forEach((row, index) => {
    for (const block of row.blocks) {
      pen.fillStyle = jobColour(block.job);
      pen.globalAlpha = phaseAlpha[block.phase] ?? 0.8;
      pen.fillRect(x(block.start), index * h + 1, Math.max(x(block.end) - x(block.start), 0.6), h - 2);
    }
  });
  pen.globalAlpha = 1;
  pen.fillStyle = colours.quiet;
  for (const segment of DATA.segments) {
    const room = x(segment.end) - x(segment.start);
    pen.fillText(fitText(pen, segment.mode, room), x(segment.start) + 2, height - 7);
    pen.fillRect(x(segment.start), 0, 1, height);
  }
  pen.strokeStyle = colours.cursor;
  pen.strokeRect(x(Math.max(view.from, 0)), 0.5, Math.max(x(Math.min(view.to, DATA.length)) - x(Math.max(view.from, 0)), 3), height - 16);
  pen.fillRect(x(view.at), 0, 1, height - 16);
}

// One sentence a job: what it does at the cursor, or what it waits for and how long it will have waited.
function describeNow() {
  $("clock").textContent = `${clock(view.at)}   ${seconds(view.at)} of ${seconds(DATA.length)}`;
  $("now").replaceChildren(...DATA.jobs.map((job) => {
    const told = jobAt(job, view.at);
    return el("div", { style: `border-color:${jobColour(job)}` }, el("b", {}, job), ": " + told, el("br"),
      el("span", { class: "quiet" }, progressText(job)));
  }), ...eventsNear());
}

const rowOf = (kind, job) => replayRows.find((row) => row.kind === kind && row.name === job);
const at = (row, kind) => row && row.blocks.find((b) => b.kind === kind && b.start <= view.at && view.at < b.end);

function jobAt(job, t) {
  const row = rowOf("job", job), wait = at(row, "wait"), hold = at(row, "hold"), move = at(row, "move");
  if (hold) {
    const doing = move ? `, now ${move.event}${move.tag ? " " + move.tag : ""}` : "";
    return `${hold.phase} on ${hold.nodes.join(", ")}, step ${hold.step}, since ${seconds(t - hold.start)}${doing}`;
  }
  if (wait) {
    const holds = DATA.holds.find((h) => h.job !== job && h.start <= t && t < h.end && h.nodes.some((n) => wait.nodes.includes(n)));
    const why = holds ? `held by ${holds.job} (${holds.phase}, step ${holds.step})` : "free, about to be granted or held back by the schedule";
    return `waits for ${wait.nodes.join(", ")} to ${wait.phase}, ${why}; ${seconds(t - wait.start)} of ${seconds(wait.end - wait.start)}`;
  }
  return "between phases";
}

function progressText(job) {
  const done = (kind) => rowOf(kind, job)?.blocks.filter((b) => b.kind === "hold" && b.phase === "train" && b.end <= view.at).length ?? 0;
  const first = DATA.window[0], before = rowOf("job", job)?.blocks.filter((b) => b.phase === "train" && b.end < first).length ?? 0;
  if (view.at < first || !rowOf("alone", job)) return "";
  const together = done("job") - before, alone = done("alone"), t = S.throughput;
  const measured = t ? `; a step takes ${seconds(t.together_s[job])} in turns, took ${seconds(t.alone_s[job])} alone` : "";
  return `steps since jobs take turns: ${together}; without waiting it would be ${alone}${measured}`;
}

function eventsNear() {
  const index = nextEvent(view.at + 1e-9), near = replayEvents.slice(Math.max(0, index - 3), index + 1);
  if (!near.length) return [];
  return [el("div", {}, ...near.flatMap((event) => {
    const now = Math.abs(event.t - view.at) < 1e-6;
    return [el(now ? "b" : "span", { class: now ? "" : "quiet" }, `${seconds(event.t)}  ${event.text}`), el("br")];
  }))];
}

function nextEvent(t) {
  let low = 0, high = replayEvents.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (replayEvents[middle].t <= t) low = middle + 1;
    else high = middle;
  }
  return low;
}

function stepEvent(direction) {
  if (!replayEvents.length) return;
  let index = direction > 0 ? nextEvent(view.at + 1e-7) : nextEvent(view.at - 1e-7) - 1;
  index = Math.min(Math.max(index, 0), replayEvents.length - 1);
  setCursor(replayEvents[index].t);
}

function play(on = !view.playing) {
  view.playing = on;
  $("play").textContent = on ? "pause" : "play";
  let last = performance.now();
  const tick = (now) => {
    if (!view.playing) return;
    setCursor(view.at + ((now - last) / 1000) * Number($("speed").value));
    last = now;
    if (view.at >= DATA.length) return play(false);
    requestAnimationFrame(tick);
  };
  if (on) requestAnimationFrame(tick);
}

function replayHover(x, y) {
  const row = replayRows.find((r) => r.y !== undefined && y >= r.y && y < r.y + ROW);
  if (!row || x < LEFT) return "";
  const t = tOf(x, $("replay").clientWidth), close = 2 * (view.to - view.from) / $("replay").clientWidth;
  const hits = visible(row).filter((b) => b.start - close <= t && t <= b.end + close);
  return hits.map((b) => {
    if (b.kind === "move") return moveText(b);
    const about = `${b.job}: ${b.kind === "wait" ? "waits to " : ""}${b.phase}, step ${b.step}, ${seconds(b.end - b.start)}, on ${b.nodes.join(", ")}`;
    const behind = b.kind === "wait" ? Object.entries(b.behind).map(([job, s]) => `\n  ${seconds(s)} behind ${job}`).join("") : "";
    return about + behind;
  }).join("\n");
}
