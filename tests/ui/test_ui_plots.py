"""Optuna's own plots: made of a search's document in a process of its own, drawn by the Plotly that is installed."""

import json

import pytest
from browser import CHROMIUM, SECONDS, at
from run_folders import a_run, a_study

from hotloop.ui import plot_pages, study_plots

optuna = pytest.importorskip("optuna", reason="plots of searches need pip install 'hotloop[search]'")
pytest.importorskip("plotly", reason="Optuna's own plots need plotly")
SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def a_whole_study(folder, *, names=("training.learning_rate", "digits.width", "training.scheduler"), many=12):
    rate, width, scheduler = names
    kinds = {
        rate: {"kind": "log", "values": [1e-5, 1e-1], "step": None, "when": None},
        width: {"kind": "range", "values": [16, 256], "step": None, "when": None},
        scheduler: {"kind": "choices", "values": ["cosine", SCRIPT], "step": None, "when": None},
    }
    trials = [
        {
            "number": place, "state": "pruned" if place % 5 == 4 else "complete", "value": 0.5 + place / 100,
            "values": {rate: 10 ** (-4 + place / 6), width: 16 + place, scheduler: ["cosine", SCRIPT][place % 2]},
            "reports": [[step, step / 10 + place / 100] for step in range(1, 5)], "began": 5.0 + place,
        }
        for place in range(many)
    ]  # fmt: skip
    a_study(folder)
    found = json.loads((folder / "study.json").read_text())
    whole = {**found, "direction": "maximize", "space": kinds, "trials": trials, "n_trials": many}
    (folder / "study.json").write_text(json.dumps(whole))
    return whole


def test_a_study_is_made_again_of_its_document_alone(tmp_path):
    whole = a_whole_study(tmp_path / "a")
    storage = {"storage": "postgresql://nobody@192.0.2.1/never"}
    made = study_plots.again({**whole, **storage})
    assert len(made.trials) == 12
    assert made.best_value == pytest.approx(0.61 - 0.01 * (11 % 5 == 4))
    assert made.trials[0].distributions["training.learning_rate"].log
    assert [*made.trials[3].intermediate_values] == [1, 2, 3, 4]
    assert all("<" not in str(value) for one in made.trials for value in one.params.values())


@pytest.mark.parametrize(
    "trial",
    [
        None, [], {"state": "complete"}, {"state": "running", "value": 1.0, "values": {}},
        {"state": "complete", "value": "nan", "values": {}}, {"state": "complete", "value": 1.0, "values": "x"},
        {"state": ["complete"], "value": 1.0, "values": {}},
    ],
)  # fmt: skip
def test_a_trial_that_cannot_be_read_is_left_out(tmp_path, trial):
    whole = a_whole_study(tmp_path / "a")
    assert len(study_plots.again({**whole, "trials": [trial, *whole["trials"]]}).trials) == 12


@pytest.mark.parametrize(
    "about", [None, [], {}, {"kind": "log", "values": [1, 2, 3]}, {"kind": "range", "values": [5, 1]}]
)
def test_a_value_outside_of_what_the_space_tells_is_a_choice(about):
    found = study_plots._distribution(about, 7)
    assert found.choices[-1] == 7


@pytest.mark.campaign
def test_the_figures_are_made_by_a_process_and_asked_for_once_for_each_state(client, root, monkeypatch):
    a_whole_study(root / "search")
    text = client.get("/run?run=search").text
    assert "Optuna&#39;s plots" in text or "Optuna's plots" in text
    page = client.get("/run/plots?run=search")
    policy = page.headers["content-security-policy"]
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    figures = client.get("/run/plots/figures?run=search").json()
    titles = [one["title"] for one in figures]
    assert titles == [
        "History",
        "Intermediate values",
        "Parallel coordinates",
        "Slices",
        "Importance",
        "Pairs of settings",
    ]
    assert "<script" not in json.dumps(figures)
    monkeypatch.setattr(plot_pages, "_figures", lambda path: ["anew"])
    assert client.get("/run/plots/figures?run=search").json() == figures
    (root / "search" / "study.json").write_text((root / "search" / "study.json").read_text() + " ")
    assert client.get("/run/plots/figures?run=search").json() == ["anew"]


def test_a_document_that_cannot_be_read_says_so(client, root):
    a_study(root / "search")
    (root / "search" / "study.json").write_text("{}")
    answer = client.get("/run/plots/figures?run=search")
    assert answer.status_code == 409
    assert "is it a document of a search" in answer.text


def test_without_plotly_our_own_plots_stay(client, root, monkeypatch):
    a_whole_study(root / "search")
    monkeypatch.setattr(plot_pages.importlib.util, "find_spec", lambda name: None if name == "plotly" else object())
    text = client.get("/run?run=search").text
    assert "/run/plots" not in text
    for said in ("History", "Parallel coordinates", "Accuracy as the best trials went"):
        assert said in text
    for path in ("/run/plots?run=search", "/run/plots/figures?run=search", "/plotly.js"):
        assert client.get(path).status_code == 404


def test_of_what_is_no_search_there_are_no_plots(client, root):
    a_run(root / "a")
    assert client.get("/run/plots?run=a").status_code == 404


@pytest.mark.campaign
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium: `make setup-browser` installs it")
def test_plotly_draws_every_figure_under_the_strict_policy(chromium, served, runs):
    from playwright.sync_api import expect

    a_whole_study(runs / "search", names=(SCRIPT, "digits.width", "b"))
    context, wrong = chromium.new_context(), []
    page = context.new_page()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
    page.goto(served[1])
    page.wait_for_url("**/runs")
    page.goto(at(served[1], "/run?run=search"))
    page.click("text=Optuna's plots", timeout=SECONDS)
    expect(page.locator("#plots h2")).to_have_count(6, timeout=2 * SECONDS)
    expect(page.locator("#plots")).not_to_have_attribute("aria-busy", "true", timeout=SECONDS)
    places = page.evaluate(
        "[...document.querySelectorAll('.plotly .main-svg')].map((one) => getComputedStyle(one).position)"
    )
    assert set(places) == {"absolute"}  # its own rules hold
    assert page.locator("#plots script, #plots img[onerror]").count() == 0
    assert wrong == []
    context.close()
