"""`examples/batch.py` against a running server: killed again and again, it leaves each line answered once."""

from __future__ import annotations

import json
import random
import runpy
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

from tests.e2e.serving import SMALL_POOL, Serve
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.e2e
PROGRAM = Path(__file__).parents[2] / "examples" / "batch.py"
NUM_LINES = 300
NUM_KILLS = 3
NUM_GROUPS = 20


def test_lines_of_a_batch_killed_three_times(tiny_model: Path, tmp_path: Path) -> None:
    """Also a line that a kill has torn, one that is refused, and files that are no batch."""
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with Serve("--model", str(tiny_model), "--threads", "1", "--worker-args", SMALL_POOL) as serve:
        body = {"model": serve.model(), "max_tokens": 2, "temperature": 0}
        prompts = [f"{'Group ' * 60}{i % NUM_GROUPS}: {'question ' * 20}{i}" for i in range(NUM_LINES)]
        lines = [
            {"custom_id": f"line-{i}", "method": "POST", "url": "/v1/completions", "body": body | {"prompt": prompt}}
            for i, prompt in enumerate(prompts)
        ]
        lines.append({"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": body | {"n": -1}})
        random.Random(1).shuffle(lines)
        sorted_lines = runpy.run_path(str(PROGRAM))["in_order"](line for line in lines if line["custom_id"] != "bad")
        groups = groupby(sorted_lines, lambda line: line["body"]["prompt"].partition(":")[0])
        assert len(list(groups)) == NUM_GROUPS, "lines with a common prefix follow each other"
        requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = [sys.executable, str(PROGRAM), str(requests), str(answers), serve.url]

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
        assert f"{len(lines)} of {len(lines)} lines have an answer" in last.stdout

        answered = {answer["custom_id"]: answer for answer in map(json.loads, answers.read_text().splitlines())}
        assert num_answers() == len(answered) == len(lines)
        assert answered.pop("bad")["response"]["status_code"] == 400
        assert {answer["response"]["status_code"] for answer in answered.values()} == {200}
        alone = serve.post("/v1/completions", lines[0]["body"]).json()["choices"]
        assert answered[lines[0]["custom_id"]]["response"]["body"]["choices"] == alone

        notes = tmp_path / "notes.txt"
        for given, wrong in (((requests, notes), "my notes"), ((notes, answers), '{"custom_id": "a"}\n')):
            notes.write_text(wrong)
            done = subprocess.run([*command[:2], *map(str, given)], capture_output=True, text=True, timeout=HANG_S)
            assert (done.returncode, str(notes) in done.stderr, notes.read_text()) == (1, True, wrong)
