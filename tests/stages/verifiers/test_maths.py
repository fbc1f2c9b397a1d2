"""Where an answer is looked for, what equals it, and that nobody waits for algebra for ever."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pedigree.configs.base.problems import PedigreeError
from pedigree.stages.verifiers import VerifierError, check, maths, verify, worker
from pedigree.stages.verifiers.maths import candidates, equal, normalised


@pytest.fixture(autouse=True, scope="module")
def ended():
    yield
    worker.end()


PLACES = [
    (r"so \boxed{1} and at last \boxed{\frac{1}{2}}.", [r"\frac{1}{2}"]),
    (r"so \boxed 5$.", ["5"]),
    (r"so \fbox{7}", ["7"]),
    (r"so \boxed{7", None),  # never closed: the next rule
    ("Final Answer: The final answer is $x+1$. I hope it is correct.", ["x+1"]),
    (r"\boxed{3} Final Answer: The final answer is 4. I hope it is correct.", ["3", "4"]),
    ("it is $a$, then $b$.", ["b"]),
    ("costs 5$, it is $a$", ["a"]),
    ("forty-two", ["forty-two"]),
]


@pytest.mark.parametrize(("text", "found"), PLACES)
def test_the_answer_is_looked_for_in_its_places(text, found):
    assert list(candidates(text)) == ([text] if found is None else found)


SAME_TEXT = [
    (r"\frac12", r"\dfrac{1}{2}"),
    ("0.5", r"\frac{1}{2}"),
    ("3/4", r"\tfrac{3}{4}"),
    ("1,000", "1000"),
    ("x = 5", "5"),
    (r"5\text{ cm}", "5"),
    (r"90^\circ", "90"),
    (r"\left(1, 2\right)", "(1,2)"),
    (r"\sqrt3", r"\sqrt{3}"),
    (r"\text{Tuesday}", "Tuesday"),
    ("$12", "12"),
    (r"50\%", "50"),
    (".25", "0.25"),
]


@pytest.mark.parametrize(("one", "other"), SAME_TEXT)
def test_equal_expressions_are_equal_texts_after_normalisation(one, other):
    assert normalised(one) == normalised(other)


BY_ALGEBRA = [
    (r"\frac{2}{4}", r"\frac{1}{2}", True),
    ("x^2+2x+1", "(x+1)^2", True),
    (r"\{1,2\}", r"\{2,1\}", True),
    (r"\sqrt{8}", r"2\sqrt{2}", True),
    ("(1,2)", "(2,1)", False),
    ("x+1", "x-1", False),
    ("5", "6", False),
    ("", "5", False),
    ("a" * 5000, "5", False),
]


@pytest.mark.parametrize(("one", "other", "same"), BY_ALGEBRA)
def test_algebra_decides_where_texts_differ(one, other, same):
    assert equal(one, other) is same


def test_flex_takes_any_place_and_strict_only_minervas():
    boxed, minerva = r"\boxed{\frac{2}{4}}", r"Final Answer: The final answer is $\frac{2}{4}$. I hope it is correct."
    flex, strict = ({"name": name, "answer": r"\frac{1}{2}"} for name in ("math", "strict_math"))
    assert (verify(flex, boxed).score, verify(strict, boxed).score) == (1.0, 0.0)
    assert (verify(flex, minerva).score, verify(strict, minerva).score) == (1.0, 1.0)
    assert verify(strict, boxed).reason == "no answer in its place"


@pytest.mark.parametrize(
    ("text", "score"), [("5", 1.0), ("$5$\n", 1.0), ("x = 5", 1.0), ("6", 0.0), ("It is 5", 0.0), (r"So \boxed{5}", 0.0)]
)
def test_without_minervas_sentence_strict_takes_a_reply_that_is_the_answer_and_nothing_else(text, score):
    assert verify({"name": "strict_math", "answer": "5"}, text).score == score
    wrong = f"{text}\nFinal Answer: The final answer is $7$. I hope it is correct."
    assert verify({"name": "strict_math", "answer": "5"}, wrong).score == 0


def test_what_takes_too_long_is_no_verdict_and_the_next_question_is_answered(monkeypatch):
    monkeypatch.setattr(maths, "SECONDS", 1.0)
    with pytest.raises(VerifierError, match="no answer within 1 s"):
        verify({"name": "math", "answer": "5"}, r"\boxed{9^{9^{9^{9}}}}")
    monkeypatch.undo()
    assert verify({"name": "math", "answer": "5"}, r"\boxed{\frac{10}{2}}").score == 1.0


def test_a_process_that_ends_over_a_question_is_no_verdict():
    with pytest.raises(PedigreeError, match="ended"):
        worker.ask("os:_exit", (3,), 10.0)
    assert worker.ask("os:getpid", (), 10.0) != os.getpid()


def test_the_process_outlives_the_thread_that_asked_first():
    """As each suite is verified by threads of its own."""
    half, pids = {"name": "math", "answer": r"\frac{1}{2}"}, []
    worker.end()
    for _ in range(3):
        with ThreadPoolExecutor(1) as threads:
            given = [r"\boxed{0.50}", r"\boxed{2/4}"]
            assert [verdict.score for verdict in threads.map(lambda text: verify(half, text), given)] == [1.0, 1.0]
            pids.append(threads.submit(worker.ask, "os:getpid", (), 10.0).result())
        time.sleep(0.2)  # nothing is to happen, and a signal of a thread's death need not be there at once
    assert len(set(pids)) == 1


def test_a_process_that_was_killed_between_questions_says_nothing_about_the_next():
    os.kill(worker.ask("os:getpid", (), 10.0), signal.SIGKILL)
    worker._running[0].process.join()
    assert worker.ask("operator:add", (1, 2), 10.0) == 3


@pytest.mark.parametrize("verifier", [{"name": "math"}, {"name": "math", "answer": 5}, {"name": "strict_math", "answer": " "}])
def test_a_malformed_verifier_is_an_error(verifier):
    with pytest.raises(VerifierError):
        check(verifier)
