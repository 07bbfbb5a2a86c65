// One rollout: why it earned its reward, its spans in time, and each call with its tokens.

import { download } from "./api.js";
import { chip, element, fields, fill, number, numbers, place, seconds, select, status } from "./dom.js";

let coloring = "logprob";
const HINTS = { logprob: "the more orange, the less likely the token was",
  advantage: "green: made more likely by the update; red: less likely",
  version: "one color for each version of the weights", none: "" };
const MAX_START = 1000; // characters of the last response above the spans
const MOVES = { j: "next_attempt", k: "previous_attempt", n: "next_group", p: "previous_group",
  "]": "next_step", "[": "previous_step" };

export async function drawRollout(view, context) {
  const { key, id, parts: [, , , , wanted = ""] } = context; // a text to search for at first
  let found = null;
  const go = (name) => {
    const to = found?.neighbors[name];
    if (to) location.hash = place("run", key, "rollout", to);
    return Boolean(to);
  };
  const where = `runs/${key}/rollouts/${encodeURIComponent(id)}`;
  let drawn = "";
  const redraw = async () => {
    const [rollout, run] = await Promise.all([context.get(where), context.get(`runs/${key}`)]);
    const text = JSON.stringify(rollout);
    if (!context.isCurrent() || text === drawn) return;
    drawn = text;
    found = rollout;
    context.setPath([[run.name, "run", key],
      [rollout.group_id, "run", key, "group", rollout.group_id],
      [`attempt ${rollout.index}`, "run", key, "rollout", id]]);
    fill(view, head(rollout), siblings(key, rollout), keys(rollout, go), why(rollout),
      timeline(rollout, wanted),
      element("p", { class: "downloads" }, element("button",
        { click: () => download(`${where}/page.html`, `${id}.html`) }, "this rollout as HTML"), " ",
      element("button", { click: () => download(`runs/${key}/rollouts.jsonl?group=${
        encodeURIComponent(rollout.group_id)}`, `${rollout.group_id}.jsonl`) },
      "its group as JSONL")));
  };
  await redraw();
  const isRunning = () => ["queued", "running"].includes(found?.status);
  return { redraw: () => isRunning() && redraw(), onKey: (pressed) => MOVES[pressed] && go(MOVES[pressed]) };
}

function head(rollout) {
  return [element("h1", {}, rollout.task_name),
    element("p", {}, status(rollout.status), " ",
      element("strong", {}, rollout.reward === null ? "no reward"
        : `reward ${number(rollout.reward, 4)}`),
      ` ${seconds(rollout.duration_s)}, ${rollout.phase} step ${rollout.step} `,
      element("span", { class: "dim" }, rollout.rollout_id))];
}

/** Return the rewards of the attempts at this task, which the advantage compares. */
function siblings(key, rollout) {
  const others = rollout.attempts.filter((attempt) => !attempt.superseded);
  if (others.length < 2) return null;
  const rewards = others.map((attempt) => attempt.reward).filter((reward) => reward !== null);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  return element("p", { class: "chips" }, element("span", { class: "dim" }, "attempts at this task"),
    others.map((attempt) => chip(key, attempt, attempt.rollout_id === rollout.rollout_id)),
    rewards.length > 0 && element("span", { class: "dim" }, `mean ${number(mean)}`));
}

function keys(rollout, go) {
  const button = (key) => element("button", { click: () => go(MOVES[key]),
    disabled: !rollout.neighbors[MOVES[key]], title: `key ${key}` },
  `${MOVES[key].replace("_", " ")} `, element("kbd", {}, key));
  return element("p", { class: "moves" }, Object.keys(MOVES).map((key) => [button(key), " "]));
}

/** Return the task, the parts of the reward, and the failure. */
export function why(rollout) {
  const answer = rollout.spans.filter((span) => span.call).at(-1)?.call;
  const text = answer && (answer.text || answer.tokens.map(([token]) => token).join(""));
  const hasParts = Object.keys(rollout.components).length > 0;
  return element("section", { class: "why" }, element("h2", {}, "Why this reward"),
    fields([...rollout.task, ...(text ? [["last response", start(text)]] : [])]),
    numbers("components of the reward", rollout.components, 6),
    !hasParts && rollout.reward !== null && element("p", { class: "dim" },
      "the agent returned the reward as one number, without components"),
    rollout.reasons.map(([name, text]) => element("p", {},
      element("span", { class: "dim" }, `${name} `), text)),
    numbers("the agent returned", rollout.metrics, 6),
    rollout.reason && element("p", { class: "error" }, `${rollout.reason}: ${rollout.detail ?? ""}`),
    rollout.notes.map((note) => element("p", { class: "dim" }, `note: ${note}`)));
}

const start = (text) => (text.length > MAX_START
  ? `${text.slice(0, MAX_START)}... (all of it is below)` : text);

/** Return the spans in time, with controls for the colors of tokens and a search for a text. */
export function timeline(rollout, wanted = "") {
  const spans = element("div", { class: "spans" });
  const draw = () => fill(spans, rollout.spans.map((span) => drawSpan(span, rollout)));
  draw();
  if (wanted) search(spans, wanted);
  const colors = [["logprob", "log-probability"], ["advantage", "advantage"],
    ["version", "weights version"], ["none", "nothing"]];
  const hint = element("span", { class: "dim" }, HINTS[coloring]);
  const choose = (value) => {
    coloring = value;
    hint.textContent = HINTS[value];
    draw();
  };
  return [element("h2", {}, "Spans"), element("div", { class: "controls" },
    select("color tokens by", colors, coloring, choose), hint,
    element("input", { type: "search", value: wanted, placeholder: "search in this rollout",
      "aria-label": "search in this rollout",
      input: (event) => search(spans, event.target.value) })), spans, leftOut(rollout)];
}

