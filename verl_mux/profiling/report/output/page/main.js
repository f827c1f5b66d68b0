// Puts the page together: tiles, findings; wires controls and keys.
"use strict";
function tile(value, text) {
  return el("div", { class: "tile" }, el("b", {}, value), el("span", {}, text));
}

function tiles() {
  const c = S.completion, found = [];
  if (Object.keys(S.bubble).length && DATA.holds.length)
    for (const [pool, bubble] of Object.entries(S.bubble)) found.push(tile(percent(bubble), `bubble of pool ${pool}`));
  if (c.t80_over_total !== null) found.push(tile(percent(c.t80_over_total), "of the time for 80 % of the requests"));
  if (c.total) found.push(tile(seconds(c.total), "to generate a step, mean"));
  for (const [event, share] of Object.entries(S.event_share).slice(0, DATA.holds.length ? 0 : 3)) found.push(tile(share.toFixed(1) + " %", event));
  if (S.throughput) found.unshift(tile(S.throughput.ratio.toFixed(2) + "\u00d7", "steps a second in turns, over one after the other"));
  found.push(tile(String(S.findings.length), S.findings.length === 1 ? "finding" : "findings"));
  $("tiles").replaceChildren(...found);
}

function waits() {
  const [from, to] = DATA.window;
  const rows = DATA.jobs.map((job) => waitRow(job, from, to)).filter(Boolean);
  if (!rows.length) return;
  $("waits-section").hidden = false;
  $("waits-window").textContent = DATA.segments.some((s) => s.mode === "interleaved") ? `while jobs took turns (${seconds(to - from)})` : `in the run (${seconds(to - from)})`;
  $("waits").replaceChildren(...rows);
}

function waitRow(job, from, to) {
  const clip = (x) => Math.max(0, Math.min(x.end, to) - Math.max(x.start, from));
  const phases = {}, behind = {};
  let waited = 0;
  for (const h of DATA.holds) if (h.job === job && clip(h) > 0) phases[h.phase] = (phases[h.phase] ?? 0) + clip(h);
  for (const w of DATA.waits) {
    if (w.job !== job || clip(w) <= 0) continue;
    const part = clip(w) / (w.end - w.start);
    waited += clip(w);
    for (const [other, s] of Object.entries(w.behind)) {
      const key = other + "|" + w.phase;
      behind[key] = (behind[key] ?? 0) + s * part;
    }
  }
  const worked = Object.values(phases).reduce((a, b) => a + b, 0);
  if (worked + waited <= 0) return null;
  const whole = to - from, bar = [], told = [];
  for (const [phase, s] of Object.entries(phases))
    bar.push(el("i", { style: `width:${(100 * s) / whole}%;${phaseStyle(job, phase)}`, title: `${phase} ${seconds(s)}` }, s > 0.08 * whole ? `${phase} ${seconds(s)}` : ""));
  let explained = 0;
  for (const [key, s] of Object.entries(behind).sort((a, b) => b[1] - a[1])) {
    const [other, phase] = key.split("|");
    explained += s;
    bar.push(el("i", { class: "wait", style: `width:${(100 * s) / whole}%;background-color:${jobColour(other)}`, title: `waited for ${other} to ${phase}: ${seconds(s)}` }, s > 0.06 * whole ? other : ""));
    told.push(`${seconds(s)} to ${phase} behind ${other}`);
  }
  if (waited - explained > 0.002 * whole) told.push(`${seconds(waited - explained)} ${DATA.jobs.length > 1 ? "while no other job held the nodes (barriers and turns of the schedule)" : "behind jobs that this log does not show"}`);
  return el("div", { class: "row" }, el("div", { class: "name", style: `color:${jobColour(job)}` }, job), el("div", { class: "bar" }, ...bar),
    el("div", { class: "told" }, `worked ${seconds(worked)}; waited ${seconds(waited)}` + (told.length ? ": " + told.join(", ") : "")));
}

function phaseStyle(job, phase) {
  const part = 100 * (phaseAlpha[phase] ?? 0.8);
  return `background:color-mix(in srgb, ${jobColour(job)} ${part}%, var(--card));color:${part < 70 ? "var(--ink)" : "#fff"}`;
}

