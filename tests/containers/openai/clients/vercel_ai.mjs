import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";

const options = { name: "canvasrt", supportsStructuredOutputs: true };
const model = createOpenAICompatible({ ...options, baseURL: process.env.BASE + "/v1" })("canvasrt");
const ask = { model, prompt: "12+34=", temperature: 0 };
assert.equal((await generateText(ask)).text, "46");
assert.equal(await streamText(ask).text, "46");
const sum = { type: "integer", minimum: 0, maximum: 99 };
const schema = jsonSchema({
  type: "object",
  properties: { sum },
  required: ["sum"],
  additionalProperties: false,
});
assert.ok((await generateText({ ...ask, output: Output.object({ schema }) })).output.sum <= 99);
const tools = { sum: tool({ inputSchema: schema }) };
assert.equal((await generateText({ ...ask, tools })).text, "46");
const [call] = (await generateText({ ...ask, tools, toolChoice: "required" })).toolCalls;
assert.ok(call.input.sum <= 99);
