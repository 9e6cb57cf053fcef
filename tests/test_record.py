import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotloop import record
from hotloop.errors import RecordError
from hotloop.events import Recompiled
from hotloop.record import Follower, RunRecord, load, reading, was_killed
from hotloop.report import build

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


def filled(folder):
    with RunRecord(folder) as run:
        run.update("settings", seed=7, compile={"preset": "inductor"})
        run.update("components", model={"requested": "inductor", "state": "compiled"})
        run.update("measurements", cold_seconds=3.5)
        for step in range(5):
            run.append("steps", {"step": step, "seconds": 0.1, "loss": 1.0 / (step + 1)})
        event = Recompiled(component="model", function="forward", file="a.py", line=3, reason="size", nth=1)
        run.append("events", {**event.to_dict(), "step": 2})
        run.append("metrics", {"step": 5, "split": "validation", "f1": 0.9})
    return folder


def without_times(document):
    return {key: value for key, value in document.items() if key not in {"updated", "created", "finished"}}


def test_lines_and_document_hold_the_same(tmp_path):
    filled(tmp_path)
    from_lines, from_document = load(tmp_path / "record.jsonl"), load(tmp_path / "record.json")
    assert from_lines == from_document == load(tmp_path)
    assert from_lines["status"] == "finished"
    assert [step["step"] for step in from_lines["steps"]] == [0, 1, 2, 3, 4]
    assert from_lines["settings"] == {"seed": 7, "compile": {"preset": "inductor"}}
    assert from_lines["events"][0]["kind"] == "recompiled"
    assert "unread_lines" not in from_lines


def test_the_document_is_what_load_reads(tmp_path):
    run = RunRecord(tmp_path)
    run.append("steps", {"step": 0})
    assert run.document == load(tmp_path)
    run.finish()
    assert run.document == load(tmp_path)


def test_what_is_written_is_a_copy(tmp_path):
    causes = ["first"]
    with RunRecord(tmp_path) as run:
        run.update("components", model={"causes": causes})
        causes.append("second")
        assert run.document["components"]["model"]["causes"] == ["first"]


def test_not_finite_numbers_are_words(tmp_path):
    with RunRecord(tmp_path) as run:
        run.append("steps", {"loss": math.nan, "a": [math.inf, {"b": -math.inf}], math.nan: 1})
    for name in ("record.json", "record.jsonl"):
        text = (tmp_path / name).read_text()
        assert "NaN" not in text
        assert "Infinity" not in text
    assert load(tmp_path)["steps"] == [{"loss": "nan", "a": ["inf", {"b": "-inf"}], "nan": 1}]


def test_values_of_other_libraries_become_plain(tmp_path):
    class Scalar:
        def item(self):
            return math.nan

    class Vector:
        def item(self):
            raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")

        def __str__(self):
            return "two numbers"

    with RunRecord(tmp_path) as run:
        run.append(
            "steps", {"loss": Scalar(), "grad": Vector(), "path": tmp_path / "x", "set": {2, 1}, "tuple": (1, 2)}
        )
    assert load(tmp_path)["steps"] == [
        {"loss": "nan", "grad": "two numbers", "path": str(tmp_path / "x"), "set": [1, 2], "tuple": [1, 2]}
    ]


@pytest.mark.parametrize(("method", "section"), [("append", "settings"), ("append", "stepps"), ("update", "steps")])
def test_an_unknown_section_is_named(tmp_path, method, section):
    with RunRecord(tmp_path) as run, pytest.raises(ValueError, match=section):
        run.append(section, {}) if method == "append" else run.update(section)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (None, "finished", None),
        (SystemExit(0), "finished", None),
        (SystemExit(3), "failed", "SystemExit: 3"),
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt"),
        (RuntimeError("boom"), "failed", "RuntimeError: boom"),
    ],
)
def test_leaving_settles_the_status(tmp_path, error, status, said):
    try:
        with RunRecord(tmp_path):
            if error is not None:
                raise error
    except (SystemExit, KeyboardInterrupt, RuntimeError) as raised:
        reached = raised is error
    else:
        reached = error is None
    assert reached
    document = load(tmp_path / "record.json")
    assert (document["status"], document["error"]) == (status, said)
    assert document["finished"] >= document["created"]


