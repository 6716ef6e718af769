"""AppWorld through its own HTTP server, as an environment worker (protocol.py is put in front of this file).

One worker owns one server process: a server holds one world at a time, and executes the agent's code. Unlike
`appworld serve`, which listens on all interfaces, it listens on loopback only. What it writes goes to a
folder of its own that is deleted at the end; the data folder is only linked into it.

Options: `--root FOLDER` holds `data`; `--partial` scores by the share of passed checks instead of 0/1.
"""

import ctypes
import hashlib
import http.client
import importlib.metadata
import resource
import shutil
import signal
import socket
import subprocess
import tempfile

WORKER_VERSION = 1
MAX_INTERACTIONS = 100
EXECUTE_SECONDS = 15  # of one code block
START_SECONDS = 60
OUTPUT_CHARACTERS = 200_000  # of one block; the trainer cuts further
MEMORY_BYTES = 4 << 30  # of a server, which holds 400 MB with the official data
HTTP_SECONDS = 120  # the trainer's own deadline is shorter and kills us
RANDOM_SEED = 100  # the package's default: results must not depend on the episode
SERVER = """
import sys, uvicorn
from appworld.serve.environment import app
uvicorn.run(app, fd=int(sys.argv[1]), log_level="error")
"""
INSTRUCTIONS = """You act for {first_name} {last_name} (email {email}, phone {phone_number}) in their apps. It is {datetime}.
Answer with one fenced Python block, which is executed; you read what it prints, and variables stay for the next block:
```python
print(apis.api_docs.show_app_descriptions())
```
All apps are called as apis.APP.API(argument=value). apis.api_docs.show_app_descriptions() lists the apps,
apis.api_docs.show_api_descriptions(app_name='..') their APIs, apis.api_docs.show_api_doc(app_name='..', api_name='..') describes one.
apis.supervisor.show_account_passwords() has the passwords; APIs that need a login take the access_token that apis.APP.login(username=..,
password=..) returns. Lists come in pages. When the task is done, call apis.supervisor.complete_task(), with answer=.. if it asks a question."""
PYTHON = {
    "name": "python",
    "description": "Executes Python code that calls apis.APP.API(..); what it prints is the result.",
    "parameters": {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The code."}},
        "required": ["code"],
    },
}

PR_SET_PDEATHSIG = 1  # prctl(2), Linux
PREFIX = "coevolve-appworld-"

left = []  # what must not stay behind


def leave():
    """Kills the server (it ignores milder signals for seconds) and deletes the working folder."""
    while left:
        left.pop()()


def sweep():
    """Deletes what workers left that were killed; their folders say who they were."""
    for name in os.listdir(tempfile.gettempdir()):
        owner = name.removeprefix(PREFIX).split("-")[0]
        if name.startswith(PREFIX) and owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            shutil.rmtree(os.path.join(tempfile.gettempdir(), name), ignore_errors=True)