const leftOut = (rollout) => rollout.num_spans > rollout.spans.length && element("p",
  { class: "left-out dim" },
  `not shown: ${rollout.num_spans - rollout.spans.length} of ${rollout.num_spans} spans`);

function drawSpan(span, rollout) {
  const bar = element("span", { class: "bar" });
  const whole = rollout.duration_s || 1;
  bar.style.left = `${(100 * Math.min(span.start_s / whole, 1)).toFixed(3)}%`;
  bar.style.width = `${(100 * Math.min(span.duration_s / whole, 1)).toFixed(3)}%`;
  const label = element("span", { class: "label" }, span.label);
  label.style.paddingLeft = `${Math.min(span.depth, 12)}em`;
  const hasError = span.error !== null;
  const body = element("div", { class: "body" });
  const box = element("details", { class: `span ${span.kind} ${hasError ? "failed" : ""}`,
    toggle: () => { if (box.open && !body.hasChildNodes()) fill(body, details(span)); } },
  element("summary", {}, label, element("span", { class: "track" }, bar),
    element("span", { class: "number" }, `${span.duration_s.toFixed(3)} s`)), body);
  box.text = spanText(span);
  box.open = hasError || Boolean(span.call) || span.kind === "tool";
  if (box.open) fill(body, details(span));
  return box;
}

function details(span) {
  return [
    span.error !== null && element("p", { class: "error" }, `failed: ${span.error}`),
    span.call && drawCall(span.call),
    block("input", span.input), block("output", span.output),
    span.attributes.length > 0 && element("details", {},
      element("summary", { class: "dim" }, "attributes"),
      element("dl", {}, span.attributes.map(([name, text]) =>
        [element("dt", {}, name), element("dd", {}, text)]))),
  ];
}

function drawCall(call) {
  const isShared = call.shares_with !== null;
  return [
    element("p", { class: "dim" }, call.facts.join(" · ")),
    isShared && element("details", {}, element("summary", { class: "dim" },
      `prompt: ${call.shared_size} as call ${call.shares_with}`),
    element("pre", {}, call.shared_text)),
    block(isShared ? "then, new" : "prompt", call.new_text),
    call.tokens.length > 0 ? response(call) : block("response", call.text),
    call.tool_calls.map(([name, given]) => element("p", {}, "calls ",
      element("code", {}, `${name}(${given})`))),
  ];
}

function response(call) {
  const advantage = call.credit?.advantage ?? 0;
  const sign = advantage > 0 ? "plus" : advantage < 0 ? "minus" : "";
  const box = element("pre", { class: `response ${sign}` });
  for (const [text, logprob, version, isForced] of call.tokens) {
    const token = element("span", { class: isForced ? "token forced" : "token",
      title: tokenTitle(logprob, version, isForced) }, text);
    paint(token, call, logprob, version);
    box.append(token);
  }
  const left = call.num_tokens - call.tokens.length;
  return [element("div", { class: "dim" }, "response"), box,
    left > 0 && element("p", { class: "dim" }, `not shown: ${left} more tokens`)];
}

function tokenTitle(logprob, version, isForced) {
  return [logprob !== null && `log-prob ${logprob.toFixed(4)}`,
    version !== null && `weights ${version}`, isForced && "forced by a grammar"]
    .filter(Boolean).join(", ");
}

/** Set the background of a token by the chosen quantity. */
function paint(token, call, logprob, version) {
  if (coloring === "logprob" && logprob !== null) {
    token.style.background = `rgb(255 150 0 / ${(0.6 * (1 - Math.exp(Math.min(logprob, 0)))).toFixed(2)})`;
  } else if (coloring === "advantage" && call.credit) {
    const strength = Math.min(Math.abs(call.credit.advantage), 2) / 4;
    const base = call.credit.advantage > 0 ? "33 131 88" : "206 44 49";
    token.style.background = `rgb(${base} / ${strength.toFixed(2)})`;
  } else if (coloring === "version" && version !== null) {
    token.style.background = `hsl(${(version * 67) % 360} 70% 55% / .35)`;
  }
}

const block = (title, text) => (text ? [element("div", { class: "dim" }, title),
  element("pre", {}, text)] : null);

function spanText(span) {
  const call = span.call;
  const parts = [span.label, span.input, span.output, span.error ?? ""];
  if (call) {
    parts.push(call.new_text, call.text, call.tokens.map(([text]) => text).join(""));
    call.tool_calls.forEach(([name, given]) => parts.push(name, given));
  }
  return parts.join("\n").toLowerCase();
}

/** Hide the spans that do not hold the text. */
function search(spans, text) {
  for (const box of spans.children) box.hidden = !box.text.includes(text.toLowerCase());
}

/** Return the reward with its reasons, and what was said, called and answered. */
export function drawTranscript(rollout) {
  return [element("p", {}, status(rollout.status), " ",
    element("strong", {}, rollout.reward === null ? "no reward"
      : `reward ${number(rollout.reward, 4)}`), ` ${seconds(rollout.duration_s)}, step ${rollout.step}`),
  why(rollout),
  rollout.spans.map(drawTurn), leftOut(rollout)];
}

function drawTurn(span) {
  const texts = span.call ? [
    ["prompt", span.call.new_text],
    ["response", span.call.text || span.call.tokens.map(([text]) => text).join("")],
  ] : [["input", span.input], ["output", span.output]];
  const shown = texts.filter(([, text]) => text);
  if (!shown.length && span.error === null) return null;
  return element("section", { class: `turn ${span.kind}` },
    element("h3", {}, span.label),
    span.error !== null && element("p", { class: "error" }, `failed: ${span.error}`),
    shown.map(([name, text]) => [element("div", { class: "dim" }, name), element("pre", {}, text)]));
}
