"use strict";
const $ = (id) => document.getElementById(id);
const run = { frames: [], finals: [], shown: -1, follow: true, abort: null, timer: 0 };
const LATEST = 900, FIRST = 5000; // milliseconds until a server that says nothing counts as gone
const EXAMPLES = [
  "Explain in three sentences why the sea is salty.",
  "Write a limerick about a slow printer.",
  "Name five rivers of Europe, with the countries that they cross.",
];
const DEMO = ["12+34=", "reverse planet", "sort 40172", "upper hello", "count 7 to 10"];
let model = "", about = {}, turns = [], stale = true, connected, timer = 0;

// ---- the server

function headers() {
  const key = $("key").value.trim();
  const all = { "Content-Type": "application/json" };
  return key ? { ...all, Authorization: `Bearer ${key}` } : all;
}

// Throw the error of a request or a read that failed because the server is gone.
function gone(error) {
  if (error.name === "AbortError") throw error;
  throw new Error("the server went away; this page reconnects when it is back");
}

async function look() {
  const wait = model ? LATEST : FIRST;
  const get = (path) => fetch(path, { headers: headers(), signal: AbortSignal.timeout(wait) });
  let text = "the server does not answer", on = false;
  try {
    if (!model || stale) {
      const reply = await get("/v1/models");
      const body = await reply.json();
      if (reply.status === 401) $("settings").open = true;
      if (reply.status === 401) throw new Error("this server needs an API key");
      if (!reply.ok) throw new Error(body.error.message);
      // The status is 405 if the endpoint exists, since it only takes POST.
      $("mode").hidden = (await get("/v1/decisions")).status === 404;
      about = await (await get("/v1/metadata")).json();
      model = body.data[0].id;
      stale = false;
      $("attach").hidden = !about.vision;
      examples();
    }
    const ready = await get("/v1/health/ready");
    on = ready.ok;
    text = on ? model : (await ready.json()).error.message;
  } catch (error) {
    if (error.constructor === Error) text = error.message;
    stale = true; // another model may be served next
  }
  $("state").textContent = text;
  $("light").classList.toggle("on", on);
}

// Questions wait for the latest `look`, which finds the model.
function connect() {
  clearTimeout(timer);
  connected = look();
  connected.then(() => { timer = setTimeout(connect, 700); });
}

async function post(path, build) {
  const { signal } = run.abort;
  await connected;
  if (!model) throw new Error($("state").textContent);
  const sent = { method: "POST", headers: headers(), body: JSON.stringify(build()) };
  const reply = await fetch(path, { ...sent, signal }).catch(gone);
  if (!reply.ok) throw new Error((await reply.json()).error.message);
  return reply;
}

function attached() {
  return [...$("attached").querySelectorAll("img")].map((image) => image.src);
}

// The settings that are filled in. JSON has no infinity, so 1e400 would become null.
function numbers(fields) {
  const found = {};
  for (const [name, id] of Object.entries(fields)) {
    const text = $(id).value.trim();
    if (!text) continue;
    found[name] = Number(text);
    if (!Number.isFinite(found[name])) throw new Error(`${name} is ${text}: give a finite number`);
  }
  return found;
}

function body() {
  const text = $("prompt").value;
  const images = attached().map((url) => ({ type: "image_url", image_url: { url } }));
  const content = images.length ? [...images, { type: "text", text }] : text;
  // The demo model was trained on single questions.
  const messages = (about.demo ? [] : turns).flatMap((turn) => [
    { role: "user", content: turn.asked }, { role: "assistant", content: turn.answer },
  ]);
  messages.push({ role: "user", content });
  if ($("system").value.trim()) messages.unshift({ role: "system", content: $("system").value });
  const fields = {
    seed: "seed", max_denoising_steps: "steps", max_tokens: "tokens",
    temperature: "temperature", settle_steps: "settle",
  };
  return {
    model, messages, stream: true, stream_options: { include_usage: true, drafts: true },
    ...numbers(fields),
  };
}

async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(gone);
    if (done) gone(new Error("no [DONE]")); // a proxy ends the stream like this when the server is gone
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith(":")) continue; // a comment, which keeps a silent stream open
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function ask() {
  reset();
  const begin = performance.now();
  const asked = $("prompt").value;
  let tokens = 0, first = 0;
  run.abort = new AbortController();
  busy(true);
  try {
    const reply = await post("/v1/chat/completions", body);
    for await (const chunk of events(reply)) {
      if (chunk.error) throw new Error(chunk.error.message);
      $("f-seed").textContent = chunk.canvasrt.seed;
      if (chunk.canvasrt.draft) add(chunk.canvasrt.draft);
      for (const choice of chunk.choices) {
        const text = (choice.delta && choice.delta.content) || "";
        if (text && !first) {
          first = performance.now() - begin;
          $("f-first").textContent = milliseconds(first);
        }
        $("answer").textContent += text;
        if (choice.finish_reason) finish();
      }
      if (chunk.usage) {
        tokens = chunk.usage.completion_tokens;
        const steps = chunk.usage.denoising_steps;
        $("f-steps").textContent = steps;
        $("f-pass").textContent = (tokens / steps).toFixed(1);
      }
    }
    $("f-total").textContent = milliseconds(performance.now() - begin);
    turns.push({ asked, answer: $("answer").textContent });
    chat(turns.length - 1);
    if (document.activeElement === $("prompt")) $("prompt").select(); // typing replaces it
  } catch (error) {
    if (error.name !== "AbortError") fail(error.message);
  }
  busy(false);
}

