"""Regenerated answers are the model's own greedy tokens, survive being text, and outlive interruptions."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trainer.data import load_corpus, load_tokenizer
from trainer.errors import Refusal
from trainer.prompts import Conversation, read_prompts
from trainer.regenerate import main
from trainer.regenerate_local import differs, fault, greedy
from trainer.rendering import Conversation as Rendering
from trainer.rendering import Renderer

ROOT = Path(__file__).parents[2]
REAL = ROOT / ".sandbox/models/smollm2-135m-instruct"
EXAMPLES = ROOT / "remote_payload/examples"
START, END = 1, 2
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
LIMIT = 12
PAIRS = ["qu", "vf", "zo", "xm", "ky", "jw", "vr", "ng"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama over letters; "qu" is one token too, so q and u written apart do not survive as text."""
    path = tmp_path_factory.mktemp("model")
    letters = ["<p>", "<s>", "<e>", "<x>", *string.ascii_lowercase, "Ġ", "Ċ", *PAIRS]
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(letters)}, [tuple(p) for p in PAIRS]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<p>", bos_token="<s>", eos_token="<e>", unk_token="<x>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=len(letters),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
        tie_word_embeddings=False,
        bos_token_id=START,
        eos_token_id=END,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 prompts of different lengths, every fourth with a second turn."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    draw = torch.Generator().manual_seed(6)
    lines = []
    for number in range(40):
        turns = [
            "".join(
                string.ascii_lowercase[i] for i in torch.randint(0, 16, (3 + number % 7,), generator=draw)
            )
            for _ in range(2 if number % 4 == 0 else 1)
        ]
        lines.append(json.dumps({"id": f"p{number}", "turns": turns}))
    path.write_text("\n".join(lines) + "\n")
    return path


def run(folder: Path, prompts: Path, out: Path, *more: str) -> int:
    options = ["--model", str(folder), "--prompts", str(prompts), "--out", str(out)]
    return main([*options, "--max-new-tokens", str(LIMIT), "--batch", "16", *more])


def render(tokenizer, messages: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    (document,) = Renderer(tokenizer).documents(Rendering("x", messages))
    return torch.tensor(document.ids), torch.tensor(document.mask)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


@pytest.fixture(scope="module")
def made(folder, prompts, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("out") / "out.jsonl"
    assert run(folder, prompts, out) == 0
    return out


def test_a_padded_batch_gives_what_each_prompt_gives_alone(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    batch = [torch.randint(4, 30, (n,), generator=draw).tolist() for n in (3, 11, 1, 7, 19, 2)]
    answers = greedy(model, batch, LIMIT, {END})
    for prompt, answer in zip(batch, answers, strict=True):
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=LIMIT, do_sample=False)
        assert answer == alone[0, len(prompt) :].tolist()
    assert len({len(answer) for answer in answers}) > 1, "rows must leave the batch at different times"


def test_every_kept_answer_is_the_models_own_after_going_through_text(folder, made):
    tokenizer, model = load_tokenizer(str(folder)), AutoModelForCausalLM.from_pretrained(folder)
    finishes = set()
    for item in lines_of(made):
        messages = item["conversations"]
        for turn in range(1, len(messages), 2):
            text = tokenizer.apply_chat_template(messages[:turn], tokenize=False, add_generation_prompt=True)
            ids, mask = render(tokenizer, messages[: turn + 1])
            prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
            alone = model.generate(torch.tensor([prompt]), max_new_tokens=LIMIT, do_sample=False)[0]
            answer = alone[len(prompt) :].tolist()
            finishes.add(messages[turn].get("finish", "stop"))
            assert (answer[-1] == END) == ("finish" not in messages[turn])
            assert ids[mask].tolist()[-len(answer) :] == answer
    assert finishes == {"stop", "length"}


def test_nothing_is_lost_between_kept_and_dropped(prompts, made):
    kept = [item["id"] for item in lines_of(made)]
    dropped = lines_of(made.with_name("out.jsonl.dropped.jsonl"))
    assert sorted(kept + [item["id"] for item in dropped]) == sorted(p["id"] for p in lines_of(prompts))
    assert any("other tokens" in item["reason"] for item in dropped)
    assert len(kept) > 10


def test_an_interrupted_run_continues_to_the_same_file(folder, prompts, made, tmp_path):
    out = tmp_path / "out.jsonl"
    whole = made.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(whole[:3]) + whole[3][:20])  # killed inside a write of the first batch
    assert run(folder, prompts, out, "--resume") == 0
    assert out.read_bytes() == made.read_bytes()


def test_a_finished_run_is_left_as_it_is(folder, prompts, made, capsys):
    before = made.read_bytes()
    assert run(folder, prompts, made, "--resume") == 0
    assert made.read_bytes() == before
    assert "tokens/s" not in capsys.readouterr().err


def test_keep_stops_at_the_number_asked_for(folder, prompts, made, tmp_path):
    assert run(folder, prompts, tmp_path / "out.jsonl", "--keep", "5") == 0
    assert lines_of(tmp_path / "out.jsonl") == lines_of(made)[:5]


def test_too_few_prompts_for_keep_are_said_to_be_too_few(folder, prompts, tmp_path, capsys):
    assert run(folder, prompts, tmp_path / "out.jsonl", "--keep", "99") == 2
    assert "of the 99 conversations asked for" in capsys.readouterr().err


def test_a_folder_that_is_missing_is_one_line(folder, prompts, tmp_path, capsys):
    assert run(folder, prompts, tmp_path / "absent" / "out.jsonl") == 2
    assert run(tmp_path / "absent", prompts, tmp_path / "out.jsonl") == 2
    err = capsys.readouterr().err
    assert err.count("refused: ") == 2 and "Traceback" not in err


def test_a_line_separator_inside_a_text_does_not_end_its_line(folder, tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text('{"id": "a", "turns": ["x\u2028y\x85z"]}\n', encoding="utf-8")
    assert read_prompts(path)[0].turns == [[{"role": "user", "content": "x\u2028y\x85z"}]]
    turns = '[{"role": "user", "content": "a\u2028b"}, {"role": "assistant", "content": "c"}]'
    path.write_text(f'{{"id": "a", "conversations": {turns}}}\n', encoding="utf-8")
    corpus_tokenizer = load_tokenizer(str(folder))
    with pytest.raises(Refusal, match="do not spell"):  # read whole; this alphabet just lacks the character
        load_corpus(path, corpus_tokenizer, max_document=64)


def answered(tokenizer, *answers: list[int]) -> Conversation:
    """A conversation whose answers are given."""
    one = Conversation("x", [[{"role": "user", "content": "ab"}]] * len(answers))
    for turn, answer in enumerate(answers):
        one.messages += one.turns[turn]
        text = tokenizer.apply_chat_template(one.messages, tokenize=False, add_generation_prompt=True)
        one.seen.append((tokenizer(text, add_special_tokens=False)["input_ids"], answer))
        body = answer[:-1] if answer[-1] == END else answer
        one.messages.append({"role": "assistant", "content": tokenizer.decode(body)})
        if answer[-1] != END:
            one.messages[-1]["finish"] = "length"
    return one


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([[5, 6, 7, END]], None),
        ([[5, 6, 7, 8]], None),
        ([[5, 6, END], [9, 9, END]], None),
        ([[END]], "empty answer"),
        ([[5, END], [END]], "empty answer"),
        ([[5, 3, 6, END]], "special token inside an answer"),
        ([[*range(5, 15)] * 4 + [END]], "repeats itself"),
        ([[20, 24, END]], "its text gives other tokens back"),
    ],
)
def test_faults_are_named(folder, answers, reason):
    tokenizer = load_tokenizer(str(folder))
    assert fault(tokenizer, answered(tokenizer, *answers)) == reason


