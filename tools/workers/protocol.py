"""What environment workers share: JSON lines over stdio (README.md beside this file). A worker's own file is put behind this one
and ends with `serve(Worker)`: a class whose methods `op_reset`, `op_step`, ... take a request and return a reply."""

import json
import os
import sys
import threading
import time


class Failure(Exception):
    """An operation that cannot be done: reported by its kind, never scored."""

    def __init__(self, kind, message):
        super().__init__(message)
        self.kind = kind


def answer(worker, line):
    """The reply to one request line."""
    rid = None
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            raise Failure("bad_request", "a request is a JSON object")
        rid = request.get("rid")
        operation = getattr(worker, f"op_{request.get('op')}", None)
        if operation is None:
            raise Failure("unknown_op", f"no operation {request.get('op')!r}")
        return {"rid": rid, **operation(request)}
    except Failure as e:
        return {"rid": rid, "error": {"kind": e.kind, "message": str(e)}}
    except Exception as e:  # reported, never scored
        return {"rid": rid, "error": {"kind": "internal", "message": f"{type(e).__name__}: {e}"}}


def wire_calls(request):
    """The calls of a step as (name, arguments). Arguments that are no object stay as they are: an error result."""
    calls = request.get("calls")
    if not isinstance(calls, list):
        raise Failure("bad_request", "step needs a list of calls")
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise Failure("bad_request", "a call needs a name and arguments")
    return [(call["name"], call.get("arguments", {})) for call in calls]


def die_with_parent(parent, leave):
    """The pipe closes when the parent dies, but a busy worker would not look at it."""
    while os.getppid() == parent:
        time.sleep(1)
    leave()
    os._exit(3)


def serve(make, leave=lambda: None):
    """Answers requests until stdin ends; then, or when the parent is gone, calls `leave`."""
    # The protocol keeps a private copy of stdout; prints from anywhere go to stderr.
    protocol = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    threading.Thread(target=die_with_parent, args=(os.getppid(), leave), daemon=True).start()
    try:
        worker = make(sys.argv[1:])
        for line in sys.stdin.buffer:
            reply = json.dumps(answer(worker, line), ensure_ascii=False)
            # Lone surrogates have no UTF-8 form.
            protocol.write(reply.encode("utf-8", "replace") + b"\n")
            protocol.flush()
    finally:
        leave()
