// Rollouts that lie in the page itself, as `lightning-jax view --html` writes it.

import { element, failureTable, fill, number, rolloutTable, seconds, status, words } from "./dom.js";
import { timeline, why } from "./rollout.js";

const { title, run, rollouts } = JSON.parse(document.getElementById("stored").textContent);

const link = (id) => element("a", { href: `#${encodeURIComponent(id)}` }, id);

function drawTable() {
  const left = run.num_left_out;
  return [
    element("p", {}, Object.entries(run.counts).map(([name, count]) => `${count} ${words(name)}`)
      .join(", "), left > 0 && element("span", { class: "left-out" },
      `; not shown: ${left} of ${left + run.rows.length} rollouts`)),
    run.failures.length > 0 && failureTable(run.failures, link),
    rolloutTable(run.rows, link),
  ];
}

/** Return a rollout, whose details are drawn when it is opened first. */
function drawRollout(rollout) {
  const body = element("div", {});
  const draw = () => {
    if (box.open && !body.hasChildNodes()) fill(body, why(rollout), timeline(rollout));
  };
  const box = element("details", { class: "stored", id: rollout.rollout_id, toggle: draw },
    element("summary", {}, element("h2", {}, rollout.rollout_id), " ", status(rollout.status),
      rollout.reward !== null && ` reward ${number(rollout.reward, 6)},`,
      ` ${rollout.num_calls} calls, ${seconds(rollout.duration_s)} `,
      element("span", { class: "dim" }, rollout.task_name)), body);
  return box;
}

function openLinked() {
  const box = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (box?.className !== "stored") return;
  box.open = true;
  box.scrollIntoView();
}

const boxes = rollouts.map(drawRollout);
fill(document.getElementById("view"), element("h1", {}, title), run && drawTable(), boxes);
if (!run) boxes.forEach((box) => { box.open = true; });
addEventListener("hashchange", openLinked);
openLinked();
