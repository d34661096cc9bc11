// Python in a thread of its own: the page stays alive while it works, and can end it.
import { loadPyodide } from "./lib/pyodide.mjs";

const here = new URL("./lib/", import.meta.url);

async function fetched(name) {
  const response = await fetch(new URL(name, here));
  if (!response.ok) throw new Error(`${name}: HTTP ${response.status}`);
  return response;
}

async function start() {
  postMessage({ progress: "python" });
  const { archives } = await (await fetched("manifest.json")).json();
  const python = await loadPyodide({ indexURL: here.href });
  postMessage({ progress: "dsrun" });
  for (const name of archives) {
    python.unpackArchive(new Uint8Array(await (await fetched(name)).arrayBuffer()), "wheel");
  }
  return python.pyimport("dsrun.browser");
}

const ready = start();

addEventListener("message", async ({ data: { id, request } }) => {
  try {
    const module = await ready;
    postMessage({ id, answer: JSON.parse(module.answer(JSON.stringify(request))) });
  } catch (error) {
    postMessage({ id, failure: String(error.message ?? error) });
  }
});
