// The page's own part: fields to requests, answers to rows. Python is started at the first request, in worker.js.
const root = document.getElementById("checker");
const texts = JSON.parse(document.getElementById("checker-texts").textContent);
const language = root.dataset.language;
const progress = root.querySelector(".progress");
const results = document.getElementById("results");
const stop = document.getElementById("stop");

let worker = null;
let choices = null;
let number = 0;
const waiting = new Map();

function say(text) { progress.textContent = text; }

function started() {
  if (worker) return worker;
  worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
  worker.addEventListener("message", ({ data }) => {
    if (data.progress) { say(texts[`progress_${data.progress}`]); return; }
    const { resolve, reject } = waiting.get(data.id);
    waiting.delete(data.id);
    if (data.failure === undefined) resolve(data.answer); else reject(new Error(data.failure));
  });
  worker.addEventListener("error", (event) => ended(new Error(event.message || "worker.js")));
  return worker;
}

function ended(error) {
  worker?.terminate();
  worker = null;
  for (const { reject } of waiting.values()) reject(error);
  waiting.clear();
}

function ask(request) {
  return new Promise((resolve, reject) => {
    const id = ++number;
    waiting.set(id, { resolve, reject });
    started().postMessage({ id, request });
  });
}

function made(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

function filled(text, values) { return text.replace(/\{(\w+)\}/g, (_, name) => values[name]); }

function labelled(label, text) {
  const line = made("p");
  line.append(made("strong", `${label}: `), text);
  return line;
}

function gib(bytes) { return bytes === null || bytes === undefined ? "" : (bytes / 2 ** 30).toFixed(1); }

function tabled(names, rows) {
  const wide = made("div", undefined, "wide");
  wide.tabIndex = 0;
  wide.setAttribute("role", "region");
  wide.setAttribute("aria-label", texts.results);
  const table = made("table");
  const head = table.createTHead().insertRow();
  for (const name of names) head.append(made("th", texts[name]));
  const body = table.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    for (const cell of row) line.append(made("td", String(cell ?? "")));
  }
  wide.append(table);
  return wide;
}

const shown = {
  validate(value, request) {
    const version = request.deepspeed_version;
    const rows = value.findings;
    if (!rows.length) return [made("p", texts.no_findings), made("p", filled(texts.clean_for, { version }))];
    const list = made("ul");
    for (const row of rows) {
      const item = made("li", undefined, `row ${row.severity}`);
      const head = made("p");
      head.append(made("strong", `${row.severity} ${row.rule}`), ` ${filled(texts.where, row)} `, made("code", row.path));
      item.append(head, made("p", row.message), made("p", row.suggestion));
      list.append(item);
    }
    return [made("p", filled(texts.findings, { count: rows.length, version })), list];
  },
  plan(value) {
    const parts = [made("p", value.place)];
    if (value.inference) {
      parts.push(tabled(["width", "verdict", "gpu_gib", "context"],
        value.inference.map((row) => [row.width, row.verdict, gib(row.bytes), row.longest_context])));
    } else {
      parts.push(tabled(["preset", "verdict", "gpu_gib", "host_gib", "seconds", "largest", "why"], value.plans.map((row) => [
        row.preset, row.verdict, gib(row.gpu.needed_bytes), gib(row.host.peak_bytes), row.speed.seconds_per_step?.toFixed(2),
        row.largest_micro_batch, row.reason])));
    }
    for (const [preset, why] of Object.entries(value.skipped ?? {})) parts.push(labelled(`${texts.skipped}: ${preset}`, why));
    for (const note of value.notes ?? []) parts.push(made("p", note));
    return parts;
  },
  diagnose(value) {
    const item = made("li", undefined, `row ${value.cause ? "error" : "note"}`);
    item.append(value.cause
      ? labelled(texts.cause, `${value.summary} (${value.cause}, ${texts.confidence}: ${value.confidence})`)
      : made("p", `${texts.no_cause} ${value.summary}`));
    item.append(labelled(texts.next, value.next_step));
    if (value.check) item.append(labelled(texts.check, value.check));
    if (value.line) item.append(labelled(`${texts.line} ${value.where ?? ""}`, value.line));
    for (const line of value.lines ?? []) item.append(made("p", line));
    const list = made("ul");
    list.append(item);
    return [list];
  },
  explain(value) { return [made("pre", value.lines.join("\n"))]; },
};

function refused(problems) {
  const list = made("ul");
  for (const problem of problems) {
    const item = made("li", undefined, "row error");
    item.append(problem.where ? labelled(problem.where, problem.what) : made("p", problem.what));
    if (problem.hint) item.append(made("p", problem.hint));
    list.append(item);
  }
  return [made("p", texts.refused), list];
}

