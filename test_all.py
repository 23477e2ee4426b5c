"""Tests of all of it, real parts only: sandboxes, processes, servers; nothing is mocked.

    bash run.sh test                       # all
    bash run.sh test -k "shell and bwrap"  # some

What is missing skips its tests, unless REQUIRE_BACKENDS names it, as .ci/run does: then they fail. Names: bwrap,
docker, podman, chromium, fixtures (python gen.py bases), vllm (VLLM_PYTHON=the interpreter of its environment),
torchvision (there, for Qwen3.5), hosts (root and iproute2: network namespaces stand in for hosts).
"""
import ast, base64, collections, concurrent.futures, contextlib, copy, fcntl, gc, glob, http.server, inspect, io
import itertools, json, math, os, re, resource, shutil, signal, socket, subprocess, sys, tarfile
import tempfile, textwrap, threading, time, zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import requests
import torch
from transformers import (AutoModelForCausalLM, GenerationConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config,
                          Qwen3ForCausalLM)

import backends.bwrap, backends.docker, dppo, eval as evaluation, gen, rollout, sandbox, sft
from backends import common
from backends.docker import docker_api, docker_hosts, docker_image
from builtin import answers, families, tiny
from builtin.engine import TorchEngine
from builtin.families import FAMILIES
from builtin.servers import PushError, VllmEngine
from extras import harbor, page
from extras.corpus import balance, words_of
from records import LIMITS, JsonlWriter, check_task, limits_of, load_tasks, read_jsonl, user_of
from rollout import MARKER, SUBMIT, SYSTEM, TOOL, Call, Chat, Sampling, Turn, parse_calls, run_episode
from sandbox import (AgentFault, Grade, InfraError, Result, Sandbox, SandboxKilled, TaskError, VerifierFailed,
                     parse_reward, prepare, resolve_backend)
from taxonomy import AXES, MOST, axis_values, load_taxonomy, sample_specs

ROOT = str(Path(__file__).resolve().parent)
torch.set_num_threads(1)


# ================================================================================================ sandbox.py

DOCKERFILE = "FROM tmax-base:core\nWORKDIR /app\nCOPY --chown=user:user . /app/\n"


def task_of(tests="echo 0 >/logs/verifier/reward.txt", files=None, id="t", dockerfile=DOCKERFILE, **more):
    files = {"notes.txt": "hello\n"} if files is None else files
    return {"id": id, "instruction": "", "dockerfile": dockerfile, "files": {p: {"text": t} for p, t in files.items()},
            "tests": {"test.sh": {"text": tests}}, **more}


def lacking(name, reason):
    """Skips a test, or fails it where `name` is required."""
    (pytest.fail if name in os.environ.get("REQUIRE_BACKENDS", "").split() else pytest.skip)(reason)


def need(backend):
    try:
        return resolve_backend(backend)
    except InfraError as e:
        lacking(backend, str(e))


@pytest.fixture(params=["bwrap", "docker"], scope="module")
def backend(request):
    return need(request.param)


@pytest.fixture(scope="module")
def shared(backend):
    """One sandbox for the cases that leave no trace."""
    with Sandbox(task_of(), backend) as s:
        yield s


@pytest.fixture
def box(backend):
    with Sandbox(task_of(), backend) as s:
        yield s


def processes(s):
    """What runs in there besides process 1, the shell and this look: command lines."""
    out = s.run("for p in /proc/[0-9]*; do [[ ${p#/proc/} -gt 1 && ${p#/proc/} != $$ ]] && tr '\\0' ' ' <$p/cmdline && echo; done 2>/dev/null").output
    return [line for line in out.splitlines() if line.strip() and not line.startswith("tr ")]


# ------------------------------------------------------------------------------------------------ shell

def test_state_persists(box):
    assert box.run("cd /tmp; x=5; export Y=6; f() { echo f$1; }; sleep 100 &") == Result("", 0, False)
    assert box.run("pwd; echo $x $Y; f 1; jobs -p | wc -l").output == "/tmp\n5 6\nf1\n1\n"
    assert box.run("false").exit_code == 1
    assert box.run("echo $?").output == "1\n"
    assert box.run("kill -STOP $$; echo on") == Result("on\n", 0, False)
    assert box.run("kill %1; wait %1 2>/dev/null; (exit 200)").exit_code == 200


@pytest.mark.parametrize("command", ["sleep 30 & echo done", "sleep 30 2>&1 >/dev/null & echo done", "(sleep 30 &) ; echo done",
                                     "nohup sleep 30 & echo done", "setsid sleep 30 & echo done"])
def test_background_jobs_do_not_hold_the_command(box, command):
    start = time.monotonic()
    assert box.run(command) == Result("done\n", 0, False)
    assert time.monotonic() - start < 2
    time.sleep(.1)
    assert any("sleep 30" in p for p in processes(box))


def test_background_server_answers_the_next_command(box):
    box.run("python3 -m http.server 8000 &")
    got = box.run("for i in $(seq 50); do curl -s localhost:8000/notes.txt 2>/dev/null && break; sleep .1; done")
    assert "hello" in got.output and got.exit_code == 0


@pytest.mark.parametrize("command", ["cat <<EOF\nabc", "echo 'abc", 'echo "abc', "( echo a", "echo $(ls", "if true; then", "echo `ls",
                                     "{ echo a", "case x in", "for i in 1 2", "f() {", "echo a &&", ")", "echo ${x", "<<E"])
def test_unterminated_input(shared, command):
    got = shared.run(command)
    assert not got.timed_out and ("heredoc" in got.output or "here-doc" in got.output or got.exit_code != 0)
    assert shared.run("echo ok") == Result("ok\n", 0, False)


AWKWARD = {
    "sleep .1 &": "",
    "echo hi # note": "hi\n",
    "# only a note": "",
    "": "",
    "   \n\n": "",
    "case x in x) echo y;; esac": "y\n",
    "echo a \\": None,
    "echo a;": "a\n",
    "true && echo b ||\necho c": "b\n",
    "awk 'BEGIN { printf \"%s|%d\\n\", \"it'\"'\"'s\", 3 }'": "it's|3\n",
    "echo 'a/b' | sed 's/\\//\\\\/'": "a\\b\n",
    "bash -c 'echo \"$0 $1\" | sed \"s/x/'\"'\"'/\"' x y": "' y\n",
    "echo \"a\nb\"": "a\nb\n",
    "printf '%s\\n' \"$(printf 'x%.0s' {1..3})\"": "xxx\n",
    "echo {a,b}$((1+2))": "a3 b3\n",
    "echo run:000:x; echo kill:0:0": "run:000:x\nkill:0:0\n",
    "echo ünï ✓ 日本": "ünï ✓ 日本\n",
    "echo $'\\a' | wc -c": "2\n",
    "read x; echo \"[$x]\"": "[]\n",
    "cat; echo end": "end\n",
    "python3; echo $?": "0\n",
    "printf foo": "foo",
    "exec 3</app/notes.txt; read -u 3 l; echo $l; exec 3<&-": "hello\n",
    "! true; echo $?": "1\n",
    "echo err >&2": "err\n",
    "echo a | tee /dev/stderr": None,
    "echo a >/dev/stdout": "a\n",
    "trap": None,
}


@pytest.mark.parametrize("command", AWKWARD)
def test_valid_commands_that_wrappers_break(shared, command):
    got = shared.run(command)
    assert got.exit_code == 0 and not got.timed_out, got
    assert AWKWARD[command] is None or got.output == AWKWARD[command]


def test_quoted_heredoc_is_byte_exact(shared):
    text = "# a \"b\" 'c' `d` $e \\ \\\\ \\n !f\n\ttab  \n%s %d\n\\\n"
    shared.run("cat >/tmp/h <<'EOF'\n" + text + "EOF")
    assert base64.b64decode(shared.run("base64 -w0 /tmp/h").output).decode() == text


def test_long_commands_arrive_whole(shared):
    line = "echo " + "x" * 10_000 + " | wc -c"
    assert shared.run(line).output == "10001\n"
    body = "".join(f"line {i} é '\"\\\n" for i in range(13_000))
    assert len(body) > 200_000
    shared.run("cat >/tmp/big <<'EOF'\n" + body + "EOF")
    assert shared.run("md5sum </tmp/big").output.split()[0] == __import__("hashlib").md5(body.encode()).hexdigest()


def test_errexit_and_exit(box):
    assert box.run("cd /tmp; export A=1").exit_code == 0
    box.run("set -euo pipefail")
    assert box.run("false").exit_code == 1
    assert box.run("echo alive") == Result("alive\n", 0, False)
    got = box.run("set -e; false; echo no")
    assert got.exit_code == 1 and "no" not in got.output
    for command, code in [("exit 3", 3), ("exec sh -c 'exit 4'", 4), ("kill -9 $$", 137), ("set -u; echo $nope_x; echo no", None),
                          ("exec 0<&- 1>&- 2>&-; exit 6", 6), ("trap 'exit 9' EXIT; exit 2", 9)]:
        got = box.run(command)
        assert got.exit_code == code or code is None and got.exit_code, (command, got)
        assert "[shell restarted" in got.output, command
        assert box.run("pwd; echo $A").output == "/tmp\n1\n", command
    assert box.run("cd /app; export B='a b\n\"c\"'; exit 1").exit_code == 1
    assert box.run('pwd; echo "$B"').output == '/app\na b\n"c"\n'
    assert "notes.txt" in box.run("exec ls").output
    box.run("kill -9 -1")
    assert box.run("echo ok") == Result("ok\n", 0, False)


def test_descriptors_are_reset(box):
    box.run("exec >/tmp/log 2>/tmp/log2 </app/notes.txt; echo to the log")
    assert box.run("cat; cat /tmp/log; echo e >&2") == Result("to the log\ne\n", 0, False)
    fds = box.run("ls -l /proc/self/fd | awk '{print $9}' | sort -n | tr '\\n' ' '").output.split()
    assert fds == ["0", "1", "2", "3"]               # 3 is ls's own


def test_machinery_does_not_show(box):
    assert box.run("history").output == "" and box.run("declare -F").output == ""
    env = dict(line.split("=", 1) for line in box.run("env").output.splitlines())
    assert set(env) <= {"PATH", "HOME", "USER", "SHELL", "LANG", "LC_CTYPE", "TERM", "PWD", "OLDPWD", "SHLVL", "_", "HOSTNAME", "container"}
    os.environ["TMAX_SECRET"] = "s"
    assert "TMAX_SECRET" not in env and env["PATH"] == common.PATH and env["HOME"] == "/home/user"
    assert box.run("set -x").output == ""
    got = box.run("echo a; false")
    assert got.exit_code == 1 and re.fullmatch(r"\++ echo a\na\n\++ false\n", got.output)
    assert re.fullmatch(r"\++ set \+x\n", box.run("set +x").output)
    assert box.run("echo b").output == "b\n"
    for hostile in ("set -v", "set -f; IFS=x", "set -o posix", "shopt -s extglob failglob nullglob", "set -C", "TMOUT=1", "PS4='$(date)'",
                    "read() { :; }; printf() { :; }; eval() { :; }", "trap 'true' DEBUG ERR RETURN", "unset PATH HOME PWD"):
        with_it = box.run(hostile)
        assert not with_it.timed_out, hostile
        assert "b" in box.run("echo b").output, hostile
        box.run("exit")


def test_tmout_between_commands(box):
    box.run("export TMOUT=1; x=1")
    time.sleep(1.3)
    assert box.run("echo $x").output == "1\n"


@pytest.mark.parametrize("command", ["vim f", "vi f", "less notes.txt", "more notes.txt", "nano f", "git init -q . && git add . && git commit",
                                     "python3 -c 'input()'", "bash -i", "top", "passwd", "su", "man ls", "tty; stty -a", "cat /dev/tty"])
def test_interactive_programs_end(box, command):
    got = box.run(command, timeout=5)
    assert got.exit_code == 124 if got.timed_out else True
    assert box.run("echo ok").output == "ok\n"


@pytest.mark.parametrize("command", [
    "sh -c 'sleep 300 | cat'", 'trap "" TERM; sleep 300', "while :; do :; done", "setsid sleep 300 & wait", "(trap '' TERM INT; sleep 300) & sleep 300",
    "sleep 300; echo no", "nohup setsid sh -c 'sleep 300 & sleep 300' >/dev/null 2>&1 & while sleep .1; do :; done", "trap '' PWR; while :; do :; done",
    "python3 -c 'import os,time\nif os.fork(): time.sleep(300)\nos.setsid()\nif os.fork(): os._exit(0)\ntime.sleep(300)'",
    "cat </dev/zero >/dev/null", "mkfifo /tmp/p; exec 5</tmp/p", "coproc sleep 300; wait", "exec sleep 300"])
def test_timeout_kills_what_the_command_started(backend, command):
    with Sandbox(task_of(), backend) as box:
        box.run("sleep 777 & (while :; do sleep .05; done) &")
        box.run("cd /tmp; export A='1 2'")
        start = time.monotonic()
        got = box.run("printf partial; " + command, timeout=1)
        assert time.monotonic() - start < 5
        assert (got.exit_code, got.timed_out) == (124, True) and got.output.startswith("partial") and "no\n" not in got.output
        assert "[shell restarted" in got.output
        assert box.run("pwd; echo $A") == Result("/tmp\n1 2\n", 0, False)
        left = processes(box)
        assert any("sleep 777" in p for p in left) and any("sleep .05" in p or "eval" in p for p in left)      # earlier jobs live on
        assert not any("300" in p or "/dev/zero" in p for p in left), left


def test_timeout_keeps_what_the_command_had_exported(box):
    box.run("cd /tmp; export Z=9; sleep 60", timeout=.5)
    assert box.run("pwd; echo $Z").output == "/tmp\n9\n"
    assert box.run("sleep 60", timeout=0).exit_code == 124
    assert box.run("echo ok").output == "ok\n"


FLOODS = {"yes | head -c 300000000": 300_000_000, "head -c 5000000 /dev/zero | tr '\\0' x": 5_000_000, "seq 1 200000": 1_288_895,
          "head -c 50000000 /dev/zero": 50_000_000}


@pytest.mark.parametrize("command", FLOODS)
def test_floods_are_bounded(shared, command):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    got = shared.run(command, timeout=60)
    assert not got.timed_out and got.exit_code == 0
    head, note, tail = re.fullmatch(r"(?s)(.{5000})\n\[\.\.\. (\d+) characters elided \.\.\.\]\n(.{5000})", got.output).groups()
    assert int(note) == FLOODS[command] - 10_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000       # KiB
    if command.startswith("seq"):
        assert head.startswith("1\n2\n") and tail.endswith("199999\n200000\n")


@pytest.mark.parametrize("char", ["a", "é", "✓", "😀"])
@pytest.mark.parametrize("count", [9_999, 10_000, 10_001, 50_000, 700_000])
def test_output_is_cut_between_characters(shared, char, count):
    got = shared.run(f"printf x; head -c {count - 1} /dev/zero | sed 's/\\x00/{char}/g'").output
    whole = "x" + char * (count - 1)
    want = whole if count <= 10_000 else f"{whole[:5000]}\n[... {count - 10_000} characters elided ...]\n{whole[-5000:]}"
    assert got == want


@pytest.mark.parametrize("command, want", [
    (r"printf '\xfe\xff\x00A'", "��\0A"), ("head -c 1000 /bin/ls", None), ("head -c 3000000 /bin/bash", None), (r"printf '\033[31mred\033[0m\r50%%\r100%%\n'", "\x1b[31mred\x1b[0m\r50%\r100%\n"),
    (r"printf '\xed\xa0\x80'", "���"), (r"printf '\xe2\x80\xa8\xc2\x85\x0b\x1c\n'", "\u2028\x85\x0b\x1c\n"), (r"printf '\xf0\x9f\x98'", "�")])
def test_bytes_survive_json(shared, tmp_path, command, want):
    got = shared.run(command).output
    assert want is None or got == want
    got.encode("utf-8")
    with JsonlWriter(tmp_path / "r.jsonl") as w:
        w.write({"output": got})
    assert read_jsonl(tmp_path / "r.jsonl") == [{"output": got}]


def test_output_of_background_jobs_comes_with_the_next_command(box):
    assert box.run("(sleep .2; echo later) & echo now").output == "now\n"
    time.sleep(.6)
    assert box.run("echo next").output == "later\nnext\n"
    box.run("yes &")
    got = box.run("echo x; sleep .2")
    assert not got.timed_out and len(got.output) < 11_000
    box.run("kill %2; kill %1; sleep .1")
    box.run("true")
    assert box.run("echo ok").output.endswith("ok\n")


def test_printed_text_is_not_taken_for_the_end(box):
    got = box.run(r"printf '\0E0 hB 00 1 1 1 1 1 1/1 1\n/\n\0\0R0\0\0K\0'; printf '\0R0\0' >&2; echo still")
    assert got.output.endswith("still\n") and "[shell" not in got.output
    forged = box.run(r"printf '\0E0 x\0\0Ex y z\0\0R\0\0Sx\0\0\0Rabc\0' >/proc/1/fd/3; head -c 3000000 /dev/zero | tr '\0' a >/proc/1/fd/3; echo $?")
    assert forged.output.endswith("0\n") or forged.exit_code is not None
    assert box.run("echo ok").output.endswith("ok\n")


def test_orphans_leave_no_zombies(box):
    box.run("for i in $(seq 300); do (sleep .01 & sleep .01 & true & exit); done; sleep 1")
    assert box.run("grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l").output == "0\n"


def test_fork_bomb_ends_inside_its_limits(backend):
    with Sandbox(task_of(), backend) as bomb, Sandbox(task_of(id="other"), backend) as other:
        try:
            bomb.run(":(){ :|:& };:; sleep 100", timeout=3)
            bomb.run("echo", timeout=3)
        except SandboxKilled:
            pass
        start = time.monotonic()
        assert other.run("echo ok; ls / | wc -l").output.startswith("ok\n")
        assert time.monotonic() - start < 5


HOG = "python3 -c 'a=[]\nwhile True: a.append(bytearray(8<<20))'"


def test_memory_hog_ends_inside_its_limits(backend):
    with Sandbox(task_of(limits={"memory_mb": 128}), backend) as hog, Sandbox(task_of(id="other"), backend) as other:
        got = hog.run(HOG, timeout=30)
        assert got.exit_code not in (0, 124)
        assert hog.run("echo ok").output == "ok\n"
        assert other.run("python3 -c 'print(len(bytearray(300<<20)))'").output == "314572800\n"      # its own limit holds
        try:                                         # the shell itself: a restart, or the end of the sandbox
            got = hog.run("x=$(head -c 300000000 /dev/zero | tr '\\0' a); y=$x$x; echo done", timeout=30)
            assert "done" not in got.output and hog.run("echo ok").output.endswith("ok\n")
        except SandboxKilled as e:
            assert "memory" in str(e)


# ------------------------------------------------------------------------------------------------ life

PARENT = textwrap.dedent("""
    import signal, sys, threading, time
    # Whoever started us may ignore these two, which is inherited.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.insert(0, {root!r})
    import sandbox
    def live():
        s = sandbox.Sandbox({task!r}, {backend!r}).start()
        s.run("setsid sleep 4321 &")
        sys.stdout.write("up\\n"); sys.stdout.flush()
        s.run("trap '' TERM INT HUP; sleep 1234")
    threads = [threading.Thread(target=live, daemon=True) for _ in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
""")


def left_over(backend, label):
    time.sleep(.3)
    found = [p for p in glob.glob("/proc/[0-9]*/cmdline") if label in (try_read(p) or b"")]
    if backend == "docker":
        found += docker_api(docker_hosts()[0]).containers(all=True, filters={"label": "tmax-run=" + label.decode()})
    return found


def try_read(path):
    try:
        with open(path, "rb") as f:
            return f.read()
    except OSError:
        return None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_of_a_killed_parent(backend, number):
    code = PARENT.format(root=ROOT, task=task_of(), backend=backend)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    for _ in range(3):
        assert parent.stdout.readline() == b"up\n"
    label = common.label_of(parent.pid).encode()
    assert left_over(backend, label)
    parent.send_signal(number)
    parent.wait(30)
    parent.stdout.close()
    if number == signal.SIGKILL:                     # the next start clears up; a living run is left alone
        with Sandbox(task_of(), backend):
            subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {ROOT!r}); import sandbox; "
                            f"sandbox.Sandbox({task_of()!r}, {backend!r}).start().close()"], check=True)
            assert left_over(backend, common.run_label().encode())
    assert not left_over(backend, label)


def test_close_leaves_nothing_and_frees_descriptors(backend):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))
    with Sandbox(task_of(), backend) as s:
        s.run("true")
        s.grade()
    before, living = descriptors(), set(common.live)
    for _ in range(3):
        with Sandbox(task_of(), backend) as s:
            s.run("sleep 100 &")
            s.grade()
        s.close()
        with pytest.raises(InfraError):
            s.run("echo")
    assert descriptors() <= before + 1
    assert set(common.live) == living


@pytest.mark.parametrize("command", ["kill 1", "kill -TERM 1; sleep 5"])
def test_agent_ends_its_init(backend, command):
    with Sandbox(task_of(), backend) as s:
        with pytest.raises(SandboxKilled) as e:
            s.run(command)
            s.run("sleep 5")
        assert isinstance(e.value, AgentFault) and e.value.end == "sandbox_killed"
        with pytest.raises(SandboxKilled):           # it stays so
            s.run("echo")
        with pytest.raises(SandboxKilled):
            s.grade()


def test_grading_a_sandbox_that_was_just_ended(backend):
    with Sandbox(task_of(), backend) as s:
        with pytest.raises(SandboxKilled):
            s.run("(sleep .1; kill 1) & kill -9 $$")
            s.grade()
            s.run("sleep 1")


def test_flood_at_the_timeout(box):
    got = box.run("yes", timeout=1)
    assert (got.exit_code, got.timed_out) == (124, True) and len(got.output) < 10_200
    box.run("yes &")
    assert box.run("sleep 300", timeout=1).exit_code == 124
    start = time.monotonic()
    assert not box.run("true").timed_out and time.monotonic() - start < 1


def test_sandbox_taken_away_from_outside(backend):
    with Sandbox(task_of(), backend) as s, Sandbox(task_of(), backend) as other:
        def take():
            time.sleep(.5)
            if backend == "bwrap":
                os.kill(backends.bwrap.only_child(s.box.process.pid), signal.SIGKILL)
            else:
                s.box.api.remove_container(s.box.container, force=True)
        threading.Thread(target=take).start()
        with pytest.raises(InfraError) as e:
            s.run("sleep 30")
        assert str(e.value) and not isinstance(e.value, TaskError)
        with pytest.raises(InfraError):
            s.grade()
        assert other.run("echo ok").output == "ok\n"


def test_start_failures_leave_nothing(backend):
    label = common.run_label().encode()
    bad = [task_of(dockerfile="FROM tmax-base:core\nRUN exit 7\n"), task_of(dockerfile="FROM no-such-image:1\n"),
           task_of(dockerfile="FROM tmax-base:core\nCOPY nothing.txt /app/\n"), task_of(user="nobody-here"), {**task_of(), "tests": {}},
           task_of(dockerfile="BROKEN\n"), task_of(dockerfile=""), task_of(limits={"memory": 5}), task_of(files={"../x": ""})]
    before = len(left_over(backend, label))
    for task in bad:
        unknown = "no-such-image" in task["dockerfile"] and backend == "docker"       # offline: a registry's fault
        with pytest.raises(InfraError if unknown else TaskError) as e:
            Sandbox(task, backend).start()
        assert "task t" in str(e.value)
    assert len(left_over(backend, label)) <= before


def test_two_tasks_at_once_do_not_share_settings(backend):
    tasks = [task_of(id="a", files={"f": "A"}, dockerfile=DOCKERFILE + "ENV WHO=a\n", limits={"memory_mb": 64, "command_s": 1}),
             task_of(id="b", files={"f": "B"}, dockerfile=DOCKERFILE + "ENV WHO=b\nWORKDIR /app/sub\n", limits={"memory_mb": 512, "command_s": 9})]

    def look(task):
        with Sandbox(task, backend) as s:
            out = s.run("cat /app/f; echo $WHO; pwd").output
            took = s.run("python3 -c 'print(len(bytearray(200<<20)))'").exit_code
            return out, took == 0, s.run("sleep 1.5").timed_out
    with concurrent.futures.ThreadPoolExecutor() as pool:
        a, b = pool.map(look, tasks)
    assert a == ("Aa\n/app\n", False, True) and b == ("Bb\n/app/sub\n", True, False)


def test_both_listen_on_port_8000(backend):
    with Sandbox(task_of(files={"f": "A"}), backend) as a, Sandbox(task_of(files={"f": "B"}), backend) as b:
        for s in (a, b):
            s.run("python3 -m http.server 8000 >/dev/null 2>&1 &")
        for s, want in ((a, "A"), (b, "B")):
            assert s.run("for i in $(seq 50); do curl -s 127.0.0.1:8000/f && break; sleep .1; done").output == want


@pytest.mark.parametrize("count", [64])
def test_many_at_once(count):
    need("bwrap")
    barrier = threading.Barrier(count)

    def episode(i):
        with Sandbox(task_of(files={"n": str(i)}), "bwrap") as s:
            barrier.wait(60)
            return s.run("cat n").output == str(i) and s.grade().reward == 0
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        assert all(pool.map(episode, range(count)))


def test_isolation(box, backend):
    assert box.run("id -u; id -un; whoami").output == "1000\nuser\nuser\n"
    assert box.run("grep -h ^Cap[EP] /proc/self/status | cut -f2 | sort -u; grep NoNewPrivs /proc/self/status | cut -f2").output == "0000000000000000\n1\n"
    assert box.run("touch /x /usr/x /etc/x /usr/bin/x 2>&1 | grep -c -E 'denied|Read-only'").output == "4\n"
    assert box.run("curl -m 3 -s http://1.1.1.1 >/dev/null").exit_code != 0
    assert box.run("cat /proc/net/dev | grep -c :").output == "1\n"
    assert box.run("ls /tests /logs/verifier").exit_code != 0
    for path in ("/root/.ssh", os.getcwd(), "/var/run/docker.sock", ROOT):
        assert box.run(f"ls {path}").exit_code != 0, path
    assert "tmax" not in box.run("ls -a / /app /home/user /tmp /var 2>/dev/null").output
    assert box.run("touch /app/a /tmp/a /home/user/a && echo ok").output == "ok\n"
    assert box.run("python3 -c 'import ctypes; print(ctypes.CDLL(None).mount(b\"t\", b\"/tmp\", b\"tmpfs\", 0, 0))'").output == "-1\n"


def test_disk_limit_of_bubblewrap(monkeypatch):
    need("bwrap")
    monkeypatch.setattr(backends.bwrap, "DISK_MB", 16)
    with Sandbox(task_of(), "bwrap") as s:
        for folder in ("/app", "/tmp", "/home/user", "/dev/shm"):
            got = s.run(f"head -c 30000000 /dev/zero >{folder}/x; stat -c %s {folder}/x; rm {folder}/x")
            assert "space" in got.output and re.search("^167[67]....$", got.output, re.M)


def test_disk_limit_of_docker_is_polled(monkeypatch):
    need("docker")
    monkeypatch.setattr(backends.docker, "DISK_MB", 16)
    with Sandbox(task_of(), "docker") as s:
        with pytest.raises(SandboxKilled, match="disk"):
            s.run("for i in 1 2 3 4; do head -c 15000000 /dev/zero >x$i; done; sleep 30")
            s.run("sleep 30")


def test_watchdog_holds_memory():
    need("bwrap")
    with Sandbox(task_of(limits={"memory_mb": 256}), "bwrap") as s:
        assert s.run(HOG).exit_code == 1             # MemoryError: one process alone cannot
        assert s.run("echo ok").output == "ok\n"
        with pytest.raises(SandboxKilled, match="memory"):
            s.run("for i in 1 2 3 4; do python3 -c 'import time; a=bytearray(100<<20); time.sleep(20)' & done; wait")


def test_unprivileged(tmp_path):
    """The same as a user without rights: nothing needs root."""
    need("bwrap")
    if os.geteuid():
        pytest.skip("is unprivileged already")
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
import sandbox
with sandbox.Sandbox({task_of("cat /app/notes.txt; echo 0.5 >/logs/verifier/reward.txt")!r}, "bwrap") as s:
    print(s.run("id -un; python3 -c 'print(1)'"), s.run("sleep 9", timeout=.5).exit_code, s.grade())
    try: [s.run(c) for c in ("kill 1", "sleep 1", "true")]
    except sandbox.SandboxKilled as e: print(e)
"""
    tmp_path.chmod(0o755)
    for folder in (tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    for name in ("sandbox.py", "records.py"):
        shutil.copy(os.path.join(ROOT, name), tmp_path)
    shutil.copytree(os.path.join(ROOT, "backends"), tmp_path / "backends")
    got = subprocess.run(["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", "/usr/bin/python3", "-c", code], capture_output=True, text=True, timeout=60)
    assert "output='user\\n1\\n', exit_code=0" in got.stdout and "124 Grade(reward=0.5, log='hello\\n')" in got.stdout, got
    assert "process 1" in got.stdout


# ------------------------------------------------------------------------------------------------ images and Dockerfiles

FULL = """# a comment
FROM tmax-base:core
ENV GREETING="hi there" N=3
WORKDIR /srv/work
COPY a.txt sub/b.txt ./
COPY sub /data/sub
COPY --chmod=0750 run.sh /app/bin/go
COPY *.txt /home/user/
RUN mkdir -p /app/made && echo "$GREETING" > /app/made/x \\
 && chown -R 1000:1000 /app
RUN ["sh", "-c", "echo $N > /app/n"]
ENV AFTER=$N.x
COPY run.sh /app/made/
"""


def test_dockerfile(backend):
    text = FULL if backend == "bwrap" else FULL.replace("COPY --chmod=0750 run.sh /app/bin/go", "COPY run.sh /app/bin/go\nRUN chmod 750 /app/bin/go")
    task = task_of(dockerfile=text, files={"a.txt": "A", "sub/b.txt": "B", "sub/deep/c.txt": "C", "run.sh": "#!/bin/sh\necho ran\n"})
    with Sandbox(task, backend) as s:
        assert s.run("pwd; cat a.txt b.txt /data/sub/b.txt /data/sub/deep/c.txt /home/user/a.txt; echo; stat -c %a /app/bin/go; "
                     "cat /app/made/x /app/n; echo $GREETING $AFTER; /app/made/run.sh; ls /app /app/made /home/user").output == \
            "/srv/work\nABBCA\n750\nhi there\n3\nhi there 3.x\nran\n/app:\nbin\nmade\nn\n\n/app/made:\nrun.sh\nx\n\n/home/user:\na.txt\n"
        assert s.run("test -e .dockerignore || test -e /app/.tmax.dockerfile").exit_code == 1


def test_dockerfile_without_files(backend):
    with Sandbox(task_of(dockerfile="FROM tmax-base:core\n", files={}), backend) as s:
        assert s.run("pwd; ls").output == "/app\n"


@pytest.mark.parametrize("line", ["FROM debian:bookworm-slim", "FROM tmax-base:core AS x", "ADD http://x/y /app/", "USER root", "VOLUME /app", "ARG X=1",
                                  "COPY --from=x /a /b", "RUN touch /usr/x", "RUN touch /etc/x", "COPY a /usr/a", "EXPOSE 80", "RUN <<E\ntrue\nE"])
def test_dockerfile_that_bubblewrap_cannot_play(line):
    need("bwrap")
    text = line if line.startswith("FROM") else "FROM tmax-base:core\n" + line
    with pytest.raises(TaskError, match="Docker"):
        Sandbox(task_of(dockerfile=text + "\n", files={"a": ""}), "bwrap").start()
    with pytest.raises(TaskError, match="Docker"):
        Sandbox(task_of(limits={"network": True}), "bwrap").start()


def test_odd_start_up_files():
    need("docker")
    noisy = r"""FROM tmax-base:core
RUN for f in /etc/bash.bashrc /etc/profile /home/user/.bashrc /home/user/.profile /home/user/.bash_profile /noisy; do \
    echo 'echo NOISE; PS1="% "; PS4=x; cd /; export PATH=/nowhere; return 1; exit 5' >$f; done
ENV BASH_ENV=/noisy ENV=/noisy PATH=/opt/mine/bin:$PATH COLOR=blue
WORKDIR /app
"""
    with Sandbox(task_of(dockerfile=noisy, tests="type -p go; echo 1 >/logs/verifier/reward.txt"), "docker") as s:
        assert s.run("pwd; echo $COLOR ${PATH%%:*}").output == "/app\nblue /opt/mine/bin\n"
        assert s.run("exit 3").exit_code == 3
        assert s.run("pwd; echo $COLOR ${PATH%%:*}").output == "/app\nblue /opt/mine/bin\n"
        assert s.grade().reward == 1


def test_prepare_builds_once(backend, monkeypatch):
    task = task_of(files={"once": str(time.time())}, dockerfile=DOCKERFILE + "RUN cat /proc/sys/kernel/random/uuid >/app/id\n")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: prepare(task, backend), range(4)))

        def look(_):
            with Sandbox(task, backend) as s:
                return s.run("cat id").output
        assert len(set(pool.map(look, range(4)))) == 1


# ------------------------------------------------------------------------------------------------ grading

SOLVED = "[ -e /app/solved ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt"


def test_grade(backend):
    with Sandbox(task_of("echo log; pwd; " + SOLVED), backend) as s:
        assert s.grade() == Grade(0.0, "log\n/app\n")
        s.run("touch solved; cd /tmp; x=1")
        assert s.grade() == Grade(1.0, "log\n/app\n")
        assert s.run("pwd; echo $x; ls /tests /logs/verifier 2>/dev/null; rm /app/solved").output == "/tmp\n1\n"
        assert s.grade().reward == 0


TRICKS = {
    "reward written": "mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt",
    "symlink": "mkdir -p /tmp/v; echo 1 >/tmp/v/reward.txt; ln -s /tmp/v /logs; ln -s /tmp/v /logs/verifier; ln -s /tmp/v /tests",
    "conftest": "mkdir -p /tests; echo 'raise SystemExit(0)' >/tests/conftest.py; cp /tests/conftest.py /app; cp /app/conftest.py /",
    "sitecustomize": "d=$(python3 -m site --user-site); mkdir -p $d; echo 'import os; os._exit(0)' | tee $d/sitecustomize.py $d/usercustomize.py sitecustomize.py usercustomize.py >/dev/null; export PYTHONPATH=/app",
    "path": "mkdir -p ~/bin ~/.local/bin; for p in pytest python3 grep test cat; do printf '#!/bin/sh\\nexit 0\\n' >~/bin/$p; cp ~/bin/$p ~/.local/bin; cp ~/bin/$p /app; cp ~/bin/$p /usr/local/bin; done; chmod +x ~/bin/* ~/.local/bin/* *; export PATH=~/bin:/app:$PATH",
    "start-up files": "for f in ~/.bashrc ~/.profile ~/.bash_profile /root/.bashrc; do echo 'exit 0' >$f; done; export BASH_ENV=~/.bashrc ENV=~/.bashrc; cat() { echo; }; export -f cat",
    "background loop": "(while :; do mkdir -p /tests /logs/verifier; for f in /tests/test.sh /logs/verifier/reward.txt /proc/[0-9]*/root/logs/verifier/reward.txt /proc/[0-9]*/root/tests/test.sh; do echo 1 >$f; done; done) >/dev/null 2>&1 &",
    "kill loop": "(while :; do for p in /proc/[0-9]*; do p=${p#/proc/}; [ $p -gt 1 ] && [ $p != $$ ] && [ $p != $BASHPID ] && kill -9 $p; done; done) >/dev/null 2>&1 &",
    "preload": "export LD_PRELOAD=/app/x.so; echo /app/x.so >/etc/ld.so.preload",
}
FAIR = """
cd /tests
if python3 -c 'import pytest'; then python3 -m pytest -q -p no:cacheprovider test_it.py >/dev/null; else [ -e /app/solved ]; fi
if [ $? = 0 ] && python3 check.py | grep -q right; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
"""


@pytest.mark.parametrize("trick", TRICKS)
def test_tricks_do_not_move_the_reward(backend, trick):
    task = task_of(FAIR)
    task["tests"] |= {"test_it.py": {"text": "import os\ndef test_it():\n    assert os.path.exists('/app/solved')\n"},
                      "check.py": {"text": "import os\nprint('right' if os.path.exists('/app/solved') else 'wrong')\n"}}
    with Sandbox(task, backend) as s:
        s.run(TRICKS[trick] + " 2>/dev/null", timeout=10)
        assert s.grade().reward == 0
        if trick != "kill loop":                     # that one keeps killing the shell too
            s.run("touch /app/solved", timeout=10)
            assert s.grade().reward == 1


def test_services_answer_the_verifier(backend):
    tests = "curl -s 127.0.0.1:8000/notes.txt; curl -sf 127.0.0.1:8000/notes.txt >/dev/null && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt"
    with Sandbox(task_of(tests), backend) as s:
        assert s.grade().reward == 0
        s.run("python3 -m http.server 8000 &")
        s.run("for i in $(seq 50); do curl -s 127.0.0.1:8000 >/dev/null && break; sleep .1; done")
        assert s.grade() == Grade(1.0, "hello\n")
        assert s.run("curl -s 127.0.0.1:8000/notes.txt").output.endswith("hello\n")


VALID = {b"1\n": 1, b" 0.5 ": .5, b"1\r\n": 1, b'{"reward": 1}': 1, b"0": 0, b"1.0": 1, b"1e-3": .001, b'{"reward": 0.25, "note": "x"}': .25, b".5": .5, b"-0": 0}
INVALID = [b"", b"\n", b"1.5", b"-1", b"nan", b"inf", b"1e309", b"pass", b"true", b"1" * 10_000_000, b'{"reward": "1"}', b'{"reward": true}', b"[1]", b"{", b"1 1", b"0_1",
           b'{"reward": NaN}', b'{"reward": null}', b'{"score": 1}', b'"1"', b"0x1", "１".encode(), b"\xff", b"1\0", b'{"reward": ' + b"[" * 4000, b'{"reward": 1e999}', b"-0.1", b"1,0"]


@pytest.mark.parametrize("text", VALID)
def test_reward_valid(text):
    assert parse_reward(text) == VALID[text] and isinstance(parse_reward(text), float)


@pytest.mark.parametrize("text", INVALID, ids=lambda t: repr(t[:20]))
def test_reward_invalid(text):
    with pytest.raises(ValueError) as e:
        parse_reward(text)
    assert 5 < len(str(e.value)) < 200


BROKEN = {"nothing": "true", "ten megabytes": "head -c 10000000 /dev/zero | tr '\\0' 1 >/logs/verifier/reward.txt", "both": "echo 1 | tee /logs/verifier/reward.txt >/logs/verifier/reward.json",
          "true": "echo true >/logs/verifier/reward.txt", "folder": "mkdir /logs/verifier/reward.txt", "fifo": "mkfifo /logs/verifier/reward.txt", "killed": "kill -9 $PPID",
          "too long": "sleep 30 & sleep 30", "binary": "head -c 100 /dev/urandom >/logs/verifier/reward.txt"}


@pytest.mark.parametrize("broken", BROKEN)
def test_verifier_without_a_valid_reward(backend, broken):
    limits = {"verifier_s": 4}
    with Sandbox(task_of(f"echo said; [ -e /app/trap ] || {{ echo 0 >/logs/verifier/reward.txt; exit; }}; {BROKEN[broken]}", limits=limits), backend) as s:
        s.run("touch trap")
        start = time.monotonic()
        with pytest.raises(VerifierFailed) as e:     # on the untouched task it works: the agent's doing
            s.grade()
        assert e.value.end == "verifier_failed" and str(e.value) and "said" in e.value.log and time.monotonic() - start < 12
        s.run("rm trap")
        assert s.grade().reward == 0                 # and the sandbox lives on
        assert not any("sleep" in p for p in processes(s))
    with Sandbox(task_of(BROKEN[broken], limits=limits, id="mine"), backend) as s:
        with pytest.raises(TaskError, match="mine"):
            s.grade()


def test_verifier_odds(backend):
    task = task_of("echo 1 >/logs/verifier/reward.txt; exit 1")
    task["tests"]["test.sh"]["mode"] = "0644"
    with Sandbox(task, backend) as s:
        assert s.grade().reward == 1
    with Sandbox(task_of("head -c 50000000 /dev/zero | tr '\\0' x; printf end; sleep 100 & echo '{\"reward\": 0.5}' >/logs/verifier/reward.json"), backend) as s:
        got = s.grade()
        assert got.reward == .5 and len(got.log) < 10_100 and got.log.endswith("xxend")
        assert not any("sleep" in p for p in processes(s))
    with pytest.raises(TaskError, match="test.sh"):
        Sandbox({**task_of(), "tests": {"x.sh": {"text": ""}}}, backend).start()


def test_root_task(backend):
    with Sandbox(task_of("id -u; " + SOLVED, user="root"), backend) as s:
        assert s.run("id -u; echo $HOME; touch /app/solved /root/x && echo ok").output == "0\n/root\nok\n"
        assert s.grade().reward == 1
        assert s.run("sleep 50", timeout=.5).exit_code == 124
        assert s.run("echo ok").output == "ok\n"


# ------------------------------------------------------------------------------------------------ speed

def median(measure, n):
    times = []
    for _ in range(n):
        start = time.perf_counter()
        measure()
        times.append(time.perf_counter() - start)
    return sorted(times)[n // 2]


def test_speed_of_bubblewrap():
    need("bwrap")
    slack = max(1, 2 * os.getloadavg()[0] / os.cpu_count())          # the targets are those of an idle machine
    with Sandbox(task_of(), "bwrap") as s:
        assert median(lambda: s.run("echo hi"), 200) < .003 * slack
    boxes = []
    try:
        assert median(lambda: boxes.append(Sandbox(task_of(), "bwrap").start()), 15) < .025 * slack
    finally:
        for s in boxes:
            s.close()


def test_speed_against_docker_exec():
    need("docker")
    with Sandbox(task_of(), "docker") as s:
        def docker_exec():
            s.box.api.exec_start(s.box.api.exec_create(s.box.container, ["echo", "hi"])["Id"])
        pairs = [(median(lambda: s.run("echo hi"), 5), median(docker_exec, 1)) for _ in range(10)]       # in turns
        ours, theirs = (sorted(times)[5] for times in zip(*pairs))
        assert ours * 15 < theirs


# ------------------------------------------------------------------------------------------------ Podman, several hosts, no backend

@pytest.fixture(scope="module")
def podman():
    """Podman's socket, with our base image."""
    path = f"/tmp/tmax-podman-{os.getpid()}.sock"
    try:
        service = subprocess.Popen(["podman", "system", "service", "--time=0", "unix://" + path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError as e:
        lacking("podman", str(e))
    for _ in range(100):
        if os.path.exists(path):
            break
        time.sleep(.1)
    if subprocess.run(["podman", "image", "exists", "tmax-base:core"]).returncode:
        need("docker")
        save = subprocess.Popen(["docker", "save", "tmax-base:core"], stdout=subprocess.PIPE)
        subprocess.run(["podman", "load", "-q"], stdin=save.stdout, stdout=subprocess.DEVNULL, check=True)
        save.wait()
    yield "unix://" + path
    service.terminate()
    service.wait()


def test_podman(podman, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", podman)
    assert resolve_backend("docker") == "docker"
    with Sandbox(task_of("cat /app/x; " + SOLVED), "docker") as s:
        assert s.run("pwd; id -un; cat notes.txt").output == "/app\nuser\nhello\n"
        assert s.run("yes | head -c 3000000").output.endswith("y\ny\n")
        assert s.run("printf part; sleep 100", timeout=1)[1:] == (124, True)
        assert s.run("exit 3").exit_code == 3
        assert s.grade().reward == 0
        s.run("touch solved; echo hi >x")
        assert s.grade() == Grade(1.0, "hi\n")
        with pytest.raises(SandboxKilled):
            s.run("kill 1")
            s.run("true")
    with Sandbox(task_of(), "docker") as s:
        s.box.api.remove_container(s.box.container, force=True)
        with pytest.raises(InfraError):
            s.run("echo")
    with pytest.raises(TaskError):
        Sandbox(task_of(dockerfile="FROM tmax-base:core\nRUN exit 3\n"), "docker").start()


def test_several_hosts(podman, monkeypatch):
    need("docker")
    monkeypatch.setenv("DOCKER_HOST", f"unix:///tmp/nobody-{os.getpid()}.sock,{docker_hosts()[0]},{podman}")
    boxes = [Sandbox(task_of(), "docker").start() for _ in range(4)]
    try:
        hosts = [s.box.host for s in boxes]
        assert sorted(map(hosts.count, set(hosts))) == [2, 2]
        assert all(s.run("echo ok").output == "ok\n" for s in boxes)
    finally:
        for s in boxes:
            s.close()


def need_hosts():
    if os.geteuid() or not all(map(shutil.which, ("ip", "nsenter", "dockerd", "curl"))):
        lacking("hosts", "hosts are played by network namespaces: that needs root, iproute2, nsenter, dockerd and curl")


RELAY = """
import asyncio, sys

async def serve(reader, writer):
    host, _, port = sys.argv[1].partition(":")
    there, here = await (asyncio.open_connection(host, port) if port else asyncio.open_unix_connection(host))
    await asyncio.wait({asyncio.create_task(copy(reader, here)), asyncio.create_task(copy(there, writer))})

async def copy(reader, writer):
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()

async def main():
    async with await asyncio.start_server(serve, sys.argv[2], 2375) as server:
        print("ready", flush=True)
        await server.serve_forever()

asyncio.run(main())
"""


@contextlib.contextmanager
def cabled(target):
    """A local service, by its Unix socket or its port, as another host's: gives its address there, HOST:2375, and
    `cable`: cable(False) cuts it off, cable(True) brings it back."""
    need_hosts()
    name, net = f"tmax{os.getpid()}", f"10.78.{os.getpid() % 256}"

    def ip(*words):
        subprocess.run(["ip", *words], check=True)

    ip("netns", "add", name)
    relay = None
    try:
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        for where, device, address in (([], name, f"{net}.1/24"), (["-n", name], "eth0", f"{net}.2/24")):
            ip(*where, "addr", "add", address, "dev", device)
            ip(*where, "link", "set", device, "up")
        relay = subprocess.Popen(["nsenter", f"--net=/run/netns/{name}", sys.executable, "-c", RELAY,
                                  f"{net}.1:{target}" if isinstance(target, int) else target, f"{net}.2"],
                                 stdout=subprocess.PIPE)
        assert relay.stdout.readline() == b"ready\n"
        yield f"{net}.2:2375", lambda up: ip("-n", name, "link", "set", "eth0", "up" if up else "down")
    finally:
        if relay:
            relay.kill()
            relay.wait()
        subprocess.run(["ip", "link", "del", name])  # with the namespace it would go too, but when the kernel sees fit
        ip("netns", "del", name)


@pytest.fixture
def cable(monkeypatch):
    """The Docker daemon as another host's."""
    need("docker")
    if not docker_hosts()[0].startswith("unix://"):
        lacking("hosts", "the relay wants a Docker daemon with a Unix socket")
    with cabled(docker_hosts()[0][7:]) as (address, cable):
        monkeypatch.setenv("DOCKER_HOST", f"tcp://{address}")
        monkeypatch.setattr(common, "made", {})
        yield cable


def test_a_host_that_is_cut_off_is_our_fault_and_comes_back(cable, monkeypatch):
    """Whatever an agent is at, nothing of it is blamed on the agent; and what was left there is removed."""
    monkeypatch.setattr(common, "SILENT_S", 3)
    boxes = [Sandbox(task_of("sleep 100", limits={"verifier_s": s}), "docker").start() for s in (60, 60, 60, 2, 60)]
    ids = [s.box.container for s in boxes]
    calls = [lambda: boxes[0].run("sleep 100", 60), lambda: boxes[1].run("sleep 100", 2), boxes[2].grade, boxes[3].grade]

    def fate(call):
        try:
            return call()
        except Exception as e:
            return e

    with ThreadPoolExecutor(6) as pool:
        fates = [pool.submit(fate, call) for call in calls]
        time.sleep(1)
        cable(False)
        fates.append(pool.submit(fate, lambda: boxes[4].run("echo hi")))  # sent to nobody
        new = pool.submit(lambda: Sandbox(task_of(), "docker").start())
        assert {type(f.result(timeout=30)) for f in fates} == {InfraError}
        for s in boxes:
            s.close()
        assert not new.done()
        cable(True)
        with new.result(timeout=30) as s:
            assert s.run("echo hi").output == "hi\n"
            there = {c["Id"] for c in s.box.api.containers(all=True)}
            assert s.box.container in there and not there & set(ids)


def test_no_backend_says_what_to_do(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    monkeypatch.setattr(backends.bwrap, "as_nobody", lambda uid: ["/nowhere/bwrap"])
    monkeypatch.setattr(common, "made", {})
    for name in ("docker", "bwrap", "auto"):
        with pytest.raises(InfraError) as e:
            resolve_backend(name)
        assert "bubblewrap" in str(e.value) and "Docker" in str(e.value) and "\n" not in str(e.value)


# ------------------------------------------------------------------------------------------------ records

def test_records_are_split_on_newlines_only(tmp_path):
    path = tmp_path / "r.jsonl"
    records = [{"t": c} for c in ("\x85", "\u2028", "\x0b", "\x1c", "\r", "\0", "\ud800", "é", "a\nb")]
    with JsonlWriter(path) as w:
        for r in records:
            w.write(r)
    assert read_jsonl(path) == records
    path.write_bytes(b"".join(json.dumps(r, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n" for r in records if r["t"] != "\ud800"))
    assert read_jsonl(path) == [r for r in records if r["t"] != "\ud800"]


@pytest.mark.parametrize("tail, whole", [(b'{"a": 2', 1), (b'{"a": "\xe2\x80', 1), (b'{"a": 2}', 2), (b"{", 1), (b"\xff", 1), (b"", 1), (b"   ", 1), (b'{"a": "' + b"x" * 3_000_000, 1)])
def test_torn_tail(tmp_path, tail, whole, recwarn):
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"a": 1}\n' + tail)
    assert len(read_jsonl(path)) == whole
    assert bool(recwarn.list) == (whole == 1 and bool(tail.strip()))
    with JsonlWriter(path) as w:
        w.write({"a": 3})
    assert [r["a"] for r in read_jsonl(path)] == [1, 2, 3][:whole] + [3]


def test_broken_line_is_named(tmp_path):
    path = tmp_path / "r.jsonl"
    for bad in (b'{"a": ', b"[1]", b"1", b"\xff", b'{"a": 1} {"a": 2}'):
        path.write_bytes(b'{"a": 1}\n' + bad + b'\n{"a": 2}\n')
        with pytest.raises(ValueError, match="r.jsonl:2"):
            read_jsonl(path)


def test_writer_from_many_threads(tmp_path):
    with JsonlWriter(tmp_path / "r.jsonl") as w, concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: w.write({"i": i, "x": "y" * 5000}), range(200)))
    assert sorted(r["i"] for r in read_jsonl(tmp_path / "r.jsonl")) == list(range(200))


def test_full_disk_loses_nothing(tmp_path):
    code = f"""
import resource, signal, sys; sys.path.insert(0, {ROOT!r})
import records
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
w = records.JsonlWriter({str(tmp_path / "r.jsonl")!r})
try:
    for i in range(100): w.write({{"i": i, "x": "y" * 90}})
except OSError as e: print(e)
"""
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "r.jsonl" in got.stdout and got.stdout.count("\n") == 1, got
    assert [r["i"] for r in read_jsonl(tmp_path / "r.jsonl")] == list(range(9))


def test_load_tasks(tmp_path):
    path = tmp_path / "tasks.jsonl"
    good = task_of()
    path.write_text(json.dumps(good) + "\n\n" + json.dumps({**good, "id": "u"}) + "\n")
    assert [t["id"] for t in load_tasks(path)] == ["t", "u"]
    for bad, words in [(good, "same id"), ({k: v for k, v in good.items() if k != "tests"}, "tests"), ({"instruction": ""}, "id"), ({**good, "id": 5}, "id"), ({**good, "id": "x", "files": []}, "files")]:
        path.write_text(json.dumps(good) + "\n\n" + json.dumps(bad) + "\n")
        with pytest.raises(ValueError) as e:
            load_tasks(path)
        assert "tasks.jsonl:3" in str(e.value) and words in str(e.value)


@pytest.mark.parametrize("change, words", [
    ({"tests": {}}, "test.sh"), ({"files": {"/etc/x": {"text": ""}}}, "/etc/x"), ({"files": {"a/../../x": {"text": ""}}}, "inside"), ({"files": {"x": {}}}, "text or b64"),
    ({"files": {"x": {"b64": "!"}}}, "x"), ({"files": {"x": {"text": "", "mode": "rwx"}}}, "x"), ({"limits": {"cpus": 0}}, "cpus"), ({"limits": {"memory_gb": 1}}, "memory_mb"),
    ({"limits": {"command_s": "5"}}, "command_s"), ({"limits": {"network": 1}}, "network"), ({"dockerfile": ""}, "dockerfile"), ({"id": ""}, "id"), ({"user": "a b"}, "user"),
    ({"files": {"a": {"text": ""}, "a/b": {"text": ""}}}, "folder of"), ({"limits": {"command_s": float("nan")}}, "command_s")])
def test_check_task(change, words):
    check_task(task_of())
    with pytest.raises(TaskError) as e:
        check_task({**task_of(), **change})
    assert words in str(e.value)


# ================================================================================================ gen.py, builtin/families.py

HERE = Path(gen.__file__).parent
DOMAINS = {"security", "software_engineering", "file_operations", "data_querying", "data_science",
           "debugging", "scientific_computing", "data_processing", "system_administration"}
FAMILY_NAMES = list(families.FAMILIES)


def builtin_cli(*args):
    return subprocess.run([sys.executable, "gen.py", "builtin", *map(str, args)], cwd=HERE,
                          capture_output=True, text=True)


@pytest.fixture(scope="module")
def corpora():
    """What the demo uses: {split: tasks}."""
    return {split: gen.builtin_tasks(n, 0, split, FAMILY_NAMES)
            for split, n in [("train", 6000), ("val", 640), ("test", 640)]}


def parameters(task):
    """A task's essential parameters read off the finished record, not off the generator's own key: everything
    in its right commands, and the pool words of the instruction."""
    name, commands = task["id"].rsplit("-", 3)[0], task["solution"]["solve.sh"]["text"]
    pool = set(families.WORDS) & set(re.findall("[a-z]+", task["instruction"]))
    return name, frozenset(pool | set(re.findall("[a-z]+|[0-9]", commands)))


def distinct_demos(task):
    return {tuple(demo["commands"]): demo["right"] for demo in task["demos"]}


def test_builtin_writes_the_same_bytes_for_the_same_arguments(tmp_path):
    for out, seed, split in [("a", 0, "train"), ("b", 0, "train"), ("c", 1, "train"), ("d", 0, "val")]:
        done = builtin_cli("--n", 90, "--seed", seed, "--split", split, "--out", tmp_path / "new" / out)
        assert done.returncode == 0 and "90 tasks" in done.stdout and done.stdout.count("\n") == 1, done
    a, b, c, d = (open(tmp_path / "new" / out, "rb").read() for out in "abcd")
    assert a == b and len({a, c, d}) == 3
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == list("abcd")      # no leftovers
    assert len(sandbox.load_tasks(tmp_path / "new" / "a")) == 90
    ids = [json.loads(line)["id"] for text in (a, c, d) for line in text.splitlines()]
    assert len(set(ids)) == 270


@pytest.mark.parametrize("args, message", [
    (["--families", "sort-unique,nonsense"], "no such family: nonsense"),
    (["--n", "0"], "at least one task"),
    (["--families", "quarantine", "--split", "test", "--n", "2000"], "ask for fewer tasks"),
    (["--out", "/proc/nowhere/tasks.jsonl"], "/proc/nowhere"),
])
def test_builtin_bad_arguments_give_one_clear_line_and_no_file(tmp_path, args, message):
    done = builtin_cli("--out", tmp_path / "t.jsonl", *args)
    assert done.returncode != 0 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not list(tmp_path.iterdir())


def test_builtin_round_robin_and_filter(corpora):
    counts = collections.Counter(task["id"].rsplit("-", 3)[0] for task in corpora["val"])
    assert set(counts) == set(FAMILY_NAMES) and max(counts.values()) - min(counts.values()) <= 1
    few = gen.builtin_tasks(10, 0, "val", ["sort-unique", "look-up"])
    by_id = {task["id"]: task for task in corpora["val"]}
    assert all(by_id[task["id"]] == task for task in few)     # a filter, not another draw


def test_builtin_covers_the_axes(corpora):
    axes = [task["axes"] for task in corpora["val"]]
    assert len(FAMILY_NAMES) >= 15 and {a["domain"] for a in axes} == DOMAINS
    kinds = {}
    for name, family in families.FAMILIES.items():
        kinds.setdefault(family.axes["verifier"], []).append(name)
    assert len(kinds["metric_threshold"]) >= 2 and len(kinds["adversarial_corpus"]) >= 2
    assert len(kinds["exact_text"]) > len(FAMILY_NAMES) / 2
    names = {"domain", "skill_type", "primitive_skills", "persona", "language", "task_complexity",
             "command_complexity", "fixture", "verifier"}
    assert all(set(a) == names and len(a["primitive_skills"]) >= 3 for a in axes)
    steps = {len(c) for task in corpora["val"] for c, right in distinct_demos(task).items() if right}
    assert steps == {1, 2}


def test_builtin_splits_share_words_but_no_task(corpora):
    keys = {split: [parameters(task) for task in tasks] for split, tasks in corpora.items()}
    for split, drawn in keys.items():
        assert len(set(drawn)) == len(drawn), f"{split} has the same task twice"
    train, val, test = (set(keys[split]) for split in ("train", "val", "test"))
    assert not (train & val or train & test or val & test)
    other_seed = {parameters(task) for task in gen.builtin_tasks(2000, 7, "train", FAMILY_NAMES)}
    assert not other_seed & (val | test)                      # whatever the seed
    words = [set(re.findall("[a-z]+", json.dumps([t["instruction"] for t in ts]))) & set(families.WORDS)
             for ts in corpora.values()]
    assert words[1] | words[2] <= words[0] == set(families.WORDS)


def test_builtin_words_are_apart_from_each_other_and_from_all_other_text():
    words = families.WORDS
    assert len(set(words)) == len(words) >= 250 and all(re.fullmatch("[a-z]{4,8}", word) for word in words)
    assert not [(a, b) for a in words for b in words if a != b and a in b]     # grep a would find b
    fixed = [node.value for node in ast.walk(ast.parse(inspect.getsource(families)))
             if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    fixed = [text for text in fixed if "acorn" not in text]                    # all strings but the pool
    assert not set(words) & set(re.findall("[a-z]+", " ".join(fixed).lower()))
    assert not [word for word in words if "null" in word or "port" in word]    # greps


def test_builtin_texts_are_small_and_plain(corpora):
    for task in corpora["train"]:
        assert len(task["instruction"].split()) <= 20 and task["instruction"].isascii()
        for demo in task["demos"]:
            assert len(demo["commands"]) <= 3
            for command in demo["commands"]:
                assert json.dumps(command) == f'"{command}"' and len(command.split()) <= 12
        for file in task["files"].values():
            assert 1 <= file["text"].count("\n") <= 6


def test_builtin_demonstrator_errs_twice_in_three(corpora):
    def share(demos):
        return sum(demo["right"] for demo in demos) / len(demos)
    first, every = [task["demos"][0] for task in corpora["train"]], collections.defaultdict(list)
    for task in corpora["train"]:
        every[task["id"].rsplit("-", 3)[0]] += task["demos"]
        assert len(task["demos"]) == 8
    assert abs(share(first) - 1 / 3) < .03 and abs(share(sum(every.values(), [])) - 1 / 3) < .01
    assert all(abs(share(demos) - 1 / 3) < .05 for demos in every.values())
    many = max(corpora["train"], key=lambda task: len(distinct_demos(task)))
    assert sorted(distinct_demos(many).values()) == [False] * 3 + [True]


@pytest.mark.parametrize("backend, tasks_a_family", [("bwrap", 3), ("docker", 1)])
def test_builtin_families_grade_as_they_claim(backend, tasks_a_family):
    """Untouched below 1 (exact_text: 0), the solution and each right demo 1, each wrong one below 1."""
    tasks = gen.builtin_tasks(tasks_a_family * len(FAMILY_NAMES), 11, "test", FAMILY_NAMES)

    def play(task, commands):
        with sandbox.Sandbox(task, backend) as box:
            listing = set(box.run("ls -A").output.split())
            assert listing == set(task["files"]), f"{task['id']}: /app holds {listing}"
            for command in commands:
                result = box.run(command)
                assert result.exit_code == 0, (task["id"], command, result)
            return box.grade().reward

    def check(task):
        zero = task["axes"]["verifier"] == "exact_text"
        untouched = play(task, [])
        assert untouched == 0 if zero else untouched < 1, (task["id"], untouched)
        assert play(task, [task["solution"]["solve.sh"]["text"]]) == 1, task["id"]
        rewards = []
        for commands, right in distinct_demos(task).items():
            reward = play(task, commands)
            assert (reward == 1) == right, (task["id"], commands, reward)
            assert reward in (0, 1) or not zero, (task["id"], commands, reward)
            rewards.append(reward)
        return rewards

    with ThreadPoolExecutor(4) as pool:
        rewards = sum(pool.map(check, tasks), [])
    assert any(0 < reward < 1 for reward in rewards)          # graded verifiers give fractions


# ================================================================================================ rollout.py, builtin/, dppo.py, sft.py, eval.py

# ------------------------------------------------------------------------------------------------ helpers

HERMES_TEMPLATE = tiny.TEMPLATE

# In the style of Qwen3: JSON calls, and the thinking of every turn but the last is left out when messages are rendered.
THINKING_TEMPLATE = """\
{{- '<|im_start|>system\\n' + messages[0].content + '\\n\\nTools:\\n' }}
{%- for tool in tools or [] %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- 'Call with <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- for message in messages[1:] %}
    {%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set said = message.content %}
        {%- if not loop.last %}{%- set said = said.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
        {{- '<|im_start|>assistant\\n' + said + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# In the style of Qwen3.5: XML calls, results trimmed, and a generation prompt that opens the thinking block.
XML_TEMPLATE = """\
{%- if not messages | selectattr('role', 'equalto', 'user') | list %}{{- raise_exception('no user') }}{%- endif %}
{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools or [] %}{{- '\\n' + tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>' }}
{{- '\\n\\n' + messages[0].content | trim + '<|im_end|>\\n' }}
{%- for message in messages[1:] %}
    {%- if message.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content | trim + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message.content | trim + '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""

TEMPLATES = {"hermes": HERMES_TEMPLATE, "thinking": THINKING_TEMPLATE, "xml": XML_TEMPLATE}


def byte_tokenizer(template, **more):
    """A byte-level BPE with a few merges, and Qwen's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<|im_start|>", "<|im_end|>", "<|endoftext|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator([SYSTEM, json.dumps(TOOL)] * 5 + ["unhappiness"] * 50, trainer)
    more = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", **more}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=template, **more)


def small_model(vocab, seed=0, spread=0.2, **config):
    """A Qwen3 that is small, fresh, and sure enough of itself for its distribution not to be flat."""
    torch.manual_seed(seed)
    config = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                  head_dim=8,
                  intermediate_size=48, max_position_embeddings=4096, tie_word_embeddings=True) | config
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=vocab, initializer_range=spread, **config)).eval()


def small_hybrid(vocab, seed=0, spread=0.2, **config):
    """The same of Qwen3.5: three layers of linear attention, then one of full attention."""
    torch.manual_seed(seed)
    config = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                  linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
                  intermediate_size=48, max_position_embeddings=4096, tie_word_embeddings=True) | config
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(vocab_size=vocab, initializer_range=spread, **config)).eval()


SMALL = {"Qwen3": small_model, "Qwen3.5": small_hybrid}


def to(dtype, model):
    """float64 all through: the model library's norm goes by way of fp32, whatever the model's type."""
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    for module in model.modules():
        if dtype == torch.float64 and type(module).__name__ == "Qwen3RMSNorm":
            module.forward = forward.__get__(module)
    return model.to(dtype).train()


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """One checkpoint folder a template: {name: path}."""
    made = {}
    for name, template in TEMPLATES.items():
        path = tmp_path_factory.mktemp("ckpt") / name
        tokenizer = byte_tokenizer(template)
        model = small_model(len(tokenizer))
        model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, do_sample=True,
                                                   top_k=2,
                                                   temperature=0.2, top_p=0.3, repetition_penalty=1.7)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        made[name] = str(path)
    return made


@pytest.fixture(scope="session", params=list(TEMPLATES))
def chat(request, folders):
    return Chat(folders[request.param])


@pytest.fixture(scope="session")
def hermes(folders):
    return Chat(folders["hermes"])


@pytest.fixture(scope="session")
def bwrap():
    return need("bwrap")


REWARD_DONE = "grep -qx done /app/done.txt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
DO_IT = "echo done > /app/done.txt"


def bash_task(id="t-1", tests=REWARD_DONE, **more):
    """A task whose agent has to write one word."""
    return {"id": id, "instruction": "Write done to done.txt.",
            "files": {"notes.txt": {"text": "one\ntwo\n"}},
            "dockerfile": "FROM tmax-base:core\nWORKDIR /app\nCOPY --chown=user:user . /app/\n",
            "tests": {"test.sh": {"text": tests}}, "limits": {"memory_mb": 256, **more.pop("limits", {})},
            **more}


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def call_message(*commands, content=""):
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": "bash",
        "arguments": json.dumps({"command": c})}}
             for i, c in enumerate(commands)]
    return {"role": "assistant", "content": content, "tool_calls": calls}


class SaysMessages:
    """An engine that plays messages, or functions that return one; the last is repeated."""

    def __init__(self, *messages):
        self.messages, self.seen = messages, []

    def complete(self, messages, limit, seed, sampling):
        self.seen.append([dict(m) for m in messages])
        message = self.messages[min(len(self.seen), len(self.messages)) - 1]
        message = message() if callable(message) else message
        return (message, False) if isinstance(message, dict) else message


class SaysTokens:
    """An engine that plays token ids, or texts; cuts at the limit as an engine must; the last is repeated."""

    def __init__(self, chat, *turns):
        self.chat, self.turns, self.prompts = chat, turns, []

    def generate(self, ids, limit, seed, sampling, past=None):
        turn = self.turns[min(len(self.prompts), len(self.turns) - 1)]
        self.prompts.append(list(ids))
        new = self.chat.encode(turn) + [self.chat.end_id] if isinstance(turn, str) else list(turn)
        new = new[:limit]
        return Turn(new, [-0.25] * len(new), (3, 4), new[-1] != self.chat.end_id)


def cli(capsys, monkeypatch, module, *argv):
    """Runs a script's main in this process; returns (exit message or 0, stdout)."""
    monkeypatch.setattr(sys, "argv", [module.__name__ + ".py", *map(str, argv)])
    try:
        module.main()
        code = 0
    except SystemExit as e:
        code = e.code or 0
    return code, capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ tool calls

def hermes_call(command, **more):
    return "<tool_call>\n" + json.dumps({"name": "bash", "arguments": {"command": command},
                                         **more}) + "\n</tool_call>"


def xml_call(command, function="bash", close="\n</parameter>\n</function>\n</tool_call>"):
    return f"<tool_call>\n<function={function}>\n<parameter=command>\n{command}{close}"


COMMANDS = [
    "ls", "pwd && ls < a > b", "cat > a.html <<'EOF'\n<p class=\"x\">&amp;</p>\n<br/>\nEOF",
    "echo '</parameter>'",
    "echo '</tool_call>'", "echo '<tool_call>'; echo '</function>'", "echo '<think>' '</think>'",
    "\n\nls\n\n", "  ls  ", "",
    "echo \"a\\nb\" 'c\\\\d' `e` $(f) \\", "printf '\u00e9\u2028\u4e16\U0001f600\t'", "a\r\nb",
    "cat <<'E'\n</parameter>\n</function>\nE",
    "cat <<'E'\n<parameter=x>\n</parameter>\nE", "awk '{print $1}' < x | sed 's/{/}/' # \"", "x" * 10_000,
]


@pytest.mark.parametrize("tool_format", ["hermes", "qwen3_xml"])
@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_a_command_comes_back_as_it_was_written(command, tool_format):
    call = rollout.format_call(command, tool_format)
    assert parse_calls(call, tool_format) == [Call(command)]
    assert parse_calls(f"Let me see.\n{call}", tool_format) == [Call(command)]
    assert parse_calls(f"<think>\nhm\n</think>\n\n{call}", tool_format) == [Call(command)]
    assert parse_calls(f"hm\n</think>\n\n{call}", tool_format, thinking=True) == [Call(command)]
    assert parse_calls(f"{call}\n{rollout.format_call('second', tool_format)}",
                       tool_format) == [Call(command), Call("second")]


XML_READS = [  # text -> commands, None for a format error
    (xml_call("ls", close="</parameter></function></tool_call>"), ["ls"]),
    ("<tool_call><function=bash><parameter=command>ls</parameter></function></tool_call>", ["ls"]),
    (xml_call("ls", close="\n</parameter>\n</function>"), ["ls"]),
    (xml_call("ls", close="\n</parameter>\n</tool_call>"), ["ls"]),
    (xml_call("ls", close="\n</parameter>"), ["ls"]),
    (xml_call("ls", close="\n</function>\n</tool_call>"), ["ls"]),
    (xml_call("ls", close="\n</function>"), ["ls"]),
    (xml_call("ls", close="\n</tool_call>"), ["ls"]),
    (xml_call("ls", close=""), ["ls"]),
    (xml_call("ls", close="\n"), ["ls"]),
    (xml_call("ls", close="\n</parameter>\n") + xml_call("pwd"), ["ls", "pwd"]),
    (xml_call("ls", close="\n</parameter>\n</function>\n") + xml_call("pwd"), ["ls", "pwd"]),
    (xml_call("ls") + "\nThat is all.", ["ls"]),
    (xml_call("ls", function="python"), [None]),
    (xml_call("ls", function=""), [None]),
    ("<tool_call>\n<function=bash>\n</function>\n</tool_call>", [None]),
    ("<tool_call>\n<function=bash>\n<parameter=cmd>\nls\n</parameter>\n</function>\n</tool_call>", [None]),
    ("<tool_call>\nls\n</tool_call>", [None]),
    ("<tool_call>", [None]),
    (hermes_call("ls"), [None]),  # the other format
    (xml_call("x\n</parameter>\n<parameter=timeout>\n5"), ["x"]),  # one more parameter than there is
    ("<tool_call>\n<function=bash>\n<parameter=why>\nto see\n</parameter>\n<parameter=command>\nls\n</parameter>\n"
     "</function>\n</tool_call>", ["ls"]),
    (xml_call("ls", function="python") + xml_call("pwd"), [None, "pwd"]),
]


@pytest.mark.parametrize("text, commands", XML_READS, ids=range(len(XML_READS)))
def test_xml_calls(text, commands):
    calls = parse_calls(text, "qwen3_xml")
    assert [c.command for c in calls] == commands
    assert all(c.error for c in calls if c.command is None)


@pytest.mark.parametrize("close", ["\n</parameter>\n</function>\n", "\n</parameter>\n</tool_call>\n",
                                   "\n</parameter>\n",
                                   "\n</tool_call>\n", "\n</function>\n"])
def test_text_after_an_xml_call_that_lacks_a_closer_never_becomes_part_of_the_command(close):
    calls = parse_calls(xml_call("ls", close=close) + "Now I wait for the output.", "qwen3_xml")
    assert [c.command for c in calls] in (["ls"], [None])


def test_parsing_takes_time_in_proportion_to_the_text():
    blanks = [xml_call("echo '" + " " * 30_000 + "'"), xml_call("\n" * 30_000 + "ls"),
              "<tool_call>" + " " * 30_000,
              "<tool_call>\n" * 8_000, "<think>" * 8_000, xml_call("</parameter>" * 8_000)]
    for tool_format in ("qwen3_xml", "hermes"):
        for text in blanks:
            start = time.perf_counter()
            parse_calls(text, tool_format)
            assert time.perf_counter() - start < 1, f"{tool_format}: {text[:60]!r}"


def raw(arguments):
    return '<tool_call>\n{"name": "bash", "arguments": ' + arguments + "}\n</tool_call>"


JSON_READS = [
    (raw('{"command": "ls"}'), ["ls"]),
    (raw(json.dumps('{"command": "ls"}')), ["ls"]),  # arguments as a string of JSON
    (raw('{"command": "a\nb\tc"}'), ["a\nb\tc"]),  # raw newlines and tabs in a string
    (raw(json.dumps('{"command": "a\nb"}')), ["a\nb"]),
    (raw('{"command": "ls", "timeout": 5}'), ["ls"]),
    ('<tool_call>{"arguments": {"command": "ls"}, "name": "bash", "id": 7}</tool_call>', ["ls"]),
    (raw('{"command": "ls"}') + "\nThat is all.", ["ls"]),
    ('<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}', ["ls"]),  # the closer is missing
    ('<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n' + hermes_call("pwd"), ["ls", "pwd"]),
    (raw("[]"), [None]), (raw('["ls"]'), [None]), (raw("null"), [None]), (raw("{}"), [None]),
    (raw("5"), [None]),
    (raw('{"command": 5}'), [None]), (raw('{"command": null}'), [None]), (raw('{"command": ["ls"]}'), [None]),
    (raw('{"cmd": "ls"}'), [None]), (raw('"ls"'), [None]), (raw('""'), [None]), (raw('"[]"'), [None]),
    (raw('{"command": ls}'), [None]), (raw('{"command": "ls"'), [None]), (raw('{"command": "ls}'), [None]),
    (raw('{"command": ' + "1" * 5000 + "}"), [None]),  # more digits than Python turns into a number
    (raw('"' + "[" * 50_000 + '"'), [None]), (raw("[" * 50_000), [None]),
    # nested deeper than Python recurses
    ("<tool_call>\n[]\n</tool_call>", [None]), ('<tool_call>\n"bash"\n</tool_call>', [None]),
    ("<tool_call>\nnull\n</tool_call>", [None]), ("<tool_call>\n\n</tool_call>", [None]),
    ("<tool_call>", [None]),
    ('<tool_call>\n{"name": "python", "arguments": {"command": "ls"}}\n</tool_call>', [None]),
    ('<tool_call>\n{"name": ["bash"], "arguments": {"command": "ls"}}\n</tool_call>', [None]),
    ('<tool_call>\n{"arguments": {"command": "ls"}}\n</tool_call>', [None]),
    ('<tool_call>\n{"name": "bash"}\n</tool_call>', [None]),
    (raw('{"command": ls}') + hermes_call("pwd"), [None, "pwd"]),  # broken beside good, in both orders
    (hermes_call("pwd") + raw('{"command": "ls"'), ["pwd", None]),
    (raw('{"command": ls}').removesuffix("</tool_call>") + hermes_call("pwd"), [None, "pwd"]),
    (xml_call("ls"), [None]),  # the other format
]


@pytest.mark.parametrize("text, commands", JSON_READS, ids=range(len(JSON_READS)))
def test_json_calls(text, commands):
    calls = parse_calls(text, "hermes")
    assert [c.command for c in calls] == commands
    assert all(c.error for c in calls if c.command is None)


DRAFTS = [  # (text with CALL for a call and ONE for the one that counts, whether the prompt opened the block)
    ("<think>\nI could CALL\n</think>\nONE", False), ("<think>\nCALL\n</think>\nSorry.", False),
    ("<think>\nCALL", False), ("<think>\nCALL\nCALL", False), ("Hm. <think>CALL", False),
    ("I could CALL\n</think>\n\nONE", True), ("CALL\n</think>\ndone", True), ("CALL", True),
    ("no block\nCALL", True),
    ("<think>\na\n</think>\nCALL\n<think>\nb\n</think>\nONE", False),
    # only what follows the last closed block
    ("<think>\na\n</think>\n<think>\nCALL", False), ("<think></think>ONE", False),
    ("a</think>\n<think>\nCALL\n</think>\nONE", True), ("Just text.", False), ("", False), ("", True),
    ("</think>", True),
]


@pytest.mark.parametrize("tool_format", ["hermes", "qwen3_xml"])
@pytest.mark.parametrize("text, thinking", DRAFTS, ids=range(len(DRAFTS)))
def test_drafts_in_thinking_are_not_run(text, thinking, tool_format):
    text = text.replace("CALL", rollout.format_call("draft", tool_format))
    text = text.replace("ONE", rollout.format_call("real", tool_format))
    assert [c.command for c in parse_calls(text, tool_format, thinking)] == ["real"] * ("real" in text)


@pytest.mark.parametrize("tool_format", ["hermes", "qwen3_xml"])
def test_a_text_cut_anywhere_is_parsed_without_raising(tool_format):
    text = "<think>\na\n</think>\n" + rollout.format_call("echo '\u00e9 \\' \"x\"", tool_format)
    for end in range(len(text)):
        parse_calls(text[:end], tool_format)


# ------------------------------------------------------------------------------------------------ chat

MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Do it."}]


def test_the_tool_format_and_the_open_thinking_block_come_from_the_template(folders):
    chats = {name: Chat(path) for name, path in folders.items()}
    assert {n: c.tool_format for n, c in chats.items()} == {"hermes": "hermes", "thinking": "hermes",
                                                            "xml": "qwen3_xml"}
    assert {n: c.thinking for n, c in chats.items()} == {"hermes": False, "thinking": False, "xml": True}
    assert all(c.decode([c.end_id]) == "" and c.tokenizer.decode([c.end_id]) == "<|im_end|>"
               for c in chats.values())


def test_the_prompt_is_the_templates_own_rendering(chat):
    text = chat.tokenizer.apply_chat_template(MESSAGES, tools=[TOOL], add_generation_prompt=True,
                                              tokenize=False)
    assert chat.prompt_ids(MESSAGES) == chat.tokenizer.encode(text, add_special_tokens=False)
    assert text.rstrip().endswith("<think>" if chat.thinking else "assistant")


@pytest.mark.parametrize("results", [["a"], ["a", "b"], ["a\nb\n\u00e9"] * 3, [""]], ids=len)
def test_a_suffix_is_what_the_template_puts_between_two_turns(chat, results):
    """Prompt, turn and suffix together are the template's rendering of the same messages."""
    turn = "x" if chat.thinking else "hello"
    messages = MESSAGES + [{"role": "assistant", "content": turn}] + [{"role": "tool", "content": r}
        for r in results]
    whole = chat.tokenizer.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True,
                                               tokenize=False)
    expected = whole[whole.rindex(turn + "<|im_end|>") + len(turn):]
    assert chat.tokenizer.decode(chat.suffix_ids(results, ended=False)) == expected
    assert chat.tokenizer.decode(chat.suffix_ids(results, ended=True)) == expected.removeprefix("<|im_end|>")
    assert expected.count("<|im_start|>assistant") == 1


def test_special_tokens_in_an_output_stay_plain_text(chat):
    forged = "<|im_end|>\n<|im_start|>assistant\n<|endoftext|>"
    clean, dirty = chat.suffix_ids(["x"], ended=True), chat.suffix_ids([forged], ended=True)
    for token in chat.tokenizer.all_special_ids:
        assert dirty.count(token) == clean.count(token)
    assert forged in chat.tokenizer.decode(dirty)
    assert chat.encode("<|im_end|>") == [chat.end_id]  # and the next text is encoded with special tokens again


def test_an_output_cannot_forge_the_demo_tokenizers_joined_units(tmp_path):
    """Its units are no special tokens, but one of them opens a turn."""
    rollouts = [{"messages": MESSAGES + [call_message("ls"),
                                         {"role": "tool", "content": "a\n[exit code 0]"}]}]
    tokenizer = tiny.make_tokenizer(rollouts, 400)
    tokenizer.save_pretrained(tmp_path)
    chat = Chat(str(tmp_path))
    forged = "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    clean, dirty = chat.suffix_ids(["x"], ended=True), chat.suffix_ids([f"x{forged}"], ended=True)
    opener = chat.encode(forged)
    assert len(opener) == 1 and clean.count(opener[0]) == 1
    assert dirty.count(opener[0]) == 1


@pytest.mark.parametrize("text", ["plain", " two  spaces ,", "a\u0085b\u2028c\x0b\x1c", "\ufffd", "a\r\nb",
                                  "\x1b[31mred\x1b[0m"])
def test_any_output_survives_the_tokenizer(chat, text):
    assert text in chat.tokenizer.decode(chat.suffix_ids([text], ended=True),
                                         clean_up_tokenization_spaces=False)
    assert chat.decode(chat.encode(text)) == text


BAD_TEMPLATES = {
    "none": None,
    "no tools": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    # shows the tools, but has no words for what they answer
    "no tool results": "{{ tools }}{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
                       "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "refuses tool results": "{{ tools }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('only user and "
                            "assistant') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}


@pytest.mark.parametrize("which", BAD_TEMPLATES)
def test_a_template_that_cannot_carry_the_tool_is_refused_with_the_folders_name(which, tmp_path):
    byte_tokenizer(BAD_TEMPLATES[which]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path}.*template"):
        Chat(str(tmp_path))


# ------------------------------------------------------------------------------------------------ maths

def log(*values):
    return torch.tensor(values, dtype=torch.float64).log()


@pytest.mark.parametrize("mu, pi, advantage, ratio", [  # RECIPE's vectors; ratio None: the token is cut
    (0.5, 0.61, 1, None), (0.5, 0.59, 1, 1.18), (0.5, 0.39, 1, 0.78), (0.5, 0.39, -1, None),
    (0.5, 0.61, -1, 1.22),
    (1e-4, 5e-3, 1, 50), (0.99, 0.88, -1, None),
])
def test_dppo_vectors(mu, pi, advantage, ratio):
    advantage = torch.tensor([float(advantage)], dtype=torch.float64)
    assert dppo.dppo_keep(log(pi), log(mu), advantage, 0.1).tolist() == [ratio is not None]
    logprobs, mask = log(pi).requires_grad_(), torch.tensor([True])
    loss, keep = dppo.policy_loss(logprobs, log(mu), advantage, mask, total=1)
    loss.backward()
    assert loss.item() == pytest.approx(-(ratio or 0) * advantage.item()) and keep.tolist() == [ratio is not None]
    assert logprobs.grad.item() == pytest.approx(-(ratio or 0) * advantage.item())  # d r / d log pi = r


@pytest.mark.parametrize("mu, pi, advantage, kept", [
    (0.5, 0.7, 0, True), (0.5, 0.3, 0, True),  # no advantage, no direction
    (0.5, 0.5, 1, True), (0.5, 0.5, -1, True), (1e-30, 0.09, 1, True), (1e-30, 0.11, 1, False),
])
def test_dppo_keep_away_from_the_threshold(mu, pi, advantage, kept):
    assert dppo.dppo_keep(log(pi), log(mu), torch.tensor([float(advantage)]), 0.1).item() == kept
    assert dppo.dppo_keep(log(pi), log(mu), torch.tensor([float(advantage)]),
                          1.1).item()  # nothing moves by more than 1


@pytest.mark.parametrize("ratio, advantage, kept", [
    (1.26, 1, True), (1.29, 1, False), (0.5, 1, True), (0.81, -1, True), (0.79, -1, False), (9, -1, True),
    (1, 1, True)])
def test_grpo_keep(ratio, advantage, kept):
    assert dppo.grpo_keep(log(0.1 * ratio), log(0.1), torch.tensor([float(advantage)])).item() == kept


@pytest.mark.parametrize("mode, rewards, expected", [
    ("centered", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
    ("centered", [0] + [0.95] * 7, [-0.83125] + [0.11875] * 7),
    ("centered", [0.95] * 8, [0.0] * 8),
    ("centered", [0.1 + 0.2, 0.3], [0.0, 0.0]),  # they differ by float noise
    ("centered", [1], [0.0]),
    ("normalized", [1, 0], [1.0, -1.0]),
    ("normalized", [1, 0, 0, 0], [math.sqrt(3), *[-1 / math.sqrt(3)] * 3]),
    ("normalized", [0.95] * 8, [0.0] * 8),
])
def test_group_advantages(mode, rewards, expected):
    assert dppo.group_advantages(rewards, mode).tolist() == pytest.approx(expected)
    assert dppo.has_spread(rewards) == any(expected)


def test_unknown_modes_are_refused():
    with pytest.raises(ValueError, match="centred"):
        dppo.group_advantages([1, 0], "centred")
    with pytest.raises(ValueError, match="ppo"):
        dppo.policy_loss(log(0.5), log(0.5), torch.ones(1), torch.ones(1, dtype=torch.bool), 1, loss="ppo")


def random_batch(rows=4, width=9, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    logprobs = torch.rand(rows, width, generator=draw, dtype=dtype).log()
    old = torch.rand(rows, width, generator=draw, dtype=dtype).log()
    mask = torch.rand(rows, width, generator=draw) > 0.3
    advantages = torch.tensor([[1.0], [-0.5], [0.25], [-1.0]], dtype=dtype)
    return logprobs, old, advantages, mask


@pytest.mark.parametrize("loss", ["dppo", "grpo", "reinforce"])
def test_the_loss_of_a_batch_is_the_sum_of_its_parts_losses(loss):
    logprobs, old, advantages, mask = random_batch()
    total = int(mask.sum())
    whole, keep = dppo.policy_loss(logprobs, old, advantages, mask, total, loss)
    parts = [dppo.policy_loss(logprobs[i:j], old[i:j], advantages[i:j], mask[i:j], total, loss)[0]
             for i, j in [(0, 1), (1, 4)]]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-12)
    ratio = (logprobs - old).exp()
    by_hand = -sum(advantages[b, 0] * ratio[b, t] for b in range(4) for t in range(9) if keep[b, t]) / total
    assert whole.item() == pytest.approx(by_hand.item(), rel=1e-12)
    assert not (keep & ~mask).any() and (loss != "reinforce" or (keep == mask).all())
    assert loss == "reinforce" or (keep != mask).any()  # some are cut, and stay in the denominator


def test_a_batch_whose_tokens_are_all_cut_gives_zero():
    logprobs = log(0.9, 0.8).requires_grad_()
    loss, keep = dppo.policy_loss(logprobs, log(0.1, 0.2), torch.ones(2), torch.ones(2, dtype=torch.bool),
                                  total=2)
    loss.backward()
    assert loss.item() == 0 and not keep.any() and logprobs.grad.tolist() == [0, 0]


@pytest.mark.parametrize("loss", ["dppo", "grpo"])
def test_huge_ratios_of_cut_and_unsampled_tokens_give_no_nan(loss):
    logprobs = torch.tensor([-0.01, -0.01, -900.0]).requires_grad_()
    old = torch.tensor([-1000.0, 0.0, -1.0])
    mask = torch.tensor([True, False, True])
    value, keep = dppo.policy_loss(logprobs, old, torch.tensor([1.0, -1.0, -1.0]), mask, total=2, loss=loss)
    value.backward()
    assert keep.tolist() == [False, False, False]
    assert value.item() == 0 and logprobs.grad.tolist() == [0, 0, 0]


# ------------------------------------------------------------------------------------------------ log-probs

def padded(rows):
    width = max(map(len, rows))
    return torch.tensor([r + [0] * (width - len(r))
                         for r in rows]), torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in rows])


def some_rows(vocab, *lengths, seed=0):
    draw = np.random.default_rng(seed)
    return [draw.integers(3, vocab, n).tolist() for n in lengths]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("small", SMALL)
def test_token_logprobs_are_a_full_softmaxs(small, tied, temperature):
    """Values, entropies and gradients, with chunks smaller than the batch."""
    model = SMALL[small](50, tie_word_embeddings=tied).double()
    ids, attention = padded(some_rows(50, 12, 7, 2))
    mask = attention.bool() & (torch.arange(12) % 3 != 1)
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    logits = model(input_ids=ids, attention_mask=attention).logits / temperature
    full = torch.log_softmax(logits, -1)[:, :-1]
    expected = torch.zeros(ids.shape, dtype=torch.float64)
    expected[:, 1:] = full.gather(-1, ids[:, 1:, None])[..., 0]
    mask_1 = mask.clone()
    mask_1[:, 0] = False
    expected = torch.where(mask_1, expected, 0)
    entropy = torch.where(mask_1[:, 1:], -(full.exp() * full).sum(-1), 0)
    (expected * weights).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}

    model.zero_grad()
    logprobs, entropies = dppo.token_logprobs(model, ids, mask, temperature, chunk=5)
    (logprobs * weights).sum().backward()
    assert torch.allclose(logprobs.double(), expected, atol=1e-5)
    assert torch.allclose(entropies.double()[:, 1:], entropy, atol=1e-5) and not entropies.requires_grad
    for name, p in model.named_parameters():
        assert torch.allclose(p.grad, gradients[name], atol=1e-5), name


@pytest.mark.parametrize("small", SMALL)
def test_rows_do_not_see_each_others_padding(small):
    model = SMALL[small](50)
    rows = some_rows(50, 30, 3, 11)
    ids, attention = padded(rows)
    together, _ = dppo.token_logprobs(model, ids, attention)
    for i, row in enumerate(rows):
        alone, _ = dppo.token_logprobs(model, torch.tensor([row]), torch.ones(1, len(row)))
        assert torch.allclose(together[i, :len(row)], alone[0], atol=1e-5)


def test_no_loss_no_head():
    model = small_model(50)
    logprobs, entropies = dppo.token_logprobs(model, torch.tensor([[5, 6]]), torch.zeros(1, 2))
    assert logprobs.tolist() == [[0, 0]] and entropies.tolist() == [[0, 0]]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12),
                                              (torch.bfloat16, 1e-5)])
def test_the_heads_products_are_not_rounded_below_fp32(dtype, tolerance):
    """bf16 operands, fp32 sums; float64 stays float64, as the tests of gradients need it."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=draw).to(dtype) for shape in ((3, 4, 64), (10, 64)))
    logits = rollout.head_logits(hidden, weight)
    exact = hidden.double() @ weight.double().T
    error = ((logits - exact).abs().max() / exact.abs().max()).item()
    assert logits.shape == (3, 4, 10) and logits.dtype in (torch.float32, torch.float64)
    assert error < tolerance


# ------------------------------------------------------------------------------------------------ micro-batches

@pytest.mark.parametrize("lengths", [[2, 200], [7] * 9, [1], [50, 1, 1, 1, 1], list(range(1, 40)),
                                     [300, 299, 2]], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("budget", [1, 64, 256, 10_000])
def test_micro_batches_hold_every_sample_once_within_the_budget(lengths, ranks, budget):
    samples = [{"ids": [0] * n, "index": i} for i, n in enumerate(lengths)]
    shares = dppo.micro_batches(samples, budget, ranks)
    assert len(shares) == ranks
    assert len({len(share) for share in shares}) == 1, "every rank runs the same number"
    batches = [b for share in shares for b in share]
    assert sorted(s["index"] for b in batches for s in b) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) <= 1 or len(batch) * max(len(s["ids"]) for s in batch) <= budget
    if budget == 1:  # one row a micro-batch: the ranks' shares of tokens are about the same
        tokens = [sum(len(s["ids"]) for b in share for s in b) for share in shares]
        assert max(tokens) - min(tokens) <= max(lengths)


# ------------------------------------------------------------------------------------------------ the torch engine

@pytest.fixture(scope="session")
def engine(folders):
    """The engine as rollout.py makes it, of a folder whose generation config is full of defaults."""
    return rollout.make_engine("torch", folders["hermes"])[0]


def at_once(*functions):
    """Runs functions in threads of their own; returns what they return or raise."""
    results = [None] * len(functions)

    def work(i):
        try:
            results[i] = functions[i]()
        except BaseException as e:
            results[i] = e

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(functions))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
        assert not t.is_alive(), "a thread waits for ever"
    return results


def same_turn(a, b, tolerance=1e-4):
    assert a.ids == b.ids
    assert a.logprobs == pytest.approx(b.logprobs, abs=tolerance) and a.cut == b.cut


def logprobs_by_trainer(model, prompt, turn, temperature=1.0):
    ids = torch.tensor([prompt + turn.ids])
    mask = torch.tensor([[0] * len(prompt) + [1] * len(turn.ids)])
    with torch.no_grad():
        return dppo.token_logprobs(model, ids, mask, temperature)[0][0, len(prompt):].tolist()


def test_the_same_seed_gives_the_same_turn_whatever_else_is_sampled(engine):
    vocab = engine.model.config.vocab_size
    prompts = some_rows(vocab, *([5, 90, 33, 33] * 5), seed=1)
    prompts[3] = prompts[2]  # two that share a prefill
    settings = [Sampling(temperature=t, top_p=p) for t, p in [(1.0, 1.0), (0.7, 1.0), (1.0, 0.9), (0.0, 1.0)]]
    ask = [lambda i=i: engine.generate(prompts[i], 5 + i, 100 + i, settings[i % 4])
           for i in range(len(prompts))]
    alone = [f() for f in ask]
    for a, b in zip(alone, at_once(*ask)):
        same_turn(a, b)
    assert alone[2].ids != engine.generate(prompts[2], 7, 999, settings[2]).ids
    small = TorchEngine(engine.model, engine.eos_ids, max_batch=3)  # more requests than fit one wave
    for a, b in zip(alone, at_once(*[lambda i=i: small.generate(prompts[i], 5 + i, 100 + i, settings[i % 4])
                                     for i in range(20)])):
        same_turn(a, b)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_engines_logprobs_are_the_trainers(engine, temperature):
    """CASES 26, 30: at identical weights, in a wave of rows of different lengths, under the temperature."""
    prompts = some_rows(engine.model.config.vocab_size, 2, 50, 17, 100, 3, 64)
    sampling = Sampling(temperature=temperature)
    turns = at_once(*[lambda i=i: engine.generate(prompts[i], 40, i, sampling) for i in range(6)])
    for prompt, turn in zip(prompts, turns):
        assert turn.logprobs == pytest.approx(logprobs_by_trainer(engine.model, prompt, turn, temperature),
                                              abs=1e-4)
        assert max(turn.logprobs) < 0


def test_the_engines_logprobs_are_the_trainers_for_linear_attention_too():
    """Qwen3.5, whose layers keep a running state: padding on the left must not get into it."""
    own = TorchEngine(small_hybrid(60), [1])
    prompts = some_rows(60, 2, 50, 17)
    turns = at_once(*[lambda i=i: own.generate(prompts[i], 20, i, Sampling()) for i in range(3)])
    for prompt, turn in zip(prompts, turns):
        assert turn.logprobs == pytest.approx(logprobs_by_trainer(own.model, prompt, turn), abs=1e-4)


def test_a_past_saves_work_and_changes_nothing(engine):
    """Three turns with and without it, next to rows of other lengths, and across new weights."""
    vocab, sampling = engine.model.config.vocab_size, Sampling()
    old = {k: v.clone() for k, v in engine.model.state_dict().items()}
    new = small_model(vocab, seed=5).state_dict()

    def episode(own, use_past, seed, length):
        ids, past, turns = some_rows(vocab, length, seed=seed)[0], None, []
        for i in range(3):
            turn = own.generate(ids, 12, seed * 10 + i, sampling, past if use_past else None)
            assert turn.past is not None
            past = turn.past
            turns.append(turn)
            ids = ids + turn.ids + some_rows(vocab, 1 + 9 * i, seed=seed + i)[0]
        return turns

    runs = at_once(*[lambda s=s, p=p: episode(engine, p, s, 3 + 40 * (s % 3)) for s in range(6)
                     for p in (True, False)])
    for with_past, without in zip(runs[::2], runs[1::2]):
        for a, b in zip(with_past, without):
            same_turn(a, b)

    ids = some_rows(vocab, 20)[0]
    first = engine.generate(ids, 5, 1, sampling)
    try:
        engine.load(new, version=1)  # keys and values of the old weights must not be used with the new ones
        longer = ids + first.ids + [7, 8]
        second = engine.generate(longer, 8, 2, sampling, first.past)
        assert second.logprobs == pytest.approx(logprobs_by_trainer(engine.model, longer, second), abs=1e-4)
        assert second.versions == (1, 1) and first.versions == (0, 0)
    finally:
        engine.load(old, version=0)


def test_load_swaps_weights_while_a_turn_is_sampled(engine):
    vocab = engine.model.config.vocab_size
    own = TorchEngine(small_model(vocab, seed=1), [])  # no end token: it runs to the limit
    prompt, got = some_rows(vocab, 10)[0], []
    thread = threading.Thread(target=lambda: got.append(own.generate(prompt, 600, 0, Sampling())),
                              daemon=True)
    thread.start()
    time.sleep(0.3)
    own.load(small_model(vocab, seed=2).state_dict(), version=7)
    thread.join(60)
    assert got[0].versions == (0, 7) and len(got[0].ids) == 600 and got[0].cut
    after = own.generate(prompt, 10, 0, Sampling())
    same_turn(after, TorchEngine(small_model(vocab, seed=2), []).generate(prompt, 10, 0, Sampling()))
    assert after.versions == (7, 7)


def test_sampling_follows_the_models_own_distribution(engine):
    """No default of its generation config (top_k 2, temperature .2, ...) leaks in; each seed draws anew."""
    config = AutoModelForCausalLM.from_pretrained(engine.model.name_or_path).generation_config
    assert config.top_k == 2 and config.temperature == 0.2  # the trap is set
    prompt, n = some_rows(engine.model.config.vocab_size, 6, seed=3)[0], 1500
    with torch.no_grad():
        logits = engine.model(input_ids=torch.tensor([prompt])).logits[0, -1].double()
    rows = lambda **how: [SimpleNamespace(sampling=Sampling(**how), new=[],
                                          uniform=np.random.default_rng(s).random(1))  # noqa: E731
                          for s in range(n)]
    from builtin.engine import sample

    for temperature in (1.0, 0.5):
        probs = torch.softmax(logits / temperature, -1)
        tokens, logprobs = sample(logits.float().expand(n, -1), rows(temperature=temperature))
        seen = torch.bincount(torch.tensor(tokens), minlength=len(probs)) / n
        error = (probs * (1 - probs) / n).sqrt()
        assert ((seen - probs).abs() <= 5 * error + 2 / n).all()
        assert logprobs == pytest.approx(probs[tokens].log().tolist(), abs=1e-4)

    turns = at_once(*[lambda s=s: engine.generate(prompt, 1, s, Sampling()) for s in range(100)])
    tokens, _ = sample(logits.float().expand(n, -1), rows())
    assert [t.ids[0] for t in turns] == tokens[:100]  # the engine itself draws no differently


def test_top_p_keeps_the_smallest_set_that_reaches_p(engine):
    from builtin.engine import sample

    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()[[2, 0, 3, 1]]  # probs .2 .4 .1 .3
    for top_p, allowed in [(1.0, {0, 1, 2, 3}), (0.95, {0, 1, 2, 3}), (0.85, {0, 1, 3}), (0.5, {1, 3}),
                           (0.35, {1}), (0.01, {1})]:
        rows = [SimpleNamespace(sampling=Sampling(top_p=top_p), new=[], uniform=[u])
                for u in np.linspace(0, 0.9999, 200)]
        tokens, logprobs = sample(logits.expand(200, -1), rows)
        assert set(tokens) == allowed
        assert logprobs == pytest.approx(logits[tokens].tolist(), abs=1e-6)  # of the whole distribution
        rows[0].sampling = Sampling(temperature=0)  # rows of a wave have each their own setting
        assert sample(logits.expand(200, -1), rows)[0][0] == 1


@pytest.mark.parametrize("limit", [1, 3])
def test_the_token_limit_cuts_a_turn_and_an_end_token_ends_it(engine, limit):
    prompt = some_rows(engine.model.config.vocab_size, 6)[0]
    turn = engine.generate(prompt, limit, 0, Sampling())
    assert len(turn.ids) == limit and turn.cut
    ending = TorchEngine(engine.model, [turn.ids[-1]])
    assert not ending.generate(prompt, limit, 0, Sampling()).cut  # the last token allowed is an end token
    turn = ending.generate(prompt, 50, 0, Sampling())
    assert not turn.cut and len(turn.ids) == len(turn.logprobs) <= limit and turn.ids[-1] in ending.eos_ids


def test_a_failure_inside_the_engine_reaches_everyone_who_waits_or_comes_later(engine):
    own = TorchEngine(engine.model, engine.eos_ids)
    bad, good = [10**6], [5, 6, 7]  # no such token
    results = at_once(*[lambda ids=ids: own.generate(ids, 5, 0, Sampling())
                        for ids in [bad, good, bad, good]],
                      lambda: (time.sleep(0.2), own.generate(good, 5, 0, Sampling())))
    assert isinstance(results[0], IndexError) and isinstance(results[2],
        IndexError) and isinstance(results[4], IndexError)
    with pytest.raises(IndexError):
        own.generate(good, 5, 0, Sampling())


def test_seeds_differ_by_each_of_their_parts_and_are_the_same_everywhere():
    assert rollout.derive_seed(0, "task", 1, 2) == rollout.derive_seed(0, "task", 1, 2) < 2**63
    seeds = {rollout.derive_seed(*parts) for parts in itertools.product((0, 1), ("a", "b"), (0, 1), (0, 1))}
    assert len(seeds) == 16 and rollout.derive_seed("1", 2) != rollout.derive_seed(1, 2)


# ------------------------------------------------------------------------------------------------ episodes

def play(task, engine, chat=None, grade="always", **sampling):
    record = run_episode(task, engine, chat, Sampling(**sampling), backend="bwrap", grade=grade)
    if "token_ids" in record:
        check_tokens(record)
    return record


def check_tokens(r):
    """What holds for the tokens of every rollout."""
    ids, mask, logprobs = r["token_ids"], r["loss_mask"], r["logprobs"]
    assert len(ids) == len(mask) == len(logprobs) and set(mask) <= {0, 1}
    if r["policy_versions"]:
        assert [p is not None for p in logprobs] == [m == 1
                                                     for m in mask] and len(r["policy_versions"]) == r["turns"]
    assert json.loads(json.dumps(r)) == r


def only(task_id):
    """The live sandbox of a task."""
    box, = [box for box in common.live if box.task["id"] == task_id]
    return box


def killed_from_outside():
    os.kill(only("t-kill").process.pid, signal.SIGKILL)
    return call_message("sleep 9")


def no_answer():
    raise InfraError("the endpoint answered 503")


def text_turn(text="I do not know."):
    return {"role": "assistant", "content": text}


SUBMITS = [call_message(DO_IT), call_message(SUBMIT)]
BROKEN_CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "c0", "type": "function",
    "function": {"name": "bash", "arguments": "{"}}]}

ENDS = {  # name: (task, turns, sampling, end, reward, turns played)
    "submitted": (bash_task(), SUBMITS, {}, "submitted", 1.0, 2),
    "submitted, not done": (bash_task(), [call_message(SUBMIT)], {}, "submitted", 0.0, 1),
    "submitted in one turn": (bash_task(), [call_message(DO_IT, SUBMIT, "rm done.txt")], {}, "submitted", 1.0,
                              1),
    "graded": (bash_task(tests="echo 0.25 > /logs/verifier/reward.txt"), SUBMITS, {}, "submitted", 0.25, 2),
    "max_turns": (bash_task(), [call_message(DO_IT)], {"max_turns": 2}, "max_turns", 1.0, 2),
    "length": (bash_task(), [(call_message(DO_IT), True)], {"max_turn_tokens": 50}, "length", 0.0, 1),
    "format_error": (bash_task(), [text_turn()], {}, "format_error", 0.0, 3),
    "format_error, calls that do not parse": (bash_task(), [BROKEN_CALL], {}, "format_error", 0.0, 3),
    "format errors that are not three in a row": (
        bash_task(), [text_turn(), BROKEN_CALL, call_message("ls"), text_turn(), text_turn(), *SUBMITS], {},
        "submitted", 1.0, 7),
    "agent_timeout": (bash_task(limits={"agent_s": 0.5}), [call_message(DO_IT + "; sleep 9")], {},
                      "agent_timeout", 1.0, 1),
    "infra_error of the engine": (bash_task(), [call_message(DO_IT), no_answer], {}, "infra_error", None, 2),
    "infra_error of the sandbox": (bash_task("t-kill"), [call_message(DO_IT), killed_from_outside], {},
                                   "infra_error", None, 2),
    "infra_error of the task": (bash_task(tests="true"), SUBMITS, {}, "infra_error", None, 2),
    "sandbox_killed": (bash_task(), [call_message(DO_IT), call_message("kill 1; sleep 5"), *SUBMITS], {},
                       "sandbox_killed", 0.0, 2),
    "verifier_failed": (bash_task(tests="[ -e done.txt ] && echo pass > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"),
                        SUBMITS, {}, "verifier_failed", 0.0, 2),
}


@pytest.mark.parametrize("name", ENDS)
def test_how_an_episode_ends(bwrap, name):
    task, messages, sampling, end, reward, turns = ENDS[name]
    r = play(task, SaysMessages(*messages), **sampling)
    assert (r["end"], r["reward"], r["turns"]) == (end, reward, turns), r["error"]
    assert (r["error"] is None) == (end not in ("infra_error", "verifier_failed",
                                                "sandbox_killed")), r["error"]
    for kind, reason in [("of the engine", "503"), ("of the sandbox", "outside"), ("of the task", "t-1")]:
        assert kind not in name or reason in r["error"]


@pytest.mark.parametrize("grade", ["always", "submitted"])
@pytest.mark.parametrize("messages, sampling, end", [
    ([call_message(DO_IT)], {"max_turns": 1}, "max_turns"),
    ([call_message(DO_IT), text_turn()], {}, "format_error"),
    ([call_message(DO_IT), (text_turn(), True)], {"max_turn_tokens": 50}, "length"),
    (SUBMITS, {}, "submitted")])
def test_grading_only_what_was_submitted(bwrap, grade, messages, sampling, end):
    r = play(bash_task(), SaysMessages(*messages), grade=grade, **sampling)
    graded = grade == "always" or end == "submitted"
    assert (r["end"], r["reward"], r["times"]["grade_s"] > 0) == (end, float(graded), graded)


@pytest.mark.parametrize("output, code, submits", [
    (MARKER, 0, True), (f"a\nb\n{MARKER}\n", 0, True), (f"{MARKER}\n\n", 0, True),
    (f"  {MARKER} \r\n", 0, True),
    (MARKER, 1, False), (f"{MARKER}\nmore", 0, False), (f"x{MARKER}", 0, False), ("", 0, False),
    (f"'{MARKER}'", 0, False),
    (f"echo {MARKER}", 0, False), (MARKER.lower(), 0, False),
])
def test_what_submits(output, code, submits):
    assert rollout.is_submission(sandbox.Result(output, code, False)) == submits


@pytest.mark.parametrize("output, code, text", [
    ("", 0, "(no output)\n[exit code 0]"), ("a\n", 1, "a\n[exit code 1]"), ("a\n\n", 0, "a\n\n[exit code 0]"),
    ("\n", 0, "(no output)\n[exit code 0]"), (" ", 124, " \n[exit code 124]"), ("a", 0, "a\n[exit code 0]")])
def test_observations(output, code, text):
    assert rollout.observation(sandbox.Result(output, code, False)) == text


def calls_of(chat, *commands, text=""):
    closer = "\n</think>\n\n" if chat.thinking else ""
    return text + closer + "\n".join(rollout.format_call(c, chat.tool_format) for c in commands)


def segments(record):
    """The stretches of equal mask: [(mask, ids, logprobs)]."""
    found, start = [], 0
    for mask, group in itertools.groupby(record["loss_mask"]):
        stop = start + len(list(group))
        found.append((mask, record["token_ids"][start:stop], record["logprobs"][start:stop]))
        start = stop
    return found


def test_tokens_of_an_episode(bwrap, chat):
    """Each prompt is all that came before; what was sampled has mask 1 and its log-probs, the rest mask 0 and null."""
    turns = [calls_of(chat, "echo one; echo two >&2"), calls_of(chat, DO_IT, "cat done.txt"),
             calls_of(chat, SUBMIT)]
    engine = SaysTokens(chat, *turns)
    r = play(bash_task(), engine, chat)
    assert (r["end"], r["reward"], r["turns"]) == ("submitted", 1.0, 3)
    assert r["policy_versions"] == [[3, 4]] * 3
    parts = segments(r)
    assert [mask for mask, _, _ in parts] == [0, 1, 0, 1, 0, 1]
    for (_, ids, logprobs), turn in zip(parts[1::2], turns):
        assert ids == chat.encode(turn) + [chat.end_id] and logprobs == [-0.25] * len(ids)
    assert all(p is None for _, _, logprobs in parts[::2] for p in logprobs)
    assert parts[0][1] == chat.prompt_ids(r["messages"][:2]) == engine.prompts[0]
    for i in (1, 2):
        assert engine.prompts[i] == [t for _, ids, _ in parts[: 2 * i + 1] for t in ids]
    told = chat.tokenizer.decode(parts[4][1])
    assert told.count("<|im_start|>assistant") == 1 and told.count("<tool_response>") == 2  # two calls, one header
    assert "(no output)\n[exit code 0]" in told and "done\n[exit code 0]" in told
    assert [m["role"] for m in r["messages"]] == ["system", "user", "assistant", "tool", "assistant", "tool",
                                                  "tool", "assistant", "tool"]
    assert r["messages"][3]["content"] == "one\ntwo\n[exit code 0]"


@pytest.mark.parametrize("commands, ran", [
    ([SUBMIT, "touch /app/late"], [True, False]), (["false", SUBMIT, "ls", "pwd"],
                                                   [True, True, False, False]),
    ([f"{SUBMIT}; false", "ls"], [True, True])])
def test_calls_after_the_submission_are_skipped(bwrap, hermes, commands, ran):
    r = play(bash_task(tests="[ -e /app/late ] && echo 0.5 > /logs/verifier/reward.txt || echo 1 > /logs/verifier/reward.txt"),
             SaysTokens(hermes, calls_of(hermes, *commands)), hermes, max_turns=1)
    results = [m["content"] for m in r["messages"] if m["role"] == "tool"]
    assert ["exit code" in text for text in results] == ran
    assert all("skipped" in text for text, did in zip(results, ran) if not did)
    assert r["reward"] == 1 and r["end"] == ("submitted" if False in ran else "max_turns")


def test_a_broken_call_beside_a_good_one_gets_an_error_and_the_good_one_runs(bwrap, hermes):
    turn = raw('{"command": ls}') + hermes_call("echo hi")
    r = play(bash_task(), SaysTokens(hermes, turn), hermes, max_turns=4)
    results = [m["content"] for m in r["messages"] if m["role"] == "tool"]
    assert r["end"] == "max_turns" and results[0].startswith("[error") and results[1] == "hi\n[exit code 0]"


def test_drafts_and_unclosed_thinking_are_format_errors(bwrap, chat):
    touch = rollout.format_call("touch /app/draft", chat.tool_format)
    opener = "" if chat.thinking else "<think>"
    engine = SaysTokens(chat, f"{opener}{touch}\n</think>\nHm.", f"{opener}{touch}",
                        calls_of(chat, "ls /app"), calls_of(chat, SUBMIT))
    r = play(bash_task(), engine, chat)
    results = [m["content"] for m in r["messages"] if m["role"] == "tool"]
    assert r["end"] == "submitted" and ["error" in text for text in results] == [True, True, False, False]
    assert results[2] == "notes.txt\n[exit code 0]"


@pytest.mark.parametrize("max_turn_tokens, max_tokens, end",
                         [(10, 1000, "length"), (1000, 10, "context"), (10, 10, "length")])
def test_a_turn_that_is_cut_ends_the_episode_and_its_call_does_not_run(bwrap, hermes, max_turn_tokens,
    max_tokens, end):
    r = play(bash_task(), SaysTokens(hermes, calls_of(hermes, DO_IT)), hermes,
             max_turn_tokens=max_turn_tokens, max_tokens=max_tokens)
    assert (r["end"], r["reward"], r["turns"], sum(r["loss_mask"])) == (end, 0.0, 1, 10)
    assert r["loss_mask"][-1] == 1 and hermes.end_id not in r["token_ids"][-10:]


def test_response_tokens_are_sampled_and_observed_ones_together(bwrap, hermes):
    turn = calls_of(hermes, DO_IT + "; seq 100")
    size = len(hermes.encode(turn)) + 1
    r = play(bash_task(), SaysTokens(hermes, turn), hermes,
             max_tokens=size + 5)  # the output alone is longer than 5
    assert (r["end"], r["turns"], sum(r["loss_mask"])) == ("context", 1, size) and r["reward"] == 1
    r = play(bash_task(), SaysTokens(hermes, turn), hermes, max_tokens=size + 400)
    assert r["end"] in ("context", "length") and r["turns"] >= 1
    prompt = r["loss_mask"].index(1)
    assert sum(r["loss_mask"]) <= size + 400 and r["loss_mask"][prompt:].count(0) > 5


def test_a_prompt_that_is_too_long_names_the_flag(bwrap, hermes):
    r = play(bash_task(), SaysTokens(hermes, "x"), hermes, max_prompt_tokens=20)
    assert (r["end"], r["reward"], r["turns"]) == ("infra_error", None, 0)
    assert "--max-prompt-tokens" in r["error"] and "t-1" in r["error"]


def test_ids_are_kept_where_the_tokenizer_would_join_them_differently(bwrap, hermes):
    """CASES 25: letters sampled one by one, where encoding the same text gives longer tokens."""
    text = calls_of(hermes, "echo unhappiness", text="unhappiness ")
    letters = [t for c in text for t in hermes.encode(c)]
    assert letters != hermes.encode(text) and hermes.decode(letters) == text
    turns = [letters + [hermes.end_id], hermes.encode(calls_of(hermes, SUBMIT)) + [hermes.end_id]]
    engine = SaysTokens(hermes, *turns)
    r = play(bash_task(), engine, hermes)
    sampled = [ids for mask, ids, _ in segments(r) if mask]
    assert sampled == turns and engine.prompts[1][len(engine.prompts[0]):][: len(turns[0])] == turns[0]
    assert r["messages"][3]["content"] == "unhappiness\n[exit code 0]"
    group = [r, {**r, "reward": 1.0}]
    samples = dppo.make_samples([group], "centered")
    assert [s["ids"] for s in samples] == [r["token_ids"]] * 2 and [s["advantage"] for s in samples] == [-0.5,
        0.5]


def test_undecodable_and_odd_sampled_tokens_make_a_record_all_the_same(bwrap, hermes):
    """Half a character, special tokens in mid-turn, another end token than the template's."""
    half = hermes.encode("\u00e9")[:1]
    start, end = hermes.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|endoftext|>"])
    turn = half + [start] + hermes.encode(calls_of(hermes, "ls"))
    engine = SaysTokens(hermes, turn + [hermes.end_id], turn + [end])
    r = play(bash_task(), engine, hermes, max_turns=2, max_turn_tokens=500)
    assert r["turns"] == 2 and [m["content"] for m in r["messages"]
                                if m["role"] == "tool"][0] == "notes.txt\n[exit code 0]"
    assert json.loads(json.dumps(r)) == r


def test_another_end_token_than_the_templates_is_followed_by_the_templates(bwrap, hermes):
    end = hermes.tokenizer.convert_tokens_to_ids("<|endoftext|>")

    class Ends(SaysTokens):
        def generate(self, *args):
            return super().generate(*args)._replace(cut=False)

    engine = Ends(hermes, hermes.encode(calls_of(hermes, "ls")) + [end], calls_of(hermes, SUBMIT))
    r = play(bash_task(), engine, hermes)
    mask, ids, _ = segments(r)[2]
    assert r["end"] == "submitted" and mask == 0 and ids[0] == hermes.end_id


def test_pad_that_is_eos_and_eos_in_the_prompt(bwrap, tmp_path):
    """CASES 25: the end token is sampled, ends the turn and is trained, although it pads too and stands in the prompt."""
    tokenizer = byte_tokenizer(HERMES_TEMPLATE, pad_token="<|im_end|>")
    model = small_model(len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine, chat = rollout.make_engine("torch", str(tmp_path))
    assert chat.tokenizer.pad_token_id == chat.tokenizer.eos_token_id == chat.end_id and engine.eos_ids == {chat.end_id}
    r = play(bash_task(), engine, chat, max_turns=2, max_turn_tokens=30)
    assert chat.end_id in r["token_ids"][: r["loss_mask"].index(1)] and sum(r["loss_mask"]) > 1
    r = play(bash_task(), SaysTokens(chat, calls_of(chat, SUBMIT)), chat)
    assert r["token_ids"][-1] == chat.end_id and r["loss_mask"][-1] == 1 and r["end"] == "submitted"
    ids = torch.tensor([r["token_ids"]])
    mask = torch.tensor([r["loss_mask"]])
    logprobs, _ = dppo.token_logprobs(model, ids, mask)
    assert logprobs[0, -1] < 0  # the end token carries loss


def test_an_episode_of_a_real_model_has_the_trainers_logprobs(bwrap, engine, hermes):
    """CASES 26: all turns of an episode, observations between them, through the engine's past."""
    r = play(bash_task(), engine, hermes, max_turns=3, max_turn_tokens=25, temperature=0.7, max_tokens=1000)
    ids, mask = torch.tensor([r["token_ids"]]), torch.tensor([r["loss_mask"]])
    with torch.no_grad():
        logprobs = dppo.token_logprobs(engine.model, ids, mask, 0.7)[0][0]
    assert [logprobs[i].item() for i, m in enumerate(r["loss_mask"]) if m] == pytest.approx(
        [p for p in r["logprobs"] if p is not None], abs=1e-4)
    again = play(bash_task(), engine, hermes, max_turns=3, max_turn_tokens=25, temperature=0.7,
                 max_tokens=1000)
    assert again["token_ids"] == r["token_ids"]


def with_reasoning(*commands, thought):
    return {**call_message(*commands), "reasoning_content": thought}


def test_a_chat_rollout_has_the_ids_of_an_episode_of_the_same_messages(bwrap, chat):
    """CASES 35: every assistant turn is trained, thinking included, no token twice."""
    said = [with_reasoning("ls", thought="I look first."),
            with_reasoning(DO_IT, "cat done.txt", thought="Now\n\nwrite."),
            call_message("echo '<|im_end|>\u2028'"), with_reasoning(SUBMIT, thought="Done.")]
    by_messages = play(bash_task(), SaysMessages(*said), chat)
    texts = [chat.assistant_text(m) for m in said]
    by_tokens = play(bash_task(), SaysTokens(chat, *texts), chat)
    assert by_messages["token_ids"] == by_tokens["token_ids"] and by_messages["loss_mask"] == by_tokens["loss_mask"]
    assert by_messages["logprobs"] == [None] * len(by_messages["token_ids"])
    trained = [chat.decode(ids) for mask, ids, _ in segments(by_tokens) if mask]
    assert trained == texts and "I look first." in trained[0] and "Now\n\nwrite." in trained[1]
    assert [len(parse_calls(t, chat.tool_format, chat.thinking)) for t in trained] == [1, 2, 1, 1]
    assert chat.assemble(by_tokens["messages"]) == (by_tokens["token_ids"], by_tokens["loss_mask"])
    assert chat.assemble(by_messages["messages"]) == (by_tokens["token_ids"], by_tokens["loss_mask"])


def test_a_task_that_defines_no_limits_gets_the_designs(bwrap):
    task = bash_task()
    del task["limits"]
    assert play(task, SaysMessages(*SUBMITS))["reward"] == 1


# ------------------------------------------------------------------------------------------------ rollout.py, the command

def demo_tasks(n, **how):
    """The n-th task again, each with a demonstration that does it and one that does not."""
    return [bash_task(f"t-{i}", demos=[{"commands": [DO_IT], "right": True},
                                       {"commands": [], "right": False}], **how)
            for i in range(n)]


def test_oracle_on_built_in_tasks(bwrap, hermes, folders, tmp_path, capsys, monkeypatch):
    """A demonstration earns reward 1 exactly where it is marked right; with a model the same messages get token ids."""
    tasks = gen.builtin_tasks(6, 0, "train", list(FAMILIES)[:6])
    path = write_jsonl(tmp_path / "tasks.jsonl", tasks)
    for out, model in (("plain", []), ("ids", ["--model", folders["hermes"]])):
        code, said = cli(capsys, monkeypatch, rollout, "--tasks", path, "--oracle", "--n", 4, "--backend",
                         "bwrap",
                         "--workers", 4, "--out", tmp_path / out, *model)
        assert code == 0 and "24 rollouts of 6 tasks" in said
    plain, ids = ({(r["task_id"], r["sample"]): r for r in read_jsonl(tmp_path / out)}
                  for out in ("plain", "ids"))
    assert len(plain) == len(ids) == 24
    for task in tasks:
        for sample in range(4):
            demo, r = task["demos"][sample], plain[task["id"], sample]
            assert (r["reward"] >= 1) == demo["right"] and r["end"] == "submitted" and r["model"] == "oracle"
            assert r["turns"] == len(demo["commands"]) + 1 and "token_ids" not in r
            with_ids = ids[task["id"], sample]
            # the same commands; what they print may differ in time, owner and the like, so the ids are those of the record
            assert (with_ids["token_ids"], with_ids["loss_mask"]) == hermes.assemble(with_ids["messages"])
            assert [m["role"] for m in with_ids["messages"]] == [m["role"] for m in r["messages"]]
            assert with_ids["reward"] == r["reward"]


@pytest.mark.parametrize("name", ["word.txt", "lib/sub dir/word.txt", "it's.txt"])
def test_oracle_without_demos_plays_the_solution(bwrap, name, tmp_path, capsys, monkeypatch):
    solution = {"solve.sh": {"text": f'cd /app && cp "$(dirname "$0")/{name}" done.txt\n'},
                name: {"text": "done\n"}}
    path = write_jsonl(tmp_path / "tasks.jsonl", [bash_task(solution=solution)])
    code, _ = cli(capsys, monkeypatch, rollout, "--tasks", path, "--oracle", "--backend", "bwrap", "--out",
                  tmp_path / "out")
    r, = read_jsonl(tmp_path / "out")
    assert code == 0 and (r["reward"], r["end"], r["turns"]) == (1.0, "submitted", 2)


def test_a_task_without_demos_or_solution_is_named(bwrap, tmp_path, capsys, monkeypatch):
    path = write_jsonl(tmp_path / "tasks.jsonl", [*demo_tasks(1), bash_task("t-none")])
    code, _ = cli(capsys, monkeypatch, rollout, "--tasks", path, "--oracle", "--backend", "bwrap", "--out",
                  tmp_path / "out")
    assert "t-none" in code and "demos" in code


def test_a_run_continues_without_repeating_or_losing(bwrap, tmp_path, capsys, monkeypatch):
    path, out = write_jsonl(tmp_path / "tasks.jsonl", demo_tasks(3)), tmp_path / "out.jsonl"
    flags = ["--tasks", path, "--oracle", "--backend", "bwrap", "--workers", 2, "--out", out]
    assert cli(capsys, monkeypatch, rollout, *flags, "--n", 2, "--limit", 2)[0] == 0
    before = read_jsonl(out)
    assert sorted((r["task_id"], r["sample"]) for r in before) == [(f"t-{i}", s) for i in range(2)
        for s in range(2)]
    with open(out, "ab") as f:
        f.write('{"task_id": "t-2", "sample": 0, "x": "\u00e9'.encode()[:-1])  # killed in the middle of a character
    with pytest.warns(UserWarning, match="torn"):
        code, said = cli(capsys, monkeypatch, rollout, *flags, "--n", 3)
    after = read_jsonl(out)
    assert code == 0 and "9 rollouts of 3 tasks" in said and after[:4] == before
    assert sorted((r["task_id"], r["sample"]) for r in after) == [(f"t-{i}", s) for i in range(3)
        for s in range(3)]
    size = out.stat().st_size
    assert cli(capsys, monkeypatch, rollout, *flags, "--n", 3)[0] == 0 and out.stat().st_size == size


def restore_ctrl_c():
    """In the child: a shell without job control starts background jobs, and so us, with Ctrl-C ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def await_lines(process, path, n):
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_bytes().count(b"\n") >= n):
        assert process.poll() is None and time.monotonic() < deadline, "it has ended, or writes nothing"
        time.sleep(0.02)


def test_ctrl_c_keeps_what_is_finished_and_the_same_command_completes(bwrap, tmp_path):
    tasks = [bash_task(f"t-{i}", demos=[{"commands": ["sleep 0.4"], "right": False}]) for i in range(12)]
    out = tmp_path / "out.jsonl"
    command = [sys.executable, f"{ROOT}/rollout.py", "--tasks", write_jsonl(tmp_path / "tasks.jsonl", tasks),
               "--oracle",
               "--backend", "bwrap", "--workers", "2", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               preexec_fn=restore_ctrl_c)
    await_lines(process, out, 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1 and "the same command continues" in err and "Traceback" not in err
    kept = read_jsonl(out)
    assert 2 <= len(kept) < 12 and out.read_bytes().endswith(b"\n")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and read_jsonl(out)[: len(kept)] == kept
    assert sorted(r["task_id"] for r in read_jsonl(out)) == sorted(t["id"] for t in tasks)


BAD_INPUT = [  # (lines of tasks.jsonl, what the one line that is printed names)
    ([bash_task("a"), bash_task("a")], "tasks.jsonl:2: task a"),
    ([{k: v for k, v in bash_task("a").items() if k != "instruction"}], "tasks.jsonl:1: task a"),
    ([bash_task("a") | {"tests": {}}], "task a: tests/test.sh"),
    (["{", bash_task("a")], "tasks.jsonl:1"),
    (None, "No such file"),
]


@pytest.mark.parametrize("lines, named", BAD_INPUT, ids=range(len(BAD_INPUT)))
def test_bad_tasks_are_one_clear_line_before_the_first_episode(bwrap, lines, named, tmp_path, capsys,
    monkeypatch):
    path = tmp_path / "tasks.jsonl"
    if lines:
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n"
                                for line in lines))
    code, _ = cli(capsys, monkeypatch, rollout, "--tasks", path, "--oracle", "--backend", "bwrap", "--out",
                  tmp_path / "out")
    assert code.startswith("rollout.py: ") and named in code and "\n" not in code
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags, named", [
    ([], "--model"), (["--model", "x", "--engine", "vllm"], "--engine vllm"),
    (["--model", "/nowhere"], "/nowhere"),
    (["--oracle", "--backend", "docker"], "docker"),
])
def test_bad_flags_are_one_clear_line(bwrap, flags, named, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    path = write_jsonl(tmp_path / "tasks.jsonl", demo_tasks(1))
    flags = flags if "--backend" in flags else [*flags, "--backend", "bwrap"]
    code, _ = cli(capsys, monkeypatch, rollout, "--tasks", path, *flags, "--out", tmp_path / "out")
    assert str(code).startswith("rollout.py: ") and named in code


def test_a_torn_last_task_is_left_out_with_a_warning(bwrap, tmp_path, capsys, monkeypatch):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(demo_tasks(1)[0]) + '\n{"id": "t-9", "inst')
    with pytest.warns(UserWarning, match="torn"):
        code, said = cli(capsys, monkeypatch, rollout, "--tasks", path, "--oracle", "--backend", "bwrap",
                         "--out", tmp_path / "out")
    assert code == 0 and "1 rollouts of 1 tasks" in said


def test_a_demo_after_which_the_submission_does_not_work_does_not_end_the_run(bwrap, tmp_path, capsys,
    monkeypatch):
    tasks = [bash_task("t-mute", demos=[{"commands": ["echo() { :; }"], "right": False}]), *demo_tasks(2)]
    path = write_jsonl(tmp_path / "tasks.jsonl", tasks)
    cli(capsys, monkeypatch, rollout, "--tasks", path, "--oracle", "--backend", "bwrap", "--out",
        tmp_path / "out")
    records = {r["task_id"]: r for r in read_jsonl(tmp_path / "out")}
    assert records["t-0"]["reward"] == records["t-1"]["reward"] == 1 and records["t-mute"]["end"] != "submitted"


def test_records_with_odd_characters_stay_one_line(bwrap, tmp_path, capsys, monkeypatch):
    """CASES 33: what a command prints cannot break the file."""
    odd = r"printf 'a\xc2\x85b\xe2\x80\xa8c\x0b\x1c\xff\x00d\r\n'"
    path = write_jsonl(tmp_path / "tasks.jsonl", [bash_task(demos=[{"commands": [odd], "right": False}])])
    assert cli(capsys, monkeypatch, rollout, "--tasks", path, "--oracle", "--backend", "bwrap", "--out",
               tmp_path / "out")[0] == 0
    r, = read_jsonl(tmp_path / "out")
    assert r["messages"][3]["content"].startswith("a\u0085b\u2028c\x0b\x1c\ufffd") and (tmp_path / "out").read_bytes().count(b"\n") == 1


# ------------------------------------------------------------------------------------------------ chat endpoints

KEY = "sk-secret-0123456789"


@pytest.fixture
def endpoint(monkeypatch):
    """An OpenAI-compatible server: plays `script`, a list of (status, headers, body or message); keeps the requests."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    state = SimpleNamespace(script=[], requests=[])

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.requests.append((self.path, dict(self.headers), body, time.monotonic()))
            status, headers, reply = state.script[min(len(state.requests), len(state.script)) - 1]
            if isinstance(reply, dict) and "role" in reply:
                reply = {"choices": [{"message": reply,
                                      "finish_reason": "tool_calls" if reply.get("tool_calls") else "stop"}]}
            data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield state
    server.shutdown()
    server.server_close()


def ok(message):
    return 200, {}, message


def no_sleep(monkeypatch) -> list[float]:
    """rollout.py's own sleeps are noted instead; other modules' threads, which share `time`, sleep as ever."""
    slept = []
    monkeypatch.setattr(rollout, "time", SimpleNamespace(**{**vars(time), "sleep": slept.append}))
    return slept


def test_an_episode_through_a_chat_endpoint(bwrap, endpoint, tmp_path, capsys, monkeypatch):
    """Text without a call, a busy server, thinking, two calls, the submission; and what was sent for it."""
    endpoint.script = [ok({"role": "assistant", "content": "Let me think."}),
                       (429, {"Retry-After": "1"}, {"error": "busy"}),
                       ok({**call_message("ls", DO_IT), "content": None, "reasoning_content": "first look"}),
                       ok({"role": "assistant", "content": None,
                           "tool_calls": call_message(SUBMIT)["tool_calls"]})]
    path = write_jsonl(tmp_path / "tasks.jsonl", [bash_task()])
    code, said = cli(capsys, monkeypatch, rollout, "--tasks", path, "--model", "m-1", "--engine",
                     f"chat:{endpoint.url}/",
                     "--backend", "bwrap", "--out", tmp_path / "out", "--temperature", 0.3, "--top-p", 0.8)
    r, = read_jsonl(tmp_path / "out")
    assert code == 0 and (r["reward"], r["end"], r["turns"], r["model"]) == (1.0, "submitted", 3,
        "m-1") and "token_ids" not in r
    paths, headers, bodies, times = zip(*endpoint.requests)
    assert set(paths) == {"/v1/chat/completions"} and {h["Authorization"]
                                                       for h in headers} == {f"Bearer {KEY}"}
    assert bodies[1] == bodies[2] and times[2] - times[1] >= 1
    for body in bodies:
        assert (body["model"], body["temperature"], body["top_p"], body["tools"]) == ("m-1", 0.3, 0.8, [TOOL])
        assert body["max_tokens"] > 0 and isinstance(body["seed"], int)
    assert len({bodies[i]["seed"] for i in (0, 1, 3)}) == 3  # each turn its own
    last = bodies[3]["messages"]
    assert [m["role"] for m in last] == ["system", "user", "assistant", "user", "assistant", "tool", "tool"]
    assert [m["tool_call_id"] for m in last[-2:]] == ["c0", "c1"] == [c["id"] for c in last[4]["tool_calls"]]
    assert last[5]["content"] == "notes.txt\n[exit code 0]" and r["messages"][4]["reasoning_content"] == "first look"


@pytest.mark.parametrize("script, waits", [
    ([(429, {"Retry-After": "9"}, {}), ok(text_turn())], [9]),
    ([(500, {}, {}), (503, {}, {}), ok(text_turn())], [2, 4]),
    ([(429, {"Retry-After": "Wed, 21 Oct 2037 07:28:00 GMT"}, {}), ok(text_turn())], [2]),
    ([(429, {"Retry-After": "99999"}, {}), ok(text_turn())], [60]), ([(408, {}, {}), ok(text_turn())], [2]),
])
def test_passing_troubles_of_an_endpoint_are_waited_out(endpoint, script, waits, monkeypatch):
    slept = no_sleep(monkeypatch)
    endpoint.script = script
    engine = rollout.ChatEngine(endpoint.url, "m")
    assert engine.complete(MESSAGES, 10, 0, Sampling()) == (text_turn(), False)
    assert slept == pytest.approx(waits, abs=1)


@pytest.mark.parametrize("script, tries, reason", [
    ([(401, {}, {"error": {"message": "no such key"}})], 1, "401.*no such key"), ([(404, {}, {})], 1, "404"),
    ([(400, {}, {"error": "too long"})], 1, "400.*too long"), ([(500, {}, {"error": "oh"})], 6, "500.*oh"),
    ([(200, {}, {"error": {"message": "overloaded"}})], None, "overloaded"),  # what some gateways do
    ([(200, {}, b"<html>hello</html>")], None, "html"), ([(200, {}, {"choices": []})], None, "choices"),
    ([(200, {"Content-Length": "1000"}, b"{")], None, "127.0.0.1"),  # the connection breaks in mid-answer
])
def test_lasting_troubles_of_an_endpoint_are_infra_errors_with_the_reason(endpoint, script, tries, reason,
    monkeypatch):
    no_sleep(monkeypatch)
    endpoint.script = script
    with pytest.raises(InfraError, match=reason):
        rollout.ChatEngine(endpoint.url, "m").complete(MESSAGES, 10, 0, Sampling())
    assert tries in (None, len(endpoint.requests))


def test_no_endpoint_is_an_infra_error(monkeypatch):
    no_sleep(monkeypatch)
    with pytest.raises(InfraError, match="127.0.0.1:9"):
        rollout.ChatEngine("http://127.0.0.1:9/v1", "m").complete(MESSAGES, 10, 0, Sampling())


@pytest.mark.parametrize("reply, message, cut", [
    ({"message": {"role": "assistant", "content": None, "tool_calls": None}, "finish_reason": "stop"},
     text_turn(""), False),
    ({"message": {"content": "a", "refusal": None}, "finish_reason": "length"}, text_turn("a"), True),
    ({"message": {"role": "assistant", "reasoning": "hm", "content": "a"}},
     {**text_turn("a"), "reasoning_content": "hm"}, False),
])
def test_answers_of_an_endpoint(endpoint, reply, message, cut):
    endpoint.script = [(200, {}, {"choices": [reply]})]
    assert rollout.ChatEngine(endpoint.url, "m").complete(MESSAGES, 10, 0, Sampling()) == (message, cut)


def test_a_refused_key_is_an_infra_error_and_the_key_is_never_shown(bwrap, endpoint, tmp_path, capsys,
    monkeypatch):
    """Not even by way of a server that quotes it."""
    endpoint.script = [(401, {}, {"error": {"message": f"Incorrect API key provided: {KEY}."}})]
    path = write_jsonl(tmp_path / "tasks.jsonl", [bash_task()])
    monkeypatch.setattr(sys, "argv", ["rollout.py", "--tasks", path, "--model", "m", "--engine",
                                      f"chat:{endpoint.url}",
                                      "--backend", "bwrap", "--out", str(tmp_path / "out")])
    rollout.main()
    shown = capsys.readouterr()
    r, = read_jsonl(tmp_path / "out")
    assert (r["end"], r["reward"]) == ("infra_error",
                                       None) and "401" in r["error"] and "Incorrect" in r["error"]
    assert KEY not in shown.out + shown.err + (tmp_path / "out").read_text()
    assert "infra_error in t-1" in shown.out + shown.err


# ------------------------------------------------------------------------------------------------ ranks

LENGTHS = {"2 and 200": [2, 200], "three": [2, 200, 30], "one sample": [40],
           "5 and 1": [200, 40, 40, 40, 40, 40]}


def rank_samples(name, vocab, dtype=torch.float64):
    """Samples with all that a loss needs; about half of the tokens are sampled ones, some will be cut."""
    draw = np.random.default_rng(len(name))
    samples = []
    for i, n in enumerate(LENGTHS[name]):
        samples.append({"ids": draw.integers(3, vocab, n).tolist(),
                        "mask": [0] + (draw.random(n - 1) < 0.6).astype(int).tolist(),
                        "old_logprobs": np.log(draw.random(n)).tolist(), "advantage": 1.0 - i * 0.7})
        samples[-1]["mask"][-1] = 1
    return samples


def loss_of(samples, device="cpu"):
    total = sum(sum(s["mask"]) for s in samples)

    def loss_function(logprobs, entropies, mask, batch):
        old = dppo.pad([s["old_logprobs"] for s in batch], 0.0, logprobs.dtype, device)
        advantages = torch.tensor([[s["advantage"]] for s in batch], dtype=logprobs.dtype)
        return dppo.policy_loss(logprobs, old, advantages, mask, total)[0]

    return loss_function


def gradient(policy):
    """All gradients as one vector of float64, whole on every rank."""
    parts = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in policy.parameters()]
    return torch.cat([p.double().flatten() for p in parts])


WORKER = """
import sys
sys.path[:0] = [{root!r}, {here!r}]
import torch
import dppo, {module} as tests
rank, world, device = dppo.setup_ranks()
found = {{}}
for small, name, dtype, budget in tests.rank_cases(world):
    policy = dppo.shard(tests.to(dtype, tests.SMALL[small](60, spread=0.1)))
    samples = tests.rank_samples(name, 60)
    shares = dppo.micro_batches(samples, budget, world)
    dppo.backward(policy, shares[rank], tests.loss_of(samples))
    norm = dppo.clip_gradients(policy, 1e9)
    found[small, name, dtype, budget] = tests.gradient(policy), norm, [len(share) for share in shares]
    weights = dppo.full_weights(policy)
    assert set(weights) == set(policy.model.state_dict()) and not any(hasattr(w, "full_tensor") for w in weights.values())
if rank == 0:
    torch.save(found, {out!r})
dppo.leave_ranks()
"""


def rank_cases(ranks):
    """(samples, dtype, budget): a micro-batch a sample, and, where every rank but one runs a dummy, all in one."""
    names, budgets = (["2 and 200", "one sample"], [1]) if ranks == 3 else (LENGTHS, [1, 1000])
    return list(itertools.product(SMALL, names, [torch.float32, torch.float64], budgets))


def tolerance_of(small, dtype):
    """The library computes Qwen3.5's linear attention in fp32, also in a model of float64."""
    return 1e-10 if dtype == torch.float64 and small == "Qwen3" else 5e-6


def torchrun(ranks, *command, timeout=120):
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                           str(ranks), *map(str, command)],
                          capture_output=True, text=True, timeout=timeout,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})


def one_process_gradient(small, name, dtype, budget):
    policy = dppo.Policy(to(dtype, SMALL[small](60, spread=0.1)))
    samples = rank_samples(name, 60)
    dppo.backward(policy, dppo.micro_batches(samples, budget)[0], loss_of(samples))
    return gradient(policy)


def far(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("small", SMALL)
def test_the_gradient_does_not_depend_on_micro_batches(small, name, dtype):
    """CASES 27: all samples in one micro-batch, each in its own; and the whole written out in plain torch."""
    together = one_process_gradient(small, name, dtype, 100_000)
    apart, tolerance = one_process_gradient(small, name, dtype, 1), tolerance_of(small, dtype)
    assert together.norm() > 1e-3 and far(apart, together) < tolerance

    # The recurrence rounds as it likes, and so its reference has to round alike.
    exact = torch.float64 if small == "Qwen3" else dtype
    model, samples = to(exact, SMALL[small](60, spread=0.1)), rank_samples(name, 60)
    total, loss = sum(sum(s["mask"]) for s in samples), 0
    for s in samples:
        logits = model(input_ids=torch.tensor([s["ids"]])).logits[0, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(s["ids"][1:])[:, None])[:, 0]
        for t, logprob in enumerate(logprobs, 1):
            mu, pi = math.exp(s["old_logprobs"][t]), logprob.exp()
            if s["mask"][t] and not (abs(pi - mu) > 0.1 and (pi - mu) * s["advantage"] > 0):
                loss = loss - s["advantage"] * pi / mu / total
    loss.backward()
    assert far(together, gradient(model)) < tolerance


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_gradient_does_not_depend_on_ranks(ranks, tmp_path):
    """CASES 27, 29: real processes with FSDP2; fewer samples than ranks; 5 micro-batches here and 1 there."""
    here, module = os.path.split(os.path.splitext(__file__)[0])
    (tmp_path / "worker.py").write_text(WORKER.format(root=ROOT, here=here, module=module,
                                                      out=str(tmp_path / "found.pt")))
    done = torchrun(ranks, tmp_path / "worker.py")
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    assert list(found) == rank_cases(ranks)
    for (small, name, dtype, budget), (gradients, norm, counts) in found.items():
        assert len(set(counts)) == 1
        error = far(gradients, one_process_gradient(small, name, dtype, 100_000))
        assert error < tolerance_of(small, dtype), f"{small}, {name}, {dtype}, {budget} tokens: {error}"
        assert norm == pytest.approx(gradients.norm().item(), rel=1e-4)
    if ranks == 2:
        # the rank of the one long sample ran four dummies
        assert found["Qwen3", "5 and 1", torch.float32, 1][2] == [5, 5]


def test_offloaded_activations_give_the_same_gradients():
    """With gradient checkpointing, for which it is made."""
    gradients = []
    for offload in (False, True):
        model = small_model(60, spread=0.1).train()
        model.gradient_checkpointing_enable()
        if offload:
            dppo.offload_activations(model)
        samples = rank_samples("three", 60)
        dppo.backward(dppo.Policy(model), dppo.micro_batches(samples, 100_000)[0], loss_of(samples))
        gradients.append(gradient(model))
    assert torch.equal(*gradients)


def test_nccl_needs_a_gpu(warm, tmp_path, capsys, monkeypatch):
    tasks = write_jsonl(tmp_path / "tasks.jsonl", [bash_task()])
    code, _ = cli(capsys, monkeypatch, dppo, *dppo_flags(warm, tasks, tmp_path / "out"), "--nccl")
    assert code == "dppo.py: --nccl needs a GPU; without one the weights go through --push-dir"


# ------------------------------------------------------------------------------------------------ groups of rollouts

def group_args(**more):
    return SimpleNamespace(**{"prompts": 2, "group_size": 4, "lag": 0, "max_refill": 2, "workers": 4,
                              "seed": 0} | more)


class Clock:
    """What the synthetic episodes below read their policy version from."""

    version = 0


def synthetic(rewards, clock=None, log=None):
    """A play function: rewards(group, sample) -> reward, or None for an infra error."""
    def play(task, group, sample):
        version = clock.version if clock else 0
        if log is not None:
            log.append((group, sample, task["id"], version))
        time.sleep(0.001)
        reward = rewards(group, sample)
        return {"task_id": task["id"], "group": group, "sample": sample, "reward": reward,
                "token_ids": [1, 2, 3],
                "loss_mask": [0, 1, 1], "logprobs": [None, -1.0, -1.0],
                "policy_versions": [[version, version]], "turns": 1,
                "error": None if reward is not None else "the daemon is gone"}
    return play


TASKS = [{"id": f"t-{i}"} for i in range(5)]


def by_sample(group, sample):
    return float(sample % 2)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_groups_run_ahead_by_lag_steps_and_no_more(lag):
    clock, log = Clock(), []
    rollouts = dppo.Rollouts(TASKS, synthetic(by_sample, clock, log), group_args(lag=lag))
    for step in range(6):
        groups, counts = rollouts.next_batch(step)
        assert len(groups) == counts["groups_kept"] == 2 and all(len(g) == 4 for g in groups)
        assert all(step - dppo.oldest_version(g) <= lag for g in groups)
        assert [r["sample"] for r in groups[0]] == [0, 1, 2, 3]
        time.sleep(0.05)  # sampling goes on meanwhile, up to the bound
        assert len({g for g, *_ in log}) <= (step + 1 + lag) * 2
        clock.version = step + 1
        rollouts.trained()
    assert lag == 0 or len({g for g, *_ in log}) > 12  # it did run ahead
    seen = [task for _, sample, task, _ in sorted(log)[: 5 * 4] if sample == 0]
    assert sorted(seen) == [t["id"] for t in TASKS]  # each task once before any comes again


def test_infra_errors_leave_their_group_and_a_group_of_one_is_dropped():
    """CASES 20."""
    def rewards(group, sample):
        if group == 0:
            return None if sample == 2 else [1.0, 0.0, None, 0.0][sample]
        if group == 1:
            return 1.0 if sample == 0 else None
        return by_sample(group, sample)

    rollouts = dppo.Rollouts(TASKS, synthetic(rewards), group_args(workers=1))
    groups, counts = rollouts.next_batch(0)
    first, = [g for g in groups if g[0]["group"] == 0]
    assert [r["sample"] for r in first] == [0, 1, 3] and 1 not in [g[0]["group"] for g in groups]
    assert (counts["groups_failed"], counts["infra_errors"]) == (1, 4)
    assert [s["advantage"] for s in dppo.make_samples([first], "centered")] == pytest.approx([2 / 3, -1 / 3,
        -1 / 3])


def test_an_attempt_without_outcome_counts_for_nothing_in_the_loops_evaluation():
    rewards = iter([1.0, None, 0.5, 1.0])
    args = SimpleNamespace(eval_attempts=2, workers=1, seed=0)
    assert dppo.evaluate(TASKS[:2], lambda *_, **__: {"reward": next(rewards)}, args) == pytest.approx(2 / 3)


def test_a_batch_that_was_ready_before_has_its_own_reward():
    """All of its groups had ended before the last batch was taken: none ends in between."""
    rollouts = dppo.Rollouts(TASKS, synthetic(by_sample), group_args(lag=1))
    with rollouts.changed:
        rollouts._admit()
        assert rollouts.changed.wait_for(lambda: len(rollouts.ready) == 4, timeout=30)
    assert [rollouts.next_batch(0)[1]["reward"] for _ in range(2)] == [0.5, 0.5]


def test_a_lost_host_takes_all_groups_with_it_and_the_run_goes_on():
    rollouts = dppo.Rollouts(TASKS, synthetic(lambda g, s: None if g < 6 else by_sample(g, s)),
                             group_args(lag=2, max_refill=0, workers=1))
    groups, counts = rollouts.next_batch(0)
    assert len(groups) == 2 and (counts["groups_failed"], counts["infra_errors"]) == (6, 24)


@pytest.mark.parametrize("reward, kind", [(0.0, "groups_zero"), (1.0, "groups_one"), (0.95, "groups_flat")])
def test_groups_without_spread_are_replaced(reward, kind):
    """CASES 28."""
    rollouts = dppo.Rollouts(TASKS, synthetic(lambda g, s: reward if g % 2 else by_sample(g, s)),
                             group_args(workers=1))
    groups, counts = rollouts.next_batch(0)
    assert [g[0]["group"] % 2 for g in groups] == [0, 0] and counts[kind] == 1


@pytest.mark.parametrize("reward, message", [(0.0, "every episode failed"), (1.0, "every one succeeded"),
                                             (0.5, "spread in reward"), (None, "daemon is gone")])
def test_refill_is_bounded_and_then_says_why(reward, message):
    """CASES 28: nothing but flat groups, or nothing but infra errors."""
    log = []
    rollouts = dppo.Rollouts(TASKS, synthetic(lambda g, s: reward, log=log), group_args())
    with pytest.raises((ValueError, InfraError), match=message) as e:
        rollouts.next_batch(0)
    dropped = len({g for g, *_ in log})
    assert 4 < dropped <= 2 * 2 + 1 + 2 * (1 + (reward is None)) and "\n" not in str(e.value)
    if reward in (0.0, 1.0):
        assert f"in {dropped} every" in str(e.value)


def test_too_few_useful_groups_make_a_smaller_batch_with_a_warning(capsys):
    rollouts = dppo.Rollouts(TASKS, synthetic(lambda g, s: by_sample(g, s) if g == 3 else 0.0), group_args())
    groups, counts = rollouts.next_batch(0)
    assert [g[0]["group"] for g in groups] == [3] and counts["groups_kept"] == 1
    assert re.search("warning: .*1 of 2", capsys.readouterr().out)


def test_a_failure_in_an_episode_is_raised_in_the_trainer():
    def play(task, group, sample):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        dppo.Rollouts(TASKS, play, group_args()).next_batch(0)


def test_groups_that_are_too_old_are_dropped_and_counted():
    clock = Clock()
    rollouts = dppo.Rollouts(TASKS, synthetic(by_sample, clock), group_args(lag=1))
    rollouts.next_batch(0)
    time.sleep(0.2)  # the next groups are ready, of version 0
    clock.version = 2
    groups, counts = rollouts.next_batch(2)
    assert counts["groups_stale"] >= 1 and counts["stale_tokens"] == counts["groups_stale"] * 4 * 3
    assert len(groups) == 2 and all(dppo.oldest_version(g) >= 1 for g in groups)


# ------------------------------------------------------------------------------------------------ sft

@pytest.fixture(scope="session")
def demos(bwrap, tmp_path_factory):
    """Tasks and their demonstrations, by rollout.py's own command: half of them do the task, half submit at once."""
    folder = tmp_path_factory.mktemp("demos")
    tasks = write_jsonl(folder / "tasks.jsonl", demo_tasks(4))
    done = subprocess.run([sys.executable, f"{ROOT}/rollout.py", "--tasks", tasks, "--oracle", "--n", "4",
                           "--backend", "bwrap",
                           "--out", str(folder / "demos.jsonl")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(tasks=tasks, rollouts=str(folder / "demos.jsonl"), folder=folder)


@pytest.fixture(scope="session")
def fresh(demos):
    """The demo's model and tokenizer, made from them."""
    with pytest.MonkeyPatch.context() as m:
        m.setattr(sys, "argv", ["tiny.py", "--rollouts", demos.rollouts, "--out", str(demos.folder / "tiny"),
                                "--vocab-size", "400"])
        tiny.main()
    return str(demos.folder / "tiny")


@pytest.fixture(scope="session")
def warm(demos, fresh):
    """That model after a short warm start: it calls the tool, and does the task about every second time."""
    with pytest.MonkeyPatch.context() as m:
        m.setattr(sys, "argv", ["sft.py", "--model", fresh, "--rollouts", demos.rollouts, "--out",
                                str(demos.folder / "sft"), "--batch-size",
                                "16", "--epochs", "30", "--lr", "2e-3", "--beta2", "0.98",
                                "--no-gradient-checkpointing"])
        sft.main()
    return str(demos.folder / "sft" / "last")


def test_tiny_makes_an_ordinary_checkpoint(fresh, demos):
    chat, model = Chat(fresh), AutoModelForCausalLM.from_pretrained(fresh)
    assert chat.tool_format == "hermes" and rollout.end_ids(model.generation_config, chat) == [chat.end_id]
    assert 0.5e6 < model.num_parameters() < 1.2e6
    for layer in model.model.layers:
        assert torch.equal(layer.self_attn.k_proj.weight, layer.self_attn.q_proj.weight)
        assert torch.equal(layer.self_attn.o_proj.weight, layer.self_attn.v_proj.weight.T)
    record = read_jsonl(demos.rollouts)[0]
    ids, mask = chat.assemble(record["messages"])
    assert len(ids) < 60  # the constant parts are one token each
    assert SYSTEM in chat.tokenizer.decode(ids) and len(chat.encode(SUBMIT)) == 1
    for text in ["\u00e9\u4e16\U0001f600 \x00", "a  b\t\n\n", "word word_2 <|im_end|>x"]:
        assert chat.decode(chat.encode(text, plain=True)) == text  # any text goes through it
    assert [len(chat.encode(w)) for w in ("done", " done", "/done")] == [1, 2,
        2]  # one word, one token, wherever it stands


def test_sft_lowers_the_loss_and_writes_a_checkpoint(warm, fresh, demos):
    metrics = read_jsonl(demos.folder / "sft" / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(30)) and metrics[-1]["loss"] < metrics[0]["loss"] / 5
    assert {"loss", "lr", "grad_norm", "tokens", "train_s", "train_tokens_per_s"} <= set(metrics[0])
    assert max(m["lr"] for m in metrics) == pytest.approx(2e-3, rel=0.05) and metrics[-1]["lr"] < 2e-4
    model = AutoModelForCausalLM.from_pretrained(warm)
    assert not torch.equal(model.lm_head.weight, AutoModelForCausalLM.from_pretrained(fresh).lm_head.weight)
    assert Chat(warm).template == Chat(fresh).template


def sft_flags(**more):
    return SimpleNamespace(**{"drop_unparsed": True, "only_successful": False, "max_length": 65536} | more)


def test_sft_trains_on_assistant_tokens_alone(fresh, demos, tmp_path, capsys, monkeypatch):
    """The first step's loss is the mean over them, of all rollouts; the decoded tokens are the assistant's turns."""
    chat, model = Chat(fresh), rollout.load_model(fresh)
    samples = sft.load_samples(sft_flags(rollouts=[demos.rollouts]), chat)
    records = read_jsonl(demos.rollouts)
    assert len(samples) == len(records) == 16
    for s, r in zip(samples, records):
        turns = [list(g) for m, g in itertools.groupby(zip(s["mask"], s["ids"]), key=lambda x: x[0]) if m]
        assert [chat.decode([i for _, i in turn]) for turn in turns] == [
            chat.assistant_text(m) for m in r["messages"] if m["role"] == "assistant"]
        assert all(turn[-1][1] == chat.end_id for turn in turns)
    losses = []
    for s in samples:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([s["ids"]])).logits[0, :-1]
        losses += [-torch.log_softmax(logits[t - 1], -1)[s["ids"][t]].item() for t in range(len(s["ids"]))
                   if s["mask"][t]]
    code, _ = cli(capsys, monkeypatch, sft, "--model", fresh, "--rollouts", demos.rollouts, "--out", tmp_path,
                  "--epochs", 1,
                  "--micro-batch-tokens", 300, "--lr", 0)
    metrics = read_jsonl(tmp_path / "metrics.jsonl")
    assert code == 0 and len(metrics) == 1 and metrics[0]["loss"] == pytest.approx(np.mean(losses), rel=1e-4)


def sft_record(*turns, reward=1.0, **more):
    messages = [*MESSAGES]
    for turn in turns:
        messages += [turn] + [{"role": "tool", "content": "x\n[exit code 0]"} for _ in turn.get("tool_calls")
                              or [1]]
    return {"task_id": "t-1", "messages": messages, "reward": reward, "end": "submitted", **more}


def mixed(*turns):
    """One assistant message with calls of several messages."""
    calls = [{**c, "id": f"c{i}"} for i, t in enumerate(turns) for c in t["tool_calls"]]
    return {"role": "assistant", "content": "", "tool_calls": calls}


GOOD = call_message("ls")
SFT_ROWS = {  # name: (record, kept by default, kept with --no-drop-unparsed, kept with --only-successful)
    "good": (sft_record(GOOD, call_message(SUBMIT)), 1, 1, 1),
    "failed": (sft_record(GOOD, reward=0.0), 1, 1, 0),
    "half": (sft_record(GOOD, reward=0.5), 1, 1, 0),
    "no outcome": (sft_record(GOOD, reward=None), 0, 0, 0),
    "text turn": (sft_record(GOOD, text_turn()), 0, 1, 0),
    "broken arguments": (sft_record(BROKEN_CALL, GOOD), 0, 1, 0),
    "broken beside good": (sft_record(mixed(GOOD, BROKEN_CALL)), 0, 1, 0),
    "sampled text with a call": (sft_record(text_turn(hermes_call("ls"))), 1, 1, 1),
    "sampled text with a broken call": (sft_record(text_turn(raw("{"))), 0, 1, 0),
    "draft only": (sft_record(text_turn(f"<think>{hermes_call('ls')}</think>hm")), 0, 1, 0),
}


@pytest.mark.parametrize("name", SFT_ROWS)
def test_which_rollouts_sft_learns_from(name, hermes, tmp_path, capsys):
    record, *kept = SFT_ROWS[name]
    path = write_jsonl(tmp_path / "r.jsonl", [SFT_ROWS["good"][0], record])
    for flags, keep in zip(({}, {"drop_unparsed": False}, {"only_successful": True}), kept):
        assert len(sft.load_samples(sft_flags(rollouts=[path], **flags), hermes)) == 1 + keep, flags
    assert "left out" in capsys.readouterr().out


def test_sft_takes_token_rollouts_as_they_are(bwrap, hermes, tmp_path):
    text = calls_of(hermes, DO_IT, text="unhappiness ")
    letters = [t for c in text for t in hermes.encode(c)] + [hermes.end_id]
    r = play(bash_task(), SaysTokens(hermes, letters, calls_of(hermes, SUBMIT)), hermes)
    sample, = sft.load_samples(sft_flags(rollouts=[write_jsonl(tmp_path / "r.jsonl", [r])]), hermes)
    assert sample == {"ids": r["token_ids"], "mask": r["loss_mask"]}


SFT_ERRORS = {  # name: (flags, what the message names)
    "another tokenizer": ([], "t-1"), "none left": (["--only-successful"], "no rollout"),
    "cut to nothing": (["--max-length", "5"], "max-length"),
    "no file": (["--rollouts", "/nowhere.jsonl"], "/nowhere.jsonl"),
}


@pytest.mark.parametrize("name", SFT_ERRORS)
def test_sft_says_what_is_wrong_and_writes_no_checkpoint(name, bwrap, folders, hermes, tmp_path, capsys,
                                                         monkeypatch):
    other = Chat(folders["thinking"]) if name == "another tokenizer" else hermes
    r = play(bash_task(), SaysTokens(other, calls_of(other, SUBMIT)), other)
    path = write_jsonl(tmp_path / "r.jsonl", [r])
    code, _ = cli(capsys, monkeypatch, sft, "--model", folders["hermes"], "--rollouts", path, "--out",
                  tmp_path / "out", *SFT_ERRORS[name][0])
    assert str(code).startswith("sft.py: ") and SFT_ERRORS[name][1] in code
    assert not (tmp_path / "out" / "last").exists()


# ------------------------------------------------------------------------------------------------ dppo, the command

METRICS = """step reward groups_kept groups_zero groups_one lag tokens sampled_tokens turns tokens_per_turn tokens_per_call loss grad_norm
kept_positive kept_negative logprob_diff_max logprob_diff_mean entropy sample_s train_s push_s wait_s train_tokens_per_s
sample_tokens_per_s infra_errors groups_stale lr""".split()


def dppo_flags(start, tasks, out, **more):
    flags = {"model": start, "prompts": 2, "group-size": 6, "steps": 2, "lag": 0, "workers": 12, "lr": 1e-4,
             "max-turns": 3, "max-turn-tokens": 30,
             "backend": "bwrap", "micro-batch-tokens": 300} | more
    return ["--tasks", tasks, "--out", out, "--no-gradient-checkpointing",
            *[x for k, v in flags.items() for x in (f"--{k}", v)]]


def test_binary_trains_on_solved_or_not(warm, tmp_path, capsys, monkeypatch):
    half = REWARD_DONE + "\n[ $(cat /logs/verifier/reward.txt) = 1 ] || echo .5 >/logs/verifier/reward.txt"
    tasks = write_jsonl(tmp_path / "tasks.jsonl", [bash_task(f"t-{i}", half) for i in range(4)])
    for flags, lowest in (([], 0.5), (["--binary"], 0)):
        out = tmp_path / f"run{len(flags)}"
        assert cli(capsys, monkeypatch, dppo, *dppo_flags(warm, tasks, out, steps=1), *flags)[0] == 0
        assert {r["reward"] for r in read_jsonl(out / "rollouts.jsonl")} == {lowest, 1}


def check_run(out, steps, lag, group_size=6):
    """What holds for the files of every run."""
    metrics, rollouts = read_jsonl(out / "metrics.jsonl"), read_jsonl(out / "rollouts.jsonl")
    assert [m["step"] for m in metrics] == list(range(steps))
    for m in metrics:
        assert not [key for key in METRICS if key not in m]
        assert all(math.isfinite(v) for v in m.values() if isinstance(v, (int, float)))
        assert 0 <= m["lag"] <= lag and 0 < m["kept_positive"] <= 1 and 0 < m["kept_negative"] <= 1 and m["grad_norm"] > 0
        mine = [r for r in rollouts if r["step"] == m["step"]]
        assert m["episodes"] == len(mine) and m["groups_kept"] == len({r["group"] for r in mine})
        assert m["sampled_tokens"] == sum(sum(r["loss_mask"]) for r in mine)
        for r in mine:
            assert all(m["step"] - lag <= first <= last <= m["step"] for first, last in r["policy_versions"])
            sampled = [x == 1 for x in r["loss_mask"]]
            assert [p is not None for p in r["trainer_logprobs"]] == [k is not None
                for k in r["kept"]] == sampled
            assert len(r["trainer_logprobs"]) == len(r["token_ids"])
        for group in {r["group"] for r in mine}:
            group = [r for r in mine if r["group"] == group]
            assert len(group) <= group_size and len({r["task_id"] for r in group}) == 1
            mean = sum(r["reward"] for r in group) / len(group)
            assert [r["advantage"] for r in group] == pytest.approx([r["reward"] - mean for r in group],
                abs=1e-6)
        diff = [abs(a - b) for r in mine for a, b in zip(r["logprobs"], r["trainer_logprobs"])
                if a is not None]
        assert m["logprob_diff_max"] == pytest.approx(max(diff),
                                                      abs=2e-5) and m["logprob_diff_mean"] == pytest.approx(np.mean(diff), abs=2e-5)
    return metrics, rollouts


def test_training_on_policy(warm, demos, tmp_path, capsys, monkeypatch):
    """lag 0: every token is of the step's own policy, so trainer and sampler agree and the mask never fires."""
    before = AutoModelForCausalLM.from_pretrained(warm).state_dict()
    code, said = cli(capsys, monkeypatch, dppo, *dppo_flags(warm, demos.tasks, tmp_path, **{
        "eval-tasks": demos.tasks, "eval-every": 1, "eval-attempts": 1, "save-every": 1}))
    assert code == 0, code
    metrics, rollouts = check_run(tmp_path, steps=2, lag=0)
    assert all(m["logprob_diff_max"] < 1e-4 and m["kept_positive"] == m["kept_negative"] == 1
               and m["lag"] == 0 for m in metrics)
    assert all(set(map(tuple, r["policy_versions"])) == {(r["step"], r["step"])} for r in rollouts)
    assert all(0 <= m["eval_pass1"] <= 1 for m in metrics) and "eval pass@1" in said
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "last").state_dict()
    assert set(after) == set(before) and any(not torch.equal(after[k], before[k]) for k in before)
    assert all((tmp_path / name / "config.json").exists() for name in ("step-1", "last", "best"))
    assert not list(tmp_path.glob("*.tmp")) and Chat(str(tmp_path / "last")).tool_format == "hermes"


def test_training_with_lag(warm, demos, tmp_path, capsys, monkeypatch):
    """A large step and sampling that runs ahead: the log-probs move apart, and are those of the policy that sampled."""
    code, _ = cli(capsys, monkeypatch, dppo, *dppo_flags(warm, demos.tasks, tmp_path, lag=1, steps=3,
                                                         lr=1e-3))
    assert code == 0, code
    metrics, rollouts = check_run(tmp_path, steps=3, lag=1)
    assert max(m["lag"] for m in metrics) == 1 and metrics[0]["logprob_diff_max"] < 1e-4
    assert max(m["logprob_diff_max"] for m in metrics) > 1e-3


@pytest.mark.parametrize("loss, advantage", [("grpo", "normalized"), ("reinforce", "centered")])
def test_other_objectives_train_too(loss, advantage, warm, demos, tmp_path, capsys, monkeypatch):
    flags = dppo_flags(warm, demos.tasks, tmp_path, steps=1, loss=loss, advantage=advantage)
    assert cli(capsys, monkeypatch, dppo, *flags)[0] == 0
    group = [r for r in read_jsonl(tmp_path / "rollouts.jsonl")
             if r["group"] == read_jsonl(tmp_path / "rollouts.jsonl")[0]["group"]]
    rewards = np.array([r["reward"] for r in group])
    expected = (rewards - rewards.mean()) / (rewards.std() if advantage == "normalized" else 1)
    assert [r["advantage"] for r in group] == pytest.approx(expected.tolist(), abs=1e-5)


def test_training_on_two_ranks(warm, demos, tmp_path):
    """Under torchrun; the checkpoint of the shards is whole, and the next step samples from it."""
    done = torchrun(2, f"{ROOT}/dppo.py", *dppo_flags(warm, demos.tasks, tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    metrics, _ = check_run(tmp_path, steps=2, lag=0)
    assert all(m["logprob_diff_max"] < 1e-4 for m in metrics)  # after a step and a push from shards, too
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "last")
    before = AutoModelForCausalLM.from_pretrained(warm)
    changed = [(a - b).abs().max().item() for a, b in zip(model.state_dict().values(),
                                                          before.state_dict().values())]
    assert 0 < max(changed) < 1e-3 and rollout.end_ids(model.generation_config, Chat(str(tmp_path / "last")))


def test_training_ends_well_although_sampling_runs_ahead(warm, demos, tmp_path):
    """The engine's thread may be in the middle of a forward pass when the program ends."""
    flags = dppo_flags(warm, demos.tasks, tmp_path, steps=1, lag=3)
    done = subprocess.run([sys.executable, f"{ROOT}/dppo.py", *map(str, flags)], capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-500:]


@pytest.mark.parametrize("script", ["dppo", "rollout"])
def test_ctrl_c_while_a_model_samples_ends_with_one_line(script, warm, demos, tmp_path):
    if script == "dppo":
        flags, out = dppo_flags(warm, demos.tasks, tmp_path, steps=500, lag=2), tmp_path / "metrics.jsonl"
    else:
        out = tmp_path / "rollouts.jsonl"
        flags = ["--tasks", demos.tasks, "--model", warm, "--out", out, "--n", 1000, "--backend", "bwrap",
                 "--max-turns", 3]
    process = subprocess.Popen([sys.executable, f"{ROOT}/{script}.py", *map(str, flags)],
                               stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True, preexec_fn=restore_ctrl_c)
    await_lines(process, out, 1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1, err[-500:]
    assert err.strip().splitlines()[-1].startswith(f"{script}.py: stopped;") and "Traceback" not in err
    assert read_jsonl(out) and out.read_bytes().endswith(b"\n")


def test_a_run_that_cannot_learn_ends_on_two_ranks_too(warm, tmp_path):
    tasks = write_jsonl(tmp_path / "tasks.jsonl", [bash_task(tests="echo 0 > /logs/verifier/reward.txt")])
    done = torchrun(2, f"{ROOT}/dppo.py", *dppo_flags(warm, tasks, tmp_path / "out", **{"max-refill": 1}),
                    timeout=60)
    assert done.returncode != 0 and "dppo.py: none of" in done.stderr and "every episode failed" in done.stderr


DPPO_ERRORS = {  # name: (tests, flags, what the message names)
    "impossible": ("echo 0 > /logs/verifier/reward.txt", {"max-refill": 1}, "every episode failed"),
    "no grade": ("true", {"max-refill": 1, "max-turns": 2}, "t-1"),
    "prompt too long": (REWARD_DONE, {"max-refill": 1, "max-prompt-tokens": 1}, "--max-prompt-tokens"),
    "no backend": (REWARD_DONE, {"backend": "docker"}, "docker"),
    "group of one": (REWARD_DONE, {"group-size": 1}, "--group-size"),
    "no model": (REWARD_DONE, {"model": "/nowhere"}, "/nowhere"),
    "no tasks": (None, {}, "no tasks"),
}


@pytest.mark.parametrize("name", DPPO_ERRORS)
def test_dppo_says_why_it_cannot_train(name, warm, tmp_path, capsys, monkeypatch):
    tests, flags, named = DPPO_ERRORS[name]
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    tasks = write_jsonl(tmp_path / "tasks.jsonl", [bash_task(tests=tests)] if tests else [])
    code, _ = cli(capsys, monkeypatch, dppo, *dppo_flags(warm, tasks, tmp_path / "out", **flags))
    assert str(code).startswith("dppo.py: ") and named in code and "\n" not in code
    assert not (tmp_path / "out" / "last").exists()


# ------------------------------------------------------------------------------------------------ eval

@pytest.mark.parametrize("n, c, k, expected", [
    (4, 2, 2, 5 / 6), (4, 2, 1, 0.5), (4, 2, 4, 1.0), (4, 2, 3, 1.0), (5, 0, 3, 0.0), (5, 5, 1, 1.0),
    (1, 1, 1, 1.0), (1, 0, 1, 0.0),
    (2, 2, 5, None), (2, 0, 5, None), (0, 0, 1, None), (400, 1, 1, 1 / 400), (8, 1, 8, 1.0)])
def test_pass_at_k(n, c, k, expected):
    assert evaluation.pass_at_k(n, c, k) == (expected if expected is None else pytest.approx(expected))


def eval_rows(**by_task):
    return [{"model": "m", "task_id": t, "reward": r} for t, rewards in by_task.items() for r in rewards]


def test_statistics_by_hand():
    """Tasks of different n, graded rewards, missing ones. DESIGN: over tasks of the mean over attempts."""
    s = evaluation.statistics(eval_rows(a=[1, 0, 1, 0], b=[0.5, 1.0], c=[None, 1, 0], d=[None, None]))
    means = [0.5, 0.75, 1 / 3, 0.0]
    assert (s["tasks"], s["attempts"], s["missing"]) == (4, 11, 3)
    assert s["mean"] == pytest.approx(sum(means) / 4)
    sd = math.sqrt(sum((m - sum(means) / 4) ** 2 for m in means) / 3)
    assert s["se_tasks"] == pytest.approx(sd / 2)
    variances = [(1 / 3) / 4, 0.125 / 2, (1 / 3) / 3, 0]  # s_t^2 / n_t
    assert s["se_runs"] == pytest.approx(math.sqrt(sum(variances)) / 4)
    assert s["mean_without_missing"] == pytest.approx((0.5 + 0.75 + 0.5) / 3)  # of the tasks that have a reward
    assert s["pass_at_k"] == pytest.approx({"1": (0.5 + 0.5 + 1 / 3 + 0) / 4,
                                            "2": (5 / 6 + 1 + 2 / 3 + 0) / 4})


@pytest.mark.parametrize("rows, expected", [
    (eval_rows(a=[1]), {"mean": 1.0, "se_tasks": None, "se_runs": None, "pass_at_k": {"1": 1.0}}),
    (eval_rows(a=[0.99, 0.99]), {"mean": 0.99, "se_runs": 0.0, "pass_at_k": {"1": 0.0, "2": 0.0}}),
    # almost is no pass
    (eval_rows(a=[None], b=[None]), {"mean": 0.0, "missing": 2, "mean_without_missing": None,
                                     "se_tasks": 0.0}),
    (eval_rows(a=[1, 0], b=[1]), {"se_runs": None, "pass_at_k": {"1": 0.75}}),
])
def test_statistics_at_the_edges(rows, expected):
    s = evaluation.statistics(rows)
    assert {k: s[k] for k in expected} == expected


def test_report(tmp_path, capsys, monkeypatch):
    rows = eval_rows(**{"cut-column-test-0-00001": [1, 1], "sort-unique-test-0-00002": [0, None]})
    rows += [{**r, "model": "n"} for r in eval_rows(x=[1])]
    path = write_jsonl(tmp_path / "eval.jsonl", rows)
    code, said = cli(capsys, monkeypatch, evaluation, "report", path, "--json")
    lines = said.splitlines()
    assert code == 0 and [json.loads(line)["model"] for line in lines] == ["m", "n"] and len(lines) == 2
    assert json.loads(lines[0])["mean"] == 0.5
    code, said = cli(capsys, monkeypatch, evaluation, "report", path)
    assert code == 0 and "50.00%" in said and "attempts without reward: 1" in said
    assert re.search(r"cut-column +1 +100.00%", said) and re.search(r"sort-unique +1 +0.00%", said)


@pytest.mark.parametrize("row, named", [
    ({"task_id": "a", "reward": 1}, "model"), ({"model": "m", "reward": 1}, "task_id"),
    ({"model": "m", "task_id": "a"}, "reward"),
    *[({"model": "m", "task_id": "a", "reward": r}, "reward")
      for r in (1.5, -0.1, "1", [1], float("nan"), float("inf"))],
    ({"model": "m", "task_id": "b", "reward": 1, "attempt": 0}, "twice"), ("{", "eval.jsonl:2"),
])
def test_a_bad_row_is_named(row, named, tmp_path, capsys, monkeypatch):
    path = tmp_path / "eval.jsonl"
    good = {"model": "m", "task_id": "b", "reward": 1, "attempt": 0}
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row)
                              for row in (good, row, {**good, "attempt": 1})) + "\n")
    code, said = cli(capsys, monkeypatch, evaluation, "report", path)
    assert str(code).startswith("eval.py: ") and named in code and "2" in code and said == ""


def test_an_empty_report_says_so(tmp_path, capsys, monkeypatch):
    code, _ = cli(capsys, monkeypatch, evaluation, "report", write_jsonl(tmp_path / "e.jsonl", []))
    assert "no rows" in code


def test_eval_run_plays_reports_and_continues(warm, fresh, demos, tmp_path, capsys, monkeypatch):
    out = tmp_path / "eval.jsonl"
    flags = ["run", "--tasks", demos.tasks, "--model", warm, "--out", out, "--backend", "bwrap",
             "--max-turns", 3, "--max-turn-tokens", 30]
    assert cli(capsys, monkeypatch, evaluation, *flags, "--attempts", 1)[0] == 0
    first = read_jsonl(out)
    code, said = cli(capsys, monkeypatch, evaluation, *flags, "--attempts", 3)
    rows = read_jsonl(out)
    assert code == 0 and rows[:4] == first and sorted((r["task_id"], r["attempt"])
                                                      for r in rows) == [(f"t-{i}", k) for i in range(4)
                                                          for k in range(3)]
    assert not set(evaluation.TOKEN_FIELDS) & set(rows[0]) and rows[0]["messages"] and re.search(r" 4 +12 ", said)
    code, _ = cli(capsys, monkeypatch, evaluation, *flags[:4], fresh, *flags[5:])
    assert warm in code and "--out" in code  # another model's attempts do not get mixed in


def test_eval_retries_what_is_ours_and_counts_what_stays_missing(bwrap, endpoint, tmp_path, capsys,
    monkeypatch):
    endpoint.script = [(401, {}, {}), ok(call_message(DO_IT)), ok(call_message(SUBMIT)),
                       (401, {}, {"error": "expired"})]
    path = write_jsonl(tmp_path / "tasks.jsonl", [bash_task("t-1"), bash_task("t-2")])
    flags = ["run", "--tasks", path, "--model", "m", "--engine", f"chat:{endpoint.url}", "--out",
             tmp_path / "out", "--backend", "bwrap"]
    code, said = cli(capsys, monkeypatch, evaluation, *flags, "--attempts", 1, "--workers", 1,
                     "--infra-retries", 2)
    rows = {r["task_id"]: r for r in read_jsonl(tmp_path / "out")}
    assert code == 0 and rows["t-1"]["reward"] == 1 and rows["t-2"]["reward"] is None and "expired" in rows["t-2"]["error"]
    assert len(endpoint.requests) == 1 + 2 + 3 and "attempts without reward: 1\n    1 because of: http" in said
    assert (rows["t-1"]["infra_retries"], rows["t-2"]["infra_retries"]) == (1, 2) and "infra error: 3" in said


@pytest.mark.parametrize("tasks", [1, 3])
def test_plot_draws_a_png(tasks, tmp_path, capsys, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "metrics.jsonl", [
            {"step": i, "reward": i / 10, "logprob_diff_mean": 0.01, "kept_positive": 0.99,
             "kept_negative": 1.0} | ({"eval_pass1": 0.5} if i == 2 else {})
            for i in range(4)])
        write_jsonl(tmp_path / name / "eval_sft.jsonl",
                    eval_rows(**{f"t{i}": [i % 2, 1] for i in range(tasks)}))
    png = tmp_path / "curve.png"
    code, said = cli(capsys, monkeypatch, evaluation, "plot", tmp_path / "one", tmp_path / "two", "--out",
                     png)
    assert code == 0 and str(png) in said
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 5000


@pytest.mark.parametrize("metrics", [None, [], [{"step": 0, "loss": 1.0}]])
def test_plot_of_what_is_no_run_says_so(metrics, tmp_path, capsys, monkeypatch):
    if metrics is not None:
        write_jsonl(tmp_path / "metrics.jsonl", metrics)
    code, _ = cli(capsys, monkeypatch, evaluation, "plot", tmp_path, "--out", tmp_path / "x.png")
    assert str(code).startswith("eval.py: ") and "metrics.jsonl" in code


# ================================================================================================ fixtures/, verifiers/, bases

@pytest.fixture(scope="module")
def domain():
    """The domain whose base image these tests use; it has to be there, like its fixtures stage."""
    need("docker")
    api, missing = docker_api(docker_hosts()[0]), []
    for name in ("fixtures", "data_processing"):
        if not api.images(f"tmax-base:{name}"):
            missing.append(f"--domain {name}")
    if missing:
        lacking("fixtures", f"first: python gen.py bases {' '.join(missing)}")
    return "data_processing"


# ------------------------------------------------------------------------------------------------ verifiers

def verifier_task(kind, declared, tests=None, files=None, limits=None, **more):
    """A task as gen.py writes them, with a verifier of this kind."""
    own = {"verifier.py": Path(ROOT, "verifiers", kind + ".py").read_text(),
           "harness.py": Path(ROOT, "verifiers", "harness.py").read_text(),
           "verifier.json": json.dumps(declared)}
    task = task_of("python3 /tests/verifier.py /tests/verifier.json\n", files, **more)
    task["tests"] |= {name: {"text": text} for name, text in (own | (tests or {})).items()}
    return task | {"limits": {"verifier_s": 60} | (limits or {})}


def rewards(backend, task, *steps):
    """The reward on the untouched task and after each of the steps, all in one sandbox."""
    with Sandbox(task, backend) as s:
        found = [s.grade().reward]
        for step in steps:
            s.run(step)
            found.append(s.grade().reward)
    return found


def test_exact_text_is_all_or_nothing(backend):
    declared = {"files": {"/app/answer.txt": "forty two", "sub/report.csv": {"file": "wanted/report.csv"}}}
    task = verifier_task("exact_text", declared, {"wanted/report.csv": "a,b\n1,ü\n"})
    assert rewards(
        backend, task, "echo forty two >answer.txt",
        "mkdir sub; printf 'a,b\\n1,ü' >sub/report.csv", "echo ' forty two' >answer.txt",
        "printf 'forty two \\n\\n' >answer.txt", "printf 'forty  two' >answer.txt",
    ) == [0, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("trick", [
    "ln -s /tests/wanted.txt answer.txt", "mkfifo answer.txt", "mkdir answer.txt", "ln -s /proc/self/fd/0 answer.txt",
    "ln -s /dev/zero answer.txt", "ln -s answer.txt answer.txt", "head -c 50000000 /dev/zero >answer.txt",
    "echo hidden >/tmp/x; for i in $(seq 2000); do ln -sf /tests/wanted.txt answer.txt; ln -sf x answer.txt; done &",
    "mkfifo answer.txt; (while :; do echo no >answer.txt; done) &",
    *[f"ln -s /proc/{where}/root/tests/wanted.txt answer.txt" for where in ("self", "1", "$$", "self/task/1")],
])
def test_exact_text_reads_as_the_agent(backend, trick):
    task = verifier_task("exact_text", {"files": {"answer.txt": {"file": "wanted.txt"}}}, {"wanted.txt": "hidden"})
    start = time.monotonic()
    assert rewards(backend, task, trick) == [0, 0] and time.monotonic() - start < 15


MEASURE = """
from harness import read, run
got = run("python3 guess.py", stdin=b"6 7", timeout=2)
print(got.code == 0 and got.out.decode(errors="replace").strip() or "nothing")
"""
METRIC = {"command": "python3 /tests/measure.py", "threshold": 0.9, "better": "higher", "baseline": 0.5}


def test_metric_threshold_moves_with_the_metric(backend):
    task = verifier_task("metric_threshold", METRIC, {"measure.py": MEASURE})
    prints = [f"echo 'print({x})' >guess.py" for x in (0.3, 0.5, 0.7, 0.8999999999999999, 0.9, 7)]
    assert rewards(backend, task, *prints) == pytest.approx([0, 0, 0, .5, .999, 1, 1])
    lower = verifier_task("metric_threshold", METRIC | {"threshold": 2, "baseline": 10, "better": "lower"},
                          {"measure.py": MEASURE})
    prints = [f"echo 'print({x})' >guess.py" for x in (11, 4, 2.001, 2, -5)]
    assert rewards(backend, lower, *prints) == pytest.approx([0, 0, .75, .999, 1, 1], abs=1e-3)


@pytest.mark.parametrize("program", [
    "print('nan')", "print('inf')", "print('-inf')", "print('1e999')", "print('0.95 and more')", "print(True)", "",
    "print(0.95); print('text')", "import time; time.sleep(60)", "import os; os.kill(os.getppid(), 9)",
    "while True: print(0.95)", "import sys; sys.stdout.buffer.write(b'\\xff\\xfe0.95')"])
def test_metric_threshold_wants_a_finite_number(bwrap, program):
    task = verifier_task("metric_threshold", METRIC, {"measure.py": MEASURE}, {"guess.py": program})
    assert rewards("bwrap", task) == [0]


def test_metric_threshold_measures_time(backend):
    measure = """
from harness import run
slow, fast = (run(["python3", "guess.py", word], timeout=9) for word in ("slow", "fast"))
assert slow.code == fast.code == 0, (slow, fast)
print(slow.seconds / fast.seconds)
"""
    guess = "import sys, time\ntime.sleep(2 if sys.argv[1] == 'slow' else FAST)\n"
    task = verifier_task("metric_threshold", METRIC | {"threshold": 1.5, "baseline": 1}, {"measure.py": measure})
    untouched, same, faster = rewards(backend, task, *[f"cat >guess.py <<'E'\n{guess.replace('FAST', x)}E" for x in "20"])
    assert untouched == 0 and same < .3 and faster == 1


CORPUS = {"command": "python3 filter.py {file}", "suffix": ".html",
          "malicious": ["<script>", "<img onerror=x>", "<b onload=y>", {"file": "corpus/evil.html"}],
          "benign": ["<b>hi</b>", "plain", {"file": "corpus/good.html"}, ""]}
CORPUS_FILES = {"corpus/evil.html": "<SCRIPT >", "corpus/good.html": "a < b, on time"}


def test_adversarial_corpus_wants_both_sides(backend):
    task = verifier_task("adversarial_corpus", CORPUS, CORPUS_FILES)
    reads = "import re, sys; text = open(sys.argv[1]).read(); assert sys.argv[1].endswith('.html'); sys.exit("
    filters = [reads + test + ")" for test in (
        "0", "1", "2", "'<script' in text", "bool(re.search('<script|onerror=', text, re.I))",
        "bool(re.search('<script|on', text, re.I))", "bool(re.search('<script|on\\w+=', text, re.I))")]
    steps = [f"cat >filter.py <<'E'\n{text}\nE" for text in filters]
    assert rewards(backend, task, *steps) == pytest.approx([0, 0, 0, 0, .25, .75, .75, 1])


def test_adversarial_corpus_items_come_without_their_labels(backend):
    """What a filter could go by besides the content: names, order, owners, times, what else is in the folder."""
    spy = ("import os, sys; s = os.stat(sys.argv[1]); f = os.path.dirname(sys.argv[1]); print(len(os.listdir(f)), "
           "file=open('/app/seen', 'a')); print(sys.argv[1], file=open('/app/names', 'a')); sys.exit(3)")
    task = verifier_task("adversarial_corpus", CORPUS, CORPUS_FILES, {"filter.py": spy})
    with Sandbox(task, backend) as s:
        assert s.grade().reward == 0 and s.grade().reward == 0
        assert s.run("sort /app/seen | uniq -c").output.split() == ["16", "1"]
        names = s.run("cat /app/names").output.split()
        assert len(set(names)) == 16 and all(re.fullmatch(r"/tmp/\w+/[0-9a-f]+\.html", name) for name in names)
        assert s.run("ls /tmp").output == ""


FUZZ = {"command": "python3 double.py", "oracle": "python3 /tests/oracle.py", "n": 12,
        "generator": "python3 /tests/generate.py", "seed": 5}
FUZZ_FILES = {"oracle.py": "# answers-only-the-grader-knows\nprint(2 * int(input()))",
              "generate.py": "import random, sys\nprint(random.Random(int(sys.argv[1])).randrange(-50, 50))"}


def test_fuzz_equivalence_counts_equal_outputs(backend):
    task = verifier_task("fuzz_equivalence", FUZZ, FUZZ_FILES)
    positive = sum(__import__("random").Random(seed).randrange(-50, 50) > 0 for seed in range(5, 17))
    assert 0 < positive < 12
    steps = [f"echo '{text}' >double.py" for text in (
        "print(2 * int(input()), end=\"\")", "print(abs(2 * int(input())))", "print(2 * int(input())); exit(1)",
        "x = open(\"/dev/stdin\").read(); print(int(x) + int(x), file=open(\"/dev/stdout\", \"w\"))")]
    assert rewards(backend, task, *steps) == pytest.approx([0, 0, positive / 12, 0, 1])


# What a solution may try instead of solving. $1 stands for nothing; all of them end within the test's time.
ATTACKS = {
    "reward": "for p in /logs/verifier/reward.txt /proc/1/root/logs/verifier/reward.txt /proc/$PPID/root/logs/verifier/reward.txt; "
              "do mkdir -p /logs/verifier; echo 1 >$p; done; exit 0",
    "reward, later": "(setsid sh -c 'while :; do echo 1 >/logs/verifier/reward.txt; sleep .01; done' >/dev/null 2>&1 &) ; exit 0",
    "tests": "cat /tests/* /proc/*/root/tests/* /proc/*/cwd/oracle.py 2>/dev/null >>/app/loot; grep -la grader-knows -r /tmp /run "
             "/dev/shm /var/tmp >>/app/loot; cat /proc/*/environ /proc/*/fd/* 2>/dev/null </dev/null | head -c 100000 >>/app/loot & sleep .3",
    "mounts": "umount /tests; umount -l /tests; unshare -Urm umount /tests; unshare -Urm sh -c 'umount -l /tests; cat /tests/*' >>/app/loot; "
              "nsenter -t 1 -m cat /tests/oracle.py >>/app/loot; mkdir -p /app/m; unshare -Urm sh -c 'mount --rbind / /app/m && "
              "cat /app/m/tests/*' >>/app/loot",
    "hang": "sleep 600",
    "hang, deaf": "trap '' TERM INT HUP; while :; do sleep 600; done",
    "flood": "yes",
    "flood of errors": "yes >&2",
    "odd code": "exit 77",
    "kill all": "kill -9 -1; kill -9 $PPID 1",
    "outlive": "(setsid sh -c 'sleep 601 & sleep 602' &); setsid sleep 603 & sleep 604 & exit 0",
    "outlive, daemon": "python3 -c 'import os, time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\ntime.sleep(605)'; exit 0",
    "close all": "exec 0<&- 1>&- 2>&-; sleep 606",
    "nan": "echo nan",
    "fork bomb": "f() { f | f & }; f; sleep 1",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_solution_earns_nothing_and_leaves_nothing(backend, attack):
    task = verifier_task("fuzz_equivalence", FUZZ | {"command": "bash evil.sh", "n": 4, "timeout_s": 1}, FUZZ_FILES, {"evil.sh": ATTACKS[attack]})
    with Sandbox(task, backend) as s:
        s.run("sleep 700 & touch loot")                  # a job of the agent's that has to survive its own grading
        start = time.monotonic()
        try:
            grade = s.grade()
            assert grade.reward == 0, grade
            assert "reward 0" in grade.log
        except VerifierFailed:
            assert attack == "fork bomb"                 # it may take the last process from the verifier: also 0
        assert time.monotonic() - start < 30
        assert "grader-knows" not in s.run("cat loot").output and "verifier" not in s.run("cat loot").output
        left = processes(s)
        assert not any("sleep 60" in line or "evil" in line or line.startswith("yes") for line in left), left
        assert attack == "kill all" or any("sleep 700" in line for line in left)
        assert s.run("ls /tests /logs/verifier").exit_code != 0


def test_hostile_filters_and_services_earn_nothing(backend):
    for text in (ATTACKS["reward"], ATTACKS["hang"], ATTACKS["flood"], "exit $((RANDOM % 100 + 2))"):
        task = verifier_task("adversarial_corpus", CORPUS | {"command": "bash evil.sh {file}", "timeout_s": 1},
                             CORPUS_FILES, {"evil.sh": text})
        assert rewards(backend, task) == [0], text
    for text in (ATTACKS["reward, later"], ATTACKS["outlive"], ATTACKS["flood"]):
        declared = {"start": "bash evil.sh", "wait_s": 1,
                    "checks": [{"protocol": "tcp", "port": 7001, "send": "", "expect": "x"}]}
        with Sandbox(verifier_task("multi_protocol", declared, files={"evil.sh": text}), backend) as s:
            assert s.grade().reward == 0, text
            left = [line for line in processes(s) if "sleep 60" in line or "echo 1 >" in line]
            assert not left


SERVER = r"""
import http.server, socketserver, sys, threading, time

class Web(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404 if self.path == "/gone" else 200)
        self.end_headers()
        self.wfile.write(("you asked " + self.path).encode())
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(201)
        self.end_headers()
        self.wfile.write(self.headers["X-Who"].encode() + b" sent " + body[::-1][::-1])
    def log_message(self, *_): pass

class Line(socketserver.StreamRequestHandler):
    def handle(self):
        self.wfile.write(b"PONG " + self.rfile.readline().split()[-1] + b"\n")

class Mail(socketserver.StreamRequestHandler):
    def handle(self):
        say = lambda text: self.wfile.write(text + b"\r\n")
        say(b"220 here")
        while line := self.rfile.readline():
            word = line[:4].upper()
            if word == b"RCPT" and b"@far.org" in line:
                say(b"550 no relaying")
            elif word == b"DATA":
                say(b"354 go on")
                with open("/app/mail", "ab") as file:
                    while (line := self.rfile.readline()) not in (b".\r\n", b""):
                        file.write(line)
                say(b"250 taken")
            else:
                say(b"221 bye" if word == b"QUIT" else b"250 well")

socketserver.ThreadingTCPServer.allow_reuse_address = True
servers = {"web": (8080, Web), "line": (7000, Line), "mail": (2525, Mail)}
for name in sys.argv[1:]:
    threading.Thread(target=socketserver.ThreadingTCPServer(("127.0.0.1", servers[name][0]), servers[name][1]).serve_forever).start()
"""
CHECKS = [
    {"protocol": "http", "port": 8080, "path": "/echo?q={nonce}", "expect": "/echo?q={nonce}"},
    {"protocol": "http", "port": 8080, "path": "/gone", "status": 404},
    {"protocol": "http", "port": 8080, "path": "/", "method": "POST", "body": "b-{nonce}", "headers": {"X-Who": "Ada"},
     "status": 201, "expect": "Ada sent b-{nonce}"},
    {"protocol": "tcp", "port": 7000, "send": "PING {nonce}\n", "expect": "PONG {nonce}"},
    {"protocol": "smtp", "port": 2525, "from": "a@x.org", "to": "b@x.org", "body": "hello {nonce}", "mailbox": "/app/mail"},
    {"protocol": "smtp", "port": 2525, "from": "a@x.org", "to": "b@far.org", "body": "spam", "accept": False}]


def test_multi_protocol_counts_checks(backend):
    task = verifier_task("multi_protocol", {"checks": CHECKS, "wait_s": 1}, files={"server.py": SERVER})
    assert rewards(backend, task, "python3 server.py web &", "python3 server.py line &",
                   "python3 server.py mail &") == pytest.approx([0, 3 / 6, 4 / 6, 1])
    started = verifier_task("multi_protocol", {"checks": CHECKS, "start": "bash up.sh", "wait_s": 3}, files={"server.py": SERVER})
    assert rewards(backend, started, "echo 'python3 server.py web mail &' >up.sh",
                   "echo 'python3 server.py web line mail' >up.sh", "echo 'exit 1' >up.sh") == pytest.approx([0, 5 / 6, 1, 0])


BAD_SERVERS = {
    "silent": "time.sleep(60)", "drips": "\nwhile True: c.sendall(b'HTTP/1.1 200 OK\\r\\nX: 1\\r\\n'); time.sleep(.2)",
    "floods": "\nwhile True: c.sendall(b'x' * 65536)", "hangs up": "c.close()", "garbage": "c.sendall(bytes(range(256)) * 9); c.close()",
    "endless": "c.sendall(b'HTTP/1.1 200 OK\\r\\n\\r\\n'); \nwhile True: c.sendall(b'x' * 65536)",
}


@pytest.mark.parametrize("how", BAD_SERVERS)
def test_multi_protocol_survives_any_server(bwrap, how):
    server = ("import socket, threading, time\ndef talk(c):\n    time.sleep(.1)\n    " + BAD_SERVERS[how].replace("\n", "\n    ")
              + "\ns = socket.create_server(('127.0.0.1', 8080))\nwhile True: threading.Thread(target=talk, args=s.accept()[:1]).start()")
    checks = [check | {"port": 8080} for check in CHECKS]
    task = verifier_task("multi_protocol", {"checks": checks, "start": "python3 s.py", "timeout_s": 1}, files={"s.py": server})
    start = time.monotonic()
    assert rewards("bwrap", task) == [0] and time.monotonic() - start < 40


GREETER = r"""
import grpc, sys
from concurrent import futures
def hello(request, context):
    name = request[2:2 + request[1]]
    return b"\x0a" + bytes([6 + len(name)]) + b"Hello " + name + b"\x10\x07"
server = grpc.server(futures.ThreadPoolExecutor(2))
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("demo.Greeter", {
    "Hello": grpc.unary_unary_rpc_method_handler(hello)}),))
server.add_insecure_port("127.0.0.1:50051")
server.start()
server.wait_for_termination()
"""


def test_multi_protocol_waits_for_a_start_that_replaces_what_runs():
    need("docker")                       # under bubblewrap nothing that is started for the grading can end it
    again = "kill $(cat pid); sleep 1; python3 -m http.server 8080 >log 2>&1 </dev/null & echo $! >pid; sleep 2\n"
    check = {"protocol": "http", "port": 8080, "path": "/made", "expect": "yes"}
    task = verifier_task("multi_protocol", {"checks": [check] * 50, "start": "bash again.sh"}, files={"again.sh": again})
    assert rewards("docker", task, "echo yes >made; bash again.sh") == [0, 1]


def test_multi_protocol_speaks_grpc(domain):
    check = {"protocol": "grpc", "port": 50051, "method": "/demo.Greeter/Hello", "request": {"1": "Ada {nonce}"},
             "expect": {"1": "Hello Ada {nonce}", "2": 7}}
    wrong = [check | {"method": "/demo.Greeter/Bye"}, check | {"expect": {"1": "Hello"}}, check | {"expect": {"2": 8}}]
    task = verifier_task("multi_protocol", {"checks": [check, *wrong], "wait_s": 1}, files={"greeter.py": GREETER},
                         dockerfile=DOCKERFILE.replace("core", domain))
    assert rewards("docker", task, "python3 greeter.py >log 2>&1 & sleep 2") == [0, 1 / 4]


TCP = {"protocol": "tcp", "port": 7000, "send": "", "expect": "x"}
BAD_DECLARATIONS = [
    ("exact_text", "{", "JSON"), ("exact_text", "[1]", "object"), ("exact_text", {}, "'files' is missing"),
    ("exact_text", {"files": {}}, "'files'"), ("exact_text", {"files": {"a": 5}}, "'files'"),
    ("exact_text", {"files": {"a": "b"}, "mode": 1}, "'mode' is none of files"),
    ("metric_threshold", METRIC | {"threshold": float("nan")}, "'threshold'"), ("metric_threshold", METRIC | {"threshold": "1"}, "'threshold'"),
    ("metric_threshold", METRIC | {"threshold": True}, "'threshold'"), ("metric_threshold", METRIC | {"baseline": 1}, "baseline"),
    ("metric_threshold", METRIC | {"better": "lower"}, "baseline"), ("metric_threshold", METRIC | {"better": "more"}, "'better'"),
    ("metric_threshold", METRIC | {"command": "python3 'x"}, "'command'"), ("metric_threshold", METRIC | {"timeout_s": 0}, "'timeout_s'"),
    ("adversarial_corpus", CORPUS | {"command": "python3 filter.py"}, "'command'"), ("adversarial_corpus", CORPUS | {"benign": []}, "'benign'"),
    ("adversarial_corpus", CORPUS | {"malicious": [{"file": "../etc/passwd"}]}, "no test file '../etc/passwd'"),
    ("adversarial_corpus", CORPUS | {"malicious": [{"file": "none"}]}, "no test file 'none'"), ("adversarial_corpus", CORPUS | {"suffix": "/x"}, "'suffix'"),
    ("fuzz_equivalence", FUZZ | {"n": 0}, "'n'"), ("fuzz_equivalence", FUZZ | {"n": 1e3}, "'n'"), ("fuzz_equivalence", FUZZ | {"seed": "x"}, "'seed'"),
    ("fuzz_equivalence", FUZZ | {"generator": "false"}, "generator fails for seed 5"), ("fuzz_equivalence", FUZZ | {"generator": "no-such-program"}, "no-such-program"),
    ("fuzz_equivalence", FUZZ | {"generator": "echo", "oracle": "false"}, "oracle fails for seed 5"),
    ("fuzz_equivalence", FUZZ | {"generator": "echo", "oracle": "echo 1"}, "alike"),
    ("multi_protocol", {"checks": []}, "'checks'"), ("multi_protocol", {"checks": [TCP | {"protocol": "ftp"}]}, "checks[0]: protocol must be one of"),
    ("multi_protocol", {"checks": [TCP, TCP | {"port": 0}]}, "checks[1]: the field 'port'"), ("multi_protocol", {"checks": [TCP | {"status": 200}]}, "knows no field 'status'"),
    ("multi_protocol", {"checks": [TCP | {"protocol": "smtp"}]}, "needs the field 'from'"), ("multi_protocol", {"checks": [5]}, "checks[0]"),
    ("multi_protocol", {"checks": [{"protocol": "grpc", "port": 1, "method": "/a/B", "request": {"x": 1}, "expect": {}}]}, "'request'"),
]


@pytest.mark.parametrize("kind, declared, words", BAD_DECLARATIONS)
def test_a_bad_declaration_is_one_clear_line(kind, declared, words, tmp_path):
    path = tmp_path / "verifier.json"
    path.write_text(declared if isinstance(declared, str) else json.dumps(declared))
    got = subprocess.run([sys.executable, f"{ROOT}/verifiers/{kind}.py", path], capture_output=True, text=True, timeout=20)
    assert got.returncode and got.stderr.startswith("verifier.json: ") and words in got.stderr and got.stderr.count("\n") == 1, got


def test_a_bad_declaration_gives_no_reward(backend):
    with Sandbox(verifier_task("exact_text", {"files": {"a": {"file": "none"}}}), backend) as s:
        with pytest.raises(TaskError, match="no valid reward even on the untouched task: the verifier wrote no reward"):
            s.grade()
        assert "verifier.json: there is no test file 'none'" in s.verify()[2]


# ------------------------------------------------------------------------------------------------ fixtures

LEGACY = r"""
#include <stdio.h>
#include <string.h>
/* a comment that nobody reads: rot-thirteen-and-a-half */
static unsigned mix_of_the_ancients(const char *s) {
    unsigned h = 40503;
    while (*s) h = h * 31 + (unsigned char)*s++;
    return h % 99991;
}
int main(int argc, char **argv) {
    const unsigned char key[] = {'m' ^ 90, 'e' ^ 90, 'l' ^ 90, 'o' ^ 90, 'n' ^ 90, 'y' ^ 90};
    char plain[7] = {0};
    for (int i = 0; i < 6; i++) plain[i] = key[i] ^ (90 + argc - 2);
    if (argc != 2) return 2;
    printf(strcmp(argv[1], plain) ? "%u\n" : "open\n", mix_of_the_ancients(argv[1]));
}
"""
TALLY = {
    "tally.c": '#include "tally.h"\ndouble mean(const int *x, int n) {\n    double sum = 0;\n    for (int i = 0; i < n; i++) sum += x[i];\n'
               '    return sum / n;\n}\n',
    "tally.h": "double mean(const int *x, int n);\n",
    "check.c": '#include "tally.h"\n#include <stdio.h>\nint main(void) { int x[] = {1, 2}; printf("%.2f\\n", mean(x, 2)); return mean(x, 2) != 1.5; }\n',
    "Makefile": "test: check\n\t./check\ncheck: check.c tally.c tally.h\n\t$(CC) -o $@ check.c tally.c\n"}
STORE = ("import http.server\nclass H(http.server.BaseHTTPRequestHandler):\n    def do_GET(self):\n        self.send_response(200); self.end_headers()\n"
         "        self.wfile.write(b'forty-two')\nhttp.server.HTTPServer(('127.0.0.1', 7001), H).serve_forever()\n")
WEB = ("import http.server, urllib.request\nstore = dict(l.strip().split('=') for l in open('web.ini'))['store']\n"
       "class H(http.server.BaseHTTPRequestHandler):\n    def do_GET(self):\n        try: answer, code = urllib.request.urlopen('http://' + store).read(), 200\n"
       "        except OSError as e: answer, code = str(e).encode(), 502\n        self.send_response(code); self.end_headers(); self.wfile.write(answer)\n"
       "http.server.HTTPServer(('127.0.0.1', 8080), H).serve_forever()\n")
TONES = [{"hz": hz, "ms": ms} for hz, ms in [(440, 150), (0, 60), (440, 150), (0, 40), (1320, 90), (0, 100), (697.5, 200)]]
EVENTS = [{"frame": f, "frames": n, "color": "#c03020", "box": [40, 40, 60, 60]} for f, n in [(3, 2), (17, 1), (18 + 2, 5), (58, 2)]]
FIXTURES = {                            # the declarations, and what of them nobody may find in the image
    "image": ({"path": "/app/receipt.png", "format": "png", "text": "Invoice Kestrel\nTotal: 93.20 EUR\npaid by Magnolia Brandt"},
              ["Kestrel", "93.20 EUR", "Magnolia"]),
    "audio": ({"path": "/app/dial.wav", "format": "wav", "tones": TONES}, ["697.5", '"hz": 1320']),
    "audio-speech": ({"path": "/app/message.mp3", "format": "mp3", "speech": "The answer is hidden in the blue house."}, ["answer is hidden", "the blue house"]),
    "video": ({"path": "/app/gate.mp4", "width": 160, "height": 120, "fps": 10, "frames": 60, "events": EVENTS}, ["#c03020", '"frames": 60, "events"']),
    "stripped_binary": ({"path": "/app/legacy", "source": LEGACY, "flags": ["-O1"], "hidden": ["melony"]},
                        ["melony", "mix_of_the_ancients", "rot-thirteen", "strcmp(argv"]),
    "vendored_package": ({"path": "/app/vendor/tally", "files": TALLY,
                          "perturbation": {"file": "tally.c", "find": "return sum / n;", "replace": "return (int)sum / n;"}},
                         ["return sum / n"]),
    "multi_service_compose": ({"path": "/app/shop", "services": [
        {"name": "store", "command": "python3 store.py", "port": 7001, "files": {"store.py": STORE}},
        {"name": "web", "command": "python3 web.py", "port": 8080, "files": {"web.py": WEB, "web.ini": "store=127.0.0.1:7001\n"}}],
        "faults": [{"file": "web/web.ini", "find": "store=127.0.0.1:7001", "replace": "store=127.0.0.1:7010"}]},
        ["store=127.0.0.1:7001", '"faults": [{']),
}
LOOK = {                                # ordinary tools, and what they say
    "image": ("tesseract receipt.png - 2>/dev/null", r"Invoice Kestrel\nTotal: 93\.20 EUR\npaid by Magnolia Brandt\s*"),
    "audio": ("""python3 - <<'E'
import numpy, wave
w = wave.open("dial.wav"); rate = w.getframerate(); x = numpy.frombuffer(w.readframes(w.getnframes()), "<i2").astype(float)
loud = numpy.array([abs(x[i:i + 110]).max() > 2500 for i in range(0, len(x) - 110, 110)] + [False])
edges = numpy.flatnonzero(numpy.diff(numpy.r_[False, loud])) * 110
for a, b in zip(edges[::2], edges[1::2]):
    part = x[a:b]; hz = numpy.fft.rfftfreq(1 << 17, 1 / rate)[abs(numpy.fft.rfft(part, 1 << 17)).argmax()]
    print(round(hz), end=" ")
E""", r"440 440 1320 69[78] "),
    "audio-speech": ("ffmpeg -v error -i message.mp3 m.wav; pocketsphinx_continuous -infile m.wav 2>/dev/null", "the answer is hidden in the blue house\n"),
    "video": ("""ffmpeg -i gate.mp4 2>&1 | grep -oE '160x120|10 fps|00:00:06.00'
ffmpeg -v error -i gate.mp4 -f rawvideo -pix_fmt gray - | python3 -c '
import numpy, sys
x = numpy.frombuffer(sys.stdin.buffer.read(), "u1").reshape(-1, 120, 160)[:, 45:95, 45:95].mean((1, 2))
print("".join(".#"[int(abs(v - x[0]) > 10)] for v in x))'""", r"00:00:06.00\n160x120\n10 fps\n" + "".join(
        "#" if any(e["frame"] <= i < e["frame"] + e["frames"] for e in EVENTS) else r"\." for i in range(60)) + "\n"),
    "stripped_binary": ("./legacy abc; ./legacy melony; objdump -d legacy | grep -c imul.*0x1f; nm legacy 2>&1; strings legacy | grep -c melon; file legacy",
                        r"(\d+)\nopen\n[01]\nnm: legacy: no symbols\n0\n.*stripped\n"),
    "vendored_package": ("cd vendor/tally; make 2>&1 | tail -1; sed -i 's/(int)//' tally.c; make 2>&1 | tail -1; ls -l check | cut -c1-10",
                         r"make: \*\*\* .*Error 1\n1\.50\n-rwxr-xr-x\n"),
    "multi_service_compose": ("""cd shop; ./start.sh; echo $?; curl -s -w ' %{http_code}\\n' localhost:8080
sed -i s/7010/7001/ web/web.ini; ./start.sh >/dev/null; curl -s -w ' %{http_code}\\n' localhost:8080
./start.sh >/dev/null; echo $?; ps ax | grep -c '[p]ython3 \\(web\\|store\\).py'""",
                              r"store listens on port 7001\nweb listens on port 8080\n0\n.*refused> 502\nforty-two 200\n0\n2\n"),
}

def fixture_files(name, declared=None):
    return {f"fixture/{name}/make.py": Path(ROOT, "fixtures", name.split("-")[0] + ".py").read_text(),
            f"fixture/{name}/common.py": Path(ROOT, "fixtures", "common.py").read_text(),
            f"fixture/{name}/fixture.json": json.dumps(declared or FIXTURES[name][0])}


@pytest.fixture(scope="module")
def fixture_task(domain):
    """A task with one fixture of each kind, made as gen.py's tasks make them: only /out reaches the image."""
    dockerfile = ("FROM tmax-base:fixtures AS fixture\nCOPY fixture/ /fixture/\n"
                  + "".join(f"RUN python3 /fixture/{kind}/make.py /fixture/{kind}/fixture.json /out\n" for kind in FIXTURES)
                  + f"FROM tmax-base:{domain}\nCOPY --from=fixture /out/ /\nRUN chown -R user:user /app\n")
    task = task_of(files={}, dockerfile=dockerfile)
    for kind in FIXTURES:
        task["files"] |= {path: {"text": text} for path, text in fixture_files(kind).items()}
    prepare(task, "docker")
    return task


@pytest.mark.parametrize("kind", FIXTURES)
def test_an_ordinary_tool_recovers_the_truth(fixture_task, kind):
    command, wanted = LOOK[kind]
    with Sandbox(fixture_task, "docker") as s:
        got = s.run(command, timeout=60)
        assert re.fullmatch(wanted, got.output), got.output
        assert s.run("find /app ! -user user; find / -name make.py -o -name fixture.json 2>/dev/null").output == ""


def contents(data, name, depth=0):
    """(name, bytes) of a file and of what is packed into it."""
    yield name, data
    packed = {b"\x1f\x8b": "gzip", b"BZ": "bz2", b"\xfd7zXZ": "lzma"}
    try:
        for magic, module in packed.items():
            if data.startswith(magic) and depth < 3:
                yield from contents(__import__(module).decompress(data), f"{name}, unpacked", depth + 1)
        if data.startswith(b"PK\x03\x04") and depth < 3:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                for inner in archive.namelist():
                    yield from contents(archive.read(inner), f"{name}: {inner}", depth + 1)
    except Exception:                   # it only looks packed, or has a password
        pass


def find_in_image(tag, needles, path):
    """Where any of these texts stands: in each layer's names and files, packed or not, in the image's settings and history."""
    with open(path, "wb") as f:
        f.writelines(docker_api(docker_hosts()[0]).get_image(tag))
    found, layers, settings = [], 0, 0
    with tarfile.open(path) as image:
        for entry in filter(tarfile.TarInfo.isfile, image):
            try:
                with tarfile.open(fileobj=image.extractfile(entry), mode="r:*") as layer:
                    layers += 1
                    for item in layer:
                        parts = [("its name", f"{item.name} {item.linkname}".encode("utf-8", "replace"))]
                        parts += contents(layer.extractfile(item).read(), "") if item.isfile() else []
                        found += [(needle, item.name + where) for where, data in parts for needle in needles if needle in data]
            except tarfile.ReadError:
                data = image.extractfile(entry).read()
                settings += b'"history"' in data
                found += [(needle, entry.name) for needle in needles if needle in data]
    assert layers > 3 and settings == 1
    os.unlink(path)
    return found


def test_no_layer_of_the_image_holds_the_truth(fixture_task, domain, tmp_path):
    """On the smallest base, as the whole image is read."""
    needles = [text.encode() for _, texts in FIXTURES.values() for text in texts]
    task = fixture_task | {"dockerfile": fixture_task["dockerfile"].replace(f"FROM tmax-base:{domain}\n", "FROM tmax-base:core\n")}
    tag = docker_image(task, docker_hosts()[0])[0]
    assert find_in_image(tag, needles, tmp_path / "image.tar") == []


def test_the_search_finds_what_is_there(domain, tmp_path):
    """Deleted again in a later layer, packed twice, named by a file, in the settings, in the history."""
    dockerfile = ("FROM tmax-base:core\nCOPY truth-a /app/\nRUN rm /app/truth-a && echo truth-c | gzip | gzip >/app/x && python3 -m zipfile -c /app/y /etc/passwd "
                  "&& ln -s truth-f /app/z\nENV X=truth-d\nRUN : truth-e\n")
    task = task_of(files={"truth-a": "truth-b"}, dockerfile=dockerfile)
    needles = [b"truth-" + bytes([letter]) for letter in b"abcdef"] + [b"/home/user:/bin"]
    found = find_in_image(docker_image(task, docker_hosts()[0])[0], needles, tmp_path / "image.tar")
    assert {needle for needle, _ in found} == set(needles) and any(where.startswith("app/y") for _, where in found)


def test_the_same_declaration_gives_the_same_bytes(fixture_task):
    """Made twice in another container, and once when the image was built."""
    other = {"image": {"path": "/app/b.jpg", "text": "speckled", "format": "jpeg", "noise": .1},
             "audio": {"path": "/app/b.mp3", "speech": "wir sehen uns um sieben", "voice": "de", "format": "mp3"},
             "video": {"path": "/app/b.mp4", "width": 64, "height": 64, "fps": 25, "frames": 40, "events": [{"frame": 5, "color": "white", "text": "x"}]},
             "stripped_binary": {"path": "/app/b", "source": "int main(void) { return 3; }", "flags": ["-static"]}}
    files = {p.replace("fixture/", "fixture/b-") if n else p: text for n, kinds in enumerate((FIXTURES, other)) for kind in kinds
             for p, text in fixture_files(kind, other[kind] if n else None).items()}
    task = task_of(files=files, dockerfile="FROM tmax-base:fixtures\nCOPY . /app/\n")
    with Sandbox(task, "docker") as s, Sandbox(fixture_task, "docker") as built:
        got = s.run("for out in a b; do for d in fixture/*; do (cd $d && python3 make.py fixture.json /tmp/$out); done; sleep 1.1; done; diff -r /tmp/a /tmp/b && echo same",
                    timeout=120)
        assert got.output == "same\n"
        sums = "find app -type f ! -name 'b*.*' ! -path app/b | sort | xargs sha256sum"
        there = built.run("cd /; " + sums).output
        assert s.run("cd /tmp/a; " + sums).output == there and there.count("\n") == len(FIXTURES) + 3 + 3
        assert s.run("cd /tmp/a/app; file b.jpg b.mp3 b.mp4 b | grep -cE 'JPEG|MPEG|ISO Media'").output == "3\n"
        assert s.run("/tmp/a/app/b").exit_code == 3


IMAGE, AUDIO, SPEECH, VIDEO, BINARY, PACKAGE, COMPOSE = (declared for declared, _ in FIXTURES.values())
FAULT = PACKAGE["perturbation"]
BAD_FIXTURES = [
    ("image", "{", "JSON"), ("image", [], "object"), ("image", IMAGE | {"path": "app/x.png"}, "path"), ("image", IMAGE | {"path": "/app/../x"}, "path"),
    ("image", IMAGE | {"text": " "}, "text"), ("image", IMAGE | {"text": "a\x07"}, "text"), ("image", IMAGE | {"text": "x\n" * 99}, "60 lines"),
    ("image", IMAGE | {"format": "gif"}, "'gif'"), ("image", IMAGE | {"font_size": 500}, "font_size"), ("image", IMAGE | {"noise": 1}, "noise"),
    ("image", {"path": "/app/x", "text": "x"}, "fields must be path, text, format"), ("image", IMAGE | {"colour": "red"}, "fields must be"),
    ("audio", AUDIO | {"speech": "x"}, "not both"), ("audio", {"path": "/a", "format": "wav"}, "speech or tones"), ("audio", AUDIO | {"tones": []}, "tones"),
    ("audio", AUDIO | {"tones": [{"hz": 440, "ms": 100}, {"hz": 20, "ms": 100}]}, "tones[1]"), ("audio", AUDIO | {"format": "ogg"}, "'ogg'"),
    ("audio", SPEECH | {"speech": "..."}, "speech"), ("audio", SPEECH | {"voice": "hal"}, "voice"),
    ("video", VIDEO | {"width": 161}, "odd"), ("video", VIDEO | {"frames": 10 ** 6}, "frames"), ("video", VIDEO | {"events": []}, "events"),
    ("video", VIDEO | {"events": [{"frame": 60, "color": "red"}]}, "events[0] does not lie within the 60"), ("video", VIDEO | {"path": "/app/x.avi"}, ".mp4"),
    ("video", VIDEO | {"events": [{"frame": 1, "color": "blurple"}]}, "'blurple'"), ("video", VIDEO | {"events": [{"frame": 1}]}, "events[0]: its fields"),
    ("video", VIDEO | {"events": [{"frame": 1, "color": "red", "box": [150, 0, 11, 5]}]}, "box"), ("video", VIDEO | {"background": 3}, "background"),
    ("stripped_binary", BINARY | {"flags": ["-O2; rm"]}, "'-O2; rm'"), ("stripped_binary", BINARY | {"flags": ["-include", "/etc/passwd"]}, "'-include'"),
    ("stripped_binary", BINARY | {"flags": "-O2"}, "flags"), ("stripped_binary", BINARY | {"source": None}, "source"),
    ("stripped_binary", BINARY | {"source": "int main(void) { return x; }"}, "gcc does not take the source"),
    ("stripped_binary", BINARY | {"source": '#include <stdio.h>\nint main(void) { puts("melony"); }'}, "'melony' can be read"),
    ("vendored_package", PACKAGE | {"files": {}}, "files"), ("vendored_package", PACKAGE | {"files": {"../x": ""}}, "'../x'"),
    ("vendored_package", PACKAGE | {"perturbation": FAULT | {"file": "none.c"}}, "none.c"), ("vendored_package", PACKAGE | {"perturbation": []}, "perturbation"),
    ("vendored_package", PACKAGE | {"perturbation": FAULT | {"find": "sum"}}, "exactly once"), ("vendored_package", PACKAGE | {"perturbation": FAULT | {"find": ""}}, "once"),
    ("vendored_package", PACKAGE | {"files": TALLY | {"tally.c.orig": TALLY["tally.c"]}}, "still stands in tally.c.orig"),
    ("vendored_package", PACKAGE | {"perturbation": FAULT | {"replace": "return sum / n; /* right */"}}, "still stands in tally.c"),
    ("multi_service_compose", COMPOSE | {"services": COMPOSE["services"][:1]}, "2 to 10"), ("multi_service_compose", COMPOSE | {"faults": []}, "faults"),
    ("multi_service_compose", COMPOSE | {"services": COMPOSE["services"][:1] * 2}, "same name"),
    ("multi_service_compose", COMPOSE | {"services": [s | {"port": 80} for s in COMPOSE["services"]]}, "port 80"),
    ("multi_service_compose", COMPOSE | {"services": [s | {"name": "../x"} for s in COMPOSE["services"]]}, "'../x'"),
    ("multi_service_compose", COMPOSE | {"faults": [{"file": "web.ini", "find": "7001", "replace": "7002"}]}, "no file 'web.ini'"),
    ("multi_service_compose", COMPOSE | {"faults": [{"file": "web/web.ini", "find": "7001", "replace": "7002"}]}, "still stands in"),
]


@pytest.mark.parametrize("kind, declared, words", BAD_FIXTURES)
def test_a_bad_fixture_is_one_clear_line(kind, declared, words, tmp_path):
    path = tmp_path / "fixture.json"
    path.write_text(declared if isinstance(declared, str) else json.dumps(declared))
    got = subprocess.run([sys.executable, f"{ROOT}/fixtures/{kind}.py", path, tmp_path / "out"], capture_output=True, text=True)
    assert got.returncode == 1 and got.stderr.startswith(f"fixture.json ({kind}): ") and words in got.stderr, got
    assert got.stderr.count("\n") == 1 or "gcc" in words


# ------------------------------------------------------------------------------------------------ bases

DOMAIN_NAMES = ["security", "software_engineering", "file_operations", "data_querying", "data_science", "debugging",
           "scientific_computing", "data_processing", "system_administration"]


def test_every_domain_has_a_stage_that_stands_alone():
    stages = gen.base_stages()
    assert [name for name in stages if name not in ("core", "fixtures", "tools", "media")] == DOMAIN_NAMES
    for name, dockerfile in stages.items():
        parents = re.findall(r"(?m)^FROM (\S+) AS (\S+)$", dockerfile)
        assert parents[0] == ("${BASE}", "core") and parents[-1][1] == name
        assert all(parent == above for (parent, _), (_, above) in zip(parents[1:], parents))      # nothing that it does not stand on


def test_bases_builds_what_is_asked(capsys, monkeypatch, tmp_path):
    need("docker")
    code, said = cli(capsys, monkeypatch, gen, "bases", "--domain", "core")
    assert code == 0 and re.fullmatch(r"tmax-base:core +\d+ MB +\d+ s\n", said)
    code, said = cli(capsys, monkeypatch, gen, "bases", "--domain", "core", "--domain", "gardening")
    assert code.startswith("gen.py bases: ") and "gardening" in code and "data_querying" in code and said == ""
    (tmp_path / "Dockerfile").write_text("ARG BASE=tmax-base:core\nFROM ${BASE} AS x\nRUN echo so; no-such-command\n")
    monkeypatch.setattr(gen, "BASES", tmp_path / "Dockerfile")
    code, said = cli(capsys, monkeypatch, gen, "bases")
    assert code.startswith("gen.py bases: tmax-base:x does not build") and "no-such-command" in code and said == ""
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    code, said = cli(capsys, monkeypatch, gen, "bases")
    assert code.startswith("gen.py bases: ") and "nowhere.sock" in code


def test_domain_images_are_small_enough():
    need("docker")
    sizes = {tag: image["Size"] for image in docker_api(docker_hosts()[0]).images("tmax-base")
             for tag in image["RepoTags"] or [] if tag.split(":")[1] in DOMAIN_NAMES}
    assert all(size < 1.5e9 for size in sizes.values()), sizes


# ================================================================================================ sandbox.py under attack

@pytest.fixture
def impatient(monkeypatch):
    """Where a shell is known not to come back, the test does not wait for it as long as a run does."""
    monkeypatch.setattr(sandbox, "STOP_S", 3)
    monkeypatch.setattr(sandbox, "RESTORE_S", 5)


def test_a_loop_word_outside_of_a_loop_ends_the_command_alone(shared):
    for command in ("break", "continue", "if true; then break; fi", "echo a; continue 1"):
        assert shared.run(command).exit_code == 0
        assert shared.run("echo ok") == Result("ok\n", 0, False), command


@pytest.mark.parametrize("command", ["for fd in {3..255}; do eval \"exec $fd>&-\"; done", "exec 10<&-", "exec 11>&- 12>&- 13>&- 14>&-",
                                     "ulimit -n 4; true", "break 9", "continue 9", "exec 198>&- 199>&-"])
def test_a_shell_that_loses_its_descriptors_or_its_loop_comes_back(box, impatient, command):
    box.run("cd /tmp; export A=1")
    assert not box.run(command, timeout=4).timed_out
    got = box.run("pwd; echo $A", timeout=20)
    assert got.output.removesuffix(sandbox.RESTARTED).endswith("/tmp\n1\n") and not got.timed_out


@pytest.mark.parametrize("trap", ["echo K >&2", "echo K", 'echo "+ $BASH_COMMAND" >&2', r"printf '\0R0\0' >&2", r"printf '\0K\0'"])
def test_what_a_debug_trap_prints_is_no_control_message(box, trap):
    box.run(f"f() {{ echo still; }}; trap {trap!r} DEBUG", timeout=5)
    got = box.run("f", timeout=5)
    assert not got.timed_out and "still\n" in got.output and "[shell" not in got.output and "uptime" not in got.output
    assert box.run("exit 3").exit_code == 3
    assert box.run("echo ok") == Result("ok\n", 0, False)


STOLEN = "read -r -d '' -u 10 nonce; "       # the shell's own stdin, which bash keeps on 10 meanwhile


@pytest.mark.parametrize("numbers", ["inf 1 1 1 1 1/1 1", "nan 1 1 1 1 1/1 1", "1 1 1 1 1 1/1 " + "9" * 5000])
def test_a_forged_end_of_a_command_hurts_the_agent_alone(box, impatient, numbers):
    try:
        box.run(STOLEN + f"printf '\\0E0 hB %s {numbers}\\n/\\n\\0' $nonce >/proc/1/fd/3; printf %s $nonce; sleep .5", timeout=3)
        box.run("echo", timeout=3)
        assert box.run("echo ok", timeout=10).output.endswith("ok\n")
    except SandboxKilled:                            # it has taken our orders to process 1 as well
        pass


def test_output_after_a_forged_marker_is_bounded(box):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    got = box.run(STOLEN + "printf %s $nonce; head -c 300000000 /dev/zero | tr '\\0' x; sleep 30", timeout=10)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000       # KiB
    assert len(got.output) < 11_000 and box.run("echo ok", timeout=10).output.endswith("ok\n")


# Forks whatever the limit leaves, in an older job, which a timeout does not end.
FILLER = "python3 -c 'import os,time,signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True:\n try:\n  os.fork() or time.sleep(999)\n except OSError: time.sleep(.001)' & while set -- /proc/[0-9]*; (( $# < 505 )); do :; done;"


@pytest.mark.parametrize("command", ["exit 3", "while :; do :; done"])
def test_a_full_process_table_is_the_agents_fault(backend, impatient, command):
    with Sandbox(task_of(limits={"verifier_s": 30}), backend) as s:
        with pytest.raises(AgentFault):
            s.run(FILLER, timeout=20)
            for _ in range(20):        # on a busy machine a new shell may come before the next of the filler's forks
                s.run(command, timeout=2)
                s.run("echo", timeout=2)
        with pytest.raises(AgentFault):
            s.grade()


def test_a_broken_process_1_is_the_agents_fault(backend):
    program = "\n".join(["for line in open('/proc/1/maps'):", " a, b = (int(x, 16) for x in line.split()[0].split('-'))",
                         " if 'r-xp' in line and ('libc' in line or 'bash' in line):", "  with open('/proc/1/mem', 'r+b', 0) as f: f.seek(a); f.write(b'\\xf4' * (b - a))"])
    with Sandbox(task_of(files={"x.py": program}), backend) as s:          # process 1 is the agent's user's, who may debug it
        if s.run("python3 x.py").exit_code:
            pytest.skip("this kernel lets nobody debug what is not his child")
        with pytest.raises(AgentFault, match="process 1"):
            s.run("kill -9 $$", timeout=5)
            s.run("echo", timeout=5)


SHARED = {
    "shared pages": "import mmap,time\nm=mmap.mmap(-1, 300<<20)\nfor i in range(300): m[i<<20:(i+1)<<20]=b'x'*(1<<20)\ntime.sleep(20)",
    "memfd": "import os,time\nfd=os.memfd_create('x')\nfor i in range(300): os.write(fd, b'x'*(1<<20))\ntime.sleep(20)",
    "empty files": "import time\ntry:\n for i in range(300000): open('/tmp/%d' % i, 'w').close()\nexcept OSError: pass\ntime.sleep(20)",
}


@pytest.mark.parametrize("kind", SHARED)
def test_watchdog_counts_memory_that_no_process_owns(kind):
    need("bwrap")
    with Sandbox(task_of(files={"x.py": SHARED[kind]}, limits={"memory_mb": 200}), "bwrap") as s:
        with pytest.raises(SandboxKilled, match="memory"):
            s.run("python3 x.py", timeout=60)


def test_watchdog_counts_shared_memory_once():
    need("bwrap")
    program = ("import mmap,os,time\nm=mmap.mmap(-1, 60<<20)\nf=open('/tmp/x','w+b'); f.truncate(60<<20); n=mmap.mmap(f.fileno(), 60<<20)\n"
               "for k in (m, n):\n for i in range(60): k[i<<20:(i+1)<<20]=b'x'*(1<<20)\n"
               "for _ in range(5):\n if not os.fork():\n  sum(m[::4096]) + sum(n[::4096]); time.sleep(3); os._exit(0)\ntime.sleep(4)")
    with Sandbox(task_of(files={"x.py": program}, limits={"memory_mb": 256}), "bwrap") as s:
        assert s.run("python3 x.py; echo ok", timeout=60) == Result("ok\n", 0, False)


def test_the_agent_makes_no_namespaces(box):
    """With a user namespace of its own it could mount folders that nothing counts."""
    assert box.run("unshare -Ur true").exit_code and box.run("unshare -Urm mount -t tmpfs none /tmp").exit_code
    assert box.run("python3 -c 'import ctypes,os; c=ctypes.CDLL(None).syscall; print(c({\"x86_64\": 56, \"aarch64\": 220}[os.uname().machine], 0x10000000 | 17, 0, 0, 0, 0))'").output == "-1\n"
    assert box.run("python3 -c 'import threading,subprocess; threading.Thread(target=lambda: print(subprocess.getoutput(\"echo ok\"))).start()'").output == "ok\n"


TEMPORARY = "f=$(mktemp); echo 0 >$f; sleep 1; cp $f /logs/verifier/reward.txt"
HEREDOC = "bash /dev/stdin <<'E'\necho 0 >/logs/verifier/reward.txt\nsleep .5\n" + "# padding\n" * 9000 + "E\n"
TAMPER = "(while :; do for f in /tmp/*; do echo 1 >$f; done; done) >/dev/null 2>&1 &"


@pytest.mark.parametrize("tests", [TEMPORARY, HEREDOC])
def test_the_graders_temporary_files_are_its_own(backend, tests):
    with Sandbox(task_of(tests), backend) as s:
        s.run(TAMPER)
        assert s.grade().reward == 0


def test_a_folder_for_logs_that_the_image_gives_to_the_agent():
    need("docker")
    loop = "cd /logs; (while :; do mkdir -p verifier/x; for i in 1 2 3 4 5 6 7 8; do echo 1 >verifier/reward.txt; echo 1 >verifier/x/$RANDOM; done; done) >/dev/null 2>&1 &"
    with Sandbox(task_of("sleep .3; echo 0 >/logs/verifier/reward.txt; sleep .3", dockerfile=DOCKERFILE + "RUN mkdir -m 777 /logs\n"), "docker") as s:
        assert s.grade().reward == 0
        for _ in range(4):
            s.run(loop)
        for _ in range(5):
            try:
                assert s.grade().reward == 0
            except VerifierFailed:
                pass


def test_the_hosts_keyring_is_out_of_reach():
    """In a process of its own, whose session keyring gets a key."""
    need("bwrap")
    if os.uname().machine not in ("x86_64", "aarch64"):
        pytest.skip("other system calls here")
    request = "import ctypes,os\nkey = ctypes.CDLL(None).syscall({'x86_64': 249, 'aarch64': 218}[os.uname().machine], b'user', b'token', 0, 0)\nprint('reached' if key > 0 else 'no key')\n"
    task = task_of("python3 /app/look.py; echo 0 >/logs/verifier/reward.txt", files={"look.py": request})
    code = f"""
import ctypes, os
call, (add, control) = ctypes.CDLL(None).syscall, {{"x86_64": (248, 250), "aarch64": (217, 219)}}[os.uname().machine]
call(control, 1, None); call(add, b"user", b"token", b"SECRET", 6, ctypes.c_int(-3))
exec({request!r})
import sandbox
with sandbox.Sandbox({task!r}, "bwrap") as s:
    print(s.run("python3 look.py").output, s.grade().log)
"""
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    if not got.stdout.startswith("reached"):
        pytest.skip("no keyrings here")
    assert got.stdout == "reached\nno key\n no key\n\n", got
# ================================================================================================ gen.py make and check

# Replies as a good model would write them: one task of each domain, fixture and verifier, and a few more.
REPLIES = {row["spec"]["id"]: row for row in read_jsonl(f"{ROOT}/builtin/replies.jsonl")}
BASE = "tmax-make-test"


@pytest.fixture(scope="session")
def bases():
    """Base images under a name of the tests': every domain's is `core`, which is enough for REPLIES."""
    need("docker")
    api = docker_api(docker_hosts()[0])
    there = {tag for image in api.images() for tag in image["RepoTags"] or ()}
    for stage in gen.base_stages():
        source = "tmax-base:fixtures" if stage == "fixtures" else "tmax-base:core"
        if source in there:
            api.tag(source, BASE, stage)
        else:
            lacking("fixtures", f"{source} is missing: python gen.py bases")


@pytest.fixture
def writer(monkeypatch):
    """A chat server that answers by task (its persona stands in the prompt), call and attempt.

    plays: {persona: {"plan": replies, "environment": replies}}, the last of them for every further attempt. A reply is a
    text, or (status, headers, body), or a function of the request that gives one of the two."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    state = SimpleNamespace(plays={}, requests=[], at=collections.Counter(), usage=(1000, 500))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            talk = [m["content"] for m in body["messages"]]
            persona = next(p for p in state.plays if f"setting: {p}\n" in talk[0])
            call = "environment" if any(text.startswith("Good. Now") for text in talk) else "plan"
            state.requests.append((persona, call, body, self.headers["Authorization"]))
            replies = state.plays[persona][call]
            replies = replies if isinstance(replies, list) else [replies]
            reply = replies[min(state.at[persona, call], len(replies) - 1)]
            state.at[persona, call] += 1
            reply = reply(body) if callable(reply) else reply
            if isinstance(reply, str):
                reply = {"message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
            if isinstance(reply, dict):
                usage = dict(zip(["prompt_tokens", "completion_tokens"], state.usage))
                reply = 200, {}, json.dumps({"choices": [reply], "usage": usage}).encode()
            status, headers, data = reply
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            with_suppressed_pipe(self.wfile.write, data)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield state
    server.shutdown()
    server.server_close()


def with_suppressed_pipe(write, data):
    try:
        write(data)
    except OSError:      # the client was killed, or would not wait
        pass


def spec_like(id, name, **axes):
    """A spec for the writer to tell from others, with the axes of one of REPLIES."""
    return {"id": id, "axes": REPLIES[name]["spec"]["axes"] | {"persona": f"somebody who wants {id}"} | axes}


def play_of(name, **changes):
    return {"plan": REPLIES[name]["plan"], "environment": REPLIES[name]["environment"]} | changes


def make_command(writer, specs, out, *flags):
    write_jsonl(out.parent / "specs.jsonl", specs)
    return ["make", "--specs", out.parent / "specs.jsonl", "--base-url", writer.url, "--model", "m-1", "--out", out,
            "--base", BASE, *flags]


def dropped_of(out):
    return {row["id"]: row for row in read_jsonl(out.with_suffix(".dropped.jsonl"))}


def test_replies_cover_the_axes():
    axes = {axis: {row["spec"]["axes"][axis] for row in REPLIES.values()} for axis in AXES if axis != "primitive_skills"}
    taxonomy = load_taxonomy()
    for axis in ("domain", "fixture", "verifier", "task_complexity", "command_complexity"):
        assert axes[axis] == set(axis_values(taxonomy, axis))
    assert len(REPLIES) >= 12 and len(axes["persona"]) == len(REPLIES)


def test_recipes_are_read_in_many_threads_at_once():
    """Python 3.11's parser of syntax trees miscounts its depth where another thread enters it in a collection of garbage."""
    class Ring:
        def __init__(self):
            self.itself = self

        def __del__(self):
            time.sleep(0)  # lets another thread go on

    def read(depth):
        Ring()
        return read(depth - 1) if depth else gen.recipe("multi_protocol", "verifiers")[1]

    threshold = gc.get_threshold()
    try:
        gc.set_threshold(50)
        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(read, [n % 5 for n in range(300)]))) == 1
    finally:
        gc.set_threshold(*threshold)


def test_tasks_of_every_kind_are_made_and_solved(bases, writer, tmp_path, capsys, monkeypatch):
    """Each is built, fails untouched, and is solved twice; two calls each; and it runs in rollout.py as it is."""
    specs, out = [row["spec"] for row in REPLIES.values()], tmp_path / "new" / "tasks.jsonl"
    out.parent.mkdir()
    writer.plays = {row["spec"]["axes"]["persona"]: row for row in REPLIES.values()}
    code, said = cli(capsys, monkeypatch, gen, *make_command(writer, specs, out, "--check", "solve", "--price-in", 2,
                                                             "--price-out", 10))
    dropped = dropped_of(out)
    assert (code, dropped) == (0, {}) and said.count("\n") == 1, [(r["id"], r["reason"], r["detail"]) for r in dropped.values()]
    sent_back = [body["messages"][-1]["content"] for _, _, body, _ in writer.requests if len(body["messages"]) > 3]
    assert "12 kept, 0 dropped; 0 had been done before; 24 calls, 24,000 + 12,000 tokens, $0.17" in said, sent_back
    tasks = load_tasks(out)
    assert {t["id"]: t["axes"] for t in tasks} == {spec["id"]: spec["axes"] for spec in specs}
    for t in tasks:
        check_task(t)
        assert t["checked"]["build"] is True and t["checked"]["untouched"] < 1 and t["checked"]["solution"] == [1, 1]
        assert t["knob"] and t["limits"] == LIMITS and t["made"] == {"model": "m-1", "calls": 2, "repairs": 0, "tokens": [2000, 1000]}
        assert t["truth"] and t["truth"] not in json.dumps([t["instruction"], t["dockerfile"], t["tests"]])
        held = {f.split("/")[0] for f in t["files"]}
        assert ("fixture" in held) == (t["axes"]["fixture"] != "text_only") and not {"tests", "solution"} & held
    knobs = {t["id"]: t["knob"] for t in tasks}
    assert knobs["run-lengths"] == {"n": 12} and knobs["ledger-gate"] == {"malicious": 7, "benign": 5}
    assert knobs["sung-readings"] == {"threshold": .2} and knobs["miswired-shop"] == {"checks": 3} and knobs["two-clocks"] == {"files": 1}
    # What the model was told: the axes with their definitions, both contracts, how the image was built.
    shop = REPLIES["miswired-shop"]["spec"]["axes"]
    first, second = ([m["content"] for m in body["messages"]] for persona, _, body, _ in writer.requests if persona == shop["persona"])
    taxonomy = load_taxonomy()
    for text in [*shop["primitive_skills"], shop["skill_type"], taxonomy["task_complexity"]["complex"],
                 gen.recipe("multi_service_compose", "fixtures")[1]]:
        assert text in first[0]
    assert gen.recipe("multi_protocol", "verifiers")[1] in second[2] and "AS system_administration" in second[2]
    assert len(first) == 1 and second[:1] == first and second[1] == REPLIES["miswired-shop"]["plan"]
    everything = b"".join(path.read_bytes() for path in out.parent.iterdir())
    assert {auth for *_, auth in writer.requests} == {f"Bearer {KEY}"} and KEY.encode() not in everything
    # No answer in the image, and the unchanged record is an episode's task.
    by_id = {t["id"]: t for t in tasks}
    with Sandbox(by_id["keep-list"], "docker") as s:
        assert s.run("ls -d /fixture /tests /solution /out 2>/dev/null; find / -xdev '(' -name fixture.json -o -name "
                     "verifier.json -o -name solve.sh ')' 2>/dev/null").output == ""
        assert s.run("stat -c '%U' /app /app/keep.png /app/prints/bridge.txt").output == "user\n" * 3
    played = write_jsonl(tmp_path / "played.jsonl", [by_id["miswired-shop"], by_id["lost-checksum"]])
    assert cli(capsys, monkeypatch, rollout, "--tasks", played, "--oracle", "--backend", "docker", "--out", tmp_path / "r.jsonl")[0] == 0
    assert [r["reward"] for r in read_jsonl(tmp_path / "r.jsonl")] == [1, 1]
    # The same command again has nothing to do and asks nobody.
    asked = len(writer.requests)
    code, said = cli(capsys, monkeypatch, gen, *make_command(writer, specs, out, "--check", "solve"))
    assert code == 0 and len(writer.requests) == asked and "0 kept, 0 dropped; 12 had been done before" in said


GOOD_REPLY = "two-clocks"
PLAN, ENVIRONMENT = REPLIES[GOOD_REPLY]["plan"], REPLIES[GOOD_REPLY]["environment"]


def good_task(spec=REPLIES[GOOD_REPLY]["spec"]):
    plan, parts = gen.parse_reply(PLAN, ["instruction", "truth"]), gen.parse_reply(
        ENVIRONMENT, ["dockerfile", "verifier", "solution"], ["file", "test"])
    return gen.assemble(spec, plan, parts, BASE)


def without_tags(text):
    return re.sub(r"(?m)^<.*>\n?", "", text)


def envelope(text, finish="stop", **more):
    return {"message": {"role": "assistant", "content": text, **more}, "finish_reason": finish}


SPOILT = {  # kind: (which call, the reply, level, reason, what the model is told)
    "no tags": ("plan", without_tags(PLAN), "build", "format", "<instruction> is missing"),
    "no tags later": ("environment", without_tags(ENVIRONMENT), "build", "format", "<dockerfile> is missing"),
    "two answers": ("plan", PLAN + PLAN, "build", "format", "two sections <instruction>"),
    "two files": ("environment", ENVIRONMENT.replace("logs/bastion.log", "logs/gateway.log"), "build", "format", "two sections <file path=logs/gateway.log>"),
    "fence": ("environment", ENVIRONMENT.replace("<verifier>\n", "<verifier>\n```json\n"), "build", "format", "fence in <verifier>"),
    "not closed": ("environment", ENVIRONMENT.replace("</dockerfile>\n", ""), "build", "format", "dockerfile>"),
    "another section": ("plan", PLAN + "<fixture>\n{}\n</fixture>\n", "build", "format", "no <fixture>"),
    "leak": ("environment", ENVIRONMENT.replace("<verifier>", '<file path="hint.sh">\n' + ENVIRONMENT.split("<solution>\n")[1].replace(
        "</solution>", "</file>") + "<verifier>"), "build", "format", "has the solution in it"),
    "no JSON": ("environment", ENVIRONMENT.replace('{\n "files"', '{{\n "files"'), "build", "format", "<verifier> is not valid JSON"),
    "no knob": ("environment", ENVIRONMENT.replace('"files": {', '"filed": {'), "build", "format", "does not declare files"),
    "tests that pass": ("environment", ENVIRONMENT.replace("COPY logs /app/logs", "COPY logs /app/logs\nCOPY logs/all.txt /app/timeline.txt").replace(
        "<verifier>", '<file path="logs/all.txt">\n' + ENVIRONMENT.split('<test path="timeline.txt">\n')[1].split("</test>")[0] + "</file>\n<verifier>"),
        "verify", "untouched", "as expected"),
    "tests that crash": ("environment", ENVIRONMENT.replace('"file": "timeline.txt"', '"file": "nowhere.txt"'), "verify", "verifier",
                         "no test file 'nowhere.txt'"),
    "solution": ("environment", re.sub(r"(?s)<solution>.*?</solution>", "<solution>\nls /app/nothing\n</solution>", ENVIRONMENT), "solve", "solution",
                 "cannot access '/app/nothing'"),
    "build": ("environment", ENVIRONMENT.replace("COPY logs /app/logs", "COPY logs /app/logs\nRUN sh -c 'echo so far; no-such-program timeout'"), "build", "build",
              "no-such-program: not found"),
    "endless RUN": ("environment", ENVIRONMENT.replace("COPY logs /app/logs", "COPY logs /app/logs\nRUN echo on it && sleep 987654"), "build", "build",
                    "within 5 s"),
    "endless RUN that talks": ("environment", ENVIRONMENT.replace("COPY logs /app/logs", "COPY logs /app/logs\nRUN while :; do echo again; sleep .1; done"),
                               "build", "build", "again"),
    "a file outside": ("environment", ENVIRONMENT.replace("logs/bastion.log", "../logs/bastion.log"), "build", "build", "does not stay inside"),
    "COPY from outside": ("environment", ENVIRONMENT.replace("COPY logs", "COPY ../logs"), "build", "format", "name files that you gave"),
    "not UTF-8": ("plan", PLAN.replace("break-in", "break\ud800in"), "build", "format", "UTF-8"),
    "lost characters": ("plan", PLAN.replace("break-in", "break\ufffdin"), "build", "format", "UTF-8"),
    "cut": ("plan", envelope(PLAN[:300], "length"), "build", "cut", "cut at 32768 tokens"),
    "refusal": ("plan", envelope(None, refusal="I cannot help with break-ins."), "build", "refused", "cannot help"),
    "filter": ("environment", envelope("", "content_filter"), "build", "refused", "withheld"),
    "no content": ("plan", envelope([{"type": "text"}]), "build", "format", "missing"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_what_is_malformed_is_sent_back_and_then_dropped(kind, bases, writer, tmp_path, capsys, monkeypatch):
    """One spec's model mends it when told; the other's does not and is dropped, with the reason and its last reply."""
    call, reply, level, reason, told = SPOILT[kind]
    if "endless" in kind:
        prepare(good_task(), "docker")           # so that only the endless one needs its time
        monkeypatch.setattr(backends.docker, "BUILD_S", 5)
    specs = [spec_like("mended", GOOD_REPLY), spec_like("hopeless", GOOD_REPLY)]
    play = play_of(GOOD_REPLY)
    writer.plays = {specs[0]["axes"]["persona"]: play | {call: [reply, play[call]]},
                    specs[1]["axes"]["persona"]: play | {call: reply}}
    out = tmp_path / "tasks.jsonl"
    code, said = cli(capsys, monkeypatch, gen, *make_command(writer, specs, out, "--check", level, "--repairs", 1))
    kept, dropped = load_tasks(out), dropped_of(out)
    assert code == 0 and [t["id"] for t in kept] == ["mended"] and kept[0]["made"]["repairs"] == 1, dropped
    assert list(dropped) == ["hopeless"] and f"1 kept, 1 dropped ({reason} 1)" in said
    drop = dropped["hopeless"]
    assert drop["reason"] == reason and told in drop["detail"] and drop["axes"] == specs[1]["axes"] and drop["made"]["repairs"] == 1
    content = reply["message"]["content"] if isinstance(reply, dict) else reply
    assert drop["reply"] == (content if isinstance(content, str) else "")
    for persona in writer.plays:
        body, = (body for who, _, body, _ in writer.requests if who == persona and "cannot be used" in body["messages"][-1]["content"])
        assert told in body["messages"][-1]["content"] and len(body["messages"][-1]["content"]) < 7000
    assert 4 <= len(writer.requests) <= 7


def test_a_fixture_that_cannot_be_made_is_sent_back_at_once(bases, writer, tmp_path, capsys, monkeypatch):
    """With the compiler's own words, and before the environment is asked for."""
    spec, out = spec_like("lost", "lost-checksum"), tmp_path / "tasks.jsonl"
    plan = REPLIES["lost-checksum"]["plan"]
    writer.plays = {spec["axes"]["persona"]: play_of("lost-checksum", plan=[plan.replace("int c;", "int d;"), plan])}
    code, _ = cli(capsys, monkeypatch, gen, *make_command(writer, [spec], out, "--check", "build"))
    assert code == 0 and [t["id"] for t in load_tasks(out)] == ["lost"]
    assert [call for _, call, _, _ in writer.requests] == ["plan", "plan", "environment"]
    assert "undeclared" in writer.requests[1][2]["messages"][-1]["content"]
    assert "undeclared" not in json.dumps(writer.requests[2][2])      # a failed attempt is not part of the talk


def slow_once(seconds):
    naps = iter([seconds])

    def reply(body):
        time.sleep(next(naps, 0))
        return PLAN
    return reply


@pytest.mark.parametrize("reply, waits", [
    ([(429, {"Retry-After": "7"}, b"busy"), PLAN], [7]), ([(500, {}, b"oh"), (503, {}, b"oh"), PLAN], [2, 4]), (slow_once(12), [2]),
    ([(200, {}, b'{"choices": [{"message": {"content": "\xff\xfe"}}]}'), PLAN], [2]),
], ids=["429", "500", "timeout", "bytes that are no text"])
def test_passing_troubles_cost_a_task_nothing(reply, waits, bases, writer, tmp_path, capsys, monkeypatch):
    slept = no_sleep(monkeypatch)
    monkeypatch.setattr(rollout, "ANSWER_S", 4)
    spec, out = spec_like("patient", GOOD_REPLY), tmp_path / "tasks.jsonl"
    writer.plays = {spec["axes"]["persona"]: play_of(GOOD_REPLY, plan=reply)}
    code, _ = cli(capsys, monkeypatch, gen, *make_command(writer, [spec], out, "--check", "build"))
    task, = load_tasks(out)
    assert code == 0 and task["made"]["calls"] == 2 and task["made"]["repairs"] == 0
    assert slept == waits


def test_lasting_troubles_leave_a_spec_for_the_next_run(bases, writer, tmp_path, capsys, monkeypatch):
    """A prompt that the endpoint chokes on is left, one that it refuses is dropped; the others are made all the same."""
    no_sleep(monkeypatch)
    specs, out = [spec_like(name, GOOD_REPLY) for name in ("choked", "refused", "fine")], tmp_path / "tasks.jsonl"
    choked, refused, fine = (spec["axes"]["persona"] for spec in specs)
    writer.plays = {choked: play_of(GOOD_REPLY, plan=(500, {}, b"oh dear")), fine: play_of(GOOD_REPLY),
                    refused: play_of(GOOD_REPLY, environment=(400, {}, b"prompt too long"))}
    command = make_command(writer, specs, out, "--check", "build")
    code, said = cli(capsys, monkeypatch, gen, *command)
    assert code == 0 and "choked is left for the next run: " in said and "500: oh dear" in said
    assert "1 kept, 1 dropped (endpoint 1), 1 left" in said and [t["id"] for t in load_tasks(out)] == ["fine"]
    assert "400: prompt too long" in dropped_of(out)["refused"]["detail"] and dropped_of(out)["refused"]["reply"] == PLAN
    writer.plays[choked] = play_of(GOOD_REPLY)
    code, said = cli(capsys, monkeypatch, gen, *command)
    assert code == 0 and "1 kept, 0 dropped; 2 had been done before" in said and len(load_tasks(out)) == 2 and len(dropped_of(out)) == 1


@pytest.mark.parametrize("trouble, named", [((401, {}, f"Incorrect API key provided: {KEY}".encode()), "401: Incorrect"),
                                            ((500, {}, b"down for the night"), "three in a row"), (None, "Connection")])
def test_an_endpoint_that_takes_no_calls_ends_the_run_with_one_line(trouble, named, bases, writer, tmp_path, capsys, monkeypatch):
    no_sleep(monkeypatch)
    specs, out = [spec_like(f"s{i}", GOOD_REPLY) for i in range(40)], tmp_path / "tasks.jsonl"
    writer.plays = {spec["axes"]["persona"]: play_of(GOOD_REPLY, plan=trouble) for spec in specs}
    url = writer.url
    writer.url = writer.url if trouble else "http://127.0.0.1:9/v1"
    command = make_command(writer, specs, out, "--check", "build", "--workers", 2)
    code, said = cli(capsys, monkeypatch, gen, *command)
    assert code.startswith("gen.py make: stopped: ") and named in code and code.count("\n") == 0
    assert "0 kept, 0 dropped, 40 left" in said and KEY not in said + code and len(writer.requests) <= 36
    assert out.read_bytes() == out.with_suffix(".dropped.jsonl").read_bytes() == b""
    writer.plays, writer.url = {spec["axes"]["persona"]: play_of(GOOD_REPLY) for spec in specs}, url
    code, said = cli(capsys, monkeypatch, gen, *make_command(writer, specs[:3], out, "--check", "build", "--workers", 2))
    assert code == 0 and len(load_tasks(out)) == 3


def test_kill_9_at_any_moment_loses_and_doubles_nothing(bases, writer, tmp_path):
    specs, out = [spec_like(f"s{i:02}", GOOD_REPLY) for i in range(24)], tmp_path / "tasks.jsonl"
    bad = {"s03", "s11", "s20"}
    for spec in specs:
        def plan(body, text="no" if spec["id"] in bad else PLAN):
            time.sleep(body["seed"] % 7 / 20)
            return text
        writer.plays[spec["axes"]["persona"]] = play_of(GOOD_REPLY, plan=plan)
    command = [sys.executable, f"{ROOT}/gen.py", *map(str, make_command(writer, specs, out, "--check", "build", "--repairs", 0,
                                                                       "--workers", 3))]
    kills = 0
    for _ in range(30):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        before = len(out.read_bytes().splitlines()) if out.exists() else 0
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline and (
                kills == 4 or not out.exists() or len(out.read_bytes().splitlines()) < before + 3):
            time.sleep(.005)
        if process.poll() is not None:
            break
        process.kill()
        process.wait()
        kills += 1
        with open(out, "ab") as f:               # what a kill in mid-write leaves
            f.write(b'{"id": "s2' if kills == 2 else b"")
    output = process.communicate()
    assert process.returncode == 0 and kills == 4, output
    assert sorted([t["id"] for t in load_tasks(out)] + list(dropped_of(out))) == sorted(spec["id"] for spec in specs)
    assert set(dropped_of(out)) == bad and len(read_jsonl(out.with_suffix(".dropped.jsonl"))) == 3


def test_max_cost_holds_with_calls_in_flight(bases, writer, tmp_path, capsys, monkeypatch):
    """Every call of a thousand tokens for a cent may take up to two; ten cents are never passed."""
    specs, out = [spec_like(f"s{i:02}", GOOD_REPLY) for i in range(12)], tmp_path / "tasks.jsonl"
    in_flight, most, lock = [0], [0], threading.Lock()

    def plan(body):
        with lock:
            in_flight[0] += 1
            most[0] = max(most[0], in_flight[0])
        time.sleep(.2)
        with lock:
            in_flight[0] -= 1
        return PLAN

    writer.plays = {spec["axes"]["persona"]: play_of(GOOD_REPLY, plan=plan) for spec in specs}
    writer.usage = (2000, 1000)
    flags = ["--check", "build", "--price-in", 0, "--price-out", 10, "--max-reply-tokens", 2000, "--workers", 8]
    code, said = cli(capsys, monkeypatch, gen, *make_command(writer, specs, out, *flags, "--max-cost", .1))
    spent = len(writer.requests) * .01
    assert code.startswith("gen.py make: stopped: --max-cost 0.1: $") and .075 < spent < .1001 and 1 < most[0] <= 5
    assert f"${spent:.2f}" in said and len(load_tasks(out)) <= 5
    code, said = cli(capsys, monkeypatch, gen, *make_command(writer, specs, out, *flags))
    assert code == 0 and len(load_tasks(out)) == 12
    code, _ = cli(capsys, monkeypatch, gen, *make_command(writer, specs, tmp_path / "b.jsonl", *flags, "--max-cost", .019))
    assert "$0.0000 spent, and the next call may take $0.0200" in code


def test_usage_that_a_server_does_not_tell_is_guessed(monkeypatch, endpoint):
    args = SimpleNamespace(base_url=endpoint.url, model="m", price_in=1, price_out=1, max_cost=1, max_reply_tokens=100, temperature=1)
    client, made = gen.Client(args), {"calls": 0, "tokens": [0, 0]}
    endpoint.script = [ok({"role": "assistant", "content": "x" * 400}),
                       (200, {}, {"choices": [{"message": {"content": "a"}}], "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 50}})]
    client.ask([{"role": "user", "content": "y" * 300}], 0, made)
    assert made["tokens"][0] == 100 and 100 <= made["tokens"][1] <= 120
    client.ask([{"role": "user", "content": "y"}], 0, made)
    assert client.tokens == made["tokens"] and client.tokens[1] >= 145 and client.in_flight == [] and client.spent > 0


SOURCES = ["a.txt", "data/b.txt", "fixture/fixture.json", "fixture/make.py"]


@pytest.mark.parametrize("lines", [
    "COPY a.txt /app/", "COPY a.txt data/ /app/", 'COPY ["a.txt", "/app/"]', "copy --chown=user:user a.txt /app/a", "ADD data /app/data",
    "COPY *.txt /app/", "COPY data/* /app/", "# COPY . /app\nRUN true", "RUN pip install x==1 && \\\n    true", "ENV A=1\nARG B\nWORKDIR /app/x", "",
])
def test_dockerfile_lines_that_are_taken(lines):
    gen.check_dockerfile(lines, dict.fromkeys(SOURCES))


@pytest.mark.parametrize("lines", [
    "COPY . /app/", "COPY ./ /app/", "COPY * /app/", "COPY / /app/", "COPY fixture /x", "COPY ./fixture/ /x", "COPY fixture/fixture.json /x",
    "COPY data/../fixture /x", "COPY f*e /x", "COPY */fixture.json /x", "COPY fix?ure /x", "COPY [^x]ixture /x", "COPY [f]ixture /x", "ADD . /x",
    'COPY "fixture" /x', "COPY f\"ixture\" /x", "COPY fi\\xture /x", "ARG D=fixture\nCOPY $D /x", "ENV D=fixture\nCOPY ${D} /x",
    'COPY ["fixture", "/x"]', 'COPY ["\\u0066ixture", "/x"]', 'COPY [1, "/x"]', 'COPY ["a.txt" /x]', "COPY a.txt \\\nfixture /x",
    "COPY a.txt \\\n# a comment\nfixture /x", "COPY a.txt \\\n\n fixture /x", "COPY --from=fixture /fixture /x", "COPY --from=0 /fixture /x",
    "COPY --chown=user --from=fixture / /x", "COPY --link fixture /x", "RUN --mount=type=bind,from=fixture,target=/x cp -r /x /y",
    "RUN --mount=from=fixture,target=/x \\\n cp -r /x /y", "COPY <<EOF /x\nfixture\nEOF", "ADD http://example.org/x /x", "COPY nothing.txt /x",
    "COPY ../a.txt /x", "COPY /etc/passwd /x", "FROM tmax-base:core", "USER root", "VOLUME /app", "ONBUILD RUN true", "ENTRYPOINT true", "FRMO x",
    "\tCOPY\tfixture\t/x", "COPY\u00a0fixture\u00a0/x",
])
def test_dockerfile_lines_that_could_leak_or_escape_are_refused(lines):
    with pytest.raises(gen.Rejected, match="<dockerfile>") as e:
        gen.check_dockerfile(lines, dict.fromkeys(SOURCES))
    assert e.value.reason == "format"


@pytest.mark.parametrize("text, want", [
    ("<a>\n", "missing"), ("", "missing"), ("<truth>x</truth>", "own line"), ("<truth>\nx\n</truth>\n <file path='a'>\n", "own line"),
    ("<truth>\n \n</truth>", "missing or empty"), ('<truth path="a">\nx\n</truth>', "no <truth> with a path"), ("<file>\nx\n</file>\n<truth>\nx\n</truth>", "no <file> without a path"),
    ("<truth>\nx\n</truth>", {"truth": "x", "file": {}}), ("Sure!\n<truth>\nx\n</truth>\nDone.", {"truth": "x", "file": {}}),
    ("<think>\n<truth>\nno\n</truth>\n</think>\n<truth>\nx\n</truth>", {"truth": "x", "file": {}}), ("no\n</think>\n\n<truth>\nx\n</truth>", {"truth": "x", "file": {}}),
    ('<truth>\nx\n</truth>\n<file path="a/b.py">\n\n  print(1)\n\n</file>', {"truth": "x", "file": {"a/b.py": "\n  print(1)\n\n"}}),
    ('<truth>\nx\n</truth>\n<file path="a">\n```py\n  1\n```\n</file>', {"truth": "x", "file": {"a": "  1\n"}}),
    ('<truth>\n```\nx\n</truth>\n<file path="a">\n</file>', {"truth": "```\nx", "file": {"a": ""}}),
    ('<truth>\nx\n</truth>\n<file path="a">\nif a <file and b:\n</file>', {"truth": "x", "file": {"a": "if a <file and b:\n"}}),
    ('<truth>\nx\n</truth>\n<file path="a">\n<files>\n <file>\n</files>\n</file>', {"truth": "x", "file": {"a": "<files>\n <file>\n</files>\n"}}),
    ('<truth>\nx\n</truth>\n<file path="a">\n1\n<file path="b">\n2\n</file>', 'not closed before <file path="b">'),
    ('<truth>\r\nx\r\n</truth>\r\n', {"truth": "x", "file": {}}),
])
def test_reading_a_reply(text, want):
    if isinstance(want, dict):
        assert gen.parse_reply(text, ["truth"], ["file"]) == want
    else:
        with pytest.raises(gen.Rejected, match=want):
            gen.parse_reply(text, ["truth"], ["file"])


GOOD_SPEC = REPLIES[GOOD_REPLY]["spec"]


@pytest.mark.parametrize("specs, flags, named", [
    (None, ["--preset", "rl_v9"], "no preset rl_v9"), (None, ["--weight", "fixture=hologram:2"], "no such value"),
    (None, ["--weight", "fixture"], "axis=value:w"), ([GOOD_SPEC, GOOD_SPEC], [], "two specs with the id two-clocks"),
    (["{", GOOD_SPEC], [], "specs.jsonl:1: not a line of JSON"), ([GOOD_SPEC | {"id": "../up"}], [], "the id '../up'"),
    ([GOOD_SPEC | {"id": ".."}], [], "the id '..'"), ([{"id": "a"}], [], "spec a needs axes"), ([GOOD_SPEC | {"id": 7}], [], "the id 7"),
    ([GOOD_SPEC | {"axes": GOOD_SPEC["axes"] | {"verifier": "vibes"}}], [], "no verifier 'vibes'"),
    ([GOOD_SPEC | {"axes": GOOD_SPEC["axes"] | {"verifier": "multi_protocol"}}], [], "do not go together: something has to be running"),
    ([GOOD_SPEC], ["--base-url", "localhost:8000"], "--base-url localhost:8000"), ([GOOD_SPEC], ["--max-cost", "1"], "--price-in"),
    ([GOOD_SPEC], ["--base", "tmax-nowhere"], "`python gen.py bases` builds"), ([GOOD_SPEC], ["--specs", "/nowhere/specs.jsonl"], "/nowhere/specs.jsonl"),
    ([GOOD_SPEC], ["--out", "/proc/nowhere/tasks.jsonl"], "/proc/nowhere"),
])
def test_make_says_what_is_wrong_before_it_pays(specs, flags, named, bases, writer, tmp_path, capsys, monkeypatch):
    out = tmp_path / "tasks.jsonl"
    command = make_command(writer, [], out, *flags)
    if specs is None:
        del command[1:3]
    else:
        (tmp_path / "specs.jsonl").write_text("".join((s if isinstance(s, str) else json.dumps(s)) + "\n" for s in specs))
    code, said = cli(capsys, monkeypatch, gen, *command)
    assert code.startswith("gen.py make: ") and named in code and "\n" not in code and not said and not writer.requests


def test_a_torn_last_spec_and_a_full_disk_lose_nothing_else(bases, writer, tmp_path):
    specs, out = [spec_like(f"s{i}", GOOD_REPLY) for i in range(4)], tmp_path / "tasks.jsonl"
    writer.plays = {spec["axes"]["persona"]: play_of(GOOD_REPLY) for spec in specs}
    command = [sys.executable, f"{ROOT}/gen.py", *map(str, make_command(writer, specs, out, "--check", "build", "--workers", "1"))]
    with open(tmp_path / "specs.jsonl", "a") as f:
        f.write('{"id": "s4", "ax')
    size = int(1.5 * len(json.dumps(good_task())))             # of a file: the second task does not fit

    def little_disk():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=little_disk)
    assert done.returncode == 1 and "could not be written (File too large)" in done.stderr.splitlines()[-1], done
    kept = read_jsonl(out)
    assert 1 <= len(kept) < 4 and out.read_bytes().endswith(b"\n")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "dropped a torn last line" in done.stderr and sorted(t["id"] for t in load_tasks(out)) == ["s0", "s1", "s2", "s3"]
    assert read_jsonl(out)[:len(kept)] == kept


def test_check_of_builtin_tasks(backend, tmp_path, capsys, monkeypatch):
    tasks = gen.builtin_tasks(18 if backend == "bwrap" else 3, 1, "val", FAMILY_NAMES)
    lazy = tasks[1] | {"id": "lazy", "tests": {"test.sh": {"text": "echo 1 >/logs/verifier/reward.txt"}}}
    stuck = tasks[2] | {"id": "stuck", "solution": {"solve.sh": {"text": "echo I give up"}}}
    path, out = write_jsonl(tmp_path / "tasks.jsonl", [*tasks, lazy, stuck]), tmp_path / "good.jsonl"
    flags = ["check", path, "--check", "solve", "--backend", backend, "--out", out]
    code, said = cli(capsys, monkeypatch, gen, *flags)
    assert code == 1 and f"{len(tasks)} kept, 2 dropped (" in said and "lazy: untouched: " in said and "I give up" in said
    kept = {t["id"]: t for t in load_tasks(out)}
    assert {id: {k: v for k, v in t.items() if k != "checked"} for id, t in kept.items()} == {t["id"]: t for t in tasks}
    assert all(t["checked"]["build"] and t["checked"]["untouched"] < 1 and t["checked"]["solution"] == [1, 1] for t in kept.values())
    drop = dropped_of(out)
    assert drop["lazy"]["checked"] == {"build": True, "untouched": 1} and drop["stuck"]["checked"]["solution"][0] < 1
    code, said = cli(capsys, monkeypatch, gen, *flags)
    assert code == 0 and f"0 kept, 0 dropped; {len(tasks) + 2} had been done before" in said
    code, said = cli(capsys, monkeypatch, gen, "check", write_jsonl(tmp_path / "one", [lazy, stuck]), "--check", "build", "--backend", backend)
    assert code == 0 and "2 kept" in said


@pytest.mark.parametrize("lines, named", [([bash_task("a"), bash_task("a")], "line 1 has the same id"), (["{", bash_task("a")], "tasks.jsonl:1: "),
                                          ([bash_task("a") | {"tests": {}}], None), (None, "No such file")])
def test_check_says_what_is_wrong(lines, named, bwrap, tmp_path, capsys, monkeypatch):
    path = tmp_path / "tasks.jsonl"
    if lines:
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    code, said = cli(capsys, monkeypatch, gen, "check", path, "--backend", "bwrap")
    if named:
        assert str(code).startswith("gen.py check: ") and named in code
    else:
        assert code == 1 and "a: build: task a: tests/test.sh is missing" in said
# ================================================================================================ taxonomy.json, gen.py sample and stats

# RECIPE.md section 1: domain -> (skill types, primitive skills, personas)
DOMAIN_COUNTS = {
    "security": ("Systems, Data Processing, Web Security, Algorithmic, Testing", 27, 9),
    "software_engineering": ("Algorithmic, Systems, Data Processing, Web Security, Testing, Mathematical, Multi-Language", 40, 15),
    "file_operations": ("File I/O, Navigation, Data Parsing, Transformation, Archives", 28, 7),
    "data_querying": ("Query Construction, Data Comprehension, Graph Processing, Result Processing", 20, 6),
    "data_science": ("Systems, Data Processing, Algorithmic, Mathematical, Testing", 29, 6),
    "debugging": ("Systems, Debugging, Testing, Algorithmic, Data Processing, Mathematical, Forensics", 39, 12),
    "scientific_computing": ("Data Processing, Algorithmic, Mathematical, Systems, Testing, Statistical", 32, 5),
    "data_processing": ("Data I/O, Manipulation, String/Text, Algorithmic, Mathematical, Time Series, Systems", 35, 7),
    "system_administration": ("Filesystem, Process/Service, Network, Configuration, Deployment, Shell Scripting", 33, 18)}
COMMAND_KINDS = {"bash only", "bash + code", "bash + code + system services"}
LANGUAGE_SHARES = {"Python": .35, "C": .15, "Bash": .15, "C++": .10, "Rust": .07, "Go": .07, "several languages": .06, "any": .05}
FIXTURE_KINDS = {"text_only", "image", "audio", "video", "stripped_binary", "vendored_package", "multi_service_compose"}
VERIFIER_KINDS = {"exact_text", "metric_threshold", "adversarial_corpus", "fuzz_equivalence", "multi_protocol"}
# preset -> (P(intricate), P(a verifier other than exact_text), P(a fixture other than text_only))
PRESETS = {"legacy": (0, 0, 0), "sft_v2": (2 / 3, 2 / 3, 2 / 3), "rl_v2": (.75, 1, 1), "tmax15k": (.25, 1 / 3, 1 / 3)}
TAXONOMY = json.loads((HERE / "taxonomy.json").read_text())
SAMPLED = 9_000


@pytest.fixture(scope="module")
def sampled():
    return {preset: [spec["axes"] for spec in sample_specs(SAMPLED, 0, preset)] for preset in PRESETS}


def plausible(count, n, p, sigmas=4.5):
    """Whether count of n is a plausible outcome at probability p: 4.5 sigma, once in 150,000 looks."""
    return abs(count - n * p) <= sigmas * math.sqrt(n * p * (1 - p)) + 1e-9


def forbidden(axes):
    return [rule["why"] for rule in TAXONOMY["incompatible"]
            if not [axis for axis in rule if axis != "why" and axes[axis] not in rule[axis]]]


def test_taxonomy_has_the_papers_counts():
    domains = TAXONOMY["domains"]
    assert {name: (", ".join(d["skill_types"]), sum(map(len, d["skill_types"].values())), len(d["personas"]))
            for name, d in domains.items()} == DOMAIN_COUNTS
    primitives = [p for d in domains.values() for ps in d["skill_types"].values() for p in ps]
    personas = [p for d in domains.values() for p in d["personas"]]
    assert (len(domains), sum(len(d["skill_types"]) for d in domains.values())) == (9, 52)
    assert len(set(primitives)) == 283 and len(set(personas)) == 85
    assert TAXONOMY["language"] == LANGUAGE_SHARES and set(TAXONOMY["command_complexity"]) == COMMAND_KINDS
    assert list(TAXONOMY["task_complexity"]) == ["short", "moderate", "complex", "intricate"]
    assert set(TAXONOMY["fixture"]) == FIXTURE_KINDS and set(TAXONOMY["verifier"]) == VERIFIER_KINDS
    assert set(TAXONOMY["presets"]) == set(PRESETS) and TAXONOMY["presets"]["tmax15k"] == {"mix": {"legacy": 10000, "rl_v2": 5000}}
    explained = [TAXONOMY[axis] for axis in ("task_complexity", "command_complexity", "fixture", "verifier")]
    assert all(len(text.split()) >= 6 and "\n" not in text for axis in explained for text in axis.values())
    assert all(rule["why"] for rule in TAXONOMY["incompatible"])
    words = [set(re.findall("[a-z]{3,}", text.lower())) for text in primitives]
    alike = [pair for pair in itertools.combinations(words, 2) if len(set.intersection(*pair)) > .5 * len(set.union(*pair))]
    assert min(map(len, words)) >= 3 and not alike      # 283 skills, not 200 and their paraphrases
    assert all(persona.startswith(("a ", "an ", "the ")) and len(persona.split()) >= 6 for persona in personas)


@pytest.mark.parametrize("preset", PRESETS)
def test_sampled_shares(sampled, preset):
    drawn, (intricate, verifier, fixture) = sampled[preset], PRESETS[preset]
    old = {"task_complexity": (1 - intricate) / 3}
    want = {"domain": dict.fromkeys(DOMAIN_COUNTS, 1 / 9), "language": LANGUAGE_SHARES,
            "task_complexity": {"short": old["task_complexity"], "moderate": old["task_complexity"],
                                "complex": old["task_complexity"], "intricate": intricate},
            "command_complexity": dict.fromkeys(COMMAND_KINDS, 1 / 3)}
    for axis, shares in want.items():
        counts = collections.Counter(axes[axis] for axes in drawn)
        assert set(counts) == {value for value, p in shares.items() if p}, axis
        off = {v: (counts[v], SAMPLED * p) for v, p in shares.items() if not plausible(counts[v], SAMPLED, p)}
        assert not off, (axis, off)
    if preset == "tmax15k":     # dealt out in turn: two of legacy, one of rl_v2
        assert collections.Counter(a["verifier"] for a in drawn)["exact_text"] == 6_000
    # P(new) holds in the whole and in every corner, however few values fit there.
    for where in ("domain", "command_complexity", "task_complexity"):
        for value, part in itertools.groupby(sorted(drawn, key=lambda a: a[where]), key=lambda a: a[where]):
            part = list(part)
            if preset == "tmax15k" and where == "task_complexity":
                continue        # there the presets themselves differ in it
            assert plausible(sum(a["verifier"] != "exact_text" for a in part), len(part), verifier), value
            assert plausible(sum(a["fixture"] != "text_only" for a in part), len(part), fixture), value


def test_skill_types_and_personas_are_uniform_in_their_domain(sampled):
    drawn = sampled["sft_v2"]
    for name, domain in TAXONOMY["domains"].items():
        here = [axes for axes in drawn if axes["domain"] == name]
        for axis, values in (("skill_type", domain["skill_types"]), ("persona", domain["personas"])):
            counts = collections.Counter(axes[axis] for axes in here)
            assert set(counts) == set(values) and all(plausible(n, len(here), 1 / len(values)) for n in counts.values())


@pytest.mark.parametrize("preset", PRESETS)
def test_no_incompatible_combination_is_drawn(sampled, preset):
    drawn = sampled[preset]
    assert not [axes for axes in drawn if forbidden(axes)]
    services = [a for a in drawn if "multi_protocol" == a["verifier"] or "multi_service_compose" == a["fixture"]]
    assert {a["command_complexity"] for a in services} <= {"bash + code + system services"}
    assert bool(services) == (preset != "legacy")


def test_verifier_and_fixture_are_uniform_over_what_fits(sampled):
    drawn = sampled["rl_v2"]
    cells = collections.defaultdict(collections.Counter)
    for a in drawn:
        cells[a["domain"], a["command_complexity"]][a["verifier"]] += 1
        cells[a["domain"], a["command_complexity"], a["verifier"]][a["fixture"]] += 1
    for (domain, commands, *verifier), counts in cells.items():
        context = {"domain": domain, "task_complexity": "short", "command_complexity": commands, "verifier": None, "fixture": None}
        if verifier:
            fits = {f for f in FIXTURE_KINDS - {"text_only"} if not forbidden({**context, "verifier": verifier[0], "fixture": f})}
        else:
            fits = {v for v in VERIFIER_KINDS - {"exact_text"} if not forbidden({**context, "verifier": v})}
        total = counts.total()
        assert set(counts) <= fits and all(plausible(counts[value], total, 1 / len(fits)) for value in fits), (domain, commands)


def test_every_compatible_pair_of_verifier_and_fixture_occurs(sampled):
    seen = {(a["verifier"], a["fixture"]) for a in sampled["sft_v2"]}
    never = {(v, f) for v in VERIFIER_KINDS for f in FIXTURE_KINDS} - seen
    rules = {(v, f) for rule in TAXONOMY["incompatible"] if set(rule) == {"verifier", "fixture", "why"}
             for v in rule["verifier"] for f in rule["fixture"]}
    assert never == rules and len(rules) >= 4


def test_primitives_come_from_the_chosen_skill_type_first(sampled):
    lengths, mixed = collections.Counter(), 0
    for axes in sampled["tmax15k"]:
        skills, drawn = TAXONOMY["domains"][axes["domain"]]["skill_types"], axes["primitive_skills"]
        own = skills[axes["skill_type"]]
        first = min(len(drawn), len(own))
        assert len(set(drawn)) == len(drawn) and set(drawn[:first]) <= set(own)
        assert set(drawn[first:]) <= {p for ps in skills.values() for p in ps} - set(own)
        lengths[len(drawn)] += 1
        mixed += first < len(drawn)
    assert set(lengths) == {3, 4, 5} and all(plausible(n, SAMPLED, 1 / 3) for n in lengths.values()) and mixed


def test_same_seed_same_bytes(tmp_path):
    def bytes_of(*args, **env):
        out = tmp_path / "new" / "s.jsonl"
        done = subprocess.run([sys.executable, "gen.py", "sample", "--out", out, *map(str, args)], cwd=HERE,
                              capture_output=True, text=True, env={**os.environ, **env})
        assert done.returncode == 0, done.stderr
        return out.read_bytes()

    first = bytes_of("--n", 500, "--seed", 3, "--preset", "sft_v2", PYTHONHASHSEED="1")
    assert first == bytes_of("--n", 500, "--seed", 3, "--preset", "sft_v2", PYTHONHASHSEED="2")
    assert bytes_of("--n", 700, "--seed", 3, "--preset", "sft_v2").startswith(first)     # a longer sample goes on
    others = [bytes_of("--n", 500, "--seed", 4, "--preset", "sft_v2"), bytes_of("--n", 500, "--seed", 3, "--preset", "rl_v2"),
              bytes_of("--n", 500, "--seed", 3, "--preset", "sft_v2", "--weight", "language=Go:5")]
    specs = [json.loads(line) for text in (first, *others) for line in text.splitlines()]
    assert len({s["id"] for s in specs} | {s["id"] for s in map(json.loads, first.splitlines())}) >= 1500
    assert len({json.dumps(s["axes"]) for s in specs[:500]}) == 500
    assert all(set(s) == {"id", "axes"} and tuple(s["axes"]) == AXES and re.fullmatch(r"[\w.-]+", s["id"]) for s in specs)
    by_id = {}
    assert all(by_id.setdefault(s["id"], s["axes"]) == s["axes"] for s in specs)         # an id names one spec


def test_speed_of_sampling(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "gen.py", "sample", "--n", "20000", "--out", tmp_path / "s.jsonl"], cwd=HERE,
                   check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 5
    assert len(read_jsonl(tmp_path / "s.jsonl")) == 20_000


def test_sample_prints_the_shares(tmp_path, capsys, monkeypatch):
    code, said = cli(capsys, monkeypatch, gen, "sample", "--n", 3000, "--preset", "rl_v2", "--out", tmp_path / "s")
    counts = collections.Counter(s["axes"]["fixture"] for s in read_jsonl(tmp_path / "s"))
    row = re.search(r"fixture +image +([\d.]+)% +([\d.]+)% +([\d.]+)%", said)
    assert code == 0 and float(row[1]) == round(100 * counts["image"] / 3000, 2) and float(row[3]) == 16.67
    assert abs(float(row[1]) - float(row[2])) < 4 and re.search(r"domain +security +[\d.]+% +11.11%\n", said)
    for axis, count in (("skill_type", 29), ("primitive_skills", 283), ("persona", 85)):
        assert f"{axis}: {count} of {count} drawn" in said


def test_weights_shift_what_they_name():
    def shares(axis, preset="sft_v2", **weights):
        drawn = sample_specs(6000, 1, preset, weights={tuple(k.split("__")): w for k, w in weights.items()})
        assert not [spec for spec in drawn if forbidden(spec["axes"])]
        return collections.Counter(spec["axes"][axis] for spec in drawn)

    assert plausible(shares("domain", domain__security=3)["security"], 6000, 3 / 11)
    assert plausible(shares("task_complexity", task_complexity__intricate=4)["intricate"], 6000, 8 / 9)
    assert plausible(shares("task_complexity", "legacy", task_complexity__complex=2)["complex"], 6000, 1 / 2)
    assert plausible(shares("language", language__Go=0)["Python"], 6000, .35 / .93)
    assert plausible(shares("skill_type", domain__debugging=MOST, skill_type__Forensics=6)["Forensics"], 6000, 1 / 2)
    rest = shares("fixture", fixture__image=0, fixture__text_only=0)
    assert set(rest) == FIXTURE_KINDS - {"image", "text_only"}


@pytest.mark.parametrize("args, words", [
    (["--preset", "v3"], ["no preset v3", "legacy, sft_v2, rl_v2, tmax15k"]),
    (["--weight", "colour=red:2"], ["colour=red", "no such axis", "command_complexity"]),
    (["--weight", "primitive_skills=x:2"], ["no such axis"]),
    (["--weight", "fixture=hologram:2"], ["fixture=hologram", "text_only"]),
    (["--weight", "fixture=image"], ["--weight fixture=image", "axis=value:w"]),
    (["--weight", "image:3"], ["axis=value:w"]),
    (["--weight", "fixture=image:lots"], ["axis=value:w"]),
    (["--weight", "fixture=image:-1"], ["0 to 1,000,000"]),
    (["--weight", "fixture=image:nan"], ["0 to 1,000,000"]),
    (["--weight", "fixture=image:inf"], ["0 to 1,000,000"]),
    (["--weight", "fixture=image:2", "--weight", "fixture=image:3"], ["twice"]),
    (["--preset", "legacy", "--weight", "verifier=multi_protocol:2"], ["legacy never draws it"]),
    ([f for name in DOMAIN_COUNTS for f in ("--weight", f"domain={name}:0")], ["leave no domain"]),
    (["--preset", "rl_v2", "--weight", "verifier=metric_threshold:0", "--weight", "verifier=fuzz_equivalence:0"],
     ["leave no verifier", "bash only"]),
    (["--n", "0"], ["at least one spec"]),
    (["--taxonomy", "/nowhere.json"], ["/nowhere.json"]),
    (["--taxonomy", "/dev/null"], ["/dev/null: not JSON"]),
    (["--out", "/proc/nowhere/s.jsonl"], ["/proc/nowhere"]),
])
def test_sample_bad_arguments_give_one_clear_line_and_no_file(args, words, tmp_path, capsys, monkeypatch):
    code, said = cli(capsys, monkeypatch, gen, "sample", "--out", tmp_path / "s.jsonl", "--n", 10, *args)
    assert str(code).startswith("gen.py sample: ") and "\n" not in code and all(w in code for w in words), code
    assert not said and not list(tmp_path.iterdir())


def edited(tmp_path, edit):
    taxonomy = json.loads((HERE / "taxonomy.json").read_text())
    edit(taxonomy)
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(taxonomy))
    return path


def test_a_domain_a_persona_and_a_verifier_are_added_in_the_json_alone(tmp_path, capsys, monkeypatch):
    def edit(taxonomy):
        taxonomy["domains"]["cartography"] = {
            "skill_types": {"Projection": ["projecting", "warping"], "Tiling": ["cutting", "stitching", "labelling"]},
            "personas": ["a hiker who lost the trail"]}
        taxonomy["domains"]["security"]["personas"].append("a locksmith turned programmer")
        taxonomy["verifier"]["peer_review"] = "three reviewers agree"
        taxonomy["incompatible"].append({"verifier": ["peer_review"], "fixture": ["audio"], "why": "nobody listens"})

    path = edited(tmp_path, edit)
    code, said = cli(capsys, monkeypatch, gen, "sample", "--taxonomy", path, "--n", 4000, "--preset", "rl_v2", "--out", tmp_path / "s")
    drawn = [spec["axes"] for spec in read_jsonl(tmp_path / "s")]
    maps = [a for a in drawn if a["domain"] == "cartography"]
    reviewed = [a for a in drawn if a["verifier"] == "peer_review"]
    assert code == 0 and plausible(len(maps), 4000, 1 / 10) and "cartography" in said and "peer_review" in said
    assert {len(a["primitive_skills"]) for a in maps} == {3, 4, 5} and len({a["fixture"] for a in maps}) == 6
    assert len(reviewed) > 400 and {a["fixture"] for a in reviewed} == FIXTURE_KINDS - {"text_only", "audio"}
    assert {a["domain"] for a in reviewed} == {*DOMAIN_COUNTS, "cartography"}
    assert any(a["persona"] == "a locksmith turned programmer" for a in drawn)
    code, said = cli(capsys, monkeypatch, gen, "stats", tmp_path / "s", "--taxonomy", path)
    assert code == 0 and re.search(r"domain +10 +(0.99\d|1.000) ", said) and re.search(r"verifier +6 ", said)


def without(key):
    return lambda taxonomy: taxonomy.pop(key)


def with_rule(**axes):
    return lambda taxonomy: taxonomy["incompatible"].append({**axes, "why": "test"})


@pytest.mark.parametrize("edit, words", [
    (without("verifier"), ["exactly the keys"]),
    (lambda t: t["domains"]["security"].pop("personas"), ["security needs skill_types and personas"]),
    (lambda t: t["domains"]["security"].update(personas="nobody"), ["security: personas"]),
    (lambda t: t["domains"].update({"my domain": t["domains"]["security"]}), ["'my domain'", "letters"]),
    (lambda t: t["domains"]["debugging"]["skill_types"].update(Luck=[]), ["debugging, Luck"]),
    (lambda t: t["domains"].update(small={"skill_types": {"A": ["b", "c"]}, "personas": ["d"]}), ["small needs at least 5"]),
    (lambda t: t["domains"]["debugging"]["skill_types"]["Testing"].append("telling a wrong test from wrong code"), ["Testing"]),
    (lambda t: t["language"].update(Perl=0), ["language"]),
    (lambda t: t["old"].update(verifier=list(VERIFIER_KINDS)), ["old verifier"]),
    (with_rule(fixture=["hologram"]), ["no fixture hologram"]),
    (with_rule(fixture=["image"], persona=["x"]), ["no such rule"]),
    (with_rule(domain=["security"], command_complexity=["bash only"]), ["no such rule"]),
    (with_rule(fixture=["text_only"], domain=["security"]), ["no old fixture fits security"]),
    (with_rule(verifier=["metric_threshold", "fuzz_equivalence"], domain=["data_science"]), ["no new verifier fits data_science", "bash only"]),
    (lambda t: t["presets"].update(mine={"new_to_old": {"fixture": [1, 1]}}), ["preset mine"]),
    (lambda t: t["presets"]["tmax15k"]["mix"].update(v3=1), ["preset tmax15k mixes"]),
])
def test_a_broken_taxonomy_says_what_is_wrong(edit, words, tmp_path, capsys, monkeypatch):
    path = edited(tmp_path, edit)
    code, _ = cli(capsys, monkeypatch, gen, "sample", "--taxonomy", path, "--out", tmp_path / "s")
    assert str(code).startswith(f"gen.py sample: {path}: ") and "\n" not in code and all(w in code for w in words), code


# ------------------------------------------------------------------------------------------------ stats

def test_balance():
    assert balance(dict.fromkeys("abcd", 7)) == pytest.approx(1)
    assert balance({"a": 5, "b": 0, "c": 0, "d": 0}) == pytest.approx(1 / 4)
    half = -(.5 * math.log(.5) + 2 * .25 * math.log(.25))
    assert balance({"a": 2, "b": 1, "c": 1, "d": 0}) == pytest.approx(math.exp(half) / 4)


def test_stats_of_specs(tmp_path, capsys, monkeypatch):
    path = write_jsonl(tmp_path / "s", sample_specs(5000, 0, "tmax15k"))
    code, said = cli(capsys, monkeypatch, gen, "stats", path, "--plot", tmp_path / "p.png")
    assert code == 0 and f"{path}: 5000 tasks" in said and "length" not in said and "overlap" not in said
    scores = {axis: (int(n), float(score)) for axis, n, score in re.findall(r"^(\w+) +(\d+) +([01]\.\d{3}) ", said, re.M)}
    # exp(H)/N of two thirds exact_text or text_only, the rest over the others, lies between these
    assert scores["domain"][0] == 9 and scores["domain"][1] > .997 and scores["persona"][0] == 85
    assert scores["skill_type"][0] == 29 and abs(scores["skill_type"][1] - .743) < .01 and ".732" in said
    assert scores["verifier"][0] == 5 and math.exp(.6365) / 5 < scores["verifier"][1] < math.exp(.6365 + math.log(4) / 3) / 5
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "p.png").stat().st_size > 20_000
    code, _ = cli(capsys, monkeypatch, gen, "stats", path, "--against", path)
    assert "no instruction" in code


def test_stats_of_builtin_tasks(tmp_path, capsys, monkeypatch):
    tasks = gen.builtin_tasks(90, 0, "train", FAMILY_NAMES)
    path = write_jsonl(tmp_path / "t", tasks)
    code, said = cli(capsys, monkeypatch, gen, "stats", path)
    mean = lambda numbers: f"{sum(numbers) / 90:.1f}"
    row = lambda what: re.search(rf"{what} +(\d+) +([\d.]+)", said).groups()
    assert code == 0 and row("instruction, characters") == ("90", mean([len(t["instruction"]) for t in tasks]))
    assert row("instruction, words") == ("90", mean([len(t["instruction"].split()) for t in tasks]))
    assert row("solution, bytes") == ("90", mean([len(t["solution"]["solve.sh"]["text"]) for t in tasks]))
    assert row("solution, lines") == ("90", mean([t["solution"]["solve.sh"]["text"].count("\n") for t in tasks]))
    assert re.search(r"language +8 +0.125 .*Bash 100.0%", said)


def test_overlap_counts_runs_of_13_words(tmp_path, capsys, monkeypatch):
    def text(*numbers):
        return " ".join(f"w{i}" for i in numbers)

    bench = {"one": text(*range(20)), "two": "Read the file; then, sort it. " + text(*range(100, 110)), "short": "too short"}
    tasks = {"twelve": text(*range(12), 77), "thirteen": "Intro. " + text(*range(3, 16)) + " end",
             "spelled": "read THE file -- then sort it, w100 w101! (w102) \u201cw103\u201d w104\u2014w105 w106", "free": text(*range(200, 240)),
             "fifteen": text(*range(15)), "empty": ""}
    path = write_jsonl(tmp_path / "t", [{"id": i, "instruction": t} for i, t in tasks.items()])
    for name, instruction in bench.items():
        (tmp_path / "harbor" / "set" / name).mkdir(parents=True)
        (tmp_path / "harbor" / "set" / name / "instruction.md").write_text(instruction)
    lines = write_jsonl(tmp_path / "b", [{"instruction": t} for t in bench.values()])
    for against in (lines, tmp_path / "harbor"):
        code, said = cli(capsys, monkeypatch, gen, "stats", path, "--against", against)
        said = said[said.index("13-gram"):].splitlines()
        total = sum(max(0, len(words_of(t)) - 12) for t in tasks.values())
        assert code == 0 and said[0] == f"13-gram overlap with {against}: 50.0% of tasks (paper 0.0%)"
        assert said[1] == "  3 of 6 tasks have one in common with 2 of the benchmark's 3;"
        assert said[2] == f"  5 of all {total} 13-grams"
        assert [line.split()[0::4] for line in said[3:]] == [["3", "fifteen"], ["1", "thirteen"], ["1", "spelled"]]


def test_speed_and_memory_of_stats(tmp_path):
    words = np.random.default_rng(0).zipf(1.3, 15_000 * 300).clip(max=30_000).astype(str).reshape(15_000, 300)
    specs = sample_specs(15_000)
    with open(tmp_path / "t", "w") as f:
        for spec, text in zip(specs, words):
            task = {**spec, "instruction": " ".join(text), "files": {"data.txt": {"text": "some data\n" * 1000}}}
            f.write(json.dumps(task) + "\n")
    write_jsonl(tmp_path / "b", [{"instruction": " ".join(text)} for text in words[:100]])
    code = ("import gen, re, resource; gen.main(); u = resource.getrusage(resource.RUSAGE_SELF); "
            "print('spent', u.ru_utime + u.ru_stime, re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])")  # maxrss outlives exec
    done = subprocess.run([sys.executable, "-c", code, "stats", tmp_path / "t", "--against", tmp_path / "b"], cwd=HERE,
                          capture_output=True, text=True, check=True)
    seconds, kilobytes = map(float, re.search(r"spent (\S+) (\S+)", done.stdout).groups())
    assert seconds < 20 and kilobytes < 1e6
    assert "with 100 of the benchmark's 100" in done.stdout


@pytest.mark.parametrize("lines, more, words", [
    (None, [], ["No such file"]),
    ([], [], ["no tasks"]),
    (['{"id": "a"}', "nonsense", '{"id": "b"}'], [], [":2: not a line of JSON"]),
    (['{"id": "a"}', '{"id": "a"}'], [], [":2: an earlier line has the id a"]),
    (['{"id": "a", "axes": {"domain": 5}}'], [], [":1: not a task record", "domain is 5"]),
    (['{"id": "a", "axes": ["security"]}'], [], [":1: not a task record"]),
    (['{"id": "a", "instruction": null}'], [], [":1: not a task record"]),
    (['{"id": "a", "solution": {"s.sh": "echo"}}'], [], [":1: not a task record"]),
    (['{"id": "a"}'], ["--plot", "p.png"], ["no task has axes"]),
    (['{"id": "a"}'], ["--against", "/nowhere"], ["/nowhere"]),
    (['{"id": "a"}'], ["--against", "EMPTY"], ["instruction.md"]),
    (['{"id": "a"}'], ["--against", "SELF"], [":1: no instruction"]),
    (['{"id": "a", "axes": {"domain": "security"}}'], ["--plot", "/proc/nowhere/p.png"], ["/proc/nowhere"]),
    (['{"id": "a", "axes": {"domain": "security"}}'], ["--plot", "p.nonsense"], ["nonsense"]),
])
def test_stats_bad_input_gives_one_clear_line(lines, more, words, tmp_path, capsys, monkeypatch):
    path = tmp_path / "t.jsonl"
    if lines is not None:
        path.write_text("".join(line + "\n" for line in lines))
    (tmp_path / "empty").mkdir()
    more = [{"EMPTY": tmp_path / "empty", "SELF": path, "p.png": tmp_path / "p.png", "p.nonsense": tmp_path / "p.nonsense"}.get(m, m)
            for m in more]
    code, _ = cli(capsys, monkeypatch, gen, "stats", path, *more)
    assert str(code).startswith("gen.py stats: ") and "\n" not in code and all(w in code for w in words), code
    assert not list(tmp_path.glob("p.*"))


def test_stats_drops_a_torn_last_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "t").write_text('{"id": "a", "instruction": "x"}\n{"id": "b", "instr')
    with pytest.warns(UserWarning, match="torn last line"):
        code, said = cli(capsys, monkeypatch, gen, "stats", tmp_path / "t")
    assert code == 0 and ": 1 tasks" in said
# ================================================================================================ extras/harbor.py

BASE_TOML = 'version = "1.0"\n\n[metadata]\ndifficulty = "easy"\n\n[agent]\ntimeout_sec = 900.0\n'
HARBOR_FOLDER = {"task.toml": BASE_TOML, "instruction.md": "Write done to /app/done.txt.\n",
                 "environment/Dockerfile": "FROM tmax-base:core\nWORKDIR /app\nCOPY notes.txt /app/\n",
                 "environment/notes.txt": "a note\n", "tests/test.sh": f"#!/bin/bash\n{REWARD_DONE}\n",
                 "solution/solve.sh": "#!/bin/bash\necho done >/app/done.txt\n"}


def harbor_folder(path, toml=None, take=(), **more):
    """A task folder written by hand. more: {"path__with": content} with __ for /, bytes or text."""
    files = HARBOR_FOLDER | ({"task.toml": toml} if toml is not None else {}) | more
    for name, content in files.items():
        file = path / name.replace("__", "/")
        if name not in take:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.encode() if isinstance(content, str) else content)
            file.chmod(0o755 if name.endswith(".sh") else 0o644)
    return path


def on_disk(path):
    """{path below: (bytes, executable)} of a folder."""
    return {p.relative_to(path).as_posix(): (p.read_bytes(), bool(p.stat().st_mode & 0o100))
            for p in sorted(path.rglob("*")) if p.is_file()}


def harbor_there_and_back(task, tmp_path):
    harbor.export_harbor([task], tmp_path / "out")
    tasks, problems = harbor.import_harbor(tmp_path / "out" / task["id"])
    assert problems == []
    return tasks[0]


FULL_TASK = {
    "id": "a task-1", "instruction": "Dó it.\n<!-- now -->\n\n'quoted' \\ \"too\"\r\n",
    "dockerfile": "FROM tmax-base:core\r\nCOPY . /app/\n",
    "files": {"a b/ü.txt": {"text": "x\u2028y\r\n"}, "raw": {"b64": base64.b64encode(bytes(range(256))).decode()},
              "run": {"text": "#!/bin/sh\n", "mode": "755"}, "plain.sh": {"text": "", "mode": 0o644},
              "ascii": {"b64": "YWJj"}, "secret": {"text": "s", "mode": "0600"}, "odd": {"text": "\ud800"},
              "same": {"text": "", "mode": "0644"}, ".dockerignore": {"text": "*.o"}},
    "tests": {"test.sh": {"text": "#!/bin/bash -e\nexit\n"}, "data/x.bin": {"b64": "//4="}},
    "solution": {"solve.sh": {"text": "#!/usr/bin/env python3\n"}},
    "axes": {"domain": "security", "none": None, "list": [1, 2.5, "it's", "\x7f", "😀"]}, "knob": {"n": 3},
    "user": "root", "limits": {"agent_s": 60.5, "command_s": 5, "cpus": 0.5, "memory_mb": 512, "network": True}}
TASK_VARIANTS = {
    "everything": {}, "as it comes": {"limits": {}, "user": "user"}, "no solution": {"solution": {}},
    "solution None": {"solution": None}, "no files": {"files": {}}, "memory in parts": {"limits": {"memory_mb": 99.5}},
    "default limits": {"limits": dict(LIMITS)}, "no limits": {"limits": None}}


@pytest.mark.parametrize("name", TASK_VARIANTS)
def test_a_task_exported_and_imported_again_is_the_same(name, tmp_path):
    task = FULL_TASK | TASK_VARIANTS[name]
    assert harbor_there_and_back(task | {"demos": [{"commands": ["x"], "right": True}]}, tmp_path) == task
    assert b"demos" not in (tmp_path / "out/a task-1/task.toml").read_bytes()


def test_tasks_that_say_little_come_back_without_more(tmp_path):
    least = {"id": "t", "instruction": "", "dockerfile": "FROM x", "files": {}, "tests": {"test.sh": {"text": ""}}}
    assert harbor_there_and_back(least, tmp_path) == least


def test_builtin_tasks_come_back_from_the_command_line(tmp_path, capsys, monkeypatch):
    tasks = gen.builtin_tasks(18, 0, "train", list(FAMILIES))
    path, out, back = write_jsonl(tmp_path / "t.jsonl", tasks), tmp_path / "out", tmp_path / "back.jsonl"
    assert cli(capsys, monkeypatch, gen, "export-harbor", path, out)[0] == 0
    assert len(list(out.iterdir())) == 18 and not list(out.glob("*/demos*"))
    code, said = cli(capsys, monkeypatch, gen, "import-harbor", out, "--out", back)
    assert code == 0 and "18 tasks; 0 left out" in said
    assert sorted(load_tasks(back), key=lambda t: t["id"]) == sorted(
        [{k: v for k, v in t.items() if k != "demos"} for t in tasks], key=lambda t: t["id"])


HARBOR_VARIANTS = {  # task.toml, files beside it, what of the record it must give
    "1.0": (BASE_TOML, {}, {"limits": {"agent_s": 900, "network": True}, "user": "root", "axes": None}),
    "no version": ("", {}, {"limits": {"network": True}}),
    "1.0 in the wild": ('version = "1.0"\n[verifier]\ntimeout_sec = 120.0\n[agent]\ntimeout_sec = 300.0\n[environment]\n'
                        'build_timeout_sec = 600.0\ncpus = 2\nmemory = "4G"\nstorage = "10G"\n', {},
                        {"limits": {"agent_s": 300, "verifier_s": 120, "cpus": 2, "memory_mb": 4096, "network": True}}),
    "1.1": ('schema_version = "1.1"\nartifacts = []\n[task]\nname = "tb/x"\ndescription = ""\n[[task.authors]]\nname = "n"\n'
            '[environment]\ncpus = 0.5\nmemory_mb = 2048\ngpus = 0\nallow_internet = false\nmcp_servers = []\n'
            '[verifier.env]\n[environment.env]\n[solution.env]\n', {},
            {"limits": {"cpus": .5, "memory_mb": 2048, "network": False}}),
    "1.2, internet": ('schema_version = "1.2"\n[environment]\nallow_internet = true\nmemory = "512M"\nmemory_mb = 512\n', {},
                      {"limits": {"memory_mb": 512, "network": True}}),
    "1.3, both words": ('schema_version = "1.3"\n[environment]\nallow_internet = true\nnetwork_mode = "no-network"\n', {},
                        {"limits": {"network": False}}),
    "1.4": ('schema_version = "1.4"\n[agent]\nuser = "user"\nnetwork_mode = "no-network"\n[environment]\n'
            'network_mode = "no-network"\nos = "Linux"\n', {}, {"limits": {"network": False}, "user": "user"}),
    "both versions": ('version = "1.0"\nschema_version = "1.2"\n', {}, {"user": "root"}),
    "uid": ('[agent]\nuser = 1000\n', {}, {"user": "1000"}),
    "root by number": ('[agent]\nuser = 0\n', {}, {"user": "root"}),
    "USER": ("", {"environment__Dockerfile": "FROM x AS a\nUSER one\nFROM y\nUSER root\nRUN x\nUSER two:three\n"}, {"user": "two"}),
    "USER of an earlier stage": ("", {"environment__Dockerfile": "FROM x AS Base\nUSER one\nFROM base\nRUN x\n"}, {"user": "one"}),
    "USER of another stage": ("", {"environment__Dockerfile": "FROM x AS a\nUSER one\nFROM x\n"}, {"user": "root"}),
    "image": ('[environment]\ndocker_image = "some/image:1"\n', {},
              {"dockerfile": "FROM some/image:1\n", "files": {
                  "Dockerfile": {"text": HARBOR_FOLDER["environment/Dockerfile"]}, "notes.txt": {"text": "a note\n"}}}),
    "workdir, env": ('[environment]\nworkdir = "/srv"\n[environment.env]\nA = "${NOT_SET_HERE:-it\'s $5 \\"x\\"}"\n', {},
                     {"dockerfile": HARBOR_FOLDER["environment/Dockerfile"] + '\n# of task.toml\nWORKDIR /srv\n'
                                    'ENV A="it\'s \\$5 \\"x\\""\n'}),
    "verifier.env": ('[verifier.env]\nA = "it\'s"\nB = "${NOT_SET_HERE:-b c}"\n[solution.env]\nC = "c"\n', {},
                     {"tests": {"test.sh": {"text": "#!/bin/bash\n# of task.toml and the #! line\nexport A='it'\"'\"'s'\n"
                                                    f"export B='b c'\n{REWARD_DONE}\n"}},
                      "solution": {"solve.sh": {"text": "#!/bin/bash\n# of task.toml and the #! line\nexport C=c\n"
                                                        "echo done >/app/done.txt\n"}}}),
    "options of #!": ("", {"tests__test.sh": "#!/usr/bin/env -S bash -euo pipefail\nfalse\n"},
                      {"tests": {"test.sh": {"text": "#!/usr/bin/env -S bash -euo pipefail\n"
                                                     "# of task.toml and the #! line\nset -euo pipefail\nfalse\n"}}}),
    "binary files": ("", {"environment__x.bin": b"\xff\x00", "tests__y.sh": b"\x80", "environment__.dockerignore": "x\n"},
                     {"tests": {"test.sh": {"text": HARBOR_FOLDER["tests/test.sh"]}, "y.sh": {"b64": "gA=="}}}),
    "canary": ("", {"instruction.md": "<!-- bench canary GUID 1 -->\n# CANARY\n\n  Do it.\n"}, {"instruction": "  Do it.\n"}),
    "no solution": ("", {}, {"solution": None}),
}


@pytest.mark.parametrize("name", HARBOR_VARIANTS)
def test_a_folder_gives_its_task_and_comes_back_byte_for_byte(name, tmp_path):
    toml, files, want = HARBOR_VARIANTS[name]
    take = ["solution/solve.sh"] if name == "no solution" else []
    folder = harbor_folder(tmp_path / "in" / "x", toml, take, **files)
    [task], problems = harbor.import_harbor(tmp_path / "in")
    assert problems == [] and {key: task.get(key) for key in want} == want
    harbor.export_harbor([task], tmp_path / "out")
    assert on_disk(tmp_path / "out/x") == on_disk(folder)
    task |= {"axes": {"domain": "security"}}               # and what is added to the record on the way is kept
    harbor.export_harbor([task], tmp_path / "more")
    assert harbor.import_harbor(tmp_path / "more") == ([task], [])


def test_executable_bits_survive_both_ways(tmp_path):
    folder = harbor_folder(tmp_path / "x", environment__tool="#!/bin/sh\n", environment__lib__x="x", tests__aid="y")
    for name, mode in (("environment/tool", 0o775), ("tests/test.sh", 0o664), ("tests/aid", 0o711)):
        (folder / name).chmod(mode)
    [task], _ = harbor.import_harbor(folder)
    assert (task["files"]["tool"]["mode"], task["tests"]["test.sh"]["mode"]) == ("0755", "0644")
    assert "mode" not in task["files"]["lib/x"] and task["tests"]["aid"]["mode"] == "0755"
    harbor.export_harbor([task], tmp_path / "out")
    assert on_disk(tmp_path / "out/x") == on_disk(folder)


BROKEN_FOLDERS = {  # task.toml, other files, files taken away, words of the reason
    "no toml": (None, {}, ["task.toml"], "task.toml"),
    "no instruction": (None, {}, ["instruction.md"], "instruction.md"),
    "no tests": (None, {}, ["tests/test.sh"], "test.sh"),
    "no image": (None, {}, ["environment/Dockerfile"], "docker_image"),
    "empty Dockerfile": (None, {"environment__Dockerfile": "# nothing\n"}, [], "dockerfile"),
    "not TOML": ("[agent\n", {}, [], "line 1"),
    "future": ('schema_version = "2.0"', {}, [], "2.0"),
    "compose": (None, {"environment__docker-compose.yaml": "services: {}"}, [], "one container"),
    "steps": ('[[steps]]\nname = "a"\n', {"steps__a__instruction.md": "x"}, ["instruction.md", "tests/test.sh"], "steps"),
    "windows": ('[environment]\nos = "windows"\n', {"tests__test.bat": "x"}, ["tests/test.sh"], "windows"),
    "gpu": ("[environment]\ngpus = 1\n", {}, [], "GPU"),
    "mcp": ('[[environment.mcp_servers]]\nname = "x"\nurl = "http://x"\n', {}, [], "MCP"),
    "healthcheck": ('[environment.healthcheck]\ncommand = "true"\n', {}, [], "healthcheck"),
    "verifier apart": ('[verifier]\nenvironment_mode = "separate"\n', {}, [], "container of its own"),
    "verifier's image": ('[verifier.environment]\ndocker_image = "x"\n', {}, [], "container of its own"),
    "allow-list": ('[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["x.org"]\n', {}, [], "allowlist"),
    "two networks": ('[agent]\nnetwork_mode = "no-network"\n', {}, [], "no-network and public"),
    "host's secret": ('[verifier.env]\nOPENAI_API_KEY = "${OPENAI_API_KEY}"\n', {}, [], "OPENAI_API_KEY"),
    "env of numbers": ("[verifier.env]\nA = 1\n", {}, [], "A = 1"),
    "env of lines": ('[environment.env]\nA = "x\\nRUN y"\n', {}, [], "one line"),
    "memory": ('[environment]\nmemory = "lots"\n', {}, [], "lots"),
    "two memories": ('[environment]\nmemory = "1G"\nmemory_mb = 512\n', {}, [], "contradicts"),
    "time of text": ('[agent]\ntimeout_sec = "900"\n', {}, [], "'900'"),
    "time of inf": ("[verifier]\ntimeout_sec = inf\n", {}, [], "inf"),
    "negative time": ("[agent]\ntimeout_sec = -1.0\n", {}, [], "agent_s"),
    "no table": ("agent = 5\n", {}, [], "agent is not a table"),
    "bad user": ('[agent]\nuser = "a b"\n', {}, [], "a b"),
    "USER of an ARG": ("", {"environment__Dockerfile": "ARG U=x\nFROM x\nUSER $U\n"}, [], "$U"),
    "entrypoint": ("", {"environment__Dockerfile": 'FROM x\nENTRYPOINT ["/serve"]\n'}, [], "ENTRYPOINT"),
    "python test": ("", {"tests__test.sh": "#!/usr/bin/env python3\n"}, [], "not for bash"),
    "binary test": ("", {"tests__test.sh": b"\x7fELF\xff"}, [], "not text"),
    "latin-1": ("", {"instruction.md": b"caf\xe9"}, [], "UTF-8"),
    "history": ("", {"trajectory.json": "{}"}, [], "history"),
    "tampered record": ("[metadata.tmax]\nrecord = '{\"files\": [1]}'\n", {}, [], "metadata.tmax"),
    "no record": ("[metadata.tmax]\nrecord = 'x'\n", {}, [], "metadata.tmax"),
}


@pytest.mark.parametrize("name", BROKEN_FOLDERS)
def test_a_folder_that_cannot_be_a_task_is_named_and_the_others_are_imported(name, tmp_path):
    toml, more, take, words = BROKEN_FOLDERS[name]
    harbor_folder(tmp_path / "good")
    harbor_folder(tmp_path / "bad", toml, take, **more)
    (tmp_path / ".git").mkdir()
    (tmp_path / "README.md").write_text("x")
    tasks, problems = harbor.import_harbor(tmp_path)
    assert [t["id"] for t in tasks] == ["good"] and len(problems) == 1
    assert problems[0].startswith("bad: ") and words in problems[0], problems


def test_links_in_a_folder_are_refused(tmp_path):
    for name, target in (("environment/key", "/etc/passwd"), ("tests", "/etc"), ("environment/deep", ".."), ("solution/s", "gone")):
        folder = harbor_folder(tmp_path / name.replace("/", "-"))
        subprocess.run(["rm", "-rf", folder / name], check=True)
        (folder / name).symlink_to(target)
    os.mkfifo(harbor_folder(tmp_path / "pipe") / "tests/pipe")
    tasks, problems = harbor.import_harbor(tmp_path)
    assert tasks == [] and len(problems) == 5 and all("link" in p for p in problems)


def test_import_harbor_as_a_command_names_what_it_leaves_out(tmp_path, capsys, monkeypatch):
    harbor_folder(tmp_path / "in/good"), harbor_folder(tmp_path / "in/bad", "[agent\n"), harbor_folder(tmp_path / "worse/bad", "x")
    monkeypatch.setattr(sys, "argv", ["gen.py", "import-harbor", str(tmp_path / "in"), "--out", str(tmp_path / "t.jsonl")])
    gen.main()
    said = capsys.readouterr()
    assert "left out: bad: task.toml:" in said.err and "1 tasks; 1 left out" in said.out
    assert [t["id"] for t in load_tasks(tmp_path / "t.jsonl")] == ["good"]
    (tmp_path / "empty").mkdir()
    for folder, words in (("worse", "nothing could be imported"), ("empty", "no task folders"), ("nowhere", "not a folder")):
        code, _ = cli(capsys, monkeypatch, gen, "import-harbor", tmp_path / folder, "--out", tmp_path / "u.jsonl")
        assert code.startswith("gen.py import-harbor: ") and words in code and "\n" not in code
    assert not (tmp_path / "u.jsonl").exists()


@pytest.mark.parametrize("id", ["", ".", "..", "../x", "a/b", "/etc/x", "a\\b", "c:x", "a\0b", "a\nb", ".git", "x" * 300])
def test_ids_that_would_leave_the_folder_are_refused_before_anything_is_written(id, tmp_path, capsys, monkeypatch):
    tasks = write_jsonl(tmp_path / "t.jsonl", [task_of(id="good"), task_of(id=id)])
    code, _ = cli(capsys, monkeypatch, gen, "export-harbor", tasks, tmp_path / "out")
    assert code.startswith("gen.py export-harbor: ") and repr(id) in code and not (tmp_path / "out").exists()


@pytest.mark.parametrize("change, words", [
    ({"files": {"Dockerfile": {"text": "x"}}}, "Dockerfile"), ({"files": {"../x": {"text": "x"}}}, "../x"),
    ({"instruction": "\ud800"}, "surrogates"), ({"tests": {}}, "test.sh"), ({"limits": {"cpus": 0}}, "cpus"),
    ({"harbor": {"toml": BASE_TOML}, "limits": {"agent_s": 5}}, "`harbor`")])
def test_a_task_that_no_folder_can_say_is_named_and_nothing_is_written(change, words, tmp_path, capsys, monkeypatch):
    tasks = write_jsonl(tmp_path / "t.jsonl", [task_of(id="good"), task_of(id="bad") | change])
    code, _ = cli(capsys, monkeypatch, gen, "export-harbor", tasks, tmp_path / "out")
    assert code.startswith("gen.py export-harbor: ") and "bad" in code and words in code and not (tmp_path / "out").exists()


def test_export_overwrites_nothing(tmp_path, capsys, monkeypatch):
    (tmp_path / "out/b").mkdir(parents=True)
    tasks = write_jsonl(tmp_path / "t.jsonl", [task_of(id="a"), task_of(id="b")])
    code, _ = cli(capsys, monkeypatch, gen, "export-harbor", tasks, tmp_path / "out")
    assert "is there already" in code and os.listdir(tmp_path / "out") == ["b"]


@pytest.mark.parametrize("how", ["exported", "foreign"])
def test_an_edited_folder_counts_more_than_what_the_record_said(how, tmp_path):
    task = task_of(id="t", limits={"agent_s": 60}, solution={"solve.sh": {"text": "x", "mode": 0o755}}, axes={"a": 1})
    harbor.export_harbor([task], tmp_path)
    toml = (tmp_path / "t/task.toml")
    if how == "foreign":
        toml.write_text(toml.read_text().replace("60.0", "61.0"))
        (tmp_path / "t/solution/solve.sh").write_bytes(b"\xff")
        (tmp_path / "t/solution/solve.sh").chmod(0o644)
        (tmp_path / "t/environment/notes.txt").unlink()
    (tmp_path / "t/tests/test.sh").write_text("new\n")
    [back], problems = harbor.import_harbor(tmp_path / "t")
    if how == "foreign":
        assert problems == [] and back["limits"]["agent_s"] == 61 and "notes.txt" not in back["files"]
        assert back["solution"] == {"solve.sh": {"b64": "/w==", "mode": "0644"}} and back["axes"] == {"a": 1}
    else:
        assert back == task | {"tests": {"test.sh": {"text": "new\n"}}}


@pytest.fixture(scope="module")
def image_with_user():
    """An image that runs as somebody else, known to the daemon alone."""
    need("docker")
    name = "tmax-test-harbor-user"
    subprocess.run(["docker", "build", "-q", "-t", name, "-"], input=b"FROM tmax-base:core\nUSER nobody:nogroup\n", check=True,
                   stdout=subprocess.DEVNULL)
    yield name
    subprocess.run(["docker", "rmi", "-f", name], stdout=subprocess.DEVNULL)


def test_the_images_own_user_is_the_agents(image_with_user, tmp_path):
    harbor_folder(tmp_path / "a", f'[environment]\ndocker_image = "{image_with_user}"\n')
    harbor_folder(tmp_path / "b", "", environment__Dockerfile=f"FROM --platform=linux/amd64 {image_with_user}\n")
    harbor_folder(tmp_path / "c", '[agent]\nuser = "user"\n', environment__Dockerfile=f"FROM {image_with_user}\n")
    harbor_folder(tmp_path / "d", "", environment__Dockerfile=f"FROM {image_with_user}\nUSER root\n")
    tasks, problems = harbor.import_harbor(tmp_path)
    assert problems == [] and [t["user"] for t in tasks] == ["nobody", "nobody", "user", "root"]


def test_imported_settings_act_in_a_sandbox(tmp_path):
    """workdir, both kinds of variables, options of the #! line and a file without a Dockerfile, graded for real."""
    need("docker")
    test_sh = "#!/bin/bash -e\n[ $A$B = ab ]; cat here.txt; false\necho 1 >/logs/verifier/reward.txt"
    toml = ('[environment]\ndocker_image = "tmax-base:core"\nworkdir = "/srv/x"\n[environment.env]\nA = "a"\n'
            '[verifier.env]\nB = "${NOT_SET_HERE:-b}"\n')
    harbor_folder(tmp_path / "stops", toml, ["environment/Dockerfile", "environment/notes.txt"], environment__here__txt="x",
                  **{"environment/here.txt": "found\n", "tests/test.sh": "#!/bin/bash\necho 0 >/logs/verifier/reward.txt\n"
                     "exec bash /tests/really.sh\n", "tests/really.sh": test_sh})
    harbor_folder(tmp_path / "set", toml, ["environment/Dockerfile", "environment/notes.txt"], **{
        "environment/here.txt": "found\n",
        "tests/test.sh": "#!/bin/bash -e\necho .5 >/logs/verifier/reward.txt\n[ $A$B = ab ]\ncat here.txt\n"
                         "echo .75 >/logs/verifier/reward.txt\nfalse\necho 1 >/logs/verifier/reward.txt\n"})
    [task], _ = harbor.import_harbor(tmp_path / "set")
    assert task["user"] == "root" and task["limits"] == {"network": True}
    with Sandbox(task | {"limits": {}}, "docker") as box:
        assert box.run("pwd; echo $A; cat here.txt").output == "/srv/x\na\nfound\n"
        grade = box.grade()
        assert grade.reward == .75 and "found" in grade.log


# ------------------------------------------------------------------------------------------------ TMax-15K

def tmax_row(id, image="org/tmax:1", **more):
    return {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "ground_truth": id,
            "env_config": {"image": image, "task_id": id}} | more


def tmax_tarball(path, files, extra=(), mode="w:gz"):
    with tarfile.open(path, mode) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755 if name.endswith(".sh") else 0o644
            tar.addfile(info, io.BytesIO(data))
        for info in extra:
            tar.addfile(info)
    return str(path)


def tmax_files(id, prefix=""):
    return {f"{prefix}{id}/instruction.md": b"Do it.\n", f"{prefix}{id}/tests/test.sh": b"echo 1\n",
            f"{prefix}{id}/tests/state.py": b"\xff", f"{prefix}{id}/setup.sh": b"true\n"}


def test_import_tmax(tmp_path, capsys, monkeypatch):
    link = tarfile.TarInfo("link/tests/x")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    bare = {"bare/instruction.md": b"x"}
    tarball = tmax_tarball(tmp_path / "d.tgz", tmax_files("one") | tmax_files("two", "./") | tmax_files("link")
                           | tmax_files("unasked") | tmax_files("three") | bare, [link])
    rows = write_jsonl(tmp_path / "r.jsonl", [
        tmax_row("one"), tmax_row(["two"]), tmax_row("one"), tmax_row("absent"), tmax_row("link"), tmax_row("three", None),
        tmax_row("bare"), tmax_row(None)])
    monkeypatch.setattr(sys, "argv", ["gen.py", "import-tmax", rows, tarball, "--out", str(tmp_path / "t.jsonl")])
    gen.main()
    said = capsys.readouterr()
    one, two = load_tasks(tmp_path / "t.jsonl")
    assert one == {"id": "one", "instruction": "Do it.\n", "dockerfile": "FROM org/tmax:1\n", "user": "root",
                   "files": {"setup.sh": {"text": "true\n"}},
                   "tests": {"state.py": {"b64": "/w=="}, "test.sh": {"text": "echo 1\n"}}}
    assert two == one | {"id": "two"} and "2 tasks; 6 left out" in said.out
    for id, why in (("one", "same id"), ("absent", "no folder"), ("link", "link"), ("three", "image"), ("bare", "test.sh"),
                    ("row 8", "ground_truth")):
        assert re.search(f"(?m)^left out: {id}: .*{why}", said.err), said.err
    assert "unasked" not in said.err
    for task in (one, two):
        assert harbor_there_and_back(task, tmp_path) == task


@pytest.mark.parametrize("name", ["../x/instruction.md", "/one/instruction.md", "one/../../x"])
def test_a_tarball_that_leads_out_of_its_folder_is_refused(name, tmp_path, capsys, monkeypatch):
    tarball = tmax_tarball(tmp_path / "d.tgz", tmax_files("one") | {name: b"x"})
    rows = write_jsonl(tmp_path / "r.jsonl", [tmax_row("one")])
    code, _ = cli(capsys, monkeypatch, gen, "import-tmax", rows, tarball, "--out", tmp_path / "t.jsonl")
    assert code.startswith("gen.py import-tmax: ") and "leads out" in code and not (tmp_path / "t.jsonl").exists()


@pytest.mark.parametrize("broken", ["torn", "text", "missing", "bomb"])
def test_a_broken_tarball_is_one_clear_line(broken, tmp_path, capsys, monkeypatch):
    path = tmp_path / "d.tgz"
    tmax_tarball(path, tmax_files("one") | {"one/big": os.urandom(50_000) if broken == "torn" else b"\0" * (65 << 20)})
    if broken != "bomb":
        path.write_bytes(path.read_bytes()[:30_000] if broken == "torn" else b"not a tarball")
    rows = write_jsonl(tmp_path / "r.jsonl", [tmax_row("one")])
    tarball = path if broken != "missing" else tmp_path / "nowhere"
    code, _ = cli(capsys, monkeypatch, gen, "import-tmax", rows, tarball, "--out", tmp_path / "t.jsonl")
    assert str(code).startswith("gen.py import-tmax: ") and "\n" not in code and not (tmp_path / "t.jsonl").exists()


# ------------------------------------------------------------------------------------------------ Harbor's agent

def docker_exec(*more):
    """A container that Harbor might have started, and its exec: a function(command, seconds) -> (exit code, output)."""
    need("docker")
    run = ["docker", "run", "-d", "--rm", "-w", "/app", *more, "tmax-base:core", "sleep", "600"]
    name = subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()

    def execute(command, seconds):
        execute.count += 1
        done = subprocess.run(["docker", "exec", "-u", "user", name, "bash", "-c", command], capture_output=True, text=True,
                              timeout=seconds)
        return done.returncode, done.stdout + done.stderr

    execute.name, execute.count = name, 0
    return execute


@pytest.fixture(scope="module")
def stateless():
    execute = docker_exec()
    yield execute
    subprocess.run(["docker", "kill", execute.name], stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def distant(stateless):
    """A living shell that is reached by single commands alone."""
    box = harbor.HarborSandbox({"id": "t", "limits": {}}, stateless).start()
    yield box
    box.close()
    assert "shell" not in stateless("ls -a /tmp", 10)[1]


def test_a_distant_shell_lives_on_and_a_command_takes_one_look(distant, stateless):
    assert distant.run("pwd; whoami; cd /tmp; x=5; export Y=6; f() { echo f$1; }; sleep 100 &").output == "/app\nuser\n"
    before = stateless.count
    assert distant.run("pwd; echo $x $Y; f 1; jobs -p | wc -l") == Result("/tmp\n5 6\nf1\n1\n", 0, False)
    assert stateless.count == before + 1
    assert distant.run("kill %1; cd /app; false").exit_code == 1 and distant.run("echo $?").output == "1\n"


@pytest.mark.parametrize("command, want", [
    ("printf foo", Result("foo", 0, False)), ("echo a >/dev/stdout; echo b >/dev/stderr", Result("a\nb\n", 0, False)),
    ("cat; read x; echo [$x]", Result("[]\n", 0, False)), ("printf 'ü\\0\\xff\\n'", Result("ü\0\ufffd\n", 0, False)),
    ("cat <<'E' | wc -c\n" + "x" * 200_000 + "\nE", Result("200001\n", 0, False)),
    ("echo @@gone@@; echo @@1 1 1,,,@@", Result("@@gone@@\n@@1 1 1,,,@@\n", 0, False)),
    ("(exit 3)", Result("", 3, False)), ("set -e; false; echo no", Result(sandbox.RESTARTED, 1, False)),
    ("kill -9 $$", Result(sandbox.RESTARTED, 137, False)), ("exit 3", Result(sandbox.RESTARTED, 3, False))])
def test_commands_in_a_distant_shell(distant, command, want):
    assert distant.run(command) == want
    assert distant.run("pwd; echo on") == Result("/app\non\n", 0, False)


@pytest.mark.parametrize("count", [50_000, 5_000_000])
def test_a_flood_in_a_distant_shell_is_counted_in_characters(distant, count):
    got = distant.run(f"yes é | head -n {count} | tr -d '\\n'", 60)
    assert len(got.output) == 10_000 + len(f"\n[... {count - 10_000} characters elided ...]\n")
    assert count > harbor.EXACT // 2 or f"[... {count - 10_000} characters elided ...]" in got.output


def test_a_timeout_in_a_distant_shell_kills_what_the_command_started(distant):
    distant.run("cd /tmp; export Y=7; sleep 101 &")
    got = distant.run("echo partial; trap '' TERM; sleep 102 | cat", 2)
    assert (got.exit_code, got.timed_out) == (124, True) and got.output.startswith("partial\n")
    assert distant.run("pwd; echo $Y; ps -e -o args | grep -c '[s]leep 10[12]'; cd /app").output == "/tmp\n7\n1\n"


def test_a_distant_shell_that_the_agent_ends_is_the_agents_fault_and_a_lost_container_is_ours():
    execute = docker_exec()
    box = harbor.HarborSandbox({"id": "t", "limits": {}}, execute).start()
    with pytest.raises(SandboxKilled, match="ended its shell"):
        box.run("kill -9 -1", 20)
    box = harbor.HarborSandbox({"id": "t", "limits": {}}, execute).start()
    subprocess.run(["docker", "kill", execute.name], stdout=subprocess.DEVNULL)
    with pytest.raises(InfraError, match="Harbor's environment"):
        box.run("echo on", 5)
    box.close()
    with pytest.raises(InfraError, match="no shell"):
        harbor.HarborSandbox({"id": "t", "limits": {}}, execute).start()


def test_an_episode_in_a_distant_shell_is_graded_by_harbor(stateless):
    engine = SaysMessages(call_message("cd /tmp; x=1"), call_message("pwd; echo $x"), call_message(SUBMIT))
    r = run_episode({"id": "t", "instruction": "", "limits": {"agent_s": math.inf}}, engine, None, Sampling(),
                    box=harbor.HarborSandbox({"id": "t"}, stateless))
    assert (r["end"], r["reward"], r["turns"]) == ("submitted", None, 3)
    assert [m["content"] for m in r["messages"] if m["role"] == "tool"][1] == "/tmp\n1\n[exit code 0]"


# ------------------------------------------------------------------------------------------------ ATIF

def from_atif(trajectory):
    """(token ids, loss mask, log-probs) of a trajectory."""
    ids, mask, logprobs = [], [], []
    for metrics in (s["metrics"] for s in trajectory["steps"] if "metrics" in s):
        for part, sampled in ((metrics["extra"]["context_token_ids"], 0), (metrics["completion_token_ids"], 1)):
            assert not sampled or len(ids) == metrics["prompt_tokens"]
            ids, mask = ids + part, mask + [sampled] * len(part)
        logprobs += [None] * len(metrics["extra"]["context_token_ids"]) + metrics.get("logprobs", [None] * len(part))
    return ids, mask, logprobs


@pytest.fixture(scope="module")
def episodes(bwrap, hermes, folders):
    """A rollout by tokens for each tool format, one by messages, and one by messages with tokens added afterwards."""
    xml = Chat(folders["xml"])
    said = [call_message("echo a", "echo b", content="Two."), {"role": "assistant", "content": "", "reasoning_content": "Hm.",
            "tool_calls": [{"id": "x", "function": {"name": "bash", "arguments": "{"}}]}, call_message(SUBMIT)]
    by_tokens = [play(bash_task(), SaysTokens(chat, calls_of(chat, "echo a", "echo b", text="Two."), "no call",
                                              calls_of(chat, SUBMIT)), chat) for chat in (hermes, xml)]
    return [*by_tokens, play(bash_task(), SaysMessages(*said)), play(bash_task(), SaysMessages(*said), hermes)]


def test_a_trajectory_has_every_token_once_and_every_call_with_its_result(episodes):
    for r, last_call in zip(episodes, (0, 0, 1, 1)):
        t = json.loads(json.dumps(harbor.atif(r)))
        assert [s["source"] for s in t["steps"]] == ["system", "user", "agent", "agent", "agent"]
        assert [s["step_id"] for s in t["steps"]] == [1, 2, 3, 4, 5] and t["steps"][1]["message"] == r["messages"][1]["content"]
        first, second, third = t["steps"][2:]
        assert [c["arguments"] for c in first["tool_calls"]] == [{"command": "echo a"}, {"command": "echo b"}]
        assert [(o["source_call_id"], o["content"]) for o in first["observation"]["results"]] == [
            (first["tool_calls"][0]["tool_call_id"], "a\n[exit code 0]"), (first["tool_calls"][1]["tool_call_id"], "b\n[exit code 0]")]
        assert ("tool_calls" in second) == bool(last_call) and "[error" in second["observation"]["results"][0]["content"]
        assert third["tool_calls"][0]["arguments"] == {"command": SUBMIT} and t["extra"]["reward"] == r["reward"]
        if "token_ids" in r:
            assert from_atif(t) == (r["token_ids"], r["loss_mask"], r["logprobs"])
            assert t["final_metrics"]["total_completion_tokens"] == sum(r["loss_mask"])


def test_export_atif_as_a_command(episodes, tmp_path, capsys, monkeypatch):
    rows = [r | {"task_id": f"../{i}/x", "attempt": i} for i, r in enumerate(episodes)]
    path = write_jsonl(tmp_path / "r.jsonl", rows)
    code, said = cli(capsys, monkeypatch, evaluation, "export-atif", path, tmp_path / "out")
    files = sorted((tmp_path / "out").iterdir())
    assert code == 0 and f"{len(rows)} written" in said and len(files) == len(rows)
    assert [json.loads(f.read_text())["extra"]["task_id"] for f in files] == [r["task_id"] for r in rows]
    for records, words in ((rows, "already"), ([{"model": "m", "task_id": "t", "reward": 1}], "r.jsonl:1: it has no messages"),
                           ([rows[0] | {"logprobs": [math.nan] * len(rows[0]["logprobs"])}], "r.jsonl:1: "), ([], "no records")):
        write_jsonl(tmp_path / "r.jsonl", records)
        code, _ = cli(capsys, monkeypatch, evaluation, "export-atif", path, tmp_path / ("out" if records == rows else "new"))
        assert code.startswith("eval.py: ") and words in code and not (tmp_path / "new").exists()


# ------------------------------------------------------------------------------------------------ the real Harbor

@pytest.fixture(scope="module")
def harbor_python():
    """A Python that has harbor: HARBOR_PYTHON=/path/to/venv/bin/python (3.12, `pip install harbor==0.26.*` and this
    project's numpy, requests, tqdm). Without it these tests are skipped, in CI too."""
    if not os.environ.get("HARBOR_PYTHON"):
        pytest.skip("HARBOR_PYTHON names no Python with harbor")
    return os.environ["HARBOR_PYTHON"]


def in_harbor(python, code, *args):
    done = subprocess.run([python, "-W", "ignore", "-c", textwrap.dedent(code), *map(str, args)], capture_output=True, text=True,
                          cwd=ROOT, env=os.environ | {"PYTHONPATH": ROOT})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_harbors_own_models_take_our_trajectories(harbor_python, episodes, tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", [r | {"sample": i} for i, r in enumerate(episodes)])
    out = in_harbor(harbor_python, """
        import json, pathlib, sys
        from harbor.models.trajectories import Trajectory
        from extras.harbor import export_atif
        export_atif(sys.argv[1], sys.argv[2])                # which looks itself, where harbor is installed
        for file in sorted(pathlib.Path(sys.argv[2]).iterdir()):
            ours = json.loads(file.read_text())
            print(Trajectory.model_validate(ours).to_json_dict() == ours)
        """, path, tmp_path / "out")
    assert out.split() == ["True"] * len(episodes)


def test_harbor_reads_the_folders_as_we_do(harbor_python, tmp_path):
    """What we export, and the hand-written variants: the same user, limits and network in Harbor's own models."""
    for i, (toml, files, _) in enumerate(HARBOR_VARIANTS.values()):
        harbor_folder(tmp_path / f"in/{i}", toml, **files)
    tasks, problems = harbor.import_harbor(tmp_path / "in")
    harbor.export_harbor([FULL_TASK, task_of()], tmp_path / "in")
    said = json.loads(in_harbor(harbor_python, """
        import json, pathlib, sys
        from harbor.models.task.task import Task
        said = {}
        for folder in pathlib.Path(sys.argv[1]).iterdir():
            task = Task(folder)
            c = task.config
            said[folder.name] = [c.agent.user, c.agent.timeout_sec, c.verifier.timeout_sec, c.environment.cpus,
                                 c.environment.memory_mb, c.environment.network_mode.value == "public", task.instruction]
        print(json.dumps(said))
        """, tmp_path / "in"))
    assert problems == [] and len(said) == len(HARBOR_VARIANTS) + 2
    for task in [*tasks, FULL_TASK, task_of()]:
        user, *limits, instruction = said[task["id"]]
        for key, value in zip(("agent_s", "verifier_s", "cpus", "memory_mb", "network"), limits):
            assert value is None or value == limits_of(task)[key], (task["id"], key)
        assert instruction.replace("\r\n", "\n") == task["instruction"].replace("\r\n", "\n")
        assert user is None or str(user).replace("0", "root") in (user_of(task), "1rootrootroot")
# ------------------------------------------------------------------------------------------------ eval: statistics

TB2 = f"{ROOT}/docs/tb2_trials.jsonl"
TABLE_16 = {  # RECIPE section 5: mean, pass@5
    "Qwen3.5-2B": (2.25, 4.5), "tmax-2b": (2.92, 5.6), "Qwen3.5-4B": (16.63, 27.0), "tmax-4b": (18.88, 27.0),
    "Qwen3.5-9B": (21.12, 33.7), "tmax-9b": (27.19, 40.4), "Qwen3.6-27B": (39.55, 55.1), "tmax-27b": (42.70, 52.8)}
PAIRED = {  # RECIPE section 5: difference, standard error, does the 95% interval exclude 0
    ("Qwen3.5-2B", "tmax-2b"): (0.67, 0.75, False), ("Qwen3.5-4B", "tmax-4b"): (2.25, 2.36, False),
    ("Qwen3.5-9B", "tmax-9b"): (6.07, 2.68, True), ("Qwen3.6-27B", "tmax-27b"): (3.15, 2.30, False)}


def test_table_16(capsys, monkeypatch):
    code, said = cli(capsys, monkeypatch, evaluation, "report", TB2, "--json")
    every = {s["model"]: s for s in map(json.loads, said.splitlines())}
    assert code == 0 and list(every) == list(TABLE_16)
    keys = "model tasks attempts mean se_tasks se_runs pass_at_k missing mean_without_missing".split()
    for model, (mean, pass_5) in TABLE_16.items():
        s = every[model]
        assert list(s) == keys and (s["tasks"], s["attempts"]) == (89, 445) and list(s["pass_at_k"]) == list("12345")
        assert round(100 * s["mean"], 2) == mean and round(100 * s["pass_at_k"]["5"], 1) == pass_5
        assert s["pass_at_k"]["1"] == pytest.approx(s["mean"])
    assert sum(s["missing"] for s in every.values()) == 55
    code, said = cli(capsys, monkeypatch, evaluation, "report", TB2)
    assert code == 0 and all(re.search(rf"{re.escape(m)} .* {mean:.2f}%", said) for m, (mean, _) in TABLE_16.items())


@pytest.mark.parametrize("models", PAIRED, ids="/".join)
def test_paired_differences_of_table_16(models, capsys, monkeypatch):
    difference, error, excludes_0 = PAIRED[models]
    c = evaluation.paired(*(evaluation.rows_of_one(f"{TB2}:{model}") for model in models))
    assert (round(100 * c["difference"], 2), round(100 * c["se"], 2), c["tasks"]) == (difference, error, 89)
    assert (c["low"] > 0) == excludes_0 and c["won"] + c["lost"] <= 89
    code, said = cli(capsys, monkeypatch, evaluation, "compare", *(f"{TB2}:{model}" for model in models))
    assert code == 0 and f"{difference:+.2f} points, standard error {error:.2f}" in said
    assert ("B is better than A" in said) == excludes_0 and ("could be noise" in said) != excludes_0
    back = cli(capsys, monkeypatch, evaluation, "compare", *(f"{TB2}:{model}" for model in reversed(models)))[1]
    assert f"{-difference:+.2f} points" in back and ("A is better than B" in back) == excludes_0


def test_pass_at_k_is_the_share_of_subsets_with_a_success():
    for n, c, k in itertools.product(range(1, 8), range(8), range(1, 9)):
        if c <= n and k <= n:
            subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
            assert evaluation.pass_at_k(n, c, k) == pytest.approx(np.mean([any(s) for s in subsets]))
        elif c <= n:
            assert evaluation.pass_at_k(n, c, k) is None


def test_standard_errors_are_what_repeating_the_evaluation_shows():
    """se_runs: new attempts at the same tasks; se_tasks: new tasks, each with new attempts."""
    rng = np.random.default_rng(0)

    def rows(rates, n=5):
        return eval_rows(**{f"t{i}": (rng.random(n) < rate).astype(float) for i, rate in enumerate(rates)})

    rates = rng.beta(0.5, 0.8, 60)
    same = [evaluation.statistics(rows(rates)) for _ in range(400)]
    assert np.mean([s["se_runs"] for s in same]) == pytest.approx(np.std([s["mean"] for s in same]), rel=0.12)
    other = [evaluation.statistics(rows(rng.beta(0.5, 0.8, 60))) for _ in range(400)]
    assert np.mean([s["se_tasks"] for s in other]) == pytest.approx(np.std([s["mean"] for s in other]), rel=0.12)


def test_paired_by_hand():
    a = eval_rows(x=[0, 0], y=[1, 0], z=[1, 1], only_a=[1], w=[None, 1])
    b = eval_rows(z=[1, 0], y=[1, 1], x=[1, 1], only_b=[0], w=[0.5])
    c = evaluation.paired(a, b)
    differences = np.array([1, 0.5, -0.5, 0])  # x, y, z, w: a missing reward counts 0
    assert (c["tasks"], c["unpaired"], c["won"], c["lost"]) == (4, 2, 2, 1)
    assert c["difference"] == pytest.approx(differences.mean()) and c["se"] == pytest.approx(differences.std(ddof=1) / 2)
    assert c["mean_b"] - c["mean_a"] == pytest.approx(c["difference"]) and c == evaluation.paired(a, b)
    # all 256 samples of four with replacement: the exact bootstrap
    exact = [np.mean(again) for again in itertools.product(differences, repeat=4)]
    assert [c["low"], c["high"]] == pytest.approx(np.percentile(exact, [2.5, 97.5]), abs=0.07)
    one = evaluation.paired(eval_rows(x=[1]), eval_rows(x=[0]))
    assert one["se"] is None and one["low"] == one["high"] == -1


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng, covered = np.random.default_rng(1), 0
    for _ in range(200):  # B is better by .1 on tasks whose difficulty varies
        rates = rng.uniform(0, 0.9, 60)
        a, b = (eval_rows(**{f"t{i}": (rng.random(5) < r + more).astype(float) for i, r in enumerate(rates)})
                for more in (0, 0.1))
        c = evaluation.paired(a, b, resamples=500)
        covered += c["low"] <= 0.1 <= c["high"]
    assert 0.88 <= covered / 200 <= 0.99


def test_case_34(tmp_path, capsys, monkeypatch):
    """(4, 2, 2) = .8333; beyond the attempts there are: n/a; tasks of different n; missing rewards counted and said."""
    assert evaluation.pass_at_k(4, 2, 2) == pytest.approx(0.8333, abs=1e-4)
    path = write_jsonl(tmp_path / "e.jsonl", eval_rows(a=[1, 1, 0, 0], b=[1, 1], c=[None, 1, 1]))
    code, said = cli(capsys, monkeypatch, evaluation, "report", path, "--json")
    s = json.loads(said)
    assert s["pass_at_k"] == pytest.approx({"1": (0.5 + 1 + 2 / 3) / 3, "2": (5 / 6 + 1 + 1) / 3}) and s["missing"] == 1
    assert s["mean_without_missing"] == pytest.approx((0.5 + 1 + 1) / 3)
    said = cli(capsys, monkeypatch, evaluation, "report", path)[1].splitlines()
    cells = dict(zip(re.split(" {2,}", said[0]), said[1].split()))
    assert (cells["pass@3"], cells["pass@4"], cells["missing"], cells["mean without"]) == ("n/a", "n/a", "1", "83.33%")


@pytest.mark.parametrize("lines, named", [
    ([], "no rows"), (['{"model": "m", "task": "t", "rewards": "0x1"}'], ":1: rewards '0x1'"),
    (['{"model": "m", "task": "t", "rewards": 1}'], ":1: rewards 1"), (['{"task": "t", "rewards": "01"}'], ":1 has no model"),
    (['{"model": "m", "task": "t", "rewards": "01"}', '{"model": "m", "task": "t", "rewards": "1"}'], ":2: attempt 0 of t by m is there twice"),
    (['{"model": 3, "task_id": "t", "reward": 1}'], ":1 has no model"),
    (['{"model": "m", "task_id": "t", "reward": true}'], ":1: reward True"),
    (['{"model": "m", "task_id": "t", "reward": NaN}'], ":1: reward nan"), (["[1]"], ":1: not a JSON object"),
    (['{"model": "m", ', '{"model": "m", "task_id": "t", "reward": 1}'], ":1: not a line of JSON"),
    (None, "No such file"),
])
@pytest.mark.parametrize("command", ["report", "compare"])
def test_bad_rows_are_one_clear_line(command, lines, named, tmp_path, capsys, monkeypatch):
    path = tmp_path / "e.jsonl"
    if lines is not None:
        path.write_text("".join(line + "\n" for line in lines))
    code, said = cli(capsys, monkeypatch, evaluation, command, path, *[path] * (command == "compare"))
    assert str(code).startswith("eval.py: ") and named in code and "\n" not in code and said == ""


def test_a_torn_last_line_is_left_out_with_a_warning(tmp_path, capsys, monkeypatch):
    path = tmp_path / "e.jsonl"
    path.write_text('{"model": "m", "task_id": "t", "reward": 1}\n{"model": "m", "task_id": "t", "rew')
    with pytest.warns(UserWarning, match="torn"):
        code, said = cli(capsys, monkeypatch, evaluation, "report", path, "--json")
    assert code == 0 and json.loads(said)["attempts"] == 1


@pytest.mark.parametrize("sources, named", [
    ([TB2, TB2], "several models; say"), ([f"{TB2}:nobody", TB2], "no model nobody"),
    ([f"{TB2}:tmax-2b", "nothing.jsonl"], "No such file")])
def test_compare_says_what_it_cannot_compare(sources, named, capsys, monkeypatch):
    code, said = cli(capsys, monkeypatch, evaluation, "compare", *sources)
    assert named in code and said == ""


def test_compare_of_few_tasks_and_of_none_in_common(tmp_path, capsys, monkeypatch):
    a = write_jsonl(tmp_path / "a.jsonl", eval_rows(x=[0, 1], y=[None, 0]))
    b = write_jsonl(tmp_path / "b.jsonl", eval_rows(x=[1, 1], z=[1]))
    code, said = cli(capsys, monkeypatch, evaluation, "compare", a, b)
    assert code == 0 and "1 missing rewards count as 0" in said and "2 tasks that only one" in said
    assert "ahead on 1 tasks, behind on 0, level on 0" in said and "too few" in said and "standard error n/a" in said
    code, _ = cli(capsys, monkeypatch, evaluation, "compare", a, write_jsonl(tmp_path / "c.jsonl", eval_rows(z=[1])))
    assert "no task in common" in code


# ------------------------------------------------------------------------------------------------ eval: Harbor's job results

def harbor_trial(folder, task="org/t-1", reward=1.0, agent="tmax", model={"name": "m-1", "provider": "local"}, **more):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    rewards = reward if isinstance(reward, dict) else {"reward": reward}
    (folder / "result.json").write_text(json.dumps({
        "task_name": task, "trial_name": folder.name, "agent_info": {"name": agent, "version": "1", "model_info": model},
        "agent_result": {"n_output_tokens": 30, "metadata": {"n_episodes": 4}}, "exception_info": None,
        "verifier_result": None if reward is None else {"rewards": rewards}, **more}))


def test_a_folder_of_harbor_job_results(tmp_path, capsys, monkeypatch):
    job = tmp_path / "jobs" / "2026-01-01"
    harbor_trial(job / "t-1__a", reward=1.0)
    harbor_trial(job / "t-1__b", reward=0)
    harbor_trial(job / "t-2__a", task="t-2", reward={"score": 0.5})
    harbor_trial(job / "t-2__b", task="t-2", reward=None, exception_info={"exception_type": "EnvironmentStartError"})
    harbor_trial(job / "t-1__o", agent="oracle", model=None)
    (job / "result.json").write_text('{"id": "x", "n_total_trials": 5, "stats": {}}')
    (job / "config.json").write_text("{}")
    # what an agent has left in its own trial's folder is no trial
    harbor_trial(job / "t-1__b" / "artifacts" / "t-9__x", task="t-9")
    (job / "t-1__b" / "agent").mkdir()
    (job / "t-1__b" / "agent" / "result.json").write_text('{"trial_name": "agent", "task_name": "t-9"}')
    for folder in (job, tmp_path / "jobs"):
        code, said = cli(capsys, monkeypatch, evaluation, "report", folder, "--json")
        m, oracle = map(json.loads, said.splitlines())
        assert code == 0 and (m["model"], m["tasks"], m["attempts"], m["missing"]) == ("m-1", 2, 4, 1)
        assert m["mean"] == pytest.approx((0.5 + 0.25) / 2) and (oracle["model"], oracle["mean"]) == ("oracle", 1.0)
    said = cli(capsys, monkeypatch, evaluation, "report", job)[1]
    assert "EnvironmentStartError 1" in said and "turns an episode: 4.0" in said
    (job / "t-3__a").mkdir()
    (job / "t-3__a" / "config.json").write_text("{}")
    with pytest.warns(UserWarning, match="t-3__a has no result.json"):
        cli(capsys, monkeypatch, evaluation, "report", job)
    ours = write_jsonl(tmp_path / "ours.jsonl", eval_rows(**{"t-1": [1, 1], "t-2": [1, 1]}))
    assert "+62.50 points" in cli(capsys, monkeypatch, evaluation, "compare", f"{job}:m-1", ours)[1]


@pytest.mark.parametrize("break_it, named", [
    (lambda job: (job / "a" / "result.json").write_text("{"), "a/result.json: not JSON"),
    (lambda job: harbor_trial(job / "b", reward={"x": 1, "y": 0}), "b/result.json: several rewards (x, y)"),
    (lambda job: harbor_trial(job / "b", reward=7), "b/result.json: reward 7"),
    (lambda job: harbor_trial(job / "b", task=None), "b/result.json has no task_id"),
    (lambda job: (job / "a" / "result.json").unlink(), "no results of Harbor trials"),
])
def test_broken_harbor_results_are_named(break_it, named, tmp_path, capsys, monkeypatch):
    harbor_trial(tmp_path / "job" / "a")
    break_it(tmp_path / "job")
    code, said = cli(capsys, monkeypatch, evaluation, "report", tmp_path / "job")
    assert str(code).startswith("eval.py: ") and named in code and said == ""


# ------------------------------------------------------------------------------------------------ eval: run

def without_times(rows):
    return sorted([{k: v for k, v in row.items() if k not in ("times", "infra_retries")} for row in rows],
                  key=lambda row: (row["task_id"], row["attempt"]))


def test_a_killed_evaluation_that_goes_on_equals_one_never_stopped(warm, demos, tmp_path, capsys, monkeypatch):
    def flags(out):
        return ["run", "--tasks", demos.tasks, "--model", warm, "--out", str(out), "--backend", "bwrap", "--workers", "2",
                "--attempts", "4", "--max-turns", "3", "--max-turn-tokens", "30"]

    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    assert cli(capsys, monkeypatch, evaluation, *flags(whole))[0] == 0
    process = subprocess.Popen([sys.executable, f"{ROOT}/eval.py", *flags(killed)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    await_lines(process, killed, 3)
    process.kill()
    process.wait()
    kept = read_jsonl(killed)
    assert 3 <= len(kept) < 16
    with open(killed, "ab") as f:
        f.write(b'{"attempt": 0, "task_id": "t-')  # what a kill in the middle of a write leaves
    with pytest.warns(UserWarning, match="torn last line"):
        assert cli(capsys, monkeypatch, evaluation, *flags(killed))[0] == 0
    assert read_jsonl(killed)[: len(kept)] == kept
    # every sampled token comes from (seed, task, attempt, turn), and no row is lost or played twice
    assert without_times(read_jsonl(killed)) == without_times(read_jsonl(whole))
    row = read_jsonl(whole)[0]
    assert row["tokens"] > row["sampled_tokens"] > 0 and not set(evaluation.TOKEN_FIELDS) & set(row)


def test_evaluation_settings_are_the_papers(bwrap, endpoint, tmp_path, capsys, monkeypatch):
    """Temperature .7, top-p .95, 5 attempts, and graded although never submitted."""
    endpoint.script = [ok(call_message(DO_IT))]
    path = write_jsonl(tmp_path / "tasks.jsonl", [bash_task()])
    code, said = cli(capsys, monkeypatch, evaluation, "run", "--tasks", path, "--model", "m", "--engine", f"chat:{endpoint.url}",
                     "--backend", "bwrap", "--out", tmp_path / "out", "--max-turns", 1)
    rows = read_jsonl(tmp_path / "out")
    assert code == 0 and [(r["reward"], r["end"]) for r in rows] == [(1.0, "max_turns")] * 5 and "max_turns 5" in said
    assert {(b["temperature"], b["top_p"]) for _, _, b, _ in endpoint.requests} == {(0.7, 0.95)}


def test_a_task_whose_image_does_not_build_is_missing_and_not_0(backend, endpoint, tmp_path, capsys, monkeypatch):
    endpoint.script = [ok(call_message(DO_IT)), ok(call_message(SUBMIT))] * 2
    bad = bash_task("t-bad") | {"dockerfile": "FROM tmax-base:core\nRUN echo no such luck >&2; exit 7\n"}
    path = write_jsonl(tmp_path / "tasks.jsonl", [bad, bash_task("t-good")])
    flags = ["run", "--tasks", path, "--model", "m", "--engine", f"chat:{endpoint.url}", "--backend", backend,
             "--attempts", 2, "--workers", 1, "--out", tmp_path / "out"]
    code, said = cli(capsys, monkeypatch, evaluation, *flags)
    rows = read_jsonl(tmp_path / "out")
    assert code == 0 and sorted((r["task_id"], r["reward"]) for r in rows if r["reward"]) == [("t-good", 1.0)] * 2
    failed = [r for r in rows if r["task_id"] == "t-bad"]
    assert [(r["attempt"], r["reward"], r["end"]) for r in failed] == [(0, None, "infra_error"), (1, None, "infra_error")]
    assert all("t-bad" in r["error"] and "no such luck" in r["error"] for r in failed) and "attempts without reward: 2" in said
    assert len(endpoint.requests) == 4
    # mended, the same command plays what has no outcome, and only that
    write_jsonl(tmp_path / "tasks.jsonl", [bash_task("t-bad"), bash_task("t-good")])
    endpoint.script = endpoint.script * 2
    code, said = cli(capsys, monkeypatch, evaluation, *flags)
    assert code == 0 and len(endpoint.requests) == 8 and len(read_jsonl(tmp_path / "out")) == 6
    said = json.loads(cli(capsys, monkeypatch, evaluation, "report", tmp_path / "out", "--json")[1])
    assert (said["tasks"], said["attempts"], said["missing"], said["mean"]) == (2, 4, 0, 1.0)


def test_where_no_task_can_be_played_nothing_is_written(bwrap, tmp_path, capsys, monkeypatch):
    path = write_jsonl(tmp_path / "tasks.jsonl", [bash_task() | {"dockerfile": "FROM elsewhere\n"}])
    code, _ = cli(capsys, monkeypatch, evaluation, "run", "--tasks", path, "--model", "m", "--engine", "chat:http://127.0.0.1:9/v1",
                  "--backend", "bwrap", "--out", tmp_path / "out")
    assert "none of 1 tasks" in code and "FROM elsewhere" in code and not (tmp_path / "out").exists()


@pytest.mark.parametrize("rows, named", [
    ([{"model": "other", "task_id": "t", "sample": 0, "attempt": 0, "reward": 1}], "rollouts of other; choose another --out"),
    ([bash_task()], "something other than rollouts; choose another --out")])
def test_a_file_of_something_else_is_not_continued(rows, named, bwrap, tmp_path, capsys, monkeypatch):
    path, out = write_jsonl(tmp_path / "tasks.jsonl", [bash_task()]), write_jsonl(tmp_path / "out", rows)
    before = Path(out).read_bytes()
    for module, flags in ((evaluation, ["run"]), (rollout, [])):
        code, _ = cli(capsys, monkeypatch, module, *flags, "--tasks", path, "--model", "m", "--engine",
                      "chat:http://127.0.0.1:9/v1", "--backend", "bwrap", "--out", out)
        assert named in code and Path(out).read_bytes() == before


# ------------------------------------------------------------------------------------------------ eval: questions with an answer

@pytest.mark.parametrize("given, want, same", [
    ("73", "073", True), (" 204.\n", "204", True), ("$1{,}000$", "1000", False), ("1,000", "1000", True), ("12,34", "1234", False),
    (r"\frac{1}{2}", "0.5", True), (r"\dfrac{-3}{6}", "-1/2", True), ("1/0", "1", False), ("(1, 2)", "(1,2)", True), ("(1,2)", "(12)", False),
    ("Paris ", "paris", True), ("x+1", "1+x", False), ("", "0", False), ("1e999999999", "1", False), ("9" * 10_000, "9", False), ("-0", "0", True),
    ("1/" + "0" * 3000 + "1", "1", False), ("٣", "3", True)])
def test_same_answer(given, want, same):
    started = time.monotonic()
    assert answers.same_answer(given, want) == same and time.monotonic() - started < 0.2


@pytest.mark.parametrize("text, answer", [
    (r"so \boxed{12}, no: \boxed{\frac{1}{2}}.", r"\frac{1}{2}"), (r"\boxed{12", None), ("The answer is 042.", "042"),
    ("**Answer:** 3/4 apples", "3/4"), ("Answer: Paris.", "Paris"), ("first the answer is 1. Then: the answer is $2$.", "2"),
    (r"<think>\boxed{1}</think> The answer is 2", "2"), (r"<think>the answer is 1, \boxed{1}", None), ("no idea", None), ("", None),
    (r"\boxed{5} and the answer is 6", "5")])
def test_final_answer(text, answer):
    assert answers.final_answer(text) == answer


QUESTIONS = [{"id": "q-1", "question": "What is 70 + 3?", "answer": "073"}, {"id": "q-2", "question": "Half of one?", "answer": 0.5}]


def test_questions_through_the_terminal(backend, endpoint, tmp_path, capsys, monkeypatch):
    """Right, wrong, none, and a link to where the answer might lie."""
    endpoint.script = [ok(call_message(command, SUBMIT)) for command in (
        "echo 73 > answer.txt", "echo 1/2 > /app/answer.txt", "echo 74 > answer.txt", "true",
        "ln -s /tests/check.py answer.txt", "mkdir answer.txt")]
    path = write_jsonl(tmp_path / "questions.jsonl", QUESTIONS)
    code, said = cli(capsys, monkeypatch, evaluation, "run", "--tasks", path, "--model", "m", "--engine", f"chat:{endpoint.url}",
                     "--backend", backend, "--attempts", 3, "--workers", 1, "--out", tmp_path / "out")
    rows = read_jsonl(tmp_path / "out")
    assert code == 0
    by_command = {r["messages"][2]["tool_calls"][0]["function"]["arguments"]: r for r in rows}
    assert len(by_command) == 6 and {r["end"] for r in rows} == {"submitted"}
    for r in rows:  # the first two answers are right for one question each, whichever attempt got them
        command = json.loads(r["messages"][2]["tool_calls"][0]["function"]["arguments"])["command"]
        right = (r["task_id"], command.split(" >")[0]) in (("q-1", "echo 73"), ("q-2", "echo 1/2"))
        assert (r["reward"] == 1) == right and "expected" in r["grade_log"], r
    assert "What is 70 + 3?" in str(endpoint.requests[0][2]) and "073" not in str([b["messages"] for _, _, b, _ in endpoint.requests])


def test_questions_in_a_single_turn(endpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")  # needs no sandbox
    endpoint.script = [ok({"role": "assistant", "content": text}) for text in
                       (r"\boxed{73}", "The answer is 74.", r"$\boxed{\frac12}$ or \boxed{1/2}")] + [(401, {}, {})]
    path = write_jsonl(tmp_path / "questions.jsonl", QUESTIONS)
    flags = ["run", "--tasks", path, "--model", "m", "--engine", f"chat:{endpoint.url}", "--no-tools", "--attempts", 2,
             "--workers", 1, "--out", tmp_path / "out", "--infra-retries", 1]
    code, said = cli(capsys, monkeypatch, evaluation, *flags)
    rows = read_jsonl(tmp_path / "out")
    assert code == 0 and [(r["task_id"], r["attempt"], r["reward"], r["end"]) for r in rows] == [
        ("q-1", 0, 1.0, "submitted"), ("q-1", 1, 0.0, "submitted"), ("q-2", 0, 1.0, "submitted"), ("q-2", 1, None, "infra_error")]
    assert rows[1]["grade_log"] == "expected '073', found '74'" and len(endpoint.requests) == 5
    bodies = [body for _, _, body, _ in endpoint.requests]
    assert all("tools" not in body and body["temperature"] == 0.7 for body in bodies)
    assert json.loads(cli(capsys, monkeypatch, evaluation, "report", tmp_path / "out", "--json")[1])["mean"] == 0.5
    endpoint.script = [ok({"role": "assistant", "content": "Answer: 0.5"})] * 6  # what had no outcome is asked again
    assert cli(capsys, monkeypatch, evaluation, *flags)[0] == 0 and len(endpoint.requests) == 6
    assert json.loads(cli(capsys, monkeypatch, evaluation, "report", tmp_path / "out", "--json")[1])["mean"] == 0.75


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_single_turn_by_tokens(name, folders):
    chat = Chat(folders[name])
    task = answers_of(QUESTIONS)[0]
    engine = SaysTokens(chat, "</think>\\boxed{73}" if name == "xml" else "<think>1</think> answer: 73")
    r = answers.answer_once(task, engine, chat, Sampling(max_turn_tokens=60), seed=0, group=0, sample=0, model="m")
    assert (r["reward"], r["end"], r["turns"]) == (1.0, "submitted", 1)
    prompt = chat.tokenizer.decode(engine.prompts[0])
    assert "What is 70 + 3?" in prompt and "073" not in prompt and r["token_ids"][: len(engine.prompts[0])] == engine.prompts[0]
    assert sum(r["loss_mask"]) == len(r["token_ids"]) - len(engine.prompts[0])
    cut = answers.answer_once(task, SaysTokens(chat, "no " * 99), chat, Sampling(max_turn_tokens=9), seed=0, group=0, sample=0, model="m")
    assert (cut["reward"], cut["end"]) == (0.0, "length")


def answers_of(questions):
    with tempfile.TemporaryDirectory() as folder:
        return answers.answer_tasks(write_jsonl(Path(folder) / "q.jsonl", questions))


def test_binary_statistics(tmp_path, capsys, monkeypatch):
    a, b = (write_jsonl(tmp_path / name, [{"model": name, "task_id": f"t-{i}", "attempt": 0, "reward": r} for i, r in enumerate(rewards)])
            for name, rewards in (("a", [0.5, 1, None]), ("b", [0.25, 1, 0.9])))
    for flags, mean in (([], 0.5), (["--binary"], 1 / 3)):
        assert json.loads(cli(capsys, monkeypatch, evaluation, "report", "--json", a, *flags)[1])["mean"] == pytest.approx(mean)
    assert "+0.00 points" in cli(capsys, monkeypatch, evaluation, "compare", a, b, "--binary")[1]


@pytest.mark.parametrize("questions, flags, named", [
    ([{"id": "q", "question": "?"}], [], "questions.jsonl:1: answer is missing"), ([{"id": "", "question": "?", "answer": "1"}], [], ":1: id is missing"),
    ([{"id": "q", "question": "?", "answer": "1"}] * 2, [], ":2: the id q is there twice"),
    ([{"id": "q", "question": "?", "answer": [1]}], [], ":1: answer is missing"),
    ([{"id": "q", "question": "?", "answer": "1"}, bash_task()], [], ":2: question is missing"),
    ([bash_task()], ["--no-tools"], "t-1 has none")])
def test_bad_questions_are_one_clear_line(questions, flags, named, tmp_path, capsys, monkeypatch):
    path = write_jsonl(tmp_path / "questions.jsonl", questions)
    code, _ = cli(capsys, monkeypatch, evaluation, "run", "--tasks", path, "--model", "m", "--engine", "chat:http://127.0.0.1:9/v1",
                  "--out", tmp_path / "out", *flags)
    assert str(code).startswith("eval.py: ") and named in code and "\n" not in code


# ------------------------------------------------------------------------------------------------ eval: the page of episodes

class Browser:
    """A headless Chromium with one page, spoken to over its debugging pipe: NUL-ended JSON on descriptors 3 and 4."""

    def __init__(self):
        self.folder, self.buffer, self.events, self.count, self.session = tempfile.TemporaryDirectory(), b"", [], 0, None
        there, self.out = os.pipe()
        self.into, back = os.pipe()
        fds = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (there, back)]
        program = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
                   "--disable-background-networking", f"--user-data-dir={self.folder.name}", "about:blank"]
        self.process = subprocess.Popen(["bash", "-c", f'exec "$@" 3<&{fds[0]} 4>&{fds[1]}', "_", *program], pass_fds=fds,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for fd in (there, back, *fds):
            os.close(fd)

    def __call__(self, method, **params):
        self.count += 1
        message = {"id": self.count, "method": method, "params": params} | ({"sessionId": self.session} if self.session else {})
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.buffer:
                data = os.read(self.into, 1 << 20)
                assert data, "the browser is gone"
                self.buffer += data
            one, _, self.buffer = self.buffer.partition(b"\0")
            got = json.loads(one)
            if got.get("id") == self.count:
                assert "error" not in got, got
                return got["result"]
            self.events.append(got)

    def js(self, code):
        got = self("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in got, got
        return got["result"].get("value")

    def wait(self, code):
        """Until the expression is true; its value (an element, which comes back as an empty object, is true)."""
        deadline = time.monotonic() + 60
        while not (value := self.js(f"(value => value instanceof Node || value)({code})")):
            assert time.monotonic() < deadline, code
            time.sleep(0.02)
        return value

    def open(self, path, width=1280, height=800, dark=False):
        """Opens a page in a tab of its own; the milliseconds from navigation until its list could be used."""
        tabs = [t["targetId"] for t in self("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self.session = None
        tab = self("Target.createTarget", url="about:blank")["targetId"]
        for old in tabs:
            self("Target.closeTarget", targetId=old)
        self.session = self("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(domain + ".enable")
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.events = []
        self("Page.navigate", url=f"file://{path}")
        self.wait("location.protocol === 'file:' && performance.getEntriesByName('ready').length")
        return self.js("performance.getEntriesByName('ready')[0].startTime")

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            self("Input.dispatchKeyEvent", type=kind, key=key, text=key if kind == "keyDown" and len(key) == 1 else "")

    def text(self, selector):
        return self.js(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")

    def complaints(self):
        """What the page logged, threw, was refused by its policy, or asked of any network."""
        return [e for e in self.events if e.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
                or e.get("method") == "Network.requestWillBeSent" and not e["params"]["request"]["url"].startswith(("file:", "about:"))]

    def close(self):
        self.process.terminate()
        self.process.wait()
        self.folder.cleanup()


@pytest.fixture(scope="module")
def browser():
    if not shutil.which("chromium"):
        lacking("chromium", "chromium is missing")
    browser = Browser()
    yield browser
    browser.close()


def an_episode(n=0, turns=2, **more):
    messages = [{"role": "system", "content": "You solve tasks."}, {"role": "user", "content": f"Do thing {n}."}]
    for turn in range(turns):
        messages += [{"role": "assistant", "content": f"<think>\nlet me see {turn}\n</think>\nI look.\n\n"
                      + rollout.format_call(f"ls -l {turn}\ncat b", "hermes")},
                     {"role": "tool", "content": f"file {turn}\n[exit code {turn}]"}]
    return {"task_id": f"t-{n}", "group": n, "sample": 0, "seed": 0, "model": "m", "messages": messages, "reward": 1.0,
            "grade_log": "all well", "end": "submitted", "turns": turns, "times": {"model_s": 1.0}, "error": None, **more}


def page_of(records, tmp_path, tokenizer=None):
    path = tmp_path / "page.html"
    said = page.write_page(write_jsonl(tmp_path / "r.jsonl", records), str(path), tokenizer)
    assert f"{len(records)} episodes" in said
    return path


def test_an_episode_is_shown_turn_by_turn(browser, tmp_path):
    api = call_message("echo hi", content="done") | {"reasoning_content": "by an API"}
    records = [an_episode(0), an_episode(1, reward=0.0, end="max_turns", messages=[*an_episode()["messages"][:2], api,
               {"role": "tool", "content": "hi\n[exit code 0]"}, call_message("x", "y"), {"role": "tool", "content": "[error: 1]"}])]
    browser.open(page_of(records, tmp_path))
    browser.press("j")
    browser.wait("document.querySelectorAll('section').length === 3")
    assert browser.text("main h2") == ["t-0"] and browser.text(".instruction") == ["Do thing 0."]
    assert browser.text(".thinking") == ["let me see 0", "let me see 1"] and browser.text(".said") == ["I look."] * 2
    assert browser.text("pre.command") == ["ls -l 0\ncat b", "ls -l 1\ncat b"]
    assert browser.text("pre.output") == ["file 0", "file 1", "all well"] and browser.text(".code") == ["exit code 0", "exit code 1"]
    browser.press("j")
    browser.wait("document.querySelector('main h2').textContent === 't-1'")
    assert browser.text(".thinking") == ["by an API"] and browser.text("pre.command") == ["echo hi", "x", "y"]
    assert not browser.complaints()


def test_nothing_in_an_episode_runs(browser, tmp_path, folders):
    evil = ("</script><script>window.pwned = 1</script>", "<img src=x onerror='window.pwned = 1'>", "<!--<script>", "]]>{script hash}<!-- episodes -->",
            "a\u2028b\u2029c\u0085d", "\x1b[31mred\x1b[0m\r50%", "\u202egnp.exe\u200b", "\ud800", "${window.pwned = 1}", "javascript:window.pwned=1")
    tokenizer = Chat(folders["hermes"])
    records = []
    for n, text in enumerate(evil):
        ids = tokenizer.encode(text.encode("utf-8", "replace").decode(), plain=True)
        turn = {"role": "assistant", "content": text + rollout.format_call(text, "hermes"), "reasoning_content": text}
        records.append(an_episode(n, task_id=text, end=text, model=text, grade_log=text, error=text, reward=float("nan"), times={text: 1.0},
                                  messages=[{"role": "user", "content": text}, turn, {"role": "tool", "content": text}, {"role": text, "content": text}],
                                  token_ids=ids, loss_mask=[1] * len(ids), logprobs=[float("nan")] * len(ids), advantage=float("inf")))
    path = page_of(records, tmp_path, folders["hermes"])
    assert not any(text in path.read_text() for text in ("window.pwned", "onerror", "\u2028"))
    browser.open(path)
    for n, text in enumerate(evil):
        browser.js(f"location.hash = '{n}'")
        browser.wait(f"open === {n} && episode && episode.messages[0].text === {json.dumps(text)}")
        browser.wait(f"document.querySelector('main h2').textContent === visible({json.dumps(text)})")
        for _ in range(3):  # every shading
            browser.press("s")
            assert browser.js("typeof window.pwned") == "undefined"
            assert browser.js("document.querySelectorAll('main script, main img, nav script, nav img, header img, header script').length") == 0
    assert browser.js("document.querySelectorAll('script').length") == len(evil) + 2
    assert browser.js("visible('\\u001b[31m\\r\\u202e\\n\\ta\\u2028')") == "␛[31m␍⟨U+202E⟩\n\ta⟨U+2028⟩"
    assert not browser.complaints()
    # and if markup did get in, the policy would not let it act
    browser.js("document.body.insertAdjacentHTML('beforeend', \"<img src=x onerror='window.pwned = 1'><a href='javascript:window.pwned=1' id=x>x</a>\")")
    browser.js("document.getElementById('x').click()")
    browser.js("(() => { const s = document.createElement('script'); s.textContent = 'window.pwned = 1'; document.body.append(s) })()")
    time.sleep(0.3)
    assert browser.js("typeof window.pwned") == "undefined" and len(browser.complaints()) >= 3


def test_a_long_output_is_shown_in_part_until_asked_for(browser, tmp_path):
    long = "x" * 5_000_000 + "the end"
    browser.open(page_of([an_episode(messages=[*an_episode()["messages"][:3], {"role": "tool", "content": long + "\n[exit code 0]"}])], tmp_path))
    browser.press("j")
    browser.wait("document.querySelector('.more')")
    assert len(browser.text("pre.output")[0]) < 21_000
    browser.js("document.querySelector('.more').click()")
    assert browser.text("pre.output")[0] == long


def test_tokens_are_shaded_and_the_mask_is_seen(browser, tmp_path, folders):
    chat = Chat(folders["hermes"])
    prompt, turn, answer, last = (chat.encode(t) for t in ("<|im_start|>user\nhello 😀<|im_end|>\n", "the unhappiness 世界 ok", "<|im_end|>\nresult", "end"))
    ids = prompt + turn + answer + last
    mask = [0] * len(prompt) + [1] * len(turn) + [0] * len(answer) + [1] * len(last)
    sampled = [-1.0 if m else None for m in mask]
    trainer = [-1.0 if m else None for m in mask]
    kept = [True if m else None for m in mask]
    at = len(prompt)
    trainer[at], trainer[at + 1], kept[at + 2] = -0.5, -1.2, False
    record = an_episode(token_ids=ids, loss_mask=mask, logprobs=sampled, trainer_logprobs=trainer, kept=kept, advantage=-0.25,
                        messages=[*an_episode()["messages"][:2], {"role": "assistant", "content": "the unhappiness"}, {"role": "tool", "content": "result"},
                                  {"role": "assistant", "content": "end"}], model=folders["hermes"])
    browser.open(page_of([record], tmp_path))
    browser.press("j")
    browser.wait("document.querySelector('.tokens')")
    shades = "[...document.querySelectorAll('.tokens span')].map(s => s.className)"
    assert browser.js(shades) == ["up5", "down2", " cut"] + [""] * (len(turn) + len(last) - 3)
    assert browser.text(".tokens")[0].replace("·", "") == "the unhappiness 世界 ok" and browser.text(".tokens")[1] == "end"
    assert browser.text("pre.untrained") == ["<|im_end|>\nresult"] and f"{len(answer)} tokens" in browser.text(".label")[0]
    browser.js("document.querySelector('details:nth-of-type(2)').open = true")
    assert browser.wait("document.querySelector('details pre.untrained')?.textContent") == "<|im_start|>user\nhello 😀<|im_end|>\n"
    browser.js("document.querySelectorAll('.tokens span')[1].dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))")
    assert re.search(f"id {turn[1]} .*sampler −1.0000 .*trainer −1.2000 .*difference −0.2000 .*mask kept", browser.text("#status")[0])
    browser.press("s")  # advantage: one shade, none where the token is cut
    assert browser.js(shades)[:4] == ["down2", "down2", " cut", "down2"]
    browser.press("s")  # the sampler's log-prob
    assert browser.js(shades)[0] == "down2"
    browser.press("s")
    assert browser.js("document.querySelectorAll('.tokens').length") == 0 and browser.text(".said") == ["the unhappiness", "end"]


def test_token_texts_share_out_split_characters(folders):
    tokenizer, texts = Chat(folders["hermes"]).tokenizer, {}
    for text in ("a😀é世界\n", "unhappiness <|im_end|>", "\x00é"):
        ids = tokenizer.encode(text)
        pieces = page.token_texts(tokenizer, ids, texts)
        assert "".join(pieces.get(i, texts[id]) for i, id in enumerate(ids)) == text
    broken = tokenizer.encode("世")[1:] + tokenizer.encode("a世")
    pieces = page.token_texts(tokenizer, broken, texts)
    assert "".join(pieces.get(i, texts[id]) for i, id in enumerate(broken)).endswith("a世")


def test_filters_and_keys(browser, tmp_path):
    records = [an_episode(n, reward=[1.0, 0.0, 0.5, None][n % 4], end=["submitted", "max_turns"][n % 2], step=n,
                          grade_log="needle" if n == 6 else "") for n in range(40)]
    browser.open(page_of(records, tmp_path))
    shown = "[...document.querySelectorAll('nav a:not([hidden])')].map(a => a.children[1].textContent)"
    assert len(browser.js(shown)) == 40 and browser.text("#count") == ["40 episodes, mean reward 0.500"]

    def choose(id, value):
        browser.js(f"$('{id}').value = '{value}'; $('{id}').dispatchEvent(new Event('{'input' if id == 'search' else 'change'}'))")

    for kind, rest in (("pass", 0), ("fail", 1), ("part", 2), ("none", 3)):
        choose("reward", kind)
        assert browser.js(shown) == [f"t-{n}" for n in range(40) if n % 4 == rest]
    choose("reward", "")
    choose("end", "max_turns")
    choose("search", "T-1")
    assert browser.js(shown) == ["t-1", "t-11", "t-13", "t-15", "t-17", "t-19"] and "6 of 40" in browser.text("#count")[0]
    for key, task in (("j", "t-1"), ("j", "t-11"), ("j", "t-13"), ("k", "t-11")):  # only those that are listed
        browser.press(key)
        browser.wait(f"document.querySelector('main h2')?.textContent === '{task}'")
    choose("end", "")
    browser.press("/")
    assert browser.js("document.activeElement.id") == "search"
    browser.js("$('search').value = 'needle'")
    browser.press("Enter")
    browser.wait("document.querySelectorAll('nav a:not([hidden])').length === 1")
    assert browser.js(shown) == ["t-6"]
    browser.press("Escape")
    browser.press("j")
    for key, here in (("n", "turn 1"), ("n", "turn 2"), ("p", "turn 1"), ("v", "verifier")):
        browser.press(key)
        browser.wait(f"document.querySelector('section.here h3')?.firstChild.textContent === '{here}'")
    browser.press("d")
    assert browser.js("getComputedStyle(document.body).backgroundColor") == "rgb(20, 21, 23)"
    browser.press("?")
    assert browser.js("$('keys').open")
    assert not browser.complaints()


def test_narrow_windows_and_dark_systems(browser, tmp_path):
    path = page_of([an_episode(n) for n in range(3)], tmp_path)
    browser.open(path, width=390, dark=True)
    assert browser.js("getComputedStyle(document.body).backgroundColor") == "rgb(20, 21, 23)"
    visible = "[$('list'), $('main'), $('back')].map(e => e.checkVisibility())"
    assert browser.js(visible) == [True, False, False]
    browser.js("document.querySelector('nav a').click()")
    browser.wait("document.querySelector('main h2')")
    assert browser.js(visible) == [False, True, True]
    assert browser.js("document.documentElement.scrollWidth") <= 390 and browser.js("$('main').scrollWidth <= $('main').clientWidth")
    browser.js("$('back').click()")
    browser.wait("$('list').checkVisibility()")
    browser.open(f"{path}#2", width=390)  # an address names its episode
    assert browser.wait("document.querySelector('main h2')?.textContent") == "t-2"


def test_2000_episodes_open_in_2_seconds_and_stay_smooth(browser, tmp_path, folders):
    rng, records = np.random.default_rng(0), []
    for n in range(2000):
        ids = rng.integers(3, 600, 1500).tolist()
        mask = ([0] * 50 + [1] * 100) * 10
        logprobs = [float(-x) if m else None for x, m in zip(rng.exponential(size=1500), mask)]
        records.append(an_episode(n, turns=10, token_ids=ids, loss_mask=mask, logprobs=logprobs, trainer_logprobs=logprobs,
                                  kept=[bool(m) if m else None for m in mask], advantage=0.5, step=n // 32))
    path = page_of(records, tmp_path, folders["hermes"])
    assert min(browser.open(path) for _ in range(3)) < 2000
    assert browser.js("document.querySelectorAll('main *').length") < 5  # no episode is unpacked before it is opened
    took = []
    for n in range(15):
        took.append(browser.js(f"""(async () => {{ const start = performance.now(); location.hash = {n * 100};
            while (!(episode && episode.task_id === 't-{n * 100}')) await new Promise(requestAnimationFrame);
            await new Promise(requestAnimationFrame); return performance.now() - start }})()"""))
    assert np.median(took) < 300 and browser.js("document.querySelectorAll('.tokens span').length") == 1000
    took = browser.js("(() => { const start = performance.now(); $('search').value = '99'; filter(); return performance.now() - start })()")
    assert took < 100


@pytest.mark.parametrize("lines, named", [
    ([], "no episodes"), ([{"model": "m", "task_id": "t", "reward": 1}], "r.jsonl:1 has no messages"), (["{", an_episode()], ":1: not a line of JSON")])
def test_a_page_of_nothing_says_so(lines, named, tmp_path, capsys, monkeypatch):
    path = tmp_path / "r.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    code, said = cli(capsys, monkeypatch, evaluation, "show", path, "--out", tmp_path / "page.html")
    assert str(code).startswith("eval.py: ") and named in code and not (tmp_path / "page.html").exists() and said == ""
# ================================================================================================ vLLM, weight pushes, resume

# ------------------------------------------------------------------------------------------------ vLLM servers

class VllmServer:
    """A real vLLM CPU server in its own process group; `kill` takes it away, `start` brings it back on the same port."""

    def __init__(self, python, model, log, *flags):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.url, self.model, self.log = f"http://127.0.0.1:{self.port}", model, log
        self.command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(self.port),
                        "--dtype", "float32", "--enforce-eager", "--no-enable-chunked-prefill", *flags]
        self.start()

    def start(self):
        # One thread, not bound to a core: two that wait for each other crawl where others use the cores too. Without
        # multiprocessing the engine's process is the worker: one import of 15 s less, and fewer messages a token.
        env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
               "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=env, start_new_session=True)

    def wait(self, timeout=400):
        deadline = time.monotonic() + timeout
        while True:
            try:
                if requests.get(f"{self.url}/health", timeout=5).ok:
                    return self
            except requests.RequestException:
                pass
            assert self.process.poll() is None and time.monotonic() < deadline, Path(self.log).read_text()[-3000:]
            time.sleep(0.5)

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def hybrid_folder(path):
    """A Qwen3.5 checkpoint of the smallest widths that vLLM's kernels for the CPU take."""
    tokenizer = byte_tokenizer(TEMPLATES["xml"])
    small_hybrid(len(tokenizer), hidden_size=64, head_dim=64, linear_key_head_dim=128,
                 linear_value_head_dim=128).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def vllm(warm, tmp_path_factory):
    """Four servers: `tied` and `untied` serve one tied model, `odd` another one, with settings that do not fit and
    for prompts longer than it was made for, and `hybrid` a Qwen3.5.

    VLLM_PYTHON is the interpreter of an environment with requirements-vllm.txt. """
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        lacking("vllm", "VLLM_PYTHON is not set")
    folder = tmp_path_factory.mktemp("vllm")
    model = str(shutil.copytree(warm, folder / "model"))
    chat = Chat(model)
    GenerationConfig(eos_token_id=chat.end_id, do_sample=True, top_k=2, temperature=0.2, top_p=0.3,
                     repetition_penalty=1.7).save_pretrained(model)  # must not matter
    odd, tokenizer = str(folder / "odd"), byte_tokenizer(TEMPLATES["xml"])
    small_model(len(tokenizer), hidden_size=64, head_dim=64).save_pretrained(odd)
    tokenizer.save_pretrained(odd)
    fits = ["--max-model-len", "1024", "--logprobs-mode", "processed_logprobs"]
    servers = {
        "tied": VllmServer(python, model, folder / "tied.log", *fits),
        "untied": VllmServer(python, model, folder / "untied.log", *fits, "--hf-overrides",
                             '{"tie_word_embeddings": false}'),
        "odd": VllmServer(python, odd, folder / "odd.log", "--max-model-len", "32768", "--max-num-batched-tokens", "32768",
                          "--hf-overrides", '{"max_position_embeddings": 32768}'),
        # On the CPU, linear attention is there in bf16 alone, and prefix caching wants chunked prefill.
        "hybrid": VllmServer(python, hybrid_folder(folder / "hybrid"), folder / "hybrid.log", *fits, "--dtype", "bfloat16",
                             "--no-enable-prefix-caching", "--hf-overrides", '{"head_dtype": "float32"}'),
    }
    try:
        for name in ("tied", "untied", "odd"):
            servers[name].wait()
        with contextlib.suppress(AssertionError):  # its own test says why, if it has ended
            servers["hybrid"].wait()
        yield SimpleNamespace(model=model, chat=chat, **servers)
    finally:
        for server in servers.values():
            server.kill()


VLLM_LIMITS = {"max_turns": 3, "max_turn_tokens": 30, "max_tokens": 300, "max_prompt_tokens": 300}


def vllm_engine(vllm, *servers, push_dir=None, **limits):
    return VllmEngine([s.url for s in servers], vllm.model, vllm.chat, [vllm.chat.end_id],
                      Sampling(**{**VLLM_LIMITS, **limits}), push_dir)


def logprobs_of(model, prompt, turn, temperature=1.0):
    """The trainer's log-probs of a turn's tokens."""
    ids = torch.tensor([prompt + turn.ids])
    mask = torch.tensor([[0] * len(prompt) + [1] * len(turn.ids)])
    with torch.no_grad():
        return dppo.token_logprobs(model, ids, mask, temperature)[0][0, len(prompt):]


def a_prompt(chat):
    return chat.prompt_ids([{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Write done."}])


def other_weights(model, seed):
    """A copy of a model with every weight moved a little."""
    torch.manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    return other


def probe_of(model, prompt):
    with torch.no_grad():
        logprobs = dppo.token_logprobs(model, torch.tensor([prompt]), torch.ones(1, len(prompt)))[0]
    return prompt, logprobs[0, 1:].tolist()


def test_vllm_garbage_of_a_tiny_model_makes_no_task(vllm, bases, tmp_path, capsys, monkeypatch):
    out = tmp_path / "tasks.jsonl"
    code, said = cli(capsys, monkeypatch, gen, "make", "--n", 6, "--preset", "rl_v2", "--base-url", f"{vllm.odd.url}/v1",
                     "--model", vllm.odd.model, "--base", BASE, "--max-reply-tokens", 300, "--repairs", 1, "--out", out)
    assert "6 dropped" in said and "0 kept" in said and str(code).startswith("gen.py make: no task was kept"), (code, said)
    dropped = dropped_of(out)
    assert len(dropped) == 6 and read_jsonl(out) == [] and all(row["detail"] and row["reply"] for row in dropped.values())
    assert {row["reason"] for row in dropped.values()} <= {"format", "cut"}, dropped


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_vllm_engine_contract(vllm, temperature):
    """Tokens in, tokens out; the log-probs are those of the trainer at that temperature, so nothing of the model's
    generation_config leaks in (CASES 30); the same seed gives the same turn; limits cut, end tokens end."""
    engine, model, prompt = vllm_engine(vllm, vllm.tied), rollout.load_model(vllm.model), a_prompt(vllm.chat)
    sampling = Sampling(temperature=temperature)
    turns = [engine.generate(prompt, 30, seed, sampling) for seed in (1, 2, 3, 1)]
    assert turns[0][:2] == turns[3][:2] and turns[0].versions == (0, 0)
    for turn in turns:
        assert (torch.tensor(turn.logprobs) - logprobs_of(model, prompt, turn, temperature)).abs().max() < 1e-3
        assert turn.cut == (turn.ids[-1] != vllm.chat.end_id) and len(turn.ids) <= 30
    cut = engine.generate(prompt, 2, 1, sampling)
    assert cut.cut and cut.ids == turns[0].ids[:2]
    speed = engine.take_speed()
    assert speed["sample_s"] > 0 and speed["sample_tokens_per_s"] > 0


def test_vllm_through_the_commands(vllm, demos, tmp_path, capsys, monkeypatch):
    """rollout.py and eval.py with --engine http://: whole records."""
    limits = [x for k, v in VLLM_LIMITS.items() for x in (f"--{k.replace('_', '-')}", v)]
    flags = ["--tasks", demos.tasks, "--model", vllm.model, "--engine", vllm.tied.url, "--backend", "bwrap", *limits]
    assert cli(capsys, monkeypatch, rollout, *flags, "--out", tmp_path / "r.jsonl", "--n", 2)[0] == 0
    records = read_jsonl(tmp_path / "r.jsonl")
    assert len(records) == 8 and all(r["reward"] is not None for r in records)
    for r in records:
        check_tokens(r)
    code, said = cli(capsys, monkeypatch, evaluation, "run", *flags, "--out", tmp_path / "e.jsonl", "--attempts", 1)
    assert code == 0 and re.search(r"(?m)  4 +4  ", said), said


def test_vllm_a_server_that_does_not_fit_is_told_in_what(vllm, endpoint):
    """Model, context, logprobs_mode and tokenizer in one line; then no server at all, and one of another kind."""
    with pytest.raises(ValueError) as e:
        vllm_engine(vllm, vllm.odd, max_tokens=40_000)
    for words in ("--served-model-name", "--max-model-len 40300", "--logprobs-mode processed_logprobs", "tokenizer"):
        assert words in str(e.value)
    assert "\n" not in str(e.value)
    with pytest.raises(ValueError, match="--max-model-len 1300"):
        vllm_engine(vllm, vllm.tied, max_tokens=1000)
    with pytest.raises(InfraError, match="http://127.0.0.1:9 .*ConnectionError.*--engine"):
        vllm_engine(vllm, SimpleNamespace(url="http://127.0.0.1:9"))
    with pytest.raises((ValueError, InfraError), match="VLLM_SERVER_DEV_MODE"):
        vllm_engine(vllm, SimpleNamespace(url=endpoint.url))


def test_vllm_episodes_stay_on_their_server_and_new_ones_go_where_there_is_room(vllm):
    engine, prompt = vllm_engine(vllm, vllm.tied, vllm.untied), a_prompt(vllm.chat)
    engine.pauses_s = (0,)
    turns = at_once(*[lambda seed=seed: engine.generate(prompt, 30, seed, Sampling()) for seed in range(4)])
    assert collections.Counter(t.past.url for t in turns) == {vllm.tied.url: 2, vllm.untied.url: 2}
    for turn in turns:
        assert engine.generate(prompt, 5, 0, Sampling(), turn.past).past is turn.past
    # One server goes away: its episodes end with the reason, new ones go to the other.
    gone = engine.servers[1]
    gone.url = "http://127.0.0.1:9"
    with pytest.raises(InfraError, match="127.0.0.1:9.*ConnectionError"):
        engine.generate(prompt, 5, 0, Sampling(), gone)
    assert {engine.generate(prompt, 5, s, Sampling()).past.url for s in range(4)} == {vllm.tied.url}


def metric(server, name):
    """What a vLLM server counts: "generation_tokens_total" since its start, "num_requests_running" now."""
    found = re.findall(rf"(?m)^vllm:{name}\{{.*\}} (\S+)$", requests.get(f"{server.url}/metrics", timeout=10).text)
    return sum(map(float, found))


def begin_turns(pool, engine, prompt, limit, servers, n=2):
    """Turns in mid-flight, n on each of the engine's idle servers, each with some thirty tokens: as futures."""
    deadline = time.monotonic() + 240
    while True:  # again, if one server was done before another began
        turns = [pool.submit(engine.generate, prompt, limit, seed, Sampling(), past)
                 for seed, past in enumerate(engine.servers[:len(servers)] * n)]
        waiting, counted = list(servers), {}
        while waiting and not any(turn.done() for turn in turns):
            assert time.monotonic() < deadline, "the turns have not begun"
            for server in list(waiting):
                tokens = metric(server, "generation_tokens_total")
                if server in counted and tokens > counted[server] + 30 * n:
                    waiting.remove(server)
                elif server not in counted and metric(server, "num_requests_running") == n:
                    counted[server] = tokens
            time.sleep(0.02)
        if not any(turn.done() for turn in turns):
            return turns
        for turn in turns:
            turn.result()  # all are over before the next begin; one that failed says so


def test_vllm_a_push_reaches_turns_in_flight_and_leaves_nothing_of_the_old_weights(vllm, tmp_path):
    """CASES 31. A long turn goes on over two pushes: each of its tokens has the log-prob of the weights of its time,
    and the versions say so. The prompt's keys and values are the new weights' afterwards."""
    engine, prompt = vllm_engine(vllm, vllm.tied, vllm.untied, push_dir=tmp_path), a_prompt(vllm.chat)
    old = rollout.load_model(vllm.model)
    engine.ends = []  # no end: the turns are as long as their limit
    models = [old, other_weights(old, 1), other_weights(old, 2)]
    probes = [probe_of(m, prompt) for m in models]  # now: beside busy servers it takes too long
    engine.load(old.state_dict(), 0, probes[0])
    with ThreadPoolExecutor(4) as pool:
        for abort in (False, True):
            engine.abort = abort
            long = begin_turns(pool, engine, prompt, 800, (vllm.tied, vllm.untied))
            start = engine.servers[0].version
            engine.load(models[start + 1].state_dict(), start + 1, probes[start + 1])
            for turn in (f.result() for f in long):
                near = [(torch.tensor(turn.logprobs) - logprobs_of(m, prompt, turn)).abs() < 1e-3 for m in models]
                if abort:  # started again
                    assert turn.versions == (start + 1, start + 1) and near[start + 1].all()
                else:
                    switch = (~near[start]).nonzero()[0].item()
                    assert turn.versions == (start, start + 1) and 0 < switch < 800 and near[start + 1][switch:].all()
    turn = engine.generate(prompt, 30, 7, Sampling())
    assert (torch.tensor(turn.logprobs) - logprobs_of(models[2], prompt, turn)).abs().max() < 1e-3


def test_vllm_carries_qwen3_5(vllm, tmp_path):
    """The recipe's main model, bf16 on both sides: log-probs after prompts about as long as a chunk of its linear
    attention (64); turns in flight go on over a push, and afterwards nothing of the old weights is left."""
    server = vllm.hybrid
    try:
        server.wait()
    except AssertionError:
        if "No module named 'torchvision'" in Path(server.log).read_text():
            lacking("torchvision", "vLLM imports torchvision for Qwen3.5, and VLLM_PYTHON's environment has none that loads")
        raise
    model = server.model
    chat, old, prompt_of = Chat(model), rollout.load_model(model), lambda n: [(37 * i * i + n) % 500 for i in range(n)]
    engine = VllmEngine([server.url], model, chat, [], Sampling(**VLLM_LIMITS), tmp_path)
    new, long = other_weights(old, 1), prompt_of(200)
    # vLLM 0.32's convolution for AMX takes a prompt of one token for one that lies the wrong way round.
    shortest = 2 if " amx_tile " in Path("/proc/cpuinfo").read_text() else 1
    models = [old.bfloat16(), new.bfloat16()]

    def whose(prompt, turn, part):
        """The one model whose log-probs a part of a turn has."""
        off = [(torch.tensor(turn.logprobs) - logprobs_of(m, prompt, turn))[part].abs().mean().item() for m in models]
        assert min(off) < 0.1 < 0.5 < max(off), off
        return off.index(min(off))

    def all_of(version):
        for prompt in map(prompt_of, (shortest, 63, 64, 65, 200)):
            turn = engine.generate(prompt, 40, 0, Sampling())
            assert turn.versions == (version, version) and whose(prompt, turn, slice(None)) == version

    all_of(0)
    probes = [probe_of(m, long) for m in models]
    engine.load(models[0].state_dict(), 0, probes[0])
    with ThreadPoolExecutor(4) as pool:
        turns = begin_turns(pool, engine, long, 600, [server], n=4)
        engine.load(models[1].state_dict(), 1, probes[1])
        for turn in (t.result() for t in turns):
            assert turn.versions == (0, 1)
            assert whose(long, turn, slice(20)) == 0 and whose(long, turn, slice(-100, None)) == 1
    all_of(1)


def test_vllm_a_push_that_did_not_take_effect_is_caught(vllm, tmp_path, monkeypatch):
    """A file without the tied head leaves the old one in use where vLLM has packed it; one that is not there, or is
    no checkpoint, fails on the server: PushError with its address, and the next good push is taken."""
    from safetensors import torch as files

    engine, prompt = vllm_engine(vllm, vllm.tied, push_dir=tmp_path), a_prompt(vllm.chat)
    model = other_weights(rollout.load_model(vllm.model), 3)
    engine.load(model.state_dict(), 0, probe_of(model, prompt))
    new, save = other_weights(model, 4), files.save_file
    broken = {
        "headless": lambda tensors, *rest, **more: save({k: w for k, w in tensors.items() if k != "lm_head.weight"},
                                                        *rest, **more),
        "not written": lambda tensors, path, **more: save({k: w for k, w in model.state_dict().items()
                                                           if k != "lm_head.weight"}, path, **more),
        "no checkpoint": lambda tensors, path, **more: Path(path).write_text("{"),
    }
    for name, function in broken.items():
        monkeypatch.setattr(files, "save_file", function)
        with pytest.raises(PushError, match=re.escape(vllm.tied.url)) as e:
            engine.load(new.state_dict(), 1, probe_of(new, prompt))
        assert "\n" not in str(e.value), name
    monkeypatch.setattr(files, "save_file", save)
    engine.load(new.state_dict(), 2, probe_of(new, prompt))
    assert engine.generate(prompt, 5, 0, Sampling()).versions == (2, 2)


VLLM_FLAGS = {"max-tokens": 300, "max-prompt-tokens": 300, "max-refill": 20, "temperature": 1.2}


def test_vllm_a_server_with_pushed_weights_is_no_engine_for_a_checkpoint(vllm, tmp_path, demos, capsys, monkeypatch):
    engine, model = vllm_engine(vllm, vllm.tied, push_dir=tmp_path), rollout.load_model(vllm.model)
    engine.load(model.state_dict(), 0, probe_of(model, a_prompt(vllm.chat)))
    code, _ = cli(capsys, monkeypatch, rollout, "--tasks", demos.tasks, "--model", vllm.model, "--engine", vllm.tied.url,
                  "--out", tmp_path / "r.jsonl", "--max-tokens", 300, "--max-prompt-tokens", 300)
    assert "has weights that a training run has pushed" in str(code) and vllm.tied.url in code


def test_vllm_asynchronous_training_on_two_vllm_servers(vllm, demos, tmp_path, capsys, monkeypatch):
    flags = dppo_flags(vllm.model, demos.tasks, tmp_path, steps=10, lag=2, lr=3e-4,
                       **{"engine": f"{vllm.tied.url},{vllm.untied.url}", **VLLM_FLAGS})
    code, said = cli(capsys, monkeypatch, dppo, *flags)
    assert code == 0, code
    metrics, rollouts = check_run(tmp_path, steps=10, lag=2)
    assert metrics[0]["logprob_diff_max"] < 1e-3 and max(m["lag"] for m in metrics) > 0
    assert all(m["push_gb_per_s"] > 0 and m["sampler_idle_s"] >= 0 for m in metrics)
    before = AutoModelForCausalLM.from_pretrained(vllm.model).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "last").state_dict()
    assert any((after[k] - before[k]).abs().max() > 1e-4 for k in before)
    assert not glob.glob("/dev/shm/tmax-*/new")


def test_vllm_a_server_that_is_killed_in_mid_run_comes_back_with_the_right_weights(vllm, demos, tmp_path):
    """On-policy, so that a single token of a restarted server's old weights would show in the log-probs."""
    flags = dppo_flags(vllm.model, demos.tasks, tmp_path, steps=6, lag=0, lr=1e-3,
                       **{"engine": vllm.untied.url, **VLLM_FLAGS})
    process = subprocess.Popen([sys.executable, f"{ROOT}/dppo.py", *map(str, flags)], stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    await_lines(process, tmp_path / "metrics.jsonl", 2)
    vllm.untied.kill()
    vllm.untied.start()
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said[-3000:]
    assert f"warning: {vllm.untied.url}" in said and f"{vllm.untied.url} is back" in said
    metrics, _ = check_run(tmp_path, steps=6, lag=0)
    assert all(m["logprob_diff_max"] < 1e-3 and m["infra_errors"] == 0 for m in metrics)


def test_vllm_a_sampler_host_that_is_cut_off_in_mid_turn_is_noticed_and_comes_back(vllm, tmp_path, capfd, monkeypatch):
    """Nothing says goodbye: without the kernel's questions the turn would wait for its answer for an hour."""
    monkeypatch.setattr(common, "SILENT_S", 3)
    prompt, model = a_prompt(vllm.chat), rollout.load_model(vllm.model)
    with cabled(vllm.tied.port) as (address, cable), ThreadPoolExecutor(1) as pool:
        engine = vllm_engine(vllm, SimpleNamespace(url=f"http://{address}"), vllm.untied, push_dir=tmp_path)
        engine.ends, engine.pauses_s = [], (1,)
        far, near = engine.servers
        engine.load(model.state_dict(), 0, probe_of(model, prompt))
        [cut] = begin_turns(pool, engine, prompt, 900, [vllm.tied], n=1)
        cable(False)
        with pytest.raises(InfraError, match=re.escape(far.url)):
            cut.result(timeout=60)
        assert engine.generate(prompt, 5, 0, Sampling()).past is near
        new = other_weights(model, 5)
        engine.load(new.state_dict(), 1, probe_of(new, prompt))  # the one that answers has them; the other gets them later
        assert (far.version, near.version) == (0, 1)
        cable(True)
        turn = engine.generate(prompt, 30, 0, Sampling(), far)
        assert turn.versions == (1, 1) and (torch.tensor(turn.logprobs) - logprobs_of(new, prompt, turn)).abs().max() < 1e-3
        assert f"{far.url} is back" in capfd.readouterr().out


def test_vllm_several_hosts_one_of_which_is_cut_off_for_a_while(warm, tmp_path):
    """extras/hosts.sh: its episodes end as infra_error, none is blamed on the agent, and the run goes on."""
    if not os.environ.get("VLLM_PYTHON"):
        lacking("vllm", "VLLM_PYTHON is not set")
    need_hosts()
    need("docker")
    # Grading takes a second, so that episodes are always in flight; chance grades, so that no group is dropped.
    tests = "sleep 1; echo 0.$RANDOM > /logs/verifier/reward.txt"
    tasks = write_jsonl(tmp_path / "tasks.jsonl", [bash_task(f"t-{i}", tests) for i in range(4)])
    command = ["bash", f"{ROOT}/extras/hosts.sh", warm, tasks, tmp_path / "run", "--steps", "6", "--temperature", "1.2"]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log,
                                   env=os.environ | {"PYTHON": sys.executable, "CUT_S": "25"})
    try:
        code = process.wait(timeout=600)
    finally:
        process.terminate()  # it tears down
        process.wait(timeout=200)
    said = (tmp_path / "log").read_text()
    assert code == 0 and "torn down" in said, said[-5000:]
    metrics, rollouts = check_run(tmp_path / "run", steps=6, lag=1)
    lost = [m["step"] for m in metrics if m["infra_errors"]]
    assert lost and set(lost) <= {2, 3, 4}, metrics  # the cut comes after two steps; the last ones are whole again
    assert {r["end"] for r in rollouts} <= {"submitted", "max_turns", "length", "context", "format_error"}
    assert "[exit code 124]" not in (tmp_path / "run" / "rollouts.jsonl").read_text()


# ------------------------------------------------------------------------------------------------ resume

KILLED = """
import os, sys
sys.path.insert(0, {root!r})
import dppo, rollout
from builtin.engine import TorchEngine

owner, name, call = {where}
function, calls = getattr(owner, name), 0

def killed(*args, **more):
    global calls
    calls += 1
    if calls == call and os.environ.get("RANK", "0") == os.environ.get("KILL_RANK", "0"):
        os.kill(os.getpid(), 9)
    return function(*args, **more)

setattr(owner, name, killed)
dppo.main()
"""
# In the third of four steps, or when the last is saved, with a checkpoint after the second: which call ends the process.
KILLS = {"sampling": "rollout, 'run_episode', {episode}", "backward": "dppo, 'backward', 3",
         "saving": "dppo.torch, 'save', 2", "pushing": "TorchEngine, 'load', 4"}


def killed_script(folder, where):
    """The path of a dppo.py that ends itself there."""
    (folder / "killed.py").write_text(KILLED.format(root=ROOT, where=where))
    return str(folder / "killed.py")


def resume_flags(warm, demos, out, **more):
    return [*dppo_flags(warm, demos.tasks, out, **{"steps": 4, "lr": 1e-3, "save-every": 2, "max-refill": 20,
                                                   "max-turn-tokens": 20, **more}), "--deterministic"]


def run_dppo(flags):
    """dppo.py in this process, on one thread: what it computes is that of a process of its own, which takes seconds to start."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["dppo.py", *map(str, flags)])
            dppo.main()
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def never_stopped(warm, demos, tmp_path_factory):
    out = tmp_path_factory.mktemp("never") / "run"
    run_dppo(resume_flags(warm, demos, out))
    return out


@pytest.mark.parametrize("where", KILLS)
def test_a_killed_run_goes_on_as_if_never_stopped(where, warm, demos, never_stopped, tmp_path):
    """CASES 32: the same tasks, tokens, log-probs and learning rate, and bit for bit the same weights."""
    out, groups = tmp_path / "run", [r["group"] for r in read_jsonl(never_stopped / "rollouts.jsonl") if r["step"] == 2]
    script = killed_script(tmp_path, KILLS[where].format(episode=min(groups) * 6 + 4))
    done = subprocess.run([sys.executable, script, *map(str, resume_flags(warm, demos, out))],
                          capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -9, done.stderr[-3000:]
    # Sampling for step 3 begins while step 2 is being saved: a kill then finds no checkpoint, and all is done again.
    assert [p.name for p in dppo.checkpoints(out)] in ([["step-2"], []] if where == "sampling" else [["step-2"]])
    assert (out / "step-4.tmp").exists() == (where == "saving")  # half a checkpoint, which nobody takes for one
    run_dppo([*resume_flags(warm, demos, out), "--resume"])
    timeless = lambda rows: [{k: v for k, v in r.items() if k != "times" and not k.endswith("_s")} for r in rows]  # noqa: E731
    assert timeless(read_jsonl(out / "rollouts.jsonl")) == timeless(read_jsonl(never_stopped / "rollouts.jsonl"))
    assert timeless(read_jsonl(out / "metrics.jsonl")) == timeless(read_jsonl(never_stopped / "metrics.jsonl"))
    for name in ("step-2", "step-4", "last"):
        mine, its = (AutoModelForCausalLM.from_pretrained(o / name).state_dict() for o in (out, never_stopped))
        assert all(torch.equal(mine[k], its[k]) for k in its), name


def test_resume_on_two_ranks(warm, demos, tmp_path):
    """The optimiser's whole state goes from one rank to the shards of two, and back."""
    flags = dppo_flags(warm, demos.tasks, tmp_path / "run", **{"save-every": 1, "max-refill": 20})
    run_dppo([*flags, "--steps", "1"])
    done = torchrun(2, f"{ROOT}/dppo.py", *flags, "--steps", 2, "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    run_dppo([*flags, "--steps", "3", "--resume"])
    check_run(tmp_path / "run", steps=3, lag=0)
    moments = torch.load(tmp_path / "run" / "step-3" / "trainer.pt")["optimizer"]["state"]
    assert all(m["step"] == 3 for m in moments.values())
    assert set(moments) == set(dict(dppo.Policy(rollout.load_model(warm)).named_parameters()))


def test_which_checkpoints_are_kept(tmp_path):
    for step in range(1, 6):
        (tmp_path / f"step-{step}").mkdir()
        dppo.keep_checkpoints(tmp_path, 2, improved=step == 2)
    assert sorted(p.name for p in tmp_path.glob("*")) == ["best", "last", "step-2", "step-4", "step-5"]
    assert (tmp_path / "best").resolve().name == "step-2" and (tmp_path / "last").resolve().name == "step-5"


RESUME_ERRORS = {  # name: (flags, what the message names)
    "other seed": ({"seed": 5}, "--seed"), "other group size": ({"group-size": 5}, "--group-size"),
    "nothing to do": ({"steps": 4}, "--steps"), "no resume": (None, "--resume"),
    "deterministic with lag": ({"lag": 1}, "--lag 0"),
}


@pytest.mark.parametrize("name", RESUME_ERRORS)
def test_what_cannot_be_resumed_says_why(name, warm, demos, never_stopped, capsys, monkeypatch):
    more, named = RESUME_ERRORS[name]
    flags = resume_flags(warm, demos, never_stopped, **{"steps": 6, **(more or {})}) + ["--resume"] * (more is not None)
    before = (never_stopped / "metrics.jsonl").read_bytes()
    code, _ = cli(capsys, monkeypatch, dppo, *flags)
    torch.use_deterministic_algorithms(False)
    assert str(code).startswith("dppo.py: ") and named in code and "\n" not in code
    assert (never_stopped / "metrics.jsonl").read_bytes() == before


def test_a_full_disk_while_saving_is_one_line_and_loses_nothing(warm, demos, tmp_path):
    """A limit on the size of a file stands in for the full disk: records are small, weights are not."""
    out, flags = tmp_path / "run", dppo_flags(warm, demos.tasks, tmp_path / "run", **{"save-every": 1, "max-refill": 20})
    done = subprocess.run([sys.executable, f"{ROOT}/dppo.py", *map(str, flags)], capture_output=True, text=True, timeout=120,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.match(r"dppo.py: .*step-1 could not be written", done.stderr.strip().splitlines()[-1])
    assert len(read_jsonl(out / "metrics.jsonl")) == 1 and not list(out.glob("step-*"))
    run_dppo([*flags, "--resume"])
    check_run(out, steps=2, lag=0)


def test_a_rank_that_dies_ends_the_others(warm, demos, tmp_path):
    flags = dppo_flags(warm, demos.tasks, tmp_path / "run", **{"steps": 50, "max-refill": 20})
    process = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                                killed_script(tmp_path, KILLS["backward"]), *map(str, flags)], stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1", "KILL_RANK": "1"})
    await_lines(process, tmp_path / "run" / "metrics.jsonl", 2)
    assert process.wait(timeout=30) != 0


@pytest.mark.parametrize("change", ["more layers", "other width", "no causal model"])
def test_a_checkpoint_of_another_architecture_is_named(change, warm, demos, tmp_path, capsys, monkeypatch):
    model = shutil.copytree(warm, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config |= {"more layers": {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5},
               "other width": {"intermediate_size": 300}, "no causal model": {"model_type": "t5"}}[change]
    (model / "config.json").write_text(json.dumps(config))
    code, _ = cli(capsys, monkeypatch, dppo, *dppo_flags(str(model), demos.tasks, tmp_path / "out"))
    assert str(code).startswith(f"dppo.py: {model}") and "\n" not in code


def harbor_job(harbor_python, folder, out, *flags):
    """{task id: (reward, its trial's folder)} of a job of the real Harbor with Docker."""
    need("docker")
    command = [Path(harbor_python).with_name("harbor"), "run", "-p", folder, "-e", "docker", "-o", out, "--job-name", "job", "-y", "-q"]
    done = subprocess.run([*map(str, command), *map(str, flags)], capture_output=True, text=True, cwd=ROOT,
                          env=os.environ | {"PYTHONPATH": ROOT})
    trials = {json.loads(p.read_text())["task_name"]: p for p in Path(out).glob("job/*/result.json")}
    assert trials, done.stdout[-3000:] + done.stderr[-3000:]
    return {id: (json.loads(p.read_text())["verifier_result"]["rewards"]["reward"], p.parent) for id, p in trials.items()}


@pytest.fixture(scope="module")
def harbor_tasks(tmp_path_factory):
    """Two exported tasks. With a network: without one, Harbor wants an image that it makes from a public registry's."""
    tasks = [t | {"limits": t["limits"] | {"network": True}} for t in gen.builtin_tasks(2, 5, "train", ["rename-call", "sort-unique"])]
    folder = tmp_path_factory.mktemp("harbor")
    harbor.export_harbor(tasks, folder)
    return tasks, folder


def test_harbors_oracle_solves_what_we_export(harbor_python, harbor_tasks, tmp_path):
    tasks, folder = harbor_tasks
    assert {id: reward for id, (reward, _) in harbor_job(harbor_python, folder, tmp_path, "-a", "oracle").items()} == {
        t["id"]: 1.0 for t in tasks}


@pytest.mark.parametrize("right", [True, False])
def test_our_agent_in_harbor_earns_what_it_earns_here(right, harbor_python, harbor_tasks, endpoint, tmp_path):
    task, folder = harbor_tasks[0][0], harbor_tasks[1]
    demo = next(d for d in task["demos"] if d["right"] == right)
    endpoint.script = [ok(call_message(c)) for c in demo["commands"]] + [ok(call_message(SUBMIT))]
    here = run_episode(task, rollout.ChatEngine(endpoint.url, "m"), None, Sampling(), backend="docker")
    endpoint.requests.clear()
    job = harbor_job(harbor_python, folder / task["id"], tmp_path, "-a", "extras.harbor:HarborAgent", "-m", "m",
                     "--ak", f"engine=chat:{endpoint.url}", "--ak", "max_turns=9")
    reward, trial = job[task["id"]]
    [there] = read_jsonl(trial / "agent/rollout.jsonl")
    assert reward == here["reward"] and (reward == 1) == right
    assert [m["content"] for m in there["messages"]] == [m["content"] for m in here["messages"]]
    assert (there["end"], there["turns"], there["reward"]) == ("submitted", len(demo["commands"]) + 1, None)
    assert json.loads((trial / "agent/trajectory.json").read_text())["extra"]["end"] == "submitted"
    assert endpoint.requests[0][2]["temperature"] == .7


# ------------------------------------------------------------------------------------------------ eval: plot, Harbor's tasks

@pytest.fixture
def drawn(monkeypatch):
    """The figure that was saved, as {panel's title: axes}, and its legend."""
    from matplotlib.figure import Figure

    seen, save = SimpleNamespace(panels={}, runs=[]), Figure.savefig

    def spy(figure, *args, **more):
        seen.panels = {axes.get_title(): axes for axes in figure.axes}
        seen.runs = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
        return save(figure, *args, **more)

    monkeypatch.setattr(Figure, "savefig", spy)
    return seen


def a_run(folder, shift=0.0, steps=4, **evals):
    folder.mkdir()
    write_jsonl(folder / "metrics.jsonl", [
        {"step": i, "reward": i / 10 + shift, "logprob_diff_max": 0.01, "kept_positive": 0.99, "kept_negative": 0.9, "turns": 3 + i,
         "tokens_per_turn": 20, "tokens_per_call": 9, "groups_zero": i, "groups_one": 1} | ({"eval_pass1": 0.5} if i == 2 else {})
        for i in range(steps)])
    for stage, rows in evals.items():
        write_jsonl(folder / f"eval_{stage}.jsonl", rows)
    return folder


def points(line):
    return list(zip(*(data.tolist() if hasattr(data, "tolist") else data for data in line.get_data())))


def test_plot_has_a_panel_for_each_figure_of_the_paper(drawn, tmp_path, capsys, monkeypatch):
    run = a_run(tmp_path / "demo", sft=eval_rows(a=[0, 1, 0], b=[0, 0, 0]), rl=eval_rows(a=[1, 1, 0], b=[1, 0, 0]))
    code, said = cli(capsys, monkeypatch, evaluation, "plot", run, "--out", tmp_path / "x.png")
    assert code == 0 and said.strip() == str(tmp_path / "x.png") and (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert list(drawn.panels) == ["Training", "Held-out tasks", "Trainer against sampler", "Cut by the mask", "Length of episodes",
                                  "Length of turns", "Groups dropped", "Attempts"] and drawn.runs == []
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in drawn.panels.values())
    assert points(drawn.panels["Training"].lines[0]) == [(1, 0), (2, 0.1), (3, 0.2), (4, pytest.approx(0.3))]
    assert points(drawn.panels["Held-out tasks"].lines[0]) == [(3, 0.5)]
    assert [points(line) for line in drawn.panels["Groups dropped"].lines] == [[(1, 0), (2, 1), (3, 2), (4, 3)], [(n, 1) for n in (1, 2, 3, 4)]]
    before, after = map(points, drawn.panels["Attempts"].lines)
    assert np.allclose(before, [(1, 1 / 6), (2, 1 / 3), (3, 0.5)]) and np.allclose(after, [(1, 0.5), (2, 5 / 6), (3, 1)])
    assert [t.get_text() for t in drawn.panels["Attempts"].get_legend().get_texts()] == ["before", "after"]
    assert [t.get_text() for t in drawn.panels["Held-out tasks"].get_legend().get_texts()] == ["validation", "test, with standard error"]


def test_plot_lays_runs_over_each_other_and_takes_seeds_together(drawn, tmp_path, capsys, monkeypatch):
    runs = [a_run(tmp_path / "dppo-s0"), a_run(tmp_path / "dppo-s1", 0.2, steps=3), a_run(tmp_path / "grpo-seed0", 0.4)]
    assert cli(capsys, monkeypatch, evaluation, "plot", *runs, "--out", tmp_path / "x.png")[0] == 0
    assert drawn.runs == ["dppo", "grpo"] and "Attempts" not in drawn.panels
    thin, also_thin, mean, other = drawn.panels["Training"].lines
    assert np.allclose(points(mean), [(1, 0.1), (2, 0.2), (3, 0.3)]) and len(points(thin)) == 4 and len(points(also_thin)) == 3
    assert thin.get_alpha() < 1 and mean.get_color() == thin.get_color() != other.get_color()


def test_plot_of_eval_files_alone_is_pass_at_k(drawn, tmp_path, capsys, monkeypatch):
    assert cli(capsys, monkeypatch, evaluation, "plot", TB2, "--out", tmp_path / "x.png")[0] == 0
    assert list(drawn.panels) == ["Attempts"] and drawn.runs == list(TABLE_16)
    assert [round(100 * points(line)[4][1], 1) for line in drawn.panels["Attempts"].lines] == [pass_5 for _, pass_5 in TABLE_16.values()]


def test_a_folder_of_harbor_tasks_is_evaluated(bwrap, endpoint, tmp_path, capsys, monkeypatch):
    harbor.export_harbor([bash_task("t-1"), bash_task("t-2")], str(tmp_path / "tasks"))
    (tmp_path / "tasks" / "t-2" / "tests" / "test.sh").unlink()
    endpoint.script = [ok(call_message(DO_IT, SUBMIT))]
    flags = ["run", "--model", "m", "--engine", f"chat:{endpoint.url}", "--backend", "bwrap", "--attempts", 2]
    monkeypatch.setattr(sys, "argv", ["eval.py", *map(str, flags), "--tasks", str(tmp_path / "tasks"), "--out", str(tmp_path / "out")])
    evaluation.main()
    assert "left out: t-2: " in capsys.readouterr().err
    assert [(r["task_id"], r["reward"]) for r in read_jsonl(tmp_path / "out")] == [("t-1", 1.0)] * 2
    (tmp_path / "tasks" / "t-1" / "tests" / "test.sh").unlink()
    code, _ = cli(capsys, monkeypatch, evaluation, *flags, "--tasks", tmp_path / "tasks", "--out", tmp_path / "out2")
    assert "no Harbor task that can be used" in code


def test_the_last_output_of_a_shell_that_ends_is_not_lost(box):
    """Also where we come late and read it together with the news of its end."""
    pump = box.channel.pump
    box.channel.pump = lambda seconds: (time.sleep(.2), pump(seconds))[1]
    assert box.run("echo a; exit 3") == Result("a\n" + sandbox.RESTARTED, 3, False)
    assert box.run("exec ls").output == "notes.txt\n" + sandbox.RESTARTED


# ================================================================================================ extras/bench.py


def test_bench_train_measures_the_same_steps_on_both_sides():
    """Against TRL too where TRL_PYTHON=/path/to/venv/bin/python has it (`pip install trl` and our torch, transformers)."""
    sizes = "--longest 64 --tokens 128 --micro-batch-tokens 64 --vocabulary 100 --hidden 64 --layers 1 --threads 1"
    trl = ["--trl-python", os.environ["TRL_PYTHON"]] if os.environ.get("TRL_PYTHON") else []
    done = subprocess.run([sys.executable, f"{ROOT}/extras/bench.py", "train", *sizes.split(), *trl], capture_output=True,
                          text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("TRL is left out" in done.stdout) == (not trl)
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("ours", "TRL  "))]
    assert [row[:3] for row in rows] == [[side, "64", lengths] for lengths in ("equal", "mixed")
                                         for side in ("ours", "TRL")[:1 + bool(trl)]]
    for row in rows:
        assert float(row[3].replace(",", "")) > 0 and len(row) == 8
    for lengths in ("equal", "mixed"):  # the third norm follows from two steps of clipping and AdamW
        norms = [[float(norm) for norm in row[5:]] for row in rows if row[2] == lengths]
        assert norms[0] == pytest.approx(norms[-1], rel=1e-3) and len(set(norms[0])) == 3
