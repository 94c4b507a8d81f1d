"""What tests of this engine and of its platforms are made with: a scripted model, and the kernel
conformance suite.

`ScriptedModel` stands in for a model wherever the engine takes one: its logits follow a script, it
keeps its caches as a real model does, and it raises `CacheCorruption` when one of its sequences is
shown what is not its own. `byte_tokenizer` gives it text.

The conformance suite takes any kernels object and checks every operation of
`deepinfer.kernels.interface`

- against `ReferenceKernels`, the definition: 0 to 257 rows, ragged and odd sizes, inputs that are
  views of other memory, weights in every stored form, all KV formats, sequences of mixed lengths
  and phases, holes, ties, rows without a key. Equal where the format or the sums are exact, within
  `TOLERANCES` elsewhere. Whatever must not be read is NaN, and whatever must not be written is
  compared before and after;
- for row invariance, bit for bit: all rows together against each row alone, subsets, permutations,
  chunks, other companions (some of them NaN), one and two threads, other addresses.

A platform's tests are one call:

```python
from deepinfer.testing import assert_conforms
from my_platform import MyKernels

def test_kernels_conform():
    assert_conforms(
        lambda numerics, kv_format: MyKernels(
            numerics=numerics, kv_format=kv_format, device=torch.device("cuda")
        ),
        device="cuda",
    )
```

or, to see each situation as a test of its own:

```python
@pytest.mark.parametrize(
    "check", [pytest.param(check, id=name) for name, check in conformance_cases(quick=True)]
)
def test_kernels_conform(check):
    check(make, device="cuda")  # make: cached, gives the same kernels for the same arguments
```

`check_against_reference` and `check_row_invariance` return the findings instead of raising; each
names the operation, the situation, what kind of fault it is and the first value that is off. `ops=`
limits a run to some operations while they are being written, `quick=True` takes a part of the
situations, `tolerances=` replaces bounds, for a platform that has a reason (say it beside the
call). `invariant=False` is for kernels that document a faster mode whose bits vary.

The suite looks into nothing that a platform prepares: weights go in through `prepare_*` as stored
tensors and come back through the operations. Inputs are those that the model hands around: in
`served`, activations hold bfloat16 numbers; what the kernels return themselves (records,
rotations, mixes, expert weights and ids) is contiguous, though it may start at any element.
"""

from deepinfer.testing.conformance.base import Finding, Make, OpCase
from deepinfer.testing.conformance.checks import (
    all_cases,
    assert_conforms,
    check_against_reference,
    check_row_invariance,
    conformance_cases,
)
from deepinfer.testing.conformance.tolerances import (
    DEFAULT_TOLERANCE,
    TOLERANCES,
    Tolerance,
    tolerance_of,
)
from deepinfer.testing.scripted import CacheCorruption, ScriptedModel, byte_tokenizer

__all__ = [
    "DEFAULT_TOLERANCE",
    "TOLERANCES",
    "CacheCorruption",
    "Finding",
    "Make",
    "OpCase",
    "ScriptedModel",
    "Tolerance",
    "all_cases",
    "assert_conforms",
    "byte_tokenizer",
    "check_against_reference",
    "check_row_invariance",
    "conformance_cases",
    "tolerance_of",
]
