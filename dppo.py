"""Reinforcement learning on outcomes: a checkpoint and tasks.jsonl in, a better checkpoint out.

Every step takes groups of episodes of the same task, gives each episode its reward minus its group's mean as
advantage, and makes the tokens of the better episodes more likely and those of the worse ones less. Sampling
runs ahead of training (`--lag`), so tokens come from a policy a little older than the one that learns from
them; DPPO's mask cuts the tokens whose probability has already moved too far.

    python dppo.py --model ckpt --tasks tasks.jsonl --out runs/rl                       # one process
    torchrun --nproc-per-node 2 dppo.py --model ckpt --tasks tasks.jsonl --out runs/rl  # sharded with FSDP2

It writes metrics.jsonl (a line a step), rollouts.jsonl (every trained episode with both sides' log-probs) and
checkpoints that transformers loads. To read it, start at `train` near the end: it is the whole loop.

Left out: a KL penalty and a value network (the recipe has neither), packing of sequences, sequence
parallelism. """

import argparse
import copy
import os
import queue
import shutil
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import rollout
from builtin.engine import TorchEngine
from sandbox import InfraError, JsonlWriter, resolve_backend

# ------------------------------------------------------------------------------------------------------------
# 1. The maths
# ------------------------------------------------------------------------------------------------------------


def group_advantages(rewards, mode: str = "centered") -> torch.Tensor:
    """Advantages of one group's episodes: (G,) rewards -> (G,) fp32.

    centered: reward - group mean (RECIPE section 3). normalized: that over the group's standard deviation, as
    in GRPO. A group without spread gives zeros. """
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    if not has_spread(rewards):
        return torch.zeros(len(rewards))
    advantages = rewards - rewards.mean()
    if mode == "normalized":
        advantages = advantages / rewards.std(correction=0)
    elif mode != "centered":
        raise ValueError(f"advantage mode {mode!r}: use centered or normalized")
    return advantages.float()


def has_spread(rewards) -> bool:
    """Whether a group teaches anything: rewards that differ by more than float noise."""
    return max(rewards) - min(rewards) > 1e-6


def dppo_keep(logprobs, old_logprobs, advantages, delta: float = 0.1) -> torch.Tensor:
    """DPPO's mask with the binary approximation of total variation (RECIPE section 3): True where a token is
    kept.

    logprobs: log pi, the trainer's now. old_logprobs: log mu, the sampler's then. advantages: broadcastable
    to both. A token is cut when its probability has moved by more than delta and the update would move it
    further the same way. A ratio as in PPO would cut rare tokens that barely moved and keep likely ones that
    moved a lot. """
    moved = logprobs.exp() - old_logprobs.exp()  # pi - mu; |pi - mu| is the binary TV divergence
    further = ((advantages > 0) & (moved > 0)) | ((advantages < 0) & (moved < 0))
    return ~((moved.abs() > delta) & further)


def grpo_keep(logprobs, old_logprobs, advantages, low: float = 0.2, high: float = 0.272) -> torch.Tensor:
    """The tokens that PPO's clipping leaves a gradient: ratio in [1 - low, 1 + high], or going back."""
    ratio = (logprobs - old_logprobs).exp()
    return ~(((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low)))


def policy_loss(logprobs, old_logprobs, advantages, mask, total, loss: str = "dppo", delta: float = 0.1):
    """The loss of a part of a batch, and which of its tokens were kept.

    logprobs (B, T) with gradient, old_logprobs (B, T), advantages (B, 1) or (B, T), mask (B, T) True where
    sampled. total: the number of sampled tokens in the WHOLE batch, over all micro-batches and ranks, cut
    tokens included: the parts' losses then add up to the batch's mean over tokens, however it is split.

    dppo, grpo and reinforce differ only in the tokens they keep. A kept token's term is A * pi / mu, whose
    gradient is A * pi / mu * grad log pi: the policy gradient, corrected for the policy that sampled. """
    with torch.no_grad():
        if loss == "dppo":
            keep = mask & dppo_keep(logprobs, old_logprobs, advantages, delta)
        elif loss == "grpo":
            keep = mask & grpo_keep(logprobs, old_logprobs, advantages)
        elif loss == "reinforce":
            keep = mask.clone()
        else:
            raise ValueError(f"loss {loss!r}: use dppo, grpo or reinforce")
    # Tokens that are not kept get ratio 1 before the product: a huge ratio times zero would be NaN.
    ratio = torch.where(keep, logprobs - old_logprobs, 0.0).exp()
    return -(ratio * advantages * keep).sum() / total, keep


