// The settings panel: sampling parameters, system prompt, API key. Kept in sessionStorage, so for this tab only.

const STORED = "lamina.settings";
const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "seed"];

const form = document.getElementById("settings-form");
const panel = document.getElementById("settings");
const opener = document.getElementById("settings-button");

/** Fill the form with what was stored, and store what is typed. `onKey` is called when the API key changes. */
export function startSettings(onKey) {
  restore();
  form.addEventListener("input", store);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.elements.api_key.addEventListener("change", onKey);
  opener.addEventListener("click", () => showSettings(panel.hidden));
  document.getElementById("settings-close").addEventListener("click", () => showSettings(false));
  document.getElementById("settings-reset").addEventListener("click", reset);
  panel.addEventListener("keydown", (event) => {
    if (event.key === "Escape") showSettings(false);
  });
}

/** Open or close the panel; `field` is the name of the input to put the cursor into. */
export function showSettings(isOpen, field = "system") {
  panel.hidden = !isOpen;
  opener.setAttribute("aria-expanded", String(isOpen));
  (isOpen ? form.elements[field] : opener).focus();
}

/** The API key, "" without one. */
export function apiKey() {
  return form.elements.api_key.value.trim();
}

/** The system prompt, "" without one. */
export function systemPrompt() {
  return form.elements.system.value.trim();
}

/** The fields that are filled, as request parameters; null, with the panel open at it, if one is out of range. */
export function samplingParameters() {
  const wrong = NUMBERS.find((name) => !form.elements[name].checkValidity());
  if (wrong) {
    showSettings(true, wrong);
    form.elements[wrong].reportValidity();
    return null;
  }
  const filled = NUMBERS.filter((name) => form.elements[name].value !== "");
  return Object.fromEntries(filled.map((name) => [name, form.elements[name].valueAsNumber]));
}

function restore() {
  for (const [name, value] of Object.entries(JSON.parse(sessionStorage.getItem(STORED) ?? "{}"))) {
    if (form.elements[name]) form.elements[name].value = value;
  }
}

function store() {
  sessionStorage.setItem(STORED, JSON.stringify(Object.fromEntries(new FormData(form))));
}

/** All but the key, which is no matter of taste. */
function reset() {
  for (const name of ["system", ...NUMBERS]) form.elements[name].value = "";
  store();
}
