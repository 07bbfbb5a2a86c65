// Requests to the server that sent the page, with the key if it has one.

const KEY = "lightning-jax-key";

/** Take the key from the address and keep it for this tab, so that it stays in no history. */
export function takeKey() {
  const found = location.hash.match(/^#key=(.+)$/);
  if (found) {
    sessionStorage.setItem(KEY, decodeURIComponent(found[1]));
    history.replaceState(null, "", `${location.pathname}#/`);
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

export class ApiFailure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const BUSY_TRIES = 5; // of a request that the server is too busy for

async function request(path, signal, tries = BUSY_TRIES) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch(new URL(`api/${path}`, document.baseURI), { headers, signal });
  if (response.ok) return response;
  if (response.status === 503 && tries > 1) {
    const seconds = Number(response.headers.get("Retry-After")) || 1;
    await new Promise((resolve) => setTimeout(resolve, 1000 * seconds * (1 + Math.random())));
    return request(path, signal, tries - 1);
  }
  const body = await response.json().catch(() => ({}));
  throw new ApiFailure(response.status, body.error?.message ?? response.statusText);
}

/** Return the JSON of a path below `api/`. */
export async function get(path, query = {}, signal = undefined) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null);
  const text = new URLSearchParams(given).toString();
  return (await request(text ? `${path}?${text}` : path, signal)).json();
}

/** Save a path below `api/` as a file. */
export async function download(path, name) {
  const url = URL.createObjectURL(await (await request(path)).blob());
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

const RETRY_MS = 3000;
const SILENT_MS = 40_000; // the server sends something every 15 s

/** Wait until the tab is visible. */
const visible = () => new Promise((resolve) => {
  if (!document.hidden) resolve();
  else document.addEventListener("visibilitychange", () => resolve(visible()), { once: true });
});

/**
 * Call `onNumbers` with the number of changes of each run, now and after each change, and `onState`
 * with whether the server answers. Connects again for ever. A hidden tab is not connected: a browser
 * allows six connections to a server, and the seventh tab would wait for ever.
 */
export async function follow(onNumbers, onState) {
  for (;;) {
    await visible();
    const abort = new AbortController();
    const leave = (event) => { if (document.hidden || event.type === "pagehide") abort.abort(); };
    document.addEventListener("visibilitychange", leave);
    addEventListener("pagehide", leave);
    let timer;
    const alive = () => {
      clearTimeout(timer);
      timer = setTimeout(() => abort.abort(), SILENT_MS);
    };
    try {
      alive();
      const response = await request("events", abort.signal);
      onState(true);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        alive();
        const events = (text + value).split("\n\n");
        text = events.pop();
        for (const event of events) {
          const line = event.split("\n").find((part) => part.startsWith("data: "));
          if (line) onNumbers(JSON.parse(line.slice(6)).runs);
        }
      }
    } catch (error) {
      if (error.status === 401) return;
    } finally {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", leave);
      removeEventListener("pagehide", leave);
    }
    onState(false);
    if (document.hidden) continue;
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}
