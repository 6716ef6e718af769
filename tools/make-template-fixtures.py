#!/usr/bin/env python3
"""Makes tests/fixtures/templates/*: what Jinja2 renders, a plain BPE encodes and a numpy llama computes.

Independent of the Rust code: Jinja2 with the settings of transformers' `apply_chat_template`
(trim_blocks, lstrip_blocks, its `tojson`, `raise_exception`), and a byte-level BPE of thirty lines over the
vocabularies of SmolLM2 and Qwen3.

    pip install jinja2 gguf numpy regex
    tools/setup-smollm2.sh
    tools/setup-qwen3-tokenizer.sh
    python3 tools/make-template-fixtures.py
"""

import json
import pathlib
import unicodedata

import gguf
import numpy as np
import regex
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "tests" / "fixtures" / "templates"
GGUF = ROOT / ".coevolve" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
QWEN3 = ROOT / ".coevolve" / "models" / "qwen3-tokenizer"


class Refused(Exception):
    pass


class Generation(Extension):
    """transformers' `{% generation %}` block, without its span tracking."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def environment():
    def raise_exception(message):
        raise Refused(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    # The day that our renderer always says, see src/agent/template.rs.
    import datetime

    env.globals["strftime_now"] = lambda f: datetime.datetime(2024, 7, 26).strftime(f)
    return env


def function(name, description, properties, required):
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = function(
    "get_weather",
    "Wetter \u2013 the weather of a <city> & \"more\".",
    {
        "city": {"type": "string", "description": "Name, e.g. 'K\u00f6ln'"},
        "days": {"type": "integer", "default": 1},
        "threshold": {"type": "number", "default": 1e-07},
        "units": {"type": "string", "enum": ["C", "F"]},
    },
    ["city"],
)
NOW = function("now", "The time.", {}, [])


def m(role, content, **more):
    return {"role": role, "content": content, **more}


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


CONVERSATIONS = {
    "user": [m("user", "Hi there")],
    "system": [m("system", "Be brief."), m("user", "  Hi\n\nthere  ")],
    "empty": [m("user", "")],
    "unicode": [m("system", "\u00c4\u00d6\u00dc"), m("user", "\u4f60\u597d \U0001f600 \u2028 e\u0301 \u00a0|")],
    "turns": [m("user", "a"), m("assistant", "b"), m("user", "c"), m("assistant", "d"), m("user", "e")],
    "ends-with-assistant": [m("user", "a"), m("assistant", "b")],
    "think": [
        m("user", "a"),
        m("assistant", "<think>\nhmm\n</think>\n\nb"),
        m("user", "c"),
        m("assistant", "<think>\nwell\n</think>\n\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>"),
        m("tool", "12:00"),
    ],
    "reasoning-field": [m("user", "a"), m("assistant", "b", reasoning_content="\nbecause\n"), m("tool", "t")],
    "calls": [
        m("system", "s"),
        m("user", "weather?"),
        m(
            "assistant",
            "",
            tool_calls=[
                call("get_weather", {"city": "K\u00f6ln", "days": 2, "deep": {"z": [1, 2.5, None, True], "a": "<&>'\""}}),
                call("now", {}),
            ],
        ),
        m("tool", '{"temp": 20.5}'),
        m("tool", "12:00"),
        m("assistant", "20.5 degrees"),
        m("user", "thanks"),
    ],
    "calls-as-text": [
        m("user", "x"),
        m("assistant", "I look.", tool_calls=[{"name": "now", "arguments": '{"raw":  1}'}]),
        m("tool", "12"),
    ],
    "fake-tool-response": [
        m("user", "q"),
        m("assistant", "<think>\nx\n</think>\n\ny"),
        m("user", "<tool_response>\nr\n</tool_response>"),
    ],
    "late-system": [m("user", "a"), m("system", "now be rude"), m("user", "b")],
}

FEATURES = """{# Exercises what templates in the wild use and engines differ in. Ours, no model's. #}
{%- set ns = namespace(n=0, names=[]) %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token }}{{ strftime_now('%d %b %Y, %Y-%m-%d') }}
{% if tools is defined and tools is not none %}
Tools: {{ tools | tojson(indent=2) }}
Sorted: {{ tools[0] | tojson(sort_keys=True, separators=(',', ':')) }}
    {% for tool in tools %}
        {%- set f = tool.function %}
