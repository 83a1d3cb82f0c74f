// Reads pages in Chromium, through its DevTools protocol.
//
// node browser.mjs WEBSOCKET    reads {base, pages, search} from standard input, as JSON, and prints
//                               {faults, found}: what went wrong, as [page, fault], and the paths
//                               that the search finds
import { readFileSync } from "node:fs";

const TABS = 4;
const PATIENCE_MS = 30_000;

const asked = JSON.parse(readFileSync(0, "utf8"));
const socket = new WebSocket(process.argv[2]);
const waiting = new Map();
const listeners = new Map();
let last = 0;

socket.onmessage = ({ data }) => {
  const message = JSON.parse(data);
  if (message.id !== undefined) {
    const { resolve, reject } = waiting.get(message.id);
    waiting.delete(message.id);
    message.error ? reject(new Error(message.error.message)) : resolve(message.result);
  } else {
    listeners.get(message.sessionId)?.(message.method, message.params);
  }
};

function call(method, params = {}, sessionId = undefined) {
  const id = ++last;
  socket.send(JSON.stringify({ id, method, params, sessionId }));
  return new Promise((resolve, reject) => waiting.set(id, { resolve, reject }));
}

class Tab {
  static async open(faults) {
    const tab = new Tab();
    const { targetId } = await call("Target.createTarget", { url: "about:blank" });
    const { sessionId } = await call("Target.attachToTarget", { targetId, flatten: true });
    tab.session = sessionId;
    tab.faults = faults;
    listeners.set(sessionId, (method, params) => tab.hear(method, params));
    for (const domain of ["Page", "Network", "Runtime", "Log"]) await tab.call(`${domain}.enable`);
    return tab;
  }

  call(method, params) {
    return call(method, params, this.session);
  }

  hear(method, params) {
    const fault = (text) => this.faults.push([this.page, text]);
    if (method === "Page.loadEventFired") this.loaded?.();
    if (method === "Runtime.exceptionThrown") fault(params.exceptionDetails.text);
    if (method === "Log.entryAdded" && params.entry.level === "error") fault(params.entry.text);
    if (method === "Runtime.consoleAPICalled" && params.type === "error") fault("console.error");
    if (method === "Network.loadingFailed" && !params.canceled) fault(params.errorText);
    if (method === "Network.responseReceived" && params.response.status >= 400)
      fault(`${params.response.status}: ${params.response.url}`);
    if (method === "Network.requestWillBeSent" && !/^(data|blob):/.test(params.request.url))
      if (!params.request.url.startsWith(asked.base)) fault(`requests ${params.request.url}`);
  }

  async visit(page) {
    this.page = page;
    const loaded = new Promise((resolve, reject) => {
      this.loaded = resolve;
      setTimeout(() => reject(new Error(`${page} does not load`)), PATIENCE_MS).unref();
    });
    await this.call("Page.navigate", { url: asked.base + page });
    await loaded;
    const heading = await this.evaluate("document.querySelector('h1')?.textContent");
    if (!heading) this.faults.push([page, "has no heading"]);
  }

  // Types into the search of the start page, as a reader does. It is in a shadow tree.
  async search(text) {
    await this.visit("");
    await this.call("Page.bringToFront");
    const inside = (selector) =>
      `[...document.body.children].flatMap((each) =>
         [...(each.shadowRoot?.querySelectorAll("${selector}") ?? [])])`;
    await this.evaluate("document.querySelector('.md-search__button').click()");
    await this.until(`document.activeElement.shadowRoot?.activeElement?.matches("input")`);
    await this.call("Input.insertText", { text });
    await this.until(`${inside("[role=option]")}.length`);
    return this.evaluate(`${inside("[role=option]")}.map((each) => each.pathname)`);
  }

  async until(condition) {
    const state = `new Promise((done) => {
      const look = () => (${condition} ? done(true) : requestAnimationFrame(look));
      setTimeout(() => done(false), ${PATIENCE_MS});
      look();
    })`;
    if (!(await this.evaluate(state))) throw new Error(`never: ${condition}`);
  }

  async evaluate(expression) {
    const { result, exceptionDetails } = await this.call("Runtime.evaluate", {
      expression,
      awaitPromise: true,
      returnByValue: true,
    });
    if (exceptionDetails) throw new Error(exceptionDetails.text);
    return result.value;
  }
}

await new Promise((resolve, reject) => {
  socket.onopen = resolve;
  socket.onerror = () => reject(new Error("no connection to the browser"));
});
const faults = [];
const pages = [...asked.pages];
const tabs = await Promise.all(Array.from({ length: TABS }, () => Tab.open(faults)));
await Promise.all(
  tabs.map(async (tab) => {
    for (let page; (page = pages.shift()) !== undefined; ) await tab.visit(page);
  }),
);
const found = asked.search ? await tabs[0].search(asked.search) : [];
console.log(JSON.stringify({ faults, found }));
await call("Browser.close");
process.exit(0);
