"""Measurements that the README quotes, each a pair: ours, and what one would use otherwise.

    python extras/bench.py shell                         # a command in a sandbox: docker exec, SWE-ReX
    python extras/bench.py rollouts --model M --tasks T  # episodes at once: harness against its engine alone
    python extras/bench.py head                          # long-sequence log-probs: ours against log-softmax
    python extras/bench.py train --trl-python PYTHON     # an optimiser step: ours against TRL's GRPOTrainer
    python extras/bench.py mismatch --model M --vllm-python PYTHON  # heads in fp32 and bf16, trainer and vLLM
    torchrun --nproc-per-node 1 extras/bench.py gpu      # a GPU: a large model's pass with each kind of head

Every variant whose memory is measured runs in a process of its own. """

import argparse
import contextlib
import importlib.util
import json
import math
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def in_a_process(*argv, python: str = sys.executable) -> dict:
    """Runs one variant of this script and returns the JSON that it prints."""
    done = subprocess.run([python, __file__, *map(str, argv)], capture_output=True, text=True)
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


SWEREX_DOCKERFILE = """FROM tmax-base:core
COPY site /swerex
ENV PYTHONPATH=/swerex
RUN printf '#!/bin/sh\\nexec python3 -m swerex.server "$@"\\n' > /usr/bin/swerex-remote \\
    && chmod +x /usr/bin/swerex-remote
"""


class SweRex:
    """SWE-ReX's own Docker deployment and bash session, where `pip install swe-rex aiohttp` has been done.

    Its image is the same tmax-base:core and the server that SWE-ReX wants in there, so that starting installs
    nothing. """

    def __init__(self):
        import asyncio

        self.wait = asyncio.new_event_loop().run_until_complete

    def build(self):
        import swerex

        with tempfile.TemporaryDirectory() as folder:  # wheels for the image's Python, not for this one
            Path(folder, "Dockerfile").write_text(SWEREX_DOCKERFILE)
            subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", f"{folder}/site",
                            "--python-version", "3.11", "--only-binary=:all:",
                            f"swe-rex=={swerex.__version__}"], check=True, capture_output=True)
            docker("build", "-q", "-t", "tmax-bench:swe-rex", folder)
        return self

    def start(self):
        from swerex.deployment.docker import DockerDeployment
        from swerex.runtime.abstract import CreateBashSessionRequest

        self.box = DockerDeployment(image="tmax-bench:swe-rex", pull="never")
        self.wait(self.box.start())
        self.wait(self.box.runtime.create_session(CreateBashSessionRequest()))
        return self

    def run(self, command):
        from swerex.runtime.abstract import BashAction

        self.wait(self.box.runtime.run_in_session(BashAction(command=command)))

    def close(self):
        self.wait(self.box.stop())


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
        if importlib.util.find_spec("swerex"):
            os.environ.setdefault("SWE_REX_LOG_STREAM_LEVEL", "CRITICAL")  # else it logs every start
            rex, starts = SweRex().build(), []
            for _ in range(args.starts):
                starts.append(timed(rex.start)[0])
                rex.close()
            boxes["SWE-ReX, docker"] = rex.start()
            rows["SWE-ReX, docker"], runs["SWE-ReX, docker"] = [starts], rex.run
        else:
            print("SWE-ReX is left out: pip install swe-rex aiohttp")
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
        found = in_a_process("rollouts-one", n, args.model, args.tasks, args.engine, args.backend,
                             args.max_turn_tokens)
        print(f"{n:>8}" + (found.get("failed") or f"{found['episodes']:>12.1f}{found['tokens']:>10,.0f}"
                           f"{found['alone']:>14,.0f}{found['bytes'] / 1e9:>21.2f}"), flush=True)


