"""One batch ahead: in which order batches are read, copied and trained on, and that a resumed run is the same."""

import signal
import textwrap
import threading
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from hotloop import recipes, record
from hotloop.errors import ConfigError
from hotloop.train import ahead, batches, checkpoint, feed, start
from hotloop.train.ahead import CopiedAhead, read_ahead

PROGRAM = """
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import hotloop


class Noisy(Dataset):
    '''Rows that draw from torch's random numbers as they are read, beside a step that does.'''

    def __len__(self):
        return 40

    def __getitem__(self, row):
        x = torch.full((4,), float(row)) + torch.randn(4)
        return x, (x.sum() > 80).long()


class Stateful(DataLoader):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Mixed:
    '''A wrapper that draws in the main process, and names what it wraps as Fabric's does.'''

    def __init__(self, loader):
        self._dataloader = loader

    def __iter__(self):
        for x, y in self._dataloader:
            yield x + torch.randn(4), y

    def __len__(self):
        return len(self._dataloader)


class Shuffled:
    '''A sampler that draws as it is asked, in the main process.'''

    def __iter__(self):
        for _ in range(5):
            yield torch.randint(40, (8,)).tolist()

    def __len__(self):
        return 5


def make(stateful: bool = False, workers: int = 0, mixed: bool = False, sampled: bool = False):
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout(0.2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    loader = (Stateful if stateful else DataLoader)(Noisy(), 8, shuffle=True, num_workers=workers)
    loader = DataLoader(Noisy(), batch_sampler=Shuffled(), num_workers=workers) if sampled else loader
    loader = Mixed(loader) if mixed else loader
    return hotloop.Workload(model, optimizer, step, loader)
"""


class Told:
    """A stream that copies nothing, and says what it was asked for."""

    def __init__(self):
        self.said = []

    def run(self, act):
        found = act()
        self.said.append("run")
        return found

    def join(self):
        self.said.append("join")


def test_the_next_batch_is_read_before_a_step_and_awaited_by_the_next_one_alone():
    stream = Told()
    source = (stream.said.append(f"read {one}") or one for one in range(3))
    for batch in CopiedAhead(source, lambda one: -one, stream):
        stream.said.append(f"step {batch}")
    assert [one for one in stream.said if one != "run"] == [
        "read 0", "join", "read 1", "step 0", "join", "read 2", "step -1", "join", "step -2"
    ]  # fmt: skip


def test_a_thread_reads_one_ahead_and_what_it_raises_is_raised():
    def read(item):
        if item == 3:
            raise ValueError("item 3")
        return item * 10

    found = read_ahead(read, iter(range(5)))
    assert [next(found) for _ in range(2)] == [0, 10]
    with pytest.raises(ValueError, match="item 3"):
        list(found)
    assert list(read_ahead(read, range(3))) == [0, 10, 20]
    assert list(read_ahead(read, [])) == []


def test_a_cpu_has_nothing_to_copy():
    assert ahead.copy_stream(torch.device("cpu")) is None


@pytest.fixture
def _told(monkeypatch):
    for module in (batches, feed):
        monkeypatch.setattr(module, "copy_stream", lambda _: Told())


@pytest.mark.usefixtures("_told")
def test_what_was_copied_ahead_is_no_part_of_the_state_of_a_recipes_batches():
    data = batches.Table({"x": torch.arange(10.0)[:, None]}, torch.arange(10))
    plain = [[one.labels.tolist() for one in step] for step in batches.Epochs(data, 2, 1, 2)]
    first, second = (batches.Epochs(data, 2, 1, 2, device=torch.device("cpu")) for _ in range(2))
    found = [[one.labels.tolist() for one in next(iter(first))]]
    assert first.state_dict() == {"epoch": 0, "done": 1}
    second.load_state_dict(first.state_dict())
    assert found + [[one.labels.tolist() for one in step] for step in second] == plain


def test_batches_are_pinned_by_the_thread_that_reads_and_copied_on_one_stream(monkeypatch):
    streams, threads, pin = [], [], batches.Batch.pin

    def pinned(self, device):
        threads.append(threading.current_thread())
        return pin(self, device)

    monkeypatch.setattr(batches, "copy_stream", lambda _: streams.append(Told()) or streams[-1])
    monkeypatch.setattr(batches.Batch, "pin", pinned)
    monkeypatch.setattr(batches.Batch, "to", lambda self, _: self)
    data = batches.Table({"x": torch.arange(10.0)[:, None]}, torch.arange(10))
    epochs = batches.Epochs(data, 2, 1, device=torch.device("cpu"))
    assert len([step for _ in range(3) for step in epochs]) == len(threads) == 15
    assert threading.main_thread() not in threads
    assert len(streams) == 1


