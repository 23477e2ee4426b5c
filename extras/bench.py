"""Measurements that the README quotes, each a pair: ours, and what one would use otherwise.

    python extras/bench.py shell                         # a command in a sandbox: ours against docker exec
    python extras/bench.py rollouts --model M --tasks T  # episodes at once: harness against its engine alone
    python extras/bench.py head                          # long-sequence log-probs: ours against log-softmax
    python extras/bench.py mismatch --model M --vllm-python P --plot F.png  # fp32 against bf16 heads, with vLLM
    torchrun --nproc-per-node 1 extras/bench.py gpu      # a GPU: a large model's pass with each kind of head

Every variant whose memory is measured runs in a process of its own. """

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests

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
# mismatch
# ------------------------------------------------------------------------------------------------------------


def mismatch(args):
    """|log-prob difference| of the sampled tokens, trainer against a vLLM server, both bf16, over on-policy
    steps, with both heads in fp32 or both in bf16 (the paper's Figure 4 in miniature)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(args.vocabularies), figsize=(10, 3.2), sharey=True, squeeze=False,
                                     layout="constrained")
    print(f"{'vocabulary':>10}  {'head':<6}{'steps':>6}{'largest':>9}{'mean of max':>13}{'mean':>9}{'entropy':>9}")
    for vocabulary, axes in zip(args.vocabularies, panels[0]):
        for head, color in (("bf16", "C3"), ("fp32", "C0")):
            found = in_a_process("mismatch-one", vocabulary, head, args.model, args.vllm_python, args.steps)
            if reason := found.get("failed"):
                print(f"{vocabulary:>10}  {head:<6}{reason}")
                continue
            top, mean, entropy = (found[name] for name in ("max", "mean", "entropy"))
            print(f"{vocabulary:>10}  {head:<6}{len(top):>6}{max(top):>9.4f}{statistics.mean(top):>13.4f}"
                  f"{statistics.mean(mean):>9.5f}{statistics.mean(entropy):>9.2f}", flush=True)
            for values, style, name in ((top, "-", "max"), (mean, "--", "mean")):
                axes.plot(range(1, len(values) + 1), values, style, color=color, label=f"{head} head, {name}")
        axes.set(title=f"vocabulary {vocabulary:,}", xlabel="optimiser step", yscale="log")
        axes.grid(alpha=0.25)
    panels[0][0].set_ylabel("|log-prob difference|")
    panels[0][-1].legend(fontsize=8)
    figure.savefig(args.plot, dpi=120)


def mismatch_one(args):
    """One run: vLLM samples, a bf16 copy of the fp32 master weights scores and learns, vLLM gets the weights.

    The model is random, with logits of standard deviation 3, so that it prefers some tokens as a trained one
    does; the even ones are rewarded, so that it changes. """
    import copy
    import shutil
    import tempfile

    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import dppo
    import rollout

    if args.head == "bf16":
        rollout.head_logits = lambda hidden, weight: (hidden @ weight.T).float()
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp())
    try:
        master = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=args.vocabulary, hidden_size=256, num_hidden_layers=4, intermediate_size=768, head_dim=64,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False))
        torch.nn.init.normal_(master.lm_head.weight, std=3 / 256**0.5)  # the last norm leaves each entry near 1
        master.save_pretrained(folder / "model")
        rollout.Chat(args.model).tokenizer.save_pretrained(folder / "model")
        chat, sampling = rollout.Chat(folder / "model"), rollout.Sampling(max_prompt_tokens=64, max_tokens=128)
        optimizer = torch.optim.AdamW(master.parameters(), lr=1e-4, weight_decay=0.0)
        probe = torch.randint(args.vocabulary, (64,)).tolist()
        with vllm_server(args.vllm_python, folder / "model", args.head) as url:
            engine = rollout.VllmEngine([url], str(folder / "model"), chat, [chat.end_id], sampling, folder)
            found = {"max": [], "mean": [], "entropy": []}
            for step in range(args.steps):
                prompts = [torch.randint(args.vocabulary, (64,)).tolist() for _ in range(32)]
                with ThreadPoolExecutor(32) as pool:
                    turns = list(pool.map(lambda p: engine.generate(p, 64, rollout.derive_seed(step, p), sampling),
                                          prompts))
                rewards = [sum(i % 2 == 0 for i in turn.ids) / len(turn.ids) for turn in turns]
                ids = dppo.pad([p + t.ids for p, t in zip(prompts, turns)], 0, torch.long, "cpu")
                mask = dppo.pad([[0] * 64 + [1] * len(t.ids) for t in turns], 0, torch.bool, "cpu")
                old = dppo.pad([[0.0] * 64 + t.logprobs for t in turns], 0.0, torch.float32, "cpu")
                policy = copy.deepcopy(master).bfloat16()
                logprobs, entropies = dppo.token_logprobs(policy, ids, mask)
                loss, _ = dppo.policy_loss(logprobs, old, dppo.group_advantages(rewards)[:, None], mask, mask.sum())
                loss.backward()
                for p, q in zip(master.parameters(), policy.parameters()):
                    p.grad = q.grad.float()
                optimizer.step()
                off = (logprobs - old)[mask].abs()
                for name, value in (("max", off.max()), ("mean", off.mean()), ("entropy", entropies[mask].mean())):
                    found[name].append(value.item())
                with torch.no_grad():
                    scores = dppo.token_logprobs(copy.deepcopy(master).bfloat16(), torch.tensor([probe]),
                                                 torch.ones(1, 64))[0][0, 1:]
                engine.load(master.state_dict(), step + 1, (probe, scores.tolist()))
        print(json.dumps(found))
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def vllm_server(python: str, model: Path, head: str):
    """A vLLM CPU server in bf16, with its head in fp32 or bf16; gives its URL."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", port, "--dtype",
               "bfloat16", "--max-model-len", 256, "--enforce-eager", "--no-enable-chunked-prefill",
               "--logprobs-mode", "processed_logprobs"]
    if head == "fp32":
        command += ["--hf-overrides", '{"head_dtype": "float32"}']
    env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with open(model.parent / "vllm.log", "wb") as log:
        server = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=env, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        while True:
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{url}/health", timeout=5).ok:
                    break
            if server.poll() is not None:
                sys.exit(f"vLLM: {(model.parent / 'vllm.log').read_text()[-1000:]}")
            time.sleep(1)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


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

    p = commands.add_parser("mismatch", help="log-probs of trainer and vLLM, with heads in fp32 and in bf16")
    p.add_argument("--model", required=True, help="checkpoint folder whose tokenizer is used")
    p.add_argument("--vllm-python", required=True, help="the interpreter of vLLM's environment")
    p.add_argument("--vocabularies", type=int, nargs="+", default=[512, 151_936])
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--plot", default="fp32_head.png", help="PNG to write")
    p.set_defaults(function=mismatch)

    p = commands.add_parser("mismatch-one")
    p.add_argument("vocabulary", type=int)
    for name in ("head", "model", "vllm_python"):
        p.add_argument(name)
    p.add_argument("steps", type=int)
    p.set_defaults(function=mismatch_one)

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
