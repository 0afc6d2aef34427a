// The chat page: conversations on the left, the thread, and the composer.

import { complete, listModels } from "./completion.js";
import { Conversations } from "./conversations.js";
import { byId, h, setText } from "./dom.js";
import { MessageView, welcome } from "./messages.js";

const API_KEY = "headstart.api-key";
const thread = byId("thread");
const prompt = byId("prompt");
const conversations = new Conversations();
let running = null;

const announce = (text) => setText(byId("announce"), text);
const apiKey = () => sessionStorage.getItem(API_KEY) ?? "";

function warn(text) {
  byId("notice").hidden = !text;
  setText(byId("notice"), text);
}

// --- models -------------------------------------------------------------------------------------------------------

async function loadModels() {
  const select = byId("model");
  try {
    const names = await listModels(apiKey());
    if (!names.length) throw new Error("No worker is ready yet. Trying again.");
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    if (names.includes(chosen)) select.value = chosen;
    warn("");
  } catch (error) {
    if (error.status === 401) {
      warn("The gateway requires an API key: enter it under \u201cSettings of this chat\u201d.");
      byId("settings").open = true;
      return;
    }
    warn(error instanceof TypeError ? "The gateway cannot be reached. Is it running? Trying again." : error.message);
    setTimeout(loadModels, 2000);
  }
}

// --- conversations ------------------------------------------------------------------------------------------------

function showList() {
  const items = conversations.all.map((conversation) => {
    const current = conversation === conversations.current;
    const pick = h("button", { class: "pick", type: "button", "aria-current": current ? "true" : null, onclick: () => open(conversation.id) }, conversation.title);
    const label = `Delete \u201c${conversation.title}\u201d`;
    const remove = h("button", { class: "remove", type: "button", "aria-label": label, title: "Delete", onclick: () => drop(conversation.id) }, "\u00d7");
    return h("li", {}, pick, remove);
  });
  byId("conversations").replaceChildren(...items);
}

function showThread() {
  const { messages } = conversations.current;
  thread.replaceChildren(...(messages.length ? messages.map((message) => new MessageView(message, retry).element) : [welcome(ask)]));
  thread.scrollTop = thread.scrollHeight;
}

function showSettings() {
  const { system, temperature, maxTokens } = conversations.current;
  byId("system").value = system;
  byId("temperature").value = String(temperature);
  setText(byId("temperature-value"), Number(temperature).toFixed(1));
  byId("max-tokens").value = String(maxTokens);
  byId("api-key").value = apiKey();
}

function show() {
  showList();
  showThread();
  showSettings();
}

function open(id) {
  running?.abort();
  conversations.pick(id);
  setSide(false);
  show();
  prompt.focus();
}

function drop(id) {
  if (conversations.current.id === id) running?.abort();
  conversations.remove(id);
  show();
}

function setSide(isOpen) {
  byId("side").classList.toggle("open", isOpen);
  byId("open-side").setAttribute("aria-expanded", String(isOpen));
}

// --- asking -------------------------------------------------------------------------------------------------------

function ask(text) {
  if (running || !text.trim()) return;
  const conversation = conversations.current;
  if (!conversation.messages.length) conversation.title = text.trim().slice(0, 60);
  conversation.messages.push({ role: "user", content: text.trim() });
  conversations.touch(conversation);
  show();
  answer(conversation);
}

/** Asks again for an answer that failed or was stopped. */
function retry() {
  if (running) return;
  const conversation = conversations.current;
  while (conversation.messages.at(-1)?.role === "assistant") conversation.messages.pop();
  showThread();
  answer(conversation);
}

function requestOf({ system, temperature, maxTokens, messages }) {
  const sent = messages.filter(({ content }) => content).map(({ role, content }) => ({ role, content }));
  return {
    model: byId("model").value,
    messages: system.trim() ? [{ role: "system", content: system.trim() }, ...sent] : sent,
    temperature,
    max_tokens: maxTokens,
  };
}

async function answer(conversation) {
  const request = requestOf(conversation);
  const message = { role: "assistant", content: "" };
  conversation.messages.push(message);
  const view = new MessageView(message, retry);
  thread.append(view.element);
  running = new AbortController();
  setRunning(true, view);
  let frame = 0;
  const draw = () => {
    frame = 0;
    const follows = thread.scrollHeight - thread.scrollTop - thread.clientHeight < 80;
    view.show();
    if (follows) thread.scrollTop = thread.scrollHeight;
  };
  thread.scrollTop = thread.scrollHeight;
  try {
    message.facts = await complete(request, apiKey(), running.signal, (text) => {
      message.content += text;
      frame ||= requestAnimationFrame(draw);
    });
    announce(message.facts.end === "aborted" ? "Answer stopped" : "Answer complete");
  } catch (error) {
    message.error = error instanceof TypeError ? "The gateway cannot be reached. Is it running?" : error.message;
    message.final = error.status === 400 || error.status === 413;
    if (error.status === 401) byId("settings").open = true;
    announce(message.error);
  }
  cancelAnimationFrame(frame);
  running = null;
  setRunning(false, view);
  conversations.touch(conversation);
  showList();
  draw();
}

function setRunning(isRunning, view) {
  view.writing = isRunning;
  byId("send").hidden = isRunning;
  byId("stop").hidden = !isRunning;
}

// --- controls -----------------------------------------------------------------------------------------------------

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return;
  const text = prompt.value;
  prompt.value = "";
  ask(text);
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", () => {
  running?.abort();
  conversations.create();
  setSide(false);
  show();
  prompt.focus();
});
byId("open-side").addEventListener("click", () => setSide(!byId("side").classList.contains("open")));
byId("system").addEventListener("change", (event) => change({ system: event.target.value }));
byId("temperature").addEventListener("input", (event) => change({ temperature: Number(event.target.value) }));
byId("max-tokens").addEventListener("change", (event) => {
  change({ maxTokens: Math.min(32768, Math.max(1, Math.round(Number(event.target.value)) || 512)) });
});
byId("api-key").addEventListener("change", (event) => {
  sessionStorage.setItem(API_KEY, event.target.value.trim());
  loadModels();
});

function change(settings) {
  Object.assign(conversations.current, settings);
  conversations.save();
  showSettings();
}

show();
loadModels();
prompt.focus();
