// Serves @copilotkit/aimock on a free port of loopback, prints the address, and ends when stdin closes.
//   node launch_aimock.mjs FOLDER     (FOLDER holds node_modules)
import { pathToFileURL } from "node:url";

const entry = `${process.argv[2]}/node_modules/@copilotkit/aimock/dist/index.js`;
const { LLMock } = await import(pathToFileURL(entry).href);
const server = new LLMock({ host: "127.0.0.1", port: 0, logLevel: "warn" });
await server.start();
console.log(server.url);
process.stdin.on("close", () => process.exit(0)).resume();
