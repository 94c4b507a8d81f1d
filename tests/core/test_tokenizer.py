"""Text to ids and back, the BOS policy, and the compressed ids of Engram."""

import dataclasses
import json
import random
import unicodedata

import pytest
from tests.core.config.published import published

from deepinfer.config import ModelConfig
from deepinfer.errors import CheckpointError
from deepinfer.tokenizer import (
    BOS_TEXT,
    EOS_TEXT,
    IMAGE_TEXT,
    PAD_TEXT,
    Tokenizer,
    compressed_token_map,
    engram_token_map,
)

pytestmark = pytest.mark.torchless

USER_TEXT = "<\uff5cUser\uff5c>"
TEXTS = [
    "",
    "Hello, world!",
    "  two  spaces\n\n\tand a tab ",
    "na\u00efve caf\u00e9 \u00c9COLE",
    "\u4f60\u597d\uff0c\u4e16\u754c",
    "\U0001f600 \U0001f468\u200d\U0001f469",
    "\x00\x7f\u0080",
    "def f(x):\n    return x ** 2\n",
]


def config(**text) -> ModelConfig:
    """A plain config with a vocabulary of 400 ids, the last two being image and noise."""
    values = published()
    del values["quantization_config"], values["vision_config"]
    values["image_token_id"] = 398
    values["text_config"].update(vocab_size=400, engram_compressed_vocab_size=300)
    values["text_config"].update(dspark_noise_token_id=399, **text)
    return ModelConfig.from_dict(values)


