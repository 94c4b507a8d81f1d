"""`Model`: a loaded model, for people who study it and for the engine.

Shape letters: S = tokens of a sequence, V = vocabulary, M = hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.pools import CachePools
from deepinfer.config.fields import is_integer, shown
from deepinfer.config.model_config import ModelConfig
from deepinfer.config.replay import replay_obstacle
from deepinfer.errors import RequestError
from deepinfer.kernels.interface import Kernels
from deepinfer.model.arguments import (
    Array,
    Nested,
    check_count,
    embeddings,
    items,
    per_sequence,
)
from deepinfer.model.forward import Trace
from deepinfer.model.transformer import Transformer
from deepinfer.step import StepInputs
from deepinfer.step.builder import InputBuilder, SequenceRows
from deepinfer.tokenizer import Tokenizer

__all__ = ["Model"]


class Model:
    """Weights, kernels and tokenizer of one model. Made by `deepinfer.load_model`.

    Attributes:
        transformer: the prepared weights and the forward over rows.
        config: the geometry.
        kernels: the operations it runs on.
        layout: formats and sizes of its caches.
        tokenizer: None for a folder without one.
    """

    def __init__(self, transformer: Transformer, tokenizer: Tokenizer | None = None) -> None:
        self.transformer = transformer
        self.tokenizer = tokenizer
        self.layout = CacheLayout(transformer.config, transformer.kernels.kv_format)

    @property
    def config(self) -> ModelConfig:
        return self.transformer.config

    @property
    def kernels(self) -> Kernels:
        return self.transformer.kernels

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.kernels.device

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number of the compute type."""
        return self.kernels.compute_dtype.itemsize

    def forward(self, step: StepInputs, cache: CachePools) -> torch.Tensor:
        """Logits of `step.logits_rows`, float32 (rows, V). Writes the step's rows into `cache`."""
        return self.transformer.forward(step, cache)

    def new_cache(self, *, num_slots: int, num_blocks: int) -> CachePools:
        """Empty caches for `num_slots` sequences and `num_blocks` blocks of 128 tokens."""
        return CachePools.allocate(
            self.layout,
            num_slots=num_slots,
            num_blocks=num_blocks,
            device=self.kernels.device,
            compute_dtype=self.kernels.compute_dtype,
        )

    def input_builder(self) -> InputBuilder:
        """Builder of this model's step inputs."""
        return InputBuilder(self.layout, self.kernels.device)

    @torch.inference_mode()
    def full_logits(
        self,
        token_ids: Sequence[Sequence[int]] | Array,
        *,
        image_mask: Nested | None = None,
        image_embeds: Nested | None = None,
        replay_keep: int | None = None,
        chunk_size: int | None = None,
        trace: Trace | None = None,
    ) -> list[torch.Tensor]:
        """Logits of every position of every sequence, all run together.

        Args:
            token_ids: sequences of token ids, each at least one long.
            image_mask: which positions are image rows, per sequence bool (S,) or None; a single
                sequence's may be given bare. None: the positions of the config's `image_token_id`.
            image_embeds: embeddings that replace those of the image rows, per sequence (rows, M) in
                row order or None; a single sequence's may be given bare. None: the embedding
                table's.
            replay_keep: run the decoder layers on the last `replay_keep` tokens of each sequence
                only (bounded replay, docs/model.md 3.9); the logits are then those of these tokens.
            chunk_size: rows of a sequence per forward; None runs each sequence in one. The logits
                do not depend on it.
            trace: receives intermediates of every forward, see `deepinfer.model.forward.Trace`.

        Returns:
            Per sequence float32 (S, V), or (min(replay_keep, S), V) under replay.

        Raises:
            RequestError: an empty sequence, an id outside the vocabulary, masks or embeddings that
                do not fit, a sequence beyond the model's context, or replay that the model cannot
                do.
        """
        prompts = [
            self.check_prompt(ids, name=f"sequence {number}")
            for number, ids in enumerate(
                items(token_ids, "token_ids", "a list of sequences of token ids")
            )
        ]
        check_count("chunk_size", chunk_size)
        self._check_replay(replay_keep)
        num, hidden = len(prompts), self.config.hidden_size
        given_masks = per_sequence("image_mask", image_mask, num, own_depth=1)
        masks = [self._mask(ids, mask) for ids, mask in zip(prompts, given_masks, strict=True)]
        given_embeds = per_sequence("image_embeds", image_embeds, num, own_depth=2)
        embeds = [
            embeddings(f"image_embeds of sequence {number}", embed, (sum(mask or ()), hidden))
            for number, (mask, embed) in enumerate(zip(masks, given_embeds, strict=True))
        ]
        blocks, num_blocks = [], 0
        for ids in prompts:
            need = self.layout.blocks_for(len(ids))
            blocks.append(range(num_blocks + 1, num_blocks + 1 + need))
            num_blocks += need
        cache, builder = (
            self.new_cache(num_slots=len(prompts), num_blocks=num_blocks),
            self.input_builder(),
        )
        parts: list[list[torch.Tensor]] = [[] for _ in prompts]
        done = [0] * len(prompts)
        while any(at < len(ids) for at, ids in zip(done, prompts, strict=True)):
            batch, owners = [], []
            for number, ids in enumerate(prompts):
                count = min(chunk_size or len(ids), len(ids) - done[number])
                if count <= 0:
                    continue
                cut = max(0, len(ids) - replay_keep) if replay_keep is not None else 0
                start, end = done[number], done[number] + count
                mask, embed = masks[number], embeds[number]
                before, inside = (sum(mask[:start]), sum(mask[start:end])) if mask else (0, 0)
                batch.append(
                    SequenceRows(
                        token_ids=ids,
                        start=start,
                        count=count,
                        slot=number + 1,
                        blocks=blocks[number],
                        decoder_start=cut,
                        num_logits=max(0, end - max(start, cut)),
                        is_image=mask,
                        image_embeds=embed[before : before + inside] if embed is not None else None,
                    )
                )
                owners.append(number)
                done[number] = end
            logits = self.transformer.forward(builder.step(batch), cache, trace)
            sizes = [rows.num_logits for rows in batch]
            for number, part in zip(owners, logits.split(sizes), strict=True):
                parts[number].append(part)
        return [torch.cat(part).float() for part in parts]

    def check_prompt(self, prompt: object, *, name: str = "prompt") -> list[int]:
        """The token ids of a list, array or tensor as plain integers.

        Raises:
            RequestError: it is no prompt that this model can run.
        """
        ids: list[int] = items(prompt, name, "a list of token ids")
        wrong = [token for token in ids if not is_integer(token)]
        if wrong:
            raise RequestError(f"{name} has {shown(wrong[0], 60)}, token ids are integers")
        if not ids:
            raise RequestError(f"{name} is empty; give at least one token")
        outside = next((t for t in ids if not 0 <= t < self.config.vocab_size), None)
        if outside is not None:
            raise RequestError(
                f"{name} has token id {shown(outside)}, this model's ids are "
                f"0..{self.config.vocab_size - 1}"
            )
        if len(ids) > self.config.max_position_embeddings:
            raise RequestError(
                f"{name} is {len(ids)} tokens long, this model's context is "
                f"{self.config.max_position_embeddings}"
            )
        return ids

    def _check_replay(self, keep: int | None) -> None:
        check_count("replay_keep", keep)
        if keep is None:
            return
        obstacle = replay_obstacle(self.config)
        if obstacle is not None:
            raise RequestError(f"replay_keep={keep}: {obstacle}")

    def _mask(self, ids: Sequence[int], mask: object) -> list[bool] | None:
        image_id = self.config.image_token_id
        if mask is None:
            found = [t == image_id for t in ids]
            return found if any(found) else None
        flags: list[bool] = items(mask, "an image mask", "a list of one flag per token")
        wrong = [flag for flag in flags if not isinstance(flag, bool)]
        if wrong:
            raise RequestError(f"an image mask has {shown(wrong[0], 60)}, flags are True or False")
        if len(flags) != len(ids):
            raise RequestError(
                f"an image mask has {len(flags)} flags, its sequence {len(ids)} tokens"
            )
        return flags if any(flags) else None
