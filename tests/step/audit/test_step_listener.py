"""Hotloop's own failures while it looks at a step stay its own: the step runs to its end, and is declined."""

from hotloop.step.audit.listener import CompilesHeard, Listener


class Broken(Listener):
    def stop(self):
        raise RuntimeError("ours, again")


def test_a_failure_while_listening_ends_leaves_the_step_alone():
    def look():
        raise RuntimeError("ours")

    listener = Broken()
    assert listener.ours(look, instead="instead") == "instead"
    assert listener.seen.stopped
    assert "RuntimeError: ours" in listener.seen.failed.reason


def test_a_failure_as_a_compiled_function_is_heard_leaves_the_step_alone(monkeypatch):
    def fails(code, frame):
        raise RuntimeError("ours")

    heard = CompilesHeard()
    monkeypatch.setattr(type(heard.own_compiles), "began", fails)
    heard = CompilesHeard()

    def user():
        return 3

    with heard.listening():
        result = user()
    assert result == 3
    assert heard.seen.failed is not None
