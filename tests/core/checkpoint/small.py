"""Small checkpoints with every feature, and the means to damage them.

Files are read and written here without the code under test: a safetensors file is a length, a JSON
header and bytes.
"""

import json
import os
from pathlib import Path

SHARD = "model-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"


def small_config(**text: object) -> dict:
    """A `config.json` with Engram, drafts and candidates, and a few hundred tensors."""
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": 298,
        "text_config": {
            "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 5,
            "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32,
            "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 24,
            "moe_intermediate_size": 40, "n_routed_experts": 3, "n_shared_experts": 1,
            "num_experts_per_tok": 2, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
            "norm_topk_prob": True, "routed_scaling_factor": 1.5, "hidden_act": "silu",
            "swiglu_limit": 10.0, "rms_norm_eps": 1e-20, "attention_bias": False,
            "attention_dropout": 0.0, "tie_word_embeddings": False, "sliding_window": 8,
            "max_position_embeddings": 512, "rope_theta": 10000, "compress_rope_theta": 160000,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 32,
                "beta_fast": 32, "beta_slow": 1,
            },
            "compress_ratios": [0, 2, 1, 1, 1, 0, 0], "kv_source_layer_ids": [1, 2],
            "index_source_layer_ids": [1, 2, 4], "index_n_heads": 2, "index_head_dim": 32,
            "index_topk": 8, "candidate_source_layer_id": 2, "candidate_topk_blocks": 4,
            "candidate_block_size": 4, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
            "engram_layer_ids": [0, 1], "engram_num_embeddings": [52, 68],
            "engram_max_ngram_size": 3, "engram_n_heads": 1, "engram_head_dim": 48,
            "engram_vocab_size": 20, "engram_pad_token_id": 2,
            "engram_compressed_vocab_size": 300, "num_nextn_predict_layers": 2,
            "dspark_block_size": 5, "dspark_target_layer_ids": [3, 4], "dspark_markov_rank": 8,
            "dspark_n_routed_experts": 2, "dspark_num_experts_per_tok": 1,
            "dspark_noise_token_id": 299, **text,
        },
    }  # fmt: skip


VISION = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "patch_size": 2,
    "rope_theta": 10000,
    "downsample_ratio": 3,
    "max_image_tokens": 16,
    "min_pixels": 0,
    "max_wh_ratio": None,
}


def smallest_config() -> dict:
    """Two plain layers and two experts: a header of a few kilobytes."""
    values = small_config(
        num_hidden_layers=2, compress_ratios=[2, 1], kv_source_layer_ids=[0, 1],
        index_source_layer_ids=[0, 1], candidate_source_layer_id=None, engram_layer_ids=[],
        num_nextn_predict_layers=0, n_routed_experts=2, hidden_size=16, head_dim=16,
        index_head_dim=16, q_lora_rank=8, o_lora_rank=8, moe_intermediate_size=8,
    )  # fmt: skip
    values["dtype"] = "float32"
    return values


Tensor = tuple[str, list[int], bytes]
"""Dtype as the header spells it, shape, bytes."""


def read_shard(path: Path) -> dict[str, Tensor]:
    """The tensors of one file."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: (
            each["dtype"],
            each["shape"],
            data[slice(*(start + at for at in each["data_offsets"]))],
        )
        for name, each in header.items()
    }


def write_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write one file, tensors in the order given."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    write_raw(path, json.dumps(header).encode(), b"".join(data for _, _, data in tensors.values()))


def write_raw(path: Path, header: bytes, payload: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + payload)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of every file that the index names, or of the single file."""
    index = folder / INDEX
    if not index.exists():
        return read_shard(folder / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(json.loads(index.read_text())["weight_map"].values())):
        tensors |= read_shard(folder / name)
    return tensors


def write_folder(folder: Path, config: dict, tensors: dict[str, Tensor], *, single=False) -> Path:
    """A checkpoint of one file, with an index unless `single`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if single:
        write_shard(folder / "model.safetensors", tensors)
        return folder
    write_shard(folder / SHARD, tensors)
    write_index(folder, dict.fromkeys(tensors, SHARD))
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def sparse_checkpoint(folder: Path, config: dict, tensors: dict[str, tuple[str, tuple]]) -> Path:
    """A checkpoint whose tensors are all zero and take no room on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = {"F32": 4, "BF16": 2}.get(dtype, 1)
        for edge in shape:
            size *= edge
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        os.truncate(file.fileno(), 8 + len(text) + at)
    return folder