def rollouts_one(args):
    """One row: plays at least 128 episodes, `n` at once; the demo's limits but for a turn's."""
    import rollout
    from sandbox import resolve_backend

    sampling = rollout.Sampling(max_turns=5, max_turn_tokens=args.max_turn_tokens,
                                max_tokens=5 * args.max_turn_tokens + 50)
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

    def at_once(function, jobs):
        for server in getattr(engine, "servers", ()):  # vLLM still has the prompts of the last time
            requests.post(f"{server.url}/reset_prefix_cache", timeout=60).raise_for_status()
        return timed(lambda: list(rollout.run_jobs(jobs, function, args.n)))

    count, before = max(128, 2 * args.n), memory("VmRSS")
    played, episodes = at_once(play, range(count))
    peak = memory("VmHWM")
    alone, _ = at_once(replay, episodes)
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
    columns = f"{'steps':>6}{'largest':>9}{'mean of max':>13}{'mean':>9}{'entropy':>9}"
    print(f"{'vocabulary':>10}  {'head':<6}{columns}")
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
    """One run: vLLM samples, a bf16 copy of the fp32 master weights scores, the master learns (in fp32: CPUs take
    minutes for a step in bf16), vLLM gets the weights.

    The model is random, with logits of standard deviation 3, so that it prefers some tokens as a trained one
    does; the even ones are rewarded, so that it changes. """
    import copy
    import shutil
    import tempfile

    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import dppo
    import rollout
    from builtin.servers import VllmEngine

    if args.head == "bf16":  # logits rounded to what the hidden states are; a CPU is slow at bf16 products
        rollout.head_logits = lambda hidden, weight: (hidden.float() @ weight.float().T).to(hidden.dtype).float()
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp())
    try:
        master = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=args.vocabulary, hidden_size=256, num_hidden_layers=4, intermediate_size=768,
            head_dim=64, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False))
        torch.nn.init.normal_(master.lm_head.weight, std=3 / 256**0.5)  # the last norm leaves each entry near 1
        master.save_pretrained(folder / "model")
        rollout.Chat(args.model).tokenizer.save_pretrained(folder / "model")
        chat, sampling = rollout.Chat(folder / "model"), rollout.Sampling(max_prompt_tokens=64, max_tokens=128)
        optimizer = torch.optim.AdamW(master.parameters(), lr=1e-4, weight_decay=0.0)
        probe = torch.randint(args.vocabulary, (64,)).tolist()

        def score(ids, mask):
            with torch.no_grad():
                return dppo.token_logprobs(copy.deepcopy(master).bfloat16(), ids, mask)

        with vllm_server(args.vllm_python, folder / "model", args.head) as url:
            engine = VllmEngine([url], str(folder / "model"), chat, [chat.end_id], sampling, folder)
            found = {"max": [], "mean": [], "entropy": []}
            for step in range(args.steps):
                prompts = [torch.randint(args.vocabulary, (64,)).tolist() for _ in range(32)]
                with ThreadPoolExecutor(32) as pool:
                    turns = list(pool.map(
                        lambda p: engine.generate(p, 64, rollout.derive_seed(step, p), sampling), prompts))
                rewards = [sum(i % 2 == 0 for i in turn.ids) / len(turn.ids) for turn in turns]
                ids = dppo.pad([p + t.ids for p, t in zip(prompts, turns)], 0, torch.long, "cpu")
                mask = dppo.pad([[0] * 64 + [1] * len(t.ids) for t in turns], 0, torch.bool, "cpu")
                old = dppo.pad([[0.0] * 64 + t.logprobs for t in turns], 0.0, torch.float32, "cpu")
                scored, entropies = score(ids, mask)
                off = (scored - old)[mask].abs()
                found["max"].append(off.max().item())
                found["mean"].append(off.mean().item())
                found["entropy"].append(entropies[mask].mean().item())
                advantages = dppo.group_advantages(rewards)[:, None]
                logprobs, _ = dppo.token_logprobs(master, ids, mask)
                dppo.policy_loss(logprobs, old, advantages, mask, mask.sum())[0].backward()
                optimizer.step()
                optimizer.zero_grad()
                scores = score(torch.tensor([probe]), torch.ones(1, 64))[0][0, 1:]
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
        server = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=env,
                                  start_new_session=True)
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
# train
# ------------------------------------------------------------------------------------------------------------


def train(args):
    """Speed and memory of one optimiser step: dppo.py's, and that of TRL's GRPOTrainer on the same tokens.

    "equal": all sequences are `longest` tokens, and nothing is padding. "mixed": twice as many, of lengths
    evenly from a quarter of it, as episodes are. Of what follows a prompt, half is sampled, half observed. """
    sides = {"ours": sys.executable} | ({"TRL": args.trl_python} if args.trl_python else {})
    if not args.trl_python:
        print("TRL is left out: --trl-python names the interpreter of an environment that has it")
    print(f"Qwen3 with random weights: vocabulary {args.vocabulary:,}, hidden {args.hidden}, {args.layers} "
          f"layers; fp32 on the CPU, {args.threads} threads, gradient checkpointing")
    print(f"{'':<6}{'longest':>8}  {'lengths':<8}{'tokens/s':>9}{'GB above the model':>20}  gradient norms")
    for longest in args.longest:
        for lengths in ("equal", "mixed"):
            for side, python in sides.items():
                found = in_a_process("train-one", side, longest, lengths, args.tokens, args.micro_batch_tokens,
                                     args.vocabulary, args.hidden, args.layers, args.threads, python=python)
                numbers = found.get("failed") or (
                    f"{found['tokens_per_s']:>9,.0f}{found['bytes'] / 1e9:>20.2f}  "
                    + " ".join(f"{norm:.5f}" for norm in found["norms"]))
                print(f"{side:<6}{longest:>8}  {lengths:<8}{numbers}", flush=True)


