// Starts the page: the two views, and the look at the cluster every second while the page is visible.

import { fetchJson } from "./api.js";
import { startChat } from "./chat.js";
import { showCluster, showUnknown, startCluster } from "./cluster.js";
import { apiKey, showSettings, startSettings } from "./settings.js";

const PERIOD_MS = 1000;

const status = document.getElementById("status");
const rate = document.getElementById("rate");
const hintModel = document.getElementById("hint-model");

let timer = 0;
let isLooking = false;
let hasAskedForKey = false;

function showView() {
  const view = location.hash === "#/cluster" ? "cluster" : "chat";
  for (const section of document.querySelectorAll("section[data-view]")) section.hidden = section.dataset.view !== view;
  for (const link of document.querySelectorAll("a[data-view]")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

/** One look; the next one a second after its answer, unless nobody would see it. */
async function look() {
  clearTimeout(timer);
  if (isLooking || document.visibilityState === "hidden") return;
  isLooking = true;
  try {
    show(await fetchJson("admin/cluster", apiKey()));
  } catch (error) {
    showFailure(error);
  }
  isLooking = false;
  timer = setTimeout(look, PERIOD_MS);
}

function show(cluster) {
  const { status: state, progress } = cluster.state;
  setStatus(state === "ok" ? "ready" : state);
  if (state === "ok") rate.textContent = `${cluster.tokens_per_s.toFixed(1)} tokens/s`;
  else rate.textContent = state === "loading" ? `${Math.floor(100 * progress)} %` : "";
  hintModel.textContent = `Ask ${cluster.model} something.`;
  document.title = `${cluster.model} – lamina`;
  showCluster(cluster);
}

function showFailure(error) {
  rate.textContent = "";
  setStatus(error.status === 401 ? "API key needed" : "no connection");
  showUnknown(error.message);
  if (error.status === 401 && !hasAskedForKey) {
    hasAskedForKey = true;
    showSettings(true, "api_key");
  }
}

/** Only changes, for screen readers tell each one. */
function setStatus(state) {
  if (status.dataset.state === state) return;
  status.dataset.state = state;
  status.textContent = state;
}

startSettings(look);
startChat();
startCluster();
window.addEventListener("hashchange", showView);
document.addEventListener("visibilitychange", look);
showView();
look();
