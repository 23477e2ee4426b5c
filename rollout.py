"""An agent with one tool attempts tasks: tasks.jsonl in, rollouts.jsonl out.

The model sees a task and may call `bash(command)`. Each command runs in the task's sandbox, what it printed
goes back to the model, and so on until the agent submits, a limit is reached or something breaks. Then the
task's own tests grade what is left in the sandbox. This file is the only harness: gathering SFT data,
training and evaluation all use `run_episode` below.

    python rollout.py --tasks tasks.jsonl --out r.jsonl --model ckpt --n 8        # a model, in process
    python rollout.py --tasks tasks.jsonl --out r.jsonl --model ckpt --engine http://host:8000   # vLLM
    python rollout.py --tasks tasks.jsonl --out r.jsonl --model gpt-x --engine chat:https://host/v1
    python rollout.py --tasks tasks.jsonl --out r.jsonl --oracle                  # the tasks' own demos

Tokens are kept, never re-made: what was sampled is appended as it is (loss mask 1), what the sandbox said is
tokenised once and appended (loss mask 0). Re-tokenising decoded text would train the model on tokens it never
chose.

Left out: engines other than the in-process one, vLLM and chat APIs; tools other than bash. """

import argparse
import base64
import hashlib
import itertools
import json
import os
import queue
import re
import shlex
import sys
import threading
import time
from typing import NamedTuple

import numpy as np
import requests
from tqdm import tqdm

import sandbox
from records import JsonlWriter, check_task, load_tasks, read_jsonl
from sandbox import AgentFault, InfraError, Sandbox, TaskError

MARKER = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SUBMIT = f"echo {MARKER}"
SYSTEM = (
    "You solve tasks in a Linux terminal. Call the bash tool to run commands: the shell lives on between "
    "calls, so directory, variables and background jobs stay. Look before you act, and check your work. "
    f"When the task is done, run exactly this command to submit it: {SUBMIT}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the shell and return its output and exit code.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command to run."}},
            "required": ["command"],
        },
    },
}


# ------------------------------------------------------------------------------------------------------------
# 1. Text: what the model writes and what it is shown
# ------------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """One attempted tool call: the command, or why there is none."""

    command: str | None
    error: str | None = None


def check_call(name, arguments) -> Call:
    """Holds a call's name and arguments (a dict, or a string of JSON) against the one tool that exists."""
    if name != "bash":
        return Call(None, f"there is no function {name!r}, only bash")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError) as e:
            return Call(None, f"the arguments are not valid JSON ({e})")
    if not isinstance(arguments, dict):
        return Call(None, "the arguments must be an object with the key command")
    if not isinstance(arguments.get("command"), str):
        return Call(None, "the argument command is missing or not a string")
    return Call(arguments["command"])


def parse_hermes(text: str, start: int) -> tuple[Call, int]:
    """Reads the JSON call whose body begins at `start`; returns it and where the text goes on.

    The JSON decoder finds the end, so a command may contain "</tool_call>". Raw newlines in strings are let
    through. """
    body = re.compile(r"\s*").match(text, start).end()
    try:
        value, end = json.JSONDecoder(strict=False).raw_decode(text, body)
    except (ValueError, RecursionError) as e:
        after = re.compile("</?tool_call>|$").search(text, start).start()
        return Call(None, f"the call is not valid JSON ({e})"), after
    if not isinstance(value, dict):
        return Call(None, "the call must be a JSON object with name and arguments"), end
    return check_call(value.get("name"), value.get("arguments")), end


XML_NEXT_CALL = re.compile(r"<tool_call>\s*<function=")
XML_CLOSED = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>\s*</tool_call>))")
XML_ANY_CLOSER = re.compile(r"</(?:parameter|function|tool_call)>")


