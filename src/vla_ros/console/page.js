"use strict";
const $ = (id) => document.getElementById(id);
const HELD_MS = 900, LOST_MS = 1000, BEHIND_MS = 700, SILENT_S = 2.5, STOP_MS = 10000, REPEAT_MS = 150, DRIFT_MS = 0.02;
const TRACE = 100, DRAW_MS = 190;  // positions of a joint that are drawn, and the time between two
const page = { socket: null, view: null, beat: "", id: 0, at: -1e9, least: Infinity, behind: 0, tries: 0, node: "",
  stops: 0, asked: 0, held: null, greeted: false, drawn: 0 };

// Requests

function send(request) {
  if (page.socket?.readyState !== WebSocket.OPEN) return false;
  page.socket.send(JSON.stringify(request));
  return true;
}

function ask(what, by, text = "") {
  const number = page.view?.number ?? -1;
  return send({ do: what, id: ++page.id, beat: page.beat, number, text, by });
}

function stop(by) {
  page.stops = page.asked = performance.now();
  page.by = by;
  letGo();
  ask("stop", by);
  drawStop();
}

function repeatStop() {  // a stop may be repeated, also after a reconnect, until every node confirms it
  const now = performance.now();
  if (!page.stops) return;
  if (isStopped() || now - page.stops > STOP_MS) page.stops = 0;
  else if (now - page.asked > REPEAT_MS) { page.asked = now; ask("stop", page.by); }
  drawStop();
}

const isStopped = () => !isDead() && page.view.nodes.every(([, state]) => state === "stopped");

function drawStop() {
  const waits = page.stops && performance.now() - page.stops;
  $("stop").classList.toggle("sent", Boolean(waits));
  $("stopped").textContent = waits > 500 ? "NOT CONFIRMED: use the emergency stop" : isStopped() ? "stopped"
    : waits ? "sent" : matchMedia("(pointer: coarse)").matches ? "touch" : "escape or space";
}

// Keys: before anything else sees them

function onKey(event) {
  const inText = event.target instanceof HTMLInputElement;
  if (event.key !== "Escape" && (event.code !== "Space" && event.key !== " " || inText)) {
    if (event.type === "keydown") letGo();
    return;
  }
  event.preventDefault();
  event.stopImmediatePropagation();
  if (event.type === "keydown") stop(event.key === "Escape" ? "Escape" : "space");
}
for (const type of ["keydown", "keypress", "keyup"]) window.addEventListener(type, onKey, true);
$("stop").addEventListener("pointerdown", (event) => { event.preventDefault(); stop("pointer"); });
$("stop").addEventListener("click", () => { if (!page.stops) stop("click"); });

// What lets the arm move: a pointer that presses and holds, and nothing else

function letGo() {
  if (!page.held) return;
  clearTimeout(page.held.timer);
  page.held.button.classList.remove("down");
  page.held = null;
  ask("release", "pointer");
}

function press(event) {
  const button = event.currentTarget;
  event.preventDefault();
  document.activeElement?.blur();
  letGo();
  if (!event.isTrusted || !event.isPrimary || event.button !== 0 || button.disabled || isDead()) return;
  button.releasePointerCapture?.(event.pointerId);
  if (!ask("press", event.pointerType, button.id)) return;
  button.classList.add("down");
  const { view: { number }, socket } = page;
  const timer = setTimeout(() => {
    const same = !isDead() && page.socket === socket && page.view.number === number && document.hasFocus();
    if (same) ask(button.id, event.pointerType);
    letGo();
  }, HELD_MS);
  page.held = { button, timer, number };
}
for (const button of document.querySelectorAll(".held")) {
  button.addEventListener("pointerdown", press);
  for (const type of ["mousedown", "contextmenu"]) button.addEventListener(type, (event) => event.preventDefault());
  button.addEventListener("focus", () => button.blur());
  button.addEventListener("pointerleave", letGo);
}
for (const type of ["pointerup", "pointercancel", "blur", "wheel"]) window.addEventListener(type, letGo, { passive: true });
document.addEventListener("visibilitychange", letGo);

