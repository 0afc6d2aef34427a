"""`python -m worker.print_bundle`: print a model's tokenizer bundle, packed as on the wire, without its weights."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from worker.files.errors import ModelError
from worker.files.tokenizer_files import bundle_of_folder, download, is_hub_id
from worker.wire import TokenizerBundle, pack


def bundle_of_source(source: str, *, block_size: int, max_model_len: int) -> TokenizerBundle:
    """Build the bundle of what --model names. Raise ModelError."""
    path = Path(source).expanduser()
    if not path.exists() and is_hub_id(source):
        path = download(source)[0]
    if source and path.is_dir() and not ((path / "config.json").is_file() or (path / "tokenizer.json").is_file()):
        files = sorted(path.glob("*.gguf"))
        path = files[0] if len(files) == 1 else path
    if source and path.suffix != ".gguf":
        name = path.resolve().name
        return bundle_of_folder(path, model=name, revision="", block_size=block_size, max_model_len=max_model_len)
    # These load torch, which a folder's files do without.
    from worker.model.gguf import GGUFCheckpoint
    from worker.model.load import default_model_path
    from worker.tokenizer_bundle import bundle_of_gguf

    checkpoint = GGUFCheckpoint(path if source else default_model_path())
    return bundle_of_gguf(checkpoint, block_size=block_size, max_model_len=max_model_len)


def main(argv: Sequence[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m worker.print_bundle")
    p.add_argument("--model", default="")
    p.add_argument("--block-size", type=int, default=16)
    p.add_argument("--max-model-len", type=int, default=1 << 20)
    args = p.parse_args(argv)
    try:
        bundle = bundle_of_source(args.model, block_size=args.block_size, max_model_len=args.max_model_len)
    except (ModelError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    sys.stdout.buffer.write(pack(bundle))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