def parse_qwen3_xml(text: str, start: int) -> tuple[Call, int]:
    """Reads the XML call whose body begins at `start`; returns it and where the text goes on.

    A value ends at the first </parameter> that another parameter or the call's own closing tags follow, so a
    command may contain any of the tags by itself. Models now and then forget a closing tag: the value then
    ends with the call. One newline on each side of a value belongs to the format, all others to the command.
    """
    function = re.compile(r"\s*<function=([^>\s]*)>").match(text, start)
    if not function:
        closer = text.find("</tool_call>", start)
        return Call(None, "the call does not begin with <function=bash>"), len(text) if closer < 0 else closer
    arguments, position = {}, function.end()
    parameter = re.compile(r"\s*<parameter=([^>\s]*)>")
    while found := parameter.match(text, position):
        next_call = XML_NEXT_CALL.search(text, found.end())
        bound = next_call.start() if next_call else len(text)
        span = found.end(), bound
        closer = XML_CLOSED.search(text, *span) or XML_ANY_CLOSER.search(text, *span)
        end, position = closer.span() if closer else (bound, bound)
        arguments[found[1]] = text[found.end() : end].removeprefix("\n").removesuffix("\n")
    return check_call(function[1], arguments), position


PARSERS = {"hermes": parse_hermes, "qwen3_xml": parse_qwen3_xml}


def parse_calls(text: str, tool_format: str, thinking: bool = False) -> list[Call]:
    """All tool calls in an assistant's text, in order; [] when there are none.

    Only what follows the last closed thinking block counts, and nothing inside an open one: drafts are not
    run. thinking: the prompt has already opened the block (as Qwen3.5's generation prompt does). """
    calls, position = [], 0
    first = re.search(r"</?think>|<tool_call>", text)
    if thinking or (first and first[0] == "</think>"):
        closer = text.find("</think>")
        if closer < 0:
            return []
        position = closer + len("</think>")
    while tag := re.compile(r"<think>|<tool_call>").search(text, position):
        if tag[0] == "<think>":
            closer = text.find("</think>", tag.end())
            if closer < 0:
                break
            calls, position = [], closer + len("</think>")
        else:
            call, position = PARSERS[tool_format](text, tag.end())
            calls.append(call)
    return calls


