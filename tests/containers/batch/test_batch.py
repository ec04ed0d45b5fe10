"""`canvasrt batch` in process and over HTTP: both write the same file, even after failures and interruptions."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from canvasrt.bundle import Bundle
from canvasrt.cli.app import run as canvasrt
from canvasrt.containers.batch import servers
from canvasrt.containers.batch.journal import Outputs
from canvasrt.containers.batch.local import Local
from canvasrt.containers.batch.run import Done, Reply, run_batch
from canvasrt.containers.batch.servers import Servers
from canvasrt.containers.client.openai import KEY_VARIABLE
from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.server import Server
from canvasrt.errors import CanvasError, EngineError
from canvasrt.runtime.generator import Generator
from tests.helpers.batches import chat, count_done, line, write
from tests.helpers.serving import eventually, needs_triton

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
QUESTION = {"type": "predicate", "instructions": "Is it even?"}
ASKED = ({"input": "12", "questions": [QUESTION]}, {"input": [], "questions": []})
TEXTS = [f"{word} {number}" for number in range(4) for word in ("shuffle", "reverse", "12+34=")]
REQUESTS = [
    chat("plain"),
    chat("two answers", n=2, logprobs=True, top_logprobs=2, seed=5),
    chat("stop", stop=["e", "a"], max_tokens=40),
    chat("schema", response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}, max_tokens=20),
    chat("hot", temperature=-1),
    chat("long", max_tokens=2**30),
    chat("unknown field", nothing=1),
    line("text", "/v1/completions", prompt=["ab", "cd"], max_tokens=6, max_denoising_steps=2),
    line("ids", "/v1/completions", prompt=[2, 5, 6], max_tokens=6, max_denoising_steps=2),
    line("decision", "/v1/decisions", **ASKED[0]),
    line("no decision", "/v1/decisions", **ASKED[1]),
    line("response", "/v1/responses", input="12+34=", max_output_tokens=6, max_denoising_steps=2),
    line("infill", "/v1/infill", text="The {3} sat.", max_denoising_steps=2),
    line("one", "/v1/systemone", state="12", questions={"q": {"type": "noul", "instructions": "Even?"}}),
]  # fmt: skip
WRONG = ("hot", "long", "no decision")


def asked(file: Path, name: str, opened: Any, at_once: int = 8) -> tuple[Done, list[Path]]:
    """Run a batch; return its result, and the files of answers and of errors."""
    done = run_batch(file, file.with_name(name), 0, "model", opened, at_once)
    return done, list(done.outputs[:2])


def over(*fronts: FrontEnd) -> Servers:
    return Servers([each.url for each in fronts], "", 60)


@needs_triton
def test_the_same_file_in_process_and_over_http(
    tmp_path: Path, engines: Bundle, front: FrontEnd
) -> None:
    file = write(tmp_path, *REQUESTS)
    done, local = asked(file, "local.jsonl", Local(engines.path, 1))
    assert (done.answers, done.errors) == (len(REQUESTS) - len(WRONG), len(WRONG))
    told = [[json.loads(each) for each in path.read_text().splitlines()] for path in local]
    assert [each["custom_id"] for each in told[1]] == list(WRONG)
    assert {each["response"]["status_code"] for each in told[1]} == {400}
    order = [each["custom_id"] for each in REQUESTS if each["custom_id"] not in WRONG]
    assert [each["custom_id"] for each in told[0]] == order
    answers = {each["custom_id"]: each["response"]["body"] for each in told[0]}
    assert json.loads(answers["schema"]["choices"][0]["message"]["content"])["n"] in (1, 2)
    files = [path.read_text() for path in local]
    # The front end of the fixture reports the digest of another bundle.
    mine, other = f"fp_{engines.manifest.digest[:12]}", "fp_0123456789ab"
    for at_once in (1, 8):
        _, remote = asked(file, f"remote{at_once}.jsonl", over(front), at_once)
        assert [path.read_text().replace(other, mine) for path in remote] == files
    _, again = asked(file, "again.jsonl", Local(engines.path, 2), 1)
    assert [path.read_text() for path in again] == files


@needs_triton
def test_a_server_that_dies_and_comes_back(tmp_path: Path, server: Server, front: FrontEnd) -> None:
    slow = {"max_denoising_steps": 40, "stability_threshold": 10_000, "max_tokens": 40}
    file = write(tmp_path, *(chat(text, content=text, **slow) for text in TEXTS))
    _, (expected, _) = asked(file, "expected.jsonl", over(front))
    options = FrontOptions(port=0, about={"digest": "0123456789abcdef"})
    outputs = Outputs.of(tmp_path / "killed.jsonl")
    with ThreadPoolExecutor(1) as pool:
        with FrontEnd.over(server, options) as first:
            port = first.port
            batch = pool.submit(asked, file, outputs.answers.name, over(first), 2)
            assert eventually(lambda: count_done(outputs) >= 2)
            assert first.pid is not None
            os.kill(first.pid, signal.SIGKILL)
        assert not batch.done()
        with FrontEnd.over(server, FrontOptions(port=port, about=options.about)):
            batch.result(120)
    assert outputs.answers.read_bytes() == expected.read_bytes()


@needs_triton
def test_others_take_over_and_none_ends_it(
    tmp_path: Path, front: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, *(chat(text, content=text) for text in TEXTS))
    dead, said = "http://127.0.0.1:9", []
    monkeypatch.setattr(servers._log, "warning", lambda form, *told: said.append(form % told))
    done, _ = asked(file, "one.jsonl", Servers([dead, front.url], "", 60))
    assert (done.answers, done.errors) == (len(TEXTS), 0)
    (once,) = said  # one warning, not one per attempt
    assert once.startswith(f"{dead} is down; requests to it are retried later: Cannot connect")
    monkeypatch.setattr(servers, "PATIENCE", 0.1)
    with pytest.raises(
        CanvasError, match=r"all servers have been down for .*127\.0\.0\.1:9"
    ) as error:
        asked(file, "none.jsonl", Servers([dead], "", 60))
    assert "continues from here" in error.value.hint


@needs_triton
def test_a_busy_server_is_asked_again_and_named_once(
    tmp_path: Path, front: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, *(chat(text, content=text) for text in TEXTS))
    post, refused, said = Servers._post, [], []

    async def busy(self: Servers, *given: Any) -> Any:
        if len(refused) < 5:
            refused.append(given)
            return Reply(429, {"error": {"message": "too many requests"}}), 0.0
        return await post(self, *given)

    monkeypatch.setattr(Servers, "_post", busy)
    monkeypatch.setattr(servers._log, "warning", lambda form, *told: said.append(form % told))
    done, _ = asked(file, "out.jsonl", over(front))
    assert (done.answers, done.errors) == (len(TEXTS), 0)
    assert said == [
        f"{front.url.removesuffix('/v1')} is busy; the requests that it refused are retried: too many requests"
    ]


@needs_triton
@pytest.mark.parametrize(
    ("port", "scheme", "says"),
    [
        ("http", "http", "is Triton$"),
        ("metrics", "http", "is Triton$"),
        ("grpc", "http", "does not speak HTTP:"),
        ("grpc", "https", "does not speak HTTPS:"),
    ],
)
def test_wrong_ports_end_it_before_the_first_line(
    tmp_path: Path, server: Server, port: str, scheme: str, says: str
) -> None:
    file = write(tmp_path, *(chat(text) for text in TEXTS))
    opened = Servers([f"{scheme}://127.0.0.1:{getattr(server.ports, port)}"], "", 60)
    with pytest.raises(CanvasError, match=says) as error:
        asked(file, "out.jsonl", opened)
    assert "--url" in error.value.hint


@needs_triton
def test_a_key_is_sent_and_a_wrong_one_ends_it(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, *(chat(text) for text in TEXTS[:3]))
    monkeypatch.setenv(KEY_VARIABLE, "right")
    out = tmp_path / "out.jsonl"
    with FrontEnd.over(server, FrontOptions(port=0, keys=("right",), max_key_requests=1)) as front:
        with pytest.raises(CanvasError, match="refused the request: Incorrect API key"):
            asked(file, "out.jsonl", Servers([front.url], "wrong", 60))
        # The refused batch left no files. Requests beyond the key's limit wait.
        assert canvasrt(["batch", str(file), "-o", str(out), "--url", front.url]) == 0
    assert len(out.read_text().splitlines()) == 3


def test_failed_passes(tmp_path: Path, engines: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed pass is repeated. A fatal error of the engines ends the batch, but no finished answer is lost."""
    file = write(tmp_path, *(chat(text, content=text) for text in TEXTS))
    _, (expected, _) = asked(file, "expected.jsonl", Local(engines.path, 1))
    step, passes, fatal = Generator._denoise, 0, False

    def fails(self: Generator) -> Any:
        nonlocal passes
        passes += 1
        if passes == 3:
            raise EngineError("the device is lost", fatal=fatal)
        return step(self)

    monkeypatch.setattr(Generator, "_denoise", fails)
    _, (repeated, errors) = asked(file, "repeated.jsonl", Local(engines.path, 1))
    assert repeated.read_bytes() == expected.read_bytes()
    assert not errors.exists()
    passes, fatal = 0, True
    with pytest.raises(EngineError, match="the device is lost"):
        asked(file, "lost.jsonl", Local(engines.path, 1))
    _, (gone_on, _) = asked(file, "lost.jsonl", Local(engines.path, 1))
    assert gone_on.read_bytes() == expected.read_bytes()


