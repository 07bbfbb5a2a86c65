// One run: curves, what runs now, failures by reason, and groups of attempts or single rollouts.

import { download } from "./api.js";
import { chart, COLORS, destroyCharts, points } from "./chart.js";
import { drawSearch } from "./search.js";
import { chip, element, failureTable, fill, number, place, rolloutTable, seconds, select, status, table,
  words } from "./dom.js";

// Charts of a run: a title and the first of these metrics that it has. The first two are large.
const NUM_LARGE = 2;
const CHARTS = [
  ["reward of training rollouts", ["rollout/reward_mean"]],
  ["greedy reward on dev tasks", ["eval/reward_mean"]],
  ["entropy", ["rollout/entropy", "train/entropy"]],
  ["tokens of a response", ["rollout/response_tokens_mean"]],
  ["tokens trained a second", ["train/tokens_per_s"]],
  ["tokens sampled in a step", ["serve/tokens_generated", "rollout/response_tokens"]],
  ["gap of sampler and trainer: KL", ["train/mismatch_kl"]],
  ["gradient's noise scale, in groups", ["train/noise_scale"]],
  ["tokens sampled from another distribution", ["train/adjusted_share"]],
  ["failures with a positive advantage", ["train/failures_gain_share"]],
  ["corrections cut, longest responses", ["long", "medium", "short"].flatMap((length) =>
    ["truncated", "masked"].map((kind) => `train/correction_${kind}_share/length=${length}`))],
];
const MAX_PARTS = 8; // curves of the seconds of a step
const PAGE = 25;
const LIVE_MS = 2000; // between two looks at what runs now

const kept = { axis: "steps", metric: "", phase: "train", step: "", order: "task", list: "groups",
  text: "", scope: "tasks", status: "", isOpen: false };

export async function drawRun(view, context) {
  const { key } = context;
  let offset = 0;
  let run = null;
  const [head, live, curves, failures, lists, internals] = ["head", "live", "curves", "failures",
    "lists", "internals"].map((name) => element("section", { class: name }));

  let search = 0; // number of the newest one; earlier ones end
  const drawLists = async (isChange = true) => {
    if (kept.scope === "transcripts" && kept.text) {
      if (!isChange) return; // a search does not begin again because the run goes on
      const mine = ++search;
      const { phase, step, text } = kept;
      const wanted = kept.list === "groups" ? "" : kept.status;
      await drawSearch(lists.querySelector(".rows"), context,
        { phase, step, status: wanted, text }, () => context.isCurrent() && mine === search);
      return;
    }
    search += 1;
    const query = { phase: kept.phase, step: kept.step, limit: PAGE, offset, text: kept.text,
      status: kept.status };
    const isGroups = kept.list === "groups";
    const answer = await context.get(`runs/${key}/${kept.list}`,
      isGroups ? { ...query, order: kept.order } : query);
    if (!context.isCurrent()) return;
    const move = (by) => () => { offset = Math.max(offset + by, 0); drawLists(); };
    const last = Math.min(offset + PAGE, answer.total);
    fill(lists.querySelector(".rows"),
      isGroups ? groups(key, answer.groups) : rolloutTable(answer.rollouts, (id) => rolloutLink(key, id)),
      element("p", { class: "pages" },
        element("button", { click: move(-PAGE), disabled: offset === 0 }, "previous"),
        ` ${answer.total ? offset + 1 : 0} to ${last} of ${answer.total} `,
        element("button", { click: move(PAGE), disabled: last >= answer.total }, "next")));
  };

  const drawCurves = async () => {
    const wanted = CHARTS.map(([title, names]) => [title,
      names.find((name) => run.metrics.includes(name))]).filter(([, name]) => name);
    const parts = run.metrics.filter((name) => name.startsWith("time/") && name.endsWith("_s"))
      .slice(0, MAX_PARTS);
    const names = [...wanted.map(([, name]) => name), ...parts, kept.metric].filter(Boolean);
    const answer = await context.get(`runs/${key}/metrics`, { names: names.join(",") });
    if (!context.isCurrent()) return;
    const options = ["steps", "samples", "minutes"].map((name) => [name, name]);
    const curve = (name, index = 0) => ({ label: name, color: COLORS[index % COLORS.length],
      points: points(answer, kept.axis, name) });
    const start = answer.steps.findIndex((step) => step >= run.warmup_steps);
    const warmup = run.warmup_steps ? answer[kept.axis].at(start) : null; // at(-1): all of it
    const draw = (title, ...found) => chart(title, kept.axis, found, { sync: "run", warmup });
    const drawn = wanted.map(([title, name]) => [CHARTS.findIndex(([found]) => found === title),
      draw(title, curve(name))]);
    const large = drawn.filter(([index]) => index < NUM_LARGE).map(([, box]) => box);
    const small = drawn.filter(([index]) => index >= NUM_LARGE).map(([, box]) => box);
    destroyCharts(curves);
    fill(curves,
      select("axis", options, kept.axis, (value) => { kept.axis = value; drawCurves(); }), " ",
      select("more", [["", "choose a metric"], ...run.metrics.map((name) => [name, name])],
        kept.metric, (value) => { kept.metric = value; drawCurves(); }),
      element("div", { class: "charts" }, large,
        kept.metric && draw(kept.metric, curve(kept.metric))));
    destroyCharts(internals);
    fill(internals, element("h2", {}, "Inside the training"), element("div", { class: "charts" },
      small, parts.length > 0 && draw("seconds of a step", ...parts.map(curve))));
  };

  const drawLive = async () => {
    const now = await context.get(`runs/${key}/live`);
    if (context.isCurrent()) fill(live, running(key, now));
  };

  const drawHead = async () => {
    const [found] = await Promise.all([context.get(`runs/${key}`), drawLive()]);
    if (!context.isCurrent()) return;
    run = found;
    context.setPath([[run.name, "run", key]]);
    fill(head, summary(run));
    fill(failures, run.failures.length > 0 && [element("h2", {}, "Failures"),
      failureTable(run.failures, (id) => rolloutLink(key, id))]);
  };

  await drawHead();
  if (!context.isCurrent()) return {};
  const change = (name) => (value) => { kept[name] = value; offset = 0; drawListHead(); };
  const drawListHead = () => {
    fill(lists, controls(run, change), element("div", { class: "rows" }));
    return drawLists();
  };
  destroyCharts(view);
  fill(view, head, live, curves, failures, lists, internals, settings(run), downloads(key));
  await Promise.all([drawCurves(), drawListHead()]);
  const redraw = () => Promise.all([drawHead().then(drawCurves), drawLists(false)]);
  let isAsking = false;
  const timer = setInterval(async () => {
    if (isAsking || document.hidden || run.status !== "running") return;
    isAsking = true;
    await drawLive().catch(() => {}); // the next look, or an event, shows what is wrong
    isAsking = false;
  }, LIVE_MS);
  return { redraw, stop: () => clearInterval(timer) };
}