def test_the_first_end_counts_and_nothing_comes_after(tmp_path):
    run = RunRecord(tmp_path)
    run.finish("failed", "x" * 10**6)
    run.finish("finished")
    with pytest.raises(ValueError, match="is finished"):
        run.append("steps", {})
    document = load(tmp_path)
    assert document["status"] == "failed"
    assert len(document["error"]) == record.ERROR_LENGTH
    assert document == load(tmp_path / "record.json")


def test_a_torn_last_line_is_left_out_and_counted(tmp_path):
    filled(tmp_path)
    lines = tmp_path / "record.jsonl"
    whole = lines.read_bytes()
    lines.write_bytes(whole[:-20])
    document = load(tmp_path)
    assert document["unread_lines"] == 1
    assert document["status"] == "running"
    assert len(document["steps"]) == 5


def test_a_resume_goes_on_with_the_record(tmp_path):
    filled(tmp_path)
    with (tmp_path / "record.jsonl").open("a") as lines:
        lines.write('{"time": 1, "append": "steps", "ent')
    created = load(tmp_path)["created"]
    with RunRecord(tmp_path) as run:
        assert run.document["status"] == "running"
        run.append("steps", {"step": 5})
    document = load(tmp_path)
    assert [step["step"] for step in document["steps"]] == [0, 1, 2, 3, 4, 5]
    assert (document["created"], document["starts"], document["unread_lines"]) == (created, 2, 1)
    assert without_times(load(tmp_path / "record.json")) == without_times(document)


