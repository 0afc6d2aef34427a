// Reads pipelines with Node's own server, which has llhttp: a base64 line in, a line of its requests out, as JSON.
const http = require("http");
const { Duplex } = require("stream");
const readline = require("readline");

function take(request, response) {
  const parts = [];
  const read = request.socket.read_requests;
  request.on("data", (part) => parts.push(part));
  request.on("end", () => {
    const body = Buffer.concat(parts).toString("base64");
    read.push([request.method, request.url, body]);
    response.end("ok");
  });
}

const server = http.createServer({ requireHostHeader: false, keepAliveTimeout: 0 }, take);
server.on("checkContinue", take);
server.on("checkExpectation", take);
server.on("clientError", (_, socket) => socket.destroy());

async function read(data) {
  const socket = new Duplex({ read() {}, write(_part, _encoding, done) { done(); } });
  socket.read_requests = [];
  socket.setTimeout = socket.setNoDelay = socket.setKeepAlive = () => socket;
  const closed = new Promise((resolve) => socket.on("close", resolve));
  server.emit("connection", socket);
  socket.push(data);
  let quiet = 0;
  for (let before = -1; quiet < 4 && !socket.destroyed; before = socket.read_requests.length) {
    quiet = socket.read_requests.length === before ? quiet + 1 : 0;
    await new Promise(setImmediate);
  }
  socket.destroy();
  await closed;
  return socket.read_requests;
}

(async () => {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    process.stdout.write(JSON.stringify(await read(Buffer.from(line, "base64"))) + "\n");
  }
  process.exit(0);
})();
