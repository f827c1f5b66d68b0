// Tables: replicas, nodes, turns, slowest requests, another run beside.
"use strict";
const S = DATA.summary;

// The slowest stand first.
function engines(by) {
  const rows = [...S[by + "s"]].sort((a, b) => (b.seconds_per_token ?? 0) - (a.seconds_per_token ?? 0)), other = by === "replica" ? "node" : "replica";
  if (!rows.length) return;
  $("engines-section").hidden = false;
  const number = (value, digits = 0) => (value === null ? "-" : value.toFixed(digits));
  const jobs = new Set(rows.map((row) => row.job)).size > 1;
  const cells = (row) => [...(jobs ? [row.job] : []), row[by] ?? "-", row[other + "s"].join(", "), row.stays + (row.cut ? `, ${row.cut} cut off` : ""), row.requests,
    number(row.tokens_per_sec), row.seconds_per_token === null ? "-" : number(1000 * row.seconds_per_token, 1), percent(row.queue_part),
    row.token_usage === null ? "-" : percent(row.token_usage), number(row.queued), row.retractions];
  const heads = [...(jobs ? ["job"] : []), by, other + "s", "stays", "requests", "tokens/s", "ms a token", "in the queue", "KV cache at most", "queued at most", "thrown out"];
  $(by + "s").replaceChildren(el("table", {}, el("tr", {}, ...heads.map((h) => el("th", {}, h))),
    ...rows.map((row) => el("tr", {}, ...cells(row).map((cell) => el("td", {}, String(cell)))))));
}

function turns() {
  const t = S.turns, counts = Object.entries(t.counts);
  if (!counts.length) return;
  $("turns-section").hidden = false;
  const rows = counts.slice(0, 12).map(([n, count]) => el("tr", {}, el("td", {}, n), el("td", {}, String(count)), el("td", {}, percent(t.share[n])),
    el("td", {}, seconds(t.request_seconds[n])), el("td", {}, t.engine_seconds[n] === undefined ? "" : seconds(t.engine_seconds[n]))));
  $("turns").replaceChildren(el("table", {}, el("tr", {}, ...["turns", "requests", "of all", "a request took", "engine in that turn"].map((h) => el("th", {}, h))), ...rows));
}

function slowest() {
  if (!S.slowest_requests.length) return;
  $("slowest-section").hidden = false;
  const most = S.slowest_requests[0].seconds;
  const rows = S.slowest_requests.map((r) => {
    const groups = { engine: 0, tool: 0, reward: 0, other: 0 };
    for (const [part, s] of Object.entries(r.parts))
      groups[part === "engine" || part === "reward" ? part : ["tool", "tool_response", "interaction"].includes(part) ? "tool" : "other"] += s;
    const bar = PART_NAMES.filter((p) => groups[p] > 0).map((p) => el("i", { style: `width:${(100 * groups[p]) / most}%;background:${partColour(p)}`, title: `${p} ${seconds(groups[p])}` }));
    const index = requestNamed(r);
    const name = index === undefined ? r.request_id : el("button", { class: "link", onclick: () => { showLife(index); $("life").scrollIntoView({ block: "nearest" }); } }, r.request_id);
    return el("tr", {}, el("td", { title: r.request_id }, name), el("td", {}, `${r.job ? r.job + " " : ""}${r.step}`), el("td", {}, seconds(r.seconds)),
      el("td", {}, el("div", { class: "bar" }, ...bar)));
  });
  $("slowest").replaceChildren(el("table", {}, el("tr", {}, ...["request", "step", "took", ""].map((h) => el("th", {}, h))), ...rows),
    el("div", { class: "legend" }, ...PART_NAMES.map((p) => el("span", {}, el("i", { style: `background:${partColour(p)}` }), p))));
}

function against() {
  if (!S.against) return;
  const number = (x) => (x === null ? "-" : Number(x.toPrecision(4)).toString());
  const rows = S.against.figures.filter((r) => r.this !== null || r.that !== null).map((r) => el("tr", {}, el("td", {}, r.figure),
    el("td", {}, number(r.this)), el("td", {}, number(r.that)), el("td", {}, r.change === null ? "" : (r.change > 0 ? "+" : "") + (100 * r.change).toFixed(1) + " %")));
  $("against-section").hidden = false;
  $("against").replaceChildren(el("table", {}, el("tr", {}, ...["figure", "this run", S.against.directory, "change"].map((h) => el("th", {}, h))), ...rows));
}
