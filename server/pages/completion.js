// One streamed chat completion and its facts: worker, cached tokens, time to first token, rate.

import { readEvents } from "./sse.js";

const API = "chat/api/v1/";

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const headers = (key) => ({ "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) });

async function refusal(response) {
  const body = await response.json().catch(() => ({}));
  return new ApiError(body.error?.message ?? `The gateway answered ${response.status}.`, response.status);
}

export async function listModels(key) {
  const response = await fetch(`${API}models`, { headers: headers(key) });
  if (!response.ok) throw await refusal(response);
  return (await response.json()).data.map((model) => model.id);
}

/**
 * Streams an answer to `request`; `onText(text)` gets each part. Resolves to the facts of the answer.
 * An aborted `signal` ends it early and is no error. Throws ApiError, or what fetch throws.
 */
export async function complete(request, key, signal, onText) {
  const began = performance.now();
  const facts = { request: null, worker: null, cached: null, prompt: null, tokens: null, ttftS: null, perS: null, end: null };
  let last = began;
  try {
    const body = JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } });
    const response = await fetch(`${API}chat/completions`, { method: "POST", headers: headers(key), body, signal });
    if (!response.ok) throw await refusal(response);
    facts.request = response.headers.get("x-request-id");
    facts.worker = response.headers.get("x-headstart-worker");
    let complete = false;
    for await (const { data } of readEvents(response)) {
      if (data === "[DONE]") {
        complete = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, 0);
      if (chunk.usage) take(facts, chunk.usage);
      const choice = chunk.choices?.[0];
      const { reasoning_content, reasoning, content } = choice?.delta ?? {};
      const text = (reasoning_content ?? reasoning ?? "") + (content ?? "");
      if (text) {
        last = performance.now();
        facts.ttftS ??= (last - began) / 1000;
        onText(text);
      }
      if (choice?.finish_reason) facts.end = choice.finish_reason;
    }
    if (!complete) throw new ApiError("The answer was cut off: the connection to the gateway was lost.", 0);
  } catch (error) {
    if (!signal.aborted) throw error;
    facts.end = "aborted";
  }
  const spentS = (last - began) / 1000 - (facts.ttftS ?? 0);
  if (facts.tokens > 1 && spentS > 0) facts.perS = (facts.tokens - 1) / spentS;
  return facts;
}

function take(facts, usage) {
  facts.prompt = usage.prompt_tokens;
  facts.tokens = usage.completion_tokens;
  facts.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
}
