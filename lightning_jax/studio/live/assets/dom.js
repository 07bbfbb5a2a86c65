// Construction of elements. Texts are always set as text: they come from models and tools.

/** Return an element. `attributes` may hold `class`, listeners as functions, and properties. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") made.addEventListener(key, value);
    else made.setAttribute(key === "className" ? "class" : key, value === true ? "" : value);
  }
  append(made, children);
  return made;
}

function append(parent, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Replace the contents of an element. */
export function fill(parent, ...children) {
  parent.replaceChildren();
  append(parent, children);
}

/** Return a table in a box that scrolls. Columns are [title, is number]; cells texts or nodes. */
export function table(columns, rows) {
  const head = columns.map(([title, isNumber]) =>
    element("th", { class: isNumber && "number", scope: "col" }, title));
  const body = rows.map((cells) => element("tr", {}, cells.map((cell, index) =>
    element("td", { class: columns[index][1] ? "number" : "text" }, cell))));
  return element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, head)), element("tbody", {}, body)));
}

/** Return a selection whose change calls `onChange` with the new value. */
export function select(label, options, value, onChange, name = null) {
  const list = element("select", { "aria-label": name,
    change: (event) => onChange(event.target.value) },
  options.map(([key, text]) => element("option", { value: key }, text)));
  list.value = value;
  return element("label", {}, label && `${label} `, list);
}

export const number = (value, digits = 3) => (value === null || value === undefined ? ""
  : String(Number(value.toPrecision(Number.isInteger(value) ? 15 : digits))));

export const seconds = (value) => (value === null || value === undefined ? ""
  : value >= 100 ? `${Math.round(value)} s` : `${value.toFixed(2)} s`);

export const words = (status) => status.replaceAll("_", " ");

export const status = (value) => element("span", { class: `status ${value}` }, words(value));

/** Return the link to a place in the page, such as ["run", key, "rollout", id]. */
export const place = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;

/** Color an element by a reward: the greener, the nearer to 1; red below 0. Returns the element. */
export function shade(reward, node) {
  if (reward > 0) node.style.background = `rgb(33 160 96 / ${(0.1 + 0.4 * Math.min(reward, 1)).toFixed(2)})`;
  if (reward < 0) node.style.background = `rgb(206 44 49 / ${(0.1 + 0.3 * Math.min(-reward, 1)).toFixed(2)})`;
  return node;
}

/** Return a link to an attempt that shows its reward. */
export function chip(key, attempt, isHere = false) {
  const text = attempt.reward === null ? "failed" : number(attempt.reward);
  const shown = ["queued", "running"].includes(attempt.status) ? attempt.status : text;
  return shade(attempt.reward, element("a", {
    class: `chip ${attempt.status} ${isHere ? "here" : ""}`,
    "aria-current": isHere ? "true" : null,
    title: attempt.reason ?? words(attempt.status),
    href: place("run", key, "rollout", attempt.rollout_id) }, shown));
}

/** Return the task's fields as a list of terms. */
export function fields(task) {
  if (!task.length) return element("p", { class: "dim" }, "the task's fields were not recorded");
  return element("dl", { class: "task" }, task.map(([name, text]) =>
    [element("dt", {}, name), element("dd", {}, text)]));
}

/** Return numbers by name as one line, such as the components of a reward. */
export function numbers(title, found, digits = 3) {
  const names = Object.entries(found);
  if (!names.length) return null;
  return element("p", {}, element("span", { class: "dim" }, `${title} `),
    names.map(([name, value]) =>
      element("span", { class: "pair" }, `${name} ${number(value, digits)}`)));
}

/** Return a table of failures by reason. `link` returns the link to a rollout. */
export function failureTable(failures, link) {
  return table([["number", true], ["by"], ["reason"], ["example"], ["detail"]],
    failures.map((failure) => [failure.count, words(failure.status).replace(" failure", ""),
      failure.reason, link(failure.example), failure.detail]));
}

/** Return a table of rollouts, with more columns if their calls are counted. */
export function rolloutTable(rollouts, link) {
  if (!rollouts.length) return element("p", { class: "dim" }, "no rollouts");
  const isCounted = rollouts[0].num_calls !== null;
  const columns = [["rollout"], isCounted && ["phase"], isCounted && ["step", true], ["task"],
    ["status"], ["reward", true], isCounted && ["calls", true], ["seconds", true], ["reason"]];
  const rows = rollouts.map((rollout) => [link(rollout.rollout_id), rollout.phase, rollout.step,
    rollout.task_name, status(rollout.status), number(rollout.reward), rollout.num_calls,
    seconds(rollout.seconds), rollout.reason ?? ""]);
  return table(columns.filter(Boolean),
    rows.map((cells) => cells.filter((_, index) => columns[index])));
}
