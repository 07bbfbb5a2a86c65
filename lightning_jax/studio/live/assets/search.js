// Search in the transcripts of a run. The server searches a few seconds at a time.

import { element, fill, number, place, status, table } from "./dom.js";

const MAX_REQUESTS = 10; // until the reader is asked whether to search on
const MAX_SHOWN = 25; // matches until then

/**
 * Search, and show in `box` what is found. `query` has the text and conditions on the rollouts. The
 * search ends when `isCurrent()` is false.
 */
export async function drawSearch(box, context, query, isCurrent) {
  const found = [];
  let searched = 0;
  let cut = 0;
  let cursor = null;
  const draw = (answer, isSearching) => fill(box,
    found.length > 0 && results(context.key, found, query.text),
    element("p", { class: "dim", role: "status" }, isSearching ? "searching: " : "",
      `${searched} of ${answer.total} rollouts searched, ${found.length} have this text`),
    cut > 0 && element("p", { class: "dim" },
      `cut: only the first 2 million characters of ${cut} long rollouts were searched`),
    answer.notes.map((note) => element("p", { class: "error" }, note)),
    !isSearching && answer.cursor !== null && element("button", { click: () => search() },
      "search on in older rollouts"));
  const search = async () => {
    const enough = found.length + MAX_SHOWN;
    for (let request = 1; ; request += 1) {
      const answer = await context.get(`runs/${context.key}/search`, { ...query, cursor });
      if (!isCurrent()) return;
      found.push(...answer.matches);
      searched += answer.searched;
      cut += answer.cut;
      cursor = answer.cursor;
      const isOver = cursor === null || found.length >= enough || request >= MAX_REQUESTS;
      draw(answer, !isOver);
      if (isOver) return;
    }
  };
  fill(box, element("p", { class: "dim", role: "status" }, "searching"));
  await search();
}

/** Return a table of matches whose links open the rollout with the text searched there, too. */
function results(key, found, text) {
  return table([["rollout"], ["task"], ["status"], ["reward", true], ["where"], ["text"]],
    found.map((match) => [
      element("a", { href: place("run", key, "rollout", match.rollout_id, text) },
        match.rollout_id),
      match.task_name, status(match.status), number(match.reward), match.where,
      [match.before, element("mark", {}, match.text), match.after]]));
}