def test_the_time_between_two_sittings_is_summed_up(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    for step, (ran, idle) in enumerate(((5, 60), (7, 3600), (1, 0)), 1):
        run = RunRecord(tmp_path)
        now[0] += ran
        run.append("steps", {"step": step, "seconds": 1.0})
        run.finish("interrupted")
        now[0] += idle
    document = load(tmp_path)
    assert (document["starts"], document["idle_seconds"]) == (3, 3660)
    assert build(document).headline.sentence == "Interrupted: 3 steps in 13 s, in 3 sittings."


@pytest.mark.parametrize("left", [b"", b'{"time": 1, "se'])
def test_a_run_killed_before_its_first_line_can_start_again(tmp_path, left):
    (tmp_path / "record.jsonl").write_bytes(left)
    with RunRecord(tmp_path) as run:
        run.append("steps", {"step": 0})
    assert load(tmp_path)["steps"] == [{"step": 0}]


def test_a_resume_needs_only_the_document(tmp_path):
    filled(tmp_path)
    (tmp_path / "record.jsonl").unlink()
    with RunRecord(tmp_path) as run:
        run.append("steps", {"step": 5})
    document = load(tmp_path / "record.jsonl")
    assert [step["step"] for step in document["steps"]] == [0, 1, 2, 3, 4, 5]
    assert document["starts"] == 2


def test_a_file_that_is_no_record_is_not_written_to(tmp_path):
    (tmp_path / "record.jsonl").write_text("precious\nnotes\n")
    with pytest.raises(RecordError):
        RunRecord(tmp_path)
    assert (tmp_path / "record.jsonl").read_text() == "precious\nnotes\n"


def test_a_failing_disk_is_said_once_and_loses_nothing_that_it_takes_later(tmp_path, caplog, monkeypatch):
    run = RunRecord(tmp_path)

    class Full:
        closed = False
        room = 30

        def write(self, data):
            if not self.room:
                raise OSError(28, "No space left on device")
            taken, self.room = lines.write(data[: self.room]), 0
            return taken

    lines, run._lines = run._lines, Full()
    with caplog.at_level(logging.WARNING):
        for step in range(1000):
            run.append("steps", {"step": step})
    run._lines = lines
    run.append("steps", {"step": 1000})
    run.finish()
    assert [each.getMessage().count("No space left") for each in caplog.records] == [1]
    assert [step["step"] for step in load(tmp_path / "record.jsonl")["steps"]] == list(range(1001))
    assert load(tmp_path / "record.jsonl") == load(tmp_path / "record.json")


@pytest.mark.parametrize("call", ["pathlib.Path.mkdir", "hotloop.record.writing.open_append"])
def test_a_folder_that_cannot_be_written_from_the_start_leaves_the_record_in_memory(
    tmp_path, caplog, monkeypatch, call
):
    def refuses(*_, **__):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(call, refuses)
        run = RunRecord(tmp_path / "run")
    run.append("steps", {"step": 1})
    run.finish()
    assert [entry["step"] for entry in run.document["steps"]] == [1]
    assert [each.getMessage().partition(". The run goes on")[0] for each in caplog.records] == [
        f"record={tmp_path / 'run'} cannot be written: [Errno 13] Permission denied"
    ]
    assert not list(tmp_path.rglob("record*"))


def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(OSError, match=r"File exists|Not a directory"):
            RunRecord(path)


def test_what_was_recorded_after_a_checkpoint_is_left_out_and_marked(tmp_path):
    with RunRecord(tmp_path) as run:
        for step in range(5):
            run.append("steps", {"step": step})
            if step == 2:
                kept = run.lengths()
        run.append("events", {"kind": "recompiled"})
    with RunRecord(tmp_path) as run:
        assert run.cut(kept, 3) == {"steps": 2, "events": 1}
        assert run.cut(kept, 3) == {}
        run.append("steps", {"step": 3})
    for document in (load(tmp_path / "record.jsonl"), load(tmp_path / "record.json"), run.document):
        assert [step["step"] for step in document["steps"]] == [0, 1, 2, 3]
        assert document["events"] == []
        assert [{**cut, "time": 0} for cut in document["cuts"]] == [{"step": 3, "time": 0, "steps": 2, "events": 1}]
    assert (tmp_path / "record.jsonl").read_text().count('"append": "steps"') == 6


def test_a_folder_that_is_removed_while_the_run_goes_on_ends_no_run(tmp_path):
    run = RunRecord(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    run.append("steps", {"step": 1})
    run.finish()
    assert [step["step"] for step in run.document["steps"]] == [1]
    assert not (tmp_path / "run").exists()


def test_many_steps_take_little_memory(tmp_path):
    with RunRecord(tmp_path) as run:
        for step in range(1000):
            run.append("steps", {"step": step, "seconds": 0.0123, "loss": 0.5, "running": "inductor"})
        assert sum(map(len, run._texts.values())) < 1000 * 100
    assert len(load(tmp_path)["steps"]) == 1000


def test_threads_may_write_at_the_same_time(tmp_path):
    with RunRecord(tmp_path) as run:

        def work(name):
            for step in range(200):
                run.append("events", {"kind": name, "step": step})

        threads = [threading.Thread(target=work, args=(str(n),)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    document = load(tmp_path)
    assert len(document["events"]) == 800
    assert document == load(tmp_path / "record.json")


WRITER = """
import sys
from hotloop.record import RunRecord
run = RunRecord(sys.argv[1])
step = 0
while True:
    run.append("steps", {"step": step, "text": "x" * 5000})
    step += 1
    if step == 50:
        print("going", flush=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="kill -9 is POSIX")
def test_a_killed_run_leaves_a_readable_record(tmp_path):
    for start in (1, 2):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"going\n"
        assert not was_killed(load(tmp_path))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        document = load(tmp_path)
        assert document["status"] == "running"
        assert document["starts"] == start
        assert len(document["steps"]) >= 50 * start
        assert document.get("unread_lines", 0) <= start
        assert was_killed(document)


def test_only_a_running_record_of_this_machine_can_be_killed(tmp_path):
    run = RunRecord(tmp_path)
    document = run.document
    assert not was_killed(document)
    dead = {**document, "pid": 2**22 + 12345, "process_started": 1}
    assert was_killed(dead) == (os.name != "nt")
    assert not was_killed({**dead, "host": "another-machine"})
    assert not was_killed({**dead, "status": "finished"})
    for strange in ("12", None, -1, 0, True, 10**30, 1.5):
        assert not was_killed({**document, "pid": strange})
    run.finish()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the start of a process is read from /proc")
def test_a_number_that_another_process_has_got_is_told_apart(tmp_path):
    with RunRecord(tmp_path) as run:
        document = run.document
    assert was_killed({**document, "status": "running", "process_started": document["process_started"] - 1})


def test_a_newer_schema_is_named(tmp_path):
    filled(tmp_path)
    document = json.loads((tmp_path / "record.json").read_text())
    (tmp_path / "new.json").write_text(json.dumps({**document, "schema": 99}))
    with pytest.raises(RecordError, match=r"schema 99.*reads 1 to 1.*up to date"):
        load(tmp_path / "new.json")
    (tmp_path / "new.jsonl").write_text(
        '{"time": 1, "set": {"schema": 99, "created": 1}}\n{"time": 1, "invented": 2}\n'
    )
    with pytest.raises(RecordError, match="schema 99"):
        load(tmp_path / "new.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b"{", "no readable run record"),
        ("a.json", b"\xff\xfe\x00", "no readable run record"),
        ("a.json", b"[" * 100_000, "no readable run record"),
        ("a.json", b"1" * 10_000, "no readable run record"),
        ("a.json", b"[]", "expected a JSON object, found list"),
        ("a.json", b"{}", "schema None"),
        ("a.json", b'{"schema": true}', "schema True"),
        ("a.json", b'{"schema": 1}', "steps, metrics, events, decisions, verdicts, advice, environment"),
        ("a.jsonl", b"", "holds no line"),
        ("a.jsonl", b"[" * 100_000, "holds no line"),
        ("a.jsonl", b'{"time": 1, "set": {"created": 1, "steps": [1]}}', "steps missing or of another type"),
        ("a.jsonl", b'{"time": 1, "set": {"created": 1, "components": {"m": 1}}}', "components missing"),
    ],
)
def test_what_is_no_record_is_said(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(RecordError, match=said):
        load(path)


def test_nothing_there_is_said(tmp_path):
    with pytest.raises(RecordError, match=r"no run record at .*record\.jsonl"):
        load(tmp_path)
    with pytest.raises(RecordError, match="no run record"):
        load(tmp_path / "gone" / "record.json")


def load_or_record_error(path):
    try:
        document = load(path)
    except RecordError:
        return
    assert all(isinstance(document[name], list) for name in record.LISTS)
    assert all(isinstance(document[name], dict) for name in record.MAPPINGS)


QUICK = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@QUICK
@given(content=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_load_or_raise_record_error(tmp_path, content):
    for name in ("record.json", "record.jsonl"):
        (tmp_path / name).write_bytes(content)
        load_or_record_error(tmp_path / name)


SECTION = st.sampled_from([*record.LISTS, *record.MAPPINGS, "schema", "created", "status"])
LINE = st.fixed_dictionaries(
    {"time": JSON},
    optional={
        "append": SECTION | JSON,
        "entry": JSON,
        "update": SECTION | JSON,
        "values": JSON,
        "set": st.dictionaries(SECTION, JSON, max_size=3),
    },
)


@pytest.mark.campaign
@QUICK
@given(lines=st.lists(LINE, max_size=5))
def test_any_lines_load_or_raise_record_error(tmp_path, lines):
    first = {"time": 1, "set": {"schema": 1, "created": 1.0}}
    (tmp_path / "record.jsonl").write_text("\n".join(json.dumps(each) for each in (first, *lines)))
    load_or_record_error(tmp_path)


@QUICK
@given(entry=st.dictionaries(st.text(max_size=8), JSON, max_size=4))
def test_any_entry_is_written_and_read_back(tmp_path_factory, entry):
    folder = tmp_path_factory.mktemp("run")
    with RunRecord(folder) as run:
        run.append("steps", entry)
        run.update("settings", values=entry)
    document = load(folder)
    assert document == load(folder / "record.json")
    assert document["steps"] == [document["settings"]["values"]]


def test_a_link_that_somebody_put_at_the_records_files_is_not_followed(tmp_path, caplog):
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    for name in ("record.json", ".record.json.part"):
        folder = tmp_path / name.strip(".")
        folder.mkdir()
        (folder / name).symlink_to(mine)
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "record.jsonl").symlink_to(mine)
    with RunRecord(tmp_path / "record.json.part") as run:
        run.append("steps", {"step": 1})
    with caplog.at_level(logging.WARNING), RunRecord(tmp_path / "lines") as kept:
        kept.append("steps", {"step": 1})
    assert "it is no regular file" in caplog.text
    with pytest.raises(RecordError, match="it is no regular file"):
        RunRecord(tmp_path / "record.json")
    assert mine.read_bytes() == b"mine"
    assert load(tmp_path / "record.json.part")["steps"] == [{"step": 1}]


def test_a_file_of_lines_without_an_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LONGEST", 1000)
    with RunRecord(tmp_path) as run:
        run.append("steps", {"step": 1})
    with (tmp_path / "record.jsonl").open("ab") as lines:
        lines.write(b"x" * 2500)
    for found in (load(tmp_path), Follower(tmp_path).look()):
        assert found["steps"] == [{"step": 1}]
        assert found["unread_lines"] in {2, 3}