function show(parts, value) {
  results.replaceChildren(...parts);
  if (value !== undefined) {
    const whole = made("details");
    const text = made("pre", JSON.stringify(value, null, 2));
    text.id = "json";
    text.tabIndex = 0;
    whole.append(made("summary", texts.json), text);
    results.append(whole);
  }
  results.hidden = false;
  results.focus({ preventScroll: true });
  results.scrollIntoView({ block: "nearest" });
}

async function requestOf(form) {
  const request = { command: form.dataset.command, language };
  for (const field of form.elements) {
    if (!field.name || field.value === "") continue;
    request[field.name] = field.type === "number" ? Number(field.value) : field.value;
  }
  if (form.dataset.command === "validate" && form.dataset.file) request.name = form.dataset.file;
  if (form.dataset.command === "diagnose") {
    const logs = await Promise.all([...form.querySelector("[data-logs]").files].map((file) => file.text()));
    request.texts = [...(request.text ? [request.text] : []), ...logs];
    delete request.text;
  }
  return request;
}

async function offered() {
  choices = (await ask({ command: "choices" })).value;
  for (const [list, rows] of [["gpus", choices.gpus], ["models", choices.models]]) {
    document.getElementById(list).replaceChildren(...Object.entries(rows).map(([name, summary]) => {
      const option = made("option");
      option.value = name;
      option.label = `${name}: ${summary}`;
      return option;
    }));
  }
  const select = root.querySelector("[name=deepspeed_version]");
  select.options[0].textContent += `: ${choices.versions[0]}`;
  select.options[0].value = choices.versions[0];
  for (const version of choices.versions.slice(1)) select.append(made("option", version));
}

async function run(form) {
  const submit = form.querySelector("[type=submit]");
  if (submit.disabled) return;
  const buttons = root.querySelectorAll("[type=submit]");
  results.hidden = true;
  for (const button of buttons) button.disabled = true;
  stop.hidden = false;
  say(texts.progress_start);
  try {
    if (!choices) await offered();
    const request = await requestOf(form);
    if (request.texts?.length === 0) { say(""); show([made("p", texts.empty)]); return; }
    say(texts.progress_work);
    const answer = await ask(request);
    if (answer.problems) show(refused(answer.problems));
    else show(shown[request.command](answer.value, request), answer.value);
    say(texts.done);
  } catch (error) {
    if (error.message === "stopped") say(texts.stopped);
    else {
      ended(error);
      say("");
      show([made("p", texts.failure), made("pre", error.message)]);
    }
  } finally {
    for (const button of buttons) button.disabled = false;
    stop.hidden = true;
  }
}

const EXAMPLES = {
  validate: { text: '{\n  "train_batch_sise": 8,\n  "train_micro_batch_size_per_gpu": 1,\n  "fp16": {"enabled": true},\n  "zero_optimization": {\n    "stage": 2,\n    "offload_param": {"device": "cpu"}\n  }\n}\n', world_size: 8 },
  plan: { model: "qwen3-8b", gpu: "a100-80g", gpus: 4, seq_len: 2048 },
  diagnose: { text: "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 23.65 GiB of which 1.20 GiB is free.\n" },
  explain: { name: "DS221" },
};

for (const form of root.querySelectorAll("form")) {
  form.addEventListener("submit", (event) => { event.preventDefault(); run(form); });
  form.querySelector("[data-example]").addEventListener("click", () => {
    form.reset();
    delete form.dataset.file;
    for (const [name, value] of Object.entries(EXAMPLES[form.dataset.command])) form.elements[name].value = value;
    run(form);
  });
}
const opened = root.querySelector("[data-into]");
opened.addEventListener("change", async () => {
  const [file] = opened.files;
  if (!file) return;
  opened.form.elements.text.value = await file.text();
  opened.form.dataset.file = file.name;
});
opened.form.elements.text.addEventListener("input", () => {
  delete opened.form.dataset.file; // what is typed or pasted is judged by its lines
  opened.value = "";
});
stop.addEventListener("click", () => ended(new Error("stopped")));

const tabs = [...root.querySelectorAll("[role=tab]")];
function choose(tab) {
  for (const other of tabs) {
    const chosen = other === tab;
    other.setAttribute("aria-selected", String(chosen));
    other.tabIndex = chosen ? 0 : -1;
    document.getElementById(other.getAttribute("aria-controls")).hidden = !chosen;
  }
  results.hidden = true;
}
for (const tab of tabs) tab.addEventListener("click", () => choose(tab));
root.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
  const at = tabs.indexOf(document.activeElement);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1 + tabs.length, Home: 0, End: tabs.length - 1 }[event.key];
  if (to === undefined || at < 0) return;
  event.preventDefault();
  const tab = tabs[to % tabs.length];
  choose(tab);
  tab.focus();
});

window.dsrunChecker = { ask }; // for tests, and for the console
