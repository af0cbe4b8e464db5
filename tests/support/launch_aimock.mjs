// Serves @copilotkit/aimock on a free port of loopback, prints the address, and ends when stdin closes.
//   node launch_aimock.mjs FOLDER     (FOLDER holds node_modules)
import http from "node:http";
import { syncBuiltinESMExports } from "node:module";
import { pathToFileURL } from "node:url";

// Node closes a connection after five idle seconds. A client on a busy machine may send its next request too late.
const create = http.createServer;
http.createServer = (...given) => Object.assign(create(...given), { keepAliveTimeout: 300_000 });
syncBuiltinESMExports();

const entry = `${process.argv[2]}/node_modules/@copilotkit/aimock/dist/index.js`;
const { LLMock } = await import(pathToFileURL(entry).href);
const server = new LLMock({ host: "127.0.0.1", port: 0, logLevel: "warn" });
await server.start();
console.log(server.url);
process.stdin.on("close", () => process.exit(0)).resume();