def token_logprobs(model, ids, loss_mask, temperature: float = 1.0, chunk: int = 2048):
    """Log-probs of the tokens that carry loss, and the entropy at their positions: both (B, T) fp32, 0
    elsewhere.

    ids, loss_mask: (B, T), right-padded. logprobs[b, t] = log p(ids[b, t] | ids[b, :t]) under the temperature
    the tokens were sampled with. No attention mask is needed: a causal model never looks at the padding on
    the right.

    Only positions that carry loss go through the LM head, `chunk` at a time, and backward computes each chunk
    again: the (tokens, vocabulary) matrix, the largest by far, never exists whole. """
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # (B, T, d)
    weight = model.get_output_embeddings().weight
    loss_mask = loss_mask.bool().clone()
    loss_mask[:, 0] = False  # nothing predicts the first token
    hidden = hidden[:, :-1][loss_mask[:, 1:]]  # (N, d): the position before each such token
    targets = ids[loss_mask]  # (N,)

    def head(hidden, targets, weight):
        logprobs = torch.log_softmax(rollout.head_logits(hidden, weight) / temperature, dim=-1)  # (n, V)
        entropy = -(logprobs.detach().exp() * logprobs.detach()).sum(-1)
        return logprobs.gather(-1, targets[:, None])[:, 0], entropy

    chunks = zip(hidden.split(chunk), targets.split(chunk))
    parts = [checkpoint(head, h, t, weight, use_reentrant=False) for h, t in chunks]
    logprobs, entropies = (torch.cat(part) for part in zip(*parts))  # (N,)
    empty = torch.zeros(ids.shape, dtype=logprobs.dtype, device=ids.device)
    return empty.masked_scatter(loss_mask, logprobs), empty.masked_scatter(loss_mask, entropies)


# ------------------------------------------------------------------------------------------------------------
# 2. Batches: lists of samples -> equal numbers of padded micro-batches on every rank
# ------------------------------------------------------------------------------------------------------------


def micro_batches(samples: list[dict], max_tokens: int, ranks: int = 1) -> list[list[list[dict]]]:
    """Splits samples (each with "ids") into micro-batches: for each rank a list of the same length.

    Rows of similar length share one, so that little is padding, and rows * longest row stays within
    max_tokens (one longer row gets one for itself). Ranks get about the same number of tokens. A rank that
    has fewer gets empty micro-batches: FSDP ranks must run the same number of passes, or they wait for each
    other for ever. """
    batches = []
    for sample in sorted(samples, key=lambda s: -len(s["ids"])):
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0]["ids"]) <= max_tokens:
            batches[-1].append(sample)
        else:
            batches.append([sample])
    shares = [[] for _ in range(ranks)]
    for batch in batches:  # longest first, always to the rank that has least: within a batch of even
        min(shares, key=lambda share: sum(len(s["ids"]) for b in share for s in b)).append(batch)
    count = max(map(len, shares))
    return [share + [[]] * (count - len(share)) for share in shares]


def pad(rows: list[list], value, dtype, device) -> torch.Tensor:
    """Right-pads rows to one tensor (B, T)."""
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows], dtype=dtype, device=device)


