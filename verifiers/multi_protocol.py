"""multi_protocol: services of the agent's answer requests on this machine's loopback. The share of checks
that pass.

verifier.json declares
    checks       at least one, tried in this order; each has a protocol, a port, and its protocol's fields:
      http       path ("/"); optional method ("GET"), headers {name: value}, body, status (200), expect
      tcp        send (a text, may be ""); expect
      smtp       from, to, body; optional accept (true: the mail must be taken; false: it must be refused),
                 mailbox: a file of the agent's in which the body must stand within two seconds
      grpc       method ("/package.Service/Method", unary), request and expect: {field number: text, whole
                 number or another such object}; the answer must hold expect's fields
    start        a program of the agent's that starts its services, run before the checks (optional: without
                 it only what the agent has left running answers)
    wait_s       how long a port may take until it is open (optional, 10), and start until it has ended, where
                 something answers already, which it may be about to replace
    timeout_s    for one check (optional, 5)

expect is a text that the answer must contain. {nonce} anywhere in a check stands for a word that is new each
time, so that no canned answer passes. Services see neither /tests nor the reward. grpc needs python3-grpcio,
which all base images but core have.

    {"start": "bash /app/start.sh",
     "checks": [{"protocol": "http", "port": 8080, "path": "/echo?q={nonce}", "expect": "{nonce}"},
                {"protocol": "tcp", "port": 7000, "send": "PING {nonce}\\n", "expect": "PONG {nonce}"},
                {"protocol": "smtp", "port": 2525, "from": "a@x.org", "to": "b@x.org", "body": "hi {nonce}",
                 "mailbox": "/app/mail/b"},
                {"protocol": "grpc", "port": 50051, "method": "/demo.Greeter/Hello",
                 "request": {"1": "Ada {nonce}"}, "expect": {"1": "Hello Ada {nonce}"}}]}
"""
import http.client
import importlib.util
import json
import os
import secrets
import smtplib
import socket
import sys
import threading
import time

from harness import (OUTPUT, declaration, end_descendants, is_command, is_count, is_text, read, refuse, start,
                     write_reward)


# --------------------------------------------------------------------------------------- one check a protocol
# Each gets its check and returns None, or says what is wrong. What it raises is wrong too.

def check_http(check, timeout):
    connection = http.client.HTTPConnection("127.0.0.1", check["port"], timeout=timeout)
    body = check.get("body")
    connection.request(check.get("method", "GET"), check["path"], headers=check.get("headers", {}),
                       body=body if body is None else body.encode())
    answer = connection.getresponse()
    wanted = check.get("status", 200)
    if answer.status != wanted:
        return f"status {answer.status} instead of {wanted}"
    return lacks(answer.read(OUTPUT), check.get("expect", ""))


def check_tcp(check, timeout):
    got = b""
    with socket.create_connection(("127.0.0.1", check["port"]), timeout) as connection:
        connection.sendall(check["send"].encode())
        while lacks(got, check["expect"]) and len(got) < OUTPUT:
            data = connection.recv(65536)
            if not data:
                break
            got += data
    return lacks(got, check["expect"])


def check_smtp(check, timeout):
    mail = f"From: {check['from']}\r\nTo: {check['to']}\r\nSubject: check\r\n\r\n{check['body']}\r\n"
    try:
        with smtplib.SMTP("127.0.0.1", check["port"], "localhost", timeout=timeout) as server:
            server.sendmail(check["from"], [check["to"]], mail.encode())
    except (smtplib.SMTPRecipientsRefused, smtplib.SMTPSenderRefused, smtplib.SMTPDataError) as e:
        return f"refused: {e}" if check.get("accept", True) else None
    if not check.get("accept", True):
        return "taken, and should have been refused"
    for _ in range(20 if "mailbox" in check else 0):
        box = read(check["mailbox"])
        if box is not None and check["body"].encode() in box:
            return None
        time.sleep(0.1)
    return "the mail was taken, but is not in the mailbox" if "mailbox" in check else None


def check_grpc(check, timeout):
    import grpc
    with grpc.insecure_channel(f"127.0.0.1:{check['port']}") as channel:
        call = channel.unary_unary(check["method"], request_serializer=bytes, response_deserializer=bytes)
        got = decode(call(encode(check["request"]), timeout=timeout))
    missing = {field for field, value in check["expect"].items() if not holds(got.get(int(field)), value)}
    return f"the answer's field {', '.join(sorted(missing))} is not as expected" if missing else None


def lacks(got, expected):
    if expected.encode() in got:
        return None
    return f"the answer does not contain {expected!r}: {got[:200]!r}"


# Protobuf's wire format, as far as texts, whole numbers and messages go: a tag (field * 8 + kind), then the
# value.

def varint(number):
    number &= (1 << 64) - 1
    return bytes([number & 127 | 128]) + varint(number >> 7) if number > 127 else bytes([number])