@pytest.fixture
def train(tmp_path):
    def run(folder, *settings):
        (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
        begun = start.prepare(
            [
                f"{tmp_path / 'program.py'}:make", "training.num_epochs=2", f"run.folder={tmp_path / folder}",
                "training.checkpoint_every_steps=1", "run.prefetch=true", *settings,
            ]
        )  # fmt: skip
        return recipes.load(begun.settings.recipe.name).train(begun)

    return run


class Drawing(DataLoader):
    """A loader that draws in this process, whatever its workers do."""

    def __iter__(self):
        yield from (batch + torch.randn(1) for batch in super().__iter__())


class Wrapper:
    """A loader around another, whose attribute is named as that of Fabric's."""

    def __init__(self, loader):
        self._dataloader = loader

    def __iter__(self):
        yield from (batch + torch.randn(1) for batch in self._dataloader)


class Late(RandomSampler):
    """A sampler that may draw for each batch."""


def by_a_worker(sampler):
    return DataLoader(range(4), 1, sampler=sampler, num_workers=1)


WORKER = DataLoader(range(4), 1, num_workers=1)
HERE = RandomSampler(range(4), generator=torch.default_generator)


@pytest.mark.usefixtures("_told")
@pytest.mark.parametrize(
    ("batches", "copies"),
    [
        (DataLoader(range(4), 1), 4),
        (WORKER, 0),
        (DataLoader(range(4), 1, shuffle=True, num_workers=1), 0),
        (by_a_worker(WeightedRandomSampler([1.0] * 4, 4)), 0),
        (by_a_worker(Late(range(4))), 4),
        (by_a_worker(HERE), 4),
        (DataLoader(range(4), batch_sampler=BatchSampler(Late(range(4)), 1, drop_last=False), num_workers=1), 4),
        (Fabric(accelerator="cpu", devices=1).setup_dataloaders(WORKER), 0),
        (Wrapper(WORKER), 4),
        (Drawing(range(4), 1, num_workers=1), 4),
        ([torch.zeros(1)] * 4, 0),
        (lambda: iter([torch.zeros(1)] * 4), 4),
    ],
)
def test_random_numbers_are_copied_before_a_batch_where_reading_it_may_draw_some(monkeypatch, batches, copies):
    work = SimpleNamespace(batches=batches)
    task = SimpleNamespace(device=torch.device("cpu"), prefetch=True, workload=work, generators=())
    epoch, copy, copied = feed.Feed(task).epoch(0, 0), checkpoint.random_state, []
    first = next(epoch)  # the epoch has begun
    monkeypatch.setattr(checkpoint, "random_state", lambda: copied.append(1) or copy())
    assert [len(one) for one in (first, *epoch)] == [1] * 4
    assert len(copied) == max(0, copies - 1)  # and one behind the last batch


@pytest.mark.usefixtures("_told")
@pytest.mark.parametrize(
    ("stop", "batches"),
    [
        *((stop, ["program.workers=0"]) for stop in (3, 5, 7)),
        *((stop, ["program.workers=1"]) for stop in (3, 5)),
        (3, ["program.workers=1", "program.mixed=true"]),
        (2, ["program.workers=1", "program.sampled=true"]),
    ],
)
def test_a_run_that_reads_ahead_is_resumed_as_if_it_had_not_stopped(tmp_path, train, monkeypatch, stop, batches):
    train("whole", *batches)
    save = checkpoint.save
    with monkeypatch.context() as patch:

        def saving(path, document):
            save(path, document)
            if document["position"]["step"] == stop:
                patch.setattr(checkpoint, "save", lambda *_: None)
                signal.raise_signal(signal.SIGINT)

        patch.setattr(checkpoint, "save", saving)
        assert train("run", *batches).status == "interrupted"
    begun = start.prepare([f"run.resume={tmp_path / 'run'}"])
    assert recipes.load(begun.settings.recipe.name).train(begun).status == "finished"
    losses = [[step["loss"] for step in record.load(tmp_path / folder)["steps"]] for folder in ("whole", "run")]
    assert len(losses[0]) == 10
    assert losses[0] == losses[1]


@pytest.mark.usefixtures("_told")
def test_a_loader_that_keeps_its_state_is_not_read_ahead(train):
    with pytest.raises(ConfigError, match=r"run\.prefetch=true: .* a loader that keeps its state"):
        train("run", "program.stateful=true")


def test_without_a_gpu_reading_ahead_is_said_to_do_nothing(train, capsys):
    train("run", "training.max_steps=1")
    assert "run.prefetch=true has no effect" in capsys.readouterr().out
