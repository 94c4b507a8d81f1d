"""`Runner`: runs launched steps on the device, in order, and hands their samples back.

A step goes in as `StepWork` and comes out as `StepSamples`; between the two the host is free. On an
accelerator the launch itself does not wait. On the CPU the forward occupies whoever calls it, so
the asynchronous loop gives it a thread of its own.

Shape letters: L = sequences that get a token in the step, K = best tokens asked for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from deepinfer.cache.layout import CacheLayout
from deepinfer.config.model_config import ModelConfig
from deepinfer.engine.prefixes import SlotCopies
from deepinfer.sampling.sampler import Sampler, Samples
from deepinfer.sampling.table import SamplingRows
from deepinfer.step import StepInputs
from deepinfer.step.builder import InputBuilder
from deepinfer.tokenizer import Tokenizer

__all__ = ["EngineModel", "InlineRunner", "Launched", "StepSamples", "StepWork", "ThreadRunner"]

_Ints = npt.NDArray[np.int64]


class EngineModel(Protocol):
    """What the engine needs of a model: `deepinfer.Model`, or a stand-in for tests."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def layout(self) -> CacheLayout: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def compute_bytes(self) -> int:
        """Bytes of a number that caches keep in compute precision."""
        ...

    def check_prompt(self, prompt: object, *, name: str = "prompt") -> list[int]:
        """The token ids as plain integers; raises RequestError."""
        ...

    def new_cache(self, *, num_slots: int, num_blocks: int) -> Any:
        """Empty caches, handed back to `forward` as they are. They have `copy_slots(sources,
        targets)`, which copies the state of slots, as `CachePools` does.
        """
        ...

    def input_builder(self) -> InputBuilder: ...
    def forward(self, step: StepInputs, cache: Any) -> torch.Tensor:
        """Logits of `step.logits_rows`, float32 (L, V); writes the step's rows into `cache`."""
        ...


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step, ready to run."""

    inputs: StepInputs
    sampling: SamplingRows
    """How the L rows with logits are sampled."""
    unread_rows: _Ints
    """Rows whose token is a sample of the step launched before."""
    unread_from: _Ints
    """Which sample of that step each of them takes."""
    restored: SlotCopies | None = None
    """Slots to copy before the forward: snapshots to the sequences that go on from them."""
    saved: SlotCopies | None = None
    """Slots to copy behind the forward: sequences to snapshots."""


@dataclass(frozen=True, slots=True)
class StepSamples:
    """What a step yields, on the host."""

    token_ids: npt.NDArray[np.int64]
    """(L,)."""
    is_valid: npt.NDArray[np.bool_]
    """(L,); False: the logits were not finite."""
    logprobs: npt.NDArray[np.float32] | None
    """(L,), of the chosen tokens, where a sequence asked for any."""
    top_ids: npt.NDArray[np.int64] | None
    """(L, K)."""
    top_logprobs: npt.NDArray[np.float32] | None
    """(L, K)."""


class Launched(Protocol):
    """A step on its way."""

    def result(self) -> StepSamples:
        """Wait for its samples; raises what stopped it."""
        ...


class _Chain:
    """Model, caches and sampler, and the samples of the step that ran last."""

    def __init__(self, model: EngineModel, cache: Any, sampler: Sampler) -> None:
        self._model, self._cache, self._sampler = model, cache, sampler
        self._last: Samples | None = None
        image_token_id = model.config.image_token_id
        self._image_token_id = -1 if image_token_id is None else image_token_id

    @torch.inference_mode()
    def run(self, work: StepWork) -> Samples:
        """Forward and sampling of one step."""
        last, self._last = self._last, None
        if len(work.unread_rows):
            assert last is not None, "the step that was to yield a token did not run"
            self._fill_in(work, last)
        if work.restored is not None:
            self._cache.copy_slots(work.restored.sources, work.restored.targets)
        logits_lv = self._model.forward(work.inputs, self._cache)
        if work.saved is not None:
            self._cache.copy_slots(work.saved.sources, work.saved.targets)
        self._last = self._sampler(logits_lv, work.sampling)
        return self._last

    def _fill_in(self, work: StepWork, last: Samples) -> None:
        """Write the tokens that were not known when the inputs were built."""
        inputs, device = work.inputs, work.inputs.token_ids_t.device
        row = torch.from_numpy(work.unread_rows).to(device)
        token = last.token_ids[torch.from_numpy(work.unread_from).to(device)]
        is_image = token == self._image_token_id
        inputs.token_ids_t[row] = token
        inputs.rows.is_image_t[row] = is_image
        if inputs.decoder_rows is not inputs.rows:
            keep = inputs.decoder_keep
            flags = inputs.rows.is_image_t if keep is None else inputs.rows.is_image_t[keep]
            inputs.decoder_rows.is_image_t.copy_(flags)
        if inputs.lookback_tg is not None:
            lookback = inputs.lookback_tg[row]
            lookback[:, 0] = token
            inputs.lookback_tg[row] = torch.where(is_image[:, None], -1, lookback)


class _HostCopy:
    """Samples on their way to the host. Waiting for them does not wait for later steps."""

    def __init__(self, samples: Samples) -> None:
        device = samples.token_ids.device
        # on an accelerator this queues copies into pinned memory and goes on
        self._tensors = [
            None if values is None else values.to("cpu", non_blocking=True)
            for values in (
                samples.token_ids,
                samples.is_valid,
                samples.logprobs,
                samples.top_ids,
                samples.top_logprobs,
            )
        ]
        self._event: torch.Event | None = None
        if device.type != "cpu":
            self._event = torch.Event(device=device)
            self._event.record()

    def wait(self) -> StepSamples:
        if self._event is not None:
            self._event.synchronize()
        arrays: list[Any] = [None if t is None else t.numpy() for t in self._tensors]
        return StepSamples(*arrays)


@dataclass(slots=True)
class _Now:
    """A step that was launched by its caller; on an accelerator it may still be running."""

    samples: _HostCopy | Exception

    def result(self) -> StepSamples:
        if isinstance(self.samples, Exception):
            raise self.samples
        return self.samples.wait()


class InlineRunner:
    """Launches steps from the caller's thread. The CPU computes the step meanwhile; an accelerator
    queues it.
    """

    def __init__(self, model: EngineModel, cache: Any, sampler: Sampler) -> None:
        self._chain = _Chain(model, cache, sampler)

    def launch(self, work: StepWork) -> Launched:
        try:
            return _Now(_HostCopy(self._chain.run(work)))
        except Exception as problem:
            return _Now(problem)

    def close(self) -> None:
        """Nothing to end."""


class _Later:
    """A step that a thread runs."""

    def __init__(self, work: StepWork, is_alive: Callable[[], bool]) -> None:
        self.work = work
        self._is_alive = is_alive
        self._done = threading.Event()
        self._samples: StepSamples | BaseException | None = None

    def set(self, samples: StepSamples | BaseException) -> None:
        self._samples = samples
        self._done.set()

    def result(self) -> StepSamples:
        while not self._done.wait(timeout=1.0):
            if not self._is_alive() and not self._done.is_set():
                raise RuntimeError("the thread that runs the model has died")
        if isinstance(self._samples, StepSamples):
            return self._samples
        assert self._samples is not None, "a step is done, but has no result"
        raise self._samples


class ThreadRunner:
    """Runs steps in a thread of its own, so that the host can work on the next one meanwhile."""

    def __init__(self, model: EngineModel, cache: Any, sampler: Sampler) -> None:
        self._chain = _Chain(model, cache, sampler)
        self._queue: queue.SimpleQueue[_Later | None] = queue.SimpleQueue()
        # torch keeps the number of threads per calling thread
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name="deepinfer-steps", daemon=True)
        self._thread.start()

    def launch(self, work: StepWork) -> Launched:
        later = _Later(work, self._thread.is_alive)
        self._queue.put(later)
        return later

    def close(self) -> None:
        """End the thread behind the step that it is in; the others are given up."""
        with suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        self._queue.put(None)
        self._thread.join(timeout=30.0)

    def _work(self) -> None:
        torch.set_num_threads(self._num_threads)
        while (later := self._queue.get()) is not None:
            try:
                later.set(_HostCopy(self._chain.run(later.work)).wait())
            except BaseException as problem:  # handed to whoever waits for the result
                later.set(problem)