// ---- decisions

function question() {
  const options = $("options").value.split(",").map((each) => each.trim()).filter(Boolean);
  const instructions = $("asked").value.trim() || $("prompt").value;
  if (!options.length) return { type: "predicate", instructions };
  return { type: "choice", instructions, choices: options.map((value) => ({ value })) };
}

function input() {
  const text = $("prompt").value;
  const images = attached().map((image_url) => ({ type: "input_image", image_url }));
  if (!images.length) return text;
  return [{ role: "user", content: [...images, { type: "input_text", text }] }];
}

async function decide() {
  $("error").hidden = true;
  $("decision").hidden = true;
  const begin = performance.now();
  run.abort = new AbortController();
  busy(true);
  try {
    const given = numbers({ samples: "samples", seed: "seed" });
    const reply = await post("/v1/decisions", () => ({
      model, input: input(), questions: [question()], layout: $("layout").value, ...given,
    }));
    bars((await reply.json().catch(gone)).answers[0]);
    const time = milliseconds(performance.now() - begin);
    $("decided").textContent = `${given.samples || 1} draws of noise in ${time}; not calibrated`;
    $("decision").hidden = false;
  } catch (error) {
    if (error.name !== "AbortError") fail(error.message);
  }
  busy(false);
}

function bars(answer) {
  if (answer.refusal) throw new Error(answer.refusal);
  const yes = answer.probability;
  const all = answer.probabilities || [
    { value: "yes", probability: yes }, { value: "no", probability: 1 - yes },
  ];
  const most = Math.max(...all.map((each) => each.probability));
  $("bars").replaceChildren(...all.map((each) => {
    const row = document.createElement("div");
    row.className = each.probability === most ? "choice best" : "choice";
    for (const name of ["span", "div", "b"]) row.append(document.createElement(name));
    const [label, track, number] = row.children;
    label.textContent = each.value;
    track.append(document.createElement("i"));
    track.firstChild.style.width = `${100 * each.probability}%`;
    number.textContent = `${(100 * each.probability).toFixed(1)}%`;
    return row;
  }));
}

// ---- the chat

function button(text, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.className = "quiet";
  made.textContent = text;
  made.addEventListener("click", act);
  return made;
}

function examples() {
  $("examples").hidden = turns.length > 0 || !$("work").hidden;
  $("examples").replaceChildren(...(about.demo ? DEMO : EXAMPLES).map((text) => button(text, () => {
    $("prompt").value = text;
    $("ask").requestSubmit();
  })));
}

// Show the first `count` turns, the newest at the top. The turn after them is shown in the canvas.
function chat(count) {
  $("chat").hidden = !turns.length;
  const sent = about.demo ? " (shown only: the demo model takes single questions)" : "";
  $("kept").textContent = count ? `Earlier${sent}` : "";
  $("turns").replaceChildren(...turns.slice(0, count).reverse().map(({ asked, answer }) => {
    const turn = document.createElement("div");
    for (const text of [asked, answer]) {
      turn.append(document.createElement("p"));
      turn.lastChild.textContent = text;
    }
    turn.append(button("Copy", (event) => copy(event.target, turn.lastChild.previousSibling)));
    return turn;
  }));
}

// navigator.clipboard is absent over plain HTTP, except on this machine.
async function copy(from, source) {
  getSelection().selectAllChildren(source);
  if (navigator.clipboard) await navigator.clipboard.writeText(source.textContent);
  else document.execCommand("copy");
  getSelection().removeAllRanges();
  from.textContent = "Copied";
  setTimeout(() => { from.textContent = "Copy"; }, 1500);
}

// ---- frames: one per step, and one per finished block

function add(draft) {
  $("work").hidden = false;
  const last = run.frames.at(-1);
  if (last && last.block !== draft.block) finish();
  const before = last && last.block === draft.block && !last.final ? last.accepted : [];
  const states = draft.accepted.map((accepted, i) => {
    if (i < draft.settled) return "settled";
    if (accepted) return "accepted";
    return before[i] ? "renoised" : "noise";
  });
  push({ ...draft, states });
}

function finish() {
  const last = run.frames.at(-1);
  if (!last || last.final) return;
  const states = last.best.map(() => "settled");
  const done = { ...last, noisy: last.best, states, final: true };
  run.finals[last.block] = done;
  push(done);
}