for (const button of document.querySelectorAll("[data-do]")) button.addEventListener("click", () => {
  button.blur();
  ask(button.dataset.do, "button", button.dataset.text);
});
$("instruct").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("instruction").value.trim();
  if (text && ask("instruct", "form", text)) { $("instruction").value = ""; $("instruction").blur(); }
});

// The connection

function connect() {
  const scheme = location.protocol.replace("http", "ws");
  const socket = page.socket = new WebSocket(`${scheme}//${location.host}/live${location.search}`);
  socket.binaryType = "arraybuffer";
  socket.onmessage = ({ data }) => { if (socket === page.socket) typeof data === "string" ? onView(data) : onImage(data); };
  socket.onclose = () => { if (socket === page.socket) lose(); };
}

function lose() {
  letGo();
  page.socket?.close();
  Object.assign(page, { socket: null, beat: "", id: 0, least: Infinity, at: -1e9, tries: page.tries + 1 });
  $("connected").textContent = `connection lost: trying again (${page.tries})`;
  setTimeout(connect, Math.min(2000, 250 * page.tries));
  look();
}

function onView(data) {
  const { beat, at, view } = JSON.parse(data), now = performance.now();
  Object.assign(page, { view, beat, at: now, least: Math.min(page.least + DRIFT_MS, now - 1000 * at) });
  page.behind = now - 1000 * at - page.least;
  if (!page.greeted || page.tries) $("connected").textContent = page.tries ? "connected again" : "connected";
  Object.assign(page, { tries: 0, greeted: true });
  send({ seen: beat, images: !document.hidden, node: page.node });
  if (page.held && page.held.number !== view?.number) letGo();
  look();
  if (view) draw(view);
  fuse.currentTime = 0;
}

// The page dies visibly also when this script hangs: nothing else sets the fuse back.
const fuse = $("fuse").animate([{ opacity: 0 }, { opacity: 0, offset: 0.99 }, { opacity: 1 }], { duration: 4000, fill: "forwards" });

function whyDead() {
  const silence = performance.now() - page.at, view = page.view;
  if (!page.socket || silence > LOST_MS) return ["No connection", "to the console's process. It is tried again by itself."];
  if (!view) return ["No node", "was found on the graph. Is it running, with the same ROS_DOMAIN_ID?"];
  if (page.behind > BEHIND_MS) return ["Too slow", `What arrives is ${(page.behind / 1000).toFixed(1)} s old.`];
  const since = view.silent > 1e5 ? "" : ` for ${view.silent.toFixed(0)} s`;
  if (view.silent > SILENT_S) return ["Node lost", `${view.name} has said nothing${since}: it hangs or has ended.`];
  return null;
}
const isDead = () => whyDead() !== null;

function look() {
  const why = whyDead();
  document.body.dataset.state = why ? "lost" : page.view.state;
  $("nodes").hidden = why && why[0] !== "Node lost";
  if (!why) return;
  letGo();
  fuse.currentTime = 0;
  text("state", "no connection");
  text("explanation", "");
  $("dead").children[0].textContent = why[0];
  $("dead").children[1].textContent = `${why[1]} What the arm does is not known here: use the emergency stop.`;
}
setInterval(() => {
  if (page.socket?.readyState === WebSocket.OPEN && performance.now() - page.at > 3000 && page.at > 0) lose();
  look();
  repeatStop();
}, 100);

// Images

const shown = new Map();  // index to its figure

function onImage(data) {
  const index = new Uint8Array(data, 0, 1)[0], figure = shown.get(index);
  if (!figure) return;
  const address = URL.createObjectURL(new Blob([data.slice(1)], { type: "image/jpeg" }));
  const image = figure.querySelector("img"), before = image.src;
  image.onload = image.onerror = () => before && URL.revokeObjectURL(before);
  image.src = address;
  figure.dataset.at = performance.now();
}

function drawImages(names) {
  list("cameras", names, () => names.map((name, index) => {
    const figure = make("figure", ""), image = make("img", ""), sees = index === names.length - 1;
    image.alt = name;
    figure.append(image, make("figcaption", sees ? "as the policy sees it" : `camera ${name}`));
    shown.set(index, figure);
    return figure;
  }));
  for (const figure of shown.values()) figure.classList.toggle("old", performance.now() - (figure.dataset.at || 0) > 2000);
}

