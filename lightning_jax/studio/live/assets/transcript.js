// The texts of a rollout in their order, without times and tokens.

import { element, number, seconds, status } from "./dom.js";
import { why } from "./rollout.js";

/** Return the reward with its reasons, and what was said, called and answered. */
export function drawTranscript(rollout) {
  return [element("p", {}, status(rollout.status), " ",
    element("strong", {}, rollout.reward === null ? "no reward"
      : `reward ${number(rollout.reward, 4)}`), ` ${seconds(rollout.duration_s)}, step ${rollout.step}`),
  why(rollout),
  rollout.spans.map(drawSpan),
  rollout.num_spans > rollout.spans.length && element("p", { class: "dim" },
    `not shown: ${rollout.num_spans - rollout.spans.length} of ${rollout.num_spans} spans`)];
}

function drawSpan(span) {
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
