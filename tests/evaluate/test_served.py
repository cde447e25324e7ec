"""The accounting around servers: who is asked what, what is counted for whom, what is compared.

The servers here are scripted; real ones are in tests/engines/serving.
"""

import json
from pathlib import Path

import pytest
import torch

from paceline.errors import EvaluationError
from paceline.evaluate.metrics import DraftCounters
from paceline.evaluate.prompts import Chat, Questions
from paceline.evaluate.served import Servers, measure_served, measure_servers
from paceline.forms.compact import write_compact
from paceline.forms.config_json import Serving
from paceline.forms.source import open_draft
from paceline.forms.write import write_draft
from paceline.recipe import EvaluateOptions
from paceline.target.spec import Target, TargetReference
from tests.forms.making import change_config, config_for, draft_for
from tests.targets import save_target

K = 2


class NextTurn:
    """Makes a second prompt out of the first and its answer."""

    def go_on(self, chat, turn, answer, end_ids):
        if len(chat.prompts) == turn + 1 < len(chat.turns):
            chat.prompts.append([*chat.prompts[turn], *answer, 99])


class Scripted:
    """Answers a prompt with its first token, three times; `odd` prompts with another ending.

    Every request takes one draft for each token of the prompt, of which one token is accepted.
    """

    describe = {"name": "scripted"}

    def __init__(self, num_draft_tokens=K, odd=(), short=0):
        self.k, self.odd, self.short = num_draft_tokens, odd, short
        self.asked = []
        self.closed = False
        self.total = DraftCounters(7, 7 * K, 5, (4, 1) if num_draft_tokens else (), 50)

    def answer(self, prompts, at_a_time):
        self.asked.append((len(prompts), at_a_time))
        answers = [[p[0], p[0], 77 if p[0] in self.odd else p[0]] for p in prompts]
        for prompt in prompts:
            n, t = len(prompt), self.total
            self.total = DraftCounters(
                t.drafts + n,
                t.draft_tokens + K * n - self.short,
                t.accepted + n,
                (t.per_position[0] + n, t.per_position[1]) if self.k else (),
                t.generated + 3,
            )
        return answers

    def counters(self, generated=0):
        assert self.total.generated >= generated
        return self.total

    def gap(self, prompt, own, other):
        assert (own, other) == (prompt[0], 77)
        return 1e-5 if prompt[0] == 20 else 0.5

    def close(self):
        self.closed = True


class Late(Scripted):
    """Counts only while somebody waits for it, as a server that counts after it has answered."""

    def __init__(self):
        super().__init__()
        self.counted = self.total

    def counters(self, generated=0):
        if generated > self.counted.generated:
            self.counted = super().counters(generated)
        return self.counted


def questions():
    chats = [
        Chat("a/0", "a/0", "a", [[10]], ["x", "y"]),
        Chat("b/0", "b/0", "b", [[20, 21]], ["x"]),
        Chat("a/1", "a/1", "a", [[30, 31, 32]], ["x"]),
        # A second sample of the conversation before it.
        Chat("a/1b", "a/1", "a", [[40]], ["x"]),
    ]
    return Questions(chats, {1}, NextTurn())


def measured(plain, drafting, **options):
    servers = Servers(plain and (lambda: plain), drafting)
    options = EvaluateOptions(mode="served", bootstrap=100, **options)
    return measure_servers(options, questions(), servers)


def test_one_at_a_time_counts_are_of_conversations():
    plain, drafting = Scripted(0), Scripted()
    found = measured(plain, {K: lambda: drafting})
    pooled, sources = (found.result["results"][str(K)][n] for n in ("pooled", "sources"))
    # The second turn's prompt holds the first, its answer and one token more: 1 + 3 + 1.
    assert pooled["verify_steps"] == (1 + 5) + 2 + 3 + 1
    assert pooled["acceptance_length"] == 2.0 and pooled["interval"] == [2.0, 2.0]
    assert {name: s["verify_steps"] for name, s in sources.items()} == {"a": 10, "b": 2}
    assert pooled["conversations"] == 3
    rows = {row["conversation"]: row["verify_steps"] for row in found.conversations}
    assert rows == {"a/0": 6, "b/0": 2, "a/1": 4}
    # The warm-up came first and is in no figure.
    assert plain.asked == drafting.asked == [(1, 1)] * 6
    assert plain.closed and drafting.closed


def test_a_server_that_counts_late_is_waited_for():
    late, prompt = (measured(None, {K: kind}).result["results"] for kind in (Late, Scripted))
    assert late == prompt


def test_several_at_a_time_are_counted_by_source_without_intervals():
    drafting = Scripted()
    found = measured(Scripted(0), {K: lambda: drafting}, batch_sizes=[4, 2])
    pooled, sources = (found.result["results"][str(K)][n] for n in ("pooled", "sources"))
    assert (pooled["verify_steps"], pooled["conversations"]) == (12, 3)
    assert pooled["interval"] is None
    assert {name: s["conversations"] for name, s in sources.items()} == {"a": 2, "b": 1}
    # Warm-up; source a, its second turns; source b; all prompts again, two at a time.
    assert drafting.asked == [(1, 1), (3, 4), (1, 4), (1, 4), (5, 2)]
    assert found.result["speed"][str(K)].keys() == {"4", "2"}