def train_one(args):
    """One side and batch: three steps on it, of which the first warms up. In TRL's own interpreter for TRL.

    The later norms depend on the steps before: where all agree, so do loss, gradients, clipping and AdamW. """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=args.vocabulary, hidden_size=args.hidden, head_dim=64,
                         num_hidden_layers=args.layers, intermediate_size=args.hidden * 3,
                         num_attention_heads=args.hidden // 64, num_key_value_heads=args.hidden // 64,
                         tie_word_embeddings=True, max_position_embeddings=args.longest)
    model, samples, found = Qwen3ForCausalLM(config).train(), train_samples(args), []
    steps = {"ours": train_ours, "TRL": train_trl}[args.side](args, model, samples)
    before = memory("VmRSS")
    for seconds, norm in steps():
        found.append((seconds, norm))
    tokens = sum(len(s["ids"]) for s in samples)
    print(json.dumps({"tokens_per_s": tokens / statistics.mean(seconds for seconds, _ in found[1:]),
                      "norms": [norm for _, norm in found], "bytes": memory("VmHWM") - before}))


def train_samples(args) -> list[dict]:
    """A batch as dppo.make_samples gives it: random tokens, and a sampler whose log-probs are off by noise."""
    import torch

    draw, samples = torch.Generator().manual_seed(0), []
    count = max(2, args.tokens // args.longest)
    lengths = [args.longest] * count if args.lengths == "equal" else [
        round(args.longest * (1 + 3 * i / (2 * count - 1)) / 4) for i in range(2 * count)]
    prompt, turn = args.longest // 8, args.longest // 16  # a turn's sampled tokens; then as many observed ones
    for i, length in enumerate(lengths):
        noise = 0.2 * torch.randn(length, generator=draw)
        samples.append({"ids": torch.randint(args.vocabulary, (length,), generator=draw).tolist(),
                        "mask": [int(t >= prompt and (t - prompt) // turn % 2 == 0) for t in range(length)],
                        "old_logprobs": (noise - math.log(args.vocabulary)).tolist(),
                        "advantage": 0.5 - i % 2, "prompt": prompt})
    return samples


def train_ours(args, model, samples):
    """dppo.py's step, but for its log. Ratios are clipped as GRPO does, since TRL has no DPPO mask."""
    import torch

    import dppo

    model.gradient_checkpointing_enable()
    policy, total = dppo.shard(model), sum(sum(s["mask"]) for s in samples)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, weight_decay=0.0)

    def loss_function(logprobs, entropies, mask, batch):
        old_logprobs = dppo.pad([s["old_logprobs"] for s in batch], 0.0, torch.float32, "cpu")
        advantages = torch.tensor([[s["advantage"]] for s in batch])
        return dppo.policy_loss(logprobs, old_logprobs, advantages, mask, total, "grpo")[0]

    def step():
        (batches,) = dppo.micro_batches(samples, args.micro_batch_tokens)
        dppo.backward(policy, batches, loss_function)
        norm = dppo.clip_gradients(policy, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    return lambda: (timed(step) for _ in range(3))


def train_trl(args, model, samples):
    """GRPOTrainer.train() itself, on given tokens.

    Only the method that generates and scores is replaced, by one that hands the batch over in no time, with
    the sampler's log-probs and the mask of observed tokens (TRL: tool_mask) in it. What TRL does with it is
    TRL's own: splitting, head, loss, backward, clipping, optimiser, metrics. The clock runs from the first
    micro-batch to the end of the optimiser's step, without the data loader. "dapo" is TRL's default and a
    mean over the batch's tokens, as ours, and the ratios are clipped where dppo.grpo_keep does; a micro-batch
    has as many of the longest rows as ours may hold, because TRL pads all rows to one shape. fp32, gradient
    checkpointing and learning rate are as in ours.

    Written for TRL 1.16, whose head goes in tiles of 4,096 positions by 32,768 tokens of the vocabulary. On a
    CPU it takes all positions, prompts, observations and padding too. A GPU has a kernel of its own for it,
    so what is measured here says nothing about one. """
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    def padded(values, dtype, left=False):  # as TRL does: prompts on the left, completions on the right
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(v, dtype=dtype) for v in values], batch_first=True,
                                               padding_side="left" if left else "right")

    prompts = [s["ids"][:s["prompt"]] for s in samples]
    rests = {key: [s[key][s["prompt"]:] for s in samples] for key in ("ids", "mask", "old_logprobs")}
    batch = {
        "prompt_ids": padded(prompts, torch.long, left=True),
        "prompt_mask": padded([[1] * len(p) for p in prompts], torch.long, left=True),
        "completion_ids": padded(rests["ids"], torch.long),
        "completion_mask": padded([[1] * len(r) for r in rests["ids"]], torch.long),
        "tool_mask": padded(rests["mask"], torch.long),
        "old_per_token_logps": padded(rests["old_logprobs"], torch.float32),
        "advantages": torch.tensor([s["advantage"] for s in samples]),
        "num_items_in_batch": torch.tensor(sum(sum(s["mask"]) for s in samples)),
    }

    class OnGivenTokens(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            return dict(batch)

    class Clock(TrainerCallback):
        seconds = []

        def on_step_begin(self, *_, **__):
            self.start = time.perf_counter()

        def on_step_end(self, *_, **__):
            self.seconds.append(time.perf_counter() - self.start)

    rows = max(1, args.micro_batch_tokens // args.longest)
    while len(samples) % rows:
        rows -= 1
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder, max_steps=3, per_device_train_batch_size=rows, num_generations=len(samples),
            gradient_accumulation_steps=len(samples) // rows, gradient_checkpointing=True, bf16=False,
            use_cpu=True, learning_rate=1e-4, lr_scheduler_type="constant", max_grad_norm=1.0, beta=0.0,
            loss_type="dapo", epsilon=0.2, epsilon_high=0.272, logging_steps=1, save_strategy="no",
            report_to="none", disable_tqdm=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"x": 0}, unk_token="x")),
                                        unk_token="x", pad_token="x", eos_token="x")
    trainer = OnGivenTokens(model, lambda prompts, **_: [0.0] * len(prompts), config, callbacks=[Clock],
                            processing_class=tokenizer, train_dataset=Dataset.from_list([{"prompt": "x"}] * 3))

    def steps():
        trainer.train()
        return zip(Clock.seconds, (log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log))

    return steps


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
    dppo.leave_ranks()


