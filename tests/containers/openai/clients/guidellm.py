import json
import os
import sys
import tempfile
from pathlib import Path

# torch takes gigabytes, so it is not installed again: it comes from the tests' environment.
sys.path.append(os.environ["SITE_PACKAGES"])

from guidellm.__main__ import cli

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        prompts, report = Path(folder, "prompts.jsonl"), Path(folder, "report.json")
        prompts.write_text('{"prompt": "12+34="}\n' * 5)
        options = {
            "backend": f"kind=openai_http,target={os.environ['BASE']}",
            "profile": "kind=synchronous",
            "constraint": "kind=max_requests,count=5",
            "data": f"kind=json_file,path={prompts}",
            "output": f"kind=json,path={report}",
        }
        given = [part for name, value in options.items() for part in (f"--{name}", value)]
        cli(["run", "--disable-console", *given], standalone_mode=False)
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
        assert benchmark["metrics"]["request_totals"]["successful"] == 5
