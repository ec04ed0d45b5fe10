"""`canvasrt batch --ray` on a local cluster of two machines, one of which is lost during the batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from canvasrt.bundle import Bundle
from canvasrt.containers.batch.journal import Outputs
from canvasrt.containers.batch.local import Local
from canvasrt.containers.batch.run import run_batch
from tests.helpers.batches import chat, count_done, write
from tests.helpers.serving import eventually

ray = pytest.importorskip("ray", reason="ray is not installed: pip install canvasrt[ray]")
SLOW = {"max_denoising_steps": 40, "stability_threshold": 10_000, "max_tokens": 40}


@pytest.mark.acceptance
def test_a_machine_that_is_lost_loses_nothing(tmp_path: Path, engines: Bundle) -> None:
    from ray.cluster_utils import Cluster

    texts = [f"{word} {number}" for number in range(12) for word in ("shuffle", "reverse")]
    file = write(tmp_path, *(chat(text, content=text, **SLOW) for text in texts))
    expected = tmp_path / "expected.jsonl"
    run_batch(file, expected, 0, "model", Local(engines.path, 1), 4)
    outputs = Outputs.of(tmp_path / "out.jsonl")
    options = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    try:
        other = cluster.add_node(**options)
        command = ["batch", str(file), "-o", str(outputs.answers), "--bundle", str(engines.path)]
        command += ["--ray", cluster.address, "--threads", "1", "--concurrency", "4"]
        with subprocess.Popen([sys.executable, "-m", "canvasrt", *command]) as batch:
            assert eventually(lambda: count_done(outputs) >= 2)
            cluster.remove_node(other, allow_graceful=False)
            assert count_done(outputs) < len(texts)
    finally:
        cluster.shutdown()
    assert batch.returncode == 0
    assert outputs.answers.read_bytes() == expected.read_bytes()
