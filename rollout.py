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
import contextlib
import hashlib
import itertools
import json
import os
import queue
import re
import shlex
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import numpy as np
import requests
from tqdm import tqdm

import sandbox
from sandbox import AgentFault, InfraError, JsonlWriter, Sandbox, TaskError, load_tasks, read_jsonl

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


class PushError(Exception):
    """A sampler did not take the trainer's weights: the run must stop, whatever it would sample is stale."""


class Server:
    """What the VllmEngine knows about one vLLM server."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.lock = threading.Lock()  # held while the server gets weights; requests wait for it
        self.version = 0  # policy version of its weights
        self.label = "default"  # the same as vLLM says it: "default" until weights are pushed
        self.scores = self.expected = None  # log-probs of the last push's probe: its own, the trainer's
        self.lost = False  # it failed, and may have been restarted with other weights since
        self.avoid_until = 0.0  # new episodes go elsewhere until then
        self.in_flight = self.episodes = 0


class Watched(requests.adapters.HTTPAdapter):
    """Connections that end when their host is silent for `sandbox.SILENT_S`, however long an answer takes."""

    def init_poolmanager(self, *args, **more):
        super().init_poolmanager(*args, socket_options=sandbox.socket_options(), **more)


class VllmEngine:
    """vLLM servers: token ids in, token ids and log-probs out.

    An episode stays on one server, for its prefix cache; a new one goes to the server with the fewest
    requests. A server that fails is tried again with growing pauses, some three minutes in all; then its
    episodes end as infra_error, while the others go on. `load` pushes weights; without it the servers sample
    with what they were started with.

    Facts about vLLM 0.32 that this relies on, all of them tried: every sampling parameter is sent, as what a
    request leaves out comes from the model's generation_config; log-probs are those of the distribution that
    was sampled from only with --logprobs-mode processed_logprobs; a server keeps a label for its weights, and
    a restarted one has lost ours; reloading, labels and /server_info need VLLM_SERVER_DEV_MODE=1. """

    pauses_s = (1, 2, 4, 8, 16, 32, 60, 60)  # between tries: a restart takes a minute or two

    def __init__(self, urls: list[str], model: str, chat: Chat, ends: list[int], sampling: Sampling,
                 push_dir: Path | None = None, abort: bool = False, nccl: bool = False):
        self.model, self.chat, self.ends, self.sampling = model, chat, ends, sampling
        self.push_dir = push_dir  # where `load` leaves weights for the servers, under the same path there
        self.nccl = nccl  # whether `load` broadcasts them instead
        self.abort = abort  # whether `load` aborts the turns in flight, which then start again
        self.servers = [Server(url) for url in urls]
        self.lock = threading.Lock()  # guards the counts
        self.requests = self.sampled_tokens = 0  # see take_speed
        self.busy_s = self.busy_since = 0.0
        self.pushed, self.pushed_bytes = None, 0  # the last `load`: version, label, probe
        for server in self.servers:
            self._check(server)

    def generate(self, ids: list[int], limit: int, seed: int, sampling: Sampling, past=None) -> Turn:
        """Samples one turn after `ids`, at most `limit` tokens; blocks. InfraError if no server can.

        past: the episode's last `Turn.past`, here its server. Versions are those of the server's weights when
        the request was sent and when its answer had come. """
        with self.lock:
            server = past or min(self.servers, key=lambda s: (time.monotonic() < s.avoid_until, s.in_flight,
                                                              s.episodes))
            server.episodes += past is None
        body = {
            "model": self.served, "prompt": ids, "add_special_tokens": False, "max_tokens": limit,
            "seed": seed, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0,
            "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "stop_token_ids": self.ends, "ignore_eos": True, "logprobs": 0, "return_token_ids": True,
        }
        pauses = iter(self.pauses_s)
        while True:
            try:
                with server.lock:
                    if server.lost:
                        self._recover(server)
                    first = server.version
                with self._counted(server):
                    choice = self._call(server, "/v1/completions", body, timeout=3600)["choices"][0]
                last = server.version
                if self._label(server) != server.label:
                    with server.lock:  # if that was because of a push, it has ended now
                        if self._label(server) != server.label:
                            raise requests.ConnectionError("it was restarted, and sampled with old weights")
                if choice["finish_reason"] != "abort":  # aborted by a push: again, with the new weights
                    break
            except requests.RequestException as e:
                if e.response is None or e.response.status_code >= 500:
                    self._lose(server, e)
                    if pause_s := next(pauses, None):
                        time.sleep(pause_s)
                        continue
                raise InfraError(f"{server.url}: {reason_of(e)}") from e
        new, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        cut = new[-1] not in self.ends
        if cut and len(new) < limit:
            raise InfraError(f"{server.url} stopped a turn by itself after {len(new)} of {limit} tokens; "
                             "start it with --generation-config vllm")
        with self.lock:
            self.sampled_tokens += len(new)
        return Turn(new, logprobs, (first, last), cut, server)

    def load(self, state_dict: dict, version: int, probe: tuple[list[int], list[float]]):
        """Gives every server new weights; PushError if one does not have them then.

        probe: token ids, and the trainer's log-probs of all but the first. A server that does not answer gets
        the weights when it is back, before it samples again. """
        from safetensors.torch import save_file

        # The head by its own name also where it is tied: vLLM on CPU else keeps a packed copy of the old one.
        seen, tensors = set(), {}
        for name, w in state_dict.items():
            w = w.detach().to("cpu", self.dtype).contiguous()
            tensors[name] = w.clone() if w.data_ptr() in seen else w
            seen.add(w.data_ptr())
        self.pushed_bytes = size = sum(w.numel() * w.element_size() for w in tensors.values())
        if not self.nccl:
            self.push_dir.mkdir(parents=True, exist_ok=True)
            if (free := shutil.disk_usage(self.push_dir).free) < size + 2**20:
                raise OSError(f"--push-dir: {self.push_dir} has "
                              f"{free >> 20} MB free for {size >> 20} MB of weights")
            save_file(tensors, self.push_dir / "new", metadata={"format": "pt"})
        with contextlib.ExitStack() as held:
            for server in self.servers:
                held.enter_context(server.lock)
            if not self.nccl:
                os.replace(self.push_dir / "new", self.push_dir / "model.safetensors")
            self.pushed = version, f"{os.getpid()}-{time.time_ns()}-{version}", probe
            self.tensors = tensors if self.nccl else None
            for pause_s in (*self.pauses_s, None):
                with ThreadPoolExecutor(len(self.servers)) as pool:
                    failures = [e for e in pool.map(self._try_push, self.servers) if e]
                if len(failures) < len(self.servers):
                    return
                if pause_s is None:
                    raise InfraError(f"no vLLM server can take the weights: {failures[0]}")
                time.sleep(pause_s)

    def _try_push(self, server: Server) -> str | None:
        """Pushes; returns why the server could not be reached."""
        try:
            self._push(server)
        except requests.RequestException as e:
            self._lose(server, e)
            return f"{server.url}: {reason_of(e)}"

    def _push(self, server: Server):
        """Gives one server the weights of the last `load`, and has it prove it. Its lock must be held."""
        version, label, (ids, expected) = self.pushed
        try:
            # Turns in flight are frozen, not lost; their keys and values are computed again afterwards, with
            # the new weights.
            self._call(server, "/update_weight_version", {"new_version": f"{label}, loading"})
            self._call(server, f"/pause?mode={'abort' if self.abort else 'keep'}", {})
            if self.nccl:
                self._broadcast(server)
            else:
                where = {"weights_path": str(self.push_dir.resolve())}
                self._call(server, "/collective_rpc", {"method": "reload_weights", "kwargs": where})
            if not self._call(server, "/reset_prefix_cache?reset_running_requests=true", {})["success"]:
                raise PushError(f"{server.url} did not drop the keys and values of the old weights")
            self._call(server, "/update_weight_version", {"new_version": label})
            self._call(server, "/resume", {})
            scores = self._score(server, ids)
        except requests.HTTPError as e:
            raise PushError(f"version {version} did not reach {server.url}, which {reason_of(e)}") from e
        error = np.abs(np.subtract(scores, expected))
        off = error.max() > 1e-3 if server.fp32 else error.mean() > 0.1
        # Small steps move log-probs less than bf16 rounds: but not even a bit is no push at all.
        if server.scores and np.abs(np.subtract(server.expected, expected)).max() > 1e-3:
            off |= scores == server.scores
        if off or not np.isfinite(error).all():
            raise PushError(
                f"{server.url} does not have the weights of version {version}: its log-probs of the probe "
                f"differ from the trainer's by {error.max():.2g} at most, {error.mean():.2g} in the mean"
            )
        server.version, server.label, server.scores, server.expected = version, label, scores, expected
        self._found(server)

    def _broadcast(self, server: Server):
        """Sends a paused server the weights from this GPU, by vLLM's own transfer API. Not yet run on a GPU.

        Each push opens a communicator of its own, half a second's work: so a server that was restarted since
        the last one is no special case. Both sides must enter it together, hence the thread. """
        import torch
        from torch.cuda import nccl

        def ask(path, body):
            asked = pool.submit(self._call, server, path, body)
            if wait([asked], 2).done:  # refused; NCCL would wait for the other side for ever
                asked.result()
            return asked

        device, unique_id, weights = torch.device("cuda"), nccl.unique_id(), self.tensors
        ranks = 1 + self._call(server, "/get_world_size")["world_size"]
        with ThreadPoolExecutor(1) as pool:
            joined = ask("/init_weight_transfer_engine", {"init_info": {
                "nccl_unique_id_b64": base64.b64encode(unique_id).decode(), "rank_offset": 1,
                "world_size": ranks}})
            comms = [nccl.init_rank(ranks, unique_id, 0)]
            nccl.all_reduce([torch.zeros(1, device=device)], comms=comms)  # the server's side begins with one
            joined.result()
            self._call(server, "/start_weight_update", {})
            sent = ask("/update_weights", {"update_info": {
                "names": list(weights), "shapes": [list(w.shape) for w in weights.values()],
                "dtype_names": [str(w.dtype).removeprefix("torch.") for w in weights.values()]}})
            for w in weights.values():
                nccl.broadcast([w.to(device)], comms=comms)
            sent.result()
        self._call(server, "/finish_weight_update", {})
        self._call(server, "/shutdown_weight_transfer_engine", {})

    def _score(self, server: Server, ids: list[int]) -> list[float]:
        """The server's log-probs of all ids but the first."""
        body = {"model": self.served, "prompt": ids, "add_special_tokens": False, "max_tokens": 1,
                "temperature": 1.0, "top_p": 1.0, "top_k": 0, "prompt_logprobs": 0}
        scores = self._call(server, "/v1/completions", body)["choices"][0]["prompt_logprobs"]
        return [score[str(i)]["logprob"] for i, score in zip(ids[1:], scores[1:])]

    def take_speed(self) -> dict:
        """Seconds in which any request was in flight, and sampled tokens a second, since the last call."""
        with self.lock:
            now = time.perf_counter()
            seconds = self.busy_s + (now - self.busy_since if self.requests else 0.0)
            tokens, self.sampled_tokens = self.sampled_tokens, 0
            self.busy_s, self.busy_since = 0.0, now
        return {"sample_s": seconds, "sample_tokens_per_s": tokens / max(seconds, 1e-9)}

    @contextlib.contextmanager
    def _counted(self, server: Server):
        """Counts one request in flight, for the choice of a server and for take_speed."""
        with self.lock:
            self.busy_since = self.busy_since if self.requests else time.perf_counter()
            self.requests += 1
            server.in_flight += 1
        try:
            yield
        finally:
            with self.lock:
                self.requests -= 1
                server.in_flight -= 1
                self.busy_s += 0.0 if self.requests else time.perf_counter() - self.busy_since

    def _call(self, server: Server, path: str, body: dict | None = None, timeout: float = 600) -> dict:
        """GET, or POST of a JSON body; a requests.RequestException if it fails.

        A connection each: vLLM closes idle ones after 5 s, which would look like a server that is gone. """
        method = "GET" if body is None else "POST"
        with requests.Session() as session:
            session.mount(server.url, Watched())
            reply = session.request(method, server.url + path, json=body, timeout=(10, timeout))
        if not reply.ok:
            said = " ".join(reply.text[:300].split())
            raise requests.HTTPError(f"answered {path} with {reply.status_code}: {said}", response=reply)
        return reply.json()

    def _label(self, server: Server) -> str:
        return self._call(server, "/weight_info")["weight_version"]

    def _recover(self, server: Server):
        """Looks whether a lost server is back, and gives it the weights that it lost with a restart or missed."""
        newest = self.pushed[1] if self.pushed else server.label
        if not self._label(server) == server.label == newest:
            if not self.pushed:
                raise InfraError(f"{server.url}: another run has given it weights meanwhile")
            self._push(server)
        self._found(server)

    def _found(self, server: Server):
        if server.lost:
            print(f"{server.url} is back", flush=True)
        server.lost, server.avoid_until = False, 0.0

    def _lose(self, server: Server, error: Exception):
        """Notes a failure: new episodes avoid the server for a minute. The first one is said."""
        if not server.lost:
            print(f"warning: {server.url}: {reason_of(error)}; it is tried again"
                  + ("" if len(self.servers) == 1 else ", and new episodes go to the others"), flush=True)
        server.lost, server.avoid_until = True, time.monotonic() + 60

    def _check(self, server: Server):
        """Holds a server against this run's model, tokenizer and limits; ValueError names what differs."""
        import torch

        text = f"{SYSTEM}\n{json.dumps(TOOL)} \u00e9\u4e16 0123  x\t{self.chat.decode([self.chat.end_id, 0])}"
        try:
            models = self._call(server, "/v1/models")["data"]
            config = self._call(server, "/server_info?config_format=json")["vllm_config"]["model_config"]
            server.label = self._label(server)
            tokens = self._call(server, "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        except requests.HTTPError as e:
            raise ValueError(f"{server.url} {reason_of(e)}; it must be vLLM 0.32, started with "
                             "VLLM_SERVER_DEV_MODE=1 in its environment") from e
        except (requests.RequestException, LookupError, TypeError) as e:
            raise InfraError(f"{server.url} is no vLLM server that answers ({reason_of(e)}); start one "
                             "there, or name in --engine where it runs") from e
        mine, wrong = os.path.realpath(self.model), []
        same = [m["id"] for m in models if m["id"] == self.model or os.path.realpath(m["root"]) == mine]
        if not same:
            wrong.append(f"it serves {models[0]['id']}, not {self.model} (if that is the same model, "
                         f"start it with --served-model-name {self.model})")
        need, has = self.sampling.max_prompt_tokens + self.sampling.max_tokens, config["max_model_len"]
        if has < need:
            wrong.append(f"its context holds {has} tokens, an episode needs {need}: start it with "
                         f"--max-model-len {need}, or lower --max-tokens")
        if config["logprobs_mode"] != "processed_logprobs":
            wrong.append(f"its log-probs are {config['logprobs_mode']}: start it with --logprobs-mode "
                         "processed_logprobs")
        if tokens != self.chat.encode(text):
            wrong.append("its tokenizer gives other ids than the model's")
        if wrong:
            raise ValueError(f"{server.url} does not fit: " + "; ".join(wrong))
        self.served, self.dtype = same[0], getattr(torch, config["dtype"].removeprefix("torch."))
        server.fp32 = self.dtype == torch.float32
        if not server.fp32 and "head_dtype" not in str(config["hf_overrides"]):
            print(f"warning: {server.url} rounds its logits to {config['dtype']}; start it with "
                  """--hf-overrides '{"head_dtype": "float32"}'""", flush=True)


def reason_of(error: Exception) -> str:
    """A failed request in a few words: what the server answered, or how it did not."""
    return str(error) if isinstance(error, requests.HTTPError) or not error.args or isinstance(
        error.args[0], str) else type(error).__name__


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
        sandbox.check_task(task)
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
