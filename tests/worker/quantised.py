"""Quantised matrices as GGUF files hold them."""

from __future__ import annotations

from typing import Final

import gguf
import numpy as np
import torch

from worker.model.base import QuantisedTensor

_FLOATS: Final = {"Q4_K": (0, 2), "Q6_K": (208,)}
"""Where a block has its float16, of kinds that the library cannot make."""


def quantised(kind: str, rows: int, num_blocks: int, seed: int = 0) -> tuple[QuantisedTensor, torch.Tensor]:
    """Return a matrix, and what the library makes of it in float32: the matrix of a file is that."""
    quantisation, rng = gguf.GGMLQuantizationType[kind], np.random.default_rng(seed)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
    columns = num_blocks * block_size
    if kind in _FLOATS:
        blocks = rng.integers(0, 256, size=(rows, num_blocks, block_bytes), dtype=np.uint8)
        for at in _FLOATS[kind]:
            blocks[:, :, at : at + 2] = rng.normal(size=(rows, num_blocks, 1)).astype(np.float16).view(np.uint8)
        data = blocks.reshape(rows, -1)
    else:
        data = gguf.quantize(rng.normal(size=(rows, columns)).astype(np.float32), quantisation)
    weight = torch.from_numpy(gguf.dequantize(data, quantisation).copy())
    return QuantisedTensor(kind, data, (rows, columns)), weight
