"""Continue prompts with a model, all of them together, and print what comes out.

    python examples/offline_inference.py --model_name ./tiny-model --max_tokens 16
    DEEPINFER_HF_MODEL_DIR=./tiny-model python examples/offline_inference.py

Options may be written with underscores, as in the published engine, or with hyphens.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

PROMPTS = ("The lighthouse keeper saw", "Bread rises because", "Two plus two is")

PRECEDENCE = """\
which model is used:
  1  --model_name PATH_OR_ID        given: wins, whatever the environment says
  2  DEEPINFER_HF_MODEL_DIR=FOLDER  set: the folder; an error if it is none
  3  neither                        deepseek-ai/DeepSeek-V4.1-Flash-1017, from the hub's cache or
                                    downloaded into it (510 GB)

which platform runs it:
  DEEPINFER_ACCELERATOR=cpu|nvidia|ascend; the cpu if it is not set
"""


def build_parser() -> argparse.ArgumentParser:
    """Every option of this example."""
    parser = argparse.ArgumentParser(
        description="Continue prompts with a model.",
        epilog=PRECEDENCE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        *("--model_name", "--model-name", "--model"),
        metavar="PATH_OR_ID",
        help="folder of a checkpoint, or a hub id",
    )
    parser.add_argument(
        "--ep", type=int, default=1, help="devices that the experts are spread over (default: 1)"
    )
    parser.add_argument(
        *("--prompt",), action="append", help="a prompt; repeat it for several (default: three)"
    )
    parser.add_argument(
        *("--max_tokens", "--max-tokens"),
        type=int,
        default=32,
        help="most tokens per prompt (default: 32)",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the most likely token (default: 0)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers (default: 0)")
    parser.add_argument(
        *("--max_model_len", "--max-model-len"),
        type=int,
        help="most tokens of a prompt and its result (default: the model's context)",
    )
    return parser


def choose_model(model_name: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """The model by the table of precedence."""
    from deepinfer.checkpoint import choose_model as choose

    return choose(model_name, environ)


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Run the example; returns the exit code."""
    args = build_parser().parse_args(argv)

    from deepinfer.config.environment import read_environment
    from deepinfer.errors import DeepInferError
    from deepinfer.report import choose_platform, require_devices

    try:
        settings = read_environment(environ)
        platform = choose_platform(settings.accelerator)
        require_devices(args.ep, platform)
        run(args, choose_model(args.model_name, environ), platform.device_type)
    except DeepInferError as err:
        print(f"error: {err}", file=sys.stderr)
        return 1
    return 0


def run(args: argparse.Namespace, model: str, device: str) -> None:
    """Load the model, continue the prompts, and print each result."""
    from deepinfer import LLM, SamplingParams

    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed
    )
    prompts = args.prompt or list(PROMPTS)
    with LLM(model=model, ep=args.ep, device=device, max_model_len=args.max_model_len) as llm:
        results = llm.generate(prompts, params)
    for prompt, result in zip(prompts, results, strict=True):
        if result.error is not None:
            print(f"{prompt!r} -> error: {result.error}")
        else:
            print(f"{prompt!r} -> {result.outputs[0].text!r} ({result.outputs[0].finish_reason})")


if __name__ == "__main__":
    sys.exit(main())
