"""`generate` with transformers: the target's own answers, exact, in any batch; what it hands on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import paceline
from paceline.answers.engine import LENGTH, STOP, Answer, Prompt, Sampling
from paceline.answers.transformers_engine import TransformersAnswers
from paceline.cli.generate import show
from paceline.dataset import TokenDataset
from paceline.errors import DataError, UsageError
from paceline.prepare.answering import JOURNAL_NAME
from paceline.prepare.journal import Journal
from paceline.prepare.parts import counts_of
from paceline.target.model import load_model
from paceline.target.spec import Target, TargetReference
from tests.cli.consoles import text_console
from tests.conftest import SMOLLM2
from tests.prepare import toys
from tests.prepare.toys import chat, chatml_target, write_rows
from tests.targets import save_long_rope, save_model

QUESTIONS = ("Name three colours.", "Say hi.", "What is 2 + 2?")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatml_target(tmp_path_factory.mktemp("target"), toys.CHATML_PROMPT)


class Generated:
    """A run of `generate` over rows, and what it wrote."""

    def __init__(self, folder: Path, target: Path | str, rows: list[Any], **options: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.data = write_rows(folder / "rows.jsonl", rows)
        self.folder = folder / "generated"
        defaults = {"max_new_tokens": 8, "dtype": "float32", "device": "cpu"}
        self.result = paceline.generate(
            target=str(target), data=[self.data], out=str(self.folder), **(defaults | options)
        )
        parts = sorted(self.folder.glob("answers/*.jsonl"))
        self.rows = [json.loads(line) for part in parts for line in part.open()]


def greedy_alone(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """transformers' own greedy tokens for one prompt, end of turn ignored."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def test_greedy_answers_are_the_targets_own_on_the_real_model(
    tmp_path: Path, smollm2: Target
) -> None:
    rows = [chat(question) for question in QUESTIONS] + [chat("Say hi. " * 20)]
    done = Generated(tmp_path, SMOLLM2, rows, max_new_tokens=14, record_past_end=3, batch_size=3)
    model = load_model(smollm2, torch.float32, "cpu")
    ended = 0
    for row, given in zip(done.rows, rows, strict=True):
        prompt, response = row["prompt_ids"], row["response_ids"]
        rendered = smollm2.tokenizer.apply_chat_template(
            given["messages"], tokenize=False, add_generation_prompt=True
        )
        assert prompt == smollm2.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        assert response == greedy_alone(model, prompt, len(response))
        said = response[: len(response) - row["num_past_end"]]
        assert row["num_past_end"] == 3
        assert row["finished"] == (said[-1] == 2) == (row["finish_reason"] == "stop")
        assert 2 not in said[:-1]
        assert len(said) == 14 or row["finished"]
        words = smollm2.tokenizer.decode(said[:-1] if row["finished"] else said)
        assert row["messages"][-1] == {"role": "assistant", "content": words}
        ended += row["finished"]
    assert done.result["finish_reasons"]["stop"] == ended
    assert 0 < ended < len(rows)  # both ways of ending were seen


def test_batches_change_nothing(tmp_path: Path, target: Path) -> None:
    rows = [chat(chr(97 + i) * (1 + 7 * i % 23), id=f"r{i}") for i in range(20)]
    one, many = (
        Generated(tmp_path / str(size), target, rows, batch_size=size).rows for size in (1, 7)
    )
    assert [row["id"] for row in one] == [f"r{i}" for i in range(20)]
    assert one == many
    assert len({tuple(row["response_ids"]) for row in one}) > 5


def test_batches_of_a_hybrid_target_let_go_of_finished_answers(tmp_path: Path) -> None:
    """Layers of linear attention keep states of another kind (Qwen3-Next, Qwen3.5)."""
    target = Target(TargetReference(str(save_model(tmp_path, "qwen3_next"))))
    model = load_model(target, torch.float32, "cpu")
    generator = np.random.default_rng(0)
    prompts = [Prompt(str(i), generator.integers(5, 300, 5 + 3 * i).tolist()) for i in range(8)]
    # Many ends, so that answers are of many lengths.
    sampling = Sampling(max_new_tokens=12, end_ids=tuple(range(0, 320, 5)))
    answers = []
    for size in (1, 8):
        found: list[Answer] = []
        TransformersAnswers(model, size).answer(prompts, sampling, found.append)
        answers.append({answer.key: answer.ids for answer in found})
    assert answers[0] == answers[1]
    assert len(set(map(len, answers[0].values()))) > 2


