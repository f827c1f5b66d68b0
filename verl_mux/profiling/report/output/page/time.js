// The time axis that the replay and the requests share: what is in view, where the cursor is, wheel and drag.
"use strict";
const LEFT = 132; // room for row names
const view = { from: 0, to: DATA.length, at: 0, playing: false };
const drawers = []; // what is drawn again when the view or the cursor moves
let drawn = false;

function redraw() {
  if (drawn) return;
  drawn = true;
  requestAnimationFrame(() => {
    drawn = false;
    for (const draw of drawers) draw();
  });
}

function setView(from, to) {
  const span = Math.min(Math.max(to - from, 1e-3), DATA.length * 1.02);
  const margin = 0.01 * DATA.length;
  view.from = Math.min(Math.max(from, -margin), DATA.length + margin - span);
  view.to = view.from + span;
  redraw();
}

function setCursor(t, follow = true) {
  view.at = Math.min(Math.max(t, 0), DATA.length);
  const span = view.to - view.from;
  if (follow && (view.at < view.from || view.at > view.to)) setView(view.at - 0.2 * span, view.at + 0.8 * span);
  redraw();
}

const xOf = (t, width) => LEFT + ((t - view.from) / (view.to - view.from)) * (width - LEFT);
const tOf = (x, width) => view.from + ((x - LEFT) / (width - LEFT)) * (view.to - view.from);

function drawAxis(pen, width, height) {
  const step = niceStep(view.to - view.from, (width - LEFT) / 110);
  pen.fillStyle = colours.quiet;
  pen.strokeStyle = colours.grid;
  pen.textAlign = "center";
  for (let t = Math.ceil(view.from / step) * step; t <= view.to; t += step) {
    const x = xOf(t, width);
    if (x < LEFT) continue;
    pen.beginPath();
    pen.moveTo(x, 0);
    pen.lineTo(x, height - 18);
    pen.stroke();
    if (x < width - 20) pen.fillText(axisLabel(t, step), x, height - 8);
  }
  pen.textAlign = "left";
}

function axisLabel(t, step) {
  if (step >= 60) return Math.floor(t / 60) + ":" + String(Math.round(t % 60)).padStart(2, "0");
  return step >= 1 ? t.toFixed(0) + " s" : t.toFixed(step >= 0.1 ? 1 : 3) + " s";
}

function drawCursor(pen, width, height) {
  const x = xOf(view.at, width);
  if (x < LEFT || x > width) return;
  pen.strokeStyle = colours.cursor;
  pen.lineWidth = 1.5;
  pen.beginPath();
  pen.moveTo(x, 0);
  pen.lineTo(x, height - 18);
  pen.stroke();
  pen.lineWidth = 1;
}

// Wheel zooms about the pointer, dragging moves, a click is handed on.
function makeMovable(canvas, onClick, onHover) {
  let down = null;
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey && Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      shift((event.deltaX / canvas.clientWidth) * (view.to - view.from));
    } else {
      const t = tOf(event.offsetX, canvas.clientWidth), factor = Math.exp(event.deltaY * 0.0015);
      setView(t - (t - view.from) * factor, t + (view.to - t) * factor);
    }
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    down = { x: event.offsetX, from: view.from, to: view.to, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!down) return showTip(onHover(event.offsetX, event.offsetY), event);
    const dx = event.offsetX - down.x;
    down.moved = down.moved || Math.abs(dx) > 4;
    if (!down.moved) return;
    const dt = (dx / (canvas.clientWidth - LEFT)) * (down.to - down.from);
    setView(down.from - dt, down.to - dt);
    showTip("");
  });
  canvas.addEventListener("pointerup", (event) => {
    if (down && !down.moved) onClick(event.offsetX, event.offsetY);
    down = null;
  });
  canvas.addEventListener("pointerleave", () => showTip(""));
}

function shift(dt) {
  setView(view.from + dt, view.to + dt);
}

function zoom(factor) {
  const inside = view.at >= view.from && view.at <= view.to, t = inside ? view.at : (view.from + view.to) / 2;
  setView(t - (t - view.from) * factor, t + (view.to - t) * factor);
}

// The blocks of a row that may be in view; blocks are sorted by start and `reach` is the longest.
function visible(row) {
  let low = 0, high = row.blocks.length;
  const from = view.from - row.reach;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row.blocks[middle].start < from) low = middle + 1;
    else high = middle;
  }
  const found = [];
  for (let i = low; i < row.blocks.length && row.blocks[i].start <= view.to; i++)
    if (row.blocks[i].end >= view.from) found.push(row.blocks[i]);
  return found;
}
