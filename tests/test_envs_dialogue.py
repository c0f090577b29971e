"""The service desk, its customers, and the bargain: suites, rules of the shop, and what is rewarded."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from palestra.agents.play import play
from palestra.agents.scripted import ScriptedPolicy
from palestra.agents.types import Limits
from palestra.envs.core import MessageEnv
from palestra.envs.dialogue import shop as shops
from palestra.envs.dialogue.errands import errands, goal_of
from palestra.envs.dialogue.negotiation import ROUNDS, Negotiation
from palestra.envs.dialogue.servicedesk import ServiceDesk
from palestra.envs.dialogue.user import PATIENCE, ScriptedUser, read_user
from palestra.envs.registry import register_builtin
from palestra.envs.types import EnvError, Episode, Message, StopReason, Task
from tests.conformance.env_suite import FUZZED, EnvSuite

register_builtin("palestra/ServiceDesk-v0", "palestra.envs.dialogue.servicedesk:ServiceDesk")
register_builtin("palestra/Negotiation-v0", "palestra.envs.dialogue.negotiation:Negotiation")


class TestServiceDeskSuite(EnvSuite):
    env_id = "palestra/ServiceDesk-v0"


class BargainSuite(EnvSuite):
    """A bargain goes on after a malformed message."""

    env_id = "palestra/Negotiation-v0"

    @pytest.mark.parametrize("message", FUZZED)
    def test_whatever_a_model_writes_is_answered(self, env: Any, message: Message) -> None:
        env.reset(seed=0)
        observation, reward, ended, _, _ = env.step(message)
        assert (reward, ended) == (0.0, False)
        assert len(observation) == len(message.get("tool_calls") or ()) + 1
        assert "End your message with one line" in observation[-1]["content"]

    def test_a_time_limit_is_scored(self, env: Any, inner: MessageEnv) -> None:
        episode = play(env, ScriptedPolicy(["hm"]), Limits(max_turns=1), task=0, seed=0)
        assert (episode.truncated, episode.stop_reason, episode.reward.value) == (True, StopReason.MAX_TURNS, 0.0)


class TestBuyerSuite(BargainSuite):
    pass


class TestSellerSuite(BargainSuite):
    args = {"role": "seller", "seed": 5}  # noqa: RUF012


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def call(name: str, **arguments: Any) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


class TestShop:
    def test_a_seed_gives_the_same_shop_and_every_kind_of_errand_finds_its_order(self) -> None:
        assert shops.make_shop("a") == shops.make_shop("a") != shops.make_shop("b")
        tasks = errands(seed=3, size=60)
        assert len({json.dumps(tasks[index].answer) for index in range(60)}) > 40
        for index in range(60):
            task = tasks[index]
            changed = goal_of(task) != shops.make_shop(task.meta["shop"])
            assert changed is bool(task.answer["actions"])
            assert bool(task.answer["amounts"]) or task.answer["status"] is not None

    def test_the_rules(self) -> None:
        shop = shops.make_shop("rules")
        pending = next(order for order, data in shop["orders"].items() if data["status"] == "pending")
        other = next(order for order, data in shop["orders"].items() if data["status"] == "delivered")
        with pytest.raises(ValueError, match="reason must be one of"):
            shops.cancel(shop, pending, "bored")
        with pytest.raises(ValueError, match="is delivered; this is for pending orders only"):
            shops.cancel(shop, other, shops.REASONS[0])
        with pytest.raises(ValueError, match="there is no order W0"):
            shops.change_address(shop, "W0", "1 A", "B", "C")
        with pytest.raises(ValueError, match="not items of the order"):
            shops.return_items(shop, other, ["P99"])
        sku = shop["orders"][other]["items"][0]
        with pytest.raises(ValueError, match="not items of the order"):
            shops.return_items(shop, other, [sku, sku])
        shops.return_items(shop, other, [sku])
        assert shop["orders"][other]["refund"] == shop["products"][sku]["price"]
        with pytest.raises(ValueError, match="is return requested"):
            shops.return_items(shop, other, [sku])
        shops.cancel(shop, pending, shops.REASONS[0])
        assert shop["orders"][pending]["refund"] == shop["orders"][pending]["total"]

    def test_exchanges(self) -> None:
        shop = shops.make_shop("exchange")
        order = next(data for data in shop["orders"].values() if data["status"] == "pending")
        number = next(key for key, value in shop["orders"].items() if value is order)
        sku = order["items"][0]
        same = [other for other in shops.options_of(shop, shop["products"][sku]["name"]) if other != sku]
        shop["products"][same[0]]["in_stock"], shop["products"][same[1]]["in_stock"] = True, False
        strange = next(other for other in shop["products"] if other[:2] != sku[:2])
        for wrong, says in ((sku, "not another option"), (strange, "not another option"), (same[1], "not in stock")):
            with pytest.raises(ValueError, match=says):
                shops.exchange(shop, number, sku, wrong)
        shops.exchange(shop, number, sku, same[0])
        assert order["items"][0] == same[0]
        assert order["total"] == shops.total(shop["products"], order["items"])


class TestCustomer:
    knows = {"email": "a@b.c", "order": "W1", "name": "Ada", "reason": "It was ordered by mistake."}  # noqa: RUF012

    def test_it_answers_what_it_is_asked_and_says_more_where_it_does_not_understand(self) -> None:
        user = ScriptedUser(self.knows)
        assert user.reply("Your e-mail and order number?") == "My email is a@b.c. The order number is W1."
        assert user.reply("And what else?") == "It was ordered by mistake."
        assert user.reply("Shall I do that?") == "Yes, please go ahead."
        assert user.reply("It is done.") is None

    def test_its_patience_ends(self) -> None:
        user = ScriptedUser(self.knows)
        answers = [user.reply("Hm?") for _ in range(PATIENCE + 1)]
        assert answers[-1] is None
        assert None not in answers[:-1]

    @pytest.mark.parametrize(
        ("value", "says"),
        [
            ("model", "'scripted' or a table"),
            ({"model": "m"}, "base_url is missing"),
            ({"base_url": "u", "model": "m", "key": "k"}, "unknown key"),
        ],
    )
    def test_other_customers_are_refused(self, value: Any, says: str) -> None:
        with pytest.raises(ValueError, match=says):
            read_user(value)


def of_kind(kind: str) -> Task:
    tasks = errands(size=60)
    return next(tasks[index] for index in range(60) if tasks[index].meta["kind"] == kind)


def served(task: Task, *script: Message, turns: int = 12) -> Episode:
    return play(ServiceDesk(), ScriptedPolicy(script), Limits(max_turns=turns), task=task, seed=0)


class TestDesk:
    def test_nothing_is_changed_before_the_customer_was_found_nor_for_another_one(self) -> None:
        task = of_kind("cancel")
        env = ServiceDesk()
        env.reset(options={"task": task})
        before = shops.make_shop(task.meta["shop"])
        cancel = call("cancel_order", order_id=task.meta["order"], reason=shops.REASONS[0])
        assert "find the customer by email first" in env.step(cancel)[0][0]["content"]
        stranger = next(user for user in before["users"].values() if user["email"] != task.meta["knows"]["email"])
        env.step(call("find_user", email=stranger["email"]))
        assert "the customer has no such order" in env.step(cancel)[0][0]["content"]
        assert env.shop == before
        assert "no customer with this email" in env.step(call("find_user", email="x@y.z"))[0][0]["content"]

    def test_the_database_and_what_was_told_are_two_things(self) -> None:
        task = of_kind("cancel")
        oracle = ServiceDesk().oracle(task)
        amount = f"${task.answer['amounts'][0]:.2f}"
        for last, value, told in (
            (f"You get {amount} back.", 1.0, 1.0),
            (f"You get {amount} back, of {amount}.", 1.0, 1.0),
            ("It is cancelled.", 0.5, 0.0),
            (f"You get {amount} or $1.00.", 0.5, 0.0),
            (f"You get {amount}0.", 0.5, 0.0),
            (f"You get {amount}" + " and more" * 300, 0.5, 0.0),
        ):
            reward = served(task, *oracle[:-1], say(last)).reward
            assert (reward.value, reward.components) == (value, {"database": 1.0, "told": told}), last
        reward = served(task, *oracle[:2], say(f"You get {amount} back.")).reward
        assert (reward.value, reward.components["told"]) == (0.0, 1.0)

    def test_more_than_was_asked_for_is_wrong(self) -> None:
        task = of_kind("move")
        *steps, last = ServiceDesk().oracle(task)
        extra = call("cancel_order", order_id=task.meta["order"], reason=shops.REASONS[0])
        assert served(task, *steps, last).reward.value == 1.0
        assert served(task, *steps, extra, last).reward.value == 0.0

    def test_what_is_forbidden_stays_undone_and_is_said(self) -> None:
        task = of_kind("refused")
        *steps, _ = ServiceDesk().oracle(task)
        status = task.answer["status"]
        forbidden = call("cancel_order", order_id=task.meta["order"], reason=shops.REASONS[0])
        said = say(f"Only pending orders can be cancelled, and yours is {status}.")
        assert "this is for pending orders only" in served(task, *steps, forbidden, said).messages[-2]["content"]
        assert served(task, *steps, forbidden, said).reward.value == 1.0
        assert served(task, *steps, say("No.")).reward.value == 0.0
        assert served(task, *steps, say("It is pending, shipped and delivered.")).reward.value == 0.0

    def test_an_agent_that_played_by_itself_is_scored_by_its_calls(self) -> None:
        task = of_kind("exchange")
        env = ServiceDesk()
        env.reset(options={"task": task})
        transcript: list[Message] = []
        for message in env.oracle(task):
            transcript += [message, *env.step(message)[0]]
        env.reset(options={"task": task})
        assert env.grade(transcript).reward.value == 1.0  # type: ignore[union-attr]
        env.reset(options={"task": task})
        assert env.grade(transcript[-1:]).reward.value == 0.0  # type: ignore[union-attr]


class Customer(BaseHTTPRequestHandler):
    """An OpenAI endpoint that says what its server was told to say, in order; the last one again."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: Any = self.server
        server.asked.append((self.headers["Authorization"], body))
        text = server.says[min(len(server.asked), len(server.says)) - 1]
        answer = json.dumps(
            {
                "id": "x",
                "object": "chat.completion",
                "created": 0,
                "model": "m",
                "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
            }
        ).encode()
        self.send_response(200 if text is not None else 400)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def customer() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Customer)
    server.asked, server.says = [], ["hello"]
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


