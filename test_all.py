"""Tests of all of it, real parts only: sandboxes, processes, servers; nothing is mocked.

    bash run.sh test                       # all
    bash run.sh test -k "shell and bwrap"  # some

A missing Docker or Podman skips its tests, unless REQUIRE_BACKENDS is set, as .ci/run does: then they fail.
"""
import ast, base64, collections, concurrent.futures, glob, http.server, inspect, io, itertools, json, math, os, re, resource, signal
import subprocess, sys, tarfile, textwrap, threading, time, zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

import dppo, eval as evaluation, gen, rollout, sandbox, sft
from builtin import families, tiny
from builtin.engine import TorchEngine
from builtin.families import FAMILIES
from rollout import MARKER, SUBMIT, SYSTEM, TOOL, Call, Chat, Sampling, Turn, parse_calls, run_episode
from sandbox import (AgentFault, Grade, InfraError, JsonlWriter, Result, Sandbox, SandboxKilled, TaskError,
                     VerifierFailed, check_task, docker_hosts, load_tasks,
                     parse_reward, prepare, read_jsonl, resolve_backend)

ROOT = str(Path(__file__).resolve().parent)
torch.set_num_threads(1)


# ================================================================================================ sandbox.py

DOCKERFILE = "FROM tmax-base:core\nWORKDIR /app\nCOPY --chown=user:user . /app/\n"


def task_of(tests="echo 0 >/logs/verifier/reward.txt", files=None, id="t", dockerfile=DOCKERFILE, **more):
    files = {"notes.txt": "hello\n"} if files is None else files
    return {"id": id, "instruction": "", "dockerfile": dockerfile, "files": {p: {"text": t} for p, t in files.items()},
            "tests": {"test.sh": {"text": tests}}, **more}


def need(backend):
    """Skips where the backend is missing, unless it is required (CI)."""
    try:
        return resolve_backend(backend)
    except InfraError as e:
        if os.environ.get("REQUIRE_BACKENDS"):
            raise
        pytest.skip(str(e))


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
    assert "TMAX_SECRET" not in env and env["PATH"] == sandbox.PATH and env["HOME"] == "/home/user"
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
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever started us may ignore it
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
        found += sandbox.docker_api(sandbox.docker_hosts()[0]).containers(all=True, filters={"label": "tmax-run=" + label.decode()})
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
    label = sandbox.label_of(parent.pid).encode()
    assert left_over(backend, label)
    parent.send_signal(number)
    parent.wait(30)
    parent.stdout.close()
    if number == signal.SIGKILL:                     # the next start clears up; a living run is left alone
        with Sandbox(task_of(), backend):
            subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {ROOT!r}); import sandbox; "
                            f"sandbox.Sandbox({task_of()!r}, {backend!r}).start().close()"], check=True)
            assert left_over(backend, sandbox.run_label().encode())
    assert not left_over(backend, label)


def test_close_leaves_nothing_and_frees_descriptors(backend):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))
    with Sandbox(task_of(), backend) as s:
        s.run("true")
        s.grade()
    before = descriptors()
    for _ in range(3):
        with Sandbox(task_of(), backend) as s:
            s.run("sleep 100 &")
            s.grade()
        s.close()
        with pytest.raises(InfraError):
            s.run("echo")
    assert descriptors() <= before + 1
    assert not [b for b in sandbox.live if b.task["id"] == "t" and b.__class__.__name__.lower() == backend and b in sandbox.live and not b]


@pytest.mark.parametrize("command", ["kill 1", "kill -TERM 1; sleep 5"])
def test_agent_ends_its_init(backend, command):
    with Sandbox(task_of(), backend) as s:
        with pytest.raises(SandboxKilled) as e:
            s.run(command)
            s.run("echo")
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
                os.kill(sandbox.only_child(s.box.process.pid), signal.SIGKILL)
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
    label = sandbox.run_label().encode()
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
    monkeypatch.setattr(sandbox, "DISK_MB", 16)
    with Sandbox(task_of(), "bwrap") as s:
        for folder in ("/app", "/tmp", "/home/user", "/dev/shm"):
            got = s.run(f"head -c 30000000 /dev/zero >{folder}/x; stat -c %s {folder}/x; rm {folder}/x")
            assert "space" in got.output and re.search("^167[67]....$", got.output, re.M)


def test_disk_limit_of_docker_is_polled(monkeypatch):
    need("docker")
    monkeypatch.setattr(sandbox, "DISK_MB", 16)
    monkeypatch.setattr(sandbox, "WATCH_S", .02)
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
    (tmp_path / "sandbox.py").write_text(open(os.path.join(ROOT, "sandbox.py")).read())
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
    limits = {"verifier_s": 2}
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
    except OSError:
        if os.environ.get("REQUIRE_BACKENDS"):
            raise
        pytest.skip("no podman")
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


