"""What an openai client gets from `retrain serve RUN`."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest

from retrain.run.reopen import reopen
from retrain.serve import served_model
from retrain.serve.http_app import Access
from retrain.serve.served_model import ServedModel
from tests.serve.test_policy_endpoint import post, user
from tests.waiting import until

openai = pytest.importorskip("openai")

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@contextmanager
def serving(context):
    """The address of an endpoint that answers."""
    with closing(ServedModel(context, Access("127.0.0.1"))) as endpoint:
        thread = threading.Thread(target=endpoint.work)
        thread.start()
        try:
            yield endpoint.url
        finally:
            endpoint.request_stop()
            thread.join()


@pytest.fixture
def context(train):
    found = reopen(train("training.max_steps=1", "eval.problems=0"), (), lambda event, details: None, "sampler")
    yield found
    found.close()


@pytest.fixture
def url(context):
    with serving(context) as address:
        yield address


@pytest.fixture
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def chat(client, **fields):
    return client.chat.completions.create(model="policy", messages=[user("12+34=")], **{"max_tokens": 8} | fields)


def test_a_client_gets_what_its_fields_ask_for(client, context):
    texts = {chat(client, temperature=0).choices[0].message.content for _ in range(8)}
    assert len(texts) == 1, "greedy"
    seeded = [chat(client, seed=7).choices[0].message.content for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert len({chat(client, seed=seed).choices[0].message.content for seed in range(16)}) > 1
    assert len({chat(client).choices[0].message.content for _ in range(16)}) > 1, "without a seed every answer is new"
    assert {chat(client, seed=seed, top_p=1e-6).choices[0].message.content for seed in range(4)} == texts
    several = chat(client, seed=7, n=3)
    assert [one.index for one in several.choices] == [0, 1, 2]
    assert several.choices[0].message.content == seeded[0]
    assert len({one.message.content for one in chat(client, n=16).choices}) > 1
    assert several.usage.prompt_tokens == len(context.chat.prompt("12+34=").ids)
    assert several.usage.total_tokens == several.usage.prompt_tokens + several.usage.completion_tokens


def test_a_stop_string_ends_the_text_in_front_of_it(client, context):
    whole = chat(client, temperature=0, max_tokens=12)
    text = whole.choices[0].message.content
    assert len(text) > 2
    for stop in (text[1], text[2:4], [text[-1] + "never", text[1:3]]):
        first = stop if isinstance(stop, str) else stop[1]
        found = chat(client, temperature=0, max_tokens=12, stop=stop)
        assert found.choices[0].message.content == text[: text.index(first)]
        assert found.choices[0].finish_reason == "stop"
        assert found.usage.completion_tokens < whole.usage.completion_tokens or text.endswith(first)
    cut = chat(client, temperature=0, max_tokens=1)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 1)


def test_log_probs_are_those_of_the_sampled_tokens(client):
    found = chat(client, seed=3, logprobs=True).choices[0]
    tokens = found.logprobs.content
    assert "".join(one.token for one in tokens) == found.message.content
    assert all(one.logprob <= 0 and bytes(one.bytes).decode() == one.token for one in tokens)
    told = client.completions.create(model="policy", prompt="12+34=", max_tokens=8, seed=3, logprobs=0).choices[0]
    assert told.text == found.message.content, "a model without a chat template reads the text itself"
    assert told.logprobs.token_logprobs == [one.logprob for one in tokens]
    assert told.logprobs.tokens == [one.token for one in tokens]


@pytest.mark.parametrize("segment", [1, 2, 32])
def test_a_stream_is_the_whole_answer_in_parts(client, monkeypatch, segment):
    """Wherever the parts end: in front of a stop string, or within it."""
    monkeypatch.setattr(served_model, "_SEGMENT", segment)
    text = chat(client, temperature=0, max_tokens=12).choices[0].message.content
    for fields in ({}, {"stop": text[3:5]}, {"n": 2}):
        whole = chat(client, temperature=0, max_tokens=12, **fields)
        events = [
            *chat(client, temperature=0, max_tokens=12, stream=True, stream_options={"include_usage": True}, **fields)
        ]
        for choice in whole.choices:
            parts = [one for event in events for one in event.choices if one.index == choice.index]
            assert "".join(one.delta.content for one in parts) == choice.message.content
            assert [one.finish_reason for one in parts][-1] == choice.finish_reason
        assert events[-1].choices == []
        assert events[-1].usage == whole.usage
    if segment == 1:
        assert sum(bool(event.choices[0].delta.content) for event in events[:-1]) > 2, "in more than one part"


def test_text_completions_take_several_prompts_and_token_ids(client, context):
    ids = list(context.chat.prompt("5+6=").ids)
    found = client.completions.create(model="policy", prompt=["5+6=", "1+1="], temperature=0, n=2, max_tokens=6)
    assert [one.index for one in found.choices] == [0, 1, 2, 3]
    assert found.choices[0].text == found.choices[1].text
    for prompt in (ids, [ids]):
        again = client.completions.create(model="policy", prompt=prompt, temperature=0, max_tokens=6)
        assert again.choices[0].text == found.choices[0].text


def test_requests_take_turns_whatever_their_size(context, client, url, monkeypatch):
    """Four completions are sampled at a time; a small request that arrives during a large one does not wait for it."""
    monkeypatch.setattr(served_model, "_MOST_SAMPLED", 4)
    monkeypatch.setattr(served_model, "_SEGMENT", 1)
    arrived = []
    choices, sample = served_model._choices, context.sampler.sample
    monkeypatch.setattr(served_model, "_choices", lambda *given: (arrived.append(given), choices(*given))[1])
    ended = []

    def ask(name, **fields):
        answer = client.completions.create(model="policy", prompt="12+34=", seed=3, max_tokens=4, **fields)
        ended.append(name)
        return [choice.text for choice in answer.choices]

    def sample_after_both(*given):
        assert until(lambda: len(arrived) == 2)
        return sample(*given)

    monkeypatch.setattr(context.sampler, "sample", sample_after_both)
    with ThreadPoolExecutor() as threads:
        large = threads.submit(ask, "large", n=100)
        small = threads.submit(ask, "small", n=2)
    assert ended == ["small", "large"]
    assert small.result() == large.result()[:2], "the tokens of a request with a seed depend on the request alone"
    assert len(large.result()) == 100
    status, answer = post(url, TEXT, {"prompt": ["1+1="] * 1025, "n": 2})
    assert (status, answer["error"]["param"], "2048" in answer["error"]["message"]) == (400, "n", True)


def test_the_models_are_one_policy(client):
    assert [one.id for one in client.models.list()] == ["policy"]
    assert client.models.retrieve("policy").id == "policy"
    with pytest.raises(openai.NotFoundError, match="gpt-4o"):
        client.models.retrieve("gpt-4o")
    with pytest.raises(openai.NotFoundError, match="gpt-4o") as refused:
        client.chat.completions.create(model="gpt-4o", messages=[user("1+1=")])
    assert refused.value.body["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "more", "field"),
    [
        (CHAT, {"temperature": "hot"}, "temperature"),
        (CHAT, {"stop": 5}, "stop"),
        (CHAT, {"top_logprobs": 5}, "top_logprobs"),
        (CHAT, {"frequency_penalty": 0.5}, "frequency_penalty"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"min_p": 0.1}, "min_p"),
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": None}, "messages"),
        (CHAT, {"messages": [{"role": "wizard", "content": "1+1="}]}, "messages"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (TEXT, {"echo": True}, "echo"),
        (TEXT, {"logprobs": 5}, "logprobs"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named(url, path, more, field):
    body = {"messages": [user("1+1=")]} if path == CHAT else {"prompt": "1+1="}
    status, answer = post(url, path, {**body, "max_tokens": 2, **more})
    assert (status, answer["error"]["param"]) == (400, field)
    assert field in answer["error"]["message"] or field in ("messages", "prompt")


def test_half_of_a_surrogate_pair_is_refused(url):
    for path, body in ((CHAT, {"messages": [user("\ud800")]}), (TEXT, {"prompt": "1\udfff"})):
        status, answer = post(url, path, body)
        assert (status, "surrogate" in answer["error"]["message"]) == (400, True)
    assert post(url, TEXT, {"prompt": "1\U0001f600+1=", "max_tokens": 2})[0] == 200, "a whole pair is a character"


def test_an_unexpected_exception_is_answered_as_json(url, monkeypatch):
    monkeypatch.setattr(served_model, "plain_messages", lambda messages: messages[0]["missing"])
    status, answer = post(url, CHAT, {"messages": [user("1+1=")]})
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "KeyError: 'missing'" in answer["error"]["message"]


def test_fields_without_effect_are_accepted(client):
    chat(client, frequency_penalty=0, presence_penalty=0, logit_bias={}, user="me", response_format={"type": "text"})
    chat(client, temperature=None, stop=None, tool_choice="auto", extra_body={"top_logprobs": 0})


def test_a_request_beyond_the_context_says_how_long_it_is(client):
    for fields in ({"max_tokens": 10**6}, {"messages": [user("1" * 5000)]}, {"messages": [user("1" * 500_000)]}):
        with pytest.raises(openai.BadRequestError, match="context") as refused:
            client.chat.completions.create(**{"model": "policy", "messages": [user("1+1=")]} | fields)
        assert refused.value.body["code"] == "context_length_exceeded"


def test_what_a_client_does_not_wait_for_is_dropped(context, client, monkeypatch):
    monkeypatch.setattr(served_model, "_SEGMENT", 1)
    first = next(iter(chat(client, temperature=0, max_tokens=12, stream=True)))
    assert first.choices
    sizes = []
    sample = context.sampler.sample
    monkeypatch.setattr(context.sampler, "sample", lambda *given: (sizes.append(len(given[0])), sample(*given))[1])
    # Until the server has noticed that the connection is closed, both are sampled.
    assert until(lambda: chat(client, temperature=0, max_tokens=3) and sizes[-1] == 1)


@pytest.mark.slow
def test_nothing_is_kept_of_a_request(url):
    def objects(count):
        for number in range(count):
            body = {"messages": [user(f"{number}+34=")], "max_tokens": 2}
            assert post(url, CHAT, body)[0] == 200
        gc.collect()
        return len(gc.get_objects())

    before = objects(200)
    assert objects(1000) - before < 500, "less than one object for two requests"


def test_an_answer_in_progress_is_refused_when_the_server_ends(context, monkeypatch):
    sample = context.sampler.sample
    monkeypatch.setattr(context.sampler, "sample", lambda *given: (endpoint.request_stop(), sample(*given))[1])
    monkeypatch.setattr(served_model, "_SEGMENT", 1)
    with closing(ServedModel(context, Access("127.0.0.1"))) as endpoint:
        thread = threading.Thread(target=endpoint.work)
        thread.start()
        client = openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.InternalServerError, match="the server is ending"):
            client.completions.create(model="policy", prompt="12+34=", temperature=0, max_tokens=48)
        thread.join()