// What is shown

function make(kind, content, name = "") {
  const element = document.createElement(kind);
  element.textContent = content;
  element.className = name;
  return element;
}
const text = (id, content) => { if ($(id).textContent !== content) $(id).textContent = content; };
function list(id, key, rows) {  // redrawn only when it has changed, so that it can be scrolled and selected
  const known = JSON.stringify(key);
  if ($(id).dataset.key === known) return;
  $(id).dataset.key = known;
  $(id).replaceChildren(...rows());
}
function entry(at, content, name) {
  const item = make("li", "", name);
  item.append(make("time", new Date(1000 * at).toLocaleTimeString([], { hour12: false })), content);
  return item;
}
const fixed = (value, digits) => Number.isFinite(value) ? value.toFixed(digits) : "";
const set = (selector, disabled) => { for (const button of document.querySelectorAll(selector)) button.disabled = disabled; };

function draw(view) {
  const { state, mode } = view, isArmed = state === "armed" || state === "holding";
  if (!isDead()) {
    text("state", state);
    text("explanation", state === "armed" ? `${view.explanation}: moved by ${view.source}` : view.explanation);
  }
  text("name", view.name);
  document.title = `${state} ${view.name}`;
  const several = view.namesakes > 1, blocked = view.reasons.some((why) => why.kind === "block");
  $("arm").querySelector("b").textContent = isArmed ? "Armed" : "Hold to arm";
  set("#arm", isArmed || state === "stopped" || several || blocked);
  set("#continue", !isArmed || mode === "autonomous");
  set("#correct", !isArmed || mode === "correcting" || (view.view.takeover ?? "none") === "none");
  set('[data-do="pause"]', !isArmed || mode === "paused");
  set('[data-do="reset"]', state !== "stopped");
  set('[data-do="label"]', view.episode.open === false);
  set('[data-do="record"]', !view.recording);
  text("source", `${view.source} (${mode})`);
  text("instructed", view.instruction || "none");
  drawReasons(view, several);
  drawEpisode(view);
  drawImages(view.images);
  if (performance.now() - page.drawn > DRAW_MS) {
    page.drawn = performance.now();
    drawFigures(view);
    drawJoints(view.view.arms ?? {}, isArmed);
  }
  list("nodes", view.nodes, () => view.nodes.length < 2 ? [] : view.nodes.map(([name, of, alive]) => {
    const button = make("button", `${name}: ${alive ? of : "lost"}`);
    button.disabled = name === view.name;
    button.addEventListener("click", () => { page.node = name; });
    return button;
  }));
  list("lines", view.lines, () => view.lines.toReversed().map(([at, level, line]) => entry(at, line, `l${level}`)));
  list("acts", view.acts, () => view.acts.toReversed().map(([at, asked, by, what]) => entry(at, `${asked}: ${what} (${by})`)));
  const last = view.acts.at(-1);
  text("said", last ? `${last[1]}: ${last[3]}` : "");
}

function drawReasons(view, several) {
  const rows = view.reasons.map((why) => ({ ...why, waits: view.state === "disarmed" && why.kind === "hold" }));
  if (several) rows.unshift({ kind: "stop", what: `${view.namesakes} nodes are called ${view.name}`, name: "", detail: "",
    advice: "End or rename one: no name is armed that two nodes serve." });
  list("why", rows, () => rows.map((why) => {
    const box = make("div", "", `why ${why.waits ? "waits" : why.kind === "hold" ? "" : "stop"}`);
    const verb = { stop: "Stopped", block: "Cannot be armed", hold: why.waits ? "Would hold" : "Holds" }[why.kind];
    box.append(make("b", `${verb}: ${why.what}`), make("span", why.advice, "do"));
    box.append(make("span", [why.name, why.detail].filter(Boolean).join(": ")));
    return box;
  }));
}

function drawEpisode({ episode, recording }) {
  const since = episode.open ? `, ${(Date.now() / 1000 - episode.since).toFixed(0)} s` : "";
  text("episode", episode.open ? `${episode.number}${since}` : episode.open === null ? "not known yet" : "none is open");
  text("labels", episode.labels.map(([number, label]) => `${number} ${label}`).join(", ") || "no label yet");
  text("recording", recording ? `${recording[1]} ${recording[2]}` : "No recorder runs. Start the node with record.what.");
}

