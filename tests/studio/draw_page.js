// Run the script of a page of rollouts without a browser. Print what it draws as JSON: a list of
// [tag, attributes, text, style] with parents before children. All rollouts are opened.

const { readFileSync } = require("node:fs");
const vm = require("node:vm");

class Text {
  constructor(text) { this.textContent = text; }
}

class Element {
  constructor(tag) {
    Object.assign(this, { tag, attributes: {}, style: {}, children: [], listeners: {} });
  }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  append(...nodes) { this.children.push(...nodes); }
  replaceChildren() { this.children = []; }
  hasChildNodes() { return this.children.length > 0; }
  get className() { return this.attributes.class ?? ""; }
  get textContent() { return this.children.map((child) => child.textContent).join(""); }
  set textContent(text) { this.children = [new Text(text)]; }
  get open() { return "open" in this.attributes; }
  set open(isOpen) {
    if (isOpen) this.attributes.open = "";
    this.listeners.toggle?.();
  }
  * all() {
    yield this;
    for (const child of this.children) if (child instanceof Element) yield* child.all();
  }
}

const page = readFileSync(process.argv[2], "utf8");
const view = new Element("main");
const stored = new Text(page.match(/id="stored">([^]*?)<\/script>/)[1]);
vm.runInNewContext(page.match(/<script>([^]*?)<\/script>/)[1], {
  Node: Object,
  location: { hash: "" },
  addEventListener: () => {},
  document: {
    createElement: (tag) => new Element(tag),
    createTextNode: (text) => new Text(text),
    getElementById: (id) => ({ view, stored })[id] ?? null,
  },
});
for (const box of view.all()) if (box.className === "stored") box.open = true;
process.stdout.write(JSON.stringify([...view.all()].map((found) =>
  [found.tag, found.attributes, found.textContent, found.style])));
