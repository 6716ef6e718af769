"""Makes a small AppWorld data folder without the official download: three scenarios of three tasks of our own, split `made`.

    python appworld_make.py FOLDER

They are for trying things out and for tests (the server, the databases and the evaluation are the real ones), not a
benchmark. With official data in FOLDER/data they are added beside it, under ids that no official task has.
"""

import json
import os
import shutil
import sys
import tempfile

root = os.path.abspath(sys.argv[1])
os.environ["APPWORLD_ROOT"] = root
os.environ["APPWORLD_CACHE"] = os.path.join(root, "cache")
data = os.path.join(root, "data")
os.makedirs(os.path.join(data, "tasks"), exist_ok=True)

from appworld.apps import get_all_apps  # noqa: E402  (reads the folder when imported)
from appworld.apps.api_lib import set_local_date_and_time  # noqa: E402
from appworld.collections.api_docs import ApiDocCollection  # noqa: E402
from appworld.collections.models import ModelCollection  # noqa: E402
from appworld.common.constants import CANARY_STRING, DB_VERSION  # noqa: E402
from appworld.common.datetime import DateTime  # noqa: E402

WHEN = DateTime(2023, 5, 18, 12, 0, 0)
ADA = {"first_name": "Ada", "last_name": "Miller", "email": "ada.miller@example.com", "phone_number": "5551230001"}
BIRTHDAY = "1990-04-02"
PASSWORD = "correct-horse"
ANSWERED = """
    with test("assert answers match."):
        given = json.loads(models.end.supervisor.Task.first().answer)
        test.answer(given if given != "<<NOT_GIVEN>>" else None, ground_truth_answer)
"""
LOGIN = """passwords = {p["account_name"]: p["password"] for p in apis.supervisor.show_account_passwords()}
token = apis.simple_note.login(username=apis.supervisor.show_profile()["email"], password=passwords["simple_note"])["access_token"]
print(apis.simple_note.search_notes(access_token=token))"""
FIND = 'note = [n for n in apis.simple_note.search_notes(query="{title}", access_token=token) if n["title"] == "{title}"][0]\n'
NOTES = [
    ("Groceries", "milk, eggs, rye bread", ["home"]),
    ("Gym plan", "squats on Monday", ["health", "home"]),
    ("Book list", "The Periodic Table", ["reading"]),
    ("Packing", "tent, lamp, rope", ["travel", "home"]),
]


def add_note(title, content):
    return {
        "instruction": f'Write a note titled "{title}" with the content "{content}" in Simple Note.',
        "private": {"title": title, "content": content},
        "evaluation": '''
    with test("assert only notes have changed."):
        assert models.changed_model_names() == {"simple_note.Note"}, models.changed_model_names()
    with test("assert one note was added, with the title and content asked for."):
        added, updated, removed = models.changed_records("simple_note.Note")
        assert [(n.title, n.content) for n in added] == [(private_data.title, private_data.content)]
        assert not updated and not removed
''',
        "solution": [
            LOGIN,
            f"print(apis.simple_note.create_note(title={title!r}, content={content!r}, access_token=token))\n"
            "apis.supervisor.complete_task()",
        ],
    }


def count_notes(tag):
    return {
        "instruction": f'How many of my notes in Simple Note have the tag "{tag}"?',
        "answer": sum(tag in tags for _, _, tags in NOTES),
        "evaluation": '''
    with test("assert nothing has changed."):
        assert models.changed_model_names() == set(), models.changed_model_names()
''',
        "solution": [
            LOGIN,
            f"found = [n for n in apis.simple_note.search_notes(page_limit=20, access_token=token) if {tag!r} in n['tags']]\n"
            "apis.supervisor.complete_task(answer=len(found))",
        ],
    }


def rename_note(title, new):
    return {
        "instruction": f'Rename my note "{title}" in Simple Note to "{new}".',
        "private": {"title": title, "new": new},
        "evaluation": '''
    with test("assert only notes have changed."):
        assert models.changed_model_names() == {"simple_note.Note"}, models.changed_model_names()
    with test("assert the note has its new title, and nothing else has changed."):
        added, updated, removed = models.changed_records("simple_note.Note")
        assert [n.title for n in updated] == [private_data.new] and not added and not removed
        before = models.start.simple_note.Note.by_id(updated[0].id)
        assert before.title == private_data.title and before.content == updated[0].content
''',
        "solution": [
            LOGIN,
            FIND.format(title=title)
            + f"print(apis.simple_note.update_note(note_id=note['note_id'], title={new!r}, access_token=token))\n"
            "apis.supervisor.complete_task()",
        ],
    }


