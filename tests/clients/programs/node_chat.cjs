// Node's own clients: fetch, and http with fields that offer another protocol. Run: node node_chat.cjs BASE MODEL
const http = require("http");
const [base, model] = process.argv.slice(2);
const body = JSON.stringify({ model, max_tokens: 4, messages: [{ role: "user", content: "Hi" }] });
const agent = new http.Agent({ keepAlive: true });

function post(headers) {
  return new Promise((resolve, reject) => {
    const options = { method: "POST", agent, headers: { "content-type": "application/json", ...headers } };
    const request = http.request(`${base}/chat/completions`, options, (response) => {
      let text = "";
      response.on("data", (part) => (text += part));
      response.on("end", () => resolve(JSON.parse(text).choices ? response.statusCode : text));
    });
    request.on("error", reject);
    request.write(body.slice(0, 20));
    request.end(body.slice(20));
  });
}

async function main() {
  const answer = await fetch(`${base}/chat/completions`, {
    method: "POST", headers: { "content-type": "application/json" }, body,
  });
  const statuses = [answer.status];
  const length = { "content-length": Buffer.byteLength(body) };
  for (const upgrade of ["h2c", "websocket", "TLS/1.0"]) {
    for (const framing of [length, { "transfer-encoding": "chunked" }]) {
      statuses.push(await post({ connection: "Upgrade", upgrade, ...framing }));
    }
  }
  statuses.push(await post({ expect: "100-continue", ...length }));
  console.log(JSON.stringify({ statuses }));
  agent.destroy();
}

main();
