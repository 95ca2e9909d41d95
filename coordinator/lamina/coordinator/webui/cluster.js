// The cluster view: figures of the whole, what is wrong, and the picture of the pipeline.

import { clusterCards } from "./cards.js";
import { drawPicture } from "./picture.js";

const totals = document.getElementById("totals");
const notice = document.getElementById("notice");
const picture = document.getElementById("picture");

let drawn = null; // what the picture shows
let drawnWidth = 0;

/** Keep the picture as wide as its place. */
export function startCluster() {
  new ResizeObserver(() => {
    if (picture.clientWidth !== drawnWidth) draw();
  }).observe(picture);
}

/** Show what /admin/cluster answered. */
export function showCluster(cluster) {
  setNotice(...noticeOf(cluster.state));
  totals.replaceChildren(...figuresOf(cluster).map(([name, value]) => figure(name, value)));
  drawn = clusterCards(cluster);
  draw();
}

/** Nothing is known: say why, and don't show what was true before. */
export function showUnknown(reason) {
  setNotice(reason, true);
  totals.replaceChildren();
  drawn = null;
  draw();
}

/** A view that is not shown has no width; it is drawn when it gets one. */
function draw() {
  drawnWidth = picture.clientWidth;
  picture.replaceChildren(...(drawn && drawnWidth ? [drawPicture(drawn, drawnWidth)] : []));
}

function figuresOf(cluster) {
  return [
    ["Model", cluster.model],
    ["Tokens/s", cluster.tokens_per_s.toFixed(1)],
    ...(cluster.state.status === "ok"
      ? [["Running", String(cluster.num_requests_running)], ["Waiting", String(cluster.num_requests_waiting)]]
      : [["Open requests", String(cluster.num_requests_open)]]),
    ["KV cache in use", `${(100 * cluster.kv_cache_usage_ratio).toFixed(1)} %`],
    ["Context", `${cluster.max_context} tokens`],
    ["Epoch", String(cluster.epoch)],
  ];
}

/** [text, whether something is wrong]; "" when all is well. */
function noticeOf(state) {
  if (state.status === "ok") return ["", false];
  if (state.status === "draining") return ["The server shuts down; it finishes what runs, nothing new.", false];
  if (state.status === "unavailable") return [`The model is not available: ${state.reason}`, true];
  if (state.waiting_for) return [`Waiting for ${state.waiting_for}`, false];
  return [state.stages.length ? "The workers read their weights." : "The split is being made.", false];
}

function setNotice(text, isBad) {
  if (notice.textContent !== text) notice.textContent = text;
  notice.classList.toggle("bad", isBad);
  notice.hidden = text === "";
}

function figure(name, value) {
  const group = document.createElement("div");
  for (const [tag, text] of [["dt", name], ["dd", value]]) {
    const element = document.createElement(tag);
    element.textContent = text;
    group.append(element);
  }
  return group;
}
