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
