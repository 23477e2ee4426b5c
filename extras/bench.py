"""Measurements that the README quotes, each a pair: ours, and what one would use otherwise.

    python extras/bench.py shell                         # a command in a sandbox: ours against docker exec
    python extras/bench.py rollouts --model M --tasks T  # episodes at once: harness against its engine alone
    python extras/bench.py head                          # long-sequence log-probs: ours against log-softmax
    torchrun --nproc-per-node 1 extras/bench.py gpu      # a GPU: a large model's pass with each kind of head

Every variant whose memory is measured runs in a process of its own. """

import argparse
import json
import re
import statistics
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


def timed(function, *args) -> tuple:
    """(seconds, what it returned)"""
    start = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - start, result


# ------------------------------------------------------------------------------------------------------------
# shell
# ------------------------------------------------------------------------------------------------------------

COMMANDS = [":", "ls /", "python3 -c 1"]


def docker(*words) -> str:
    return subprocess.run(["docker", *words], capture_output=True, text=True, check=True).stdout.strip()


def shell(args):
    """Median milliseconds to start a sandbox and to run a command in it, all in one run and interleaved."""
    import gen
    from sandbox import InfraError, Sandbox, resolve_backend

    (task,), rows, boxes = gen.builtin_tasks(1, 0, "train", list(gen.FAMILIES)), {}, {}
    for backend in ("bwrap", "docker"):
        try:
            resolve_backend(backend)
            Sandbox(task, backend).start().close()  # the image is built once, and is not what is measured
        except InfraError as e:
            print(f"{backend} is left out: {e}")
            continue
        starts = []
        for _ in range(args.starts):
            seconds, box = timed(lambda: Sandbox(task, backend).start())
            starts.append(seconds)
            box.close()
        boxes[f"ours, {backend}"] = Sandbox(task, backend).start()
        rows[f"ours, {backend}"] = [starts]
    runs = {name: box.run for name, box in boxes.items()}
    if "ours, docker" in boxes:
        container, starts = boxes["ours, docker"].box.container, []
        for _ in range(args.starts):
            seconds, id = timed(docker, "run", "-d", "--network=none", "tmax-base:core", "sleep", "60")
            starts.append(seconds)
            docker("rm", "-f", id)
        rows["docker run, docker exec"] = [starts]
        runs["docker run, docker exec"] = lambda command: docker("exec", container, "bash", "-c", command)
    for command in COMMANDS:
        times = {name: [] for name in runs}
        for _ in range(args.commands):
            for name, run in runs.items():
                times[name].append(timed(run, command)[0])
        for name in runs:
            rows[name].append(times[name])
    print(f"{'milliseconds, median':<26}{'start':>8}" + "".join(f"{command:>14}" for command in COMMANDS))
    for name, times in rows.items():
        start, *others = (f"{1e3 * statistics.median(t):.1f}" for t in times)
        print(f"{name:<26}{start:>8}" + "".join(f"{ms:>14}" for ms in others))
    for box in boxes.values():
        box.close()


# ------------------------------------------------------------------------------------------------------------
# rollouts
# ------------------------------------------------------------------------------------------------------------


def rollouts(args):
    """Episodes played at once, and then the same turns asked of the engine alone, at the same concurrency."""
    print(f"{'at once':>8}{'episodes/s':>12}{'tokens/s':>10}{'engine alone':>14}{'GB beside the model':>21}")
    for n in args.concurrent:
        found = in_a_process("rollouts-one", n, args.model, args.tasks, args.engine, args.backend)
        print(f"{n:>8}" + (found.get("failed") or f"{found['episodes']:>12.1f}{found['tokens']:>10,.0f}"
                           f"{found['alone']:>14,.0f}{found['bytes'] / 1e9:>21.2f}"), flush=True)


def rollouts_one(args):
    """One row: plays at least 128 episodes, `n` at once; the demo's limits."""
    import rollout
    from sandbox import resolve_backend

    sampling = rollout.Sampling(max_turns=5, max_turn_tokens=40, max_tokens=250)
    engine, chat = rollout.make_engine(args.engine, args.model, sampling)
    backend, tasks = resolve_backend(args.backend), rollout.load_checked_tasks(args.tasks)

    class Recorder:
        """The engine of one episode, which keeps what it was asked."""

        def __init__(self):
            self.asked = []

        def generate(self, ids, limit, seed, sampling, past=None):
            turn = engine.generate(ids, limit, seed, sampling, past)
            self.asked.append((ids, len(turn.ids), seed))
            return turn

    def play(number):
        recorder = Recorder()
        rollout.run_episode(tasks[number % len(tasks)], recorder, chat, sampling, seed=number, group=number,
                            sample=0, model=args.model, backend=backend, grade="always")
        return recorder.asked

    def replay(asked):
        past = None
        for ids, limit, seed in asked:
            past = engine.generate(ids, limit, seed, sampling, past).past

    count, before = max(128, 2 * args.n), memory("VmRSS")
    played, episodes = timed(lambda: list(rollout.run_jobs(range(count), play, args.n)))
    peak = memory("VmHWM")
    alone, _ = timed(lambda: list(rollout.run_jobs(episodes, replay, args.n)))
    tokens = sum(limit for asked in episodes for _, limit, _ in asked)
    print(json.dumps({"episodes": count / played, "tokens": tokens / played, "alone": tokens / alone,
                      "bytes": peak - before}))


