"""The environment in which transformers renders chat templates, as its
_compile_jinja_template and render_jinja_template make it
(transformers/utils/chat_template_utils.py), without the rest of transformers."""

import datetime
import json

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = datetime.datetime(2026, 3, 5, 9, 7, 8)
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class Refused(jinja2.TemplateError):
    """Raised by a template's own raise_exception."""


class Generation(jinja2.ext.Extension):
    """{% generation %} marks the assistant's text for training; it prints its body."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(line)

    def body(self, caller):
        return caller()


def raise_exception(message):
    raise Refused(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda format: NOW.strftime(format)
    return env


def render(template, scenario):
    """One scenario's outcome: {"text"}, {"refused"} or {"error"}."""
    variables = {**SPECIALS, **scenario["extra"]}
    for name in ("messages", "tools", "documents", "add_generation_prompt"):
        variables[name] = scenario[name]
    try:
        return {"text": template.render(**variables)}
    except Refused as e:
        return {"refused": str(e)}
    except Exception as e:  # a template meets Python's own errors freely
        return {"error": f"{type(e).__name__}: {e}"}
