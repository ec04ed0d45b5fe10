"""The page at `/`, in a real browser."""

from __future__ import annotations

import base64
import io
import os
import signal
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from canvasrt.bundle import load_bundle
from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.serve import about_model
from canvasrt.containers.serve.server import Server
from canvasrt.containers.serve.serving_profiles import choose_profile
from tests.helpers import library
from tests.helpers.web_page import MARKS, ask

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
sync_api.expect.set_options(timeout=60_000)  # milliseconds; a busy machine needs more than 5,000
pytestmark = MARKS


def opened(visit: Any, front: FrontEnd) -> Any:
    """Open the page, and wait until it has found the model."""
    page = visit(front)
    sync_api.expect(page.locator("#light")).to_have_class("on")
    page.locator("#settings").evaluate("each => { each.open = true }")
    return page


def states(page: Any) -> list[str]:
    """Return the displayed state of every position."""
    found = page.locator("#canvas b").evaluate_all("all => all.map(b => b.className)")
    return [each.split()[0] for each in found]


def go_to(page: Any, step: int) -> None:
    page.locator("#slider").evaluate(
        "(each, step) => { each.value = step; each.dispatchEvent(new Event('input')) }", step
    )


def test_an_answer_is_shown_step_by_step(front: FrontEnd, openai: Any, visit: Any) -> None:
    page = visit(front)
    ask(page, "12+34=", seed="7", steps="6", tokens="40", settle="0")
    expected = openai.chat.completions.create(
        model="canvasrt",
        messages=[{"role": "user", "content": "12+34="}],
        seed=7,
        max_tokens=40,
        extra_body={"max_denoising_steps": 6},
    )
    steps = expected.usage.denoising_steps
    assert page.locator("#answer").text_content() == expected.choices[0].message.content
    assert page.inner_text("#f-steps") == str(steps)
    assert page.inner_text("#f-pass") == f"{40 / steps:.1f}"
    assert page.inner_text("#f-seed") == "7"
    assert page.inner_text("#f-first").endswith("ms")
    frames = int(page.get_attribute("#slider", "max")) + 1
    assert frames == steps + 2  # and a last frame for each of the two blocks
    assert states(page) == ["settled"] * 64


def test_the_slider_goes_back_through_the_steps(front: FrontEnd, visit: Any) -> None:
    page = visit(front)
    ask(page, "12+34=", seed="7", steps="6", tokens="40", settle="0")
    go_to(page, 0)
    assert page.inner_text("#where") == "block 1, step 1"
    first = states(page)
    assert len(first) == 32
    assert {"noise", "accepted"} == set(first)
    seen = set()
    for step in range(6):
        go_to(page, step)
        seen |= set(states(page))
    assert seen == {"noise", "accepted", "renoised"}
    go_to(page, 6)
    assert page.inner_text("#where") == "block 1, done in 6"
    assert set(states(page)) == {"settled"}
    noisy = page.locator("#canvas").text_content()
    go_to(page, 1)
    page.check("[name=view][value=best]", force=True)
    assert page.locator("#canvas").text_content() != noisy


def test_there_is_one_temperature(front: FrontEnd, visit: Any) -> None:
    page = visit(front)
    for given in ("0", ""):
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "12+34=", seed="7", steps="2", tokens="32", temperature=given)
        body = sent.value.post_data_json
        assert [body.get(name) for name in ("temperature", "t_min", "t_max")] == [
            0 if given else None,
            None,
            None,
        ]


def test_a_wrong_setting_is_explained(front: FrontEnd, visit: Any) -> None:
    page = opened(visit, front)
    page.fill("#prompt", "12+34=")
    page.fill("#steps", "0")
    page.click("#go")
    sync_api.expect(page.locator("#error")).to_contain_text("max_denoising_steps")


def test_a_server_with_keys_asks_for_one(server: Server, visit: Any) -> None:
    options = FrontOptions(port=0, keys=("open-sesame",), about={"vision": True})
    with FrontEnd.over(server, options) as guarded:
        page = visit(guarded)
        sync_api.expect(page.locator("#state")).to_have_text("this server needs an API key")
        # The prompt is sent while the page still checks the key.
        page.evaluate("""() => {
            $("key").value = "open-sesame";
            $("key").dispatchEvent(new Event("change"));
            $("prompt").value = "12+34=";
            $("ask").requestSubmit();
        }""")
        sync_api.expect(page.locator("#f-total")).not_to_have_text("–")
        assert page.inner_text("#f-steps") != "–"
        assert page.locator("#attach").is_visible()