def memory(field: str) -> int:
    """Bytes of this process's memory: VmRSS now, VmHWM at most so far."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) * 1024


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
    before = memory("VmRSS")
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
    print(json.dumps({"seconds": seconds, "bytes": memory("VmHWM") - before}))


# ------------------------------------------------------------------------------------------------------------
# gpu
# ------------------------------------------------------------------------------------------------------------


def gpu(args):
    """Forward and backward of a Qwen3 with random weights, sharded as dppo.py does, by length and head."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import dppo
    import rollout

    _, world, device = dppo.setup_ranks()
    cuda = device.type == "cuda"
    config = Qwen3Config(vocab_size=args.vocabulary, hidden_size=args.hidden, num_hidden_layers=args.layers,
                         intermediate_size=args.hidden * 19 // 5, num_attention_heads=args.hidden // 80,
                         num_key_value_heads=max(1, args.hidden // 320), head_dim=128,
                         tie_word_embeddings=True)
    with device:
        model = Qwen3ForCausalLM(config).train()
    model.gradient_checkpointing_enable()
    policy = dppo.shard(model)
    if dppo.is_first():
        print(f"{model.num_parameters() / 1e9:.2f} B parameters on {world} x {device.type}")
        print(f"{'tokens':>8}  {'head':<20}{'tokens/s':>10}{'peak GB':>9}")
    bf16_out = rollout.head_logits
    heads = {"bf16, fp32 out": bf16_out, "fp32": lambda h, w: h.float() @ w.float().T,
             "bf16": lambda h, w: (h @ w.T).float()}
    for tokens in args.tokens:
        ids = torch.randint(args.vocabulary, (1, tokens), device=device)
        for name, head_logits in heads.items():
            rollout.head_logits = head_logits
            try:
                for _ in range(2):  # the first one warms up
                    if cuda:
                        torch.cuda.reset_peak_memory_stats()
                    policy.zero_grad()
                    start = time.perf_counter()
                    policy(ids, torch.ones_like(ids), 1.0)[0].mean().backward()
                    if cuda:
                        torch.cuda.synchronize()
                    seconds = time.perf_counter() - start
                numbers = f"{world * tokens / seconds:>10,.0f}"
                peak = torch.cuda.max_memory_allocated() if cuda else memory("VmHWM")
                numbers += f"{peak / 1e9:>9.1f}"
            except torch.OutOfMemoryError:
                numbers = "  does not fit"
            if dppo.is_first():
                print(f"{tokens:>8}  {name:<20}{numbers}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")

    p = commands.add_parser("shell", help="starting a sandbox and running a command, against docker exec")
    p.add_argument("--starts", type=int, default=20)
    p.add_argument("--commands", type=int, default=50)
    p.set_defaults(function=shell)

    p = commands.add_parser("rollouts", help="episodes at once: speed and memory")
    p.add_argument("--model", required=True, help="checkpoint folder")
    p.add_argument("--tasks", required=True, help="tasks.jsonl")
    p.add_argument("--engine", default="torch")
    p.add_argument("--backend", default="auto", choices=["auto", "docker", "bwrap"])
    p.add_argument("--concurrent", type=int, nargs="+", default=[8, 32, 128, 256])
    p.set_defaults(function=rollouts)

    p = commands.add_parser("rollouts-one")
    p.add_argument("n", type=int)
    for name in ("model", "tasks", "engine", "backend"):
        p.add_argument(name)
    p.set_defaults(function=rollouts_one)

    p = commands.add_parser("head", help="log-probs through the LM head: time and memory")
    p.add_argument("--tokens", type=int, default=4096,
                   help="of the pair; ours also at 4 and 16 times as many")
    p.add_argument("--vocabulary", type=int, default=151_936)
    p.add_argument("--hidden", type=int, default=1024)
    p.add_argument("--threads", type=int, default=2)
    p.set_defaults(function=head)

    p = commands.add_parser("head-one")
    p.add_argument("variant", choices=["ours", "plain"])
    for name in ("tokens", "vocabulary", "hidden", "threads"):
        p.add_argument(name, type=int)
    p.set_defaults(function=head_one)

    p = commands.add_parser("gpu", help="a large model's pass by length and head: memory and speed")
    p.add_argument("--vocabulary", type=int, default=151_936)
    p.add_argument("--hidden", type=int, default=2560)
    p.add_argument("--layers", type=int, default=36)
    p.add_argument("--tokens", type=int, nargs="+", default=[8_192, 32_768, 65_536])
    p.set_defaults(function=gpu)

    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
