// node ai_sdk.cjs URL MODEL: Vercel's AI SDK streams, keeps a conversation, gets an object and calls a tool.
// Prints one JSON object.
const { generateText, streamText, tool, stepCountIs, Output } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { z } = require("zod");

const City = z.object({ name: z.string().max(12), is_capital: z.boolean() });

async function main(baseURL, name) {
  const settings = { baseURL, name: "headstart", apiKey: "unused", supportsStructuredOutputs: true, includeUsage: true };
  const model = createOpenAICompatible(settings)(name);
  const common = { model, temperature: 0, maxOutputTokens: 24, maxRetries: 0 };
  const messages = [{ role: "user", content: "What is the capital of France?" }];

  const first = await generateText({ ...common, messages });
  const stream = streamText({ ...common, messages });
  let streamed = "";
  for await (const text of stream.textStream) streamed += text;
  const usage = await stream.usage;
  messages.push(...first.response.messages, { role: "user", content: "Say that once more." });
  const second = await generateText({ ...common, messages });

  const limited = { ...common, maxOutputTokens: 80 };
  const city = await generateText({ ...limited, output: Output.object({ schema: City }), prompt: "Paris, as JSON." });

  const calls = [];
  const execute = async ({ name }) => {
    calls.push(name);
    return `${name} is large.`;
  };
  const inputSchema = z.object({ name: z.enum(["Paris", "Rome"]) });
  const after = await generateText({
    ...limited,
    tools: { tell_city: tool({ description: "Tell of a city.", inputSchema, execute }) },
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : { type: "tool", toolName: "tell_city" } }),
    stopWhen: stepCountIs(2),
    prompt: "Tell me of Paris.",
  });

  const responses = createOpenAI({ baseURL, apiKey: "unused" }).responses(name);
  const response = await generateText({ ...common, model: responses, prompt: "What is the capital of France?" });
  console.log(
    JSON.stringify({
      first: first.text,
      streamed,
      usage,
      second: second.text,
      cached: second.usage.inputTokenDetails.cacheReadTokens,
      city: city.output,
      calls,
      after: after.text,
      response: response.text,
    }),
  );
}

main(...process.argv.slice(2)).catch((error) => {
  console.error(error);
  process.exit(1);
});
