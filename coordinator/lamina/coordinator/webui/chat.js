// The conversation: what was said, the answer that is being written, its speed, stopping it.

import { streamChat } from "./api.js";
import { renderMarkdown } from "./markdown.js";
import { apiKey, samplingParameters, showSettings, systemPrompt } from "./settings.js";

const log = document.getElementById("log");
const hint = document.getElementById("hint");
const form = document.getElementById("composer");
const prompt = document.getElementById("prompt");
const send = document.getElementById("send");
const stop = document.getElementById("stop");

let messages = []; // {role, content}, without the system prompt
let running = null; // the AbortController of the answer that is being written

/** Connect the elements. */
export function startChat() {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  prompt.addEventListener("input", fitPrompt);
  stop.addEventListener("click", stopAnswer);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stopAnswer();
  });
  document.getElementById("new-chat").addEventListener("click", startAnew);
}

function submit() {
  const text = prompt.value.trim();
  if (!text || running) return;
  const parameters = samplingParameters();
  if (parameters) answer(text, parameters);
}

async function answer(text, parameters) {
  const question = addTurn("user");
  question.body.textContent = text;
  const reply = new Reply(addTurn("assistant"));
  const controller = new AbortController();
  const system = systemPrompt();
  const history = [...messages, { role: "user", content: text }];
  setPrompt("");
  setRunning(controller);
  try {
    const sent = system ? [{ role: "system", content: system }, ...history] : history;
    for await (const piece of streamChat({ ...parameters, messages: sent }, apiKey(), controller.signal)) {
      reply.take(piece);
    }
    reply.end();
  } catch (error) {
    reply.fail(error, controller.signal.aborted);
  }
  if (running !== controller) return; // another conversation has begun
  setRunning(null);
  if (reply.text) {
    messages = [...history, { role: "assistant", content: reply.text }];
  } else if (reply.hasFailed) {
    question.element.classList.add("unanswered");
    if (!prompt.value) setPrompt(text);
  }
  prompt.focus();
}

/** The answer as it comes, drawn at most once a frame. */
class Reply {
  constructor(turn) {
    this.turn = turn;
    this.text = "";
    this.thought = "";
    this.hasFailed = false;
    this.numPieces = 0;
    this.startedMs = performance.now();
    this.firstMs = 0;
    this.lastMs = 0;
    this.finish = null;
    this.summary = null;
    this.isScheduled = false;
    turn.element.setAttribute("aria-busy", "true");
    turn.note.textContent = "waiting for the first token";
  }

  take(piece) {
    if (piece.finish) this.finish = piece.finish;
    if (piece.timings) this.summary = piece;
    if (!piece.text && !piece.thought) return;
    this.text += piece.text ?? "";
    this.thought += piece.thought ?? "";
    this.numPieces += 1;
    this.lastMs = performance.now();
    this.firstMs ||= this.lastMs;
    if (this.isScheduled) return;
    this.isScheduled = true;
    requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.isScheduled = false;
    follow(() => {
      if (this.thought) showThought(this.turn, this.thought);
      renderMarkdown(this.turn.body, this.text);
    });
    if (this.turn.element.ariaBusy === "true") this.turn.note.textContent = this.measured();
  }

  end() {
    const reasons = { length: "cut at the token limit", stop: this.text ? "" : "empty answer" };
    this.close([reasons[this.finish] ?? this.finish, this.summary ? summaryText(this.summary) : this.measured()]);
  }

  fail(error, isStopped) {
    this.hasFailed = true;
    this.close([isStopped ? "stopped" : "", this.text ? this.measured() : ""]);
    if (isStopped) return;
    this.turn.error.textContent = error.message;
    this.turn.error.hidden = false;
    follow(() => {});
    if (error.status === 401) showSettings(true, "api_key");
  }

  close(notes) {
    this.turn.element.setAttribute("aria-busy", "false");
    this.draw();
    this.turn.note.textContent = notes.filter(Boolean).join(" · ");
  }

  /** Seen from here: pieces of text are tokens but for those that end within a letter. */
  measured() {
    const seconds = (this.lastMs - this.firstMs) / 1000;
    const rate = seconds > 0.2 ? `about ${((this.numPieces - 1) / seconds).toFixed(1)} tokens/s` : "";
    return rate && `${rate} · first token after ${((this.firstMs - this.startedMs) / 1000).toFixed(2)} s`;
  }
}

/** What the server measured. */
function summaryText({ usage, timings }) {
  const parts = [`${timings.predicted_n} tokens`];
  if (timings.predicted_per_second) parts.push(`${timings.predicted_per_second.toFixed(1)} tokens/s`);
  const cached = timings.cache_n ? `, ${timings.cache_n} of them cached` : "";
  if (usage) parts.push(`prompt ${usage.prompt_tokens} tokens${cached}, ${(timings.prompt_ms / 1000).toFixed(2)} s`);
  return parts.join(" · ");
}

function addTurn(role) {
  const element = document.createElement("article");
  element.className = `turn ${role}`;
  const make = (tag, className) => {
    const child = document.createElement(tag);
    child.className = className;
    element.append(child);
    return child;
  };
  make("h2", "hidden-label").textContent = role === "user" ? "You" : "Model";
  const turn = { element, body: make("div", "body"), error: make("p", "error"), note: make("p", "note") };
  turn.error.hidden = true;
  turn.error.setAttribute("role", "alert");
  hint.hidden = true;
  log.append(element);
  log.scrollTop = log.scrollHeight;
  return turn;
}

/** What the model thought before it answered, to be folded away. */
function showThought(turn, text) {
  if (!turn.thought) {
    const details = document.createElement("details");
    details.className = "thought";
    details.open = true;
    details.append(document.createElement("summary"), document.createElement("div"));
    details.firstChild.textContent = "Thoughts";
    turn.body.before(details);
    turn.thought = details.lastChild;
  }
  turn.thought.textContent = text;
}

/** Change the log, and stay at its end if that is where the reader is. */
function follow(change) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function stopAnswer() {
  running?.abort();
}

function startAnew() {
  running?.abort();
  setRunning(null);
  messages = [];
  log.replaceChildren(hint);
  hint.hidden = false;
  prompt.focus();
}

function setRunning(controller) {
  running = controller;
  send.hidden = controller !== null;
  stop.hidden = controller === null;
}

function setPrompt(text) {
  prompt.value = text;
  fitPrompt();
}

/** As high as its text; the style sheet sets the limit. */
function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}