# ------------------------------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")

    p = commands.add_parser("shell", help="starting a sandbox, running a command: docker exec, SWE-ReX")
    p.add_argument("--starts", type=int, default=20)
    p.add_argument("--commands", type=int, default=50)
    p.set_defaults(function=shell)

    p = commands.add_parser("rollouts", help="episodes at once: speed and memory")
    p.add_argument("--model", required=True, help="checkpoint folder")
    p.add_argument("--tasks", required=True, help="tasks.jsonl")
    p.add_argument("--engine", default="torch")
    p.add_argument("--backend", default="auto", choices=["auto", "docker", "bwrap"])
    p.add_argument("--concurrent", type=int, nargs="+", default=[8, 32, 128, 256])
    p.add_argument("--max-turn-tokens", type=int, default=40, help="of at most 5 turns (40: the demo's)")
    p.set_defaults(function=rollouts)

    p = commands.add_parser("rollouts-one")
    p.add_argument("n", type=int)
    for name in ("model", "tasks", "engine", "backend"):
        p.add_argument(name)
    p.add_argument("max_turn_tokens", type=int)
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

    p = commands.add_parser("train", help="an optimiser step: speed and memory, against TRL's GRPOTrainer")
    p.add_argument("--trl-python", help="interpreter that has trl, and our torch and transformers")
    p.add_argument("--longest", type=int, nargs="+", default=[512, 2_048, 8_192], help="tokens a sequence")
    p.add_argument("--tokens", type=int, default=16_384, help="of a batch of equal lengths")
    p.add_argument("--micro-batch-tokens", type=int, default=8_192, help="padded tokens a pass")
    p.add_argument("--vocabulary", type=int, default=32_768)
    p.add_argument("--hidden", type=int, default=256)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--threads", type=int, default=2)
    p.set_defaults(function=train)

    p = commands.add_parser("train-one")
    p.add_argument("side", choices=["ours", "TRL"])
    p.add_argument("longest", type=int)
    p.add_argument("lengths", choices=["equal", "mixed"])
    for name in ("tokens", "micro_batch_tokens", "vocabulary", "hidden", "layers", "threads"):
        p.add_argument(name, type=int)
    p.set_defaults(function=train_one)

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
