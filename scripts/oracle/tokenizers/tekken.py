"""Turns a tekken.json (a list of byte strings by rank) into a tokenizer.json."""

import base64
import itertools


def byte_chars():
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = itertools.count(0x100)
    return {b: chr(b) if b in printable else chr(next(others)) for b in range(256)}


def convert(tekken):
    chars = byte_chars()
    spell = lambda token: "".join(chars[b] for b in token)
    config = tekken["config"]
    special_count = config["default_num_special_tokens"]
    size = config["default_vocab_size"] - special_count
    ranks = {base64.b64decode(t["token_bytes"]): t["rank"] for t in tekken["vocab"][:size]}
    specials = [f"<SPECIAL_{i}>" for i in range(special_count)]
    for t in tekken.get("special_tokens") or []:
        specials[t["rank"]] = t["token_str"]
    vocab = {s: i for i, s in enumerate(specials)}
    vocab.update((spell(token), special_count + rank) for token, rank in ranks.items())
    merges = []
    for token, rank in ranks.items():
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        halves = [(a, b) for a, b in halves if a in ranks and b in ranks]
        halves.sort(key=lambda p: (ranks[p[0]], ranks[p[1]]))
        merges += [(rank, spell(a), spell(b)) for a, b in halves]
    merges.sort(key=lambda m: m[0])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": s, **flags} for i, s in enumerate(specials)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": config["pattern"]}, "behavior": "Isolated", "invert": False}, byte_level]},
        "post_processor": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
                  "vocab": vocab, "merges": [[a, b] for _, a, b in merges]},
    }