def encode(message):
    data = b""
    for field, value in message.items():
        if isinstance(value, int):
            data += varint(int(field) * 8) + varint(value)
        else:
            value = encode(value) if isinstance(value, dict) else value.encode()
            data += varint(int(field) * 8 + 2) + varint(len(value)) + value
    return data


def decode(data):
    """{field: number or bytes}; of a repeated field the last one. What is not protobuf raises."""
    fields, at = {}, 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            value |= (data[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if data[at - 1] < 128:
                return value

    while at < len(data):
        tag = number()
        if tag & 7 == 0:
            fields[tag >> 3] = number()
        else:
            size = {1: 8, 5: 4}.get(tag & 7) or number()
            fields[tag >> 3], at = data[at:at + size], at + size
    return fields


def holds(got, wanted):
    """Whether a decoded field is the declared value. Protobuf does not send zeros and empty texts."""
    if isinstance(wanted, dict):
        inner = decode(got or b"")
        return all(holds(inner.get(int(field)), value) for field, value in wanted.items())
    if isinstance(wanted, int):
        return (got or 0) == wanted & ((1 << 64) - 1)
    return (got or b"") == wanted.encode()


# ------------------------------------------------------------------------------------------------------------

def is_string(value):
    return isinstance(value, str)


def is_message(value):
    return isinstance(value, dict) and all(
        field.isdigit() and (type(item) is int or is_string(item) or is_message(item))
        for field, item in value.items())


def is_headers(value):
    return isinstance(value, dict) and all(map(is_string, value.values()))


def is_bool(value):
    return isinstance(value, bool)


PROTOCOLS = {                           # its check, the fields it needs, those it may have
    "http": (check_http, {"path": is_text},
             {"method": is_text, "headers": is_headers, "body": is_string, "status": is_count,
              "expect": is_string}),
    "tcp": (check_tcp, {"send": is_string, "expect": is_text}, {}),
    "smtp": (check_smtp, {"from": is_text, "to": is_text, "body": is_text},
             {"accept": is_bool, "mailbox": is_text}),
    "grpc": (check_grpc, {"method": is_text, "request": is_message, "expect": is_message}, {}),
}


def examine(i, check):
    """Refuses a declaration that no service could satisfy."""
    where = f"checks[{i}]"
    if not isinstance(check, dict) or check.get("protocol") not in PROTOCOLS:
        refuse(f"{where}: protocol must be one of {', '.join(PROTOCOLS)}")
    _, needs, may = PROTOCOLS[check["protocol"]]
    needs = {"protocol": is_text, "port": lambda port: type(port) is int and 0 < port < 65536, **needs}
    for field in [*needs, *check]:
        if field not in check:
            refuse(f"{where}: {check['protocol']} needs the field {field!r}")
        if field not in needs and field not in may:
            refuse(f"{where}: {check['protocol']} knows no field {field!r}")
        if not (needs | may)[field](check[field]):
            refuse(f"{where}: the field {field!r} cannot be {json.dumps(check[field])[:80]}")
    if check["protocol"] == "grpc" and importlib.util.find_spec("grpc") is None:
        refuse(f"{where}: grpc needs python3-grpcio in the image")


def opens(port, deadline):
    """Whether the port is open, or becomes so before the deadline."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
        time.sleep(0.1)


def attempt(check, timeout):
    """What is wrong with the answer, or None. A service that drips or hangs loses at the deadline: the thread
    that waits for it is left behind."""
    said = [f"no answer within {timeout} s"]

    def ask():
        try:
            said[0] = PROTOCOLS[check["protocol"]][0](check, timeout)
        except Exception as e:          # whatever a service may send must not end the verifier
            said[0] = f"{type(e).__name__}: {str(e)[:200]}"

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout + 3)
    return said[0]


def main():
    declared = declaration(
        {"checks": lambda value: isinstance(value, list) and value != []},
        {"start": (is_command, None), "wait_s": (is_count, 10), "timeout_s": (is_count, 5)})
    checks = declared["checks"]
    for i, check in enumerate(checks):
        examine(i, check)
    ports = {check["port"] for check in checks}
    if declared["start"]:
        answered = any([opens(port, 0) for port in ports])
        wait = start(declared["start"])
        if answered:
            wait(declared["wait_s"])
    deadline = time.monotonic() + declared["wait_s"]
    for port in ports:
        opens(port, deadline)
    passed = 0
    for i, check in enumerate(checks):
        check = json.loads(json.dumps(check).replace("{nonce}", secrets.token_hex(8)))
        wrong = attempt(check, declared["timeout_s"])
        passed += wrong is None
        print(f"checks[{i}] {check['protocol']} {check['port']}: {wrong or 'passed'}")
    print(f"{passed} of {len(checks)} checks passed")
    write_reward(passed / len(checks), passed == len(checks))
    end_descendants()
    sys.stdout.flush()
    os._exit(0)                         # past the threads that still wait


if __name__ == "__main__":
    main()
