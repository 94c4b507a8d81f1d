"""`ModelConfig` from the published `config.json`: what is read, what is refused, what is said."""

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.core.config.published import REMOVED, change, published

from deepinfer.config import ModelConfig
from deepinfer.errors import ConfigError

pytestmark = pytest.mark.torchless

OPTIONAL_TEXT = {"model_type", "initializer_range", "use_cache", "num_nextn_predict_layers"}
OPTIONAL_TEXT |= {"rope_scaling", "engram_layer_ids"}


def refusal(path: str, value: object) -> str:
    """What is said about the published config with one key changed."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(change(published(), path, value))
    return str(caught.value)


def test_published_config_is_read():
    config = ModelConfig.from_dict(published())
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (129280, 5120, 40)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 1, 2)
    assert config.rms_norm_eps == 1e-20
    assert config.compress_ratios == (0, 0, *[2] * 18, *[1] * 20)
    assert config.num_encoder_layers == 20
    assert config.has_decoder
    assert config.index_k_source_layer_ids == (2, 8, 14, 20)
    assert config.use_fp4_sparse_kv
    assert config.candidates.source_layer_id == 20
    assert config.yarn.original_max_position_embeddings == 65536
    assert config.engram.num_columns == 24
    assert config.dspark.target_layer_ids == (37, 38, 39)
    assert config.quantization.weight_block_size == (32, 32)
    assert config.vision.max_wh_ratio is None
    assert config.tokenizer_compatibility == "release"


def test_layer_plan_is_that_of_the_specification():
    plans = ModelConfig.from_dict(published()).layers
    assert [plan.layer for plan in plans if plan.owns_kv] == [2, 8, 14, 20]
    assert [plan.layer for plan in plans if plan.owns_index_keys] == [2, 8, 14, 20]
    assert [plan.layer for plan in plans if plan.selects] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [plan.layer for plan in plans if plan.uses_candidates] == [24, 28, 32, 36]
    assert [plan.layer for plan in plans if plan.publishes_candidates] == [20]
    assert [plan.layer for plan in plans if plan.has_engram] == [1, 14]
    assert [plan.layer for plan in plans if plan.is_decoder] == list(range(20, 40))
    assert plans[1].kv_source is plans[1].index_source is None
    assert (plans[19].kv_source, plans[19].index_source) == (14, 14)
    assert (plans[35].kv_source, plans[35].index_source) == (20, 32)


def test_folder_is_read_like_a_dictionary(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published()))
    assert ModelConfig.from_folder(tmp_path) == ModelConfig.from_dict(published())
    assert ModelConfig.from_folder(str(tmp_path)) == ModelConfig.from_dict(published())


def test_plain_checkpoint_needs_no_quantization_vision_drafts_or_engram():
    values = published()
    for key in ("quantization_config", "vision_config", "image_token_id"):
        del values[key]
    values["dtype"] = "float32"
    text = values["text_config"]
    for key in [key for key in text if key.startswith(("dspark_", "engram_", "candidate_topk"))]:
        del text[key]
    del text["num_nextn_predict_layers"]
    text.update(compress_ratios=text["compress_ratios"][:40], candidate_source_layer_id=None)
    text.update(rope_scaling=None)
    config = ModelConfig.from_dict(values)
    assert config.dtype == "float32"
    for part in ("quantization", "vision", "dspark", "engram", "yarn", "candidates"):
        assert getattr(config, part) is None, part
    assert config.image_token_id is None
    assert config.num_draft_layers == 0


@pytest.mark.parametrize("disabled", [None, -1, -7])
def test_candidates_are_switched_off_by_null_or_a_negative_layer(disabled):
    values = change(published(), "text_config.candidate_source_layer_id", disabled)
    config = ModelConfig.from_dict(values)
    assert config.candidates is None
    assert not any(plan.uses_candidates for plan in config.layers)


def test_yarn_type_may_be_spelt_either_way():
    values = published()
    scaling = values["text_config"]["rope_scaling"]
    scaling["type"] = scaling.pop("rope_type")
    assert ModelConfig.from_dict(values) == ModelConfig.from_dict(published())
    scaling["type"] = "linear"
    with pytest.raises(ConfigError, match=r"rope_scaling\.type: found 'linear', allowed: 'yarn'"):
        ModelConfig.from_dict(values)


def test_unknown_keys_are_left_alone():
    values = published()
    values["auto_map"] = {"AutoConfig": "somewhere"}
    values["text_config"]["new_in_next_release"] = [1, 2, 3]
    assert ModelConfig.from_dict(values) == ModelConfig.from_dict(published())


TEXT_KEYS = sorted(set(published()["text_config"]) - OPTIONAL_TEXT)
VISION_KEYS = sorted(set(published()["vision_config"]) - {"model_type"})


@pytest.mark.parametrize(
    "path",
    [
        *(f"text_config.{key}" for key in TEXT_KEYS),
        *(f"vision_config.{key}" for key in VISION_KEYS),
        *(f"quantization_config.{key}" for key in published()["quantization_config"]),
        *(f"text_config.rope_scaling.{key}" for key in published()["text_config"]["rope_scaling"]),
        *("text_config", "dtype", "bos_token_id", "eos_token_id", "pad_token_id"),
        *("image_token_id", "architectures", "model_type"),
    ],
)
def test_missing_key_is_named(path):
    message = refusal(path, REMOVED)
    assert f"{path}: missing" in message
    assert "allowed" in message


WRONG_KIND = ["12", {"a": 1}, float("nan"), float("inf"), 10**400, -5]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (key, value)
        for key in TEXT_KEYS
        for value in WRONG_KIND
        # a negative layer is right here: it switches candidates off
        if (key, value) != ("candidate_source_layer_id", -5)
    ],
)
def test_value_of_the_wrong_kind_is_named(key, value):
    assert f"text_config.{key}: found" in refusal(f"text_config.{key}", value)


THETAS = ("rope_theta", "compress_rope_theta")
COUNTS = [key for key in TEXT_KEYS if type(published()["text_config"][key]) is int]
COUNTS = [key for key in COUNTS if key not in THETAS]


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize("value", [True, 1.0, 2**63])
def test_count_is_an_integer_in_range_and_no_truth_value(key, value):
    assert f"text_config.{key}: found" in refusal(f"text_config.{key}", value)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("dtype", "float16", "allowed: 'bfloat16' or 'float32'"),
        ("dtype", "float32", "only 'bfloat16' (the dtype of the quantised"),
        ("tokenizer_compatibility", "other", "allowed: 'release' or 'native'"),
        ("bos_token_id", 129280, "from 0 to 129279"),
        ("eos_token_id", None, "from 0 to 129279"),
        ("image_token_id", 0, "from 1 to 129279"),
        ("image_token_id", True, "from 1 to 129279"),
        ("text_config", [], "an object"),
        ("vision_config", 3, "an object"),
        ("text_config.num_key_value_heads", 8, "only 1"),
        ("text_config.n_shared_experts", 2, "only 1"),
        ("text_config.hidden_act", "gelu", "only 'silu'"),
        ("text_config.scoring_func", "sigmoid", "only 'sqrtsoftplus'"),
        ("text_config.topk_method", "greedy", "only 'noaux_tc'"),
        ("text_config.norm_topk_prob", False, "only True"),
        ("text_config.norm_topk_prob", 1, "only True"),
        ("text_config.attention_bias", True, "only False"),
        ("text_config.attention_dropout", 0.1, "only 0.0"),
        ("text_config.tie_word_embeddings", True, "only False"),
        ("text_config.hc_shifted", False, "only True"),
        ("text_config.dspark_target_attn_input", False, "only True"),
        ("text_config.use_fp4_sparse_kv", "yes", "true or false"),
        ("text_config.model_type", "deepseek_v4_text", "only 'deepseek_v41_text'"),
        ("text_config.rms_norm_eps", 0, "above 0"),
        ("text_config.compress_rope_theta", 1.0, "above 1"),
        ("text_config.rope_scaling.factor", 0.5, "at least 1"),
        ("text_config.rope_scaling.mscale", 1.0, "0 or absent"),
        ("text_config.rope_scaling.beta_fast", 0.5, "at least beta_slow (1)"),
        ("text_config.hc_sinkhorn_iters", 10**9, "from 1 to 1000"),
        ("text_config.num_hidden_layers", 10**9, "from 1 to 1024"),
        ("text_config.qk_rope_head_dim", 63, "an even number up to head_dim (512)"),
        ("text_config.qk_rope_head_dim", 514, "an even number up to head_dim (512)"),
        ("text_config.head_dim", 511, "an even number"),
        ("text_config.index_head_dim", 32, "at least qk_rope_head_dim (64)"),
        ("text_config.o_groups", 7, "a multiple of o_groups (7)"),
        ("text_config.num_experts_per_tok", 385, "at most n_routed_experts (384)"),
        ("text_config.dspark_num_experts_per_tok", 129, "at most dspark_n_routed_experts (128)"),
        ("text_config.n_routed_experts", 65536, "experts over all layers"),
        ("text_config.hidden_size", 5121, "an even number: FP4"),
        ("text_config.moe_intermediate_size", 2305, "an even number: FP4"),
        ("text_config.dspark_noise_token_id", 129280, "from 0 to 129279"),
        ("text_config.engram_pad_token_id", 129280, "from 0 to 129279"),
        ("text_config.engram_compressed_vocab_size", 129281, "from 1 to 129280"),
        ("text_config.engram_num_embeddings", [384006168], "one number for each of the 2"),
        ("text_config.engram_num_embeddings", [384006168, 384016683], "[384006168, 384016682]"),
        ("text_config.engram_vocab_size", 16000058, "the sums of the primes"),
        ("text_config.engram_layer_ids", [1, 1], "layer ids that differ"),
        ("text_config.engram_layer_ids", [1, 40], "below num_hidden_layers (40)"),
        ("text_config.engram_n_heads", 257, "an integer from 1 to 256"),
        ("text_config.dspark_target_layer_ids", [], "at least one layer id"),
        ("text_config.dspark_target_layer_ids", [37, 38, 40], "below num_hidden_layers (40)"),
        ("text_config.dspark_target_layer_ids", [37, 37, 39], "layer ids that differ"),
        ("vision_config.max_wh_ratio", 0.5, "at least 1"),
        ("vision_config.hidden_size", 1000, "a multiple of num_attention_heads (16)"),
        ("quantization_config.quant_method", "awq", "only 'fp8'"),
        ("quantization_config.activation_scheme", "static", "only 'dynamic'"),
        ("quantization_config.scale_fmt", None, "only 'ue8m0'"),
        ("quantization_config.weight_block_size", [128, 128], "[128, 128] is DeepSeek-V3 and V4"),
        ("quantization_config.weight_block_size", 32, "only [32, 32]"),
        ("quantization_config.expert_dtype", "int4", "allowed: 'fp4' or 'fp8'"),
    ],
)
def test_wrong_value_is_named_with_what_is_allowed(path, value, said):
    message = refusal(path, value)
    key = path.split(".")[-1]
    # a rule that ties two keys names the one that holds the multiple or the sum
    ties = {"o_groups": "num_attention_heads", "engram_vocab_size": "engram_num_embeddings"}
    assert f"{ties.get(key, key)}: found" in message
    assert said in message


@pytest.mark.parametrize(
    ("changes", "named", "said"),
    [
        ({"compress_ratios": [0] * 42}, "compress_ratios", "found 42 items, allowed: 43"),
        ({"compress_ratios": [0, 0] + [3] * 41}, "compress_ratios[2]", "from 0 to 2"),
        (
            {"compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0, 1, 0]},
            "compress_ratios",
            "0 for draft layers",
        ),
        ({"kv_source_layer_ids": [8, 2, 14, 20]}, "kv_source_layer_ids", "ascending"),
        ({"kv_source_layer_ids": [2, 8, 8, 20]}, "kv_source_layer_ids", "ascending"),
        ({"kv_source_layer_ids": [2, 8, 14]}, "kv_source_layer_ids", "(layer 20)"),
        ({"kv_source_layer_ids": [8, 14, 20]}, "kv_source_layer_ids", "before layer 2"),
        (
            {"kv_source_layer_ids": [2, 8, 14, 20, 24]},
            "kv_source_layer_ids",
            "no layer behind the first one",
        ),
        ({"kv_source_layer_ids": [2, 7, 14, 20]}, "index_k_source_layer_ids", "[7] is not"),
        ({"kv_source_layer_ids": [2, 8, 14, 40]}, "kv_source_layer_ids[3]", "from 0 to 39"),
        (
            {"index_source_layer_ids": [0, 2, 8, 14, 20]},
            "compress_ratios",
            "no source on a layer of ratio 0 (layer 0)",
        ),
        (
            {"index_k_source_layer_ids": [2, 8, 14]},
            "kv_source_layer_ids",
            "in index_k_source_layer_ids too, [20] is not",
        ),
        (
            {"compress_ratios": [0, 0] + [2] * 18 + [1] * 19 + [2] + [0] * 3},
            "kv_source_layer_ids",
            "which reads layer 20 of ratio 1",
        ),
        ({"candidate_source_layer_id": 21}, "candidate_source_layer_id", "index_source_layer_ids"),
        ({"candidate_source_layer_id": 8}, "candidate_source_layer_id", "layer 14 does not"),
        ({"candidate_topk_blocks": 63}, "candidate_topk_blocks", "at least index_topk"),
    ],
)
def test_sources_that_do_not_fit_together_are_named(changes, named, said):
    values = published()
    values["text_config"].update(changes)
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(values)
    assert f"text_config.{named}: found" in str(caught.value)
    assert said in str(caught.value)


def test_limits_of_other_engines_kernels_are_not_demanded():
    values = published()
    del values["quantization_config"]
    values["text_config"].update(
        hidden_size=37, num_attention_heads=3, o_groups=3, o_lora_rank=5, q_lora_rank=7,
        head_dim=10, qk_rope_head_dim=6, index_head_dim=6, index_n_heads=5, index_topk=3,
        moe_intermediate_size=11, n_routed_experts=2, num_experts_per_tok=1,
        candidate_topk_blocks=3, candidate_block_size=1, sliding_window=1, hc_mult=1,
        dspark_block_size=1, dspark_markov_rank=3,
    )  # fmt: skip
    assert ModelConfig.from_dict(values).hidden_size == 37


def test_index_keys_may_be_stored_by_more_layers_than_entries():
    values = published()
    values["text_config"]["index_k_source_layer_ids"] = [2, 8, 14, 20, 28]
    plans = ModelConfig.from_dict(values).layers
    assert [plan.layer for plan in plans if plan.owns_index_keys] == [2, 8, 14, 20, 28]
    assert (plans[30].index_key_source, plans[30].kv_source) == (28, 20)


def test_model_without_decoder_layers_is_valid():
    values = published()
    text = values["text_config"]
    text.update(compress_ratios=[0] * 20 + [2] * 20 + [0] * 3, candidate_source_layer_id=-1)
    text.update(kv_source_layer_ids=[20], index_source_layer_ids=[20, 30])
    config = ModelConfig.from_dict(values)
    assert config.num_encoder_layers == 40
    assert not config.has_decoder


def test_all_faults_are_told_at_once():
    values = published()
    values["dtype"] = "int8"
    values["text_config"]["hidden_size"] = -1
    del values["text_config"]["q_lora_rank"]
    values["quantization_config"]["scale_fmt"] = "fp32"
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(values)
    message = str(caught.value)
    for key in ("dtype", "text_config.hidden_size", "text_config.q_lora_rank"):
        assert f"{key}: " in message
    assert "quantization_config.scale_fmt: " in message


@pytest.mark.parametrize(
    "key", ["vocab_size", "num_hidden_layers", "num_nextn_predict_layers", "compress_ratios"]
)
@pytest.mark.parametrize("value", ["x", -1, REMOVED])
def test_fault_is_told_once_and_draws_no_others_after_it(key, value):
    if key == "num_nextn_predict_layers" and value is REMOVED:
        value = None
    message = refusal(f"text_config.{key}", value)
    assert message.count("allowed:") == 1
    assert message.startswith(f"text_config.{key}: ")


def test_misspelt_key_is_pointed_at():
    values = published()
    text = values["text_config"]
    text["num_hiden_layers"] = text.pop("num_hidden_layers")
    with pytest.raises(ConfigError, match=r"num_hidden_layers: missing.*'num_hiden_layers'"):
        ModelConfig.from_dict(values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}, "DeepSeek-V3"),
        ({"model_type": "deepseek_v32"}, "DeepSeek-V3.2"),
        ({"model_type": "deepseek_v4", "hidden_size": 4096}, "DeepSeek-V4"),
        ({"model_type": "llama", "hidden_size": 4096}, "found 'llama'"),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "DeepSeek-V4"),
        ({"model_type": ["deepseek_v41"]}, "model_type: found ['deepseek_v41']"),
        ({"architectures": "DeepseekV41ForCausalLM"}, "architectures: found"),
        ({"dim": 5120, "n_layers": 40}, "inference/"),
        ({"hidden_size": 5120, "num_hidden_layers": 40}, "nests them under text_config"),
        ([], "expected a JSON object"),
        ("x", "expected a JSON object"),
        ({}, "text_config: missing"),
    ],
)
def test_foreign_config_is_recognised(values, said):
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(values)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16}, "NVFP4"),
        ({"quant_algo": "NVFP4"}, "NVFP4"),
        ({"quant_method": "ascend", "model_quant_type": "W8A8_DYNAMIC"}, "W8A8"),
    ],
)
def test_other_storage_formats_are_refused_by_name(quantization, said):
    values = published()
    values["quantization_config"].update(quantization)
    with pytest.raises(ConfigError, match=said):
        ModelConfig.from_dict(values)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"\xff\xfe", "UTF-8"),
        (b'{"a": 1, "a": 2}', "appears twice"),
        (b"[" * 100_000 + b"]" * 100_000, "brackets"),
        (b'{"a":' * 3_000 + b"1" + b"}" * 3_000 + b" " * 10_000, "too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b"null", "JSON object"),
    ],
)
def test_file_that_is_no_config_is_refused(tmp_path, data, said):
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ConfigError, match=said):
        ModelConfig.from_folder(tmp_path)


def test_absent_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_pipe_in_place_of_the_file_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="regular file"):
        ModelConfig.from_folder(tmp_path)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 45)
    | st.floats()
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
PATHS = [
    *published(),
    *(f"text_config.{key}" for key in published()["text_config"]),
    *(f"vision_config.{key}" for key in published()["vision_config"]),
    *(f"quantization_config.{key}" for key in published()["quantization_config"]),
    *(f"text_config.rope_scaling.{key}" for key in published()["text_config"]["rope_scaling"]),
]


@settings(max_examples=400, deadline=2000, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(PATHS), JSON, min_size=1, max_size=3))
def test_any_config_is_read_or_refused(changes):
    values = published()
    for path, value in changes.items():
        try:
            change(values, path, value)
        except (KeyError, TypeError):  # an earlier change took the section away
            continue
    try:
        config = ModelConfig.from_dict(values)
    except ConfigError as err:
        said = str(err)
    else:
        said = ""
        assert len(config.layers) == config.num_hidden_layers
    assert said.isascii()
    assert len(said) < 100_000