function findings() {
  if (!S.findings.length) return $("findings").replaceChildren(el("p", { class: "quiet" }, "Nothing stands out."));
  $("findings").replaceChildren(...S.findings.map((f) => el("button", { class: "finding", onclick: () => showFinding(f) },
    el("b", {}, f.kind.replaceAll("_", " ")), ` \u00b7 ${whereText(f)}: ${f.text}.`, el("br"), el("span", { class: "advice" }, "Try: " + f.advice))));
}

const whereText = (f) => [f.job, f.step !== null ? "step " + f.step : null, f.replica !== null ? `replica ${f.replica}${f.node ? " on " + f.node : ""}` : null, f.worker !== null && f.kind !== "uneven_pools" ? "worker " + f.worker : null].filter(Boolean).join(", ");

function showFinding(f) {
  const step = DATA.steps.findIndex(([job, number]) => job === f.job && number === f.step);
  let start = f.start === null ? null : f.start - DATA.t0, end = f.end === null ? null : f.end - DATA.t0;
  if (start === null && step >= 0) [, , start, end] = DATA.steps[step];
  if (start === null) return;
  const named = requestNamed(f);
  if (named !== undefined) showLife(named);
  history.replaceState(null, "", "#finding-" + (S.findings.indexOf(f) + 1));
  if (DATA.requests.count) setHighlight(f, start, end);
  if (step >= 0) {
    $("cdf-step").value = String(step);
    drawCdf();
  }
  const room = Math.max(end - start, 1e-3);
  setCursor(start, false);
  setView(start - 0.5 * room, end + 0.5 * room);
  ($("lanes-section").hidden ? $("replay-section") : $("lanes-section")).scrollIntoView({ behavior: "smooth", block: "nearest" });
}