function drawFigures({ minute, collision }) {
  const last = minute.at(-1) ?? {}, share = last.stalled;
  text("p50", last.p50 == null ? "no command yet" : `p50 ${fixed(last.p50, 1)} ms`);
  text("p99", last.p99 == null ? "" : `p99 ${fixed(last.p99, 1)} ms`);
  text("stalled", share == null ? "no motion" : `${(100 * share).toFixed(0)} %`);
  chart($("latency-chart"), [["--blue", minute.map((one) => one.p50)], ["--amber", minute.map((one) => one.p99)]], 60, 0, 20, "ms");
  chart($("stalled-chart"), [["--red", minute.map((one) => one.stalled == null ? null : 100 * one.stalled)]], 60, 0, 10, "%");
  text("distance", collision.distance == null ? "" : `${(1000 * collision.distance).toFixed(0)} mm`);
  text("collision", collision.bodies ? collision.bodies.join(" and ") : collision.why_not ? `Not checked: ${collision.why_not}` : "");
}

const style = getComputedStyle(document.documentElement), colourOf = (name) => style.getPropertyValue(name);
const traces = new Map();  // joint to its measured and commanded positions

function drawJoints(arms, isArmed) {
  const names = Object.entries(arms).flatMap(([arm, { measured }]) => Object.keys(measured).map((joint) => [arm, joint]));
  list("joints", names, () => names.map(([arm, joint]) => {
    const row = make("div", "", "joint");
    row.append(make("span", Object.keys(arms).length > 1 ? `${arm} ${joint}` : joint), document.createElement("canvas"));
    row.append(make("span", "", "measured"), make("span", "", "commanded"), make("span", ""));
    return row;
  }));
  names.forEach(([arm, joint], index) => {
    const { measured, commanded, velocity } = arms[arm], row = $("joints").children[index];
    const is = measured[joint], wanted = isArmed ? commanded?.[joint] : undefined;
    const trace = traces.get(arm + joint) ?? [[], []];
    traces.set(arm + joint, trace);
    [is, wanted].forEach((value, of) => { trace[of].push(value ?? null); if (trace[of].length > TRACE) trace[of].shift(); });
    row.children[2].textContent = fixed(is, 3);
    row.children[3].textContent = velocity && isArmed ? `${fixed(velocity[joint], 2)}/s` : fixed(wanted, 3);
    row.children[4].textContent = fixed(wanted - is, 3);
    const known = [...trace[0], ...trace[1]].filter((value) => value !== null), least = Math.min(...known);
    chart(row.children[1], [["--amber", trace[1]], ["--blue", trace[0]]], TRACE, least - 0.02, Math.max(...known) - least + 0.04, "");
  });
}

function chart(canvas, lines, length, from, span, unit) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale)) {
    Object.assign(canvas, { width: Math.round(width * scale), height: Math.round(height * scale) });
  }
  const context = canvas.getContext("2d");
  const most = unit ? Math.max(span, ...lines.flatMap(([, values]) => values.filter(Number.isFinite))) : span;
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  if (unit) {
    Object.assign(context, { strokeStyle: colourOf("--line"), fillStyle: colourOf("--soft"), font: "11px system-ui" });
    context.strokeRect(0.5, 0.5, width - 1, height - 1);
    context.fillText(`${most.toFixed(0)} ${unit}`, 4, 12);
    context.fillText("a minute", 4, height - 5);
  }
  for (const [colour, values] of lines) {
    Object.assign(context, { strokeStyle: colourOf(colour), lineWidth: 1.5 });
    context.beginPath();
    let drawn = false;
    values.forEach((value, index) => {
      if (!Number.isFinite(value)) { drawn = false; return; }
      const x = width * (1 - (values.length - 1 - index) / (length - 1)), y = height - 2 - (height - 4) * (value - from) / most;
      drawn ? context.lineTo(x, y) : context.moveTo(x, y);
      drawn = true;
    });
    context.stroke();
  }
}

connect();
