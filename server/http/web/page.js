// The page: asks the server's own API and shows what /metrics and /status say.

const $ = (id) => document.getElementById(id);
const EVERY_MS = 1000;
const KEPT = 120; // seconds on the curve

let facts = null; // of /status
let turns = []; // of the chat, as the API takes them
let running = null; // AbortController of the answer under way

// ---- talking ----

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

function settings() {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  return {
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    seed: number("seed"),
    stream: true,
    stream_options: { include_usage: true },
  };
}

function request(text) {
  if (!facts.model.chat) {
    const most = Math.min(256, Math.floor(facts.model.context / 2)); // the API's own is 16
    const asked = settings();
    return ["v1/completions", { prompt: text, ...asked, max_tokens: asked.max_tokens ?? most }];
  }
  const system = $("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...turns];
  const tools = $("tools").value.trim();
  return ["v1/chat/completions", { messages, ...settings(), ...(tools && { tools: JSON.parse(tools) }) }];
}

// The JSON of each event of a server-sent stream, until [DONE].
async function* events(body) {
  let rest = "";
  for await (const piece of chunks(body.pipeThrough(new TextDecoderStream()))) {
    const blocks = (rest + piece).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: "));
      const text = data.map((line) => line.slice(6)).join("\n");
      if (text === "[DONE]") return;
      if (text) yield JSON.parse(text);
    }
  }
  throw new Error("The connection ended in the middle of the answer.");
}

async function* chunks(stream) {
  const reader = stream.getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
}

function addTurn(role, text) {
  const item = document.createElement("li");
  item.className = role;
  item.textContent = text;
  $("turns").append(item);
  item.scrollIntoView({ block: "nearest" });
  return item;
}

function addNote(item, text) {
  const note = document.createElement("small");
  note.textContent = text;
  item.append(note);
}

// A part of an answer that is not its text: reasoning, which can be folded, or a tool call.
function addPart(item, kind, title) {
  const part = document.createElement(kind === "reasoning" ? "details" : "div");
  const head = document.createElement(kind === "reasoning" ? "summary" : "b");
  part.className = kind;
  part.open = true;
  head.textContent = title;
  part.append(head, "");
  item.append(part);
  return part.lastChild;
}

// Adds the deltas of one answer to its item, and to the message that goes back to the server.
function reader(item) {
  const message = { role: "assistant", content: "" };
  const calls = [];
  let reasoning = null, text = null;
  return {
    message,
    add(delta) {
      if (delta.reasoning_content) {
        reasoning ??= addPart(item, "reasoning", "Reasoning");
        reasoning.appendData(delta.reasoning_content);
        message.reasoning_content = reasoning.data;
      }
      if (delta.content) {
        if (!text) item.append((text = document.createTextNode("")));
        text.appendData(delta.content);
        message.content = text.data;
      }
      for (const { index, id, function: call } of delta.tool_calls ?? []) {
        if (id) {
          const shown = addPart(item, "call", `${call.name} `);
          calls[index] = { shown, json: { id, type: "function", function: { ...call } } };
          calls[index].json.function.arguments = "";
        }
        calls[index].shown.appendData(call.arguments ?? "");
        calls[index].json.function.arguments += call.arguments ?? "";
        message.tool_calls = calls.map((one) => one.json);
      }
    },
  };
}

function complain(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

async function stream(path, body, item) {
  const began = performance.now();
  const answer = await fetch(path, {
    method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal,
  });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  let first = 0, usage = null, reason = "";
  const read = reader(item);
  for await (const event of events(answer.body)) {
    if (event.error) throw new Error(event.error.message);
    usage = event.usage ?? usage;
    for (const choice of event.choices ?? []) {
      first ||= performance.now();
      read.add(choice.delta ?? { content: choice.text });
      reason = choice.finish_reason ?? reason;
    }
    item.scrollIntoView({ block: "nearest" });
  }
  const n = usage?.completion_tokens ?? 0, seconds = (performance.now() - first) / 1000;
  const rate = n > 1 ? `${((n - 1) / seconds).toFixed(1)} tokens/s, ` : "";
  $("speed").textContent = `${rate}first after ${((first - began) / 1000).toFixed(2)} s`;
  addNote(item, `${n} tokens, ${reason}`);
  return read.message;
}

async function ask(text) {
  complain("");
  addTurn("user", text);
  turns.push({ role: "user", content: text });
  const item = addTurn("assistant", "");
  busy(new AbortController());
  try {
    turns.push(await stream(...request(text), item));
  } catch (error) {
    if (error.name === "AbortError") addNote(item, "stopped");
    else complain(error.message);
    turns.pop();
  } finally {
    busy(null);
  }
}

function busy(controller) {
  running = controller;
  $("send").disabled = Boolean(controller);
  $("stop").disabled = !controller;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value;
  if (running || !facts || !text.trim()) return;
  $("text").value = "";
  ask(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  turns = [];
  $("turns").replaceChildren();
  complain("");
  $("text").focus();
});

// ---- watching ----

const UNITS = ["B", "kB", "MB", "GB", "TB"];

function bytes(n) {
  const power = n ? Math.min(Math.floor(Math.log10(n) / 3), UNITS.length - 1) : 0;
  return `${(n / 1000 ** power).toPrecision(3)} ${UNITS[power]}`;
}

const percent = (part) => `${(100 * part).toFixed(1)} %`;

// Sums of the samples by name, and by name with one label: "cflow_memory_bytes:weights".
function parse(text) {
  const sums = new Map();
  for (const line of text.split("\n")) {
    const match = /^([\w:]+)(?:{(.*)})? (\S+)$/.exec(line);
    if (!match) continue;
    const kind = /(?:kind|budget)="([^"]*)"/.exec(match[2] ?? "");
    for (const name of [match[1], ...(kind ? [`${match[1]}:${kind[1]}`] : [])])
      sums.set(name, (sums.get(name) ?? 0) + Number(match[3]));
  }
  return (name) => sums.get(name) ?? 0;
}

