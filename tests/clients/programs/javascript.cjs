// node javascript.cjs URL MODEL: OpenAI's JavaScript client streams, keeps a conversation and meets an error.
// Prints one JSON object.
const { OpenAI, NotFoundError } = require("openai");

async function main(baseURL, model) {
  const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
  const messages = [{ role: "user", content: "What is the capital of France?" }];
  const common = { model, temperature: 0, max_tokens: 24 };

  let streamed = "";
  let usage = null;
  const stream = await client.chat.completions.create({
    ...common,
    messages,
    stream: true,
    stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    streamed += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  const whole = await client.chat.completions.create({ ...common, messages });

  messages.push({ role: "assistant", content: streamed }, { role: "user", content: "Say that once more." });
  const runner = client.chat.completions.stream({ ...common, messages });
  const second = await runner.finalContent();

  let text = "";
  for await (const event of await client.responses.create({ model, input: "Say hi.", max_output_tokens: 8, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
    if (event.type === "response.completed" || event.type === "response.incomplete") {
      if (event.response.output_text !== undefined && event.response.output_text !== text) throw new Error("texts differ");
    }
  }

  let refused = false;
  try {
    await client.models.retrieve("no/such model");
  } catch (error) {
    refused = error instanceof NotFoundError && error.code === "model_not_found" && Boolean(error.requestID);
  }
  console.log(JSON.stringify({ streamed, whole: whole.choices[0].message.content, second, usage, response: text, refused }));
}

main(...process.argv.slice(2)).catch((error) => {
  console.error(error);
  process.exit(1);
});