function push(frame) {
  run.frames.push(frame);
  const bar = document.createElement("i");
  const words = frame.states.slice(0, Math.max(1, frame.end));
  const sure = words.filter((state) => state === "accepted" || state === "settled").length;
  bar.style.height = `${Math.round((100 * sure) / words.length)}%`;
  $("chart").append(bar);
  $("slider").max = run.frames.length - 1;
  if (!run.abort || run.follow) show(run.frames.length - 1);
}

// ---- drawing

const MARKS = { "\n": "\u21b5\n", "\t": "\u2192\t" };

function draw(parent, frame, view) {
  frame[view].forEach((spelling, i) => {
    const piece = document.createElement("b");
    const special = /^<[^>]*>$/.test(spelling);
    piece.className = frame.states[i];
    if (special) piece.classList.add("mark");
    if (i >= frame.end && frame.states[i] !== "noise") piece.classList.add("after");
    piece.textContent = special ? spelling.replace(/[<>|]/g, "") : MARKS[spelling] || spelling || "\u00b7";
    parent.append(piece);
  });
}

function show(index) {
  const frame = run.frames[index];
  if (!frame) return;
  run.shown = index;
  const view = document.querySelector("[name=view]:checked").value;
  const drawn = document.createDocumentFragment();
  for (const done of run.finals.slice(0, frame.block)) draw(drawn, done, "best");
  draw(drawn, frame, view);
  $("canvas").replaceChildren(drawn);
  $("slider").value = index;
  const bars = $("chart").children;
  for (let i = 0; i < bars.length; i++) bars[i].classList.toggle("past", i <= index);
  const step = frame.final ? `done in ${frame.step}` : `step ${frame.step}`;
  $("where").innerHTML = `<span class="long">block ${frame.block + 1}, </span>${step}`;
}

function play() {
  clearInterval(run.timer);
  let index = run.shown >= run.frames.length - 1 ? 0 : run.shown;
  show(index);
  const wait = Math.max(60, Math.min(400, 6000 / run.frames.length));
  run.timer = setInterval(() => {
    index += 1;
    if (index >= run.frames.length) clearInterval(run.timer);
    else show(index);
  }, wait);
}

function milliseconds(value) {
  return value < 1000 ? `${value.toFixed(value < 100 ? 1 : 0)} ms` : `${(value / 1000).toFixed(2)} s`;
}

// ---- the form

function mode() {
  return document.querySelector("[name=mode]:checked").value;
}

function reset() {
  clearInterval(run.timer);
  Object.assign(run, { frames: [], finals: [], shown: -1, follow: true });
  for (const id of ["chart", "canvas"]) $(id).replaceChildren();
  for (const id of ["answer", "where"]) $(id).textContent = "";
  for (const id of ["steps", "pass", "first", "total", "seed"]) $(`f-${id}`).textContent = "\u2013";
  $("slider").max = 0;
  $("error").hidden = true;
  $("examples").hidden = true;
  chat(turns.length);
}

function busy(on) {
  if (!on) run.abort = null;
  $("go").textContent = on ? "Stop" : mode() === "write" ? "Denoise" : "Decide";
  $("go").classList.toggle("stop", on);
}

function fail(message) {
  $("error").textContent = message;
  $("error").hidden = false;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (run.abort) run.abort.abort();
  else if (mode() === "write") ask();
  else decide();
});
for (const each of document.querySelectorAll("[name=mode]")) {
  each.addEventListener("change", () => {
    if (run.abort) run.abort.abort();
    document.body.className = mode();
    $("error").hidden = true;
    busy(false);
  });
}
document.body.className = mode();
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
function dataUrl(file) {
  return new Promise((resolve) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => resolve("");
    reader.readAsDataURL(file);
  });
}
async function attach(files) {
  for (const file of [...files]) {
    const url = file.type.startsWith("image/") && await dataUrl(file);
    if (!url) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.title = "remove this image";
    const image = document.createElement("img");
    image.src = url;
    image.alt = file.name;
    button.append(image);
    button.addEventListener("click", () => button.remove());
    $("files").parentElement.before(button);
  }
}
$("files").addEventListener("change", () => {
  attach($("files").files);
  $("files").value = "";
});
$("prompt").addEventListener("paste", (event) => about.vision && attach(event.clipboardData.files));
$("slider").addEventListener("input", () => {
  clearInterval(run.timer);
  const index = Number($("slider").value);
  run.follow = index === run.frames.length - 1;
  show(index);
});
$("play").addEventListener("click", play);
$("padding").addEventListener("change", () => {
  $("canvas").classList.toggle("all", $("padding").checked);
});
$("copy").addEventListener("click", () => copy($("copy"), $("answer")));
$("new").addEventListener("click", () => {
  if (run.abort) run.abort.abort();
  turns = [];
  reset();
  $("work").hidden = true;
  examples();
});
for (const each of document.querySelectorAll("[name=view]")) {
  each.addEventListener("change", () => show(run.shown));
}
$("key").value = sessionStorage.getItem("canvasrt-key") || "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("canvasrt-key", $("key").value);
  model = "";
  connect();
});
connect();
