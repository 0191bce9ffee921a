// The page: a chat with streaming, and a live view of the engine. No data is in it; the key stays in this tab.
"use strict";

const at = (id) => document.getElementById(id);
const MOST_SQUARES = 4096;
const state = { key: sessionStorage.getItem("octavo-key") || "", messages: [], stop: null, grid: [] };

function headers() {
  const made = { "content-type": "application/json" };
  if (state.key) made.authorization = "Bearer " + state.key;
  return made;
}

async function get(path) {
  const reply = await fetch(path, { headers: headers() });
  if (!reply.ok) throw new Error(await problem(reply));
  return reply.json();
}

async function problem(reply) {
  try {
    return (await reply.json()).error.message;
  } catch {
    return "status " + reply.status;
  }
}

// ---- chat

function show(role, text) {
  const made = document.createElement("div");
  made.className = "message " + role;
  made.textContent = text;
  at("messages").append(made);
  made.scrollIntoView({ block: "end" });
  return made;
}

async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function send(text) {
  show("user", text);
  state.messages.push({ role: "user", content: text });
  const box = show("assistant", "");
  state.stop = new AbortController();
  busy(true);
  try {
    const reply = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: headers(),
      signal: state.stop.signal,
      body: JSON.stringify({
        messages: state.messages,
        stream: true,
        temperature: Number(at("temperature").value),
        max_tokens: Number(at("max-tokens").value),
      }),
    });
    if (!reply.ok) throw new Error(await problem(reply));
    for await (const event of events(reply)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) box.textContent += choice.delta.content || "";
      box.scrollIntoView({ block: "end" });
    }
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  }
  state.messages.push({ role: "assistant", content: box.textContent });
  state.stop = null;
  busy(false);
}

function busy(on) {
  at("send").disabled = on;
  at("stop").hidden = !on;
}

// ---- engine

// How block b (from 1) is to be shown: "" free, "cached", or owners' number and the first owner's number.
function look(kv) {
  const first = new Array(kv.total_blocks + 1).fill(0);
  for (const table of kv.tables) for (const block of table.blocks) first[block] = first[block] || table.request;
  const cached = new Set(kv.cached);
  return kv.owners.map((owners, i) => {
    if (owners > 0) return { owners, owner: first[i + 1] };
    return { owners: 0, cached: cached.has(i + 1) };
  });
}

function paint(kv) {
  const grid = at("grid");
  const shown = look(kv).slice(0, MOST_SQUARES);
  while (grid.childElementCount < shown.length) grid.append(document.createElement("i"));
  while (grid.childElementCount > shown.length) grid.lastChild.remove();
  shown.forEach((block, i) => {
    const text = JSON.stringify(block);
    if (state.grid[i] === text) return;
    state.grid[i] = text;
    const square = grid.children[i];
    square.className = block.owners > 1 ? "shared" : block.cached ? "cached" : "";
    square.style.backgroundColor = block.owners ? `hsl(${(block.owner * 137) % 360} 70% 50%)` : "";
    square.dataset.owners = block.owners;
  });
  const hidden = kv.total_blocks - shown.length;
  at("note").textContent = hidden > 0 ? `${hidden} more blocks are not drawn.` : "";
  grid.dataset.used = kv.used_blocks;
  at("held").textContent = `${kv.used_blocks} / ${kv.total_blocks}`;
}

function draw(steps) {
  const canvas = at("curve");
  const pen = canvas.getContext("2d");
  const { age, running, waiting, generated } = steps.columns;
  const style = getComputedStyle(document.documentElement);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  const rate = generated.map((count, i) => {
    let j = i;
    while (j > 0 && age[j] - age[i] < 1) j--;
    return age[j] > age[i] ? (count - generated[j]) / (age[j] - age[i]) : 0;
  });
  const most = Math.max(1, ...running, ...waiting);
  line(pen, age, rate, Math.max(1, ...rate), style.getPropertyValue("--rate"));
  line(pen, age, running, most, style.getPropertyValue("--busy"));
  line(pen, age, waiting, most, style.getPropertyValue("--queue"));
}

function line(pen, age, values, most, colour) {
  const { width, height } = pen.canvas;
  pen.beginPath();
  values.forEach((value, i) => pen.lineTo(width * (1 - age[i] / 60), height - 4 - ((height - 8) * value) / most));
  pen.strokeStyle = colour;
  pen.lineWidth = 2;
  pen.stroke();
}

async function refresh() {
  try {
    const [kv, steps] = await Promise.all([get("/debug/kv"), get("/debug/steps")]);
    const last = (name) => steps.columns[name].at(-1) ?? 0;
    at("running").textContent = last("running");
    at("waiting").textContent = last("waiting");
    at("rate").textContent = steps.tokens_per_second;
    at("hits").textContent = steps.hit_rate === null ? "-" : Math.round(100 * steps.hit_rate) + " %";
    at("step").textContent = (1000 * last("step_seconds")).toFixed(1) + " ms";
    paint(kv);
    draw(steps);
    if (!at("model").textContent) at("model").textContent = (await get("/v1/models")).data[0].id;
    mark(true, "ready");
  } catch (error) {
    mark(false, error.message);
  }
  setTimeout(refresh, document.hidden ? 5000 : 700);
}

function mark(on, text) {
  at("state").className = on ? "on" : "off";
  at("state").textContent = text;
}

// ---- wiring

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || state.stop) return;
  at("text").value = "";
  send(text);
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
at("stop").addEventListener("click", () => state.stop && state.stop.abort());
at("clear").addEventListener("click", () => {
  state.messages = [];
  at("messages").replaceChildren();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.key = at("key").value.trim();
  sessionStorage.setItem("octavo-key", state.key);
  at("key").value = "";
});
refresh();