def test_verification_finds_a_token_that_a_single_pass_would_not_choose(folder):
    tokenizer, model = load_tokenizer(str(folder)), AutoModelForCausalLM.from_pretrained(folder)
    one = answered(tokenizer, [5, END])
    prompt = one.seen[0][0]
    answer = greedy(model, [prompt], 6, {END})[0]
    one.seen[0] = (prompt, answer)
    assert not differs(model, one)
    one.seen[0] = (prompt, [*answer[:-1], answer[-1] ^ 1])
    assert differs(model, one)


def test_the_end_token_of_a_cut_turn_is_not_supervised(folder):
    tokenizer = load_tokenizer(str(folder))
    for cut in (False, True):
        messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cde"}]
        messages += [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "fg"}]
        if cut:
            messages[1]["finish"] = "length"
        ids, mask = render(tokenizer, messages)
        assert tokenizer.decode(ids[mask]) == ("cdefg<e>" if cut else "cde<e>fg<e>")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"id": "a", "turns": ["x"]}\nnot json\n', ":2: not a prompt"),
        ('{"id": "a", "turns": []}\n', ":1: not a prompt"),
        ('{"id": "a", "turns": [3]}\n', ":1: not a prompt"),
        ('{"id": "a", "turns": ["x"]}\n{"id": "a", "turns": ["y"]}\n', ":2: id 'a' is used twice"),
    ],
)
def test_a_bad_prompt_is_one_line_with_its_place(folder, text, reason, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text(text)
    assert run(folder, tmp_path / "prompts.jsonl", tmp_path / "out.jsonl") == 2
    assert f"{tmp_path / 'prompts.jsonl'}{reason}" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_an_existing_output_is_never_overwritten(folder, prompts, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    out.write_text("precious\n")
    assert run(folder, prompts, out) == 2
    assert "pass --resume" in capsys.readouterr().err
    assert run(folder, prompts, out, "--resume") == 2
    assert "was not written by this program" in capsys.readouterr().err
    assert out.read_text() == "precious\n"


@pytest.mark.skipif(not REAL.exists(), reason="the real model is not on this machine")
def test_the_examples_are_the_models_own_words():
    tokenizer, model = (
        load_tokenizer(str(REAL)),
        AutoModelForCausalLM.from_pretrained(REAL, dtype=torch.float32),
    )
    torch.set_num_threads(1)
    heldout = load_corpus(EXAMPLES / "heldout.jsonl", tokenizer, max_document=4096)
    assert len(heldout.documents) == 40 and not heldout.dropped
    for document in heldout.documents[::8]:
        with torch.no_grad():
            best = model(input_ids=document.ids[None]).logits[0].argmax(-1)
        supervised = document.loss_mask.nonzero().flatten()
        assert torch.equal(best[supervised - 1], document.ids[supervised]), document.key


def test_the_examples_are_many_small_and_apart_from_the_held_out_ones():
    train, heldout = lines_of(EXAMPLES / "conversations.jsonl"), lines_of(EXAMPLES / "heldout.jsonl")
    assert len(train) >= 400 and len(heldout) == 40

    def asked(items: list[dict]) -> set[str]:
        return {m["content"] for item in items for m in item["conversations"] if m["role"] == "user"}

    assert not {item["id"] for item in train} & {item["id"] for item in heldout}
    assert not asked(train) & asked(heldout)
    assert sum(path.stat().st_size for path in EXAMPLES.iterdir()) < 700_000
