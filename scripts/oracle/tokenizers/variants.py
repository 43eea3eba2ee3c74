"""Tokenizers made from real ones by other settings, to reach the components that the real ones do not use."""

import copy
import itertools

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
WORD_BREAKS = {"Regex": r"\s+|\p{P}"}
CAPITALS = {"Regex": r"(?=\p{Lu})"}
HAN = {"Regex": r"[\p{Han}]+|[\p{L}\p{M}&&[^\p{Han}]]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"}


def sequence(key, *members):
    return {"type": "Sequence", key: list(members)}


def split(pattern, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}


def metaspace(scheme, split):
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def added(content, **options):
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized", "special"], False)
    return {"content": content, **flags, **options}


def numbered(vocab, *tokens):
    """Gives added tokens the ids that the reference gives them."""
    new = itertools.count(len(vocab))
    return [{"id": vocab[t["content"]] if t["content"] in vocab else next(new), **t} for t in tokens]


def byte_level_variants(base):
    """From a byte-level tokenizer: name -> tokenizer.json."""
    out = {}

    def variant(name, **parts):
        out[name] = {**base, **parts}

    def pre(*members):
        return sequence("pretokenizers", *members)

    variant("prefix-space", pre_tokenizer={**BYTE_LEVEL, "add_prefix_space": True, "use_regex": True})
    for individual in (True, False):
        digits = {"type": "Digits", "individual_digits": individual}
        variant(f"digits-{individual}", pre_tokenizer=pre(digits, {**BYTE_LEVEL, "use_regex": True}))
    for behavior in ("Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext"):
        for invert in (False, True):
            variant(f"split-{behavior}-{invert}", pre_tokenizer=pre(split(WORD_BREAKS, behavior, invert), BYTE_LEVEL))
        variant(f"split-empty-{behavior}", pre_tokenizer=pre(split(CAPITALS, behavior), BYTE_LEVEL))
    variant("split-string", pre_tokenizer=pre(split({"String": ".."}, "MergedWithNext"), BYTE_LEVEL))
    variant("split-han", pre_tokenizer=pre(split(HAN), BYTE_LEVEL))
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        variant(form, normalizer={"type": form})
    variant("replace-regex", normalizer=replace({"Regex": r"\s{2,}|[A-Z]"}, " $0"))
    variant("byte-level-normalizer", normalizer={"type": "ByteLevel"}, pre_tokenizer=None)
    variant("no-decoder", decoder=None)
    variant("regex-dialect", pre_tokenizer=pre(split({"Regex": r"(?<=[a-c])x|\x41+|é{2}|[\x{4e00}-\x{9fff}]{2,3}?|(?>ab|a)b*|\.\d??\D"}), BYTE_LEVEL))
    model = copy.deepcopy(base["model"])
    model["ignore_merges"] = True
    variant("ignore-merges", model=model)
    return out


def sentencepiece_variants(base):
    """From a tokenizer with ▁ and byte fallback: name -> tokenizer.json."""
    out = {}

    def variant(name, **parts):
        out[name] = {**copy.deepcopy(base), **parts}

    for scheme in ("first", "always", "never"):
        for does in (True, False):
            variant(f"metaspace-{scheme}-{does}", normalizer=None, pre_tokenizer=metaspace(scheme, does))
        variant(f"metaspace-decoder-{scheme}", decoder=metaspace(scheme, True))
    variant("strip-tokens", decoder={"type": "Strip", "content": "▁", "start": 2, "stop": 0})
    variant("strip-fused", decoder=sequence("decoders", {"type": "Fuse"}, {"type": "Strip", "content": "▁", "start": 3, "stop": 0}))
    for fallback in (True, False):
        for fuse in (True, False):
            # Without the bytes E3 to FF most of the world's characters are unknown.
            model = copy.deepcopy(base["model"])
            model.update(byte_fallback=fallback, fuse_unk=fuse)
            model["vocab"] = {(t + "x" if t.startswith(("<0xE", "<0xF")) else t): i for t, i in model["vocab"].items()}
            variant(f"unknown-{fallback}-{fuse}", model=model)
    model = copy.deepcopy(base["model"])
    model.update(byte_fallback=False, unk_token=None)
    variant("unknown-dropped", model=model)
    variant("added-options", added_tokens=base["added_tokens"] + numbered(
        base["model"]["vocab"],
        added("hello", single_word=True, normalized=True), added("[L]", lstrip=True, special=True),
        added("[R]", rstrip=True), added("[LR]", lstrip=True, rstrip=True, normalized=True, special=True),
        added("<think>", normalized=True), added("\n\n", rstrip=True), added("you are", normalized=True),
        added("<|im_", single_word=True, special=True), added("<|im_end|>", special=True)))
    return out
