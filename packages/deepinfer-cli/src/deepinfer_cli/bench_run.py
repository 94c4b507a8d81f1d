"""One measurement of ``deepinfer bench``: its model, its runs, and its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepinfer_cli.bench_options import RunOptions
from deepinfer_cli.bench_tables import machine_lines
from deepinfer_cli.engine_options import ModelOptions, model_revision
from deepinfer_cli.exits import ExitCode, UsageError
from deepinfer_cli.interrupt import InterruptWatch
from deepinfer_cli.measure import Measured, measure, random_prompts
from deepinfer_cli.options import LogOptions
from deepinfer_cli.recording import make_record, write_record
from deepinfer_cli.streams import stderr_is_terminal, write_document, write_stderr, write_stdout
from deepinfer_cli.wording import in_cli_words

if TYPE_CHECKING:
    from deepinfer.llm import LLM
    from deepinfer.outputs import RequestOutput
    from deepinfer.sampling_params import SamplingParams

__all__ = ["BenchRun"]


@dataclass(slots=True)
class BenchRun:
    """One measurement on its way."""

    kind: str
    model: str
    llm: LLM
    options: RunOptions
    loading: ModelOptions
    log: LogOptions
    watch: InterruptWatch

    def say(self, text: str) -> None:
        """Tell on stderr how far it is."""
        if not self.log.quiet:
            write_stderr(text + "\n")

    def run(self, prompts: Sequence[Any], params: SamplingParams, *, bar: bool = False) -> Measured:
        """Run prompts together, until Ctrl-C ends it."""
        shows = bar and stderr_is_terminal() and not self.log.quiet
        return measure(
            self.llm, prompts, params, should_stop=self.watch.should_stop, use_tqdm=shows
        )

    def params(self, max_tokens: int) -> SamplingParams:
        """Fixed length, and no text: the model is measured, not the tokenizer."""
        from deepinfer.sampling_params import SamplingParams

        return SamplingParams(
            temperature=self.options.temperature,
            seed=self.options.seed,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
        )

    def prompts(self, count: int, length: int, name: str) -> list[dict[str, Any]]:
        """Random prompts; other names give others."""
        return random_prompts(self.llm, count, length, seed=f"{self.options.seed} {name}")

    def check_room(self, input_len: int, output_len: int) -> None:
        """Refuse lengths that the engine would cut short."""
        limit, total = self.llm.config.max_model_len, input_len + output_len
        if total > limit:
            raise UsageError(
                f"--input-len {input_len} and --output-len {output_len} are {total} tokens "
                f"together, --max-model-len is {limit}; shorten the one or raise the other"
            )

    def report(self, outputs: list[RequestOutput], figures: dict[str, Any], table: str) -> int:
        """Write what was found; gives the exit code."""
        failed = [output for output in outputs if output.error is not None]
        revision = model_revision(self.model, self.loading)
        record = make_record(self.llm, self.kind, self.model, outputs, figures, revision)
        if self.options.record is not None:
            write_record(self.options.record, record)
        if self.options.json:
            write_document(record)
        else:
            write_stdout(machine_lines(record) + table)
        if failed:
            reason = in_cli_words(failed[0].error or "")
            write_stderr(f"{len(failed)} of {len(outputs)} requests failed; the first: {reason}\n")
            return ExitCode.SOME_FAILED
        return ExitCode.DONE