def format_call(command: str, tool_format: str) -> str:
    """The text of one call, as the model itself would write it."""
    if tool_format == "hermes":
        call = json.dumps({"name": "bash", "arguments": {"command": command}}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"
    value = f"<parameter=command>\n{command}\n</parameter>"
    return f"<tool_call>\n<function=bash>\n{value}\n</function>\n</tool_call>"


class Chat:
    """A tokenizer with its chat template: turns messages into token ids, the same for sampling and for
    training.

    path: a model folder (or hub name) whose template has tool support. ValueError otherwise. """

    def __init__(self, path: str):
        from transformers import AutoTokenizer  # here, so that chat rollouts and --oracle start without it

        self.path, self.lock = path, threading.Lock()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.template = self.tokenizer.chat_template
        if not self.template:
            raise ValueError(f"{path}: the tokenizer has no chat template; add a chat_template.jinja")
        probe = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        if "bash" not in self._render(probe):
            raise ValueError(f"{path}: the chat template has no tool support: the model would not see bash")
        self.tool_format = "qwen3_xml" if "<function=" in self.template else "hermes"
        self.thinking = self._render(probe).rstrip().endswith("<think>")
        parts = self._suffix_parts(2)
        if len(parts) != 3 or not parts[0]:
            raise ValueError(f"{path}: the chat template does not show the model what its tools return")
        self.end_id = self.encode(parts[0])[0]  # the token that closes every message, <|im_end|> for Qwen

    def _render(self, messages) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=[TOOL], add_generation_prompt=True, tokenize=False
            )
        except Exception as e:  # jinja's, or the template's own
            raise ValueError(f"{self.path}: the chat template fails: {e}") from e

    def encode(self, text: str, plain: bool = False) -> list[int]:
        """Token ids of a text. plain: special tokens in it are taken as ordinary text."""
        with self.lock:  # the tokenizer keeps that choice as state, and many threads encode
            return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=plain)

    def decode(self, ids: list[int]) -> str:
        """The text of one sampled turn, without the token that ends it."""
        ids = ids[:-1] if ids and ids[-1] == self.end_id else ids
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def prompt_ids(self, messages: list[dict]) -> list[int]:
        """Token ids of (system, user) up to the first assistant header."""
        return self.encode(self._render(messages))

    def _suffix_parts(self, n: int) -> list[str]:
        """The template's own text around n tool results: from the end of the assistant's turn to the next
        header.

        Found by rendering a conversation with place-holders and cutting it at them, so that any template
        works. """
        turn, results = "\ue000turn\ue000", [f"\ue000{i}\ue000" for i in range(n)]
        messages = [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": turn},
        ] + [{"role": "tool", "content": r} for r in results]
        return re.split("\ue000[0-9]+\ue000", self._render(messages).split(turn)[-1])

    def suffix_ids(self, results: list[str], ended: bool) -> list[int]:
        """Token ids that carry tool results to the model: end of its turn, results, header of its next turn.

        results: one text a call of the turn. ended: the model has already sampled the token that ends its
        turn. A result is untrusted data: it is encoded by itself, with any special token in it taken as plain
        text, so that no command's output can open a turn. """
        parts = self._suffix_parts(len(results))
        ids = self.encode(parts[0])[1 if ended else 0 :]
        for result, part in zip(results, parts[1:]):
            ids += self.encode(result, plain=True) + self.encode(part)
        return ids

    def assistant_text(self, message: dict) -> str:
        """An assistant message as the model would have written it: thinking, text, calls.

        Messages of a token engine hold that text already; those of a chat API and of --oracle have
        `tool_calls`. """
        text = message.get("content") or ""
        if message.get("reasoning_content"):
            opened = "" if self.thinking else "<think>\n"
            text = f"{opened}{message['reasoning_content']}\n</think>\n\n{text}"
        elif self.thinking and message.get("tool_calls"):
            text = f"\n</think>\n\n{text}"  # closes the block that the generation prompt opened
        for call in message.get("tool_calls") or []:
            command = check_call(call["function"]["name"], call["function"]["arguments"]).command
            if command is not None:
                text += "\n" if text and not text.endswith("\n") else ""
                text += format_call(command, self.tool_format)
        return text

    def assemble(self, messages: list[dict], cut: bool = False) -> tuple[list[int], list[int]]:
        """Token ids and loss mask (same length) of a conversation that has only messages.

        cut: a token limit stopped the last turn, so it has no end.

        The same prompt and suffix functions as in an episode, so both give the same ids.
        """
        ids, mask, results = self.prompt_ids(messages[:2]), [], []
        mask = [0] * len(ids)
        for message in messages[2:]:
            if message["role"] != "assistant":
                results.append(message["content"])
                continue
            if results:
                suffix, results = self.suffix_ids(results, ended=True), []
                ids, mask = ids + suffix, mask + [0] * len(suffix)
            turn = self.encode(self.assistant_text(message)) + [self.end_id]
            ids, mask = ids + turn, mask + [1] * len(turn)
        if cut and messages[-1]["role"] == "assistant":
            ids, mask = ids[:-1], mask[:-1]
        return ids, mask


# ------------------------------------------------------------------------------------------------------------
# 2. Engines: who writes the next turn
# ------------------------------------------------------------------------------------------------------------


