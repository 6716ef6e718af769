#!/usr/bin/env python3
"""Bytes that PyTorch holds per token and vocabulary entry for an unfused loss over logits, forward and backward.

TRL's own path: linear head, division by the temperature, selective_log_softmax, entropy_from_logits (no
gradient), loss, backward. Peak resident memory of a fresh process each, at two token counts; their difference
is free of everything that does not grow.

    pip install torch==2.15.0 trl==1.16.0
    python3 benches/unfused.py 151936 256
"""

import resource
import subprocess
import sys


def one(vocabulary, hidden, tokens):
    import torch
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    torch.set_num_threads(2)
    h = torch.randn(1, tokens, hidden, requires_grad=True)
    w = (torch.randn(vocabulary, hidden) * 0.05).requires_grad_()
    ids = torch.randint(0, vocabulary, (1, tokens))
    logits = h @ w.T
    logits = logits / 0.9
    logp = selective_log_softmax(logits, ids)
    with torch.no_grad():
        entropy_from_logits(logits)
    (-(logp - logp.detach()).exp()).mean().backward()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def main():
    vocabulary, hidden = int(sys.argv[1]), int(sys.argv[2])
    if len(sys.argv) > 3:
        return one(vocabulary, hidden, int(sys.argv[3]))
    run = lambda n: int(subprocess.check_output([sys.executable, __file__, str(vocabulary), str(hidden), str(n)]))
    few, many = 512, 1536
    copies = (run(many) - run(few)) / ((many - few) * vocabulary * 4)
    print(f"vocabulary {vocabulary}, d {hidden}: {copies:.2f} f32 copies of the logits at the peak")


main()
