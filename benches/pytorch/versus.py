"""Training steps and sampling: coevolve beside PyTorch, transformers and llama.cpp, in one run.

    pip install torch==2.15 transformers==5.24 peft==0.21 llama-cpp-python
    cargo build --release --benches
    python benches/pytorch/versus.py target/release/deps/versus-HASH [--threads 2] [--rounds 5] [CASE...]

Both sides take turns, so that noise of the machine hits both; the table has medians. f32 everywhere, attention by SDPA. The other
side of every case is the plain way to do it there:

    train          small Qwen3, 16 rows of 256 tokens: forward, log-probs of all tokens, DAPO loss, backward, AdamW
    agentic        the same model, 8 rows of a common prompt of 2,000 tokens and a response of 256; prompts repeated
    lora           SmolLM2-135M's shape, LoRA of rank 16 on all linear layers (peft), 8 rows of 512
    sample         small Qwen3, 32 prompts of 64 tokens, 128 new ones each: generate() at temperature 1
    sample-shared  the same, 4 prompts that are continued 8 times each
    smol-sample    SmolLM2-135M's shape, 8 prompts of 64 tokens, 64 new ones each: generate(), or llama.cpp with --gguf
"""

import argparse
import statistics
import subprocess
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

# Seconds before each turn: PyTorch's threads spin for a while after their last work.
REST = 0.5
CASES = ["train", "agentic", "lora", "sample", "sample-shared", "smol-sample"]


def small():
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=2048, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-6, rope_theta=10000.0, max_position_embeddings=4096,
            tie_word_embeddings=True, attn_implementation="sdpa",
        )
    ).float()


def smollm2():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, head_dim=64, rope_theta=100000.0, max_position_embeddings=8192,
            tie_word_embeddings=True, attn_implementation="sdpa",
        )
    ).float()


def learning(model, rows, prompt, response):
    vocab = model.config.vocab_size
    before = torch.randint(vocab, (1, prompt)).expand(rows, -1)
    ids = torch.cat([before, torch.randint(vocab, (rows, response))], dim=1)
    advantages = torch.tensor([1.0 if k % 2 else -1.0 for k in range(rows)]).unsqueeze(1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, weight_decay=0.01)

    def step():
        # As TRL does it: logits of the response only, log-softmax and gather.
        logits = model(input_ids=ids, logits_to_keep=response + 1).logits[:, :-1]
        logps = torch.log_softmax(logits, -1).gather(-1, ids[:, -response:].unsqueeze(-1)).squeeze(-1)
        ratio = torch.exp(logps - logps.detach())
        loss = -torch.min(ratio * advantages, torch.clamp(ratio, 0.8, 1.28) * advantages).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return rows * (prompt + response)

    return step


def lora(model):
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets, lora_dropout=0.0))


def sampling(model, prompts, k, prompt, steps):
    ids = torch.randint(model.config.vocab_size, (prompts, prompt)).repeat_interleave(k, 0)
    mask = torch.ones_like(ids)
    model.eval()
    model.generation_config.eos_token_id = None

    def play():
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=steps, min_new_tokens=steps, pad_token_id=0,
            )
        assert out.shape[1] == prompt + steps
        return prompts * k * steps

    return play


def llama_cpp(gguf, threads, sequences, prompt, steps):
    """Batched decoding through the C API: all sequences in one call a step, sampled by llama.cpp's own sampler."""
    import ctypes

    import llama_cpp as l

    l.llama_backend_init()
    params = l.llama_model_default_params()
    model = l.llama_model_load_from_file(gguf.encode(), params)
    c = l.llama_context_default_params()
    c.n_ctx, c.n_batch, c.n_seq_max = sequences * (prompt + steps + 8), sequences * prompt, sequences
    c.n_threads = c.n_threads_batch = threads
    context = l.llama_init_from_model(model, c)
    vocab = l.llama_vocab_n_tokens(l.llama_model_get_vocab(model))
    ids = [[int(t) for t in torch.randint(vocab, (prompt,))] for _ in range(sequences)]
    samplers = []
    for s in range(sequences):
        chain = l.llama_sampler_chain_init(l.llama_sampler_chain_default_params())
        l.llama_sampler_chain_add(chain, l.llama_sampler_init_dist(s))
        samplers.append(chain)
    batch = l.llama_batch_init(sequences * prompt, 0, 1)

    def put(i, token, pos, seq, logits):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, pos, 1, logits
        batch.seq_id[i][0] = seq

    def play():
        l.llama_memory_clear(l.llama_get_memory(context), True)
        for s in range(sequences):
            for p in range(prompt):
                put(s * prompt + p, ids[s][p], p, s, p == prompt - 1)
        batch.n_tokens = sequences * prompt
        assert l.llama_decode(context, batch) == 0
        rows = [s * prompt + prompt - 1 for s in range(sequences)]
        for step in range(steps):
            tokens = [l.llama_sampler_sample(samplers[s], context, rows[s]) for s in range(sequences)]
            if step + 1 < steps:
                for s in range(sequences):
                    put(s, tokens[s], prompt + step, s, True)
                batch.n_tokens = sequences
                assert l.llama_decode(context, batch) == 0
                rows = list(range(sequences))
        return sequences * steps

    return play


def theirs(name, args):
    torch.manual_seed(1)
    if name == "train":
        return learning(small(), 16, 1, 255)
    if name == "agentic":
        return learning(small(), 8, 2000, 256)
    if name == "lora":
        return learning(lora(smollm2()), 8, 1, 511)
    if name == "sample":
        return sampling(small(), 32, 1, 64, 128)
    if name == "sample-shared":
        return sampling(small(), 4, 8, 64, 128)
    if args.gguf:
        return llama_cpp(args.gguf, args.threads, 8, 64, 64)
    return sampling(smollm2(), 8, 1, 64, 64)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ours", help="the compiled benchmark `versus`")
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gguf", help="an f32 GGUF of SmolLM2-135M for smol-sample")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    other = subprocess.Popen(
        [args.ours, "--threads", str(args.threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def ours(name):
        other.stdin.write(name + "\n")
        other.stdin.flush()
        return float(other.stdout.readline().split()[0])

    print(f"torch {torch.__version__}, {args.threads} threads, medians of {args.rounds}")
    print("| case | coevolve s | the other s | tokens | ratio |\n|---|---|---|---|---|")
    for name in args.cases:
        play = theirs(name, args)
        play(), ours(name)
        mine, others = [], []
        for _ in range(args.rounds):
            time.sleep(REST)
            begin = time.perf_counter()
            tokens = play()
            others.append(time.perf_counter() - begin)
            time.sleep(REST)
            mine.append(ours(name))
        a, b = statistics.median(mine), statistics.median(others)
        print(f"| {name} | {a:.3f} | {b:.3f} | {tokens} | {b / a:.2f} |", flush=True)


if __name__ == "__main__":
    main()
