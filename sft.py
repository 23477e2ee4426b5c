"""Warm start: rollouts.jsonl and a model in, a checkpoint out.

Plain supervised fine-tuning on what an agent wrote, so that RL starts from a policy that calls the tool and
sometimes succeeds. Rollouts with token ids are used as they are; those of a chat API or of --oracle have
messages only and are put together by rollout.py's own prompt and suffix functions, which gives the ids an
episode would have had. The loss is on the assistant's tokens alone. Unsuccessful rollouts stay in by default,
as in the paper: they show how to act, and RL sorts out what to do.

    python sft.py --model base --rollouts rollouts.jsonl --out runs/sft    # writes runs/sft/last
    torchrun --nproc-per-node 8 sft.py --model base --rollouts ...                       # sharded with FSDP2

Left out: packing of sequences, a validation loss (evaluate with eval.py: only outcomes count). """

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

import rollout
from dppo import (backward, clip_gradients, gather, leave_ranks, micro_batches, refuse_used_folder,
                  save_checkpoint, scatter, setup_ranks, shard)
from records import JsonlWriter, read_jsonl


def load_samples(args, chat: rollout.Chat) -> list[dict]:
    """Samples {"ids", "mask"} from the rollouts to learn from; prints what was left out and why."""
    samples, dropped = [], {"infra_error": 0, "unparsed": 0, "unsuccessful": 0, "cut": 0}
    for path in args.rollouts:
        for record in read_jsonl(path):
            messages = record["messages"]
            if record["reward"] is None:
                dropped["infra_error"] += 1
            elif args.drop_unparsed and has_unparsed(messages, chat):
                dropped["unparsed"] += 1
            elif args.only_successful and record["reward"] < 1:
                dropped["unsuccessful"] += 1
            else:
                ids, mask = record.get("token_ids"), record.get("loss_mask")
                if ids is None:
                    ids, mask = chat.assemble(messages, cut=record.get("end") in ("length", "context"))
                elif ids[: mask.index(1)] != chat.prompt_ids(messages[:2]):
                    raise ValueError(
                        f"{path}: the token ids of {record['task_id']} do not come from this model's "
                        "tokenizer and template; train the model that sampled them"
                    )
                if 1 not in mask[: args.max_length]:
                    raise ValueError(f"--max-length {args.max_length} leaves nothing to learn "
                                     f"of {record['task_id']}")
                dropped["cut"] += len(ids) > args.max_length
                samples.append({"ids": ids[: args.max_length], "mask": mask[: args.max_length]})
    print(
        f"{len(samples)} rollouts; left out: {dropped['infra_error']} infra errors, {dropped['unparsed']} "
        f"with an unparsed tool call, {dropped['unsuccessful']} unsuccessful; {dropped['cut']} cut at "
        f"{args.max_length} tokens"
    )
    if not samples:
        raise ValueError("no rollout is left to train on")
    return samples


def has_unparsed(messages: list[dict], chat: rollout.Chat) -> bool:
    """Whether any assistant turn has no tool call, or one that does not parse."""
    for message in (m for m in messages if m["role"] == "assistant"):
        calls = rollout.parse_calls(chat.assistant_text(message), chat.tool_format, chat.thinking)
        functions = [call["function"] for call in message.get("tool_calls") or []]
        calls += [rollout.check_call(f.get("name"), f.get("arguments")) for f in functions]
        if not calls or any(call.command is None for call in calls):
            return True
    return False


def train(args):
    rank, world, device = setup_ranks()
    torch.manual_seed(args.seed)
    out = Path(args.out)
    chat = rollout.Chat(args.model)
    model = rollout.load_model(args.model, device=device).train()
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    policy = shard(model)
    betas = (args.beta1, args.beta2)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, betas=betas, weight_decay=0.0)

    # Rank 0 reads the data, shuffles it anew each epoch and cuts it into batches of whole samples.
    if rank == 0:
        samples = load_samples(args, chat)
        order = np.random.default_rng(args.seed)
        steps_an_epoch = -(-len(samples) // args.batch_size)
        refuse_used_folder(out)
        metrics_file = JsonlWriter(out / "metrics.jsonl")
    steps_an_epoch = scatter([steps_an_epoch] * world if rank == 0 else None)
    steps = round(args.epochs * steps_an_epoch)
    warmup = max(1, round(args.warmup_ratio * steps))
    linear = lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, linear)

    for step in range(steps):
        started = time.perf_counter()
        shares = None
        if rank == 0:
            if step % steps_an_epoch == 0:
                shuffled = order.permutation(len(samples))
            position = step % steps_an_epoch * args.batch_size
            batch = [samples[i] for i in shuffled[position : position + args.batch_size]]
            total = sum(sum(s["mask"]) for s in batch)
            shares = [(batches, total) for batches in micro_batches(batch, args.micro_batch_tokens, world)]
        batches, total = scatter(shares)

        loss_sum = 0.0

        def loss_function(logprobs, entropies, mask, batch):
            nonlocal loss_sum
            loss = -logprobs.sum() / total  # the mean over all assistant tokens of the whole batch
            loss_sum += loss.item()
            return loss

        backward(policy, batches, loss_function)
        grad_norm = clip_gradients(policy, args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        lr = schedule.get_last_lr()[0]
        schedule.step()
        shares = gather(loss_sum)
        if rank == 0:
            loss_sum = sum(shares)
            tokens, seconds = sum(len(s["ids"]) for s in batch), time.perf_counter() - started
            metrics = {"step": step, "loss": loss_sum, "lr": lr, "grad_norm": grad_norm, "tokens": tokens}
            metrics |= {"train_s": seconds, "train_tokens_per_s": tokens / seconds}
            metrics_file.write(metrics)
            if (step + 1) % args.log_every == 0 or step + 1 == steps:
                line = f"step {step + 1}/{steps}  loss {loss_sum:.4f}  lr {lr:.2e}  grad norm {grad_norm:.2f}"
                print(f"{line}  {tokens / seconds:.0f} tokens/s", flush=True)
    save_checkpoint(policy, chat.tokenizer, out / "last")
    leave_ranks()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    # what
    parser.add_argument("--model", required=True, help="checkpoint folder to start from")
    parser.add_argument("--rollouts", required=True, nargs="+", help="rollouts.jsonl, one or several")
    parser.add_argument("--out", required=True, help="folder for metrics and the checkpoint")
    parser.add_argument("--drop-unparsed", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--only-successful", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--max-length", type=int, default=65_536, help="tokens a rollout (32,768 for Qwen3)")
    parser.add_argument("--seed", type=int, default=0)
    # optimisation (Table 14)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--batch-size", type=int, default=128, help="rollouts a step, over all ranks")
    parser.add_argument("--micro-batch-tokens", type=int, default=65_536, help="padded tokens a pass")
    parser.add_argument("--lr", type=float, default=2e-5, help="peak; warms up, then falls to 0 linearly")
    parser.add_argument("--warmup-ratio", type=float, default=0.03)
    parser.add_argument("--beta1", type=float, default=0.9)
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--grad-clip", type=float, default=1.0)
    parser.add_argument("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--log-every", type=int, default=10, help="steps")
    args = parser.parse_args()
    try:
        train(args)
    except KeyboardInterrupt:
        sys.exit("sft.py: stopped; a checkpoint is written at the end only")
    except (ValueError, OSError) as e:
        sys.exit(f"sft.py: {e}")


if __name__ == "__main__":
    main()