function summary(run) {
  const counts = Object.entries(run.rollouts).map(([name, count]) => `${count} ${words(name)}`);
  const what = run.is_evaluated ? "greedy reward on dev tasks" : "reward of training rollouts";
  const fact = (value, name) => element("div", { class: "fact" },
    element("strong", {}, value), element("span", {}, name));
  return [
    element("h1", {}, run.name, " ", status(run.status)),
    run.why && element("p", { class: "error" }, run.why),
    run.learning.map(({ sign, text }) => element("p", {
      class: `verdict ${sign > 0 ? "plus" : sign < 0 ? "minus" : ""}` }, text)),
    element("div", { class: "facts" },
      fact(run.total_steps === null ? run.num_steps : `${run.num_steps} of ${run.total_steps}`, "steps"),
      fact(number(run.first) || "-", `first ${what}`), fact(number(run.best) || "-", "best"),
      fact(number(run.last) || "-", "last"), fact(run.minutes.toFixed(1), "minutes")),
    element("p", { class: "dim" }, counts.join(", ") || "no rollouts yet"),
    run.worst_group && element("p", {}, `worst group of step ${run.worst_group.step}: `,
      element("a", { href: place("run", run.key, "group", run.worst_group.group_id) },
        run.worst_group.task_name), `, mean reward ${number(run.worst_group.reward_mean) || "none"}`),
  ];
}