class Sampling(NamedTuple):
    """Sampling parameters, all explicit, and an episode's limits (RECIPE section 2)."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_turns: int = 64  # an episode (in the recipe: tool calls, one a turn)
    max_turn_tokens: int = 16_384  # sampled tokens a turn
    max_tokens: int = 65_536  # response tokens an episode, sampled and observed together
    max_prompt_tokens: int = 2_048


class Turn(NamedTuple):
    """What a token engine gives back for one turn."""

    ids: list[int]
    logprobs: list[float]  # of each id, under the temperature it was sampled with
    versions: tuple[int, int]  # policy version at the first and at the last token
    cut: bool  # stopped by the token limit, not by an end token
    past: tuple | None = None  # the engine's own memory of the episode, to be handed back for the next turn


def derive_seed(*parts) -> int:
    """One 63-bit seed from anything printable: the same on every machine and in every run."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def load_model(path: str, dtype=None, device: str = "cpu"):
    """A causal language model from a checkpoint folder, in fp32 unless said otherwise, in eval mode."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a bar for every load and save would drown the ones that matter
    try:
        model, found = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or torch.float32,
                                                            output_loading_info=True)
    except (ValueError, RuntimeError, KeyError) as e:
        raise ValueError(f"{path} is no causal language model that fits its config.json: "
                         f"{str(e).splitlines()[0]}") from e
    if found["missing_keys"]:  # transformers would make them up
        raise ValueError(f"{path} lacks weights that its config.json asks for, "
                         f"{min(found['missing_keys'])} first")
    return model.to(device).eval()


def head_logits(hidden, weight):
    """Logits of the LM head in fp32: (..., d) x (V, d) -> (..., V).

    Rounding logits to bf16 is what makes trainer and sampler disagree most (RECIPE section 3: fp32 head on
    both sides). The operands keep their own precision, the products are summed and returned in fp32. """
    import torch

    if hidden.dtype == weight.dtype and hidden.dtype in (torch.float32, torch.float64):
        return hidden @ weight.T
    if hidden.is_cuda and not torch.is_grad_enabled():
        flat = hidden.reshape(-1, hidden.shape[-1])
        return torch.mm(flat, weight.T, out_dtype=torch.float32).view(*hidden.shape[:-1], -1)
    return hidden.float() @ weight.float().T


ANSWER_S = 600  # how long an endpoint may take for one answer


class EndpointError(InfraError):
    """No answer from an endpoint. status: the last one it gave; 408 also where it took too long, 0 where it
    cannot be reached."""

    def __init__(self, reason: str, status: int):
        super().__init__(reason)
        self.status = status


class ChatEngine:
    """Any OpenAI-compatible chat endpoint: messages in, one message out. For teachers and closed models."""

    tools = [TOOL]

    def __init__(self, url: str, model: str):
        self.url, self.model = url.rstrip("/") + "/chat/completions", model
        self.key = os.environ.get("OPENAI_API_KEY")
        self.headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def complete(self, messages: list[dict], limit: int, seed: int, sampling: Sampling) -> tuple[dict, bool]:
        """The next assistant message, and whether the token limit cut it; or EndpointError."""
        body = {
            "model": self.model,
            # an answer to a turn without a call has no call to belong to: the API wants it from the user
            "messages": [{**m, "role": "user"} if m["role"] == "tool" and "tool_call_id" not in m else m
                         for m in messages],
            **({"tools": self.tools} if self.tools else {}),  # an empty list is refused
            "max_tokens": limit,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed % 2**31,
        }
        message, finish, _ = self.post(body)
        return message, finish == "length"

    def post(self, body: dict) -> tuple[dict, str, dict]:
        """What the endpoint makes of a request's body: message, finish reason, usage; or EndpointError."""
        asked_s = 0
        for attempt in range(6):
            if attempt:
                time.sleep(min(60, max(2**attempt, asked_s)))
            try:
                reply = requests.post(self.url, json=body, headers=self.headers, timeout=ANSWER_S)
            except requests.RequestException as e:
                reason = f"{self.url}: {type(e).__name__}"
                status = 408 if isinstance(e, requests.ReadTimeout) else 0
                continue
            if (status := reply.status_code) == 200:
                try:
                    answer = json.loads(reply.content)  # bytes: what is no UTF-8 is not guessed at
                    choice = answer["choices"][0]
                    message = {k: v for k, v in choice["message"].items() if v}
                    if "reasoning" in message:  # newer servers' name for the same thing
                        message["reasoning_content"] = message.pop("reasoning")
                    message = {"content": "", **message, "role": "assistant"}
                    return message, choice.get("finish_reason") or "", answer.get("usage") or {}
                except (ValueError, LookupError, TypeError, AttributeError):
                    pass  # not a chat completion: said and tried again, like any other failure
            reason = f"{self.url} answered {status}: {reply.text[:300]}"
            if status not in (200, 408, 409, 429) and status < 500:
                break
            header = reply.headers.get("Retry-After", "")
            asked_s = int(header) if header.isdigit() else 0
        raise EndpointError(reason.replace(self.key, "***") if self.key else reason, status)


