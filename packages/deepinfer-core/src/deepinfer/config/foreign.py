"""Telling a config of another model family or another storage format by name.

Without this, such a config would fail with a list of missing keys that says nothing.

Source: docs/checkpoint.md 2.4, 5.2 and 5.3.
"""

from __future__ import annotations

from deepinfer.errors import ConfigError

from .fields import shown

__all__ = ["refuse_foreign"]

MODEL_TYPE = "deepseek_v41"
ARCHITECTURE = "DeepseekV41ForCausalLM"

_FAMILIES = {
    "deepseek": "DeepSeek (first generation)",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3 or R1",
    "deepseek_v32": "DeepSeek-V3.2",
    "deepseek_v4": "DeepSeek-V4",
    "deepseekforcausallm": "DeepSeek (first generation)",
    "deepseekv2forcausallm": "DeepSeek-V2",
    "deepseekv3forcausallm": "DeepSeek-V3 or R1",
    "deepseekv32forcausallm": "DeepSeek-V3.2",
    "deepseekv4forcausallm": "DeepSeek-V4",
}
_FLAT_KEYS = frozenset({"dim", "n_layers", "window_size", "moe_inter_dim", "n_activated_experts"})


def refuse_foreign(values: dict[str, object]) -> None:
    """Raise `ConfigError` unless the config is of this family and a readable storage format."""
    _refuse_family(values)
    _refuse_flat(values)
    _refuse_storage(values.get("quantization_config"))


def _refuse_family(values: dict[str, object]) -> None:
    only = f"this engine runs {MODEL_TYPE!r} (DeepSeek-V4.1-Flash) alone"
    model_type = values.get("model_type")
    if "model_type" in values and model_type != MODEL_TYPE:
        family = _FAMILIES.get(str(model_type).lower())
        what = f", that is {family}" if family else ""
        raise ConfigError(
            f"model_type: found {shown(model_type)}{what}, allowed: only {MODEL_TYPE!r}; {only}"
        )
    names = values.get("architectures")
    if "architectures" in values and names != [ARCHITECTURE]:
        first = names[0] if isinstance(names, list) and len(names) == 1 else None
        family = _FAMILIES.get(str(first).lower())
        what = f", that is {family}" if family else ""
        raise ConfigError(
            f"architectures: found {shown(names)}{what}, allowed: only [{ARCHITECTURE!r}]; {only}"
        )
    if "text_config" not in values:
        return
    for key, allowed in (("model_type", MODEL_TYPE), ("architectures", [ARCHITECTURE])):
        if key not in values:
            raise ConfigError(f"{key}: missing, allowed: only {shown(allowed)}; {only}")


def _refuse_flat(values: dict[str, object]) -> None:
    if "text_config" in values:
        return
    flat = sorted(_FLAT_KEYS & values.keys())
    if flat:
        raise ConfigError(
            f"text_config: missing, found flat keys instead ({', '.join(flat)}); "
            "this is the reference code's own config: use the config.json at the top of the "
            "published folder, not the one under inference/"
        )
    if "hidden_size" in values and "num_hidden_layers" in values:
        raise ConfigError(
            "text_config: missing, found the text model's keys at the top level; "
            "the published config nests them under text_config"
        )


def _refuse_storage(quantization: object) -> None:
    if not isinstance(quantization, dict):
        return
    allowed = "allowed: the published FP8 / FP4 format, or no quantization_config (plain weights)"
    algorithms = [str(quantization.get(key)) for key in ("quant_algo", "moe_quant_algo")]
    method = str(quantization.get("quant_method"))
    if any("NVFP4" in name.upper() for name in [*algorithms, method]) or (
        "quantized_layers" in quantization or "MIXED_PRECISION" in algorithms
    ):
        raise ConfigError(
            f"quantization_config: found the NVFP4 (modelopt) variant, {allowed}; "
            "use the official checkpoint"
        )
    types = [method, *(str(quantization.get(key)) for key in ("model_quant_type", "quant_type"))]
    if any("W8A8" in name.upper() or name.lower() == "ascend" for name in types):
        raise ConfigError(
            f"quantization_config: found the W8A8 (int8) variant, {allowed}; "
            "use the official checkpoint"
        )