def write(folder, raw, **settings):
    (folder / "tokenizer.json").write_text(raw.to_str(), encoding="utf-8")
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def byte_level(size: int = 400):
    """Published special tokens, the 256 bytes, and merges of `th`, `the`, ` the` and the like."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [BOS_TEXT, EOS_TEXT, PAD_TEXT, *alphabet]
    merges = []
    for left, right in (("t", "h"), ("T", "h"), ("th", "e"), ("Th", "e"), ("\u0120", "the")):
        merges.append((left, right))
        pieces.append(left + right)
    pieces += [f"<filler{at}>" for at in range(size - len(pieces) - 3)]
    pieces += [USER_TEXT, IMAGE_TEXT, "<\uff5cSystem\uff5c>"]
    vocab = {piece: at for at, piece in enumerate(pieces)}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = [BOS_TEXT, EOS_TEXT, PAD_TEXT, USER_TEXT, IMAGE_TEXT, "<\uff5cSystem\uff5c>"]
    raw.add_special_tokens([tokenizers.AddedToken(each, special=True) for each in special])
    return raw


PUBLISHED_SETTINGS = {
    "add_bos_token": False,
    "add_eos_token": False,
    "bos_token": BOS_TEXT,
    "eos_token": EOS_TEXT,
    "pad_token": EOS_TEXT,
}


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path, byte_level(), **PUBLISHED_SETTINGS)


def test_special_ids_are_found_by_their_spelling(folder):
    tokenizer = Tokenizer.from_folder(folder, config())
    assert tokenizer.vocab_size == 400
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    # the file says EOS, as the published one does; the family pads with a token of its own
    assert tokenizer.pad_token_id == 2


def test_special_tokens_may_be_given_in_the_long_form(tmp_path):
    settings = PUBLISHED_SETTINGS | {"bos_token": {"content": BOS_TEXT, "lstrip": False}}
    tokenizer = Tokenizer.from_folder(write(tmp_path, byte_level(), **settings))
    assert tokenizer.bos_token_id == 0


def test_settings_file_is_optional(tmp_path):
    tokenizer = Tokenizer.from_folder(write(tmp_path, byte_level()), config())
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_from_its_ids(folder, text):
    tokenizer = Tokenizer.from_folder(folder, config())
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(type(token) is int for token in ids)


def test_plain_prompt_gets_bos_although_the_file_says_no(folder):
    tokenizer = Tokenizer.from_folder(folder, config())
    assert tokenizer.encode("") == [0]
    assert tokenizer.encode("the")[0] == 0
    assert tokenizer.encode("the", add_bos=False)[0] != 0


def test_prompt_that_begins_with_bos_does_not_get_two(folder):
    tokenizer = Tokenizer.from_folder(folder, config())
    ids = tokenizer.encode(BOS_TEXT + USER_TEXT + "the")
    assert ids[:2] == [0, 397]
    assert ids == tokenizer.encode(USER_TEXT + "the")
    assert ids == tokenizer.encode(BOS_TEXT + USER_TEXT + "the", add_bos=False)
    assert tokenizer.encode(BOS_TEXT) == [0]


@pytest.mark.parametrize("adds", [False, True])
def test_native_policy_does_as_the_file_says(tmp_path, adds):
    settings = PUBLISHED_SETTINGS | {"add_bos_token": adds}
    native = dataclasses.replace(config(), tokenizer_compatibility="native")
    tokenizer = Tokenizer.from_folder(write(tmp_path, byte_level(), **settings), native)
    assert (tokenizer.encode("the")[0] == 0) is adds


def test_special_tokens_are_left_out_of_the_text_unless_asked_for(folder):
    tokenizer = Tokenizer.from_folder(folder, config())
    ids = [*tokenizer.encode("the"), 1]
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(ids, skip_special_tokens=False) == BOS_TEXT + "the" + EOS_TEXT


def test_bytes_that_are_no_text_become_replacement_characters(folder):
    tokenizer = Tokenizer.from_folder(folder, config())
    first, second = tokenizer.encode("\u00e9", add_bos=False)
    assert tokenizer.decode([first]) == "\ufffd"
    assert tokenizer.decode([first, second]) == "\u00e9"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bos_token_id": 5}, "bos_token_id: 5 in config.json, 0 in"),
        ({"eos_token_id": 5}, "eos_token_id: 5 in config.json, 1 in"),
        ({"pad_token_id": 5}, "pad_token_id: 5 in config.json, 2 in"),
        (
            {"vocab_size": 399},
            "vocab_size: 399 in config.json, but tokenizer.json has token id 399",
        ),
    ],
)
def test_tokenizer_of_another_model_is_refused(folder, changes, said):
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_folder(folder, dataclasses.replace(config(), **changes))
    assert said in str(caught.value)


def test_image_token_must_be_the_tokenizers_own_when_there_is_vision(folder):
    vision = ModelConfig.from_dict(published()).vision
    Tokenizer.from_folder(folder, dataclasses.replace(config(), vision=vision))
    other = dataclasses.replace(config(), vision=vision, image_token_id=7)
    with pytest.raises(CheckpointError, match=r"image_token_id: 7 in config\.json, 398 in"):
        Tokenizer.from_folder(folder, other)


def test_setting_that_names_no_token_is_refused(tmp_path):
    settings = PUBLISHED_SETTINGS | {"eos_token": "<|endoftext|>"}
    with pytest.raises(CheckpointError, match=r"eos_token '<\|endoftext\|>' is no token"):
        Tokenizer.from_folder(write(tmp_path, byte_level(), **settings))


@pytest.mark.parametrize("data", [b"", b"{", b"{}", b"[]", b"\xff\xfe", b"null"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_file_is_named(folder, name, data):
    (folder / name).write_bytes(data)
    if (name, data) == ("tokenizer_config.json", b"{}"):
        Tokenizer.from_folder(folder)
        return
    with pytest.raises(CheckpointError, match=f"file {name}: "):
        Tokenizer.from_folder(folder)


def test_absent_file_is_named_with_what_still_works(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing; .* only token ids"):
        Tokenizer.from_folder(tmp_path)


def test_random_flips_are_refused_or_read(folder):
    generator = random.Random(0)
    path = folder / "tokenizer.json"
    original = path.read_bytes()
    refused = 0
    for _ in range(300):
        damaged = bytearray(original)
        damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            Tokenizer.from_folder(folder).encode("the")
        except CheckpointError as err:
            refused += "tokenizer" in str(err)
    assert refused > 100


# the compressed ids of Engram


def words(*pieces: str) -> Tokenizer:
    """A tokenizer whose ids are whole words that decode to themselves."""
    import tokenizers
    from tokenizers import models

    vocab = {piece: at for at, piece in enumerate(pieces)}
    raw = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token=pieces[0]))
    return Tokenizer(raw, bos_token_id=None, eos_token_id=None, pad_token_id=None)


@pytest.mark.parametrize(
    "same",
    [
        ("the", "The", "THE", " the", "the ", "\tTHE\r\n"),
        ("caf\u00e9", "cafe", "CAF\u00c9", "cafe\u0301", " Cafe"),
        ("\ufb01", "fi", "FI", "\uff26\uff29"),  # a ligature and full-width letters
        ("a b", "a  b", "a\tb", "a \r\n b", "A\u00a0B"),  # a no-break space is one in NFKC
        (" ", "  ", "\n", "\t\r\n ", "\u00a0"),
        ("\u00bd", "1\u20442"),
        ("\u0130", "i", "I"),  # dotted capital I: the dot is an accent
        ("\u212b", "\u00c5", "a"),  # the Angstrom sign
    ],
)
def test_spellings_of_one_word_share_an_id(same):
    assert compressed_token_map(words(*same)).tolist() == [0] * len(same)


@pytest.mark.parametrize(
    "different",
    [
        ("the", "then"),
        ("a b", "ab"),
        (" ", "a"),
        ("\u00f8", "o"),  # a stroke is no accent
        ("\u00df", "ss"),  # lower case does not fold
        ("1", "2"),
        (".", ","),
        ("\u4f60", "\u597d"),
    ],
)
def test_different_words_have_different_ids(different):
    assert compressed_token_map(words(*different)).tolist() == [0, 1]


def test_ids_are_numbered_by_first_appearance():
    mapped = compressed_token_map(words("b", "a", "B", "c", "\u00e4"))
    assert mapped.tolist() == [0, 1, 0, 2, 1]
    assert mapped.dtype == "int64"


def test_text_that_normalises_to_nothing_stands_for_itself():
    # lone accents vanish; each is its own key, and none is that of the lone space
    assert compressed_token_map(words("\u0301", "\u0302", " ", "\u0301 ")).tolist() == [0, 1, 2, 2]


def test_bytes_that_are_no_text_stay_apart():
    raw = byte_level()
    tokenizer = Tokenizer(raw, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    mapped = compressed_token_map(tokenizer)
    lone = [token for token in range(400) if "\ufffd" in raw.decode([token])]
    assert len(lone) == 128
    assert len({int(mapped[token]) for token in lone}) == 128
    others = {int(mapped[token]) for token in range(400) if token not in lone}
    assert not others & {int(mapped[token]) for token in lone}


def test_special_tokens_count_as_their_text():
    raw = byte_level()
    mapped = compressed_token_map(Tokenizer(raw, bos_token_id=0, eos_token_id=1, pad_token_id=2))
    specials = [mapped[raw.token_to_id(each)] for each in (BOS_TEXT, EOS_TEXT, PAD_TEXT, USER_TEXT)]
    assert len(set(specials)) == 4
    assert mapped[raw.token_to_id("th")] == mapped[raw.token_to_id("Th")]
    assert mapped[raw.token_to_id("the")] == mapped[raw.token_to_id("\u0120the")]
    assert mapped[raw.token_to_id("a")] == mapped[raw.token_to_id("A")]


def test_map_agrees_with_the_steps_of_the_specification():
    """docs/model.md 5.1 written out with the standard library, over text without odd casing."""
    import re

    def norm(text: str) -> str:
        text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
        text = "".join(char for char in text if not unicodedata.category(char).startswith("M"))
        text = re.sub(r"[ \t\r\n]+", " ", text.lower())
        return " " if text in (" ", "\ue000") else text.strip().replace("\ue000", " ")

    generator = random.Random(1)
    alphabet = "abcABC \t\n\u00e9\u00c8\u00fc\u0301\uff21\ufb01\u4f60\u2160.,"
    pieces = list(dict.fromkeys("".join(generator.choices(alphabet, k=3)) for _ in range(2000)))
    numbers: dict[str, int] = {}
    wanted = [numbers.setdefault(norm(each) or each, len(numbers)) for each in pieces]
    assert compressed_token_map(words(*pieces)).tolist() == wanted


def test_map_covers_the_models_vocabulary(tmp_path):
    tokenizer = Tokenizer.from_folder(write(tmp_path, byte_level(380)), config())
    mapped = compressed_token_map(tokenizer, 400)
    assert mapped.shape == (400,)
    assert len(set(mapped[380:].tolist())) == 1


def test_number_of_compressed_ids_must_be_that_of_the_config(folder):
    tokenizer = Tokenizer.from_folder(folder)
    number = int(compressed_token_map(tokenizer).max()) + 1
    engram_token_map(tokenizer, config(engram_compressed_vocab_size=number))
    with pytest.raises(CheckpointError) as caught:
        engram_token_map(tokenizer, config(engram_compressed_vocab_size=number + 1))
    assert f"gives {number} compressed token ids" in str(caught.value)
    assert f"is {number + 1}" in str(caught.value)