class OracleEngine:
    """Plays a task's own demonstration, one command a turn, then submits; without demos, its solution."""

    def __init__(self, task: dict, sample: int):
        if task.get("demos"):
            self.commands = list(task["demos"][sample % len(task["demos"])]["commands"])
        elif task.get("solution"):
            self.commands = [solution_command(task)]
        else:
            raise TaskError(f"task {task['id']}: --oracle needs demos or a solution")
        self.commands.append(SUBMIT)

    def complete(self, messages, limit, seed, sampling) -> tuple[dict, bool]:
        done = sum(m["role"] == "assistant" for m in messages)
        if done == len(self.commands):
            raise TaskError("the demonstration is over, but its submission was not taken")
        arguments = json.dumps({"command": self.commands[done]}, ensure_ascii=False)
        function = {"name": "bash", "arguments": arguments}
        call = {"id": f"call_{done}", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}, False


def solution_command(task: dict) -> str:
    """One command that writes the reference solution's files beside the task and runs solve.sh."""
    lines = ["mkdir -p /tmp/solution", "cd /tmp/solution"]
    for name, file in task["solution"].items():
        data = file["b64"] if "b64" in file else base64.b64encode(file["text"].encode()).decode()
        folder, name = shlex.quote(os.path.dirname(name) or "."), shlex.quote(name)
        lines.append(f"mkdir -p {folder} && echo {data} | base64 -d > {name}")
    return "( " + " && ".join(lines) + " ); bash /tmp/solution/solve.sh; rm -rf /tmp/solution"