def confined():
    """In the server process, where the agent's code will run: bounded memory, and it dies with its worker, however that ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Server:
    """One server process and a connection to it."""

    def __init__(self, root):
        self.home = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")
        left.append(lambda: shutil.rmtree(self.home, ignore_errors=True))
        os.symlink(os.path.join(os.path.abspath(root), "data"), os.path.join(self.home, "data"))
        # The socket is ours: no other process can take the port between choosing and listening.
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        # The package unpacks and looks for nothing outside these folders.
        place = {"APPWORLD_ROOT": self.home, "APPWORLD_CACHE": os.path.join(self.home, "cache"), "TZ": "UTC"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(listener.fileno())],
            cwd=self.home, env={**os.environ, **place}, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL, stdout=2,
            preexec_fn=confined,
        )
        left.append(self.kill)
        listener.close()
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.ask("GET", "/")
                self.silent = False
                return
            except Failure as e:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def alive(self):
        """Not after a request without an answer: it may be dying, or still be busy with it."""
        return not self.silent and self.process.poll() is None

    def ask(self, method, path, **body):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HTTP_SECONDS)
        try:
            connection.request(method, path, json.dumps(body) if body else None, {"content-type": "application/json"})
            reply = connection.getresponse()
            text = reply.read()
        except (OSError, http.client.HTTPException) as e:
            self.silent = True
            raise Failure("server", f"{path} got no answer from the AppWorld server: {type(e).__name__}: {e}") from e
        finally:
            connection.close()
        if reply.status != 200:
            raise Failure("server", f"{path} answered {reply.status}: {text[:300].decode('utf-8', 'replace')}")
        return json.loads(text)

    def post(self, path, task, **body):
        return self.ask("POST", f"/{path}", task_id=task, **body)["output"]


class Worker:
    """The operations."""

    def __init__(self, options):
        self.partial = "--partial" in options
        self.root = options[options.index("--root") + 1]
        self.data = os.path.join(self.root, "data")
        self.server = None
        self.episode = None
        sweep()

    # ------------------------------------------------------------------------------------------ data

    def splits(self):
        """Official ones come with the data; ours with the set-up."""
        folder = os.path.join(self.data, "datasets")
        names = os.listdir(folder) if os.path.isdir(folder) else []
        return sorted(n[:-4] for n in names if n.endswith(".txt"))

    def specs(self, task):
        path = os.path.join(self.data, "tasks", task, "specs.json")
        if os.sep in task or task.startswith(".") or not os.path.isfile(path):
            raise Failure("unknown_task", f"AppWorld has no task {task!r}")
        with open(path, encoding="utf-8") as file:
            return json.load(file)

    def solution(self, task):
        """Of our own tasks; those of official ones may not be passed on, so they stay in their folder."""
        path = os.path.join(self.data, "tasks", task, "ground_truth", "coevolve_solution.json")
        if not os.path.isfile(path):
            return []
        with open(path, encoding="utf-8") as file:
            return [{"name": "python", "arguments": {"code": code}} for code in json.load(file)]

    def op_describe(self, _request):
        hasher = hashlib.sha256()
        for split in self.splits():
            with open(os.path.join(self.data, "datasets", f"{split}.txt"), "rb") as file:
                hasher.update(split.encode() + b"\0" + file.read())
        package = importlib.metadata.version("appworld")
        return {
            "name": "appworld",
            "version": f"appworld {package}, tasks {hasher.hexdigest()[:16]}, worker {WORKER_VERSION}",
            "splits": self.splits(),
        }

    def op_list(self, request):
        split = request.get("split", "")
        if split not in self.splits():
            raise Failure("unknown_split", f"AppWorld has no split {split!r}")
        with open(os.path.join(self.data, "datasets", f"{split}.txt"), encoding="utf-8") as file:
            # A tag may follow an id.
            ids = [line.split(":")[0].strip() for line in file if line.strip()]
        tasks = []
        for task in ids:
            # The scenario: tasks with one generator, all of which count for scenario goal completion.
            turns = [{"query": self.specs(task)["instruction"], "solution": self.solution(task)}]
            tasks.append({"id": task, "base": task, "family": task.split("_")[0], "tools": ["python"], "turns": turns})
        return {"tasks": tasks}

    # --------------------------------------------------------------------------------------- episode

    def current(self, request):
        if self.episode is None or self.episode["label"] != request.get("episode"):
            raise Failure("no_episode", f"no such episode: {request.get('episode')!r}")
        return self.episode

    def op_reset(self, request):
        task = request.get("task") or {}
        base = str(task.get("base") or task.get("id") or "")
        specs = self.specs(base)
        if self.server is None or not self.server.alive():
            leave()
            self.server = Server(self.root)
        self.episode = None
        world = self.server.post(
            "initialize", base, experiment_name="episode", max_interactions=MAX_INTERACTIONS,
            timeout_seconds=EXECUTE_SECONDS, random_seed=RANDOM_SEED,
        )
        queries = [turn["query"] for turn in task.get("turns") or []]
        own = task.get("id") != base or queries[:1] != [specs["instruction"]]
        self.episode = {"label": request.get("episode"), "base": base, "own": own, "done": False, "effects": []}
        system = INSTRUCTIONS.format(datetime=world["datetime"], **world["supervisor"])
        messages = [{"role": "system", "content": system}]
        messages += [{"role": "user", "content": query} for query in queries[:1]]
        return {
            "messages": messages, "tools": [PYTHON], "turn": 0, "turns": 1, "step_limit": MAX_INTERACTIONS, "done": False,
        }

    def op_step(self, request):
        episode = self.current(request)
        results = []
        for name, arguments in wire_calls(request):
            code = arguments.get("code") if isinstance(arguments, dict) else None
            if name != "python" or not isinstance(code, str):
                results.append({"content": "the only tool is python, with the text `code`", "is_error": True})
            elif episode["done"]:
                results.append({"content": "the task is complete", "is_error": True})
            else:
                output = self.server.post("execute", episode["base"], code=code)
                if len(output) > OUTPUT_CHARACTERS:
                    output = f"{output[:OUTPUT_CHARACTERS]}\n[{len(output) - OUTPUT_CHARACTERS} more characters]"
                results.append({"content": output, "is_error": output.startswith("Execution failed.")})
                episode["done"] = bool(self.server.post("task_completed", episode["base"]))
        return {"results": results, "done": episode["done"]}

    def op_end_turn(self, request):
        # There is no user to answer: words without code are the end, complete or not.
        self.current(request)["done"] = True
        return {"messages": [], "released": [], "done": True}

    def op_evaluate(self, request):
        episode = self.current(request)
        if episode["own"]:
            return {"unscored": "AppWorld has no evaluation for this task; a judge has to score it"}
        report = self.server.post("evaluate", episode["base"], suppress_errors=True, report=False)
        passed, tests = len(report["passes"]), report["num_tests"]
        score = passed / tests if self.partial and tests else float(report["success"])
        return {"score": score, "passed": report["success"], "checks": {"passes": report["passes"], "failures": report["failures"]}}

    def op_state_digest(self, request):
        """Of what the apps' databases hold beyond the task's own state: all that an evaluation looks at."""
        episode = self.current(request)
        folder = os.path.join(self.server.home, "experiments", "outputs", "episode", "tasks", episode["base"], "dbs")
        hasher = hashlib.sha256()
        for name in sorted(os.listdir(folder)):
            with open(os.path.join(folder, name), "rb") as file:
                text = file.read()
            hasher.update(f"{name}\0{len(text)}\0".encode() + text)
        return {"digest": hasher.hexdigest()}

    def op_close(self, request):
        episode = self.current(request)
        self.server.post("close", episode["base"])
        self.episode = None
        return {}


serve(Worker, leave)
