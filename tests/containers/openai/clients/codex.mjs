import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const home = mkdtempSync(join(tmpdir(), "codex-"));
const provider = { name: "canvasrt", base_url: process.env.BASE + "/v1", wire_api: "responses" };
const settings = Object.entries(provider).map(([key, value]) => `model_providers.canvasrt.${key}="${value}"`);
settings.push('model_provider="canvasrt"', 'model="canvasrt"');
const options = settings.flatMap((each) => ["-c", each]);
const command = ["exec", "--skip-git-repo-check", "--cd", home, ...options, "Hello"];
const env = { ...process.env, CODEX_HOME: home };
const said = execFileSync("node_modules/.bin/codex", command, { env, stdio: ["ignore", "pipe", "inherit"] });
assert.equal(said.toString().trim(), "It is done.");
