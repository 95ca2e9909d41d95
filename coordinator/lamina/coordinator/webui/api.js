// The server's HTTP API as the page needs it: JSON, and a streamed chat completion. Knows no element of the page.

/** A refusal of the server, or no answer at all (status 0). */
export class ApiError extends Error {
  constructor(message, status, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The JSON answer of a GET. Throws ApiError. */
export async function fetchJson(path, apiKey) {
  return (await request(path, { headers: headersFor(apiKey) })).json();
}

/**
 * Stream a chat completion: yields {text} for each piece, {thought} for each before the answer, {finish} with the reason, and {usage, timings} at the end.
 * Throws ApiError, also when the stream breaks off; AbortError when `signal` is aborted.
 */
export async function* streamChat(body, apiKey, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headersFor(apiKey) },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of serverSentEvents(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message, response.status, event.error.code);
    for (const choice of event.choices) {
      if (choice.delta?.reasoning_content) yield { thought: choice.delta.reasoning_content };
      if (choice.delta?.content) yield { text: choice.delta.content };
      if (choice.finish_reason) yield { finish: choice.finish_reason };
    }
    if (event.usage || event.timings) yield { usage: event.usage, timings: event.timings };
  }
  throw new ApiError("the connection ended in the middle of the answer", 0);
}

/** The data of each event; comments (pings) are passed over. */
async function* serverSentEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event.startsWith("data: ")) yield event.slice("data: ".length);
    }
  }
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the coordinator does not answer", 0);
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  const { message = `the server answered ${response.status}`, code = null } = answer?.error ?? {};
  throw new ApiError(message, response.status, code);
}

function headersFor(apiKey) {
  return apiKey ? { Authorization: `Bearer ${apiKey}` } : {};
}