function show(list, rows) {
  list.replaceChildren(...rows.flatMap(([name, value]) => {
    const term = document.createElement("dt"), text = document.createElement("dd");
    term.textContent = name;
    text.textContent = value;
    return [term, text];
  }));
}

let last = null; // {at, metric}
const rates = [];

function showMetrics(metric) {
  const at = performance.now() / 1000;
  const per = (name) => (last ? Math.max(metric(name) - last.metric(name), 0) / (at - last.at) : 0);
  const rate = per("vllm:generation_tokens_total");
  rates.push(rate);
  if (rates.length > KEPT) rates.shift();
  const most = Math.max(...rates, 1);
  const points = rates.map((r, i) => `${KEPT - rates.length + i},${39 - (38 * r) / most}`);
  $("line").setAttribute("points", points.join(" "));
  $("rate").textContent = rate.toFixed(rate < 100 ? 1 : 0);
  const rows = [
    ["Running", metric("vllm:num_requests_running")],
    ["Waiting", metric("vllm:num_requests_waiting")],
    ["KV memory in use", percent(metric("vllm:kv_cache_usage_perc"))],
    ["Prompt tokens/s", per("vllm:prompt_tokens_total").toFixed(0)],
    ["Weights read/s", bytes(per("cflow_read_bytes_total"))],
    ["Memory", bytes(metric("cflow_memory_bytes"))],
  ];
  if (metric("cflow_expert_cache_capacity_bytes") > 0) {
    const hits = metric("cflow_expert_cache_hits_total");
    const wanted = hits + metric("cflow_expert_cache_misses_total");
    rows.push(
      ["Experts found in memory", wanted ? percent(hits / wanted) : "none yet"],
      ["with twice the cache", percent(metric("cflow_expert_ghost_hit_ratio:2x"))],
    );
  }
  if (metric("cflow_disk_read_bytes_total") > 0)
    rows.push(
      ["Read from disk/s", bytes(per("cflow_disk_read_bytes_total"))],
      ["Waiting for disk", percent(Math.min(per("cflow_expert_stall_seconds_total"), 1))],
    );
  if (metric("cflow_worker_restarts_total") > 0)
    rows.push(["Restarts", metric("cflow_worker_restarts_total")]);
  show($("gauges"), rows);
  last = { at, metric };
}

function showFacts() {
  const { model, machine, state } = facts;
  $("state").textContent = state;
  $("state").className = state === "ready" ? "" : "bad";
  $("model").textContent = model.name;
  document.title = `${model.name} · cflow`;
  $("text-label").textContent = model.chat ? "Message" : "Text to continue";
  $("system-label").hidden = !model.chat;
  const rows = [
    ["Parameters", model.parameters.toLocaleString("en")],
    ["Context", `${model.context} tokens`],
    ["Layers", model.layers],
    ["Weights read a token", bytes(model.bytes_per_token)],
    ["Version", facts.version],
  ];
  if (model.experts) rows.splice(3, 0, ["Experts", `${model.top_k} of ${model.experts} a layer`]);
  if (machine)
    rows.push(
      ["Instructions", machine.isa], ["Threads", `${machine.threads} (${machine.threads_reason})`],
      ...machine.notes.map((note) => ["Note", note]),
    );
  show($("facts"), rows);
}

async function look() {
  try {
    const [status, metrics] = await Promise.all([fetch("status"), fetch("metrics")]);
    facts = await status.json();
    showFacts();
    showMetrics(parse(await metrics.text()));
  } catch {
    $("state").textContent = "the server does not answer";
    $("state").className = "bad";
  }
  setTimeout(look, EVERY_MS);
}

$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("change", () => sessionStorage.setItem("key", $("key").value));
look();
