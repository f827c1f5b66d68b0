// Completion of a step, and what steps are made of.
"use strict";

function cdfGroups(job, step) {
  const groups = new Map();
  let start = Infinity;
  for (let i = 0; i < DATA.requests.count; i++) {
    if (REQUESTS.step[i] !== step || !REQUESTS.done[i] || KINDS.worker.lanes[REQUESTS.worker[i]].job !== job) continue;
    const lane = KINDS[kind].of[i];
    if (!groups.has(lane)) groups.set(lane, []);
    groups.get(lane).push(REQUESTS.end[i]);
    start = Math.min(start, REQUESTS.start[i]);
  }
  for (const [lane, ends] of groups) groups.set(lane, ends.map((end) => end - start).sort((a, b) => a - b));
  return groups;
}

function drawCdf() {
  const chosen = DATA.steps[Number($("cdf-step").value)];
  if (!chosen) return;
  const groups = cdfGroups(chosen[0], chosen[1]), every = [...groups.values()].flat().sort((a, b) => a - b);
  const total = every[every.length - 1] || 1e-9, measured = S.completion.per_step.find((row) => row.job === chosen[0] && row.step === chosen[1]);
  const at80 = measured?.p80 ?? total;
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
  const marked = (lane) => highlight && highlight.rows.length < lanes().length && highlight.rows.includes(lane);
  if (groups.size > 1) for (const [lane, ends] of groups) curve(ends, marked(lane) ? colours.warn : colours.other, marked(lane) ? 2 : 1);
  curve(every, colours.accent, 2.5);
  pen.strokeStyle = colours.cursor;
  line(pen, x(at80), y(0), x(at80), y(0.8));
  $("cdf-text").textContent = `80 % of ${measured?.requests ?? 0} requests were done after ${seconds(at80)}, the last after ${seconds(measured?.total ?? 0)} ` +
    `(${percent(measured?.t80_over_total ?? 1)})` + (groups.size > 1 ? `; thin lines are ${kind}s` : "");
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
