#!/usr/bin/env python3
"""Makes tests/fixtures/parity/*: what transformers and peft compute for small random models of each family.

Every case is a model folder as transformers writes it (config.json and safetensors, in f32, bf16 or f16, whole or
in shards), an adapter folder as peft writes it, and `expected.safetensors` with what transformers computes from them
in f32 with eager attention on one thread:

    ids            the tokens of one sequence
    positions      whose logits are scored for the token that follows
    weights        of these log-probs; the loss is -sum(weights * logp)
    logits         at every position
    greedy         what follows the first PROMPT ids, always taking the most likely token
    grad.NAME      gradient of the loss for each tensor of the model, under the names of the file
    lora.logits    logits with the adapter
    lora.grad.NAME gradient for each tensor of the adapter
    ours.logits    logits with the adapter folder `ours/` that this project wrote, where a case has one

`smollm2.json` holds the log-probs and greedy continuations of the real SmolLM2-135M-Instruct (dequantised by
transformers from the GGUF file that tools/setup-smollm2.sh fetches).

All values of the models are representable in the type they are stored in. The numbers are those of these versions:

    pip install torch==2.15.0 transformers==5.24.0 peft==0.21.2 gguf==0.19.0
    tools/setup-smollm2.sh
    python3 tools/make-parity-fixtures.py             (every case)
    python3 tools/make-parity-fixtures.py qwen3-tied  (some)

Adapters in `ours/` and configurations in `ours.json` are written by
`COEVOLVE_BLESS=1 cargo test --release --test parity ours`; run that before this script when the way they are written
has changed. The script refuses them unless peft and transformers read them as they are meant.
"""

import json
import math
import os
import pathlib
import shutil
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "tests" / "fixtures" / "parity"
VERSIONS = {"torch": "2.15.0", "transformers": "5.24.0", "peft": "0.21.2"}
PROMPT, GREEDY = 8, 24
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION = ALL[:4]

BASE = dict(
    vocab_size=64, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2,
)
MOE = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True)


def rope(**kind):
    return {"rope_theta": 10000.0, "rope_type": "default", **kind}


