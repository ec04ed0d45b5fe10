import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE + "/v1", apiKey: "x" });
const ask = { model: "canvasrt", messages: [{ role: "user", content: "12+34=" }] };
const chats = client.chat.completions;
assert.equal((await chats.create(ask)).choices[0].message.content, "46");
assert.equal(await chats.stream(ask).finalContent(), "46");
const sum = { type: "integer", minimum: 0, maximum: 99 };
const schema = { type: "object", properties: { sum }, required: ["sum"], additionalProperties: false };
const response_format = { type: "json_schema", json_schema: { name: "sum", strict: true, schema } };
const { parsed } = (await chats.parse({ ...ask, response_format })).choices[0].message;
assert.ok(parsed.sum <= 99);
const tools = [{ type: "function", function: { name: "sum", parameters: schema } }];
assert.equal((await chats.create({ ...ask, tools })).choices[0].message.content, "46");
const forced = { ...ask, tools, tool_choice: "required" };
const [call] = (await chats.create(forced)).choices[0].message.tool_calls;
assert.ok(JSON.parse(call.function.arguments).sum <= 99);
assert.equal((await client.responses.create({ model: "canvasrt", input: "12+34=" })).output_text, "46");
