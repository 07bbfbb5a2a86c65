// Runs beside one another: what differs in their settings, their curves, tasks won and lost, and how
// sure the difference is. Runs of one group are seeds of one experiment.

import { COLORS, curvesOf, destroyCharts, rewardCharts } from "./chart.js";
import { chip, element, fill, number, place, select, status, table } from "./dom.js";
import { drawTranscript } from "./rollout.js";

const MAX_CHANGED = 30; // tasks that are shown at first
const REDRAW_MS = 15_000; // the server reads whole evaluations
let axis = "steps";

/** Return the link to a comparison of groups of run keys. */
export const comparison = (groups) => place("compare", ...groups.map((keys) => keys.join(".")));

export async function drawComparison(view, context) {
  const groups = context.parts.slice(1).map((text) => text.split("."));
  const redraw = async () => {
    const query = groups.map((keys) => `group=${encodeURIComponent(keys.join("."))}`).join("&");
    const answer = await context.get(`compare?${query}`);
    const drawn = answer.groups.flatMap((group, index) => group.runs.map((run) =>
      ({ run, color: COLORS[index % COLORS.length] })));
    const curves = await curvesOf(context, drawn);
    if (!context.isCurrent()) return;
    context.setPath([["compare", ...context.parts]]);
    const charts = element("section", {});
    const drawCharts = () => {
      destroyCharts(charts);
      fill(charts, rewardCharts(curves, axis, (value) => { axis = value; drawCharts(); }));
    };
    destroyCharts(view);
    fill(view, element("h1", {}, answer.groups.map((group) => group.name).join(" and ")),
      members(answer.groups, groups), answer.pairs.map(drawPair), charts,
      element("section", {}, element("h2", {}, "Settings that differ"), grid(answer.settings)));
    drawCharts();
  };
  await redraw();
  return { redraw, minMs: REDRAW_MS };
}

/** Return the runs with a selection of the group that each belongs to. */
function members(answer, groups) {
  const keys = groups.flat();
  const letters = keys.map((_, index) => String.fromCharCode(65 + index));
  const move = (key, to) => {
    const moved = keys.map((_, index) => keys.filter((other) => (other === key ? index === to
      : groups[index]?.includes(other))));
    location.hash = comparison(moved.filter((group) => group.length));
  };
  const rows = answer.flatMap((group, index) => group.runs.map((run) => [
    element("a", { href: place("run", run.key) }, run.name), status(run.status), run.num_steps,
    number(run.first), number(run.best), number(run.last), run.minutes.toFixed(1),
    keys.length > 2 ? select("", letters.map((letter, at) => [String(at), letter]), String(index),
      (value) => move(run.key, Number(value)), `group of ${run.name}`) : letters[index]]));
  return [table([["run"], ["status"], ["steps", true], ["first", true], ["best", true],
    ["last", true], ["minutes", true], ["group"]], rows),
  keys.length > 2 && element("p", { class: "dim" },
    "Runs of one group count as seeds of one experiment. Group A is what the others are compared with.")];
}

function drawPair(pair) {
  const title = element("h2", {}, `${pair.name} against ${pair.first_name}`);
  if (pair.missing) return element("section", {}, title, element("p", { class: "dim" }, pair.missing));
  const sign = pair.verdict.sign > 0 ? "plus" : pair.verdict.sign < 0 ? "minus" : "";
  const list = element("div", {});
  const show = (limit) => fill(list, tasks(pair, pair.tasks.slice(0, limit)),
    pair.tasks.length > limit && element("button",
      { click: () => show(pair.tasks.length) }, `all ${pair.tasks.length} tasks`));
  show(MAX_CHANGED);
  const fact = (value, name, kind = "") => element("div", { class: "fact" },
    element("strong", { class: kind }, value), element("span", {}, name));
  return element("section", {}, title,
    element("p", { class: `verdict ${sign}` }, pair.verdict.text),
    element("div", { class: "facts" }, fact(pair.num_won, "tasks won", "plus"),
      fact(pair.num_lost, "tasks lost", "minus"), fact(pair.num_equal, "equal")),
    element("ul", {}, pair.facts.map((text) => element("li", {}, text))),
    pair.seeds && [element("h3", {}, "Over seeds"), grid(pair.seeds)], list);
}

/** Return the tasks whose reward differs, with the attempts of both sides. */
function tasks(pair, shown) {
  if (!shown.length) return element("p", { class: "dim" }, "no task has a different reward");
  return table([["task"], [pair.first_name], [pair.name], ["change", true], [""]],
    shown.map((task) => [task.task_name, chips(task.before_rollouts), chips(task.after_rollouts),
      element("span", { class: task.change > 0 ? "plus" : "minus" },
        `${task.change > 0 ? "+" : ""}${task.change.toFixed(3)}`),
      task.before_rollouts.length > 0 && task.after_rollouts.length > 0
        && element("a", { href: beside(task.before_rollouts[0], task.after_rollouts[0]) },
          "both transcripts")]));
}

const chips = (rollouts) => element("span", { class: "chips" },
  rollouts.map((rollout) => chip(rollout.key, rollout)));

const beside = (first, second) => place("beside", first.key, first.rollout_id, second.key,
  second.rollout_id);

const grid = (found) => [found.rows.length > 0 && table(
  found.columns.map((column) => [column.name, column.is_number]), found.rows),
  found.notes.map((note) => element("p", { class: "dim" }, note))];

/** Draw two rollouts beside each other, often of one task in two runs. */
export async function drawBeside(view, context) {
  const [, ...given] = context.parts;
  const pairs = [given.slice(0, 2), given.slice(2, 4)];
  const found = await Promise.all(pairs.map(([key, id]) => Promise.all([
    context.get(`runs/${key}`), context.get(`runs/${key}/rollouts/${encodeURIComponent(id)}`)])));
  if (!context.isCurrent()) return {};
  const keys = pairs.map(([key]) => key);
  const [first, second] = keys;
  context.setPath([...(first === second ? [] : [["compare", "compare", first, second]]),
    ["transcripts", ...context.parts]]);
  fill(view, element("h1", {}, found[0][1].task_name),
    element("div", { class: "beside" }, found.map(([run, rollout], index) =>
      element("article", { class: "attempt" }, element("h2", {}, run.name, " ",
        element("a", { class: "dim", href: place("run", keys[index], "rollout", rollout.rollout_id) },
          rollout.rollout_id)), drawTranscript(rollout)))));
  return {};
}
