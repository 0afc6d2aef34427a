"""A model's sampling defaults are those that vLLM itself resolves from the same files."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.generation_configs import CONFIGS, CONTEXT
from tests.vllm.engines import ENVIRONMENT, INSTALLED, write_model
from worker.adapter.vllm import without_neutral
from worker.files.generation_config import sampling_defaults

RESOLVE = """
import json, sys
import vllm.platforms
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens

context = int(sys.argv[1])
request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "Hi"}])
for folder in sys.argv[2:]:
    defaults = EngineArgs(model=folder, max_model_len=context).create_model_config().get_diff_sampling_param()
    longest = get_max_tokens(context, None, 10, defaults)
    found = request.to_sampling_params(longest, defaults)
    names = "temperature top_p top_k min_p repetition_penalty frequency_penalty presence_penalty".split()
    print("resolved", json.dumps({name: getattr(found, name) for name in names} | {"max_tokens": longest}))
"""


def test_ten_files_resolve_as_in_vllm(tmp_path: Path) -> None:
    model, folders = write_model(), []
    for index, (fields, _) in enumerate(CONFIGS.values()):
        folder = tmp_path / str(index)
        folder.mkdir()
        for file in model.iterdir():
            if file.name != "generation_config.json":
                (folder / file.name).symlink_to(file)
        (folder / "generation_config.json").write_text(json.dumps(fields))
        folders.append(folder)
    command = [INSTALLED / "bin" / "python", "-c", RESOLVE, str(CONTEXT), *map(str, folders)]
    output = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout
    theirs = [json.loads(line.removeprefix("resolved ")) for line in output.splitlines() if line.startswith("resolved")]
    for name, folder, resolved in zip(CONFIGS, folders, theirs, strict=True):
        ours = without_neutral(sampling_defaults("auto", folder).shown())
        if ours.get("max_tokens", 0) > CONTEXT - 10:
            del ours["max_tokens"]
        if resolved["max_tokens"] == CONTEXT - 10:
            del resolved["max_tokens"]
        assert ours == without_neutral(resolved) == CONFIGS[name][1], name
