"""BFCL multi-turn (V3 or V4) as an environment worker: JSON lines over stdio.

One request per line on stdin, one reply per line on stdout, `rid` echoed. Operations: describe, list,
reset, step, end_turn, evaluate, state_digest, close. A failure is `{"rid":..,"error":{"kind","message"}}`,
never a made-up score.

What the official package does and what this file does instead:

* Official execution `eval`s the model's text. Here a call is a name and keyword arguments; only bound
  public methods that the agent has been shown are called. Result strings are made by the same rules.
* Official instances live in module globals under (model name, id, class) and leak between evaluations.
  Here each evaluation and each episode owns a dictionary of instances that dies with it.
* `mpmath` and `decimal` precision are process globals. They are reset before every call, and a call that
  asks for absurd precision or a gigantic power is refused instead of hanging.
* The checker itself (`multi_turn_checker`: state, results, turn rules) is the official one, unchanged; only
  its executor is swapped for the one above. `--self-test` compares both executors over the whole set.

* The official runner lets a model call a tool that is still withheld from it. Here it is refused, with one
  exception: in a turn whose official answer itself calls such a tool (entry miss_func_49, `tail` in turn 1), it
  may be called, though it is not shown.
* V4 entries name an `excluded_function`; the official V4 code reads it nowhere, so neither does this file.

Beside the official score, `evaluate` gives stricter `figures` that the checker does not enforce: `abstained` (no
call in turns whose answer has none; null where every turn has one), `no_duplicates` (no call made more often in
a turn than the answer makes it, once at least), `no_junk` (no call with an error result, but those the answer
gets too), `strict` (passed, and all of these).

Options: `--version-set v3|v4` (default v3: package nvidia-bfcl; v4: bfcl-eval); `--partial` scores by turns
passed instead of 0/1; `--docs full` keeps the long official tool descriptions (default `short`: the part after
"Tool description:"). `--self-test` compares executors and prints what the checker lets pass.
"""

import ast
import collections
import copy
import decimal
import hashlib
import importlib
import inspect
import json
import os
import signal
import sys
import tempfile
import threading
import time
import uuid

# Before the package is imported: it makes folders under its project root, and its data folder can be
# redirected from outside. Trading timestamps go through local time.
os.environ.setdefault("BFCL_PROJECT_ROOT", os.path.join(tempfile.gettempdir(), "bfcl-root"))
os.environ.pop("BFCL_DATA_DIR", None)
os.environ["TZ"] = "UTC"
time.tzset()

WORKER_VERSION = 2
PACKAGES = {"v3": "bfcl", "v4": "bfcl_eval"}
CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
STEPS_PER_TURN = 21  # the official runner executes the 21st step of a turn and then gives up
PLAYGROUND_STEPS = 1_000
CALL_CPU_SECONDS = 2.0
MEMORY_BYTES = 2 << 30
MAX_PRECISION = 1_000
MAX_EXPONENT = 10_000
MAX_CALLS_PER_STEP = 64
MORE_TOOLS = "I have updated some more functions you can choose from. What about now?"
DOC_FILES = {
    "GorillaFileSystem": "gorilla_file_system.json",
    "MathAPI": "math_api.json",
    "MessageAPI": "message_api.json",
    "TwitterAPI": "posting_api.json",
    "TicketAPI": "ticket_api.json",
    "TradingBot": "trading_bot.json",
    "TravelAPI": "travel_booking.json",
    "VehicleControlAPI": "vehicle_control.json",
}


class Failure(Exception):
    """An error reply."""

    def __init__(self, kind, message):
        super().__init__(message)
        self.kind = kind


class CallTooLong(Exception):
    """Raised by the CPU-time alarm inside a call."""


# ---------------------------------------------------------------------------------------------- data


