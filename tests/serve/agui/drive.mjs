// Runs HttpAgents of one version of @ag-ui/client. Reads commands line by line, and prints the state of the client after each.
//
//   node drive.mjs FOLDER
//
// FOLDER has the client in its node_modules. Each line on stdin is a JSON object, and so is each line on stdout. A command
// names its `client`. A client's first command also has `url` and `thread`:
//   {do: "say", text}            add a user message, then run
//   {do: "run", resume, tools}   run without a new message
//   {do: "answer", call, content, error, text}   add a tool message, and a user message if there is a text, then run
//   {do: "connect"}              GET /threads/THREAD/events, with a new agent that has no messages
//                                with `joined`, a line is printed as soon as the agent has the messages
//   {do: "leave", text, after}   add a user message, run, and disconnect after that many events
// The response to each command is {messages, state, interrupts, events, warnings, error}.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";
import { join, resolve } from "node:path";

const [folder] = process.argv.slice(2);
const require = createRequire(pathToFileURL(join(resolve(folder), "here.js")));
const { HttpAgent, runHttpRequest, transformHttpEventStream } = require("@ag-ui/client");

let warnings = [];
console.warn = (...said) => warnings.push(said.map(String).join(" "));
console.error = () => {}; // it repeats what is in `error`

class Agent extends HttpAgent {
  // The protocol does not define how to join a conversation that is in progress, so each server has its own way.
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
      const said = { id: `u-${process.pid}-${client.name}-${client.runs}`, role: "user", content: told.text };
      if (told.text !== undefined && told.do !== "answer") agent.messages.push(said);
      if (told.do === "answer") {
        const answer = { id: `t-${client.runs}`, role: "tool", toolCallId: told.call, content: told.content };
        agent.messages.push(told.error ? { ...answer, error: told.error } : answer);
        if (told.text !== undefined) agent.messages.push(said);
      }
      if (told.forget) agent.pendingInterrupts = []; // so that the client sends the request and the server has to refuse it
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
