"""Batch files: requests in the OpenAI batch form, or plain lines with a prompt, to results.

```python
from deepinfer import LLM, SamplingParams
from deepinfer.batch import BatchFile, run_batch

with BatchFile("in.jsonl", "out.jsonl") as batch, LLM("./tiny") as llm:
    print(run_batch(llm, batch, SamplingParams(max_tokens=64)).render())
```

A run that was killed goes on where it was: the same call skips the ids that have a result. Memory
is bounded by the lines in flight, and some 240 bytes for each line of the input.
"""

from .files import BatchFile
from .results import StreamSink
from .run import finish_batch, run_batch
from .source import MAX_LINE_BYTES
from .summary import BatchSummary

__all__ = [
    "MAX_LINE_BYTES",
    "BatchFile",
    "BatchSummary",
    "StreamSink",
    "finish_batch",
    "run_batch",
]