SCENARIOS = {
    "c0e01a1": [add_note("Birthday", "cake for Ben"), add_note("Wifi", "router in the hall"), add_note("Tea", "Assam, Darjeeling")],
    "c0e01a2": [count_notes("home"), count_notes("reading"), count_notes("garden")],
    "c0e01a3": [rename_note("Packing", "Camping"), rename_note("Groceries", "Shopping"), rename_note("Gym plan", "Training")],
}


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def make_api_docs():
    """What the official download holds under data/api_docs, built from the package."""
    docs = ApiDocCollection.build(load_apps=tuple(get_all_apps(skip_admin=True)))
    folder = os.path.join(data, "api_docs", "standard")
    if not os.path.isdir(folder):
        for app, apis in docs.items():
            apis = {name: {**doc, "canary_string": CANARY_STRING} for name, doc in apis.items()}
            write(os.path.join(folder, f"{app}.json"), json.dumps(apis))
    return docs


def make_world(docs, home):
    """The databases that all tasks start from, but for the task itself."""
    os.makedirs(home)
    apps = get_all_apps()
    models = ModelCollection.load(to_db_home_path=":memory:world", from_db_home_path=home, load_apps=apps, create_db=True)
    models.admin.MainUser(**ADA, birthday=BIRTHDAY, sex="female").save()
    supervisor = models.supervisor.Supervisor(**ADA, birthday=BIRTHDAY, sex="female")
    supervisor.save()
    models.supervisor.AccountPassword(supervisor_id=supervisor.id, account_name="simple_note", password=PASSWORD).save()
    who = {name: ADA[name] for name in ("first_name", "last_name", "email")}
    user = models.simple_note.User(**who, password=PASSWORD, verified=True)
    user.save()
    for title, content, tags in NOTES:
        models.simple_note.Note(user_id=user.id, title=title, content=content, tags=tags, pinned=False).save()
    for app, apis in docs.items():
        for doc in apis.values():
            doc = {k: v for k, v in doc.items() if k not in ("canary_string", "app_name")}
            models.api_docs.ApiDoc(app_name_=app, **doc).save()
    models.save(home, app_names=apps, delete_if_exists=True)
    models.close()


def make_task(world, task, spec):
    folder = os.path.join(data, "tasks", task)
    home = os.path.join(folder, "dbs")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(world, home)
    models = ModelCollection.load(to_db_home_path=home, from_db_home_path=home, load_apps=get_all_apps())
    supervisor = models.supervisor.Supervisor.first()
    models.supervisor.Task(supervisor_id=supervisor.id, instruction=spec["instruction"]).save()
    models.close()
    specs = {"instruction": spec["instruction"], "supervisor": ADA, "datetime": WHEN.isoformat(), "db_version": DB_VERSION}
    write(os.path.join(folder, "specs.json"), json.dumps(specs))
    head = "import json\n\n\ndef evaluate(test, public_data, private_data, main_user, models, ground_truth_answer):"
    code = head + spec["evaluation"] + ANSWERED
    requirements = [line.split('"')[1] for line in code.splitlines() if "with test(" in line]
    # Doing nothing passes exactly where nothing has to change and no answer is asked for.
    passes = {"assert answers match.": "answer" not in spec, "assert nothing has changed.": True}
    tests = [{"requirement": r, "label": "no_op_pass" if passes.get(r) else "no_op_fail"} for r in requirements]
    counts = {"num_apps": 1, "num_apis": 4, "num_api_calls": 5, "num_solution_code_lines": 5}
    truth = {
        "metadata.json": {"difficulty": 1, "mode": "minimal", **counts},
        "public_data.json": {},
        "private_data.json": spec.get("private", {}),
        "answer.json": spec.get("answer"),
        "test_data.json": tests,
        "coevolve_solution.json": spec["solution"],
    }
    for name, value in truth.items():
        write(os.path.join(folder, "ground_truth", name), json.dumps(value))
    write(os.path.join(folder, "ground_truth", "evaluation.py"), code)


freezer = set_local_date_and_time(WHEN)
names = []
with tempfile.TemporaryDirectory() as temporary:
    start = os.path.join(temporary, "world")
    make_world(make_api_docs(), start)
    for scenario, specs in SCENARIOS.items():
        for number, one in enumerate(specs, 1):
            names.append(f"{scenario}_{number}")
            make_task(start, names[-1], one)
freezer.stop()
write(os.path.join(data, "datasets", "made.txt"), "\n".join(names) + "\n")