LLAMA3 = rope(rope_theta=100.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
YARN = rope(rope_theta=100.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=32)

# name: (configuration, dtype on disk, bytes of a shard or None, length of the sequence, adapter)
CASES = {
    "llama-tied": (LlamaConfig(**BASE, tie_word_embeddings=True, rope_parameters=rope()), "bfloat16", 8000, 48,
                   dict(r=4, lora_alpha=6, target_modules=ALL)),
    "llama-untied": (LlamaConfig(**{**BASE, "num_key_value_heads": 1}, tie_word_embeddings=False,
                                 rope_parameters=rope(rope_theta=500.0)), "float16", None, 48,
                     dict(r=3, lora_alpha=5, target_modules=["v_proj", "down_proj"], use_rslora=True)),
    "qwen2-tied": (Qwen2Config(**BASE, tie_word_embeddings=True, rope_parameters=rope(rope_theta=1e6)), "float32",
                   None, 48, dict(r=4, lora_alpha=8, target_modules="all-linear")),
    "qwen2-untied": (Qwen2Config(**BASE, tie_word_embeddings=False, rope_parameters=rope()), "bfloat16", 12000, 40,
                     dict(r=2, lora_alpha=2, target_modules=["q_proj", "k_proj", "gate_proj"])),
    "qwen3-tied": (Qwen3Config(**BASE, head_dim=16, tie_word_embeddings=True, rope_parameters=rope(rope_theta=1e6)),
                   "bfloat16", None, 48, dict(r=4, lora_alpha=6, target_modules=ALL)),
    "qwen3-untied": (Qwen3Config(**{**BASE, "num_key_value_heads": 4}, head_dim=8, tie_word_embeddings=False,
                                 rope_parameters=rope()), "float16", 9000, 40,
                     dict(r=2, lora_alpha=4, target_modules=["o_proj", "up_proj"])),
    "llama3-rope": (LlamaConfig(**BASE, tie_word_embeddings=True, rope_parameters=LLAMA3), "bfloat16", None, 128,
                    dict(r=2, lora_alpha=4, target_modules=ATTENTION)),
    "linear-rope": (LlamaConfig(**BASE, tie_word_embeddings=True,
                                rope_parameters=rope(rope_type="linear", factor=3.0)), "bfloat16", None, 96,
                    dict(r=2, lora_alpha=4, target_modules=ATTENTION)),
    "yarn-qwen2": (Qwen2Config(**BASE, tie_word_embeddings=True, rope_parameters=YARN), "bfloat16", None, 128,
                   dict(r=2, lora_alpha=4, target_modules=ATTENTION)),
    "yarn-qwen3": (Qwen3Config(**BASE, head_dim=16, tie_word_embeddings=True,
                               rope_parameters={**YARN, "attention_factor": 1.3, "beta_fast": 3.0, "beta_slow": 2.0,
                                                "truncate": False}), "bfloat16", None, 128,
                   dict(r=2, lora_alpha=4, target_modules=ATTENTION)),
    "moe-norm": (Qwen3MoeConfig(**BASE, **MOE, head_dim=8, tie_word_embeddings=True, rope_parameters=rope()),
                 "bfloat16", None, 64, dict(r=3, lora_alpha=6, target_modules=ATTENTION)),
    "moe-mixed": (Qwen3MoeConfig(**{**BASE, "num_hidden_layers": 4},
                                 **{**MOE, "norm_topk_prob": False, "num_experts": 5, "num_experts_per_tok": 3},
                                 decoder_sparse_step=2, mlp_only_layers=[3], head_dim=8, tie_word_embeddings=False,
                                 rope_parameters=rope()), "bfloat16", 15000, 64,
                  dict(r=2, lora_alpha=4, target_modules=ATTENTION)),
}


def fill(model, dtype, generator):
    """Weights large enough that every part matters, norms and biases away from 1 and 0, exact in `dtype`."""
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if name.endswith("norm.weight"):
            value = 1 + 0.3 * noise
        elif name.endswith("bias"):
            value = 0.5 * noise
        elif "embed" in name or "lm_head" in name:
            value = 0.5 * noise
        else:
            value = noise * (1.3 / math.sqrt(p.shape[-1]))
        p.data.copy_(value.to(dtype).float())


def file_names(gradients, config):
    """Gradients under the names and shapes of the file: experts are fused in memory and single on disk."""
    out = {}
    for name, g in gradients.items():
        head, _, last = name.rpartition(".experts.")
        if not head:
            out[name] = g
            continue
        for e in range(config.num_experts):
            if last == "gate_up_proj":
                gate, up = g[e].chunk(2, dim=0)
                out[f"{head}.experts.{e}.gate_proj.weight"] = gate
                out[f"{head}.experts.{e}.up_proj.weight"] = up
            else:
                assert last == "down_proj", name
                out[f"{head}.experts.{e}.down_proj.weight"] = g[e]
    return {k: v.contiguous() for k, v in out.items()}


def score(model, ids, positions, weights):
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    logp = torch.log_softmax(logits, -1)[positions, ids[positions + 1]]
    return logits, -(weights * logp).sum()


def greedy(model, ids):
    ids, gap = ids.tolist(), math.inf
    for _ in range(GREEDY):
        with torch.no_grad():
            top = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
        gap = min(gap, float(top.values[0] - top.values[1]))
        ids.append(int(top.indices[0]))
    assert gap > 1e-3, f"two tokens are nearly equally likely ({gap}); take another seed"
    return torch.tensor(ids[-GREEDY:])


def all_experts_hit(model, ids):
    """Every expert of every layer has at least one token, and none decides by a hair."""
    seen = {}

    def hook(module, _inputs, output):
        logits, _, chosen = output
        seen[module] = chosen.unique().numel() == module.num_experts
        top = logits.topk(module.top_k + 1).values
        assert float((top[:, -2] - top[:, -1]).min()) > 1e-4, "a router decides by a hair; take another seed"

    routers = [m for m in model.modules() if type(m).__name__ == "Qwen3MoeTopKRouter"]
    hooks = [m.register_forward_hook(hook) for m in routers]
    with torch.no_grad():
        model(input_ids=ids[None], use_cache=False)
    for h in hooks:
        h.remove()
    assert all(seen.values()), "an expert has no token; take another seed"


def make(case):
    config, dtype, shard, length, adapter = CASES[case]
    # Relative: peft writes the name down.
    folder = pathlib.Path(case)
    ours, written = folder / "ours", folder / "ours.json"
    configuration = written.read_bytes() if written.exists() else None
    kept = {p.name: p.read_bytes() for p in ours.iterdir()} if ours.exists() else {}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(sum(case.encode()))
    torch.manual_seed(sum(case.encode()))

    kind = getattr(torch, dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill(model, kind, generator)
    model.to(kind).save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if shard:
        assert len(list(folder.glob("*.safetensors"))) > 1, "one shard only"

    load = lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = load().eval()
    ids = torch.randint(0, config.vocab_size, (length,), generator=generator)
    positions = torch.arange(2, length - 1, 2)
    weights = torch.rand(len(positions), generator=generator) + 0.5
    weights = weights / len(positions)
    all_experts_hit(model, ids)

    logits, loss = score(model, ids, positions, weights)
    loss.backward()
    grads = file_names({n: p.grad for n, p in model.named_parameters()}, config)
    out = {"ids": ids, "positions": positions, "weights": weights, "logits": logits.detach()}
    out["greedy"] = greedy(model, ids[:PROMPT])
    out |= {f"grad.{n}": g for n, g in grads.items()}

    lora = get_peft_model(load().eval(), LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **adapter))
    for name, p in lora.named_parameters():
        if "lora_B" in name:
            p.data.copy_(0.3 * torch.randn(p.shape, generator=generator))
    lora.save_pretrained(folder / "adapter")
    (folder / "adapter" / "README.md").unlink(missing_ok=True)
    # peft writes the targets as a set, in another order every time.
    settings = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    settings["target_modules"].sort()
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    lora = PeftModel.from_pretrained(load().eval(), folder / "adapter", is_trainable=True).eval()
    logits, loss = score(lora, ids, positions, weights)
    loss.backward()
    out["lora.logits"] = logits.detach()
    moved = {n.replace(".default", ""): p.grad for n, p in lora.named_parameters() if p.requires_grad}
    assert set(moved) == set(load_file(folder / "adapter" / "adapter_model.safetensors")), "adapter names"
    out |= {f"lora.grad.{n}": g for n, g in moved.items()}

    if kept:
        ours.mkdir()
        for name, data in kept.items():
            (ours / name).write_bytes(data)
        peer = PeftModel.from_pretrained(load().eval(), ours).eval()
        tensors = load_file(ours / "adapter_model.safetensors")
        state = peft.get_peft_model_state_dict(peer)
        assert all(torch.equal(state[n], t) for n, t in tensors.items()) and len(state) == len(tensors)
        with torch.no_grad():
            out["ours.logits"] = peer(input_ids=ids[None], use_cache=False).logits[0]
        assert float((out["ours.logits"] - out["logits"]).abs().max()) > 0.1, "the adapter does nothing"

    if configuration:
        theirs = (folder / "config.json").read_bytes()
        written.write_bytes(configuration)
        try:
            (folder / "config.json").write_bytes(configuration)
            with torch.no_grad():
                logits = load().eval()(input_ids=ids[None], use_cache=False).logits[0]
        finally:
            (folder / "config.json").write_bytes(theirs)
        assert torch.equal(logits, out["logits"]), "our configuration is read as another model"

    for name, t in out.items():
        assert torch.isfinite(t.float()).all() and (not name.count("grad.") or t.abs().max() > 0), name
    save_file({n: t.contiguous() for n, t in out.items()}, folder / "expected.safetensors")
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    print(f"{case}: {size / 1024:.0f} KiB{', with our adapter' if kept else ''}"
          f"{', with our configuration' if configuration else ''}")


MODELS = ROOT / ".coevolve" / "models"
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
TALKS = [
    [{"role": "user", "content": "What is the capital of France, and which river flows through it?"}],
    [
        {"role": "system", "content": "You are a helpful assistant that answers in one sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "Air scatters short wavelengths of sunlight more than long ones."},
        {"role": "user", "content": "And why is it red in the evening?"},
    ],
]
TEXT = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +"


def smollm2():
    """The real SmolLM2, dequantised by transformers: log-probs of every token of three prompts, and the 32 most
    likely tokens that follow."""
    load = dict(gguf_file=SMOLLM2, dtype=torch.float32, attn_implementation="eager")
    model = AutoModelForCausalLM.from_pretrained(MODELS, **load).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODELS, gguf_file=SMOLLM2)
    texts = [tokenizer.apply_chat_template(t, tokenize=False, add_generation_prompt=True) for t in TALKS] + [TEXT]
    out = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        full, gap = list(ids), math.inf
        with torch.no_grad():
            for _ in range(32):
                top = model(input_ids=torch.tensor([full]), use_cache=False).logits[0, -1].topk(2)
                gap = min(gap, float(top.values[0] - top.values[1]))
                full.append(int(top.indices[0]))
            logits = model(input_ids=torch.tensor([full]), use_cache=False).logits[0].double()
        logp = torch.log_softmax(logits, -1)[torch.arange(len(full) - 1), torch.tensor(full[1:])]
        print(f"{SMOLLM2}: {len(ids)} tokens, smallest gap {gap:.4f}: {tokenizer.decode(full[len(ids):])!r}")
        assert gap > 1e-3, "two tokens are nearly equally likely; take another prompt"
        out.append({"text": text, "ids": ids, "greedy": full[len(ids):], "logp": [round(x, 7) for x in logp.tolist()]})
    (OUT / "smollm2.json").write_text(json.dumps(out, indent=0) + "\n")


def main():
    found = {m.__name__: m.__version__.split("+")[0] for m in (torch, transformers, peft)}
    if found != VERSIONS:
        sys.exit(f"these fixtures are those of {VERSIONS}, installed are {found}")
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    OUT.mkdir(parents=True, exist_ok=True)
    os.chdir(OUT)
    for case in sys.argv[1:] or [*CASES, "smollm2"]:
        smollm2() if case == "smollm2" else make(case)


if __name__ == "__main__":
    main()
