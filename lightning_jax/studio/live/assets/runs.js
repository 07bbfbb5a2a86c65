// All runs: a line each, their curves on one axis, and the settings in which they differ.

import { COLORS, curvesOf, destroyCharts, rewardCharts } from "./chart.js";
import { comparison } from "./compare.js";
import { element, fill, number, place, status, table } from "./dom.js";

const MAX_CURVES = 8;

let axis = "steps";
let chosen = null; // keys of the runs whose curves are drawn; null: the newest ones

export async function drawRuns(view, context) {
  context.setPath([]);
  const redraw = async () => {
    const answer = await context.get("runs");
    const drawn = answer.runs.filter((run, index) => (chosen ? chosen.has(run.key)
      : index < MAX_CURVES)).slice(0, MAX_CURVES);
    const curves = await curvesOf(context,
      drawn.map((run, index) => ({ run, color: COLORS[index] })));
    if (!context.isCurrent()) return;
    destroyCharts(view);
    fill(view, element("h1", {}, answer.runs.length === 1 ? "1 run" : `${answer.runs.length} runs`),
      lines(answer.runs, curves, redraw), compareLink(curves),
      element("section", {}, rewardCharts(curves, axis, (value) => { axis = value; redraw(); })),
      settings(answer, curves));
  };
  await redraw();
  return { redraw };
}

function lines(runs, curves, redraw) {
  const colors = new Map(curves.map((curve) => [curve.run.key, curve.color]));
  const choose = (key) => (event) => {
    chosen = new Set(colors.keys());
    if (event.target.checked) chosen.add(key);
    else chosen.delete(key);
    redraw();
  };
  const columns = [["run"], ["status"], ["steps", true], ["first", true], ["best", true],
    ["last", true], ["minutes", true], ["failed", true], ["started"], ["model"]];
  return table(columns, runs.map((run) => [
    [element("input", { type: "checkbox", checked: colors.has(run.key), change: choose(run.key),
      "aria-label": `draw ${run.name}` }),
    swatch(colors.get(run.key)), element("a", { href: place("run", run.key) }, run.name)],
    [status(run.status), run.why && element("div", { class: "why" }, run.why)],
    run.total_steps === null ? run.num_steps : `${run.num_steps} of ${run.total_steps}`,
    number(run.first), number(run.best), number(run.last),
    run.minutes.toFixed(1),
    run.failed_share === null ? "" : `${(100 * run.failed_share).toFixed(1)} %`,
    run.started_s ? new Date(1000 * run.started_s).toLocaleString() : "",
    run.model.split("/").pop(),
  ]));
}

function swatch(color) {
  const mark = element("span", { class: "swatch" });
  if (color) mark.style.background = color;
  return mark;
}

/** Return the link to the comparison of the chosen runs. The oldest is compared with. */
function compareLink(curves) {
  if (curves.length < 2) return null;
  const oldestFirst = curves.map((curve) => curve.run)
    .sort((a, b) => (a.started_s ?? 0) - (b.started_s ?? 0));
  return element("p", {}, element("a", { class: "button",
    href: comparison(oldestFirst.map((run) => [run.key])) }, `compare these ${curves.length} runs`),
  element("span", { class: "dim" }, " task by task, with both transcripts"));
}

function settings(answer, curves) {
  if (!answer.settings.length) return null;
  const shown = new Set(curves.map((curve) => curve.run.key));
  const kept = answer.runs.map((run, index) => [run, index]).filter(([run]) => shown.has(run.key));
  return element("section", {}, element("h2", {}, "Settings that differ"),
    table([["setting"], ...kept.map(([run]) => [run.name])],
      answer.settings.map((row) => [row.name, ...kept.map(([, index]) => row.values[index])])));
}
