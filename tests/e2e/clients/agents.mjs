// One question to an agent with one tool; prints its last text as JSON: agents.mjs CLIENT URL.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const QUESTION = "What is the weather in Zürich?";
const PARAMETERS = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const weather = ({ city }) => `sun in ${city}`;
const get_weather = tool({
  description: "Get the weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: weather,
});

const clients = {
  async openai_chat(baseURL) {
    const runner = new OpenAI({ baseURL }).chat.completions.runTools({
      model: "M",
      messages: [{ role: "user", content: QUESTION }],
      tools: [
        {
          type: "function",
          function: { name: "get_weather", parameters: PARAMETERS, parse: JSON.parse, function: weather },
        },
      ],
    });
    return await runner.finalContent();
  },

  async openai_responses(baseURL) {
    const client = new OpenAI({ baseURL });
    const tools = [{ type: "function", name: "get_weather", parameters: PARAMETERS, strict: false }];
    let asked = { input: QUESTION };
    for (;;) {
      const answer = await client.responses.create({ model: "M", tools, ...asked });
      const calls = answer.output.filter((item) => item.type === "function_call");
      if (!calls.length) return answer.output_text;
      const input = calls.map(({ call_id, arguments: text }) => ({
        type: "function_call_output",
        call_id,
        output: weather(JSON.parse(text)),
      }));
      asked = { input, previous_response_id: answer.id };
    }
  },

  async ai_sdk_chat(baseURL) {
    const model = createOpenAICompatible({ name: "cflow", baseURL })("M");
    return (await generateText({ model, tools: { get_weather }, stopWhen: stepCountIs(3), prompt: QUESTION })).text;
  },

  async ai_sdk_stream(baseURL) {
    const model = createOpenAICompatible({ name: "cflow", baseURL })("M");
    return await streamText({ model, tools: { get_weather }, stopWhen: stepCountIs(3), prompt: QUESTION }).text;
  },

  async ai_sdk_responses(baseURL) {
    const model = createOpenAI({ baseURL }).responses("M");
    return await streamText({ model, tools: { get_weather }, stopWhen: stepCountIs(3), prompt: QUESTION }).text;
  },
};

const [client, url] = process.argv.slice(2);
console.log(JSON.stringify(await clients[client](url)));
