// An agent in JavaScript, without packages: it asks for a sum and prints the reply.
// A reply that does not have the form that was asked for is told so, once.
//
//     OPENAI_BASE_URL=http://127.0.0.1:8000/v1 node agents/any_program/ask.mjs "What is 17 + 25?"
//
// As a rollout's program it finds the task, a JSON object with `question`, on its standard input.

import { readFileSync } from "node:fs";

const FIRST_MESSAGES = [
  { role: "system", content: "You add numbers. Reply with one line: Answer: NUMBER" },
  { role: "user", content: "What is 2 + 3?" },
  { role: "assistant", content: "Answer: 5" },
];
const HINT = "That has no line such as: Answer: 12. Reply with one.";
const MAX_REPLIES = 2;

const { OPENAI_BASE_URL, OPENAI_API_KEY = "none", OPENAI_MODEL = "policy" } = process.env;

async function complete(messages) {
  const response = await fetch(`${OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${OPENAI_API_KEY}` },
    body: JSON.stringify({ model: OPENAI_MODEL, messages, max_tokens: 32 }),
  });
  if (!response.ok) {
    throw new Error(`${OPENAI_BASE_URL} answered ${response.status}: ${await response.text()}`);
  }
  return (await response.json()).choices[0].message.content ?? "";
}

async function solve(question) {
  const messages = [...FIRST_MESSAGES, { role: "user", content: question }];
  let reply = "";
  for (let n = 0; n < MAX_REPLIES; n++) {
    reply = await complete(messages);
    if (/answer\W*:\W*\d/i.test(reply)) break;
    messages.push({ role: "assistant", content: reply }, { role: "user", content: HINT });
  }
  return reply;
}

const word = process.argv[2];
if (word === "--help" || OPENAI_BASE_URL === undefined) {
  console.log("usage: OPENAI_BASE_URL=URL [OPENAI_API_KEY=KEY] [OPENAI_MODEL=NAME] ask.mjs [QUESTION]");
  process.exit(word === "--help" ? 0 : 2);
}
try {
  console.log(await solve(word ?? JSON.parse(readFileSync(0, "utf8")).question));
} catch (error) {
  console.error(`${error.message} ${error.cause?.message ?? ""}`.replaceAll("\n", " ").trim());
  process.exit(1);
}