class Data:
    """The package's entries, answers, tool documents and classes, loaded once."""

    def __init__(self, version, short_docs):
        package = importlib.import_module(PACKAGES[version])
        evaluation = f"{PACKAGES[version]}.eval_checker.multi_turn_eval"
        self.version = version
        self.checker = importlib.import_module(f"{evaluation}.multi_turn_checker")
        self.utils = importlib.import_module(f"{evaluation}.multi_turn_utils")
        self.folder = os.path.join(os.path.dirname(package.__file__), "data")
        self.short_docs = short_docs
        self.classes = {}
        self.signatures = {}
        for name in DOC_FILES:
            module = importlib.import_module(self.utils.CLASS_FILE_PATH_MAPPING[name])
            self.classes[name] = getattr(module, name)
        self.docs = {name: self._docs(name) for name in self.classes}
        self.class_of = {d["name"]: c for c, docs in self.docs.items() for d in docs}
        for tool, name in self.class_of.items():
            self.signatures[tool] = inspect.signature(getattr(self.classes[name], tool))
        self._entries = {}

    def _lines(self, *path):
        with open(os.path.join(self.folder, *path), encoding="utf-8") as f:
            return [json.loads(line) for line in f if line.strip()]

    def _file(self, category):
        return f"BFCL_{self.version}_multi_turn_{category}.json"

    def _docs(self, name):
        out = []
        for doc in self._lines("multi_turn_func_doc", DOC_FILES[name]):
            text = doc["description"]
            if self.short_docs:
                text = text.split("Tool description:")[-1]
            parameters = json_schema(doc["parameters"])
            parameters.setdefault("properties", {})
            parameters.setdefault("required", [])
            out.append({"name": doc["name"], "description": text.strip(), "parameters": parameters})
        return out

    def category(self, category):
        """Entries of one category by id, each with its parsed answer under `truth`."""
        if category not in CATEGORIES:
            raise Failure("unknown_split", f"{category}; known: {', '.join(CATEGORIES)}")
        if category not in self._entries:
            name = self._file(category)
            answers = {a["id"]: a["ground_truth"] for a in self._lines("possible_answer", name)}
            entries = {}
            for entry in self._lines(name):
                entry["truth"] = [[self.parse(c) for c in turn] for turn in answers[entry["id"]]]
                entries[entry["id"]] = entry
            self._entries[category] = entries
        return self._entries[category]

    def entry(self, entry_id):
        """The category comes from the id, as in the official checker."""
        category = entry_id.rsplit("_", 1)[0].removeprefix("multi_turn_")
        if category in CATEGORIES and entry_id in self.category(category):
            return self.category(category)[entry_id]
        raise Failure("unknown_task", f"no BFCL multi-turn entry has the id {entry_id!r}")

    def parse(self, text):
        """An answer's call text to (name, keyword arguments), positional ones bound to their names."""
        node = ast.parse(text.strip(), mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise Failure("internal", f"not a plain call: {text}")
        args = [ast.literal_eval(a) for a in node.args]
        kwargs = {k.arg: ast.literal_eval(k.value) for k in node.keywords}
        # The signature is the unbound method's: a placeholder stands for self.
        bound = self.signatures[node.func.id].bind(None, *args, **kwargs)
        arguments = dict(bound.arguments)
        arguments.pop("self", None)
        return node.func.id, arguments

    def digest(self):
        """Of the data files and of the rules' source."""
        h = hashlib.sha256()
        paths = [inspect.getsourcefile(c) for c in self.classes.values()]
        paths += [self.checker.__file__, self.utils.__file__]
        for category in CATEGORIES:
            name = self._file(category)
            paths += [os.path.join(self.folder, name), os.path.join(self.folder, "possible_answer", name)]
        paths += [os.path.join(self.folder, "multi_turn_func_doc", f) for f in DOC_FILES.values()]
        for path in sorted(paths, key=os.path.basename):
            with open(path, "rb") as f:
                h.update(hashlib.sha256(f.read()).digest())
        return h.hexdigest()


TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string", "bool": "boolean"}


def json_schema(node):
    """BFCL's Python-flavoured schema ("dict", "float", default "None") as JSON schema."""
    if isinstance(node, list):
        return [json_schema(n) for n in node]
    if not isinstance(node, dict):
        return node
    out = {}
    for key, value in node.items():
        if key == "type" and isinstance(value, str):
            out[key] = TYPES.get(value, value)
        elif key == "properties" and isinstance(value, dict):
            # A parameter may itself be called `type`: its value is a schema, not a type name.
            out[key] = {k: json_schema(v) for k, v in value.items()}
        elif key == "default" and value == "None":
            continue
        else:
            out[key] = json_schema(value)
    return out


# ---------------------------------------------------------------------------------------- execution


def check_bounds(name, arguments):
    """Refuses what would hang the process. Deterministic, unlike the CPU alarm behind it."""
    precision = arguments.get("precision")
    if name in ("logarithm", "square_root") and isinstance(precision, (int, float)) and abs(precision) > MAX_PRECISION:
        raise ValueError(f"precision must be at most {MAX_PRECISION}")
    if name == "power":
        exponent = arguments.get("exponent")
        if isinstance(exponent, (int, float)) and abs(exponent) > MAX_EXPONENT:
            raise ValueError(f"exponent must be at most {MAX_EXPONENT}")


def on_alarm(_signal, _frame):
    raise CallTooLong(f"call stopped after {CALL_CPU_SECONDS} s of CPU time")


class World:
    """Instances of an entry's classes. Never shared, never global."""

    def __init__(self, data, entry):
        self.data = data
        long_context = "long_context" in entry["id"].rsplit("_", 1)[0]
        self.instances = {}
        for name in entry["involved_classes"]:
            instance = data.classes[name]()
            if name not in data.utils.STATELESS_CLASSES:
                config = copy.deepcopy(entry["initial_config"].get(name, {}))
                instance._load_scenario(config, long_context=long_context)
            self.instances[name] = instance

    def call(self, name, arguments, allowed=None):
        """One call's result text, by the official rules, and whether it is an error."""
        instance = self.instances.get(self.data.class_of.get(name))
        if instance is None or (allowed is not None and name not in allowed):
            # What evaluating an undefined name says.
            return f"Error during execution: name '{name}' is not defined", True
        if not isinstance(arguments, dict):
            return "Error during execution: the arguments are not a JSON object", True
        import mpmath

        mpmath.mp.dps = 15
        decimal.getcontext().prec = 28
        error = False
        signal.setitimer(signal.ITIMER_VIRTUAL, CALL_CPU_SECONDS)
        try:
            check_bounds(name, arguments)
            # A copy: instances keep references to mutable arguments.
            result = getattr(instance, name)(**copy.deepcopy(arguments))
            if isinstance(result, dict):
                error = "error" in result
                try:
                    result = json.dumps(result)
                except Exception:  # the official rule: whatever json cannot say
                    result = str(result)
            elif not isinstance(result, str):
                result = str(result)
        except (Exception, CallTooLong) as e:
            result, error = f"Error during execution: {e}", True
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return result, error


def canonical(value, above=()):
    """A value as nested lists such that Python-equal states have equal forms (1 == 1.0 == True, dictionaries
    without order), for digests. A folder copied into itself is a cycle: `above` are the objects on the way."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (bool, int)):
        return ["n", str(int(value))]
    if isinstance(value, float):
        return ["n", str(int(value)) if value == value and abs(value) < 1e300 and value == int(value) else repr(value)]
    if id(value) in above or len(above) > 200:
        return ["cycle"]
    above = (*above, id(value))
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [canonical(v, above) for v in value]]
    if isinstance(value, (set, frozenset)):
        return ["set", sorted((canonical(v, above) for v in value), key=json.dumps)]
    if isinstance(value, dict):
        items = [[canonical(k, above), canonical(v, above)] for k, v in value.items()]
        return ["dict", sorted(items, key=json.dumps)]
    if hasattr(value, "__dict__"):
        # Files and directories: `parent` points back up and is no part of their equality.
        parts = {k: v for k, v in vars(value).items() if not k.startswith("_") and k != "parent"}
        return ["obj", type(value).__name__, canonical(parts, above)]
    return ["repr", repr(value)]


# ------------------------------------------------------------------------------------------ scoring


def evaluate(data, entry, log, truth, partial, official_executor=False):
    """Runs the official checker on `log` (turns of steps of (name, arguments)) against `truth`."""
    checker = data.checker
    model = f"m{uuid.uuid4().hex}"
    worlds = {}
    truth_turns = 0

    def execute(func_call_list, initial_config, involved_classes, model_name, test_entry_id, long_context=False,
                is_evaL_run=False):
        nonlocal truth_turns
        truth_turns += model_name != model
        if model_name not in worlds:
            worlds[model_name] = World(data, entry)
        world = worlds[model_name]
        results = [world.call(name, arguments)[0] for name, arguments in func_call_list]
        return results, world.instances

    def execute_officially(func_call_list, **rest):
        nonlocal truth_turns
        truth_turns += rest["model_name"] != model
        texts = [f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in func_call_list]
        return data.utils.execute_multi_turn_func_call(texts, **rest)

    reached = min(len(log), len(truth))
    original = checker.execute_multi_turn_func_call
    checker.execute_multi_turn_func_call = execute_officially if official_executor else execute
    try:
        # Turns that the episode never reached cannot be handed to the checker: it compares a prefix.
        verdict = checker.multi_turn_checker(log[:reached], truth[:reached], entry, "", model)
    finally:
        checker.execute_multi_turn_func_call = original
        if official_executor:
            for key in [k for k in vars(data.utils) if k.startswith(model)]:
                del vars(data.utils)[key]
    # The checker stops in the first turn that fails, after running that turn's answer.
    turns_passed = reached if verdict["valid"] else truth_turns - 1
    passed = bool(verdict["valid"]) and len(log) == len(truth)
    # Turns without answer calls are passed by doing nothing, so they earn no partial credit.
    scored = [i for i, turn in enumerate(truth) if turn]
    share = sum(i < turns_passed for i in scored) / len(scored) if scored else float(passed)
    if verdict["valid"] and not passed:
        kind, message = "multi_turn:force_terminated", f"{len(log)} of {len(truth)} turns were played"
    else:
        kind, message = verdict.get("error_type", ""), verdict.get("error_message", "")
    return {
        "score": (share if partial else float(passed)),
        "passed": passed,
        "partial": share,
        "turns_passed": turns_passed,
        "turns": len(truth),
        "error_type": kind,
        "error_message": message,
    }


def strict_figures(data, entry, log, errors, truth, passed):
    """What the official checker does not enforce; see the module's documentation. `errors` are the error texts
    that the episode's calls got."""
    key = lambda call: json.dumps([call[0], call[1]], sort_keys=True, default=str)
    duplicates = 0
    for i, turn in enumerate(log):
        made = collections.Counter(key(call) for step in turn for call in step)
        wanted = collections.Counter(key(call) for call in (truth[i] if i < len(truth) else []))
        duplicates += sum(max(0, n - max(1, wanted[call])) for call, n in made.items())
    junk = collections.Counter(errors)
    if junk:
        # Some answers get errors of their own, e.g. by trying a login twice.
        world = World(data, entry)
        junk -= collections.Counter(
            text for text, error in (world.call(n, a) for turn in truth for n, a in turn) if error)
    empty = [i for i, turn in enumerate(truth) if not turn]
    abstained = all(not (log[i] if i < len(log) else []) for i in empty) if empty else None
    figures = {"abstained": abstained, "no_duplicates": duplicates == 0, "no_junk": not junk}
    return {**figures, "strict": passed and all(v is not False for v in figures.values())}


# ----------------------------------------------------------------------------------------- episodes


class Episode:
    """One live episode."""

    def __init__(self, data, label, task):
        self.label = label
        base = str(task.get("base") or task.get("id") or "")
        self.entry = data.entry(base)
        self.data = data
        own = task.get("turns") or []
        # An official task keeps the environment's own turns whatever the caller sends along. A playground
        # is the bare initial state: no turns, nothing to score.
        playground = task.get("split") == "playground"
        self.official = not playground and (not own or task.get("id") == base)
        if playground:
            own = []
        self.step_limit = PLAYGROUND_STEPS if playground else STEPS_PER_TURN
        self.holdout = {}
        names = [d["name"] for c in self.entry["involved_classes"] for d in data.docs[c]]
        if self.official:
            self.queries = official_queries(self.entry)
            self.truth = self.entry["truth"]
            self.missing = [None] * len(self.truth)
            self.answers = [None] * len(self.truth)
            self.holdout = {int(k): v for k, v in self.entry.get("missed_function", {}).items()}
        else:
            self.queries = [str(t.get("query", "")) for t in own]
            self.truth = [[wire_call(c) for c in t.get("solution") or []] for t in own]
            self.missing = [t.get("missing") for t in own]
            self.answers = [t.get("answer") for t in own]
        only = set(task.get("tools") or [])
        unknown = sorted(only.difference(names))
        if unknown:
            raise Failure("unknown_tool", f"{', '.join(unknown)} is no tool of {base}")
        held = {n for v in self.holdout.values() for n in v}
        # Withheld tools that the official answer calls too early, per turn.
        self.early = {t: {n for n, _ in turn if n in held} for t, turn in enumerate(self.truth)}
        self.allowed = {n for n in names if n not in held and (not only or n in only)}
        self.world = World(data, self.entry)
        self.log = [[]]
        self.turn = 0
        self.steps = 0
        self.asked = False
        self.said = [""]
        self.effects = []
        self.errors = []
        self.done = False

    def tools(self, names):
        """Documents of the given tools in the official order."""
        return [d for c in self.entry["involved_classes"] for d in self.data.docs[c] if d["name"] in names]

    def opening(self):
        turns = max(1, len(self.queries))
        return {
            "messages": [{"role": "user", "content": q} for q in self.queries[:1]],
            "tools": self.tools(self.allowed),
            "turn": 0,
            "turns": len(self.queries),
            "step_limit": self.step_limit * turns,
            "done": False,
        }

    def step(self, calls):
        if self.done:
            raise Failure("episode_over", "the episode is over; reset to start another")
        if len(calls) > MAX_CALLS_PER_STEP:
            raise Failure("too_many_calls", f"{len(calls)} calls in one step; at most {MAX_CALLS_PER_STEP}")
        parsed = [wire_call(c) for c in calls]
        results = []
        allowed = self.allowed | self.early.get(self.turn, set())
        for name, arguments in parsed:
            content, error = self.world.call(name, arguments, allowed)
            results.append({"content": content, "is_error": error})
            (self.errors if error else self.effects).append(content)
        if parsed:
            # A refused call is logged under a name that the evaluation cannot run either.
            self.log[-1].append([c if c[0] in allowed else ("", {}) for c in parsed])
            self.steps += 1
            if self.steps >= self.step_limit:
                self.done = True
        return {"results": results, "done": self.done}

    def end_turn(self, say):
        if self.done:
            raise Failure("episode_over", "the episode is over; reset to start another")
        self.said[-1] = say
        missing = self.missing[self.turn] if self.turn < len(self.missing) else None
        if missing and not self.asked:
            self.asked = True
            reply = [{"role": "user", "content": str(missing.get("reply", ""))}]
            return {"messages": reply, "released": [], "done": False}
        if self.turn + 1 >= len(self.queries):
            self.done = True
            return {"messages": [], "released": [], "done": True}
        self.turn += 1
        self.steps = 0
        self.asked = False
        self.log.append([])
        self.said.append("")
        fresh = set(self.holdout.get(self.turn, [])) - self.allowed
        self.allowed |= fresh
        messages = [{"role": "user", "content": self.queries[self.turn]}]
        return {"messages": messages, "released": self.tools(fresh), "done": False}

    def evaluate(self, reference, partial):
        truth = self.truth
        if reference is not None:
            truth = [[wire_call(c) for c in turn] for turn in reference]
        if not any(truth):
            return {"unscored": "the task has no solution to compare with", "score": None}
        try:
            out = evaluate(self.data, self.entry, self.log, truth, partial)
        except RecursionError:
            # Only where the solution itself copies a folder into itself: against a finite state the
            # comparison ends.
            return {"unscored": "the solution leaves a cyclic state, which the official checker cannot compare",
                    "score": None}
        wrong = [i for i, a in enumerate(self.answers)
                 if a and a.strip().lower() not in (self.said[i] if i < len(self.said) else "").lower()]
        if wrong:
            # Synthesised tasks only: the turn asked for an answer in words.
            scored = sum(1 for turn in truth if turn)
            out["passed"] = False
            out["partial"] = min(out["partial"], sum(1 for t in truth[: wrong[0]] if t) / scored)
            out["score"] = out["partial"] if partial else 0.0
            out["error_type"] = "answer_missing"
            out["error_message"] = f"turn {wrong[0]} does not say {self.answers[wrong[0]]!r}"
        out["figures"] = strict_figures(self.data, self.entry, self.log, self.errors, truth, out["passed"])
        return out

    def digest(self):
        """Of what the checker looks at: public attributes of the classes, and the results so far (without
        order, without errors: junk that failed changes nothing)."""
        state = [
            [n, canonical({k: v for k, v in vars(i).items() if not k.startswith("_")})]
            for n, i in sorted(self.world.instances.items())
        ]
        text = json.dumps([state, sorted(self.effects)], ensure_ascii=True, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def official_queries(entry):
    """The user's words per turn; a turn that releases tools has the official sentence."""
    held = entry.get("missed_function", {})
    return [
        MORE_TOOLS if str(i) in held else "\n".join(m["content"] for m in turn)
        for i, turn in enumerate(entry["question"])
    ]


def wire_call(call):
    """(name, arguments); arguments may be an object or its JSON text. What is neither stays as it is and
    becomes an error result."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise Failure("bad_request", "a call needs a name and arguments")
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            pass
    return call["name"], arguments


# ------------------------------------------------------------------------------------------- worker


def option(options, name, default):
    """The word after `name`."""
    return options[options.index(name) + 1] if name in options[:-1] else default


class Worker:
    """The operations."""

    def __init__(self, options):
        self.partial = "--partial" in options
        self.data = Data(option(options, "--version-set", "v3"), option(options, "--docs", "short") != "full")
        self.episode = None

    def current(self, request):
        if self.episode is None or self.episode.label != request.get("episode"):
            raise Failure("no_episode", f"no such episode: {request.get('episode')!r}")
        return self.episode

    def op_describe(self, _request):
        return {
            "name": "bfcl",
            "version": f"{self.data.version.upper()} multi-turn, data {self.data.digest()[:16]}, worker {WORKER_VERSION}",
            "splits": list(CATEGORIES),
            "limits": {"steps_per_turn": STEPS_PER_TURN, "calls_per_step": MAX_CALLS_PER_STEP},
            "classes": [{"name": n, "tools": self.data.docs[n]} for n in sorted(self.data.docs)],
        }

    def op_list(self, request):
        split = request.get("split", "")
        tasks = []
        for entry in self.data.category(split).values():
            turns = [
                {"query": q, "solution": [{"name": n, "arguments": a} for n, a in t]}
                for q, t in zip(official_queries(entry), entry["truth"], strict=True)
            ]
            family = "+".join(sorted(entry["involved_classes"]))
            tasks.append({"id": entry["id"], "base": entry["id"], "family": family, "turns": turns})
        return {"tasks": tasks}

    def op_reset(self, request):
        self.episode = None
        self.episode = Episode(self.data, request.get("episode"), request.get("task") or {})
        return self.episode.opening()

    def op_step(self, request):
        calls = request.get("calls")
        if not isinstance(calls, list):
            raise Failure("bad_request", "step needs a list of calls")
        return self.current(request).step(calls)

    def op_end_turn(self, request):
        return self.current(request).end_turn(str(request.get("say", "")))

    def op_evaluate(self, request):
        return self.current(request).evaluate(request.get("reference"), self.partial)

    def op_state_digest(self, request):
        return {"digest": self.current(request).digest()}

    def op_close(self, request):
        self.current(request)
        self.episode = None
        return {}

    def answer(self, line):
        rid = None
        try:
            request = json.loads(line)
            if not isinstance(request, dict):
                raise Failure("bad_request", "a request is a JSON object")
            rid = request.get("rid")
            operation = getattr(self, f"op_{request.get('op')}", None)
            if operation is None:
                raise Failure("unknown_op", f"no operation {request.get('op')!r}")
            return {"rid": rid, **operation(request)}
        except Failure as e:
            return {"rid": rid, "error": {"kind": e.kind, "message": str(e)}}
        except Exception as e:  # reported, never scored
            return {"rid": rid, "error": {"kind": "internal", "message": f"{type(e).__name__}: {e}"}}


def die_with_parent(parent):
    """The pipe closes when the parent dies, but a busy worker would not look at it."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(3)


def main():
    import resource

    # The protocol keeps a private copy of stdout; prints from anywhere go to stderr.
    protocol = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGVTALRM, on_alarm)
    threading.Thread(target=die_with_parent, args=(os.getppid(),), daemon=True).start()
    worker = Worker(sys.argv[1:])
    for line in sys.stdin.buffer:
        reply = json.dumps(worker.answer(line), ensure_ascii=False)
        # Lone surrogates have no UTF-8 form.
        protocol.write(reply.encode("utf-8", "replace") + b"\n")
        protocol.flush()


# ---------------------------------------------------------------------------------------- self-test


def mutations(truth, missing):
    """The answer, and ways of breaking it: (name, log). `missing`: the entry has a turn that asks for what cannot
    be done yet; there the next turn's calls are made too early, and again in their turn."""
    plain = [[list(turn)] if turn else [] for turn in truth]
    spoken = [t for t, turn in enumerate(truth) if turn]

    def without(turn, index):
        log = copy.deepcopy(plain)
        del log[turn][0][index]
        return log

    yield "answer", plain
    yield "nothing", [[] for _ in truth]
    yield "without the first call", without(spoken[0], 0)
    yield "without the last call", without(spoken[-1], -1)
    yield "a junk call in each turn", [[*turn, [(truth[spoken[0]][0][0], {"no_such": 1})]] for turn in plain]
    yield "each call twice", [[[c for call in step for c in (call, call)] for step in turn] for turn in plain]
    yield "reversed", [[step[::-1] for step in turn] for turn in plain]
    empty = [t for t in range(len(truth) - 1) if not truth[t]]
    if missing and empty:
        log = copy.deepcopy(plain)
        for t in empty:
            log[t] = copy.deepcopy(plain[t + 1])
        yield "next turn's calls early", log


def self_test(data):
    """Our executor against the official one on the official checker, over every entry: answers as they are, and
    broken. Prints how many pass."""
    signal.signal(signal.SIGVTALRM, on_alarm)
    counts = {}
    for category in CATEGORIES:
        for entry in data.category(category).values():
            for name, log in mutations(entry["truth"], category.startswith("miss")):
                ours = evaluate(data, entry, log, entry["truth"], True)
                theirs = evaluate(data, entry, log, entry["truth"], True, official_executor=True)
                if ours != theirs:
                    print(f"{entry['id']} {name}: ours {ours}, official {theirs}", file=sys.stderr)
                    sys.exit(1)
                passed, total = counts.get((name, category), (0, 0))
                counts[name, category] = (passed + ours["passed"], total + 1)
    for name in dict.fromkeys(name for name, _ in counts):
        cells = [counts.get((name, c), (0, 0)) for c in CATEGORIES]
        each = ", ".join(f"{c} {passed}" for c, (passed, total) in zip(CATEGORIES, cells) if total)
        print(f"{data.version} {name:24} {sum(p for p, _ in cells):3} of {sum(t for _, t in cells)} pass ({each})")
    # Nothing of an evaluation stays behind.
    left = [k for k in vars(data.utils) if k.endswith("_instance")]
    if left or any(counts["answer", c] != (200, 200) or counts["nothing", c][0] for c in CATEGORIES):
        sys.exit("self-test failed")


if __name__ == "__main__":
    if "--self-test" in sys.argv:
        self_test(Data(option(sys.argv, "--version-set", "v3"), True))
    else:
        main()