def test_batches_have_no_part_in_the_rotary_frequencies_of_a_longrope_target(
    tmp_path: Path,
) -> None:
    """Prompts and answers on both sides of the length from which these are others."""
    target = save_long_rope(tmp_path / "target", original=64)
    rows = [{"prompt": "x" * length} for length in (8, 30, 34, 38, 50, 90)]
    answers = []
    for name, batch_size in (("a", 1), ("b", 6)):
        (tmp_path / name).mkdir()
        done = Generated(tmp_path / name, target, rows, max_new_tokens=16, batch_size=batch_size)
        lengths = [len(row["prompt_ids"]) for row in done.rows]
        assert min(lengths) + 16 < 64 < max(lengths)
        answers.append([row["response_ids"] for row in done.rows])
    assert answers[0] == answers[1]


def test_turns_are_answered_one_after_the_other_and_old_answers_go(
    tmp_path: Path, target: Path
) -> None:
    forms = [
        chat("q1", "OLD1", "q2", "OLD2", "q3"),
        {"turns": ["q1", "q2", "q3"]},
        {"conversations": [{"from": "human", "value": "q1"}, {"from": "gpt", "value": "OLD"}]},
        {"prompt": "q1"},
        {"turns": '["q1", "q2", "q3"]'},
    ]
    done = Generated(tmp_path, target, forms, max_new_tokens=100)
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert done.rows[0]["messages"] == done.rows[1]["messages"] == done.rows[4]["messages"]
    assert done.rows[2]["messages"] == done.rows[3]["messages"] == done.rows[0]["messages"][:2]
    row = done.rows[0]
    assert "OLD" not in json.dumps(row)
    answers = row.get("answers", [row])
    # Every prompt is the template's rendering of what was said so far.
    for number, answer in enumerate(answers):
        history = row["messages"][: 2 * number + 1]
        text = tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
        assert answer["prompt_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
        alone = greedy_alone(model, answer["prompt_ids"], len(answer["response_ids"]))
        assert answer["response_ids"] == alone
    # Nobody goes on talking to half an answer.
    reasons = [answer["finish_reason"] for answer in answers]
    assert reasons[:-1] == ["stop"] * (len(reasons) - 1)
    assert len(reasons) == 3 or reasons[-1] == "length"
    assert len(row["messages"]) == 2 * len(reasons)


class EchoEngine:
    """Answers with the last byte of the question, twice, and the end."""

    def __init__(self, end: int, stops: bool = True) -> None:
        self.describe = {"name": "echo"}
        self.end, self.stops = end, stops
        self.prompts: list[Prompt] = []

    def answer(self, prompts: Any, sampling: Sampling, on_answer: Any) -> None:
        for prompt in prompts:
            self.prompts.append(prompt)
            last = prompt.ids[: prompt.ids.index(self.end)][-1]
            ids = [last, last, self.end] if self.stops else [last, last]
            on_answer(Answer(prompt.key, ids, STOP if self.stops else LENGTH))

    def close(self) -> None:
        pass


@pytest.fixture
def echo(target: Path, monkeypatch: pytest.MonkeyPatch) -> EchoEngine:
    engine = EchoEngine(AutoTokenizer.from_pretrained(target).eos_token_id)
    monkeypatch.setattr("paceline.answers.engine._ENGINES", {"transformers": f"{__name__}:made"})
    monkeypatch.setattr(f"{__name__}.made", lambda options, target: engine, raising=False)
    return engine


def test_conversations_of_several_answers_reach_prepare_whole(
    tmp_path: Path, target: Path, echo: EchoEngine
) -> None:
    done = Generated(tmp_path, target, [chat("q1", "OLD", "q2", "OLD", "q3", id="c")])
    [row] = done.rows
    assert [m["content"] for m in row["messages"][1::2]] == ["11"] * 3
    assert len(row["answers"]) == 3
    assert done.result["answers"] == done.result["exact_answers"] == 3
    result = paceline.prepare(
        target=str(target), data=[str(done.folder)], out=str(tmp_path / "out"), heldout_share=0.0
    )
    [sample] = TokenDataset(tmp_path / "out")
    # The template renders a stable history and the ids come back the same: one sample.
    assert result["mask_methods"] == {"given_ids": 1}
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert sample.loss_mask.sum() == 9
    assert tokenizer.decode(sample.input_ids[sample.loss_mask].tolist()) == "11<|im_end|>" * 3


def test_what_the_split_goes_by_stays_with_the_data(
    tmp_path: Path, target: Path, echo: EchoEngine
) -> None:
    rows = [
        *(chat(f"q{i}", "OLD", conversation_id=i // 2) for i in range(30)),
        chat("first", "OLD", split="heldout"),
        chat("second", "OLD", split="train"),
    ]
    done = Generated(tmp_path, target, rows)
    splits = []
    for name, source in (("before", done.data), ("after", str(done.folder))):
        out = str(tmp_path / name)
        paceline.prepare(target=str(target), data=[source], out=out, heldout_share=0.4)
        splits.append([(s.split, s.conversation_id) for s in TokenDataset(out)])
    before, after = splits
    assert before[:30] == after[:30]
    assert {split for split, _ in before[:30]} == {"train", "heldout"}
    assert [split for split, _ in before[30:]] == [split for split, _ in after[30:]]
    assert [split for split, _ in after[30:]] == ["heldout", "train"]


def test_calls_of_tools_in_the_data_stay(tmp_path: Path, echo: EchoEngine) -> None:
    target = chatml_target(tmp_path / "t", toys.TOOLS_ITEMS)
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "OLD"},
    ]
    done = Generated(tmp_path / "g", target, [{"messages": messages}])
    [row] = done.rows
    assert row["messages"][1]["tool_calls"] == [call]
    assert row["messages"][3]["content"] == "qq"
    assert len(echo.prompts) == 1


CUT_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1'}}


@pytest.mark.parametrize(
    ("bad", "detail"),
    [
        ({"content": None, "tool_calls": [CUT_CALL]}, "arguments are not JSON"),
        ({"content": None}, "content is None, not text"),
    ],
)
def test_an_answer_that_is_none_costs_its_row_alone(
    tmp_path: Path, target: Path, echo: EchoEngine, bad: dict[str, Any], detail: str
) -> None:
    def answer(prompts: Any, sampling: Sampling, on_answer: Any) -> None:
        for prompt in prompts:
            said = bad if prompt.messages[-1]["content"] == "odd" else {"content": "fine"}
            message = {"role": "assistant"} | said
            on_answer(Answer(prompt.key, None, STOP, message=message))

    echo.answer = answer
    rows = [chat("q0", id="a"), chat("odd", id="b"), chat("q2", "OLD", "odd", id="c")]
    done = Generated(tmp_path, target, rows)
    # Answers that were written before it stay.
    assert [(row["id"], len(row["messages"])) for row in done.rows] == [("a", 2), ("c", 2)]
    assert done.result["skipped"] == {"no_answer": 1}
    record = json.loads((done.folder / "answers" / "00000.json").read_text())
    assert detail in record["skipped"][0]["detail"]


def test_half_an_answer_ends_a_conversation(tmp_path: Path, target: Path, echo: EchoEngine) -> None:
    echo.stops = False
    [row] = Generated(tmp_path, target, [chat("q1", "OLD", "q2")]).rows
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
    assert (row["finished"], row["finish_reason"]) == (False, "length")
    assert row["response_ids"] == [row["response_ids"][0]] * 2


def test_turns_that_got_no_answer_are_counted_and_told(
    tmp_path: Path, target: Path, echo: EchoEngine
) -> None:
    rows = [chat("q"), chat("q1", "OLD", "x" * 600, "OLD", "q3"), chat("x" * 600)]
    result = Generated(tmp_path, target, rows).result
    # The last row has no answer at all: it is a skipped one.
    assert (result["answers"], result["unanswered_turns"]) == (2, 2)
    for unanswered, lines in ((2, ["turns not answered 2"]), (0, [])):
        console, text = text_console()
        show(result | {"unanswered_turns": unanswered}, console)
        told = [" ".join(line.split()) for line in text().splitlines()]
        assert [line for line in told if "not answered" in line] == lines


def test_rows_that_cannot_be_answered_are_counted(
    tmp_path: Path, target: Path, echo: EchoEngine
) -> None:
    rows = [
        chat("q", id="good"),
        {"messages": [{"role": "system", "content": "s"}]},
        {"nothing": 1},
        chat("x" * 600),
        {"messages": [{"role": "narrator", "content": "s"}]},
    ]
    done = Generated(tmp_path, target, rows)
    assert [row["id"] for row in done.rows] == ["good"]
    assert done.result["rows"] == 5
    assert done.result["skipped"] == {
        "no_user_turn": 1,
        "missing_key": 1,
        "unknown_role": 1,
        "no_answer": 1,
    }
    record = json.loads((done.folder / "answers" / "00000.json").read_text())
    [too_long] = [entry for entry in record["skipped"] if entry["reason"] == "no_answer"]
    assert too_long["row"] == 4
    assert "the target's context leaves room for 504" in too_long["detail"]


def test_no_row_that_can_be_answered_is_an_error(
    tmp_path: Path, target: Path, echo: EchoEngine
) -> None:
    with pytest.raises(DataError, match="none of the 1 rows could be answered"):
        Generated(tmp_path, target, [{"nothing": 1}])


def test_variables_and_system_prompt_are_the_same_in_prepare(
    tmp_path: Path, echo: EchoEngine
) -> None:
    target = chatml_target(tmp_path / "t", "{{ mood }}" + toys.CHATML_PROMPT)
    shaping = {"chat_template_kwargs": {"mood": "glad"}, "system_prompt": "S"}
    done = Generated(tmp_path / "g", target, [chat("q")], **shaping)
    tokenizer = AutoTokenizer.from_pretrained(target)
    start = "glad<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq"
    assert tokenizer.decode(done.rows[0]["prompt_ids"]).startswith(start)
    prepare = {"target": str(target), "data": [str(done.folder)]}
    result = paceline.prepare(**prepare, out=str(tmp_path / "a"))
    assert result["chat_template_kwargs"] == {"mood": "glad"}
    assert result["system_prompt"] == "S"
    with pytest.raises(UsageError, match=r"chat_template_kwargs\.mood: was 'glad', now 'sad'"):
        paceline.prepare(**prepare, out=str(tmp_path / "b"), chat_template_kwargs={"mood": "sad"})
    other = chatml_target(tmp_path / "other", toys.CHATML_GEN)
    with pytest.raises(UsageError, match="written with other settings"):
        paceline.prepare(**(prepare | {"target": str(other)}), out=str(tmp_path / "c"))


def test_a_folder_is_known_however_it_is_named(
    tmp_path: Path, target: Path, echo: EchoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    Generated(tmp_path / "mine", target, [chat("q")], system_prompt="S")
    for number, name in enumerate((f"{tmp_path}/mine/gen*", "~/mine/generated", "~/mine/gen*")):
        prepare = {"target": str(target), "data": [name], "out": str(tmp_path / f"out{number}")}
        with pytest.raises(UsageError, match="system_prompt: was 'S', now 'other'"):
            paceline.prepare(**prepare, system_prompt="other")
        assert paceline.prepare(**prepare)["system_prompt"] == "S"


def test_folders_that_disagree_are_refused_in_any_order(
    tmp_path: Path, target: Path, echo: EchoEngine
) -> None:
    with_system = Generated(tmp_path / "a", target, [chat("q")], system_prompt="S").folder
    without = Generated(tmp_path / "b", target, [chat("q")]).folder
    for folders in ([with_system, without], [without, with_system]):
        with pytest.raises(UsageError, match="folder before it:\n  system_prompt: was"):
            paceline.prepare(
                target=str(target), data=[str(f) for f in folders], out=str(tmp_path / "out")
            )


def test_sampled_answers_go_by_their_own_seeds(tmp_path: Path, target: Path) -> None:
    rows = [chat(f"q{i}") for i in range(12)]
    sampled = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 12}
    runs = [
        Generated(tmp_path / name, target, rows, **(sampled | options)).rows
        for name, options in (
            ("a", {"batch_size": 12}),
            ("b", {"batch_size": 5}),
            ("c", {"seed": 1}),
        )
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_sampling_follows_the_targets_distribution(target: Path) -> None:
    """10,000 first tokens against the softmax: temperature and nucleus as their definitions say."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    prompt = [5, 6, 7]
    temperature, top_p, draws = 2.0, 0.6, 10_000
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1].double().numpy()
    exact = np.exp(logits / temperature - (logits / temperature).max())
    exact /= exact.sum()
    nucleus: list[int] = []
    for token in np.argsort(-exact):
        nucleus.append(int(token))
        if exact[nucleus].sum() >= top_p:
            break
    wanted = np.zeros_like(exact)
    wanted[nucleus] = exact[nucleus] / exact[nucleus].sum()
    answers: list[int] = []
    TransformersAnswers(model, 5000).answer(
        [Prompt(str(i), prompt, seed=i) for i in range(draws)],
        Sampling(1, (), temperature=temperature, top_p=top_p),
        lambda answer: answers.extend(answer.ids),
    )
    found = np.bincount(answers, minlength=len(wanted)) / draws
    assert set(np.flatnonzero(found)) <= set(nucleus)
    # Four standard deviations of the largest frequency.
    assert np.abs(found - wanted).max() < 4 * np.sqrt(0.25 / draws)


def test_a_journal_with_a_broken_last_line_is_taken_up(
    tmp_path: Path, target: Path, echo: EchoEngine
) -> None:
    rows = [chat(f"q{i}") for i in range(4)]
    done = Generated(tmp_path / "a", target, rows)
    folder = tmp_path / "b" / "generated"
    with pytest.raises(ZeroDivisionError):
        echo.answer = lambda *_: 1 // 0
        Generated(tmp_path / "b", target, rows)
    answer = {"ids": [7, echo.end], "finish_reason": "stop", "num_past_end": 0}
    rest = {"message": None, "prompt_ids": None, "refusal": None}
    with Journal(folder / JOURNAL_NAME, 0) as journal:
        journal.append({"key": "2.1", **answer, **rest})
    with (folder / JOURNAL_NAME).open("ab") as file:
        file.write(b'{"part": 0, "key": "3.1", "ids": [7')
    del echo.answer
    echo.prompts.clear()
    again = Generated(tmp_path / "b", target, rows)
    # The answer in the journal was not asked for again; the broken one was.
    assert [prompt.key for prompt in echo.prompts] == ["0.1", "1.1", "3.1"]
    assert again.rows[2]["response_ids"] == [7, echo.end]
    assert [again.rows[i] for i in (0, 1, 3)] == [done.rows[i] for i in (0, 1, 3)]


def test_answers_are_counted_as_they_are_written(
    tmp_path: Path, target: Path, echo: EchoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read those of a million rows again would take minutes."""
    read, open_file = [], Path.open

    def look(path: Path, *how: Any, **more: Any) -> Any:
        read.append(path.name)
        return open_file(path, *how, **more)

    monkeypatch.setattr(Path, "open", look)
    done = Generated(tmp_path, target, [chat("q", "a", "and?", "b"), chat("r", "c")])
    # For the fingerprint, and by this test.
    assert read.count("00000.jsonl") == 2
    (part,) = done.folder.glob("answers/*.jsonl")
    record = json.loads(part.with_suffix(".json").read_text())
    counts = record.pop("counts")
    assert {name: done.result[name] for name in counts} == counts
    assert (counts["answered"], counts["exact_answers"]) == (2, 3)
    assert counts_of(part, record) == counts  # as an earlier version left it


def test_a_finished_folder_is_left_alone(tmp_path: Path, target: Path, echo: EchoEngine) -> None:
    first = Generated(tmp_path, target, [chat("q")])
    asked = len(echo.prompts)
    assert Generated(tmp_path, target, [chat("q")]).result == first.result
    assert len(echo.prompts) == asked