/** Return what runs now: the server's slots, queue and rate, and rollouts with the longest first. */
function running(key, now) {
  if (now.status !== "running") {
    return element("p", { class: "dim" }, "Nothing runs now: the run has ended.");
  }
  const names = Object.keys(now.last).filter((name) => name.startsWith("serve/"));
  const [longest] = now.running;
  const hasCalls = longest?.calls !== undefined; // reported by the run's own server
  const columns = hasCalls ? [["rollout"], ["task"], ["calls in flight", true], ["tokens", true],
    ["open for", true]] : [["rollout"], ["task"], ["since its first call", true]];
  return [
    element("h2", {}, "Running now"),
    now.server ? serverFacts(now) : element("p", { class: "dim" }, "Slots, queue and tokens/s are "
      + "not available here: they are known only to the training itself. Start it with ",
    element("code", {}, "lightning-jax train --studio"), " and open the page at its server."),
    longest && element("details", { open: kept.isOpen, toggle: (event) => {
      kept.isOpen = event.target.open;
    } },
    element("summary", {}, now.num_running === 1 ? "1 rollout" : `${now.num_running} rollouts`,
      longest.seconds !== null && [", the longest for ", seconds(longest.seconds), ": ",
        rolloutLink(key, longest.rollout_id)]),
    table(columns, now.running.map((rollout) => [rolloutLink(key, rollout.rollout_id), rollout.task_name,
      ...(hasCalls ? [rollout.calls, rollout.tokens] : []),
      rollout.seconds === null ? "no call has ended" : seconds(rollout.seconds)]))),
    !longest && element("p", { class: "dim" }, "no rollout is running"),
    names.length > 0 && element("details", {},
      element("summary", {}, `server in step ${now.last.step}`),
      table([["metric"], ["value", true]],
        names.map((name) => [name, number(now.last[name], 4)]))),
  ];
}

function serverFacts(now) {
  const { slots, slots_used: used, queue, open_requests: open, tokens_per_s: rate,
    window_s: window, compiling } = now.server;
  const fact = (value, name) => element("div", { class: "fact" },
    element("strong", {}, value), element("span", {}, name));
  return element("div", { class: "facts" },
    slots !== null && used !== null && [fact(`${used} of ${slots}`, "slots used"),
      fact(Math.max(slots - used, 0), "slots free")],
    queue !== null && fact(queue, "calls in the queue"),
    open !== null && fact(open, "calls open"),
    fact(rate === null ? "..." : number(rate), rate === null ? "tokens/s, being measured"
      : `tokens/s in the last ${Math.round(window)} s`),
    compiling > 0 && fact(compiling, "programs being compiled"),
    fact(now.num_running, "rollouts running"));
}

function controls(run, change) {
  const all = [["", "all"]];
  const steps = run[`${kept.phase}_steps`];
  const phases = [["train", "training"], ["eval", "evaluation"]];
  const others = [["sampled", "sampled evaluation"], ["probe", "probe of the warm-up"],
    ["prompt", "search for prompts"]];
  phases.push(...others.filter(([phase]) => run[`${phase}_steps`].length));
  const newest = [...steps].reverse().map((step) => [String(step), String(step)]);
  if (!steps.map(String).includes(kept.step)) kept.step = "";
  const search = element("input", { type: "search", value: kept.text,
    placeholder: "text, in any case", "aria-label": "search",
    change: (event) => change("text")(event.target.value) });
  const scopes = [["tasks", "tasks, failures, judges"], ["transcripts", "transcripts"]];
  const statuses = Object.keys(run.rollouts).map((name) => [name, words(name)]);
  return [element("h2", {}, "Rollouts"), element("div", { class: "controls" },
    select("show", [["groups", "groups"], ["rollouts", "rollouts"]], kept.list, change("list")),
    select("phase", phases, kept.phase, change("phase")),
    select("step", [...all, ...newest], kept.step, change("step")),
    kept.list === "groups"
      ? select("order", [["task", "newest"], ["worst", "worst reward"], ["spread", "rewards differ most"]],
        kept.order, change("order"))
      : select("status", [...all, ...statuses], kept.status, change("status")),
    search, select("in", scopes, kept.scope, change("scope")))];
}

function groups(key, found) {
  if (!found.length) return element("p", { class: "dim" }, "no groups");
  return table([["task"], ["step", true], ["mean", true], ["rewards of the attempts"]],
    found.map((group) => [
      element("a", { href: place("run", key, "group", group.group_id) }, group.task_name),
      group.step, number(group.reward_mean),
      element("span", { class: "chips" }, group.attempts.map((attempt) => chip(key, attempt))),
    ]));
}

const rolloutLink = (key, id) => element("a", { href: place("run", key, "rollout", id) }, id);

function settings(run) {
  return element("details", {}, element("summary", {}, "settings"),
    table([["setting"], ["value"]], run.settings.map((row) => [row.name, row.value])));
}

function downloads(key) {
  const save = (path, name, text) => element("button",
    { click: () => download(`runs/${key}/${path}`, name) }, text);
  const step = () => (kept.step ? `?phase=${kept.phase}&step=${kept.step}` : "");
  return element("p", { class: "downloads" },
    element("button", { click: () => download(`runs/${key}/page.html${step()}`, "rollouts.html") },
      "newest 30 rollouts as HTML"), " ",
    save("rollouts.jsonl", "rollouts.jsonl", "all rollouts as JSONL"));
}
