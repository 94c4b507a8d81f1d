"""What one forward is told about its rows: `StepInputs`, and the builder that makes them."""

from deepinfer.step.inputs import EntryWrites, RingWrites, Rows, StepInputs

__all__ = ["EntryWrites", "RingWrites", "Rows", "StepInputs"]
