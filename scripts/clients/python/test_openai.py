"""Calls of the official Python client against a running server: OPENAI_BASE_URL, OPENAI_API_KEY and MLXCEL_MODEL say which."""

import asyncio
import json
import math
import os
import unittest
import urllib.request

import openai

MODEL = os.environ["MLXCEL_MODEL"]
REAL = MODEL == "smollm2"  # it can answer questions; the tiny checkpoint's text means nothing
ASK = [{"role": "user", "content": "What is the capital of France?"}]


def server(path):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + path)
    request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


class Suite(unittest.TestCase):
    def setUp(self):
        self.client = openai.OpenAI(max_retries=0, timeout=120)
        self.addCleanup(self.client.close)

    def chat(self, **options):
        return self.client.chat.completions.create(**{"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 24, **options})

    def complete(self, **options):
        return self.client.completions.create(**{"model": MODEL, "prompt": "One, two, three,", "temperature": 0, "max_tokens": 12, **options})

    def test_models(self):
        self.assertIn(MODEL, [m.id for m in self.client.models.list()])
        self.assertEqual(self.client.models.retrieve(MODEL).owned_by, "mlxcel")
        with self.assertRaises(openai.NotFoundError):
            self.client.models.retrieve("gpt-9")

    def test_chat(self):
        answer = self.chat()
        choice = answer.choices[0]
        self.assertEqual((answer.object, answer.model, choice.message.role), ("chat.completion", MODEL, "assistant"))
        self.assertEqual(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)
        self.assertIn(choice.finish_reason, ("stop", "length"))
        self.assertRegex(answer._request_id, "^req_")
        if REAL:
            self.assertEqual((choice.message.content, choice.finish_reason), ("The capital of France is Paris.", "stop"))

    def test_chat_stream_is_the_answer(self):
        chunks = list(self.chat(stream=True, stream_options={"include_usage": True}))
        first, last = chunks[0].choices[0], chunks[-2].choices[0]
        self.assertEqual((first.delta.role, first.finish_reason), ("assistant", None))
        self.assertIn(last.finish_reason, ("stop", "length"))
        self.assertEqual([c.usage for c in chunks[:-1]], [None] * (len(chunks) - 1))
        self.assertEqual(chunks[-1].choices, [])
        whole = self.chat()
        self.assertEqual(chunks[-1].usage.model_dump(), whole.usage.model_dump())
        text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
        self.assertEqual(text, whole.choices[0].message.content)

    def test_stream_helper(self):
        with self.client.chat.completions.stream(model=MODEL, messages=ASK, temperature=0, max_tokens=8) as stream:
            deltas = "".join(e.delta for e in stream if e.type == "content.delta")
            self.assertEqual(stream.current_completion_snapshot.choices[0].message.content, deltas)

    def test_completions(self):
        answer = self.complete()
        self.assertEqual((answer.object, answer.choices[0].finish_reason, answer.usage.completion_tokens), ("text_completion", "length", 12))
        text = "".join(c.choices[0].text for c in self.complete(stream=True) if c.choices)
        self.assertEqual(text, answer.choices[0].text)

    def test_prompts_and_choices(self):
        answer = self.complete(prompt=["a", "b"], n=2, temperature=1, seed=5, max_tokens=8)
        self.assertEqual([c.index for c in answer.choices], [0, 1, 2, 3])
        self.assertNotEqual(answer.choices[0].text, answer.choices[1].text)
        again = self.complete(prompt=["a", "b"], n=2, temperature=1, seed=5, max_tokens=8)
        self.assertEqual([c.text for c in answer.choices], [c.text for c in again.choices])

    def test_echo(self):
        answer = self.complete(echo=True, logprobs=0, max_tokens=4).choices[0]
        self.assertTrue(answer.text.startswith("One, two, three,"))
        self.assertIsNone(answer.logprobs.token_logprobs[0])
        self.assertTrue(all(x < 0 for x in answer.logprobs.token_logprobs[1:]))

    def test_seed(self):
        one, two, other = (self.chat(temperature=1, seed=s).choices[0].message.content for s in (7, 7, 8))
        self.assertEqual(one, two)
        self.assertNotEqual(one, other)

    def test_stop(self):
        whole = self.complete(max_tokens=20).choices[0].text
        stop = whole[5:8]
        answer = self.complete(max_tokens=20, stop=[stop, "never to be seen"]).choices[0]
        self.assertEqual((answer.text, answer.finish_reason), (whole[: whole.index(stop)], "stop"))
        text = "".join(c.choices[0].text for c in self.complete(max_tokens=20, stop=stop, stream=True) if c.choices)
        self.assertEqual(text, answer.text)

    def test_logprobs(self):
        answer = self.chat(logprobs=True, top_logprobs=3, max_tokens=6).choices[0]
        content = answer.logprobs.content
        self.assertEqual(bytes(b for t in content for b in t.bytes).decode(errors="replace"), answer.message.content)
        for token in content:
            self.assertEqual(len(token.top_logprobs), 3)
            self.assertEqual(token.top_logprobs[0].token, token.token)  # temperature 0
            self.assertLessEqual(sum(math.exp(t.logprob) for t in token.top_logprobs), 1.0001)
        streamed = [t for c in self.chat(logprobs=True, top_logprobs=3, max_tokens=6, stream=True) for t in (c.choices[0].logprobs.content if c.choices[0].logprobs else [])]
        self.assertEqual(streamed, content)
        old = self.complete(logprobs=2, max_tokens=4).choices[0].logprobs
        self.assertEqual([len(old.tokens), len(old.token_logprobs), len(old.top_logprobs), len(old.text_offset)], [4] * 4)

    def test_logit_bias(self):
        token = self.server_tokens(" seven")[-1]
        answer = self.complete(logit_bias={str(token): 100}, max_tokens=3, extra_body={"ignore_eos": True})
        self.assertEqual(answer.choices[0].text, self.piece(token) * 3)

    def server_tokens(self, text):
        return self.post("/tokenize", {"content": text})["tokens"]

    def piece(self, token):
        return self.post("/detokenize", {"tokens": [token]})["content"]

    def post(self, path, body):
        base = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
        return self.client.post(base + path, body=body, cast_to=object)

    def test_content_parts_and_roles(self):
        parts = [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of France?"}]
        self.assertEqual(self.chat(messages=[{"role": "user", "content": parts}]).choices[0].message.content, self.chat().choices[0].message.content)
        roles = [{"role": "developer", "content": "Be brief."}, *ASK, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "And of Spain?"}]
        self.assertTrue(self.chat(messages=roles).choices[0].message.content)

    def test_fields_without_effect(self):
        self.chat(user="u", metadata={"a": "b"}, store=False, service_tier="auto", response_format={"type": "text"}, parallel_tool_calls=True)

    def test_errors(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(temperature=9)
        self.assertEqual((caught.exception.param, caught.exception.type, caught.exception.code), ("temperature", "invalid_request_error", "invalid_value"))
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(messages=[{"role": "user", "content": 5}])
        self.assertEqual(caught.exception.param, "messages[0].content")
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(tools=[{"type": "function", "function": {"name": "f"}}])
        self.assertEqual((caught.exception.param, caught.exception.code), ("tools", "unsupported_parameter"))
        with self.assertRaises(openai.NotFoundError) as caught:
            self.chat(model="gpt-9")
        self.assertEqual(caught.exception.code, "model_not_found")
        with self.assertRaises(openai.AuthenticationError):
            self.client.with_options(api_key="wrong").models.list()
        for stream in (False, True):
            with self.assertRaises(openai.BadRequestError) as caught:
                self.complete(prompt=[1] * 20000, stream=stream)
            self.assertEqual(caught.exception.code, "context_length_exceeded")
            self.assertIn("20000", str(caught.exception))

    def test_cancel(self):
        stream = self.complete(stream=True, max_tokens=2000, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        busy = [True]
        while any(busy):  # the run's own time limit ends a server that never notices
            busy = [s["is_processing"] for s in server("/slots")]
        self.complete()

    def test_concurrent_answers_are_those_alone(self):
        prompts = [f"Tell me about the number {n}." for n in range(8)]
        alone = [self.complete(prompt=p).choices[0].text for p in prompts]

        async def together():
            async with openai.AsyncOpenAI(max_retries=0, timeout=120) as client:
                answers = await asyncio.gather(*(client.completions.create(model=MODEL, prompt=p, temperature=0, max_tokens=12) for p in prompts))
            return [a.choices[0].text for a in answers]

        self.assertEqual(asyncio.run(together()), alone)


if __name__ == "__main__":
    unittest.main()
