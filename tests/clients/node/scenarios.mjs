// OpenAI's official library for Node, through a gateway. Prints what each scenario saw as one JSON object:
//   node scenarios.mjs BASE_URL KEY BUSY_URL
import OpenAI, { toFile } from "openai";

const [baseURL, apiKey, busyURL] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "How does the water reach the turbine?" }];
const asked = { model: "m", messages, max_tokens: 24 };
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };

// What an error is to an application: its class and what it tells.
async function refused(promise) {
  try {
    await promise;
  } catch (error) {
    const { status, code, param, requestID } = error;
    return { kind: error.constructor.name, status, code, param, requestID };
  }
  throw new Error("was not refused");
}

const failing = (fault, rest = {}) =>
  client.chat.completions.create({ ...asked, ...rest }, { headers: { "x-emulate-fault": fault } });

const scenarios = {
  async chat() {
    const whole = await client.chat.completions.create(asked);
    const stream = await client.chat.completions.create({ ...asked, stream: true });
    let streamed = "";
    for await (const chunk of stream) streamed += chunk.choices[0].delta.content ?? "";
    return { whole: whole.choices[0].message.content, streamed, requestID: whole._request_id };
  },

  async raw_response() {
    const { data, response } = await client.chat.completions.create(asked).withResponse();
    return { status: response.status, id: response.headers.get("x-request-id"), model: data.model };
  },

  async tools() {
    const tools = [{ type: "function", function: { name: "weather", parameters } }];
    const runner = client.chat.completions.stream({
      ...asked, max_tokens: 200, tools, tool_choice: "required",
    });
    const { choices } = await runner.finalChatCompletion();
    const call = choices[0].message.tool_calls[0].function;
    return { name: call.name, keys: Object.keys(JSON.parse(call.arguments)) };
  },

  async responses() {
    const body = { model: "m", input: "How does the water reach the turbine?", max_output_tokens: 12 };
    const whole = await client.responses.create(body);
    const numbers = [];
    let streamed = "";
    for await (const event of await client.responses.create({ ...body, stream: true })) {
      numbers.push(event.sequence_number);
      if (event.type === "response.output_text.delta") streamed += event.delta;
    }
    return { whole: whole.output_text, streamed, numbers };
  },

  async embeddings() {
    const found = await client.embeddings.create({ model: "m", input: ["a", "b"], dimensions: 16 });
    return found.data.map((row) => row.embedding.length);
  },

  async transcription() {
    const file = await toFile(Buffer.from("RIFF....WAVE"), "a.wav");
    return (await client.audio.transcriptions.create({ model: "m", file })).text;
  },

  async models() {
    const names = [];
    for await (const model of client.models.list()) names.push(model.id);
    return { names, one: (await client.models.retrieve("org/name:8b")).id };
  },

  async many_streams() {
    const one = async () => {
      let text = "";
      const stream = await client.chat.completions.create({ ...asked, stream: true });
      for await (const chunk of stream) text += chunk.choices[0].delta.content ?? "";
      return text;
    };
    return new Set(await Promise.all(Array.from({ length: 20 }, one))).size;
  },

  async leaving() {
    const body = { ...asked, max_tokens: 100000, ignore_eos: true, stream: true };
    const stream = await client.chat.completions.create(body);
    let seen = 0;
    for await (const _ of stream) if (++seen === 3) break; // which aborts the request
    return seen;
  },

  async wrong_key() {
    return refused(new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 }).chat.completions.create(asked));
  },
  async unknown_model() {
    return refused(client.chat.completions.create({ ...asked, model: "hidden" }));
  },
  async unknown_url() {
    return refused(client.files.list());
  },
  async bad_request() {
    return refused(client.chat.completions.create({ ...asked, max_tokens: 10 ** 7 }));
  },
  async rate_limited() {
    return refused(failing("429:7"));
  },
  async crashed() {
    return refused(failing("plain:500"));
  },
  async unavailable() {
    return refused(failing("503:7"));
  },
  async hung_up() {
    return refused(failing("hang-up"));
  },

  async broken_stream() {
    const stream = await failing("cut-off:3", { stream: true });
    let seen = 0;
    const error = await refused((async () => { for await (const _ of stream) seen += 1; })());
    return { seen, ...error };
  },

  async retry_after() {
    const patient = new OpenAI({ baseURL: busyURL, apiKey, maxRetries: 2 });
    const began = performance.now();
    const answer = await patient.chat.completions.create(asked);
    return { text: answer.choices[0].message.content, waited_ms: performance.now() - began };
  },
};

const seen = {};
for (const [name, scenario] of Object.entries(scenarios)) {
  try {
    seen[name] = await scenario();
  } catch (error) {
    seen[name] = { thrown: String(error.stack ?? error) };
  }
}
console.log(JSON.stringify(seen));