def make_engine(spec: str, model_path: str, sampling: Sampling = Sampling()):
    """`torch`, `http://...[,http://...]` or `chat:URL` -> (engine, chat). chat is None where messages, not
    tokens, go in and out."""
    if spec.startswith("chat:"):
        return ChatEngine(spec.removeprefix("chat:"), model_path), None
    if spec.startswith(("http://", "https://")):
        from transformers import GenerationConfig
        from builtin.servers import VllmEngine

        chat = Chat(model_path)
        engine = VllmEngine(spec.split(","), model_path, chat,
                            end_ids(GenerationConfig.from_pretrained(model_path), chat), sampling)
        if stale := [s.url for s in engine.servers if s.label != "default"]:
            raise ValueError(f"{stale[0]} has weights that a training run has pushed, not {model_path}'s: "
                             "start it anew")
        return engine, chat
    if spec != "torch":
        raise ValueError(f"--engine {spec}: use torch, http://HOST:PORT for vLLM (several: with commas), or "
                         "chat:URL for an OpenAI-compatible endpoint")
    import torch
    from builtin.engine import TorchEngine

    chat = Chat(model_path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(model_path, dtype=torch.bfloat16 if device == "cuda" else None, device=device)
    return TorchEngine(model, end_ids(model.generation_config, chat)), chat


def end_ids(generation_config, chat: Chat) -> list[int]:
    """Every token that ends a turn: the template's, the tokenizer's and those of the generation config."""
    ids = generation_config.eos_token_id
    ids = ids if isinstance(ids, list) else [ids]
    return sorted({i for i in [*ids, chat.tokenizer.eos_token_id, chat.end_id] if i is not None})


# ------------------------------------------------------------------------------------------------------------
# 3. One episode
# ------------------------------------------------------------------------------------------------------------


def observation(result: sandbox.Result) -> str:
    """What the model is told about a command: its output and exit code."""
    return f"{result.output.removesuffix(chr(10)) or '(no output)'}\n[exit code {result.exit_code}]"


def is_submission(result: sandbox.Result) -> bool:
    """A command submits when it succeeds and the last line it prints is the marker."""
    return result.exit_code == 0 and result.output.rstrip().rsplit("\n", 1)[-1].strip() == MARKER


def run_episode(
    task: dict,
    engine,
    chat: Chat | None,
    sampling: Sampling,
    *,
    seed: int = 0,
    group: int = 0,
    sample: int = 0,
    model: str = "",
    backend: str = "auto",
    grade: str = "always",
    box: Sandbox | None = None,
) -> dict:
    """Plays one episode and returns its Rollout record (DESIGN "Records").

    engine: one with `generate`, and `chat` (token ids in and out), or one with `complete` (messages in and
    out); with the latter, a `chat` adds token ids to the record afterwards.
    grade: "always", or "submitted", where an episode that ends otherwise has reward 0 (RECIPE section 3).
    box: where it happens, not yet started; by default a new sandbox of `backend`.
    What is ours to fix ends as infra_error with reward None, what the agent did to itself with reward 0. """
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["instruction"]}]
    ids, mask, logprobs, versions, past = [], [], [], [], None
    times = {"model_s": 0.0, "command_s": 0.0, "grade_s": 0.0}
    end, reward, grade_log, error, turns, errors_in_a_row = None, None, "", None, 0, 0
    limits = {"agent_s": 3600, "command_s": 120, **task.get("limits", {})}
    by_tokens = hasattr(engine, "generate")

    def timed(name, function, *args):
        start = time.perf_counter()
        try:
            return function(*args)
        finally:
            times[name] += time.perf_counter() - start

    box = box or Sandbox(task, backend)
    try:
        if by_tokens:
            ids = chat.prompt_ids(messages)
            mask, logprobs = [0] * len(ids), [None] * len(ids)
            if len(ids) > sampling.max_prompt_tokens:
                raise TaskError(f"task {task['id']}: its prompt has {len(ids)} tokens, more than "
                                f"--max-prompt-tokens {sampling.max_prompt_tokens}")
        prompt_length = len(ids)
        box.start()
        deadline = time.monotonic() + limits["agent_s"]

        while end is None:
            if turns == sampling.max_turns:
                end = "max_turns"
            elif time.monotonic() >= deadline:
                end = "agent_timeout"
            if end:
                break

            # The model's turn.
            room = sampling.max_tokens - (len(ids) - prompt_length)
            limit = min(sampling.max_turn_tokens, room)
            turn_seed = derive_seed(seed, task["id"], sample, turns)
            turns += 1
            if by_tokens:
                turn = timed("model_s", engine.generate, ids, limit, turn_seed, sampling, past)
                ids, mask, logprobs = ids + turn.ids, mask + [1] * len(turn.ids), logprobs + turn.logprobs
                versions.append(list(turn.versions))
                past = turn.past
                message, cut = {"role": "assistant", "content": chat.decode(turn.ids)}, turn.cut
                calls = parse_calls(message["content"], chat.tool_format, chat.thinking)
            else:
                message, cut = timed("model_s", engine.complete, messages, limit, turn_seed, sampling)
                calls = [check_call(c["function"].get("name"), c["function"].get("arguments"))
                         for c in message.get("tool_calls", [])]
            messages.append(message)
            if cut:
                end = "length" if limit == sampling.max_turn_tokens else "context"
                break

            # The sandbox's turn: every call in order, one combined answer.
            results = []
            for call in calls:
                if end:
                    results.append("[skipped: the task is submitted]")
                elif call.command is None:
                    results.append(f"[error: {call.error}]")
                else:
                    left = max(1.0, min(limits["command_s"], deadline - time.monotonic()))
                    result = timed("command_s", box.run, call.command, left)
                    results.append(observation(result))
                    end = "submitted" if is_submission(result) else None
            if not calls:
                results = ["[error: no tool call found; call bash to act, and submit when done]"]
            errors_in_a_row = 0 if any(c.command is not None for c in calls) else errors_in_a_row + 1
            if errors_in_a_row == 3:
                end = "format_error"
            call_ids = [c.get("id") for c in message.get("tool_calls", [])]
            for text, call_id in itertools.zip_longest(results, call_ids[: len(results)]):
                tool_call_id = {"tool_call_id": call_id} if call_id else {}
                messages.append({"role": "tool", "content": text, **tool_call_id})
            if by_tokens and not end:
                suffix = chat.suffix_ids(results, ended=ids[-1] == chat.end_id)
                if len(ids) + len(suffix) - prompt_length >= sampling.max_tokens:
                    end = "context"  # no room for what the sandbox said and a token after it
                else:
                    ids, mask = ids + suffix, mask + [0] * len(suffix)
                    logprobs = logprobs + [None] * len(suffix)

        if grade == "always" or end == "submitted":
            reward, grade_log = timed("grade_s", box.grade)
        else:
            reward = 0.0
    except AgentFault as fault:
        end, reward, error, grade_log = fault.end, 0.0, str(fault), getattr(fault, "log", "")
    except InfraError as fault:
        end, reward, error = "infra_error", None, str(fault)
    finally:
        box.close()

    record = {
        "task_id": task["id"], "group": group, "sample": sample, "seed": seed, "model": model,
        "messages": messages, "reward": reward, "grade_log": grade_log, "end": end, "turns": turns,
        "times": {name: round(seconds, 4) for name, seconds in times.items()}, "error": error,
    }
    if not by_tokens and chat:
        ids, mask = chat.assemble(messages, cut=end in ("length", "context"))
        logprobs = [None] * len(ids)
    if by_tokens or chat:
        record |= {"token_ids": ids, "loss_mask": mask, "logprobs": logprobs, "policy_versions": versions}
    return record


