"""Questions with a known answer (AIME style): as tasks for the terminal, and as a single turn without tools.

    {"id": "aime-24-1", "question": "Find ...", "answer": "204"}

`eval.py run --tasks questions.jsonl` makes tasks of them: the agent writes its answer to a file, tests
compare it. With --no-tools the model answers in one turn, by its last \\boxed{} or by what it states. Both
give the same rows, by the same comparison.

Left out: algebra. Two answers are equal as numbers or as text; x+1 and 1+x differ. """

import inspect
import re
import time
from fractions import Fraction

import rollout
from records import numbered_records
from sandbox import InfraError

ANSWER_FILE = "/app/answer.txt"
# The expected answer stands inside this program, so no file exists that an agent could link its answer to.
CHECK = """\
import re
from fractions import Fraction

{function}
try:
    given = open({file!r}, errors="replace").read(10_000).strip()
except OSError:
    given = None
print(f"expected {answer!r}, found {{given!r}}")
with open("/logs/verifier/reward.txt", "w") as f:
    f.write(str(int(given is not None and same_answer(given, {answer!r}))))
"""


def same_answer(given: str, want: str) -> bool:
    """Equal as numbers where both are (073 and 73, 1/2 and 0.5), else as text without case and spaces."""

    def plain(text):
        text = re.sub(r"\\(?:left|right|[,;! ])|[\s$]|(?<=\d),(?=\d{3}(?!\d))", "", text).rstrip(".")
        text = re.sub(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}", r"\1/\2", text)
        number = re.fullmatch(r"[+-]?\d{1,99}(/(?=\d*[1-9])\d{1,99}|\.\d{1,99})?", text)
        return Fraction(text) if number else text.lower()

    return plain(given) == plain(want)


def answer_tasks(path: str) -> list[dict]:
    """Questions as Task records: the agent writes its answer to a file, and the tests compare it."""
    tasks, seen = [], set()
    for number, record in numbered_records(path):
        where, answer = f"{path}:{number}", record.get("answer")
        answer = str(answer) if type(answer) in (int, float) else answer
        for field in ("id", "question", "answer"):
            value = answer if field == "answer" else record.get(field)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{where}: {field} is missing or empty; a line is {{id, question, answer}}")
        if record["id"] in seen:
            raise ValueError(f"{where}: the id {record['id']} is there twice")
        seen.add(record["id"])
        check = CHECK.format(function=inspect.getsource(same_answer), file=ANSWER_FILE, answer=answer)
        write = f"Write the final answer, and nothing else, to {ANSWER_FILE}."
        tasks.append({
            "id": record["id"], "question": record["question"], "answer": answer,
            "instruction": f"{record['question']}\n\n{write}",
            "dockerfile": "FROM tmax-base:core\nWORKDIR /app\n", "files": {},
            "tests": {"test.sh": {"text": "python3 /tests/check.py\n"}, "check.py": {"text": check}},
        })
    return tasks


def final_answer(text: str) -> str | None:
    """The last \\boxed{...}, else what the last "answer is" or "answer:" states; None without either.

    Only what follows the thinking counts: a draft is no answer. """
    thinking, closed, said = text.rpartition("</think>")
    if not closed and "<think>" in text:
        return None
    start = said.rfind("\\boxed{")
    if start >= 0:
        depth = 0
        for end in range(start + len("\\boxed"), len(said)):
            depth += {"{": 1, "}": -1}.get(said[end], 0)
            if depth == 0:
                return said[start + len("\\boxed{") : end]
    *_, stated = re.split(r"(?i)\banswer(?:\s+is\b|\s*[:=])[:*_$\s]*", said)
    if stated == said:
        return None
    number = re.match(r"[+-]?\d[\d,]*(?:[./]\d+)?", stated)
    return number[0] if number else stated.partition("\n")[0].rstrip(" .*_$")


def answer_once(task: dict, engine, chat, sampling, *, seed: int, group: int, sample: int, model: str):
    """One turn without tools, graded by its final answer; the same record as run_episode's."""
    messages = [{"role": "system", "content": "Answer the question. Put the final answer in \\boxed{}."},
                {"role": "user", "content": task["question"]}]
    turn_seed = rollout.derive_seed(seed, task["id"], sample, 0)
    limit = min(sampling.max_turn_tokens, sampling.max_tokens)
    record = {"task_id": task["id"], "group": group, "sample": sample, "seed": seed, "model": model,
              "messages": messages, "reward": None, "grade_log": "", "end": "infra_error", "turns": 0,
              "error": None}
    started = time.perf_counter()
    try:
        if chat:
            prompt = chat.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            ids = chat.encode(prompt)
            turn = engine.generate(ids, limit, turn_seed, sampling, None)
            message, cut = {"role": "assistant", "content": chat.decode(turn.ids)}, turn.cut
            record |= {"token_ids": ids + turn.ids, "loss_mask": [0] * len(ids) + [1] * len(turn.ids)}
            opened = prompt.rstrip().endswith("<think>")
        else:
            (message, cut), opened = engine.complete(messages, limit, turn_seed, sampling), False
    except InfraError as e:
        return record | {"error": str(e)}
    answer = final_answer(("<think>" if opened else "") + message["content"])
    return record | {
        "messages": [*messages, message], "turns": 1, "end": "length" if cut else "submitted",
        "reward": float(answer is not None and same_answer(answer, task["answer"])),
        "grade_log": f"expected {task['answer']!r}, found {answer!r}",
        "times": {"model_s": round(time.perf_counter() - started, 4), "command_s": 0.0, "grade_s": 0.0},
    }
