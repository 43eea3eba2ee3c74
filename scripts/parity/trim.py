#!/usr/bin/env python3
"""Copy checkpoints of the parity kit with their goldens cut to what the tests read.

    trim.py OUT CHECKPOINT...      -> OUT/<name of the checkpoint>/

Kept of a golden's runs: prompt, prompt_ids, tokens, logit_std, and per step token, margin and top5. A checkpoint in
float32 has one golden, golden.json: it becomes golden_f32.json here.
"""
import json, os, shutil, sys

KEEP_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
              "parity.json", "model.safetensors.index.json")
KEEP_RUN = ("prompt", "prompt_ids", "tokens", "logit_std")
KEEP_STEP = ("token", "margin", "top5")


def trim_golden(src, dst):
    with open(src) as f:
        golden = json.load(f)
    runs = [{k: r[k] for k in KEEP_RUN} | {"steps": [{k: s[k] for k in KEEP_STEP} for s in r["steps"]]} for r in golden["runs"]]
    with open(dst, "w") as f:
        json.dump({"mlx": golden["mlx"], "mode": golden["mode"], "runs": runs}, f, separators=(",", ":"))
        f.write("\n")


def trim(src, out):
    dst = os.path.join(out, os.path.basename(os.path.normpath(src)))
    os.makedirs(dst, exist_ok=True)
    names = os.listdir(src)
    for name in names:
        if name in KEEP_FILES or name.endswith(".safetensors"):
            path = os.path.join(dst, name)
            shutil.copyfile(os.path.join(src, name), path)
            os.chmod(path, 0o644)
    for name in ("golden_f32.json", "golden_acc32.json"):
        if name in names:
            trim_golden(os.path.join(src, name), os.path.join(dst, name))
    if "golden_f32.json" not in names:
        trim_golden(os.path.join(src, "golden.json"), os.path.join(dst, "golden_f32.json"))


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    for src in sys.argv[2:]:
        trim(src, sys.argv[1])


if __name__ == "__main__":
    main()