function followLink() {
  const linked = S.findings[Number((location.hash.match(/^#finding-(\d+)$/) ?? [])[1]) - 1];
  if (linked) showFinding(linked);
}

function input() {
  const i = S.input, lines = [`${i.events} events in ${i.files} files; ${S.skipped_lines} lines skipped.`];
  for (const [reason, count] of [...Object.entries(i.skipped), ...Object.entries(i.noticed)])
    lines.push(`${reason}: ${count}${i.examples[reason] ? ", first in " + i.examples[reason] : ""}`);
  const all = DATA.requests;
  if (all.count < all.of) lines.push(`The page draws ${all.count} of ${all.of} requests: one in ${all.each} of each step and replica or worker, the slowest, and those that findings name.`);
  for (const m of i.missing) lines.push(`This log does not tell ${m.what}${m.jobs.some(Boolean) ? ` of ${m.jobs.join(", ")}` : ""}: ${m.needs} would; ${m.so}.`);
  $("input").replaceChildren(...lines.map((text) => el("p", {}, text)));
}

function toTurns() {
  setView(DATA.window[0], DATA.window[1]);
  setCursor(Math.max(view.at, DATA.window[0]), false);
}

function closeUp() {
  const holds = DATA.holds.filter((h) => h.start >= DATA.window[0]), typical = holds.length ? holds.reduce((s, h) => s + h.end - h.start, 0) / holds.length : DATA.length / 10;
  setView(view.at - typical, view.at + 7 * typical);
}

const KEYS = {
  " ": ["play or pause", () => play()],
  ArrowRight: ["next event", () => stepEvent(1)],
  ArrowLeft: ["previous event", () => stepEvent(-1)],
  "+": ["zoom in", () => zoom(0.7)],
  "-": ["zoom out", () => zoom(1 / 0.7)],
  a: ["move left", () => shift(-0.2 * (view.to - view.from))],
  e: ["move right", () => shift(0.2 * (view.to - view.from))],
  Home: ["whole run", () => setView(0, DATA.length)],
  t: ["where jobs take turns", toTurns],
  c: ["close up around the cursor", closeUp],
  f: ["next finding", () => nextFinding()],
  r: ["requests by worker, replica, node", nextKind],
  d: ["light or dark", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark")],
  "?": ["this list", () => $("help").showModal()],
};
let findingShown = -1;
function nextFinding() {
  if (!S.findings.length) return;
  findingShown = (findingShown + 1) % S.findings.length;
  showFinding(S.findings[findingShown]);
}

function nextKind() {
  if (!DATA.requests.count) return;
  const choice = $("lane-kind");
  choice.selectedIndex = (choice.selectedIndex + 1) % choice.options.length;
  choice.dispatchEvent(new Event("change"));
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  readColours();
  drawAll();
}

function drawAll() {
  tiles();
  if (DATA.holds.length) waits();
  turns();
  slowest();
  if (!$("cdf-section").hidden) drawCdf();
  if (!$("shares-section").hidden) drawShares();
  redraw();
}

function wire() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || ["SELECT", "INPUT"].includes(event.target.tagName) || $("help").open) return;
    if (event.key === " " && event.target.tagName === "BUTTON") return;
    const key = KEYS[event.key];
    if (!key) return;
    key[1]();
    event.preventDefault();
  });
  for (const button of document.querySelectorAll(".zoom-all")) button.addEventListener("click", KEYS.Home[1]);
  const clicks = { play: () => play(), previous: KEYS.ArrowLeft[1], next: KEYS.ArrowRight[1], "zoom-turns": toTurns, "zoom-close": closeUp, theme: KEYS.d[1], "help-button": KEYS["?"][1] };
  for (const [id, act] of Object.entries(clicks)) $(id).addEventListener("click", act);
  $("help").replaceChildren(el("table", {}, ...Object.entries(KEYS).map(([key, [text]]) => el("tr", {}, el("td", {}, el("kbd", {}, key === " " ? "space" : key)), el("td", {}, text)))),
    el("form", { method: "dialog" }, el("button", {}, "close")));
  window.addEventListener("resize", drawAll);
  window.addEventListener("hashchange", followLink);
}

function start() {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  document.documentElement.dataset.theme = dark.matches ? "dark" : "light";
  dark.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
  readColours();
  $("name").textContent = `${DATA.name}: where the time went`;
  $("counts").textContent = [count(S.steps, "step"), count(S.workers, "rollout worker"), count(S.requests, "request"), seconds(DATA.length)].join(", ");
  findings();
  engines("replica");
  engines("node");
  against();
  input();
  if (DATA.holds.length) {
    $("replay-section").hidden = false;
    buildReplay();
    drawers.push(drawReplay);
    makeMovable($("replay"), (x) => setCursor(tOf(x, $("replay").clientWidth), false), replayHover);
    makeMovable($("overview"), (x) => {
      const t = ((x - LEFT) / ($("overview").clientWidth - LEFT)) * DATA.length, half = (view.to - view.from) / 2;
      setView(t - half, t + half);
    }, () => "");
    for (const speed of [0.25, 1, 4, 16, 64]) $("speed").append(el("option", { value: speed }, speed + "\u00d7"));
    $("speed").value = "4";
    $("alone-note").textContent = `Alone: the same phases with the waiting for leases taken out. Marks at the foot of a job's row are sync, sleep, wake and update.`;
    view.at = DATA.window[0];
    view.from = DATA.window[0] - 0.01 * DATA.length;
    view.to = DATA.window[1] + 0.01 * DATA.length;
  }
  if (DATA.requests.count) {
    $("lanes-section").hidden = $("cdf-section").hidden = false;
    buildLanes();
    drawers.push(drawLanes);
    makeMovable($("lanes"), laneClick, laneHover);
    DATA.steps.forEach(([job, step], index) => $("cdf-step").append(el("option", { value: index }, `${job} ${step}`.trim())));
    const worst = S.findings.map((f) => DATA.steps.findIndex(([job, step]) => job === f.job && step === f.step)).find((i) => i >= 0);
    $("cdf-step").value = String(worst ?? DATA.steps.length - 1);
    $("cdf-step").addEventListener("change", drawCdf);
  }
  if (DATA.shares.length) $("shares-section").hidden = false;
  wire();
  drawAll();
  followLink();
  document.documentElement.dataset.ready = "yes"; // for tests that drive the page
}
start();
