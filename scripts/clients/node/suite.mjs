// Calls of the official Node client against a running server: OPENAI_BASE_URL, OPENAI_API_KEY and MLXCEL_MODEL say which.

import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";

const model = process.env.MLXCEL_MODEL;
const real = model === "smollm2"; // it can answer questions; the tiny checkpoint's text means nothing
const client = new OpenAI({ maxRetries: 0, timeout: 120_000 });
const ask = [{ role: "user", content: "What is the capital of France?" }];
const chat = (options, request) =>
  client.chat.completions.create({ model, messages: ask, temperature: 0, max_tokens: 24, ...options }, request);
const complete = (options, request) =>
  client.completions.create({ model, prompt: "One, two, three,", temperature: 0, max_tokens: 12, ...options }, request);

async function collect(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

test("models", async () => {
  const ids = (await client.models.list()).data.map((m) => m.id);
  assert.ok(ids.includes(model));
  assert.equal((await client.models.retrieve(model)).id, model);
});

test("chat, whole and streamed", async () => {
  const whole = await chat({});
  const { message, finish_reason } = whole.choices[0];
  if (real) assert.equal(message.content, "The capital of France is Paris.");
  const chunks = await collect(await chat({ stream: true, stream_options: { include_usage: true } }));
  assert.equal(chunks[0].choices[0].delta.role, "assistant");
  assert.equal(chunks.map((c) => c.choices[0]?.delta.content ?? "").join(""), message.content);
  assert.equal(chunks.at(-2).choices[0].finish_reason, finish_reason);
  assert.deepEqual(chunks.at(-1).usage, whole.usage);
  assert.ok(chunks.slice(0, -1).every((c) => c.usage === null));
});

test("stream helper", async () => {
  const stream = client.chat.completions.stream({ model, messages: ask, temperature: 0, max_tokens: 8 });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  assert.equal(await stream.finalContent(), text);
});

test("completions, seed and choices", async () => {
  const options = { prompt: ["a", "b"], n: 2, temperature: 1, seed: 5, max_tokens: 8 };
  const texts = async () => (await complete(options)).choices.map((c) => c.text);
  const first = await texts();
  assert.equal(first.length, 4);
  assert.deepEqual(await texts(), first);
  assert.notEqual(first[0], first[1]);
});

test("stop", async () => {
  const text = (await complete({ max_tokens: 20 })).choices[0].text;
  const stop = text.slice(5, 8);
  const { text: cut, finish_reason } = (await complete({ max_tokens: 20, stop })).choices[0];
  assert.deepEqual([cut, finish_reason], [text.slice(0, text.indexOf(stop)), "stop"]);
});

test("logprobs", async () => {
  const { logprobs, message } = (await chat({ logprobs: true, top_logprobs: 2, max_tokens: 6 })).choices[0];
  assert.equal(Buffer.from(logprobs.content.flatMap((t) => t.bytes)).toString(), message.content);
  assert.ok(logprobs.content.every((t) => t.top_logprobs.length === 2 && t.logprob <= 0));
});

test("errors", async () => {
  await assert.rejects(chat({ temperature: "hot" }), (e) => e instanceof OpenAI.BadRequestError && e.param === "temperature");
  await assert.rejects(chat({ tools: [{ type: "function", function: { name: "f" } }] }), (e) => e.status === 400 && e.param === "tools");
  await assert.rejects(chat({ model: "gpt-9" }), (e) => e instanceof OpenAI.NotFoundError && e.code === "model_not_found");
  await assert.rejects(client.withOptions({ apiKey: "wrong" }).models.list(), OpenAI.AuthenticationError);
  await assert.rejects(complete({ prompt: Array(20000).fill(1), stream: true }), (e) => e.code === "context_length_exceeded");
});

test("cancel", async () => {
  const controller = new AbortController();
  const stream = await complete({ stream: true, max_tokens: 2000, ignore_eos: true }, { signal: controller.signal });
  for await (const _ of stream) {
    controller.abort();
    break;
  }
  const base = process.env.OPENAI_BASE_URL.replace(/\/v1$/, "");
  const slots = async () => (await fetch(`${base}/slots`, { headers: { Authorization: `Bearer ${process.env.OPENAI_API_KEY}` } })).json();
  while ((await slots()).some((s) => s.is_processing)); // the run's own time limit ends a server that never notices
  await complete({});
});