def test_no_backend_says_what_to_do(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    monkeypatch.setattr(sandbox, "as_nobody", lambda uid: ["/nowhere/bwrap"])
    monkeypatch.setattr(sandbox, "made", {})
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
import sandbox
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
w = sandbox.JsonlWriter({str(tmp_path / "r.jsonl")!r})
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


def test_builtin_demonstrator_errs_three_times_in_five(corpora):
    def share(demos):
        return sum(demo["right"] for demo in demos) / len(demos)
    first, every = [task["demos"][0] for task in corpora["train"]], collections.defaultdict(list)
    for task in corpora["train"]:
        every[task["id"].rsplit("-", 3)[0]] += task["demos"]
        assert len(task["demos"]) == 8
    assert abs(share(first) - .4) < .03 and abs(share(sum(every.values(), [])) - .4) < .01
    assert all(abs(share(demos) - .4) < .05 for demos in every.values())
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
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
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
{%- if not messages[1:] | selectattr('role', 'equalto', 'user') | list %}{{- raise_exception('no user') }}{%- endif %}
{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
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
def test_token_logprobs_are_a_full_softmaxs(tied, temperature):
    """Values, entropies and gradients, with chunks smaller than the batch."""
    model = small_model(50, tie_word_embeddings=tied).double()
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


def test_rows_do_not_see_each_others_padding():
    model = small_model(50)
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
    box, = [box for box in sandbox.live if box.task["id"] == task_id]
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
for name, dtype, budget in tests.rank_cases(world):
    policy = dppo.shard(tests.to(dtype, tests.small_model(60, spread=0.1)))
    samples = tests.rank_samples(name, 60)
    shares = dppo.micro_batches(samples, budget, world)
    dppo.backward(policy, shares[rank], tests.loss_of(samples))
    norm = dppo.clip_gradients(policy, 1e9)
    found[name, dtype, budget] = tests.gradient(policy), norm, [len(share) for share in shares]
    weights = dppo.full_weights(policy)
    assert set(weights) == set(policy.model.state_dict()) and not any(hasattr(w, "full_tensor") for w in weights.values())
if rank == 0:
    torch.save(found, {out!r})
torch.distributed.destroy_process_group()
"""


def rank_cases(ranks):
    """(samples, dtype, budget): a micro-batch a sample, and, where every rank but one runs a dummy, all in one."""
    if ranks == 3:
        return list(itertools.product(["2 and 200", "one sample"], [torch.float32, torch.float64], [1]))
    return list(itertools.product(LENGTHS, [torch.float32, torch.float64], [1, 1000]))


def torchrun(ranks, *command, timeout=120):
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                           str(ranks), *map(str, command)],
                          capture_output=True, text=True, timeout=timeout,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})


def one_process_gradient(name, dtype, budget):
    policy = dppo.Policy(to(dtype, small_model(60, spread=0.1)))
    samples = rank_samples(name, 60)
    dppo.backward(policy, dppo.micro_batches(samples, budget)[0], loss_of(samples))
    return gradient(policy)


def far(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 5e-6)])
def test_the_gradient_does_not_depend_on_micro_batches(name, dtype, tolerance):
    """CASES 27: all samples in one micro-batch, each in its own; and the whole written out in plain torch."""
    together, apart = one_process_gradient(name, dtype, 100_000), one_process_gradient(name, dtype, 1)
    assert together.norm() > 1e-3 and far(apart, together) < tolerance

    model, samples = to(torch.float64, small_model(60, spread=0.1)), rank_samples(name, 60)
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
    for (name, dtype, budget), (gradients, norm, counts) in found.items():
        assert len(set(counts)) == 1
        error = far(gradients, one_process_gradient(name, dtype, 100_000))
        assert error < (1e-10 if dtype == torch.float64 else 5e-6), f"{name}, {dtype}, {budget} tokens: {error}"
        assert norm == pytest.approx(gradients.norm().item(), rel=1e-4)
    if ranks == 2:
        assert found["5 and 1", torch.float32, 1][2] == [5,
                                                         5]  # the rank of the one long sample ran four dummies


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
    assert 4 < dropped <= 2 * 2 + 1 + 2 and "\n" not in str(e.value)
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
    assert chat.tool_format == "hermes" and rollout.end_ids(model, chat) == [chat.end_id]
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
    assert 0 < max(changed) < 1e-3 and rollout.end_ids(model, Chat(str(tmp_path / "last")))


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
    assert code == 0 and "50.00%" in said and "1 attempts have no reward" in said
    assert re.search(r"cut-column +100.00%", said) and re.search(r"sort-unique +0.00%", said)


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
    assert not set(evaluation.TOKEN_FIELDS) & set(rows[0]) and rows[0]["messages"] and "4 tasks, 12 attempts" in said
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
    assert len(endpoint.requests) == 1 + 2 + 3 and "1 attempts have no reward" in said


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
    api, missing = sandbox.docker_api(docker_hosts()[0]), []
    for name in ("fixtures", "data_processing"):
        if not api.images(f"tmax-base:{name}"):
            missing.append(f"--domain {name}")
    if missing and not os.environ.get("REQUIRE_BACKENDS"):
        pytest.skip(f"first: python gen.py bases {' '.join(missing)}")
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
print(got.out.decode(errors="replace").strip() or "nothing")
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
    task = verifier_task("fuzz_equivalence", FUZZ | {"command": "bash evil.sh", "timeout_s": 1}, FUZZ_FILES, {"evil.sh": ATTACKS[attack]})
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
            assert not any("sleep 60" in line or "reward" in line for line in processes(s))


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
        assert "verifier.json: there is no test file 'none'" in s._verify()[2]


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
TONES = [{"hz": hz, "ms": ms} for hz, ms in [(440, 150), (0, 60), (440, 150), (1320, 90), (0, 100), (697.5, 200)]]
EVENTS = [{"frame": f, "frames": n, "color": "#c03020", "box": [40, 40, 60, 60]} for f, n in [(3, 2), (17, 1), (18 + 2, 5), (58, 2)]]
FIXTURES = {                            # the declarations, and what of them nobody may find in the image
    "image": ({"path": "/app/receipt.png", "format": "png", "text": "Invoice Kestrel\nTotal: 93.20 EUR\npaid by Magnolia Brandt"},
              ["Kestrel", "93.20 EUR", "Magnolia"]),
    "audio": ({"path": "/app/dial.wav", "format": "wav", "tones": TONES}, ["697.5", '"hz"']),
    "audio-speech": ({"path": "/app/message.mp3", "format": "mp3", "speech": "The meeting is at seven on Monday."}, ["meeting is", "seven on"]),
    "video": ({"path": "/app/gate.mp4", "width": 160, "height": 120, "fps": 10, "frames": 60, "events": EVENTS}, ["#c03020", '"events"']),
    "stripped_binary": ({"path": "/app/legacy", "source": LEGACY, "flags": ["-O1"], "hidden": ["melony"]},
                        ["melony", "mix_of_the_ancients", "rot-thirteen", "strcmp(argv"]),
    "vendored_package": ({"path": "/app/vendor/tally", "files": TALLY,
                          "perturbation": {"file": "tally.c", "find": "return sum / n;", "replace": "return (int)sum / n;"}},
                         ["return sum / n"]),
    "multi_service_compose": ({"path": "/app/shop", "services": [
        {"name": "store", "command": "python3 store.py", "port": 7001, "files": {"store.py": STORE}},
        {"name": "web", "command": "python3 web.py", "port": 8080, "files": {"web.py": WEB, "web.ini": "store=127.0.0.1:7001\n"}}],
        "faults": [{"file": "web/web.ini", "find": "store=127.0.0.1:7001", "replace": "store=127.0.0.1:7010"}]},
        ["store=127.0.0.1:7001", '"faults"']),
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
    "audio-speech": ("ffmpeg -v error -i message.mp3 m.wav; pocketsphinx_continuous -infile m.wav 2>/dev/null", "the meeting is at seven on monday\n"),
    "video": ("""ffmpeg -i gate.mp4 2>&1 | grep -oE '160x120|10 fps|00:00:06.00'
ffmpeg -v error -i gate.mp4 -f rawvideo -pix_fmt gray - | python3 -c '
import numpy, sys
x = numpy.frombuffer(sys.stdin.buffer.read(), "u1").reshape(-1, 120, 160)[:, 45:95, 45:95].mean((1, 2))
print("".join(".#"[int(abs(v - x[0]) > 10)] for v in x))'""", r"00:00:06.00\n160x120\n10 fps\n" + "".join(
        "#" if any(e["frame"] <= i < e["frame"] + e["frames"] for e in EVENTS) else r"\." for i in range(60)) + "\n"),
    "stripped_binary": ("./legacy abc; ./legacy melony; objdump -d legacy | grep -c imul.*0x1f; nm legacy 2>&1; strings legacy | grep -c melon; file legacy",
                        r"(\d+)\nopen\n[01]\nnm: legacy: no symbols\n0\n.*stripped\n"),
    "vendored_package": ("cd vendor/tally; make 2>&1 | tail -1; sed -i 's/(int)//' tally.c; make 2>&1 | tail -1; ls -l check | cut -c1-10",
                         r"make: \*\*\* .*Error 1\n./check\n|.*1\.50\n.*"),
    "multi_service_compose": ("""cd shop; ./start.sh; echo $?; curl -s -w ' %{http_code}\\n' localhost:8080
sed -i s/7010/7001/ web/web.ini; ./start.sh >/dev/null; curl -s -w ' %{http_code}\\n' localhost:8080
./start.sh >/dev/null; echo $?; ps ax | grep -c '[p]ython3 \\(web\\|store\\).py'""",
                              r"store listens on port 7001\nweb listens on port 8080\n0\n.*refused> 502\nforty-two 200\n0\n4\n"),
}

