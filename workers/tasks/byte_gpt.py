"""A small pre-norm GPT on the bytes of real text: a user's file or folder, or the standard library's own source."""

import math
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muonscope.contract.run_spec import ByteGptTask
from workers.errors import TaskUnusable
from workers.tasks import Batch, TaskContext
from workers.tasks.simple_model import batch_seed

VOCABULARY: Final = 256
# Enough for any run this model is meant for, read in a moment.
MAX_DEFAULT_BYTES: Final = 2 * 1024 * 1024
MAX_FOLDER_BYTES: Final = 256 * 1024 * 1024


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and added to the residual stream."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.query = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(hidden_size, hidden_size, bias=False)
        self.value = nn.Linear(hidden_size, hidden_size, bias=False)
        self.projection = nn.Linear(hidden_size, hidden_size, bias=False)
        self.mlp_norm = nn.LayerNorm(hidden_size)
        self.mlp_in = nn.Linear(hidden_size, 4 * hidden_size, bias=False)
        self.mlp_out = nn.Linear(4 * hidden_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._attend(self.attention_norm(hidden))
        mixed: Tensor = hidden + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(hidden))))
        return mixed

    def _attend(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        heads = (batch, length, self.num_heads, width // self.num_heads)
        # (batch, heads, length, head width)
        query, key, value = (layer(hidden).view(heads).transpose(1, 2) for layer in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return projected


class ByteGpt(nn.Module):
    """Bytes in, next-byte logits out."""

    def __init__(self, task: ByteGptTask) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, task.hidden_size)
        self.position_embedding = nn.Embedding(task.context_length, task.hidden_size)
        self.blocks = nn.ModuleList(Block(task.hidden_size, task.num_heads) for _ in range(task.num_layers))
        self.final_norm = nn.LayerNorm(task.hidden_size)
        self.lm_head = nn.Linear(task.hidden_size, VOCABULARY, bias=False)
        self._initialize(task.num_layers)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.size(1), device=tokens.device)
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.lm_head(self.final_norm(hidden))
        return logits

    def _initialize(self, num_layers: int) -> None:
        """GPT-2's: N(0, 0.02), what writes to the residual stream scaled down by its depth."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            std = 0.02 / math.sqrt(2 * num_layers) if name.endswith(("projection.weight", "mlp_out.weight")) else 0.02
            nn.init.normal_(parameter, std=std)


class ByteGptRun:
    """ByteGpt on windows drawn from the text, uniformly and anew for each (seed, rank, step, micro-batch)."""

    def __init__(self, task: ByteGptTask, context: TaskContext) -> None:
        self._text = read_text(task.text)
        self._length = task.context_length
        if len(self._text) <= self._length + 1:
            where = task.text or "the standard library's source"
            raise TaskUnusable(
                f"{where} holds {len(self._text)} bytes, fewer than context_length + 2 = {self._length + 2}; "
                "give a longer text or a shorter context"
            )
        self.model = ByteGpt(task)
        self._context = context

    def batch(self, step: int, micro_batch: int) -> Batch:
        generator = torch.Generator().manual_seed(batch_seed(self._context, step * 65536 + micro_batch))
        size = self._context.micro_batch_size
        starts = torch.randint(0, len(self._text) - self._length - 1, (size,), generator=generator)
        windows = np.stack([self._text[start : start + self._length + 1] for start in starts.tolist()])
        tokens = torch.from_numpy(windows.astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        inputs, targets = batch
        logits = model(inputs)
        # fp32: the sum over the vocabulary's exponentials would round away in half precision.
        return F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.view(-1))

    def tokens(self, batch: Batch) -> int:
        return batch[0].numel()


def read_text(source: str | None) -> Any:
    """Return the text's bytes as a uint8 array: a file is mapped, a folder's files are joined in name order.

    Raises:
        TaskUnusable: the path is not there or cannot be read on this node.
    """
    if source is None:
        return _joined(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")), MAX_DEFAULT_BYTES)
    try:
        path = Path(source).expanduser()
        if path.is_dir():
            return _joined(sorted(_files(path)), MAX_FOLDER_BYTES)
        if path.stat().st_size == 0:
            return np.zeros(0, dtype=np.uint8)
        return np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, RuntimeError) as error:
        # The latter where `~name` is nobody.
        why = getattr(error, "strerror", None) or error
        raise TaskUnusable(
            f"text {source!r} cannot be read on this node: {why}; give a path that every node of the run reads, or "
            "leave text out for the one that comes with Python"
        ) from error


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


def _joined(paths: list[Path], limit: int) -> Any:
    pieces, size = [], 0
    for path in paths:
        if size >= limit:
            break
        pieces.append(path.read_bytes()[: limit - size])
        size += len(pieces[-1])
    return np.frombuffer(b"".join(pieces), dtype=np.uint8)


def build(task: ByteGptTask, context: TaskContext) -> ByteGptRun:
    return ByteGptRun(task, context)
