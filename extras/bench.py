"""Measurements that the README quotes, each a pair: ours, and what one would use otherwise.

    python extras/bench.py head     # log-probs of a long sequence: dppo.py's against a plain log-softmax

Every variant runs in a process of its own, whose peak memory is what the table shows. """

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def in_a_process(*argv) -> dict:
    """Runs one variant of this script and returns the JSON that it prints."""
    done = subprocess.run([sys.executable, __file__, *map(str, argv)], capture_output=True, text=True)
    if done.returncode:
        return {"failed": (done.stderr.strip() or "killed: out of memory?").splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


# ------------------------------------------------------------------------------------------------------------
# head
# ------------------------------------------------------------------------------------------------------------


def head(args):
    """Time and memory of the LM head's log-probs, forward and backward, by the number of tokens."""
    print(f"vocabulary {args.vocabulary:,}, hidden {args.hidden:,}, fp32 on the CPU, {args.threads} threads")
    print(f"{'':<8}{'tokens':>8}{'seconds':>10}{'GB above the model':>20}")
    for variant, tokens in [("plain", args.tokens)] + [("ours", args.tokens * k) for k in (1, 4, 16)]:
        found = in_a_process("head-one", variant, tokens, args.vocabulary, args.hidden, args.threads)
        numbers = found.get("failed") or f"{found['seconds']:>10.1f}{found['bytes'] / 1e9:>20.2f}"
        print(f"{variant:<8}{tokens:>8}{numbers}", flush=True)


def head_one(args):
    """One variant: the hidden states of `tokens` positions in, the gradients of them and of the head out."""
    import torch

    import dppo

    torch.set_num_threads(args.threads)
    draw = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(args.vocabulary, args.hidden, generator=draw) * 0.02)
    hidden = torch.randn(args.tokens, args.hidden, generator=draw).requires_grad_()
    targets = torch.randint(args.vocabulary, (args.tokens,), generator=draw)
    weight.grad, hidden.grad = torch.zeros_like(weight), torch.zeros_like(hidden)  # there in any training
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    if args.variant == "ours":
        logprobs, _ = dppo.HeadLogprobs.apply(hidden, weight, targets, 1.0, 512)
    else:
        full = torch.log_softmax(hidden @ weight.T, dim=-1)
        logprobs = full.gather(-1, targets[:, None])[:, 0]
        with torch.no_grad():
            -(full.exp() * full).sum(-1)  # the entropy, which we log too
    logprobs.mean().backward()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": seconds, "bytes": (peak - before) * 1024}))


# ------------------------------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")

    p = commands.add_parser("head", help="log-probs through the LM head: time and memory")
    p.add_argument("--tokens", type=int, default=4096, help="of the pair; ours also at 4 and 16 times as many")
    p.add_argument("--vocabulary", type=int, default=151_936)
    p.add_argument("--hidden", type=int, default=1024)
    p.add_argument("--threads", type=int, default=2)
    p.set_defaults(function=head)

    p = commands.add_parser("head-one")
    p.add_argument("variant", choices=["ours", "plain"])
    for name in ("tokens", "vocabulary", "hidden", "threads"):
        p.add_argument(name, type=int)
    p.set_defaults(function=head_one)

    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