def test_all_servers_answer_the_prompts_that_the_target_made():
    """An odd first answer does not change the second prompt."""
    drafting = Scripted(odd=(10, 20))
    found = measured(Scripted(0), {K: lambda: drafting})
    lossless = found.result["lossless"]
    assert (lossless["equal_outputs"], lossless["outputs"], lossless["near_ties"]) == (2, 5, 1)
    assert [(d["conversation"], d["turn"], d["gap"]) for d in lossless["differences"]] == [
        ("a/0", 0, 0.5),
        ("a/0", 1, 0.5),
        ("b/0", 0, 1e-5),
    ]
    assert found.result["results"][str(K)]["pooled"]["verify_steps"] == 12
    answers = {(a["conversation"], a["turn"], a["num_draft_tokens"]): a for a in found.answers}
    assert len(answers) == 10
    assert answers["a/0", 0, 0]["ids"] == [10, 10, 10]
    assert answers["a/0", 0, K]["ids"] == [10, 10, 77]


def test_a_server_that_drafts_fewer_tokens_is_told():
    found = measured(Scripted(0), {K: lambda: Scripted(short=1)})
    assert found.result["short_drafts"] == {str(K): 5}
    assert measured(None, {K: Scripted}).result["short_drafts"] == {}


def test_without_the_target_alone_there_is_no_comparison():
    result = measured(None, {None: Scripted}).result
    assert list(result["results"]) == [str(K)]
    assert "lossless" not in result
    assert result["speed"][str(K)]["1"]["ratio"] is None


def test_a_server_without_a_draft_cannot_be_measured():
    with pytest.raises(EvaluationError, match="http://here/v1 counts no drafts"):
        measured(None, {None: lambda: Scripted(0)}, server="http://here/v1")


LAYERS = (2, 4, 7)
TOP, NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return Target(TargetReference(str(save_target(folder, vocab_size=260))))


@pytest.fixture(scope="module")
def draft(target):
    config = config_for(
        hidden_size=32, target_hidden_size=32, vocab_size=260, head_dim=8, aux_layers=LAYERS
    )
    return draft_for(target, config)


@pytest.fixture
def started(monkeypatch):
    """The folder and the config of each draft that vLLM is started with."""
    found = []

    class Started(Scripted):
        def __init__(self, arguments, folder, num_draft_tokens, max_new_tokens, end_ids):
            super().__init__(num_draft_tokens)
            found.append((folder, json.loads((folder / "config.json").read_text())))

    monkeypatch.setattr("paceline.evaluate.served_vllm.InProcess", Started)
    monkeypatch.setattr("paceline.evaluate.served_vllm.installed_version", lambda: "0.32.0")
    return found


def serve(target, folder, form=None):
    """Measure the draft of a folder, on a question of a file beside it."""
    prompts = folder.parent / "one.jsonl"
    prompts.write_text(json.dumps({"prompt": "red"}))
    options = EvaluateOptions(
        mode="served",
        prompts=[str(prompts)],
        num_draft_tokens=[K],
        compare_plain=False,
        bootstrap=100,
    )
    measure_served(options, open_draft(folder, form), target, torch.float32)


def _compact(folder: Path, draft, target):
    write_compact(folder, draft, target, None, None)


def _sglang(folder: Path, draft, target):
    write_draft(folder, draft, "sglang", target, Serving("float32"))


def _unmarked_sglang(folder: Path, draft, target):
    """As others write it: only the ids that SGLang reads, and nothing that says so."""
    _sglang(folder, draft, target)
    change_config(folder, lambda values: [values.pop(name) for name in (TOP, "paceline")])


def _nested_ids(folder: Path, draft, target):
    """As others write it for vLLM: its ids in the key that its V1 runner of 0.22 on reads alone."""
    write_draft(folder, draft, "vllm", target, Serving("float32"))
    change_config(folder, lambda values: values.update({NESTED: {TOP: values.pop(TOP)}}))
    change_config(folder, lambda values: values.pop("paceline"))


@pytest.mark.parametrize(
    ("make", "form"),
    [
        (_compact, None),
        (_sglang, None),
        (_sglang, "sglang"),
        (_unmarked_sglang, "sglang"),
        (_nested_ids, "vllm"),
    ],
)
def test_what_vllm_would_not_read_as_it_was_meant_is_rewritten(
    target, draft, started, tmp_path, make, form
):
    make(tmp_path / "draft", draft, target)
    serve(target, tmp_path / "draft", form)
    ((folder, config),) = started
    assert folder != tmp_path / "draft"
    assert config[TOP] == list(LAYERS) and NESTED not in config
    assert config["paceline"]["form"] == "vllm"


@pytest.mark.parametrize("form", ["vllm", "speculators"])
def test_what_vllm_reads_is_served_as_it_lies_there(target, draft, started, tmp_path, form):
    write_draft(tmp_path / "draft", draft, form, target, Serving("float32"))
    serve(target, tmp_path / "draft")
    assert [folder for folder, _ in started] == [tmp_path / "draft"]