def test_an_image_is_attached_seen_and_sent(front: FrontEnd, visit: Any) -> None:
    """This model does not take images, so the server's error shows that the image arrived."""
    page = opened(visit, front)
    picture = io.BytesIO()
    Image.new("RGB", (20, 12), "teal").save(picture, "PNG")
    file = {"name": "teal.png", "mimeType": "image/png", "buffer": picture.getvalue()}
    # The first image is large and takes longer to read, but must stay the first.
    large = file | {"name": "large.png", "buffer": picture.getvalue() + bytes(10**6)}
    page.set_input_files("#files", [large, file])
    sync_api.expect(page.locator("#attached img")).to_have_count(2)
    names = page.locator("#attached img").evaluate_all("all => all.map((each) => each.alt)")
    assert names == ["large.png", "teal.png"]
    page.locator("#attached button").first.click()
    sync_api.expect(page.locator("#attached img")).to_have_count(1)
    assert page.locator("#attached img").evaluate("image => image.naturalWidth") == 20
    page.fill("#prompt", "what is this?")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.click("#go")
    image, text = sent.value.post_data_json["messages"][0]["content"]
    url = image["image_url"]["url"]
    assert base64.b64decode(url.removeprefix("data:image/png;base64,")) == picture.getvalue()
    assert text == {"type": "text", "text": "what is this?"}
    sync_api.expect(page.locator("#error")).to_contain_text("image")
    page.check("[name=mode][value=decide]", force=True)
    with page.expect_request("**/v1/decisions") as sent:
        page.click("#go")
    (message,) = sent.value.post_data_json["input"]
    assert message["content"] == [
        {"type": "input_image", "image_url": url},
        {"type": "input_text", "text": "what is this?"},
    ]
    sync_api.expect(page.locator("#error")).to_contain_text("image")
    page.locator("#attached button").click()
    page.click("#go")
    sync_api.expect(page.locator(".choice")).to_have_count(2)


def test_a_decision_is_shown_as_bars(front: FrontEnd, openai: Any, visit: Any) -> None:
    page = opened(visit, front)
    assert page.locator("#mode").is_visible()
    page.check("[name=mode][value=decide]", force=True)
    page.fill("#prompt", "the train is late")
    page.fill("#asked", "What is it?")
    page.fill("#options", "train, bus")
    page.fill("#seed", "7")
    page.click("#go")
    sync_api.expect(page.locator(".choice")).to_have_count(2, timeout=60_000)
    choices = [{"value": "train"}, {"value": "bus"}]
    reply = openai.decisions.create(
        model="canvasrt",
        input="the train is late",
        questions=[{"type": "choice", "instructions": "What is it?", "choices": choices}],
        extra_body={"seed": 7, "samples": 4, "layout": "letters"},
    )
    (answer,) = reply.answers
    shown = page.locator(".choice b").all_text_contents()
    assert shown == [f"{100 * each.probability:.1f}%" for each in answer.probabilities]
    page.fill("#options", "")
    page.click("#go")
    sync_api.expect(page.locator(".choice span")).to_have_text(["yes", "no"], timeout=60_000)
    page.check("[name=mode][value=write]", force=True)
    assert not page.locator("#decision").is_visible()


@pytest.mark.parametrize(
    ("mode", "field", "value"),
    [("write", "temperature", "1e400"), ("decide", "seed", "1e400"), ("decide", "samples", "four")],
)
def test_a_number_that_is_not_finite_is_refused(
    front: FrontEnd, visit: Any, mode: str, field: str, value: str
) -> None:
    page = opened(visit, front)
    page.check(f"[name=mode][value={mode}]", force=True)
    page.fill("#prompt", "12+34=")
    page.fill(f"#{field}", value)
    asked = []
    page.on("request", lambda request: asked.append(request.method))
    page.click("#go")
    said = f"{field} is {value}: give a finite number"
    sync_api.expect(page.locator("#error")).to_have_text(said)
    assert "POST" not in asked