def test_the_command(tmp_path: Path, engines: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = write(tmp_path, chat("good"), chat("bad", temperature=-1)), tmp_path / "out.jsonl"
    command = ["batch", str(file), "-o", str(out), "--bundle", str(engines.path), "--threads", "1"]
    assert canvasrt([*command, "--json"]) == 1
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert (told["answers"], told["errors"]) == (1, 1)
    assert "error: 1 of 2 requests failed" in captured.err
    assert "out.errors.jsonl" in captured.err
    assert canvasrt(command) == 1
    assert "out.jsonl exists" in capsys.readouterr().err


# Runs the command, stops when the journal has a given number of lines and reports this, and continues once its input
# ends.
STOPS = """
import sys
from canvasrt.__main__ import main
from canvasrt.containers.batch.journal import Journal

def add(self, *given):
    global left
    real(self, *given)
    left -= 1
    if left == 0:
        print(flush=True)
        sys.stdin.read()

real, left = Journal.add, int(sys.argv.pop(1))
Journal.add = add
main()
"""


@pytest.mark.acceptance
def test_killed_at_any_line(tmp_path: Path, engines: Bundle) -> None:
    file = write(tmp_path, *(chat(text, content=text) for text in TEXTS))
    _, (expected, _) = asked(file, "expected.jsonl", Local(engines.path, 1))
    outputs = Outputs.of(tmp_path / "out.jsonl")
    command = ["batch", str(file), "-o", str(outputs.answers)]
    command += ["--bundle", str(engines.path), "--threads", "1"]
    rng, killed = random.Random(4), 0
    while not outputs.answers.exists():
        stops = [sys.executable, "-c", STOPS, str(rng.randint(1, 4))]
        with subprocess.Popen(
            [*stops, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdout is not None
            if process.stdout.readline() == b"\n":
                before = count_done(outputs)
                process.send_signal((signal.SIGKILL, signal.SIGINT, signal.SIGTERM)[killed % 3])
                killed += 1
            process.communicate()
        assert process.returncode in (0, -9, 130, 143)
        assert outputs.answers.exists() or count_done(outputs) >= before
    assert killed >= 3
    assert outputs.answers.read_bytes() == expected.read_bytes()
