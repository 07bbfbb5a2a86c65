// One group: all attempts at a task beside one another, with rewards, advantages and responses.

import { element, fields, fill, number, numbers, place, seconds, shade, status } from "./dom.js";

export async function drawGroup(view, context) {
  const { key, id } = context;
  let isRunning = false;
  const redraw = async () => {
    const where = `runs/${key}/groups/${encodeURIComponent(id)}`;
    const [group, run] = await Promise.all([context.get(where), context.get(`runs/${key}`)]);
    if (!context.isCurrent()) return;
    context.setPath([[run.name, "run", key], [id, "run", key, "group", id]]);
    isRunning = group.attempts.some((attempt) => ["queued", "running"].includes(attempt.status));
    const boxes = new Map(group.attempts.map((attempt) =>
      [attempt.rollout_id, element("div", { class: "texts dim" }, "reading the responses")]));
    const notes = element("div", { class: "notes" });
    fill(view, element("h1", {}, group.attempts[0]?.task_name ?? id), fields(group.task), notes,
      element("div", { class: "attempts" }, group.attempts.map((attempt) =>
        card(key, attempt, boxes.get(attempt.rollout_id)))));
    const texts = (await context.get(`${where}/texts`)).attempts;
    if (!context.isCurrent()) return;
    const found = new Set();
    for (const [rolloutId, attempt] of Object.entries(texts)) {
      const box = boxes.get(rolloutId);
      if (!box) continue;
      box.className = "texts";
      fill(box, element("p", {}, "advantage ", advantages(attempt.advantages)),
        parts(attempt));
      attempt.notes.forEach((note) => found.add(note));
    }
    fill(notes, [...found].map((note) => element("p", { class: "dim" }, note)));
  };
  await redraw();
  return { redraw: () => isRunning && redraw() };
}

/** Return the responses of an attempt that tell it from the others, each with who wrote it. */
function parts({ parts: found, num_calls: count }) {
  if (!found.length) return element("pre", {}, "no response");
  return found.map((part) => [
    count > 1 && element("p", { class: "dim" }, `call ${part.number} of ${count}`,
      part.who && `, ${part.who}`, part.reward !== 0 && `, own reward ${number(part.reward)}`),
    element("pre", {}, part.response || "no response")]);
}

function advantages(values) {
  if (!values.length) return "unknown";
  const distinct = [...new Set(values.map((value) => number(value)))];
  return element("span", { class: values[0] > 0 ? "plus" : values[0] < 0 ? "minus" : "" },
    distinct.slice(0, 8).join(", "));
}

function card(key, attempt, texts) {
  return element("article", { class: `attempt ${attempt.status}` },
    element("h2", {}, element("a", { href: place("run", key, "rollout", attempt.rollout_id) },
      `attempt ${attempt.index}`), " ", status(attempt.status)),
    element("p", {}, shade(attempt.reward, element("strong", { class: "chip" },
      attempt.reward === null ? "no reward" : `reward ${number(attempt.reward)}`)), " ",
    seconds(attempt.seconds)),
    numbers("components", attempt.components),
    numbers("the agent returned", attempt.metrics),
    attempt.reason && element("p", { class: "error" }, `${attempt.reason}: ${attempt.detail ?? ""}`),
    texts);
}