# ------------------------------------------------------------------------------------------------------------
# 4. Many episodes
# ------------------------------------------------------------------------------------------------------------


def load_checked_tasks(path: str) -> list[dict]:
    """The tasks of a file, looked at before the first episode; TaskError or ValueError if unusable."""
    tasks = load_tasks(path)
    if not tasks:
        raise ValueError(f"{path} has no tasks")
    for task in tasks:
        check_task(task)
    return tasks


def run_jobs(jobs, function, workers: int):
    """Yields function(job) for every job as it finishes, from `workers` threads. An exception in one is
    raised here.

    Daemon threads: Ctrl-C ends the program at once, and the sandboxes close themselves at exit. """
    todo, done = queue.Queue(), queue.Queue()
    count = 0
    for job in jobs:
        todo.put(job)
        count += 1

    def work():
        while True:
            try:
                job = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((function(job), None))
            except BaseException as e:
                done.put((None, e))

    for _ in range(min(workers, count)):
        threading.Thread(target=work, daemon=True).start()
    for _ in range(count):
        result, failure = done.get()
        if failure:
            raise failure
        yield result


def play_missing(jobs, play, path: str, player: str, workers: int) -> list[dict]:
    """Plays the jobs (group, task, sample) that a file lacks, appends their records; returns all it has then.

    A record without reward (infra_error) says nothing about the player: its job is played again, and the
    later record counts. ValueError if the file holds something else. """
    latest = {}
    for record in read_jsonl(path) if os.path.exists(path) else []:
        if not {"model", "task_id", "sample", "reward"} <= record.keys():
            raise ValueError(f"{path} holds something other than rollouts; choose another --out")
        if record["model"] != player:
            raise ValueError(f"{path} holds rollouts of {record['model']}; choose another --out")
        latest[record["task_id"], record["sample"]] = record
    missing = [job for job in jobs if latest.get((job[1]["id"], job[2]), {}).get("reward") is None]
    rewards = [r["reward"] for r in latest.values() if r["reward"] is not None]
    total, count = sum(rewards), len(rewards)
    bar = tqdm(total=len(jobs), initial=len(jobs) - len(missing), unit="ep",
               mininterval=0.1 if sys.stderr.isatty() else 10)
    with JsonlWriter(path) as out, bar:
        for record in run_jobs(missing, play, workers):
            out.write(record)
            latest[record["task_id"], record["sample"]] = record
            if record["reward"] is None:
                tqdm.write(f"infra_error in {record['task_id']}: {record['error']}")
            else:
                total, count = total + record["reward"], count + 1
            bar.set_postfix(mean=f"{total / max(1, count):.3f}", refresh=False)
            bar.update()
    return list(latest.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    # what
    parser.add_argument("--tasks", required=True, help="tasks.jsonl")
    parser.add_argument("--out", required=True, help="rollouts.jsonl; an existing one is continued")
    parser.add_argument("--n", type=int, default=1, help="episodes a task")
    parser.add_argument("--limit", type=int, help="only the first so many tasks")
    # who
    parser.add_argument("--model", help="checkpoint folder, or the model's name at the chat endpoint")
    parser.add_argument("--engine", default="torch",
                        help="torch, http://HOST:PORT[,...] (vLLM), or chat:URL (key in OPENAI_API_KEY)")
    parser.add_argument("--oracle", action="store_true", help="play the tasks' demos, or their solutions")
    # how
    parser.add_argument("--backend", default="auto", choices=["auto", "docker", "bwrap"])
    parser.add_argument("--workers", type=int, default=64, help="episodes at the same time")
    parser.add_argument("--grade", default="always", choices=["always", "submitted"])
    parser.add_argument("--seed", type=int, default=0)
    add_sampling_flags(parser)
    args = parser.parse_args()
    try:
        rollout(args)
    except KeyboardInterrupt:
        sys.exit(f"rollout.py: stopped; what was finished is in {args.out}, the same command continues")
    except (InfraError, ValueError, OSError) as e:
        sys.exit(f"rollout.py: {e}")


def add_sampling_flags(parser, temperature: float = 1.0, top_p: float = 1.0):
    """The sampling flags, the same wherever episodes are played."""
    default = Sampling()
    parser.add_argument("--temperature", type=float, default=temperature)
    parser.add_argument("--top-p", type=float, default=top_p)
    parser.add_argument("--max-turns", type=int, default=default.max_turns)
    parser.add_argument("--max-turn-tokens", type=int, default=default.max_turn_tokens)
    parser.add_argument("--max-tokens", type=int, default=default.max_tokens, help="of response, an episode")
    parser.add_argument("--max-prompt-tokens", type=int, default=default.max_prompt_tokens)


def sampling_from(args) -> Sampling:
    sampling = Sampling(*(getattr(args, name) for name in Sampling._fields))
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or min(sampling[2:]) < 1:
        raise ValueError("--temperature must not be negative, --top-p lies in (0, 1], "
                         "the limits are at least 1")
    return sampling


def rollout(args):
    if not args.model and not args.oracle:
        raise ValueError("say who plays: --model CHECKPOINT, or --oracle")
    tasks = load_checked_tasks(args.tasks)[: args.limit]
    backend = sandbox.resolve_backend(args.backend)
    sampling = sampling_from(args)
    if args.oracle:
        engine, chat = None, Chat(args.model) if args.model else None
    else:
        engine, chat = make_engine(args.engine, args.model, sampling)

    player = "oracle" if args.oracle else args.model
    jobs = [(g, t, s) for g, t in enumerate(tasks) for s in range(args.n)]

    def play(job):
        group, task, sample = job
        return run_episode(
            task,
            OracleEngine(task, sample) if args.oracle else engine,
            chat,
            sampling,
            seed=args.seed,
            group=group,
            sample=sample,
            model=player,
            backend=backend,
            grade=args.grade,
        )

    records = play_missing(jobs, play, args.out, player, args.workers)
    rewards = [r["reward"] for r in records if r["reward"] is not None]
    print(f"{args.out}: {len(records)} rollouts of {len(tasks)} tasks, mean reward "
          f"{np.mean(rewards or [0]):.3f}, {len(records) - len(rewards)} infra errors")


if __name__ == "__main__":
    main()
