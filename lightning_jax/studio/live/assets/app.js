// The page: a view for each address after the `#`, drawn again when its run changes.

import { follow, get, setKey, takeKey } from "./api.js";
import { destroyCharts } from "./chart.js";
import { drawBeside, drawComparison } from "./compare.js";
import { element, fill, place } from "./dom.js";
import { drawGroup } from "./group.js";
import { drawRollout } from "./rollout.js";
import { drawRun } from "./run.js";
import { drawRuns } from "./runs.js";

const view = document.getElementById("view");
const path = document.getElementById("path");
const connection = document.getElementById("connection");
const MIN_REDRAW_MS = 2000;
const LAST_REDRAW_MS = 4000; // after the last change, as answers may be a few seconds old
const VIEWS = { run: drawRun, rollout: drawRollout, group: drawGroup, compare: drawComparison,
  beside: drawBeside };

let shown = null; // {key of the run or null; redraw, minMs between two, onKey, stop: or null}
let version = 0; // of the address: what arrives for an earlier one is dropped
let numbers = {};
let isBack = false; // connected again, so that changes may have been missed
let waiting = null;
let last = null;
let lastRedraw = 0;

const parts = () => location.hash.replace(/^#\/?/, "").split("/").filter(Boolean)
  .map(decodeURIComponent);

async function show() {
  const mine = ++version;
  const found = parts();
  const [kind, key, inner, id] = found;
  const context = { get, key, id, parts: found, isCurrent: () => mine === version, setPath };
  destroyCharts(view);
  shown?.stop?.();
  shown = { key: kind === "run" ? key : null, redraw: null, onKey: null };
  try {
    const draw = VIEWS[kind === "run" && inner ? inner : kind] ?? drawRuns;
    const drawn = await draw(view, context);
    if (mine === version) shown = { ...shown, ...drawn };
    else drawn.stop?.();
  } catch (error) {
    if (mine === version) showFailure(error);
  }
  if (mine === version) window.scrollTo(0, 0);
}

function showFailure(error) {
  if (error.status !== 401) {
    fill(view, element("p", { class: "error" }, error.message),
      element("p", {}, element("a", { href: "#/" }, "all runs")));
    return;
  }
  const input = element("input", { type: "password", "aria-label": "key", autocomplete: "off" });
  fill(view, element("p", {}, "This server asks for its key: the one in the address that it printed, or the one that was set."), input, " ",
    element("button", { click: () => { setKey(input.value); start(); } }, "open"));
}

function setPath(links) {
  fill(path, links.map(([text, ...to]) => [" / ", element("a", { href: place(...to) }, text)]));
  document.title = [...links].reverse().map(([text]) => text).concat("lightning-jax").join(" - ");
}

/** Redraw the view if its run has changed, at most every two seconds. */
function onNumbers(found) {
  const key = shown?.key ?? null;
  const changed = key === null ? JSON.stringify(found) !== JSON.stringify(numbers)
    : found[key] !== numbers[key];
  const isFirst = Object.keys(numbers).length === 0;
  const mayHaveMissed = isBack;
  isBack = false;
  numbers = found;
  if ((!changed && !mayHaveMissed) || isFirst || waiting || !shown?.redraw) return;
  clearTimeout(last);
  const wait = Math.max(lastRedraw + (shown.minMs ?? MIN_REDRAW_MS) - Date.now(), 0);
  waiting = setTimeout(async () => {
    waiting = null;
    last = setTimeout(redraw, LAST_REDRAW_MS);
    await redraw();
  }, wait);
}

async function redraw() {
  lastRedraw = Date.now();
  try {
    await shown?.redraw?.();
  } catch (error) {
    if (error.status === 404) showFailure(error);
  }
}

function onState(isConnected) {
  if (isConnected && connection.className === "off") isBack = true;
  connection.className = isConnected ? "on" : "off";
  connection.textContent = isConnected ? "live" : "not connected";
}

function start() {
  follow(onNumbers, onState);
  show();
}

document.addEventListener("keydown", (event) => {
  const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  if (shown?.onKey?.(event.key)) event.preventDefault();
});
window.addEventListener("hashchange", () => {
  if (location.hash.startsWith("#key=")) takeKey();
  show();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
takeKey();
start();
