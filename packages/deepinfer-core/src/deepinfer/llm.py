"""`LLM`: a model and its engine, for Python programs.

Prompts go in as text or token ids, results come out one per prompt, in their order. Several threads
may use one `LLM`: what they ask for runs together.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Never, Self

from deepinfer.chat import ChatFormat, ChatMessage, ChatPrompt, as_conversations
from deepinfer.chat.results import with_messages
from deepinfer.config.engine_config import EngineConfig, ResolvedConfig, resolve
from deepinfer.config.fields import is_integer, shown
from deepinfer.config.keywords import check_keywords
from deepinfer.engine.core import Engine
from deepinfer.engine.driver import Call, Driver
from deepinfer.engine.feed import Feed
from deepinfer.engine.interrupt import InterruptWatch
from deepinfer.engine.progress import Bar
from deepinfer.engine.prompts import Prompt, as_prompts
from deepinfer.engine.runner import EngineModel
from deepinfer.engine.statistics import Counts, Statistics
from deepinfer.engine.streaming import DeltaStream
from deepinfer.engine.submission import Submission
from deepinfer.errors import ConfigError, EngineError, RequestError
from deepinfer.model.load import load_model
from deepinfer.outputs import Progress, RequestDelta, RequestOutput
from deepinfer.report.platforms import Platform, count_devices, require_devices
from deepinfer.sampling_params import SamplingParams
from deepinfer.tokenizer import Tokenizer

__all__ = ["LLM"]

logger = logging.getLogger(__name__)

_LOAD_NAMES = (
    "numerics",
    "device",
    "kernels",
    "kv_format",
    "engram_token_map",
    "offline",
    "revision",
    "ignore_unexpected",
)
_ALIASES = {
    "backend": "kernels",
    "expert_parallel_size": "ep",
    "gpu_memory_utilization": "device_memory_utilization",
}
"""Names of other engines, and ours."""

Message = Mapping[str, Any] | ChatMessage
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model that answers prompts.

    Args:
        model: folder of a checkpoint, its hub id, or a loaded model (`deepinfer.load_model`).
        ep: devices that share the experts; this version has one process, so 1.
        options: how the model is loaded, as for `deepinfer.load_model` (`numerics`, `device`,
            `kernels`, `kv_format`, `offline`, `revision`, ...), and the limits of the engine, as in
            `deepinfer.EngineConfig` (`max_model_len`, `max_num_seqs`, `max_num_batched_tokens`,
            `kv_cache_memory_bytes`, `device_memory_utilization`, `async_scheduling`, `seed`,
            `log_interval_s`).

    Attributes:
        config: the limits, all decided.

    Raises:
        ConfigError: an unknown option, or limits that contradict each other or the memory.
        CheckpointError: the checkpoint is damaged or incomplete.
        BackendError: the kernels asked for are not usable here.

    Example:
        >>> llm = LLM("./tiny", max_num_seqs=8)
        >>> for output in llm.generate(["The sea", "Bread"], SamplingParams(max_tokens=16)):
        ...     print(output.text)
    """

    def __init__(self, model: str | Path | EngineModel, *, ep: int = 1, **options: Any) -> None:
        options = _canonical({"ep": ep, **options})
        _check_parallel(options.pop("ep"), str(options.get("device", "cpu")))
        load = {name: options.pop(name) for name in _LOAD_NAMES if name in options}
        engine_config = EngineConfig(**options)
        if not isinstance(model, str | Path):
            if load:
                raise ConfigError(
                    f"{', '.join(sorted(load))}: a loaded model has its own; give it to load_model"
                )
            self.model: EngineModel = model
        else:
            self.model = load_model(model, **load)
        self.config: ResolvedConfig = resolve(
            engine_config,
            self.model.layout,
            device=str(self.model.device),
            compute_bytes=self.model.compute_bytes,
        )
        self._driver = Driver(Engine(self.model, self.config))
        self._submission = Submission(self.model, self.config)
        # also when it is forgotten, and at the end of the program: a thread inside torch would
        # crash it
        self._closing = weakref.finalize(self, self._driver.close)

    # ---- answers ----

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: Params = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        **unknown: Never,
    ) -> list[RequestOutput]:
        """Answer prompts, all of them together.

        Args:
            prompts: texts, lists of token ids, or dicts with `prompt` or `prompt_token_ids`; a
                single one may be given bare.
            sampling_params: one for all prompts, or one each; None: the defaults.
            prompt_token_ids: another way to give prompts as token ids.
            priority: smaller goes first; one for all, or one each.
            use_tqdm: show a progress bar on stderr.
            on_progress: called after every step.
            should_stop: asked before every step; True aborts what is unfinished.

        Returns:
            Exactly one result per prompt, in their order. A prompt that cannot be served has its
            `error` set; the others go on. After Ctrl-C, what was unfinished has the finish reason
            `abort`; a second Ctrl-C raises KeyboardInterrupt at once.

        Raises:
            RequestError: the call itself is wrong, such as 2 parameters for 3 prompts.
            EngineError: the device or the model failed; its `outputs` has one result per prompt.
        """
        check_keywords(unknown, _names_of(self.generate), "generate", RequestError)
        call = self._submit(prompts, sampling_params, prompt_token_ids, priority)
        start = self.statistics.counts
        try:
            return self._wait(call, start, use_tqdm, on_progress, should_stop)
        except BaseException:
            self._driver.abort(call.request_ids)
            raise

    def _wait(
        self,
        call: Call,
        start: Counts,
        use_tqdm: bool,
        on_progress: Callable[[Progress], None] | None,
        should_stop: Callable[[], bool] | None,
    ) -> list[RequestOutput]:
        """Run a call to its end, under a bar and with an eye on Ctrl-C."""
        with InterruptWatch() as watch, Bar(len(call.results), enabled=use_tqdm) as bar:

            def turn() -> None:
                progress = self._progress(call, start)
                bar.update(progress)
                if on_progress is not None:
                    on_progress(progress)

            def stops() -> bool:
                return watch.is_interrupted or (should_stop is not None and should_stop())

            shows = use_tqdm or on_progress is not None
            return self._driver.run(call, on_turn=turn if shows else None, should_stop=stops)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        thinking: bool = True,
        reasoning_effort: str | int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        response_format: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, all of them together.

        Args:
            messages: a conversation, a list of dicts with `role` and `content`; or a list of
                conversations.
            sampling_params: one for all conversations, or one each; None: the defaults. Stop
                strings end the reasoning, too.
            thinking, reasoning_effort, tools, tool_choice, response_format,
                continue_final_message: as for `deepinfer.chat.render_chat`, for all of them.
            priority, use_tqdm, on_progress, should_stop: as for `generate`.

        Returns:
            Exactly one result per conversation, in their order. `message` has the reasoning, the
            content and the tool calls of each answer; `text` has all of it as `sampling_params`
            say. A malformed conversation has its `error` set; the others go on.

        Raises:
            RequestError: the call itself is wrong, such as an unknown effort.
            BackendError: the package deepseek-recipe is not installed.
            EngineError: as for `generate`.

        Example:
            >>> output = llm.chat([{"role": "user", "content": "Hi"}])[0]
            >>> print(output.message.reasoning_content, output.message.content)
        """
        prompts = self.chat_format.prompts(
            as_conversations(messages),
            thinking=thinking,
            reasoning_effort=reasoning_effort,
            tools=tools,
            tool_choice=tool_choice,
            response_format=response_format,
            continue_final_message=continue_final_message,
        )
        given: list[Any] = [p.token_ids if isinstance(p, ChatPrompt) else p for p in prompts]
        try:
            outputs = self.generate(
                prompt_token_ids=given,
                sampling_params=sampling_params,
                priority=priority,
                use_tqdm=use_tqdm,
                on_progress=on_progress,
                should_stop=should_stop,
            )
        except EngineError as problem:
            problem.outputs = with_messages(problem.outputs, prompts, self.chat_format)
            raise
        return with_messages(outputs, prompts, self.chat_format)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: Params = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        priority: int | Sequence[int] = 0,
        should_stop: Callable[[], bool] | None = None,
        **unknown: Never,
    ) -> Iterator[RequestDelta]:
        """Answer prompts and tell what each step adds, as it comes.

        Arguments and errors are those of `generate`. The last delta of each prompt carries its
        `output`. Ending the iteration early aborts what is unfinished.
        """
        check_keywords(unknown, _names_of(self.stream), "stream", RequestError)
        deltas: deque[RequestDelta] = deque()
        call = self._submit(
            prompts, sampling_params, prompt_token_ids, priority, on_delta=deltas.append
        )
        return DeltaStream(self._driver, call, deltas, should_stop)

    async def generate_async(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: Params = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        priority: int | Sequence[int] = 0,
        **unknown: Never,
    ) -> list[RequestOutput]:
        """`generate` for asyncio: the engine runs in a thread, and calls run together.

        Cancelling the task aborts what is unfinished.
        """
        check_keywords(unknown, _names_of(self.generate_async), "generate_async", RequestError)
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def finish() -> None:
            _post(loop, done.set)

        call = self._submit(
            prompts,
            sampling_params,
            prompt_token_ids,
            priority,
            on_done=finish,
        )
        try:
            if not call.is_done:
                self._driver.run_in_background()
                await done.wait()
        finally:
            if not call.is_done:
                self._driver.abort(call.request_ids)
                self._driver.run_in_background()
        self._driver.check(call)
        return call.outputs()

    async def stream_async(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: Params = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        priority: int | Sequence[int] = 0,
        **unknown: Never,
    ) -> AsyncIterator[RequestDelta]:
        """`stream` for asyncio."""
        check_keywords(unknown, _names_of(self.stream_async), "stream_async", RequestError)
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[RequestDelta | None] = asyncio.Queue()

        def pass_on(delta: RequestDelta | None) -> None:
            _post(loop, arrived.put_nowait, delta)

        call = self._submit(
            prompts,
            sampling_params,
            prompt_token_ids,
            priority,
            on_delta=pass_on,
            on_done=lambda: pass_on(None),
        )
        try:
            if call.num_finished < len(call.results):
                self._driver.run_in_background()
            elif not call.request_ids:
                pass_on(None)
            while (delta := await arrived.get()) is not None:
                yield delta
            self._driver.check(call)
        finally:
            if not call.is_done:
                self._driver.abort(call.request_ids)
                self._driver.run_in_background()

    def feed(self) -> Feed[Any]:
        """Requests one by one, results as they finish; the caller bounds how many are in flight."""
        return Feed(self._driver, self._submission)

    def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests with what they have, from any thread; unknown names are passed over.

        Args:
            request_id: `RequestDelta.request_id`, or several.
        """
        names = [request_id] if isinstance(request_id, str) else request_id
        if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
            raise RequestError(f"request_id={shown(request_id)} is no name, nor a list of names")
        self._driver.abort(names)

    # ---- the rest ----

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None for a folder without one."""
        return self.model.tokenizer

    def get_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None for a folder without one."""
        return self.model.tokenizer

    @cached_property
    def chat_format(self) -> ChatFormat:
        """How conversations become prompts, and answers become messages.

        Raises:
            RequestError: the model has no tokenizer.
            BackendError: the package deepseek-recipe is not installed.
        """
        if self.model.tokenizer is None:
            raise RequestError(
                "the model has no tokenizer, so it takes no conversations; give token ids to "
                "generate"
            )
        return ChatFormat(self.model.tokenizer)

    @property
    def statistics(self) -> Statistics:
        """What the engine has done since it was made."""
        return self._driver.engine.statistics

    def metrics(self) -> str:
        """The statistics in Prometheus' text format; needs the package `prometheus-client`."""
        from deepinfer.engine.metrics import prometheus_text

        return prometheus_text(self.statistics)

    def close(self) -> None:
        """Abort what runs and give the caches back; more than once does no harm."""
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _submit(
        self,
        prompts: object,
        params: object,
        token_ids: object,
        priority: object,
        *,
        on_delta: Callable[[RequestDelta], None] | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> Call:
        """Check a call and queue its requests; those that cannot run have their result already."""
        given = as_prompts(prompts, token_ids)
        call, requests = self._submission.call(
            given, params, priority, on_delta=on_delta, on_done=on_done
        )
        self._driver.submit(requests)
        return call

    def _progress(self, call: Call, start: Counts) -> Progress:
        """How far a call has come; tokens are those of all calls that run beside it."""
        counts = self.statistics.counts.since(start)
        return Progress(
            num_finished=call.num_finished,
            num_requests=len(call.results),
            prompt_tokens=counts.prefill_tokens,
            output_tokens=counts.committed_tokens,
        )


def _names_of(method: Callable[..., object]) -> list[str]:
    """Names of a method's arguments."""
    return [name for name in inspect.signature(method).parameters if name != "unknown"]


def _post(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *values: object) -> None:
    """Call something in an event loop; one that was closed meanwhile has nobody who waits."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *values)


def _canonical(options: dict[str, Any]) -> dict[str, Any]:
    """Options under our names.

    Raises:
        ConfigError: an unknown one, or one given under two names.
    """
    known = {*_LOAD_NAMES, *_ALIASES, *(field.name for field in fields(EngineConfig)), "ep"}
    check_keywords(options, known, "LLM")
    for alias, name in _ALIASES.items():
        if alias in options:
            value = options.pop(alias)
            if name in options and name != "ep":
                raise ConfigError(f"{alias} and {name} are the same option; give one")
            options[name] = value
    return options


def _check_parallel(ep: object, device: str) -> None:
    if not is_integer(ep):
        raise ConfigError(f"ep={shown(ep)} is not a number of devices; give 1")
    if ep == 1:
        return
    kind = device.partition(":")[0]
    found = 1 if kind == "cpu" else count_devices(kind)
    require_devices(ep, Platform(name=kind, device_type=kind, num_devices=found))
    raise ConfigError(f"ep={ep}: this version runs on one device; use ep=1")