class TestModelCustomer:
    def test_a_second_model_plays_the_customer(self, customer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUSTOMER_KEY", "secret")
        task = of_kind("cancel")
        *_, cancel, last = ServiceDesk().oracle(task)
        knows = task.meta["knows"]
        customer.says = [f"It is {knows['email']}.", "Thanks! [END]"]
        env = ServiceDesk(user={"base_url": customer.url, "model": "m", "api_key_env": "CUSTOMER_KEY"})
        script = [say("Your email?"), call("find_user", email=knows["email"]), cancel, last]
        episode = play(env, ScriptedPolicy(script), Limits(), task=task, seed=0)
        assert episode.reward.value == 1.0
        assert episode.messages[3] == {"role": "user", "content": f"It is {knows['email']}."}
        (key, first), (_, second) = customer.asked
        assert (key, first["model"], first["temperature"]) == ("Bearer secret", "m", 0.0)
        assert knows["reason"] in first["messages"][0]["content"]
        roles = [message["role"] for message in second["messages"]]
        assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
        assert "tool_calls" not in json.dumps(second)

    @pytest.mark.parametrize("text", [None, ""])
    def test_one_that_fails_is_a_fault_and_no_zero(self, customer: Any, text: Any) -> None:
        customer.says = [text]
        env = ServiceDesk(user={"base_url": customer.url, "model": "m"})
        episode = play(env, ScriptedPolicy([say("Your email?")]), Limits(), task=0, seed=0)
        assert (episode.stop_reason, episode.reward.value) == (StopReason.INFRA, None)
        assert "the user model m" in (episode.error or "")

    def test_a_missing_key_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("NO_SUCH_KEY", raising=False)
        env = ServiceDesk(user={"base_url": "http://127.0.0.1:9/v1", "model": "m", "api_key_env": "NO_SUCH_KEY"})
        env.reset(seed=0)
        with pytest.raises(EnvError, match="NO_SUCH_KEY is not set"):
            env.step(say("Your email?"))


BARGAIN = Task("Agree on a price.", None, "b", {"goods": "a canoe", "buyer": 100, "seller": 60})


def bargain(*script: str, role: str = "buyer", turns: int = 20) -> Episode:
    env = Negotiation(role=role)
    return play(env, ScriptedPolicy([say(text) for text in script]), Limits(max_turns=turns), task=BARGAIN, seed=0)


class TestBargain:
    @pytest.mark.parametrize(
        ("script", "share", "stop"),
        [
            (["offer 120"], -0.5, StopReason.ANSWER),
            (["offer 200"], -1.0, StopReason.ANSWER),
            (["offer 1", "accept"], -0.5, StopReason.ANSWER),
            (["offer 1"] * 4 + ["offer 60"], 1.0, StopReason.ANSWER),
            (["offer 1"] * 4 + ["offer 59"], 0.0, StopReason.ENV_DONE),
            (["offer 70", "Fine.\nOffer $80.", "offer 80", "offer 80"], 0.5, StopReason.ANSWER),
            (["Walk away."], 0.0, StopReason.ENV_DONE),
            (["accept"], 0.0, StopReason.ENV_DONE),
            (["I offer 60"], 0.0, StopReason.ENV_DONE),
            (["offer 60 or 70"], 0.0, StopReason.ENV_DONE),
            (["offer 12.5"], 0.0, StopReason.ENV_DONE),
        ],
    )
    def test_a_buyers_table(self, script: list[str], share: float, stop: StopReason) -> None:
        episode = bargain(*script)
        assert episode.reward.value == pytest.approx(share)
        assert episode.stop_reason is stop

    def test_the_seller_hears_the_first_offer_with_its_briefing(self) -> None:
        episode = bargain("accept", role="seller")
        assert [message["role"] for message in episode.messages] == ["system", "user", "user", "assistant"]
        assert "offer 50" in episode.messages[2]["content"]
        assert episode.reward.value == pytest.approx(-0.25)
        assert not any("100" in message["content"] for message in episode.messages), "the other side's limit is its own"

    def test_a_message_reaches_the_other_side_with_what_is_left(self) -> None:
        env = Negotiation()
        env.reset_roles(BARGAIN, 0)
        turn = env.step_role("buyer", say("It is old.\noffer 40"))
        assert turn.heard["seller"][0]["content"].startswith(f"It is old.\noffer 40\n\n({ROUNDS} of your messages")
        with pytest.raises(EnvError, match="it is seller's turn"):
            env.step_role("buyer", say("offer 41"))

    def test_a_player_by_itself_is_scored_by_its_offers(self) -> None:
        env = Negotiation()
        env.reset(options={"task": BARGAIN})
        said = [say("offer 1")] * 4 + [say("offer 60"), say("offer 100")]
        assert env.grade(said).reward.value == pytest.approx(1.0)  # type: ignore[union-attr]

    def test_an_unknown_role_is_refused(self) -> None:
        with pytest.raises(ValueError, match="role must be one of"):
            Negotiation(role="judge")
