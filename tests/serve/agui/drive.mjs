// Drives HttpAgents of one version of @ag-ui/client, as it is told line by line, and prints what each has and sees.
//
//   node drive.mjs FOLDER
//
// FOLDER has the client in its node_modules. On stdin comes a JSON object a line, on stdout goes one a line. Each
// names the `client` it is for, and a client's first also says `url` and `thread`:
//   {do: "say", text}            add a user message, then run
//   {do: "run", resume, tools}   run with what there is
//   {do: "answer", call, content, error}   add a tool message, then run
//   {do: "connect"}              GET /threads/THREAD/events, by an agent that has nothing yet
//                                with `joined`, a line says so as soon as it has the messages
//   {do: "leave", after}         run with the text given, and hang up after that many events
// Each answers {messages, state, interrupts, events, warnings, error}.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";
import { join, resolve } from "node:path";

const [folder] = process.argv.slice(2);
const require = createRequire(pathToFileURL(join(resolve(folder), "here.js")));
const { HttpAgent, runHttpRequest, transformHttpEventStream } = require("@ag-ui/client");

let warnings = [];
console.warn = (...said) => warnings.push(said.map(String).join(" "));
console.error = () => {}; // it says what is in `error` too

class Agent extends HttpAgent {
  // The client leaves to each server how a conversation is joined that goes on already.
  connect() {
    const where = `${this.server}/threads/${this.threadId}/events${this.older ? "?v=0" : ""}`;
    const headers = { Accept: "text/event-stream", ...this.headers };
    return transformHttpEventStream(runHttpRequest(() => fetch(where, { headers })));
  }
}

function made(url, thread) {
  const agent = new Agent({ url: `${url}/agent`, threadId: thread, headers: { Authorization: `Bearer ${process.env.TOKEN}` } });
  agent.server = url;
  agent.older = process.env.OLDER === "1";
  return agent;
}

const clients = new Map();

function clientOf(told) {
  if (!clients.has(told.client)) {
    const { client: name, url, thread } = told;
    clients.set(name, { name, url, thread, agent: made(url, thread), runs: 0, tools: [] });
  }
  return clients.get(told.client);
}

function input(client, told) {
  client.runs += 1;
  const asked = { runId: told.run ?? `leg-${process.pid}-${client.name}-${client.runs}` };
  if (told.tools) client.tools = told.tools;
  if (client.tools.length) asked.tools = client.tools;
  if (told.resume) asked.resume = told.resume;
  return asked;
}

async function done(told) {
  const client = clientOf(told);
  let agent = client.agent;
  const events = [];
  let left = false;
  const seen = {
    onEvent: ({ event }) => {
      events.push(JSON.parse(JSON.stringify(event)));
      if (told.joined && event.type === "MESSAGES_SNAPSHOT") process.stdout.write('{"joined": true}\n');
      if (told.after && events.length === told.after) {
        left = true;
        agent.abortRun();
      }
    },
  };
  let error = null;
  try {
    if (told.do === "connect") {
      agent = client.agent = made(client.url, client.thread);
      await agent.connectAgent(input(client, told), seen);
    } else {
      if (told.text !== undefined) {
        agent.messages.push({ id: `u-${process.pid}-${client.name}-${client.runs}`, role: "user", content: told.text });
      }
      if (told.do === "answer") {
        const answer = { id: `t-${client.runs}`, role: "tool", toolCallId: told.call, content: told.content };
        agent.messages.push(told.error ? { ...answer, error: told.error } : answer);
      }
      if (told.forget) agent.pendingInterrupts = []; // to see what the server says to it
      await agent.runAgent(input(client, told), seen);
    }
  } catch (raised) {
    if (!left) error = String(raised?.message ?? raised);
  }
  const answer = {
    messages: agent.messages,
    state: agent.state,
    interrupts: agent.pendingInterrupts ?? [],
    events,
    warnings,
    error,
  };
  warnings = [];
  return answer;
}

for await (const line of createInterface({ input: process.stdin })) {
  process.stdout.write(JSON.stringify(await done(JSON.parse(line))) + "\n");
}
