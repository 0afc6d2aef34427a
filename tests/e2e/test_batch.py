"""`headstart batch` against a running server: killed again and again, it leaves each line answered once."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serving import SMALL_POOL, Serve
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.e2e
NUM_LINES = 500
NUM_KILLS = 3


def test_500_lines_killed_three_times(tiny_model: Path, tmp_path: Path) -> None:
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with Serve("--model", str(tiny_model), "--threads", "1", "--worker-args", SMALL_POOL) as serve:
        body = {"model": serve.model(), "max_tokens": 2, "temperature": 0}
        lines = [
            {"custom_id": f"line-{i}", "method": "POST", "url": "/v1/completions", "body": body | {"prompt": prompt}}
            for i, prompt in enumerate(f"{'Group ' * 60}{i % 20}: {'question ' * 20}{i}" for i in range(NUM_LINES))
        ]
        random.Random(1).shuffle(lines)
        requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = [sys.executable, "-m", "server.cli", "batch", str(requests), str(answers), "--url", serve.url]

        def num_answers() -> int:
            return answers.read_bytes().count(b"\n") if answers.exists() else 0

        for kill in range(1, NUM_KILLS + 1):
            with subprocess.Popen([*command, "--concurrency", "8"], stdout=subprocess.PIPE) as process:
                wait_until(lambda kill=kill: num_answers() > kill * NUM_LINES // 5)
                process.kill()
            assert 0 < num_answers() < NUM_LINES
        with answers.open("ab") as file:
            file.write(b'{"id":"batch_req_12')  # as a kill in the middle of a write leaves it
        last = subprocess.run(command, check=True, capture_output=True, text=True, timeout=HANG_S)
        assert f"{NUM_LINES} of {NUM_LINES} lines have an answer" in last.stdout

        answered = [json.loads(line) for line in answers.read_text().splitlines()]
        assert sorted(answer["custom_id"] for answer in answered) == sorted(line["custom_id"] for line in lines)
        assert {answer["response"]["status_code"] for answer in answered} == {200}
        sample = lines[0]
        alone = serve.post("/v1/completions", sample["body"]).json()["choices"]
        [same] = [a["response"]["body"]["choices"] for a in answered if a["custom_id"] == sample["custom_id"]]
        assert same == alone
