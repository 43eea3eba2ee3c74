"""Conversations that every template is rendered with: chatlint's shapes (the
last snapshot of each) and some of our own. Each is what transformers'
apply_chat_template would pass on: messages, tools, documents,
add_generation_prompt and further variables."""

from chatlint import shapes

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is a pipeline stage?"}
ASSISTANT = {"role": "assistant", "content": "One slice of the layers."}
AGAIN = {"role": "user", "content": "And its <cost> & \"size\"?\n"}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather in a city, in °C & <units>.",
            "parameters": {
                "type": "object",
                "required": ["place"],
                "properties": {
                    "place": {
                        "type": "object",
                        "description": "Where",
                        "properties": {
                            "zip": {"type": ["string", "null"], "default": None},
                            "city": {"type": "string", "enum": ["Köln", "東京"]},
                            "near": {"type": "array", "items": {"type": "number"}, "minItems": 2},
                        },
                    },
                    "days": {"type": "integer", "default": 3, "maximum": 14.0},
                    "live": {"type": "boolean", "default": True},
                },
                "additionalProperties": False,
            },
            "strict": True,
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}},
]
ARGUMENTS = {"place": {"zip": None, "city": "Köln", "near": [50.94, 6.96, 1e-05]}, "days": 2, "live": False}
ARGUMENTS_TEXT = '{"place": {"zip": null, "city": "Köln"}, "days": 2, "live": false}'


def call(arguments, **more):
    return {"id": "call12345", "type": "function", "function": {"name": "get_weather", "arguments": arguments}, **more}


def tool_turns(arguments, **assistant):
    return [
        SYSTEM,
        {"role": "user", "content": "Weather in Köln?"},
        {"role": "assistant", "content": "", "tool_calls": [call(arguments)], **assistant},
        {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": '{"temp": 21.5, "sky": "clear"}'},
    ]


def parts(text):
    return [{"type": "text", "text": text}]


def own():
    reasoned = {"role": "assistant", "content": "42.", "reasoning_content": "Six times\nseven."}
    yield "system-user", {"messages": [SYSTEM, USER]}
    yield "user-no-prompt", {"messages": [USER], "add_generation_prompt": False}
    yield "three-turns", {"messages": [SYSTEM, USER, ASSISTANT, AGAIN]}
    yield "tools-arguments-object", {"messages": tool_turns(ARGUMENTS), "tools": TOOLS}
    yield "tools-arguments-text", {"messages": tool_turns(ARGUMENTS_TEXT, content=None), "tools": TOOLS}
    yield "tools-declared", {"messages": [USER], "tools": TOOLS}
    yield "thinking-on", {"messages": [SYSTEM, USER, reasoned, AGAIN], "extra": {"enable_thinking": True, "thinking": True}}
    yield "thinking-off", {"messages": [SYSTEM, USER, reasoned, AGAIN], "extra": {"enable_thinking": False, "thinking": False}}
    yield "thinking-tools", {"messages": tool_turns(ARGUMENTS, reasoning_content="Ask the tool."), "tools": TOOLS, "extra": {"enable_thinking": True, "reasoning_effort": "high"}}
    yield "content-parts", {"messages": [{"role": "system", "content": parts("Be brief.")}, {"role": "user", "content": parts("Hi ") + parts("there")}]}
    yield "odd-roles", {"messages": [{"role": "developer", "content": "Be brief."}, USER, {"role": "ipython", "content": "1"}]}
    yield "documents", {"messages": [USER], "documents": [{"title": "Köln", "text": "A city.", "doc_id": 1}]}


def all_scenarios():
    def scenario(name, given):
        return {
            "name": name,
            "messages": given["messages"],
            "tools": given.get("tools"),
            "documents": given.get("documents"),
            "add_generation_prompt": given.get("add_generation_prompt", True),
            "extra": given.get("extra", {}),
        }

    ours = [scenario(name, given) for name, given in own()]
    theirs = [scenario(s.name, {"messages": s.snapshots[-1], "tools": s.tools}) for s in shapes.all_shapes()]
    return ours + theirs
