// OpenAI's official JavaScript client against the service: what a Node agent does, in one go. Prints what it saw as one line of JSON.
//
// Arguments: a session's base URL, its key, and the URL that holds the key.

import OpenAI from "openai";

const [baseURL, apiKey, sessionURL] = process.argv.slice(2);
const plain = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const named = new OpenAI({ baseURL: sessionURL, apiKey: "unused", maxRetries: 0 });
const tools = [
  {
    type: "function",
    function: { name: "look", parameters: { type: "object", properties: { x: { type: "integer" } }, required: ["x"] } },
  },
];
const seen = {};

// A call of a tool, its result, and the reply to it.
const messages = [{ role: "user", content: "look" }];
const first = await plain.chat.completions.create({ model: "m", messages, tools });
const message = first.choices[0].message;
seen.calls = message.tool_calls.map((call) => ({ name: call.function.name, arguments: JSON.parse(call.function.arguments) }));
messages.push(message);
for (const call of message.tool_calls) messages.push({ role: "tool", tool_call_id: call.id, content: "seven" });
const second = await named.chat.completions.create({ model: "m", messages, tools });
seen.reply = second.choices[0].message.content;
seen.usage = second.usage;
messages.push(second.choices[0].message);

// Text cut inside an emoji, as JavaScript's slice leaves it; the answer as a stream.
messages.push({ role: "user", content: "and \u{1F600}".slice(0, 5) });
const stream = await plain.chat.completions.create({
  model: "m",
  messages,
  tools,
  stream: true,
  stream_options: { include_usage: true },
});
seen.streamed = "";
seen.chunks = 0;
for await (const chunk of stream) {
  seen.chunks += 1;
  seen.streamed += chunk.choices[0]?.delta?.content ?? "";
  seen.streamedUsage = chunk.usage ?? seen.streamedUsage;
}

// The helper that gathers a stream.
const gathered = plain.chat.completions.stream({ model: "m", messages: [{ role: "user", content: "other" }] });
seen.gathered = (await gathered.finalChatCompletion()).choices[0].message.content;

// Responses, one going on from the other, by either URL.
const begun = await plain.responses.create({ model: "m", instructions: "s", input: "hi" });
const gone = await named.responses.create({ model: "m", previous_response_id: begun.id, input: "more" });
seen.responses = [begun.output_text, gone.output_text];
const events = await plain.responses.create({ model: "m", previous_response_id: gone.id, input: "again", stream: true });
seen.events = [];
for await (const event of events) if (seen.events.at(-1) !== event.type) seen.events.push(event.type);

// Errors arrive as the client's own classes.
try {
  await plain.chat.completions.create({ model: "m", messages: [{ role: "user", content: "q" }], top_p: 0.5 });
} catch (error) {
  seen.refused = [error.constructor.name, error.status, error.code];
}
try {
  await new OpenAI({ baseURL, apiKey: "sk-nobody", maxRetries: 0 }).models.list();
  seen.models = (await plain.models.list()).data.map((model) => model.id);
  await new OpenAI({ baseURL, apiKey: "sk-nobody", maxRetries: 0 }).responses.create({ model: "m", input: "q" });
} catch (error) {
  seen.unknown = [error.constructor.name, error.status];
}
console.log(JSON.stringify(seen));