class Policy(torch.nn.Module):
    """The model with `token_logprobs` as its forward, so that FSDP gathers the head's weights for it too."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        return token_logprobs(self.model, *inputs)


def backward(policy, batches: list[list[dict]], loss_function, temperature: float = 1.0):
    """Gradients of one optimiser step: forward and backward over this rank's micro-batches, one after the
    other.

    loss_function(logprobs, entropies, mask, batch) -> the micro-batch's share of the loss, so that all
    shares, over micro-batches and ranks, add up to the loss of the whole batch. """
    device = next(policy.parameters()).device
    world = dist.get_world_size() if dist.is_initialized() else 1
    for batch in batches:
        rows = batch or [{"ids": [0, 0], "mask": [0, 1]}]  # a dummy: runs like any other, weighs nothing
        ids = pad([s["ids"] for s in rows], 0, torch.long, device)  # (B, T)
        mask = pad([s["mask"] for s in rows], 0, torch.bool, device)
        logprobs, entropies = policy(ids, mask, temperature)
        loss = loss_function(logprobs, entropies, mask, batch) if batch else logprobs.sum() * 0.0
        (loss * world).backward()  # FSDP averages gradients over ranks, where we need their sum


# ------------------------------------------------------------------------------------------------------------
# 3. Ranks: plain torch.distributed, FSDP2 for the shards
# ------------------------------------------------------------------------------------------------------------


def setup_ranks() -> tuple[int, int, torch.device]:
    """Joins the process group that torchrun describes; returns rank, world size, device.

    A single CPU process joins none: that would cost a third of its speed and shard nothing.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 and not cuda:
        return 0, 1, device
    if "RANK" not in os.environ:
        raise ValueError("on a GPU, start with torchrun, also for one: torchrun --nproc-per-node 1 ...")
    if cuda:
        torch.cuda.set_device(device)
    # The timeout is for ranks that wait while rank 0 waits for rollouts. They wait in gloo, which times out
    # softly.
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(hours=24))
    return dist.get_rank(), dist.get_world_size(), device


def shard(model) -> Policy:
    """Wraps the model. With a process group, every rank keeps a slice of each layer (FSDP2).

    Master weights and gradient sums are fp32; the computation is bf16 on CUDA and fp32 on the CPU.
    """
    policy = Policy(model)
    if dist.is_initialized():
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        cuda = next(model.parameters()).is_cuda
        dtypes = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if cuda else MixedPrecisionPolicy()
        for layer in model.base_model.layers:
            fully_shard(layer, mp_policy=dtypes)
        fully_shard(policy, mp_policy=dtypes)
    return policy


def full_weights(policy) -> dict[str, torch.Tensor]:
    """The whole model's weights, gathered from all ranks. Every rank must call it."""
    state = policy.model.state_dict()
    return {name: w.full_tensor() if hasattr(w, "full_tensor") else w for name, w in state.items()}


def clip_gradients(policy, max_norm: float) -> float:
    """Scales the gradients to a norm of at most max_norm, over all ranks; returns the norm they had."""
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def scatter(per_rank: list | None):
    """Gives each rank its element of rank 0's list."""
    if not dist.is_initialized():
        return per_rank[0]
    mine = [None]
    dist.scatter_object_list(mine, per_rank, src=0)
    return mine[0]


def gather(mine) -> list | None:
    """Rank 0 gets the list of what every rank has; the others get None."""
    if not dist.is_initialized():
        return [mine]
    everyones = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyones, dst=0)
    return everyones