def fixture_files(name, declared=None):
    return {f"fixture/{name}/make.py": Path(ROOT, "fixtures", name.split("-")[0] + ".py").read_text(),
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
        f.writelines(sandbox.docker_api(docker_hosts()[0]).get_image(tag))
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


def test_no_layer_of_the_image_holds_the_truth(fixture_task, tmp_path):
    needles = [text.encode() for _, texts in FIXTURES.values() for text in texts]
    tag = sandbox.docker_image(fixture_task, docker_hosts()[0])[0]
    assert find_in_image(tag, needles, tmp_path / "image.tar") == []


def test_the_search_finds_what_is_there(domain, tmp_path):
    """Deleted again in a later layer, packed twice, named by a file, in the settings, in the history."""
    dockerfile = ("FROM tmax-base:core\nCOPY truth-a /app/\nRUN rm /app/truth-a && echo truth-c | gzip | gzip >/app/x && python3 -m zipfile -c /app/y /etc/passwd "
                  "&& ln -s truth-f /app/z\nENV X=truth-d\nRUN : truth-e\n")
    task = task_of(files={"truth-a": "truth-b"}, dockerfile=dockerfile)
    needles = [b"truth-" + bytes([letter]) for letter in b"abcdef"] + [b"/home/user:/bin"]
    found = find_in_image(sandbox.docker_image(task, docker_hosts()[0])[0], needles, tmp_path / "image.tar")
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
        assert "2" in s.run("cd /tmp/a/app; file b.jpg b.mp3 b.mp4 b | grep -cE 'JPEG|MPEG|ISO Media'").output and s.run("/tmp/a/app/b").exit_code == 3


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

DOMAINS = ["security", "software_engineering", "file_operations", "data_querying", "data_science", "debugging",
           "scientific_computing", "data_processing", "system_administration"]


def test_every_domain_has_a_stage_that_stands_alone():
    stages = gen.base_stages()
    assert [name for name in stages if name not in ("core", "fixtures", "tools", "media")] == DOMAINS
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
    sizes = {tag: image["Size"] for image in sandbox.docker_api(docker_hosts()[0]).images("tmax-base")
             for tag in image["RepoTags"] or [] if tag.split(":")[1] in DOMAINS}
    assert all(size < 1.5e9 for size in sizes.values()), sizes


# ================================================================================================ sandbox.py under attack

def test_a_loop_word_outside_of_a_loop_ends_the_command_alone(shared):
    for command in ("break", "continue", "if true; then break; fi", "echo a; continue 1"):
        assert shared.run(command).exit_code == 0
        assert shared.run("echo ok") == Result("ok\n", 0, False), command


@pytest.mark.parametrize("command", ["for fd in {3..255}; do eval \"exec $fd>&-\"; done", "exec 10<&-", "exec 11>&- 12>&- 13>&- 14>&-",
                                     "ulimit -n 4; true", "break 9", "continue 9", "exec 198>&- 199>&-"])
def test_a_shell_that_loses_its_descriptors_or_its_loop_comes_back(box, command):
    box.run("cd /tmp; export A=1")
    box.run(command, timeout=4)
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


@pytest.mark.parametrize("numbers", ["inf 1 1 1 1 1/1 1", "nan 1 1 1 1 1/1 1", "1 1 1 1 1 1/1 " + "9" * 5000, "1e999 1 1 1 1 1/1 1", "1 1 1 1 1 1/1 inf"])
def test_a_forged_end_of_a_command_hurts_the_agent_alone(box, numbers):
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
FILLER = "python3 -c 'import os,time,signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True:\n try:\n  os.fork() or time.sleep(999)\n except OSError: time.sleep(.001)' & sleep 3"


@pytest.mark.parametrize("command", ["exit 3", "while :; do :; done"])
def test_a_full_process_table_is_the_agents_fault(backend, command):
    with Sandbox(task_of(limits={"verifier_s": 30}), backend) as s:
        with pytest.raises(AgentFault):
            s.run(FILLER, timeout=20)
            s.run(command, timeout=2)
            s.run("echo", timeout=2)
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


def test_the_last_output_of_a_shell_that_ends_is_not_lost(box):
    """Also where we come late and read it together with the news of its end."""
    pump = box.channel.pump
    box.channel.pump = lambda seconds: (time.sleep(.2), pump(seconds))[1]
    assert box.run("echo a; exit 3") == Result("a\n" + sandbox.RESTARTED, 3, False)
    assert box.run("exec ls").output == "notes.txt\n" + sandbox.RESTARTED