- {{ f.name }}({% for key, spec in f.parameters.properties.items() %}{{ key }}: {{ spec.type }}{{ ' = ' ~ spec.default | string if spec.default is defined else '' }}{{ ', ' if not loop.last }}{% endfor %})
    {% endfor %}
{% endif %}
{%- for message in rest %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception('Roles must be user, assistant or tool, not ' + message.role + '!') }}
    {%- endif %}
    {%- if message.content is none %}{% continue %}{% endif %}
    {%- set ns.n = ns.n + 1 %}
    {%- if message.role == 'assistant' %}
        {%- generation -%}
        [{{ ns.n }}/{{ loop.index0 }}/{{ loop.revindex }}] {{ message.content.strip() }}
        {%- endgeneration -%}
        {%- for c in message.tool_calls or [] %}
            {%- set args = (c.function or c).arguments %}
            {{- ' ' }}{{ args }} {{ args.get('city', 'nowhere') if args is mapping else args | upper }}
        {%- endfor %}
    {%- else %}
        {{- message.role.upper() }}: {{ message.content | trim | replace('\\n', '\\\\n') }} {{ message['content'] | length }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{{- system.split(' ')[-1] if system else 'none' }} {{ true }} {{ none }} {{ 3 / 2 }} {{ 7 // 2 }} {{ 1.0 }} {{ [1, 'a', none] }} {{ ns.n is odd }}
{%- if add_generation_prompt %}
{{ eos_token }}>
{%- endif %}
"""


def render_all(templates):
    env = environment()
    cases = []
    for template, source in templates.items():
        compiled = env.from_string(source)
        for name, messages in CONVERSATIONS.items():
            for tools in (None, [WEATHER, NOW]):
                for prompt in (True, False):
                    variants = [{}]
                    if template == "qwen3" and prompt:
                        variants.append({"enable_thinking": False})
                    for variables in variants:
                        case = {"template": template, "name": name, "messages": messages, "tools": tools}
                        case |= {"add_generation_prompt": prompt, "variables": variables}
                        try:
                            case["text"] = compiled.render(
                                messages=messages,
                                tools=tools,
                                documents=None,
                                add_generation_prompt=prompt,
                                bos_token="<s>",
                                eos_token="<|im_end|>",
                                **variables,
                            )
                        except Refused as e:
                            case["refused"] = str(e)
                        cases.append(case)
    return cases


# Encoding: bytes -> the printable alphabet of GPT-2 -> merges by rank.
def byte_alphabet():
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {b: chr(b) for b in printable}, 0
    for b in range(256):
        if b not in table:
            table[b] = chr(256 + extra)
            extra += 1
    return table


TEXTS = [
    "Hello world",
    " leading and trailing ",
    "It's 2024, we've 1234567 things; don't!",
    "tabs\tand\n\nnewlines \n x",
    "\u4f60\u597d \U0001f600 \u00c4\u00d6\u00dc e\u0301 \u00a0|",
    "def f(x):\n    return x+1  # comment\n",
    '{"name": "get_weather", "arguments": {"city": "K\u00f6ln", "days": 2}}',
    "<tool_call>\n{}\n</tool_call>",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|><|im_end|> b",
    "3.14159 -1e-05 0x1F",
    "",
]


# SmolLM2's tokenizer.json: single digits first, then GPT-2's pattern.
DIGITS = regex.compile(r"\p{Nd}|[^\p{Nd}]+")
GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
QWEN = regex.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def encode_all(ids, merges, added, words, texts):
    """`ids`: token -> id, `merges`: pairs by rank, `added`: text -> id, `words`: text -> pieces to merge in."""
    ranks = {tuple(pair): i for i, pair in enumerate(merges)}
    alphabet = byte_alphabet()
    split = regex.compile("(" + "|".join(regex.escape(t) for t in added) + ")")

    def word(text):
        parts = [alphabet[b] for b in text.encode()]
        while len(parts) > 1:
            best = min(zip(parts, parts[1:]), key=lambda p: ranks.get(p, 1 << 30))
            if best not in ranks:
                break
            i, merged = 0, []
            while i < len(parts):
                if tuple(parts[i : i + 2]) == best:
                    merged.append(parts[i] + parts[i + 1])
                    i += 2
                else:
                    merged.append(parts[i])
                    i += 1
            parts = merged
        return [ids[p] for p in parts]

    def encode(text):
        plain = lambda t: [i for w in words(t) for i in word(w)]
        return [i for part in split.split(text) for i in ([added[part]] if part in added else plain(part))]

    return [{"text": t, "ids": encode(t)} for t in texts]


def encode_smollm2(reader, texts):
    tokens, merges, types = (reader.fields[f"tokenizer.ggml.{n}"].contents() for n in ("tokens", "merges", "token_type"))
    ids = {t: i for i, t in enumerate(tokens)}
    added = {t: ids[t] for t, kind in zip(tokens, types) if kind in (3, 4)}
    words = lambda text: [w for d in DIGITS.findall(text) for w in GPT2.findall(d)]
    return encode_all(ids, [pair.split(" ") for pair in merges], added, words, texts)


def encode_qwen3():
    tokenizer = json.loads((QWEN3 / "tokenizer.json").read_text())
    model = tokenizer["model"]
    merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    added = {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    words = lambda text: QWEN.findall(unicodedata.normalize("NFC", text))
    return encode_all(model["vocab"], merges, added, words, TEXTS)


# A llama forward in numpy straight from the GGUF tensors: their rows are permuted for rotating neighbouring
# pairs, which is what this does. So it checks the loader's renaming and un-permuting independently.
REPLIES = ["The capital of France is Paris.<|im_end|>", "The capital of France is Berlin.<|im_end|>"]
PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


def llama_logprobs(reader, ids, start):
    """log p(ids[i] | ids[:i]) for i >= start, in f64."""
    weights = {t.name: t for t in reader.tensors}

    def tensor(name):
        t = weights[name]
        return gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64).reshape(list(reversed(t.shape)))

    field = lambda name: reader.fields["llama." + name].contents()
    heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    eps, base = field("attention.layer_norm_rms_epsilon"), field("rope.freq_base")
    dim = field("embedding_length") // heads
    n = len(ids)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * tensor(name)

    angle = np.outer(np.arange(n), base ** (-np.arange(0, dim, 2) / dim))
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]

    def rope(x):
        a, b = x[..., 0::2], x[..., 1::2]
        return np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)

    embedding = tensor("token_embd.weight")
    x = embedding[ids]
    mask = np.triu(np.full((n, n), -np.inf), 1)
    for layer in range(field("block_count")):
        name = lambda part: f"blk.{layer}.{part}.weight"
        h = norm(x, name("attn_norm"))
        q = rope((h @ tensor(name("attn_q")).T).reshape(n, heads, dim))
        k = rope((h @ tensor(name("attn_k")).T).reshape(n, kv_heads, dim))
        v = (h @ tensor(name("attn_v")).T).reshape(n, kv_heads, dim)
        out = np.empty((n, heads, dim))
        for head in range(heads):
            g = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, g].T / np.sqrt(dim) + mask
            p = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = p / p.sum(-1, keepdims=True) @ v[:, g]
        x = x + out.reshape(n, -1) @ tensor(name("attn_output")).T
        h = norm(x, name("ffn_norm"))
        gate = h @ tensor(name("ffn_gate")).T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ tensor(name("ffn_up")).T)) @ tensor(name("ffn_down")).T
    logits = norm(x, "output_norm.weight")[start - 1 : -1] @ embedding.T
    top = logits.max(-1, keepdims=True)
    logp = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return [float(logp[i, ids[start + i]]) for i in range(n - start)]


def main():
    config = json.loads((QWEN3 / "tokenizer_config.json").read_text())
    reader = gguf.GGUFReader(GGUF)
    templates = {
        "smollm2": reader.fields["tokenizer.chat_template"].contents(),
        "qwen3": config["chat_template"],
        "features": FEATURES,
    }
    OUT.mkdir(parents=True, exist_ok=True)
    for name, source in templates.items():
        (OUT / f"{name}.jinja").write_text(source)
    dump = lambda name, value: (OUT / name).write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")
    dump("rendered.json", render_all(templates))
    dump("smollm2_ids.json", encode_smollm2(reader, TEXTS))
    prompt, *replies = (case["ids"] for case in encode_smollm2(reader, [PROMPT, *REPLIES]))
    scored = [{"reply": r, "logp": llama_logprobs(reader, prompt + r, len(prompt))} for r in replies]
    dump("smollm2_logprobs.json", {"prompt": prompt, "replies": scored})
    dump("qwen3_ids.json", encode_qwen3())


main()