def test_earlier_turns_are_sent_until_a_new_chat(front: FrontEnd, visit: Any) -> None:
    page = visit(front)
    answers = []
    for prompt in ("12+34=", "and 5?", "and 6?"):
        if prompt == "and 6?":
            page.click("#new")
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, prompt, steps="4", tokens="32")
        told = [each["content"] for each in sent.value.post_data_json["messages"]]
        answers.append(page.locator("#answer").text_content())
        assert told == (["12+34=", answers[0], "and 5?"] if prompt == "and 5?" else [prompt])


def test_an_answer_that_breaks_off_is_not_taken_for_whole(front: FrontEnd, visit: Any) -> None:
    """If the server is gone, a proxy may still end the response properly."""
    page = opened(visit, front)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=""))
    page.fill("#prompt", "12+34=")
    page.click("#go")
    sync_api.expect(page.locator("#error")).to_contain_text("the server went away")
    assert not page.locator("#chat").is_visible()


def test_copy_buttons_copy_their_answers(front: FrontEnd, visit: Any) -> None:
    page = visit(front)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.evaluate("clipboard = navigator.clipboard")
    answers = []
    for prompt in ("12+34=", "and 5?"):
        ask(page, prompt, steps="4", tokens="32")
        answers.append(page.locator("#answer").text_content())
    assert answers[0] != answers[1]
    buttons = page.locator("#turns button, #copy")
    for absent in (False, True):  # over plain HTTP, there is no `navigator.clipboard`
        if absent:
            page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        for number, answer in enumerate(reversed(answers)):
            page.evaluate("clipboard.writeText('nothing')")
            buttons.nth(number).click()
            sync_api.expect(buttons.nth(number)).to_have_text("Copied")
            assert page.evaluate("clipboard.readText()") == answer


def test_the_demo_s_examples_are_single_questions(server: Server, visit: Any) -> None:
    bundle = load_bundle(library.bundle("demo"))
    about = about_model(bundle, choose_profile(bundle), 1024)
    assert (about["vision"], about["demo"]) == (False, True)
    with FrontEnd.over(server, FrontOptions(port=0, about=about)) as front:
        page = visit(front)
        sync_api.expect(page.locator("#examples button")).to_have_count(5)
        assert not page.locator("#attach").is_visible()
        page.locator("#examples button").first.click()
        sync_api.expect(page.locator("#f-total")).not_to_have_text("–")
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "upper hello", steps="4", tokens="32")
        (message,) = sent.value.post_data_json["messages"]
        assert message["content"] == "upper hello"
        sync_api.expect(page.locator("#turns p").first).to_have_text("12+34=")


def test_a_server_that_goes_and_comes_back_is_seen(server: Server, visit: Any) -> None:
    options = FrontOptions(port=0)
    with FrontEnd.over(server, options) as front:
        page, port = opened(visit, front), front.port
    sync_api.expect(page.locator("#state")).to_have_text("the server does not answer")
    page.fill("#prompt", "12+34=")
    page.click("#go")
    sync_api.expect(page.locator("#error")).to_contain_text("the server went away")
    with FrontEnd.over(server, replace(options, port=port)):
        sync_api.expect(page.locator("#state")).to_have_text("canvasrt")
        ask(page, "12+34=", steps="4")


@pytest.mark.parametrize("signalled", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_goes_during_an_answer_is_seen(
    server: Server, visit: Any, signalled: signal.Signals
) -> None:
    with FrontEnd.over(server, FrontOptions(port=0)) as front:
        page = opened(visit, front)
        # The model's weights are random. Without this, some answers would end before the signal arrives.
        page.evaluate("body = ((made) => () => ({ ...made(), ignore_eos: true }))(body)")
        page.evaluate("$('tokens').value = 4000")
        page.fill("#prompt", "12+34=")
        page.click("#go")
        page.locator("#chart i").nth(2).wait_for(state="attached")
        os.kill(front.pid, signalled)
        try:
            said = page.locator("#state", has_text="the server does not answer")
            if signalled == signal.SIGKILL:
                said = page.locator("#error", has_text="the server went away")
            said.wait_for()
        finally:
            os.kill(front.pid, signal.SIGCONT)
            page.close()  # cancels the answer