def save_checkpoint(policy, tokenizer, folder: Path):
    """Writes a folder that transformers and vLLM load, whole or not at all. Every rank must call it."""
    weights = full_weights(policy)
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    policy.model.save_pretrained(temporary, state_dict=weights)
    tokenizer.save_pretrained(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


# ------------------------------------------------------------------------------------------------------------
# 4. Rollouts that run ahead of the trainer (rank 0)
# ------------------------------------------------------------------------------------------------------------


class Rollouts:
    """Plays groups of episodes in threads and keeps the useful ones ready for the trainer.

    Every group that has been started and not yet been trained on, or dropped, counts; at most (lag + 1) *
    prompts do. This bounds how old a group can be when it is used, without throwing finished work away. Only
    a straggler that newer groups overtook may turn out too old: it is dropped, and counted as stale.

    play(task, group, sample) -> Rollout record. """

    def __init__(self, tasks: list[dict], play, args):
        self.tasks, self.play, self.args = tasks, play, args
        self.changed = threading.Condition()  # guards everything below
        self.started = 0  # groups ever started
        self.playing = {}  # group number -> its finished episodes so far
        self.ready = []  # useful groups, in the order they were finished
        self.in_training = 0  # groups handed out by next_batch and not yet reported as trained
        self.failure = None
        self._reset_counts()
        self.jobs = queue.Queue()
        for _ in range(args.workers):
            threading.Thread(target=self._work, daemon=True).start()

    def _reset_counts(self):
        self.rewards, self.last_error = [], None
        names = "groups_zero groups_one groups_flat groups_failed groups_stale stale_tokens infra_errors"
        self.seen = dict.fromkeys(names.split(), 0)

    def _dropped(self) -> int:
        return sum(self.seen[name] for name in ("groups_zero", "groups_one", "groups_flat", "groups_failed"))

    def _admit(self):
        """Starts groups up to the bound; none any more when too many were dropped since the last batch."""
        bound = (self.args.lag + 1) * self.args.prompts
        while (
            len(self.playing) + len(self.ready) + self.in_training < bound
            and self._dropped() <= self.args.max_refill * self.args.prompts
        ):
            epoch, position = divmod(self.started, len(self.tasks))
            order = np.random.default_rng([self.args.seed, epoch]).permutation(len(self.tasks))
            self.playing[self.started] = []
            for sample in range(self.args.group_size):
                self.jobs.put((self.tasks[order[position]], self.started, sample))
            self.started += 1

    def _work(self):
        while True:
            job = self.jobs.get()
            try:
                record = self.play(*job)
                with self.changed:
                    self._finish(record)
            except BaseException as e:  # whatever it is, the trainer must raise it and not wait for ever
                with self.changed:
                    self.failure = e
            with self.changed:
                self.changed.notify_all()

    def _finish(self, record: dict):
        """Takes an episode in; the last one of a group decides whether the group is useful."""
        group = self.playing[record["group"]]
        group.append(record)
        if len(group) < self.args.group_size:
            return
        del self.playing[record["group"]]
        graded = sorted((r for r in group if r["reward"] is not None), key=lambda r: r["sample"])
        rewards = [r["reward"] for r in graded]
        for failed in (r for r in group if r["reward"] is None):  # says nothing about the policy
            self.seen["infra_errors"] += 1
            self.last_error = failed["error"]
        if len(graded) < 2:
            self.seen["groups_failed"] += 1
        else:
            self.rewards.append(float(np.mean(rewards)))
            if has_spread(rewards):
                self.ready.append(graded)
            else:
                kind = "zero" if rewards[0] < 1e-6 else "one" if rewards[0] > 1 - 1e-6 else "flat"
                self.seen["groups_" + kind] += 1
        self._admit()

    def next_batch(self, version: int) -> tuple[list[list[dict]], dict]:
        """The next `prompts` useful groups, none more than `lag` versions old, and what was counted since the
        last.

        Groups without spread in reward are dropped and replaced (active sampling), at most max_refill *
        prompts of them. After that the batch is smaller, with a warning; if nothing at all is useful, an
        error says why. """
        prompts = self.args.prompts
        with self.changed:
            while True:
                self._admit()
                self.changed.wait_for(lambda: self.failure or len(self.ready) >= prompts or not self.playing)
                if self.failure:
                    raise self.failure
                stale = [g for g in self.ready if version - oldest_version(g) > self.args.lag]
                self.ready = [g for g in self.ready if version - oldest_version(g) <= self.args.lag]
                self.seen["groups_stale"] += len(stale)
                self.seen["stale_tokens"] += sum(len(r["token_ids"]) for group in stale for r in group)
                if len(self.ready) >= prompts or not (stale or self.playing):
                    break
            groups, self.ready = self.ready[:prompts], self.ready[prompts:]
            counts = {**self.seen, "groups_kept": len(groups), "reward": float(np.mean(self.rewards or [0]))}
            if not groups and not self.rewards:
                raise InfraError(f"no episode could be played: {self.last_error}")
            if not groups:
                raise ValueError(
                    f"none of {self._dropped()} groups has a spread in reward, so there is nothing to learn: "
                    f"in {counts['groups_zero']} every episode failed, in {counts['groups_one']} every one "
                    "succeeded. Use tasks that the model solves sometimes, a better warm start, or a larger "
                    "--group-size" + (f". Besides, {counts['infra_errors']} episodes had no outcome, the last: "
                                      f"{self.last_error}" if self.last_error else "")
                )
            if len(groups) < prompts:
                print(f"warning: {self._dropped()} groups dropped, {len(groups)} of {prompts} are useful")
            if self.last_error:
                print(f"warning: {counts['infra_errors']} episodes without outcome, e.g.: {self.last_error}")
            self.in_training = len(groups)
            self._reset_counts()
            self._admit()
        return groups, counts

    def trained(self):
        """The last batch has become weights, and the engine has them."""
        with self.changed:
            self.in_training = 0
            self._admit()


def oldest_version(group: list[dict]) -> int:
    """The policy version of a group's first token."""
    return min(r["policy_versions"][0][0] for r in group)


# ------------------------------------------------------------------------------------------------------------
# 5. The loop
# ------------------------------------------------------------------------------------------------------------


def train(args):
    rank, world, device = setup_ranks()
    torch.manual_seed(args.seed)
    out = Path(args.out)
    chat = rollout.Chat(args.model)
    model = rollout.load_model(args.model, device=device)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()

    # Rank 0 samples: an engine with its own copy of the weights (version 0), and threads that play ahead.
    if rank == 0:
        backend, sampling = resolve_backend(args.backend), rollout.sampling_from(args)
        copied = copy.deepcopy(model).eval().to(torch.bfloat16 if device.type == "cuda" else torch.float32)
        engine = TorchEngine(copied, rollout.end_ids(model, chat), args.max_batch)

        def play(task, group, sample, seed=None, grade="submitted"):
            seed = rollout.derive_seed(args.seed, group) if seed is None else seed
            return rollout.run_episode(task, engine, chat, sampling, seed=seed, group=group, sample=sample,
                                       model=args.model, backend=backend, grade=grade)

        rollouts = Rollouts(rollout.load_checked_tasks(args.tasks), play, args)
        eval_tasks = rollout.load_checked_tasks(args.eval_tasks) if args.eval_tasks else []
        refuse_used_folder(out)
        metrics_file, rollouts_file = JsonlWriter(out / "metrics.jsonl"), JsonlWriter(out / "rollouts.jsonl")

    policy = shard(model.train())
    betas = (args.beta1, args.beta2)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, betas=betas, weight_decay=0.0)
    best = -1.0

    for step in range(args.steps):
        # Sample. Threads have been playing while the last step trained; wait until enough groups are useful.
        clock = [time.perf_counter()]
        shares = None
        if rank == 0:
            groups, metrics = rollouts.next_batch(version=step)
            samples = make_samples(groups, args.advantage)
            total = sum(sum(s["mask"]) for s in samples)
            shares = [(batches, total) for batches in micro_batches(samples, args.micro_batch_tokens, world)]
        batches, total = scatter(shares)
        clock.append(time.perf_counter())

        # Train. One optimiser step on the whole batch, a mean over all of its sampled tokens.
        def loss_function(logprobs, entropies, mask, batch):
            old_logprobs = pad([s["old_logprobs"] for s in batch], 0.0, torch.float32, device)
            advantages = torch.tensor([[s["advantage"]] for s in batch], device=device)
            loss, keep = policy_loss(logprobs, old_logprobs, advantages, mask, total, args.loss, args.delta)
            for i, s in enumerate(batch):  # for the log
                s["logprobs"], s["entropy"] = logprobs[i].tolist(), entropies[i].sum().item()
                s["kept"] = keep[i].tolist()
            return loss

        backward(policy, batches, loss_function, args.temperature)
        grad_norm = clip_gradients(policy, args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        clock.append(time.perf_counter())

        # Push. The engine takes the new weights between two of its forward passes, episodes in flight go on
        # with them.
        weights = full_weights(policy)
        if rank == 0:
            engine.load(weights, version=step + 1)
            if step + 1 < args.steps:
                rollouts.trained()
        clock.append(time.perf_counter())

        # Log: one line of numbers a step, and every trained episode with both sides' log-probs.
        everyones = gather([s for batch in batches for s in batch])
        if rank == 0:
            trained = sorted((s for share in everyones for s in share), key=lambda s: s["index"])
            metrics |= {"step": step, "grad_norm": grad_norm, "lr": args.lr}
            metrics |= batch_metrics(groups, trained, chat)
            metrics["lag"] = step - min(oldest_version(g) for g in groups)
            metrics |= dict(zip(["wait_s", "train_s", "push_s"], np.diff(clock).tolist()))
            metrics["train_tokens_per_s"] = metrics["tokens"] / metrics["train_s"]
            metrics |= engine.take_speed()
            write_rollouts(rollouts_file, groups, trained, step)

        # Evaluate and save, now and then and at the end.
        last = step + 1 == args.steps
        if args.eval_tasks and (last or (step + 1) % args.eval_every == 0):
            if rank == 0:
                metrics["eval_pass1"] = evaluate(eval_tasks, play, args)
            improved = scatter([metrics["eval_pass1"] > best] * world if rank == 0 else None)
            if improved:
                best = metrics["eval_pass1"] if rank == 0 else best
                save_checkpoint(policy, chat.tokenizer, out / "best")
        if last or (step + 1) % args.save_every == 0:
            save_checkpoint(policy, chat.tokenizer, out / ("last" if last else f"step-{step + 1}"))
        if rank == 0:
            metrics_file.write(metrics)
            print(step_line(metrics, args.steps), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def refuse_used_folder(out: Path):
    """Makes the folder of a run; ValueError if a run has written there already."""
    out.mkdir(parents=True, exist_ok=True)
    if (out / "metrics.jsonl").exists():
        raise ValueError(f"{out} already holds a run; choose another --out, or move that one away")


def make_samples(groups: list[list[dict]], mode: str) -> list[dict]:
    """What a rank needs of each episode: its tokens, the sampler's log-probs and its advantage."""
    samples = []
    for group in groups:
        for record, advantage in zip(group, group_advantages([r["reward"] for r in group], mode).tolist()):
            samples.append({
                "index": len(samples), "ids": record["token_ids"], "mask": record["loss_mask"],
                "old_logprobs": [p or 0.0 for p in record["logprobs"]], "advantage": advantage,
            })
    return samples


def evaluate(tasks: list[dict], play, args) -> float:
    """pass@1 on held-out tasks: the mean over tasks of the share of attempts with reward 1."""
    jobs = [(task, i, attempt) for i, task in enumerate(tasks) for attempt in range(args.eval_attempts)]
    records = rollout.run_jobs(jobs, lambda job: play(*job, seed=args.seed, grade="always"), args.workers)
    return float(np.mean([r["reward"] is not None and r["reward"] >= 1 for r in records]))


def batch_metrics(groups: list[list[dict]], samples: list[dict], chat) -> dict:
    """The numbers of one step: samples are those of make_samples, with what the loss function added."""
    records = [r for group in groups for r in group]
    flat = {  # one entry a sampled token
        name: np.concatenate([np.array(s[name])[: len(s["ids"])][np.array(s["mask"], bool)] for s in samples])
        for name in ("logprobs", "old_logprobs", "kept")
    }
    advantage = np.concatenate([np.full(sum(s["mask"]), s["advantage"]) for s in samples])
    moved = flat["logprobs"] - flat["old_logprobs"]
    kept = flat["kept"].astype(bool)
    turns = sum(r["turns"] for r in records)
    calls = [m["content"][m["content"].find("<tool_call>"):] for r in records for m in r["messages"]
             if m["role"] == "assistant" and "<tool_call>" in m["content"]]
    return {
        "episodes": len(records),
        "tokens": sum(len(s["ids"]) for s in samples),
        "sampled_tokens": len(kept),
        "turns": turns / len(records),
        "tokens_per_turn": len(kept) / turns,
        "tokens_per_call": float(np.mean([len(chat.encode(c)) for c in calls] or [0])),
        "loss": float(-(np.exp(moved) * advantage)[kept].sum() / len(kept)),
        "kept_positive": float(kept[advantage > 0].mean()),
        "kept_negative": float(kept[advantage < 0].mean()),
        "logprob_diff_max": float(np.abs(moved).max()),
        "logprob_diff_mean": float(np.abs(moved).mean()),
        "entropy": sum(s["entropy"] for s in samples) / len(kept),
    }


def write_rollouts(writer: JsonlWriter, groups: list[list[dict]], samples: list[dict], step: int):
    """The trained episodes, with the trainer's side of them: its log-probs, what was kept, the advantage."""
    for record, s in zip((r for group in groups for r in group), samples):
        trainer_logprobs = [round(p, 5) if m else None for p, m in zip(s["logprobs"], s["mask"])]
        kept = [bool(k) if m else None for k, m in zip(s["kept"], s["mask"])]
        writer.write({**record, "step": step, "advantage": s["advantage"],
                      "trainer_logprobs": trainer_logprobs, "kept": kept})


def step_line(m: dict, steps: int) -> str:
    """One line a step for the terminal."""
    line = (
        f"step {m['step'] + 1}/{steps}  reward {m['reward']:.3f}  groups {m['groups_kept']} kept "
        f"{m['groups_zero']} zero {m['groups_one']} one  lag {m['lag']}  turns {m['turns']:.2f}  "
        f"entropy {m['entropy']:.3f}  "
        f"diff {m['logprob_diff_max']:.2f}  mask +{m['kept_positive']:.3f} -{m['kept_negative']:.3f}  "
        f"wait {m['wait_s']:.1f}s  train {m['train_s']:.1f}s"
    )
    return line + (f"  eval pass@1 {m['eval_pass1']:.3f}" if "eval_pass1" in m else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # what
    parser.add_argument("--model", required=True, help="checkpoint folder to start from")
    parser.add_argument("--tasks", required=True, help="tasks.jsonl")
    parser.add_argument("--out", required=True, help="folder for metrics, rollouts and checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    # rollouts (Table 13)
    parser.add_argument("--prompts", type=int, default=8, help="useful groups a step")
    parser.add_argument("--group-size", type=int, default=32, help="episodes a group")
    parser.add_argument("--lag", type=int, default=4, help="steps sampling may run ahead; 0: on-policy")
    parser.add_argument("--max-refill", type=int, default=8, help="batches of dropped groups, at most")
    parser.add_argument("--workers", type=int, default=128, help="episodes at the same time")
    parser.add_argument("--max-batch", type=int, default=256, help="sequences the engine steps together")
    parser.add_argument("--backend", default="auto", choices=["auto", "docker", "bwrap"])
    rollout.add_sampling_flags(parser)
    # objective
    parser.add_argument("--loss", default="dppo", choices=["dppo", "grpo", "reinforce"])
    parser.add_argument("--delta", type=float, default=0.1, help="DPPO: probability a token may move")
    parser.add_argument("--advantage", default="centered", choices=["centered", "normalized"])
    # optimisation
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--beta1", type=float, default=0.9)
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--grad-clip", type=float, default=1.0)
    parser.add_argument("--micro-batch-tokens", type=int, default=65_536 + 2_048, help="padded tokens a pass")
    parser.add_argument("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=True)
    # evaluation and checkpoints
    parser.add_argument("--eval-tasks", help="held-out tasks.jsonl; the best checkpoint by pass@1 is kept")
    parser.add_argument("--eval-every", type=int, default=100, help="steps")
    parser.add_argument("--eval-attempts", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    args = parser.parse_args()
    try:
        if args.group_size < 2:
            raise ValueError("--group-size: at least 2, as an advantage is a reward minus its group's mean")
        train(args)
    except KeyboardInterrupt:
        sys.exit(f"dppo.py: stopped; metrics and checkpoints so far are in {args.out}")
    except (InfraError, ValueError, OSError) as e:
        sys.exit(f"dppo.py: {e}")


if __name__ == "__main__":
    main()
